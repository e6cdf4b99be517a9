"""The peers' times, as they were measured on an H200 with the timers named in the table's first line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

TABLE = Path(__file__).with_name("peers_h200.jsonl")


class Peers(NamedTuple):
    """The table: what its first line says of machine and timers, and one row a measurement."""

    about: dict[str, Any]
    rows: list[dict[str, Any]]

    def best(self, op: str, direction: str, rows: int, hidden: int, attrs: dict[str, Any], accumulating: bool) -> dict[str, Any] | None:
        """The fastest peer's row for the same work; None where there is none."""
        found = [r for r in self.rows if r["op"] == op and r["direction"] == direction and _same(r, rows, hidden, attrs, accumulating)]
        return min(found, key=lambda r: r["time_us"], default=None)


def load(path: Path | None = None) -> Peers:
    """Read a table of peers; by default the one that ships."""
    lines = [json.loads(line) for line in (path or TABLE).read_text().splitlines() if line.strip()]
    about = next((line for line in lines if line.get("meta")), {})
    return Peers(about, [line for line in lines if not line.get("meta")])


def _same(row: dict[str, Any], rows: int, hidden: int, attrs: dict[str, Any], accumulating: bool) -> bool:
    args = row["args"]
    count = args.get("num_tokens") or math.prod(args.get("leading", [0]))
    if count != rows or args.get("hidden", hidden) != hidden:
        return False
    if "repeat" in args and args["repeat"] != attrs.get("repeat"):
        return False
    return ("accumulates" in args.get("note", "")) == accumulating
