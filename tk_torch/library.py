"""Torch operators and autograd from the declarations: `tk::<name>`, `tk::<name>_bwd`, and one callable an operation.

Plain eager calls go straight to the kernels, or through one `autograd.Function` when a gradient is needed. Everything
else that torch can do to a call (tracing, fake tensors, functionalization, subclasses, modes) goes through the
dispatcher, and torch.func through a Function with a vmap rule. All of them end in `tk_torch.launch.run`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tk_core.errors import type_error, value_error
from tk_core.op import Op, Rule
from tk_torch import launch, sharding
from tk_torch.functions import Call, Context, Gradient, NoGradient, RuleGradient, StraightThrough, eager_function, functional_function

_library = torch.library.Library("tk", "FRAGMENT")
_SCHEMA_TYPES = {int: "int", float: "float", str: "str", bool: "bool"}
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_functorch_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._is_torch_function_mode_enabled
_is_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
_forward_ad = torch.autograd.forward_ad


def is_plain(tensors: Sequence[Any]) -> bool:
    """Whether a call is an ordinary eager one, so that nothing but autograd has to see it."""
    if _functorch_active() or _dispatch_modes() or _function_modes() or _forward_ad._current_level >= 0:
        return False
    for t in tensors:
        if t is not None and (type(t) not in _PLAIN_TYPES or t.is_meta):
            return False
    return True


def _any_requires_grad(tensors: Sequence[Any]) -> bool:
    for t in tensors:
        if t is not None and t.requires_grad:
            return True
    return False


class _Masks(dict):
    """The names that a bit mask stands for."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names

    def __missing__(self, mask: int) -> frozenset[str]:
        self[mask] = found = frozenset(name for i, name in enumerate(self.names) if mask >> i & 1)
        return found


class Direction:
    """One rule as a torch operator: schema, implementation, fake, autograd, and the Function for torch.func.

    Its calls take (tensors, values, mask): arguments followed by accumulators, attributes, and a bit mask of the wanted
    results. Results that are not wanted come back as empty tensors from the operator, and as None from `call`.
    """

    def __init__(self, rule: Rule, gradient: Gradient) -> None:
        self.rule = rule
        self.gradient = gradient
        # buffers for gradients that ride along with a forward call, so that tracers see where the backward pass writes
        self.carried = gradient.carried
        self.carried_args = gradient.carried_args
        self.nothing_carried = (None,) * (rule.num_inputs - len(rule.ins) + len(self.carried))
        self.num_ins = len(rule.ins)
        self.num_tensors = rule.num_inputs + len(self.carried)
        self.all = (1 << len(rule.outs)) - 1
        # gradients are computed on demand, results of a forward rule always
        self.selective = any(arg.optional for arg in rule.outs.values())
        self.runner = launch.Runner(rule)
        self.differentiable = not isinstance(gradient, NoGradient)
        self.masks = _Masks(tuple(rule.outs))
        self.apply = eager_function(self)
        self.func_function = functional_function(self)
        self.operator = self._register()

    def run(self, tensors: Sequence[Any], values: tuple, mask: int, given: dict[str, Tensor] | None = None) -> list[Tensor | None]:
        """Launch, whatever autograd thinks."""
        return self.runner.run(tensors[: self.rule.num_inputs], values, self.masks[mask], given)

    def call(
        self, tensors: Sequence[Any], values: tuple, mask: int, context: Any = None, given: dict[str, Tensor] | None = None
    ) -> list[Tensor | None]:
        """The results under every transform that torch may have put around the call."""
        if _is_compiling():
            return self._dispatch(tensors, values, mask)
        if is_plain(tensors):
            if self.differentiable and _is_grad_enabled() and _any_requires_grad(tensors[: self.num_ins]):
                given = given or {}
                carried = tuple(tensors[self.num_ins :]) or self.nothing_carried
                return list(self.apply(Call(True, values, mask, context, tuple(given), carried), *tensors[: self.num_ins], *given.values()))
            return self.run(tensors, values, mask, given)
        if _functorch_active():
            return list(self.func_function.apply(values, mask, *tensors))
        launch.judge_tensors(self.rule, tensors[: self.num_ins])
        return self._dispatch(tensors, values, mask)

    def _dispatch(self, tensors: Sequence[Any], values: tuple, mask: int) -> list[Tensor | None]:
        return self._unpack(self.operator(*self._pack(tensors, values, mask)), mask)

    # ---- the operator

    def _pack(self, tensors: Sequence[Any], values: tuple, mask: int) -> tuple:
        """Operator arguments: tensors, attributes, the mask where results are selective, accumulators."""
        num_ins = self.num_ins
        return (*tensors[:num_ins], *values, *((mask,) if self.selective else ()), *tensors[num_ins:])

    def split(self, args: Sequence[Any]) -> tuple[list[Any], tuple, int]:
        """The reverse of `_pack`."""
        num_ins, end = self.num_ins, self.num_ins + len(self.rule.attrs)
        mask = args[end] if self.selective else self.all
        accumulators = list(args[end + self.selective :])
        accumulators += [None] * (self.num_tensors - num_ins - len(accumulators))
        return [*args[:num_ins], *accumulators], tuple(args[num_ins:end]), mask

    def _unpack(self, outs: Any, mask: int) -> list[Tensor | None]:
        """Operator results as `run` gives them."""
        outs = (outs,) if isinstance(outs, Tensor) else outs
        return [t if mask >> i & 1 else None for i, t in enumerate(outs)]

    def _register(self) -> Any:
        rule = self.rule
        params = [f"Tensor{'?' if arg.optional else ''} {arg.name}" for arg in rule.ins.values()]
        params += [f"{_SCHEMA_TYPES[type(value)]} {name}" for name, value in rule.attrs.items()]
        params += ["int wanted"] if self.selective else []
        params += [f"Tensor({chr(97 + i)}!)? acc_{name}=None" for i, name in enumerate(rule.accumulates)]
        params += [f"Tensor? acc_{name}=None" for name in self.carried]
        results = ", ".join("Tensor" for _ in rule.outs)
        _library.define(f"{rule.name}({', '.join(params)}) -> {results if len(rule.outs) == 1 else f'({results})'}")
        for key in ("CPU", "CUDA"):
            _library.impl(rule.name, self._implementation, key)
        _library.impl(rule.name, self._autograd, "Autograd")
        torch.library.register_fake(f"tk::{rule.name}", self._fake, lib=_library)
        return getattr(torch.ops.tk, rule.name).default

    def _results(self, outs: Sequence[Tensor | None], like: Tensor) -> Any:
        full = tuple(like.new_empty(0) if t is None else t for t in outs)
        return full[0] if len(full) == 1 else full

    def _implementation(self, *args: Any) -> Any:
        tensors, values, mask = self.split(args)
        outs = self.run(tensors, values, mask)
        return self._results(outs, next(t for t in tensors if t is not None))

    def _fake(self, *args: Any) -> Any:
        tensors, values, mask = self.split(args)
        rule, wanted = self.rule, self.masks[mask]
        env = rule.bind(launch.types_of(tensors), dict(zip(rule.attrs, values, strict=True)))
        like = next(t for t in tensors if t is not None)
        accumulated = {name for name, t in zip(rule.accumulates, tensors[len(rule.ins) :], strict=False) if t is not None}
        outs = []
        for name in rule.outs:
            if name in wanted and name not in accumulated:
                shape, dtype = rule.type_of(name, env)
                outs.append(like.new_empty(shape, dtype=getattr(torch, dtype)))
            else:
                outs.append(None)
        return self._results(outs, like)

    def _autograd(self, *args: Any) -> Any:
        tensors, values, mask = self.split(args)
        if sharding.has_dtensor(tensors):
            sharding.register(self)
        ins = tensors[: self.num_ins]
        needs = self.differentiable and _is_grad_enabled() and any(t is not None and t.requires_grad for t in ins)
        # duals of forward mode go through the Function as well: it refuses them instead of dropping them
        if needs or _forward_ad._current_level >= 0:
            outs = self.apply(Call(False, values, mask, None, (), tuple(tensors[self.num_ins :]) or self.nothing_carried), *ins)
            return self._results(outs, next(t for t in tensors if t is not None))
        return self.below_autograd(args)

    def below_autograd(self, args: Sequence[Any]) -> Any:
        """The operator without its autograd layer."""
        with torch._C._AutoDispatchBelowAutograd():
            return self.operator(*args)

    def below(self, tensors: Sequence[Any], values: tuple, mask: int) -> list[Tensor | None]:
        """What a Function's forward calls where the dispatcher is at work: the operator below autograd."""
        return self._unpack(self.below_autograd(self._pack(tensors, values, mask)), mask)


# ------------------------------------------------------------------ one callable an operation


class TorchOp:
    """An operation under torch: `call(*tensors, **attributes)`; `forward` and `backward` are its two directions."""

    def __init__(self, op: Op) -> None:
        self.op = op
        self.num_ins = len(op.forward.ins)
        self.backward = Direction(op.backward, Gradient(op.name)) if op.backward is not None else None
        self.forward = Direction(op.forward, self._gradient())
        self.public = [i for i, name in enumerate(op.forward.outs) if name in op.returns]
        self.num_public = len(self.public)
        self.everything = self.forward.masks[self.forward.all]
        self.defaults = op.forward.attributes({})
        self._known: dict[tuple, tuple] = {}

    def _gradient(self) -> Gradient:
        if self.backward is not None:
            return RuleGradient(self.op, self.backward)
        return StraightThrough(self.op.name) if self.op.straight_through else NoGradient(self.op.name)

    def some(self, wanted: Sequence[str], *tensors: Any, given: dict[str, Tensor] | None = None, **attrs: Any) -> list[Tensor | None]:
        """Only the wanted results, None for the others; absent trailing arguments may be left out; `given` are results to write to."""
        if len(tensors) < self.num_ins:
            tensors = (*tensors, *(None,) * (self.num_ins - len(tensors)))
        values = self.attributes(attrs) if attrs else self.defaults
        mask = sum(1 << i for i, name in enumerate(self.op.forward.outs) if name in wanted)
        return self._into(tensors, values, mask, None, given) if given else self.forward.call(tensors, values, mask)

    def __call__(
        self,
        *tensors: Any,
        accumulators: dict[str, Tensor] | None = None,
        context: Context | None = None,
        out: dict[str, Tensor] | None = None,
        **attrs: Any,
    ) -> Any:
        """The public results.

        `accumulators` are buffers by gradient name that the backward pass adds to instead of returning a gradient;
        `context` (of `self.forward.gradient.context`) finds another one when the eager gradient is due; `out` gives results
        to write to.
        """
        values = self.attributes(attrs) if attrs else self.defaults
        forward = self.forward
        if out is not None:
            outs = self._into(self._carrying(tensors, accumulators), values, forward.all, context, out)
            return outs[self.public[0]] if self.num_public == 1 else tuple(outs[i] for i in self.public)
        if _is_compiling() or not is_plain(tensors):
            outs = forward.call(self._carrying(tensors, accumulators), values, forward.all, context)
        elif forward.differentiable and _is_grad_enabled() and _any_requires_grad(tensors):
            # here and below the shortest way, where `call` would lead as well
            carried = tuple(map(accumulators.get, forward.carried)) if accumulators else forward.nothing_carried
            outs = forward.apply(Call(True, values, forward.all, context, (), carried), *tensors)
        else:
            outs = forward.runner.run(tensors, values, self.everything)
        return outs[self.public[0]] if self.num_public == 1 else tuple(outs[i] for i in self.public)

    def _carrying(self, tensors: tuple, accumulators: dict[str, Tensor] | None) -> tuple:
        """The arguments, and the buffers for gradients that go along with them."""
        return (*tensors, *map((accumulators or {}).get, self.forward.carried)) if self.forward.carried else tensors

    def attributes(self, attrs: dict[str, Any]) -> tuple:
        """Judged attributes in order; remembered, except where the tracer would see the memory change."""
        if _is_compiling():
            return self.op.forward.attributes(attrs)
        # with the types: 1, 1.0 and True are equal keys
        key = (*attrs.items(), *map(type, attrs.values()))
        try:
            return self._known[key]
        except (KeyError, TypeError):
            values = self.op.forward.attributes(attrs)
        if len(self._known) < 4096:
            self._known[key] = values
        return values

    def _into(self, tensors: Sequence[Any], values: tuple, mask: int, context: Any, out: dict[str, Tensor]) -> list[Tensor | None]:
        """Write to the caller's tensors: directly in plain eager, by a copy where a transform is at work."""
        forward = self.forward
        for name, t in out.items():
            if not isinstance(t, Tensor):
                raise type_error(self.op.name, name, "an array to write to", type(t).__name__)
        if not _is_compiling() and is_plain((*tensors, *out.values())):
            if _is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
                self._judge_overlap(tensors, out)
            return forward.call(tensors, values, mask, context, out)
        outs = forward.call(tensors, values, mask, context)
        for i, name in enumerate(forward.rule.outs):
            if name in out:
                outs[i] = out[name].copy_(outs[i])
        return outs

    def _judge_overlap(self, tensors: Sequence[Any], out: dict[str, Tensor]) -> None:
        saved = [(n, t) for n, t in zip(self.op.forward.ins, tensors, strict=False) if t is not None and n in self.op.saved]
        for (argument, t), (name, target) in itertools.product(saved, out.items()):
            if not isinstance(target, Tensor) or target.device != t.device:
                continue
            start, end = t.data_ptr(), t.data_ptr() + t.untyped_storage().nbytes()
            if start < target.data_ptr() + target.numel() * target.element_size() and target.data_ptr() < end:
                raise value_error(self.op.name, name, f"memory apart from {argument}, which the gradient needs", "overlapping arrays")


@functools.cache
def bind(op: Op) -> Callable[..., Any]:
    """The torch form of an operation; registers its operators the first time."""
    return TorchOp(op)
