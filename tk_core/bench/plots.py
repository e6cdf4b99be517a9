"""One picture a family of operations: the time of every row beside its byte floor and the better peer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from tk_core import registry


def draw(out: Path, about: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """Write `<area>.png` for every area that has results."""
    areas: dict[str, list[dict[str, Any]]] = {}
    for row in results:
        # rows of casts name public functions, not operations
        areas.setdefault("quant" if "timer" in row else registry.get(row["op"]).area, []).append(row)
    for area, rows in areas.items():
        figure, axis = plt.subplots(figsize=(11, 1.5 + 0.42 * len(rows)))
        names = [f"{r['op']} {r['direction']} {r['variant']} {r['rows']}x{r['hidden']}" for r in rows]
        places = range(len(rows))
        axis.barh(places, [r["us"] for r in rows], 0.5, label="this library", color="tab:blue")
        floors = [r["bytes"] / r["copy_gbps"] / 1e3 if r.get("copy_gbps") else None for r in rows]
        others = {"copy of as many bytes": (floors, "black", "|"), "better peer": ([r.get("peer_us") for r in rows], "tab:red", "D")}
        others["eager torch"] = ([r.get("eager_us") for r in rows], "tab:orange", "o")
        for label, (values, colour, marker) in others.items():
            known = [(v, p) for v, p in zip(values, places, strict=True) if v]
            if known:
                axis.scatter(*zip(*known, strict=True), label=label, color=colour, marker=marker, s=60, zorder=3)
        axis.set_yticks(list(places), names, fontsize=8)
        axis.invert_yaxis()
        axis.set_xscale("log")
        axis.set_xlabel("microseconds")
        axis.set_title(f"{area}: {about.get('device', '')}, {about['date']}", fontsize=10)
        axis.legend(fontsize=8)
        figure.tight_layout()
        figure.savefig(out / f"{area}.png", dpi=110)
        plt.close(figure)
