"""`python -m tk_core`, the same as `tk-kernels`: info | ops | compile | show | cache | bench."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tk_core.device import ARCHS


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("interrupted: what was finished is in the cache, nothing is half-written", file=sys.stderr)
        return 130
    except KeyError as error:
        print(error.args[0], file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the reader has gone; nothing more may be flushed to it
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "tk-kernels", description="Kernels for PyTorch and JAX: environment, operations, compiler, cache, benchmarks."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    sub = command("info", _info, "Report the environment; compares what is installed with what is wanted.")
    sub.add_argument("--json", action="store_true")
    sub = command("ops", _ops, "List the operations: signatures, attributes, gradients.")
    sub.add_argument("--json", action="store_true")
    sub = command("compile", _compile, "Compile kernels into the cache ahead of time; needs no GPU.")
    sub.add_argument("ops", nargs="*", metavar="OP", help="default: all")
    sub.add_argument("--arch", choices=ARCHS, default="c")
    sub.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    sub.add_argument("--hidden", type=int, nargs="+", help="hidden sizes (default: 1280 2560 4096 7168)")
    sub.add_argument("--every-variant", action="store_true", help="every subset of cotangents and gradients")
    sub.add_argument("--out", type=Path, default=Path("out/hip"), help="where gfx942 writes its HIP sources")
    sub.add_argument(
        "--check-spills", action="store_true", help="CUDA: report ptxas resources, fail on spills that are not listed with a reason"
    )
    sub = command("show", _show, "Generated source, registers, spills and shared memory of an operation's kernels.")
    sub.add_argument("op")
    sub.add_argument("--arch", choices=ARCHS, default="sm_90a")
    sub.add_argument("--hidden", type=int, default=7168)
    sub.add_argument("--source", action="store_true", help="print the sources as well")
    sub = command("cache", _cache, "The kernel cache: list, size, clear.")
    sub.add_argument("action", choices=("list", "size", "clear"), nargs="?", default="size")
    sub.add_argument("--json", action="store_true")
    sub = command("bench", _bench, "Verify, then time operations; writes JSONL, CSV and plots.")
    sub.add_argument("ops", nargs="*", metavar="OP")
    sub.add_argument("--compare", type=Path, help="peers' times, JSONL (default: the table that ships)")
    sub.add_argument("--out", type=Path, default=Path("out/bench"))
    sub.add_argument("--rows", type=int, nargs="+")
    sub.add_argument("--hidden", type=int, nargs="+")
    sub.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    sub.add_argument("--no-host", action="store_true", help="leave out the host cost per call")
    return parser


def _info(args: argparse.Namespace) -> int:
    from tk_core import info

    found = info.report()
    print(json.dumps(found, indent=1) if args.json else info.text(found))
    return 0


def _ops(args: argparse.Namespace) -> int:
    from tk_core import registry
    from tk_core.aot import jobs, key_text

    rows = []
    for name, op in registry.ops().items():
        forward, backward = op.forward, op.backward
        rows.append(
            {
                "name": name,
                "area": op.area,
                "takes": [f"{a.name}{'?' if a.optional else ''}[{', '.join(a.dims)}]:{a.dtype}" for a in forward.ins.values()],
                "gives": [f"{forward.outs[n].name}[{', '.join(forward.outs[n].dims)}]:{forward.outs[n].dtype}" for n in op.returns],
                "attributes": forward.attrs,
                "gradients": [] if backward is None else [n.removeprefix("d_") for n in backward.outs],
                "accumulates": [] if backward is None else [n.removeprefix("d_") for n in backward.accumulates],
                "keys": [f"{job.rule.name}.{job.launch.title} {key_text(job.static)}" for job in jobs([name])],
            }
        )
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    for row in rows:
        print(f"{row['area']}.{row['name']}  ({len(row['keys'])} kernels for the usual sizes)")
        print(f"    {' '.join(row['takes'])}\n    -> {' '.join(row['gives'])}")
        if row["attributes"]:
            print(f"    attributes {', '.join(f'{k}={v}' for k, v in row['attributes'].items())}")
        print(f"    gradients {', '.join(row['gradients']) or 'none'}")
    return 0


def _jobs(args: argparse.Namespace) -> list[Any]:
    from tk_core import aot

    return aot.jobs(args.ops, args.hidden or aot.HIDDEN, every_variant=args.every_variant)


def _compile(args: argparse.Namespace) -> int:
    from tk_core import aot, cache

    todo = _jobs(args)
    if args.arch.startswith("gfx"):
        return _write_hip(todo, args.arch, args.out)
    if args.check_spills:
        return _check_spills(todo, args.arch, args.jobs)
    built, failed = 0, []
    for outcome in _progress(aot.compile_all(todo, args.arch, args.jobs), len(todo), f"compile for {args.arch}"):
        built += outcome.built
        if outcome.error is not None:
            failed.append(outcome)
    if args.arch == "c" or args.arch.startswith("sm_"):
        _build_jax_dispatcher()
    there = len(todo) - built - len(failed)
    print(f"{len(todo)} kernels for {args.arch}: {built} compiled, {there} there already, {len(failed)} failed; cache {cache.root()}")
    for outcome in failed:
        print(
            f"FAILED {outcome.job.title()}: {str(outcome.error).splitlines()[-1] if str(outcome.error) else type(outcome.error).__name__}",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _build_jax_dispatcher() -> None:
    """The XLA dispatcher of tk_jax belongs to an ahead-of-time cache as well, where JAX is installed."""
    from importlib.util import find_spec

    if find_spec("jax") is not None and find_spec("jax_tvm_ffi") is not None:
        from tk_jax.ffi import build_dispatcher

        build_dispatcher()


def _progress(items: Any, total: int, text: str) -> Any:
    """A progress bar on a terminal where rich is installed; one line an item elsewhere."""
    try:
        from rich.progress import track
    except ImportError:
        track = None
    if track is not None and sys.stderr.isatty():
        from rich.console import Console

        yield from track(items, total=total, description=text, console=Console(stderr=True))
        return
    for done, item in enumerate(items, 1):
        if done % 10 == 0 or done == total:
            print(f"{text}: {done} of {total}", file=sys.stderr, flush=True)
        yield item


def _write_hip(todo: Sequence[Any], arch: str, out: Path) -> int:
    """HIP sources of every kernel, and objects where hipcc is."""
    from tk_core import resources

    out.mkdir(parents=True, exist_ok=True)
    hipcc, failed = shutil.which("hipcc"), 0
    for number, job in enumerate(_progress(todo, len(todo), f"write {arch} sources")):
        path = out / f"{job.rule.name}.{job.launch.title}.{number}.hip"
        try:
            path.write_text(f"// {job.title()}\n{resources.source_of(job, arch)[0]}")
        except Exception as error:
            failed += 1
            print(f"FAILED {job.title()}: {str(error).splitlines()[-1]}", file=sys.stderr)
            continue
        if hipcc is not None:
            from tilelang.env import TILELANG_TEMPLATE_PATH

            command = [
                hipcc,
                "--genco",
                f"--offload-arch={arch}",
                "-O3",
                f"-I{TILELANG_TEMPLATE_PATH}",
                "-o",
                str(path.with_suffix(".co")),
                str(path),
            ]
            failed += subprocess.run(command).returncode != 0
    print(f"{len(todo) - failed} sources in {out}" + ("" if hipcc else "; no hipcc on PATH: not compiled"))
    return 1 if failed else 0


def _check_spills(todo: Sequence[Any], arch: str, workers: int) -> int:
    from concurrent.futures import ThreadPoolExecutor

    from tk_core import resources
    from tk_core.spills import ALLOWED

    def check(job: Any) -> Any:
        try:
            return job, resources.of_source(*resources.source_of(job, arch), arch)
        except Exception as error:
            return job, error

    failed = 0
    with ThreadPoolExecutor(workers) as pool:
        for job, found in _progress(pool.map(check, todo), len(todo), f"ptxas for {arch}"):
            if isinstance(found, Exception):
                failed += 1
                print(f"FAILED {job.title()}: {found}", file=sys.stderr)
                continue
            spills = found.stack or found.spill_stores or found.spill_loads
            reason = ALLOWED.get(f"{job.rule.name}.{job.launch.title}")
            if spills and reason is None:
                failed += 1
            if spills:
                print(f"{'allowed' if reason else 'SPILLS'} {job.title()}: {found}{f' ({reason})' if reason else ''}", file=sys.stderr)
    print(f"{len(todo)} kernels compiled for {arch}: {failed} fail or spill")
    return 1 if failed else 0


def _show(args: argparse.Namespace) -> int:
    from tk_core import aot, registry, resources

    registry.get(args.op)
    for job in aot.jobs([args.op], [args.hidden]):
        text, shared = resources.source_of(job, args.arch)
        print(f"{job.title()}")
        if args.arch.startswith("sm_") and shutil.which("nvcc"):
            print(f"    {args.arch}: {resources.of_source(text, shared, args.arch)}")
        if args.source:
            print(text)
    return 0


def _cache(args: argparse.Namespace) -> int:
    from tk_core import cache

    if args.action == "clear":
        print(f"removed {cache.clear()} kernels from {cache.root()}")
        return 0
    entries = cache.entries()
    if args.json:
        print(json.dumps({"path": str(cache.root()), "entries": entries}, indent=1, default=str))
        return 0
    if args.action == "list":
        for entry in entries:
            print(f"{entry['key']}  {entry.get('target', ''):8} {entry['bytes']:>9,} B  {entry.get('name', '')}  {entry.get('static', '')}")
    print(f"{cache.root()}: {len(entries)} kernels, {sum(e['bytes'] for e in entries):,} bytes")
    return 0


def _bench(args: argparse.Namespace) -> int:
    from tk_core.bench import run

    return run.main(args)


if __name__ == "__main__":
    sys.exit(main())
