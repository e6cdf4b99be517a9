"""The kernels that real shapes need: listed without arrays, compiled ahead of time without a GPU.

`tk-kernels compile`, the spill check of continuous integration and `tk-kernels show` all draw on the same list.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from tk_core import kernels, registry
from tk_core.bench import casts, routes
from tk_core.bench.cases import CASES, Case
from tk_core.op import Env, Launch, Op, Rule
from tk_core.plan import static_of

HIDDEN = (1280, 2560, 4096, 7168)
# Row counts only choose among the few variants that a rule may have; keys hold no row count.
ROWS = (1, 512, 8192)


class Job(NamedTuple):
    """One kernel to compile: a launch and what is compiled in."""

    rule: Rule
    launch: Launch
    static: dict[str, Any]

    def title(self) -> str:
        """The kernel's name and its key."""
        return f"{self.rule.name}.{self.launch.title} {key_text(self.static)}"


def key_text(static: dict[str, Any]) -> str:
    """A key as text: sizes and attributes, then which arguments and results there are."""
    parts = [f"{k}={v}" for k, v in static.items() if k != "has"]
    return " ".join([*parts, f"[{' '.join(static['has'])}]"] if "has" in static else parts)


def jobs(names: Iterable[str] = (), hidden: Sequence[int] = HIDDEN, streams: int = 4, every_variant: bool = False) -> list[Job]:
    """Kernels of the named operations (default: all) for these hidden sizes, without repetition.

    Forward rules, and backward rules for all gradients, with and without accumulators; `every_variant` adds every subset
    of cotangents and gradients.
    """
    found: dict[str, Job] = {}
    wanted = list(names or registry.ops())
    for size in hidden:
        for op, rule, env, outs, present in (*casts.calls(size), *routes.calls(size)):
            if op.name in wanted:
                for job in _launches(rule, env, present | outs, outs):
                    found.setdefault(f"{job.title()} {job.launch.fixed}", job)
    for name in wanted:
        op = registry.get(name)
        if op.area in ("quant", "moe"):
            continue
        case = CASES.get(name, Case(name))
        for size, rows in itertools.product(hidden, ROWS):
            for job in _jobs_of(op, case, size, rows, streams, every_variant):
                found.setdefault(f"{job.title()} {job.launch.fixed}", job)
    return list(found.values())


def _jobs_of(op: Op, case: Case, hidden: int, rows: int, streams: int, every_variant: bool) -> Iterator[Job]:
    for rule in op.rules:
        env = {**rule.attrs, **case.env(hidden, streams), "lead": (rows,), "rows": rows}
        required = {arg.name for arg in rule.ins.values() if not arg.optional}
        optional = [arg.name for arg in rule.ins.values() if arg.optional]
        selective = [arg.name for arg in rule.outs.values() if arg.optional]
        wanted_sets = [frozenset(rule.outs)]
        if every_variant and selective:
            wanted_sets = [frozenset(s) for k in range(1, len(selective) + 1) for s in itertools.combinations(selective, k)]
        absences: list[tuple[str, ...]] = [(), *((name,) for name in optional if name in op.forward.ins)]
        if every_variant:
            absences = [a for k in range(len(optional) + 1) for a in itertools.combinations(optional, k)]
        for wanted, absent in itertools.product(wanted_sets, absences):
            present = required | (set(optional) - set(absent))
            # the gradient of an absent argument is not computed
            results = frozenset(name for name in wanted if name.removeprefix("d_") not in absent)
            if rule is op.backward and not any(name not in op.saved for name in present):
                continue
            for accumulated in _accumulations(rule, results):
                has = present | results | {f"+{name}" for name in accumulated}
                yield from _launches(rule, env, has, results)


def _accumulations(rule: Rule, results: frozenset[str]) -> list[tuple[str, ...]]:
    possible = tuple(name for name in rule.accumulates if name in results)
    return [(), *((name,) for name in possible), possible] if len(possible) > 1 else [(), possible] if possible else [()]


def _launches(rule: Rule, env: Env, has: set[str], results: frozenset[str]) -> Iterator[Job]:
    env = {**env, **(rule.derive(dict(env)) if rule.derive is not None else {})}
    launches = rule.live(env, results)
    work = {name for launch in launches for name in launch.split[1] if name in rule.work}
    for launch in launches:
        yield Job(rule, launch, static_of(launch, env, has | work))


class Outcome(NamedTuple):
    """What became of one job."""

    job: Job
    built: bool
    error: Exception | None


def compile_all(todo: Sequence[Job], target: str, workers: int) -> Iterator[Outcome]:
    """Put kernels into the cache, `workers` at a time; yields as they are done. Closing the iterator cancels the rest."""
    pool = ThreadPoolExecutor(workers)
    pending = {pool.submit(kernels.compile_only, job.rule, job.launch, target, job.static): job for job in todo}
    try:
        while pending:
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                job = pending.pop(future)
                error = future.exception()
                yield Outcome(job, error is None and future.result()[1], error)
    finally:
        for future in pending:
            future.cancel()
        pool.shutdown(wait=True, cancel_futures=True)
