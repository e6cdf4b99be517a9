"""Run one row of the benchmark on torch tensors: verify against the NumPy oracle, time, and the host cost of a call."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tk_core import registry
from tk_core.bench import eager, moe, quant, timers
from tk_core.bench.cases import CASES, inputs
from tk_core.bench.moe_inputs import Source
from tk_core.bench.run import Entry
from tk_core.dtypes import numpy_dtype
from tk_core.kernels import stats
from tk_core.op import evaluate
from tk_core.reference import oracles
from tk_torch.library import TorchOp, bind

# Rows that are compared with the oracle out of a large call, and rows of the call whose parameter sums are compared.
SAMPLE, SUMMED = 48, 300
# Device memory that the rotating input sets of one row may take.
SETS_BYTES = 6 << 30


class Runner:
    """The benchmark's rows on one device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._copies: dict[tuple, float] = {}

    def about(self) -> dict[str, Any]:
        """Machine and versions."""
        from importlib import metadata

        versions = {}
        for name in ("torch", "jax", "tilelang", "apache-tvm-ffi"):
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        name = torch.cuda.get_device_name() if self.device == "cuda" else platform.processor() or platform.machine()
        return {"device": name, "python": platform.python_version(), **versions}

    # ---- inputs

    def _inputs(self, entry: Entry, rows: int, seed: int) -> list[torch.Tensor | None]:
        """Arguments of the forward rule, normal random, made on the device."""
        op, env = registry.get(entry.case.op), entry.case.env(entry.hidden)
        generator = torch.Generator(self.device).manual_seed(seed)
        made: list[torch.Tensor | None] = []
        for arg in op.forward.ins.values():
            if arg.name in entry.case.absent:
                made.append(None)
                continue
            shape = (*((rows,) if arg.rows else ()), *(evaluate(d, env) for d in arg.inner))
            values = torch.randn(shape, generator=generator, device=self.device) * entry.case.scales.get(arg.name, 1.0)
            made.append(values.to(getattr(torch, arg.dtype)))
        return made

    def _calls(self, entry: Entry, seeds: Sequence[int]) -> list[Callable[[], Any]]:
        """The call that is timed, once an input set."""
        bound: TorchOp = bind(registry.get(entry.case.op))
        values = bound.op.forward.attributes(dict(entry.case.attrs))
        calls = []
        for seed in seeds:
            tensors = self._inputs(entry, entry.rows, seed)
            if entry.direction == "fwd":
                calls.append(lambda t=tensors: bound.forward.run(t, values, bound.forward.all))
                continue
            args, mask = self._backward_arguments(bound, entry, tensors, values)
            calls.append(lambda a=args, m=mask: bound.backward.run(a, values, m))
        return calls

    def _backward_arguments(self, bound: TorchOp, entry: Entry, tensors: list, values: tuple) -> tuple[list, int]:
        """Cotangents, saved tensors and accumulators of the backward rule, and the mask of its results."""
        op, rule = bound.op, bound.backward.rule
        outs = bound.forward.run(tensors, values, bound.forward.all)
        known = dict(zip((*op.forward.ins, *op.forward.outs), (*tensors, *outs), strict=True))
        generator = torch.Generator(self.device).manual_seed(99)
        for name in op.returns:
            like = known[name]
            known[f"d_{name}"] = torch.randn(like.shape, generator=generator, device=self.device).to(like.dtype)
        mask = sum(1 << i for i, name in enumerate(rule.outs) if known[name.removeprefix("d_")] is not None)
        accumulators = []
        for name in rule.accumulates:
            like = known[name.removeprefix("d_")]
            use = entry.accumulating and like is not None and rule.outs[name].rows
            accumulators.append(torch.zeros_like(like) if use else None)
        return [*(known[name] for name in rule.ins), *accumulators], mask

    # ---- correctness

    def verify(self, entry: Entry) -> str:
        """What is wrong with the case; an empty text when nothing is.

        Sampled rows of the timed size are compared with the oracle. Sums over rows are compared on a call of a few hundred
        rows, of which the oracle can be computed in full.
        """
        return self._verify_rows(entry, entry.rows, SAMPLE) or (
            self._verify_rows(entry, min(SUMMED, entry.rows), None) if entry.direction == "bwd" else ""
        )

    def _verify_rows(self, entry: Entry, rows: int, sample: int | None) -> str:
        bound: TorchOp = bind(registry.get(entry.case.op))
        op, attrs = bound.op, dict(entry.case.attrs)
        values = op.forward.attributes(attrs)
        tensors = self._inputs(entry, rows, 1)
        chosen = slice(None) if sample is None else np.unique(np.linspace(0, rows - 1, sample).astype(int))
        oracle = oracles()[op.name]

        def taken(t: torch.Tensor | None, by_rows: bool) -> Any:
            if t is None:
                return None
            picked = t[torch.as_tensor(chosen, device=t.device)] if by_rows and sample is not None else t
            return picked.float().cpu().numpy().astype(numpy_dtype(str(t.dtype).removeprefix("torch.")))

        arrays = [taken(t, arg.rows) for t, arg in zip(tensors, op.forward.ins.values(), strict=True)]
        if entry.direction == "fwd":
            outs = bound.forward.run(tensors, values, bound.forward.all)
            got = {name: taken(t, op.forward.outs[name].rows) for name, t in zip(op.forward.outs, outs, strict=True) if name in op.returns}
            want = dict(zip(op.returns, oracle.forward(arrays, attrs), strict=True))
            return _compare(got, want, entry)
        args, mask = self._backward_arguments(bound, entry, tensors, values)
        outs = bound.backward.run(args, values, mask)
        rule = bound.backward.rule
        named = dict(zip(rule.ins, args, strict=False))
        cotangents = [taken(named[f"d_{name}"], True) for name in op.returns]
        got = {
            name: taken(t, rule.outs[name].rows)
            for name, t in zip(rule.outs, outs, strict=True)
            if t is not None and (sample is None or rule.outs[name].rows)
        }
        want = dict(zip((f"d_{name}" for name in op.forward.ins), oracle.backward(arrays, cotangents, attrs), strict=True))
        return _compare(got, want, entry)

    # ---- time

    def time(self, entry: Entry) -> dict[str, Any]:
        """The row: microseconds, bandwidth, fraction of a copy of as many bytes, memory."""
        sets = 1 if self.device == "cpu" else max(1, min(4, SETS_BYTES // max(entry.bytes, 1)))
        calls = self._calls(entry, range(10, 10 + sets))
        row: dict[str, Any] = {"op": entry.case.op, "direction": entry.direction, "variant": entry.variant}
        row |= {"rows": entry.rows, "hidden": entry.hidden, "bytes": entry.bytes}
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            calls[0]()
            row["peak_mb"] = round((torch.cuda.max_memory_allocated() - before) / 1e6, 1)
            us = timers.event_us(calls)
            row |= {"kernel_us": round(timers.kernel_us(calls), 2)}
        else:
            us = timers.wall_us(calls)
            row["eager_us"] = round(timers.wall_us(self._eager_calls(entry)), 2)
        copy = self._copy_gbps(entry.bytes)
        gbps = entry.bytes / us / 1e3
        return row | {"us": round(us, 2), "gbps": round(gbps), "copy_gbps": round(copy), "of_copy": round(gbps / copy, 4)}

    def quant(self, row: quant.Row) -> dict[str, Any]:
        """The row of a cast, or what is wrong with it as `error`: verified, then timed by the timer of its peer."""
        about: dict[str, Any] = {"op": row.function, "direction": "fwd", "variant": row.variant, "rows": row.rows, "hidden": row.hidden}
        wrong = quant.verify(row, self.device)
        if wrong:
            return about | {"error": wrong}
        given = quant.inputs(row, 10, self.device)
        count = quant.least_bytes(row, given[1])
        sets = [given, *(quant.inputs(row, 10 + i, self.device) for i in range(1, 1 if self.device == "cpu" else 3))]
        calls = [lambda x=x, named=named: quant.call(row, x, named) for x, named in sets]
        return about | self._timed(calls, count, row.timer)

    def moe(self, row: moe.Row) -> dict[str, Any]:
        """The row of a routing operation, or what is wrong with it as `error`: verified, then timed by the timer of its peer."""
        about: dict[str, Any] = {"area": "moe", "op": row.function, "direction": row.direction, "variant": row.variant}
        about |= {"rows": row.args["T"], "hidden": row.args.get("H")}
        made = [row.make(Source(10 + i, self.device), **row.args) for i in range(1 if self.device == "cpu" else 2)]
        before = sum(stats()["launches"].values())
        results = made[0].run()
        about |= {"valid": made[0].valid, "expanded": made[0].expanded, "launches": sum(stats()["launches"].values()) - before}
        wrong = made[0].check(results)
        del results
        return about | ({"error": wrong} if wrong else self._timed([call.run for call in made], made[0].bytes, row.timer))

    def _timed(self, calls: timers.Calls, count: int, name: str) -> dict[str, Any]:
        """Time of the calls by a named timer, on the CPU the wall clock, and bandwidth beside a copy of as many bytes."""
        timer = timers.wall_us if self.device == "cpu" else timers.kernel_us if name == "kernel" else timers.event_us
        us, copy = timer(calls), self._copy_gbps(count, timer)
        gbps = count / us / 1e3
        return {
            "bytes": count, "timer": "wall" if self.device == "cpu" else name, "us": round(us, 2), "gbps": round(gbps),
            "copy_gbps": round(copy), "of_copy": round(gbps / copy, 4),
        }  # fmt: skip

    def _copy_gbps(self, count: int, timer: Any = None) -> float:
        """Bandwidth of a copy that moves as many bytes, in the same run and by the same timer."""
        timer = timer or (timers.event_us if self.device == "cuda" else timers.wall_us)
        key = (count, timer)
        if key not in self._copies:
            source = torch.empty(max(count // 2, 16), dtype=torch.int8, device=self.device).fill_(1)
            target = torch.empty_like(source)
            self._copies[key] = count / timer([lambda: target.copy_(source)]) / 1e3
        return self._copies[key]

    def _eager_calls(self, entry: Entry) -> list[Callable[[], Any]]:
        function, attrs = getattr(eager, entry.case.op), dict(entry.case.attrs)
        tensors = self._inputs(entry, entry.rows, 10)
        if entry.direction == "fwd":
            return [lambda: function(*tensors, **attrs)]
        leaves = [t.requires_grad_() for t in tensors if t is not None]
        outs = function(*tensors, **attrs)
        outs = outs if isinstance(outs, tuple) else (outs,)
        cotangents = [torch.randn_like(o) for o in outs]
        return [lambda: torch.autograd.grad(outs, leaves, cotangents, retain_graph=True)]

    # ---- host cost

    def host(self, op: str = "mhc_pre_apply_mix", rows: int = 8, hidden: int = 7168) -> list[dict[str, Any]]:
        """Host microseconds a call of a one-launch operation beside `torch.nn.functional.rms_norm`, and of the JAX call."""
        from tk_torch import mhc

        case = CASES[op]
        x, mix = self._inputs(Entry(case, "fwd", rows, hidden), rows, 0)
        synchronize = torch.cuda.synchronize if self.device == "cuda" else lambda: None
        flat, weight = x.view(rows * x.shape[1], hidden), torch.ones(hidden, device=self.device, dtype=x.dtype)
        found = []
        with torch.no_grad():
            found.append(("torch", "forward", op, timers.host_us(lambda: mhc.mhc_pre_apply_mix(x, mix), synchronize)))
            norm = timers.host_us(lambda: torch.nn.functional.rms_norm(flat, (hidden,), weight), synchronize)
            found.append(("torch", "forward", "rms_norm", norm))
        leaves = [t.detach().requires_grad_() for t in (x, mix, flat, weight)]
        g, h = torch.randn_like(x[:, 0]), torch.randn_like(flat)

        def ours() -> None:
            torch.autograd.grad(mhc.mhc_pre_apply_mix(leaves[0], leaves[1]), leaves[:2], g)

        def theirs() -> None:
            torch.autograd.grad(torch.nn.functional.rms_norm(leaves[2], (hidden,), leaves[3]), leaves[2:], h)

        found.append(("torch", "forward and backward", op, timers.host_us(ours, synchronize, 300)))
        found.append(("torch", "forward and backward", "rms_norm", timers.host_us(theirs, synchronize, 300)))
        found += self._host_jax(op, rows, hidden)
        return [{"framework": f, "what": what, "op": name, "us": round(us, 2)} for f, what, name, us in found]

    def _host_jax(self, op: str, rows: int, hidden: int) -> list[tuple[str, str, str, float]]:
        try:
            import jax
        except ImportError:
            return []
        from tk_jax import mhc

        x, mix = map(jax.numpy.asarray, inputs(CASES[op], registry.get(op).forward, (rows,), hidden))
        call = jax.jit(mhc.mhc_pre_apply_mix)
        done: list[Any] = [call(x, mix)]

        def once() -> None:
            done[0] = call(x, mix)

        return [("jax", "forward, jitted", op, timers.host_us(once, lambda: done[0].block_until_ready()))]


def _compare(got: dict[str, Any], want: dict[str, Any], entry: Entry) -> str:
    """Texts of the results that are wrong: by relative size of the error, in fp64."""
    problems = []
    for name, value in got.items():
        a, b = value.astype(np.float64), np.asarray(want[name], np.float64).reshape(value.shape)
        error = np.square(a - b).sum() / max(np.square(b).sum(), 1e-300)
        limit = 1e-5 if value.dtype == numpy_dtype("bfloat16") else entry.case.limit
        if not error < limit:
            problems.append(f"{name}: squared relative error {error:.1e} (limit {limit:.0e})")
    return "; ".join(problems)
