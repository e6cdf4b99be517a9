"""`tk-kernels bench`: verify every case against its oracle, then time it; print, and write JSONL, CSV and plots."""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tk_core import registry
from tk_core.bench import peers
from tk_core.bench.cases import CASES, Case

COLUMNS = (  # noqa: SIM905
    "op direction variant rows hidden valid expanded launches timer us kernel_us bytes gbps copy_gbps of_copy peer peer_us ratio eager_us "
    "peak_mb"
).split()


class Entry(NamedTuple):
    """One row of the benchmark: an operation in one direction at one size."""

    case: Case
    direction: str
    rows: int
    hidden: int
    accumulating: bool = False

    @property
    def variant(self) -> str:
        """What distinguishes the row beside its sizes."""
        parts = [f"{k}={v}" for k, v in self.case.attrs.items() if k in ("repeat", "precision")]
        parts += [f"no {name}" for name in self.case.absent] + (["accumulating"] if self.accumulating else [])
        return " ".join(parts)

    @property
    def bytes(self) -> int:
        """The least that must be moved."""
        case = self.case
        expression = (
            case.forward_bytes if self.direction == "fwd" else case.accumulating_bytes if self.accumulating else case.backward_bytes
        )
        return case.count(expression, self.rows, self.hidden)


def entries(names: list[str], rows: list[int], hidden: list[int]) -> Iterator[Entry]:
    """Every row of the benchmark: each case and its variants."""
    for name in names or [name for name, case in CASES.items() if case.forward_bytes != "0"]:
        for case in CASES[registry.get(name).name].variants():
            for h in hidden if "H" in case.forward_bytes else hidden[-1:]:
                for t in rows:
                    yield Entry(case, "fwd", t, h)
                    yield Entry(case, "bwd", t, h)
                    if case.accumulating_bytes:
                        yield Entry(case, "bwd", t, h, True)


def main(args: argparse.Namespace) -> int:
    """Run the benchmark of the command line."""
    try:
        import torch
    except ImportError:
        print("the benchmark runs on torch tensors: pip install 'tk-kernels[torch,bench]'", file=sys.stderr)
        return 2
    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    rows = args.rows or ([8192] if device == "cuda" else [512])
    hidden = args.hidden or ([7168] if device == "cuda" else [1280])
    from tk_core.bench import measure

    if device == "cpu":
        torch.set_num_threads(1)  # kernels of the C target run on one thread; so does what they are compared with
    table = peers.load(args.compare)
    runner = measure.Runner(device)
    about = {"meta": True, "date": time.strftime("%Y-%m-%d"), **runner.about(), "timer": "event" if device == "cuda" else "wall"}
    print(" ".join(f"{k}={v}" for k, v in about.items() if k != "meta"))
    results, red = [], 0
    mhc = [name for name in args.ops if name in CASES]
    for entry in entries(mhc, rows, hidden) if mhc or not args.ops else ():
        wrong = runner.verify(entry)
        if wrong:
            red += 1
            print(f"{entry.case.op} {entry.direction} {entry.variant} {entry.rows} x {entry.hidden}: WRONG, not timed: {wrong}")
            continue
        row = runner.time(entry)
        peer = table.best(entry.case.op, entry.direction, entry.rows, entry.hidden, dict(entry.case.attrs), entry.accumulating)
        if peer is not None and device == "cuda" and peer["timer"] == "event":
            row |= {"peer": peer["peer"], "peer_us": peer["time_us"], "ratio": round(peer["time_us"] / row["us"], 3)}
        results.append(row)
        print(line(row), flush=True)
    public: list[Any] = []
    if device == "cuda" or args.ops:
        public += ((runner.quant, row) for row in measure.quant.all_rows(table, args.ops, args.rows, args.hidden))
        sizes = (args.rows, args.hidden) if device == "cuda" else (rows, hidden)
        public += ((runner.moe, row) for row in measure.moe.all_rows(table, args.ops, *sizes))
    for run, asked in public:
        row = run(asked)
        if "error" in row:
            red += 1
            print(f"{row['op']} {row['variant']} {extent(row)}: WRONG, not timed: {row['error']}", flush=True)
            continue
        if asked.peer is not None and device == "cuda":
            row |= {"peer": asked.peer["peer"], "peer_us": asked.peer["time_us"], "ratio": round(asked.peer["time_us"] / row["us"], 3)}
        results.append(row)
        print(line(row), flush=True)
    host = [] if args.no_host else runner.host()
    for row in host:
        print(" ".join(f"{k}={v}" for k, v in row.items()), flush=True)
    write(args.out, about, results, host)
    print(f"wrote {args.out}/bench.jsonl, bench.csv and plots; {red} cases wrong")
    return 1 if red else 0


def extent(row: dict[str, Any]) -> str:
    """Rows and columns; of routing operations tokens, assignments and rows of the expert-major buffer."""
    if row.get("area") != "moe":
        return f"{row['rows']:6} x {row['hidden']:5}"
    return " ".join(f"{k}={row[name]}" for k, name in (("T", "rows"), ("V", "valid"), ("N", "expanded")) if row.get(name) is not None)


def line(row: dict[str, Any]) -> str:
    """A row as people read it."""
    name = f"{row['op']:22} {row['direction']} {row['variant']:28} {extent(row)}"
    text = f"{name} {row['us']:9.2f} us {row['gbps']:7.0f} GB/s"
    if row.get("of_copy"):
        text += f"  {row['of_copy']:5.1%} of a copy"
    if row.get("peer_us"):
        text += f"  peer {row['peer_us']:8.2f} us, ratio {row['ratio']:.2f}"
    if row.get("eager_us"):
        text += f"  eager {row['eager_us']:9.2f} us, {row['eager_us'] / row['us']:.1f}x"
    if row.get("launches", 1) != 1:
        text += f"  {row['launches']} launches"
    return text + (f"  peak {row['peak_mb']} MB" if row.get("peak_mb") is not None else "")


def markdown(about: dict[str, Any], results: list[dict[str, Any]], host: list[dict[str, Any]]) -> str:
    """The results as tables for a document."""
    facts = ", ".join(f"{k} {v}" for k, v in about.items() if k != "meta")
    header = ("operation", "", "rows x hidden", "us", "bytes, MB", "GB/s", "of a copy", "better peer, us", "ratio", "eager, us")
    routed = [r for r in results if r.get("area") == "moe"]
    plain, casts = [r for r in results if "timer" not in r], [r for r in results if "timer" in r and r not in routed]
    lines = [facts]
    if plain:
        lines += ["", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for r in plain:
        peer = f"{r['peer']}: {r['peer_us']}" if r.get("peer_us") else ""
        size, share = f"{r['rows']} x {r['hidden']}", f"{r['of_copy']:.1%}"
        cells = (f"`{r['op']}`", f"{r['direction']} {r['variant']}".strip(), size, r["us"], f"{r['bytes'] / 1e6:.1f}", r["gbps"], share)
        lines.append("| " + " | ".join(map(str, (*cells, peer, r.get("ratio", ""), r.get("eager_us", "")))) + " |")
    if casts:
        header = ("cast", "call", "rows x hidden", "timer", "us", "bytes, MB", "floor, us", "of a copy", "peer, us", "ratio")
        lines += ["", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for r in casts:
        # the floor is a copy of as many bytes in the same run
        floor, size = f"{r['us'] * r['of_copy']:.1f}", f"{r['rows']} x {r['hidden']}"
        peer = f"{r['peer'].removeprefix('TileKernels ')}: {r['peer_us']}" if r.get("peer_us") else ""
        cells = (f"`{r['op']}`", r["variant"], size, r["timer"], r["us"], f"{r['bytes'] / 1e6:.1f}", floor, f"{r['of_copy']:.1%}", peer)
        lines.append("| " + " | ".join(map(str, (*cells, r.get("ratio", "")))) + " |")
    if routed:
        header = ("operation", "", "T", "V", "N", "launches", "timer", "us", "bytes, MB", "GB/s", "of a copy", "peer, us", "ratio")
        lines += ["", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for r in routed:
        peer = f"{r['peer'].removeprefix('TileKernels ')}: {r['peer_us']}" if r.get("peer_us") else ""
        sizes = ("" if r[name] is None else r[name] for name in ("rows", "valid", "expanded"))
        cells = (f"`{r['op']}`", f"{r['direction']} {r['variant']}", *sizes, r["launches"], r["timer"], r["us"], f"{r['bytes'] / 1e6:.2f}")
        lines.append("| " + " | ".join(map(str, (*cells, r["gbps"], f"{r['of_copy']:.1%}", peer, r.get("ratio", "")))) + " |")
    if host:
        lines += ["", "| framework | host cost of one call, 8 rows | operation | us |", "|---|---|---|---|"]
        lines += [f"| {r['framework']} | {r['what']} | `{r['op']}` | {r['us']} |" for r in host]
    return "\n".join(lines) + "\n"


def write(out: Path, about: dict[str, Any], results: list[dict[str, Any]], host: list[dict[str, Any]]) -> None:
    """JSONL with everything, CSV and Markdown with the table, one PNG a family."""
    out.mkdir(parents=True, exist_ok=True)
    lines = [about, *results, *({"host": True, **row} for row in host)]
    (out / "bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    with open(out / "bench.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(results)
    (out / "bench.md").write_text(markdown(about, results, host))
    try:
        from tk_core.bench import plots
    except ImportError:
        print("no matplotlib: no plots (pip install 'tk-kernels[bench]')", file=sys.stderr)
        return
    plots.draw(out, about, [row for row in results if row.get("area") != "moe"])
