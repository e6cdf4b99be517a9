"""Run a rule on torch tensors: plan, layout copies, allocation, launches. No autograd and no dispatcher in here."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tk_core.device import arch_of
from tk_core.errors import type_error, value_error
from tk_core.kernels import count_copy
from tk_core.op import Rule, Type
from tk_core.plan import Plan

DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

# with strides: torch.empty, which takes names and memory formats, costs twice as much
_empty = torch.empty_strided
_current_device = getattr(torch._C, "_cuda_getDevice", None)

# Rows are part of a plan (not of a kernel), so the number of plans of a rule is bounded here.
_MAX_PLANS = 4096


class _TorchPlan:
    """A plan with torch's names: what `Runner.run` needs, and nothing to look up."""

    __slots__ = ("allocate", "cuda", "device", "empty", "flat", "given", "names", "rest", "results", "steps", "zeros")

    def __init__(self, plan: Plan, device: torch.device, tensors: Sequence[Tensor | None], wanted: frozenset[str]) -> None:
        slots = {name: i for i, name in enumerate(plan.rule.slots)}
        self.device = device
        self.cuda = device.index if device.type == "cuda" else None
        self.allocate = tuple((slot, shape, _strides(shape), getattr(torch, dtype)) for slot, shape, dtype in (*plan.outs, *plan.work))
        # an empty tensor is contiguous with any strides to torch, to a kernel with its own only
        self.empty = tuple((i, t.shape, _strides(t.shape), t.dtype) for i, t in enumerate(tensors) if t is not None and not t.numel())
        self.zeros = plan.zeros if not plan.steps else ()
        self.results = tuple(slots[name] if name in wanted else -1 for name in plan.rule.outs)
        self.rest = [None] * plan.num_slots
        self.flat = plan.flat
        self.steps = tuple((step.kernel, step.gather, step.scalars) for step in plan.steps)
        self.names = tuple(step.names for step in plan.steps)
        # results that callers provided, as they have been judged
        self.given: set[tuple] = set()


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def types_of(tensors: Sequence[Tensor | None]) -> list[Type | None]:
    """What the core judges: shape, dtype name and device of every tensor."""
    return [None if t is None else (t.shape, DTYPE_NAMES[t.dtype], t.device) for t in tensors]


def target_of(device: torch.device) -> str:
    """The compilation target of a device."""
    return "c" if device.type == "cpu" else arch_of(*torch.cuda.get_device_capability(device))


def judge_tensors(rule: Rule, tensors: Sequence[Any]) -> None:
    """Every argument is a tensor, or None where the declaration allows it."""
    if len(tensors) != len(rule.ins):
        raise type_error(rule.name, "arguments", f"{len(rule.ins)} arrays ({', '.join(rule.ins)})", len(tensors))
    for arg, t in zip(rule.ins.values(), tensors, strict=True):
        if t is not None and not isinstance(t, Tensor):
            raise type_error(rule.name, arg.name, arg.kind, type(t).__name__)


def fast_layout(t: Tensor | None) -> Tensor | None:
    """The tensor as kernels take it: contiguous and 16-byte aligned; anything else is copied once, and counted."""
    if t is None or (t.is_contiguous() and not t.data_ptr() & 15):
        return t
    count_copy()
    return t.clone(memory_format=torch.contiguous_format)


class Runner:
    """One rule on torch tensors. Everything that depends on shapes is in a plan, found by a small tuple."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.num_ins = len(rule.ins)
        self._accumulates = bool(rule.accumulates)
        # attributes that change from call to call, where they are not at their defaults
        self._dynamic = {name: list(rule.attrs).index(name) for name in rule.dynamic}
        self._resting = tuple((i, rule.attrs[name]) for name, i in self._dynamic.items())
        self._names = tuple(rule.ins) if rule.strided or rule.loose else ()
        self._plans: dict[tuple, _TorchPlan] = {}

    def run(
        self, tensors: Sequence[Tensor | None], values: tuple, wanted: frozenset[str], given: Mapping[str, Tensor] | None = None
    ) -> list[Tensor | None]:
        """Execute the rule; the results in its order, None for those that are not wanted. Arguments as in `execute`."""
        memory, results = self.execute(tensors, values, wanted, given)
        return [memory[slot] for slot in results]

    def execute(
        self, tensors: Sequence[Tensor | None], values: tuple, wanted: frozenset[str], given: Mapping[str, Tensor] | None = None
    ) -> tuple[list[Tensor | None], tuple[int, ...]]:
        """Execute the rule.

        Args:
            tensors: its arguments and then its accumulators, None where absent; accumulators may be left out.
            values: its attributes in order.
            wanted: the results to compute.
            given: results that the caller provides, by name.

        Returns:
            Every tensor of the call by slot, arguments first, in the layout in which the kernels took them; and the slots of
            the results in the rule's order, that of the last, which is None, for those that are not wanted.
        """
        moving = False
        for i, default in self._resting:
            moving = moving or values[i] != default
        key: list[Any] = [wanted, self._fixed(values) if moving else values]
        memory: list[Any] = []
        for t in tensors:  # fast_layout written out: this loop is most of what a small call costs
            if t is None:
                key.append(None)
            else:
                key += (t.shape, t.dtype, t.device)
                if not t.is_contiguous() or t.data_ptr() & 15:
                    t = self._layout(len(memory), t)
            memory.append(t)
        found = tuple(key)
        plan = self._plans.get(found) or self._plan(found, tensors, values, wanted)
        memory += plan.rest[len(memory) :]
        if given or self._accumulates:
            self._place(plan, memory, tensors, values, given or {})
        device = plan.device
        for slot, shape, strides, dtype in plan.allocate:
            if memory[slot] is None:
                memory[slot] = _empty(shape, strides, dtype=dtype, device=device)
        for slot, shape, strides, dtype in plan.empty:
            memory[slot] = _empty(shape, strides, dtype=dtype, device=device)
        for slot in plan.zeros:
            memory[slot].zero_()
        arrays = memory if plan.flat is None else _flatten(memory, plan.flat)
        steps = self._with_dynamic(plan, values) if moving else plan.steps
        if plan.cuda is None or plan.cuda == _current_device():
            for kernel, gather, scalars in steps:
                kernel.run(*gather(arrays), *scalars)
                kernel.calls += 1
        else:
            _launch_elsewhere(plan.cuda, steps, arrays)
        return memory, plan.results

    def _fixed(self, values: tuple) -> tuple:
        """The attributes that a plan depends on, fewer than all."""
        return tuple(value for i, value in enumerate(values) if i not in self._dynamic.values())

    def _with_dynamic(self, plan: _TorchPlan, values: tuple) -> list[tuple]:
        """The launches of a plan with this call's scalars."""
        return [
            (kernel, gather, tuple(values[self._dynamic[n]] if n in self._dynamic else s for n, s in zip(names, scalars, strict=True)))
            for (kernel, gather, scalars), names in zip(plan.steps, plan.names, strict=True)
        ]

    def _layout(self, position: int, t: Tensor) -> Tensor:
        """An argument that is not dense or not aligned: as it is where its rows may lie apart, otherwise as a copy."""
        name = self._names[position] if position < len(self._names) else ""
        if name in self.rule.loose and t.ndim == 2 and (t.stride(1) == 1 or t.shape[1] == 1):
            return t
        if name in self.rule.strided and _has_vector_rows(t):
            return t
        return fast_layout(t)

    def _plan(self, key: tuple, tensors: Sequence[Any], values: tuple, wanted: frozenset[str]) -> _TorchPlan:
        rule = self.rule
        judge_tensors(rule, tensors[: self.num_ins])
        first = next((t for t in tensors if t is not None), None)
        if first is not None and first.device.type not in ("cpu", "cuda"):
            raise value_error(rule.name, next(iter(rule.ins)), "a CPU or CUDA array", f"device {first.device}")
        device = first.device if first is not None else torch.device("cpu")
        attrs = dict(zip(rule.attrs, values, strict=True))
        types = types_of(tensors)
        rule.bind(types, attrs)  # judge before a target is asked for
        plan = _TorchPlan(Plan(rule, target_of(device), types, attrs, wanted), device, tensors[: self.num_ins], wanted)
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[key] = plan
        return plan

    def _place(self, plan: _TorchPlan, memory: list[Any], tensors: Sequence[Any], values: tuple, given: Mapping[str, Tensor]) -> None:
        """Arrays that the caller lets the rule write: judged, then used as they are."""
        rule = self.rule
        for name, t in zip(rule.accumulates, tensors[self.num_ins :], strict=False):
            if t is not None:
                _judge_layout(rule, f"acc_{name}", t)
        known = tuple((name, t.shape, t.dtype, t.device) for name, t in given.items())
        if given and known not in plan.given:
            env = rule.bind(types_of(tensors), dict(zip(rule.attrs, values, strict=True)))
            for name, t in given.items():
                rule.judge_written(name, name, (t.shape, DTYPE_NAMES[t.dtype], t.device), env)
                if t.device != plan.device:
                    raise value_error(rule.name, name, f"device {plan.device}", t.device)
            plan.given.add(known)
        for name, t in given.items():
            _judge_layout(rule, name, t, name in rule.strided)
            memory[rule.slots.index(name)] = t


def _launch_elsewhere(device: int, steps: Any, arrays: list[Any]) -> None:
    """Launch on a device that is not the current one, which is the current one again afterwards."""
    with torch.cuda.device(device):
        for kernel, gather, scalars in steps:
            kernel.run(*gather(arrays), *scalars)
            kernel.calls += 1


def _flatten(memory: list[Any], flat: tuple) -> list[Any]:
    """The leading axes as one, without a copy: every tensor in here is contiguous."""
    arrays = [t if t is None or shape is None else t.view(shape) for t, shape in zip(memory, flat, strict=False)]
    return [*arrays, *memory[len(arrays) :]]


def _has_vector_rows(t: Tensor) -> bool:
    """Whether rows are dense, aligned to 16 bytes and apart from each other."""
    if t.ndim != 2 or t.stride(1) != 1 or t.data_ptr() & 15:
        return False
    return t.shape[0] == 1 or (t.stride(0) >= t.shape[1] and t.stride(0) * t.element_size() % 16 == 0)


def _judge_layout(rule: Rule, argument: str, t: Tensor, strided: bool = False) -> None:
    """What is written in place must have the layout that kernels write; autograd is told that it changes."""
    if strided and not t.is_contiguous():
        if not _has_vector_rows(t):
            raise value_error(rule.name, argument, "dense rows to write to, 16-byte aligned", f"strides {t.stride()}")
    elif not t.is_contiguous():
        raise value_error(rule.name, argument, "a contiguous array to write to", f"strides {t.stride()}")
    if t.data_ptr() & 15:
        raise value_error(rule.name, argument, "a 16-byte aligned array to write to", f"address {t.data_ptr():#x}")
    with contextlib.suppress(RuntimeError):  # an inference tensor has no version
        torch.autograd.graph.increment_version(t)
