"""The autograd Functions of an operation, and the vmap rule: how a rule is differentiated and batched.

Every rule has two Functions: one for plain eager and for the dispatcher's Autograd key, of the form with the least overhead,
and one for torch.func, which saves in `setup_context` and has a vmap rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tk_core.op import Arg, Op

if TYPE_CHECKING:
    from tk_torch.library import Direction


class Gradient:
    """What a rule's Functions do in the backward pass; this one refuses."""

    carried: tuple[str, ...] = ()
    carried_args: tuple[Arg, ...] = ()

    def __init__(self, name: str) -> None:
        self.name = name

    def save(self, ctx: Any, tensors: Sequence[Any], outs: Sequence[Any], offset: int) -> None:
        """Keep what `backward` needs; the arguments begin at `offset` among those of the Function."""

    def backward(self, ctx: Any, cotangents: Sequence[Tensor | None], offset: int) -> Sequence[Tensor | None]:
        """Gradients of the arguments, which begin at `offset` among those of the Function."""
        raise RuntimeError(f"{self.name}: double backward is not implemented")


class NoGradient(Gradient):
    """Of an operation that is not differentiable: its results require no gradient."""

    def save(self, ctx: Any, tensors: Sequence[Any], outs: Sequence[Any], offset: int) -> None:
        """Nothing, and autograd is told that there is nothing."""
        ctx.mark_non_differentiable(*(t for t in outs if t is not None))


class StraightThrough(Gradient):
    """The cotangent of the result is the gradient of the first argument, in the argument's dtype."""

    def save(self, ctx: Any, tensors: Sequence[Any], outs: Sequence[Any], offset: int) -> None:
        """No tensor: the dtype."""
        ctx.dtype = tensors[0].dtype

    def backward(self, ctx: Any, cotangents: Sequence[Tensor | None], offset: int) -> Sequence[Tensor | None]:
        """Gradients of the arguments; differentiable again."""
        return [cotangents[0].to(ctx.dtype), *(None,) * (len(ctx.needs_input_grad) - offset - 1)]


class RuleGradient(Gradient):
    """The backward rule of an operation, read off the names of its declaration."""

    def __init__(self, op: Op, backward: Direction) -> None:
        super().__init__(op.name)
        rule = backward.rule
        results = list(rule.outs)
        self.direction = backward
        self.saved_names = op.saved
        # buffers that gradients may be added to: their names, declarations, and places among the gradients
        self.carried = rule.accumulates
        self.carried_args = tuple(rule.outs[name] for name in self.carried)
        self.carried_at = tuple(results.index(name) for name in self.carried)
        names, outs = [*op.forward.ins, *op.forward.outs], list(op.forward.outs)
        self.saved = [names.index(name) for name in op.saved]
        # places of saved arguments that only one gradient needs, and of the argument whose gradient that is
        self.spare = {op.saved.index(name): names.index(of.removeprefix("d_")) for name, of in op.only_for.items()}
        # a single result always has a cotangent when the backward pass runs
        self.several = len(outs) > 1
        # results that the rule has no cotangent of: what is computed from them gives no gradient
        self.private = [i for i, name in enumerate(outs) if name not in op.cotangents]
        # where the arguments of the backward rule come from: a saved tensor, or a cotangent
        self.sources = [
            (True, op.saved.index(name)) if name in op.saved else (False, outs.index(name.removeprefix("d_"))) for name in rule.ins
        ]
        self.cotangents = [i for is_saved, i in self.sources if not is_saved]
        # for every argument the place of its gradient among the results, if it has one
        self.order = [results.index(f"d_{name}") if f"d_{name}" in results else None for name in op.forward.ins]
        self.bits = [(position, 1 << i) for position, i in enumerate(self.order) if i is not None]
        self.nothing = [None] * len(self.order)

    def save(self, ctx: Any, tensors: Sequence[Any], outs: Sequence[Any], offset: int) -> None:
        """Save the tensors that the backward rule names."""
        known = (*tensors, *outs)
        saved = [known[i] for i in self.saved]
        for place, of in self.spare.items():
            if not ctx.needs_input_grad[offset + of]:
                saved[place] = None
        ctx.save_for_backward(*saved)
        if self.several:
            ctx.set_materialize_grads(False)
        if self.private:
            ctx.mark_non_differentiable(*(outs[i] for i in self.private if outs[i] is not None))

    def backward(self, ctx: Any, cotangents: Sequence[Tensor | None], offset: int) -> Sequence[Tensor | None]:
        """Run the backward rule for the gradients that somebody needs."""
        mask, needs = 0, ctx.needs_input_grad
        for position, bit in self.bits:
            if needs[offset + position]:
                mask |= bit
        if not mask or not any(cotangents[i] is not None for i in self.cotangents):
            return self.nothing
        saved = ctx.saved_tensors
        args = [saved[i] if is_saved else cotangents[i] for is_saved, i in self.sources]
        buffers = self._buffers(ctx.call, saved, mask)
        outs = self.direction.call(args if buffers is None else [*args, *buffers], ctx.call.values, mask)
        if buffers is not None:
            for i, buffer in zip(self.carried_at, buffers, strict=True):
                if buffer is not None:
                    outs[i] = None
        return [None if i is None else outs[i] for i in self.order]

    def _buffers(self, call: Call, saved: Sequence[Tensor], mask: int) -> list[Tensor | None] | None:
        """Those of the forward call, and the one that its context finds now that the gradient is due; None without any."""
        found, context = call.carried, call.context
        if context is not None:
            late = context.find(saved[context.saved_at])
            if late is not None:
                found = [late if i == context.carried_at else buffer for i, buffer in enumerate(found)]
        if all(buffer is None for buffer in found):
            return None
        return [buffer if mask >> i & 1 else None for buffer, i in zip(found, self.carried_at, strict=True)]

    def context(self, name: str, find: Callable[[Tensor], Tensor | None]) -> Context:
        """For calls whose gradient of argument `name` goes to a buffer that is found only when it is due."""
        return Context(find, self.saved_names.index(name), self.carried.index(f"d_{name}"))


class Context(NamedTuple):
    """`find(argument)` gives a buffer to add the argument's gradient to, or None; and which tensor and buffer that is."""

    find: Callable[[Tensor], Tensor | None]
    saved_at: int
    carried_at: int


# Arguments of a Function before its tensors.
_EAGER, _FUNCTIONAL = 1, 2


class Call(NamedTuple):
    """What an eager Function is told beside its tensors: one argument, because each of them costs.

    `plain`: nothing but autograd has to see the call; `names`: the results that the caller provides, whose tensors follow the
    arguments; `carried`: buffers for gradients.
    """

    plain: bool
    values: tuple
    mask: int
    context: Context | None
    names: tuple[str, ...]
    carried: tuple[Tensor | None, ...]


def eager_function(direction: Direction) -> Callable[..., Any]:
    """For plain eager and for the Autograd key: apply(call, *arguments, *given)."""
    gradient, runner, masks, num_ins = direction.gradient, direction.runner, direction.masks, direction.num_ins
    accumulates = direction.rule.num_inputs - num_ins

    def forward(ctx: Any, call: Call, *tensors: Any) -> Any:
        plain, values, mask, _, names, carried = call
        given = dict(zip(names, tensors[num_ins:], strict=True)) if names else None
        if plain:
            # what is saved has the kernels' layout: the backward pass need not copy again
            inputs = (*tensors[:num_ins], *carried) if accumulates else tensors[:num_ins]
            ready, results = runner.execute(inputs, values, masks[mask], given)
            outs = [ready[slot] for slot in results]
        else:
            ready, outs = tensors, direction.below((*tensors[:num_ins], *carried), values, mask)
        ctx.call = call
        gradient.save(ctx, ready[:num_ins], outs, _EAGER)
        if given:
            ctx.mark_dirty(*given.values())
        return tuple(outs)

    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        grads = gradient.backward(ctx, cotangents, _EAGER)
        rest = len(ctx.needs_input_grad) - _EAGER - len(grads)
        return (None, *grads, *(None,) * rest) if rest else (None, *grads)

    members = {"forward": forward, "backward": backward, "jvp": _refuse_jvp(direction)}
    function = type(direction.rule.name, (torch.autograd.Function,), {k: staticmethod(f) for k, f in members.items()})
    # the C++ apply itself: the Python one around it looks for transforms of torch.func, which `is_plain` has excluded
    return super(torch.autograd.Function, function).apply


def functional_function(direction: Direction) -> type[torch.autograd.Function]:
    """For torch.func: apply(values, mask, *tensors); buffers for gradients are not written there."""
    gradient, num_ins = direction.gradient, direction.num_ins

    def forward(values: tuple, mask: int, *tensors: Any) -> Any:
        return tuple(direction.call(tensors, values, mask))

    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        values, _, *tensors = inputs
        ctx.call = Call(False, values, direction.all, None, (), (None,) * len(gradient.carried))
        gradient.save(ctx, tensors[:num_ins], output, _FUNCTIONAL)

    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        grads = gradient.backward(ctx, cotangents, _FUNCTIONAL)
        return *(None,) * _FUNCTIONAL, *grads, *(None,) * (len(ctx.needs_input_grad) - _FUNCTIONAL - len(grads))

    def vmap(info: Any, in_dims: tuple, values: tuple, mask: int, *tensors: Any) -> Any:
        return _vmap(direction, info.batch_size, in_dims[_FUNCTIONAL:], values, mask, tensors)

    members = {"forward": forward, "setup_context": setup_context, "backward": backward, "vmap": vmap, "jvp": _refuse_jvp(direction)}
    return type(f"{direction.rule.name}_func", (torch.autograd.Function,), {k: staticmethod(f) for k, f in members.items()})


def _refuse_jvp(direction: Direction) -> Callable[..., Any]:
    def jvp(*_: Any) -> Any:
        raise RuntimeError(f"{direction.rule.name}: forward mode is not implemented")

    return jvp


def _vmap(direction: Direction, size: int, dims: Sequence[int | None], values: tuple, mask: int, tensors: Sequence[Any]) -> Any:
    """One more leading axis where only row arguments are batched and results are rows; otherwise a loop over the batch."""
    rule = direction.rule
    args = [*rule.ins.values(), *(rule.outs[name] for name in rule.accumulates)]
    # accumulators may have been left out, and buffers that are carried along do not concern the rule
    concerned = min(len(args), len(tensors))
    args, tensors, dims = args[:concerned], tensors[:concerned], dims[:concerned]
    batched = [t is not None and d is not None for t, d in zip(tensors, dims, strict=True)]
    rows_only = all(arg.rows or not b for arg, b in zip(args, batched, strict=True))
    wanted = direction.masks[mask]
    if rows_only and all(rule.outs[name].rows for name in wanted):
        front = [_to_front(t, d, size) if t is not None and arg.rows else t for arg, t, d in zip(args, tensors, dims, strict=True)]
        outs = direction.call(front, values, mask)
    else:
        each = ([t.select(d, i) if b else t for t, d, b in zip(tensors, dims, batched, strict=True)] for i in range(size))
        results = [direction.call(one, values, mask) for one in each]
        outs = [None if column[0] is None else torch.stack(column) for column in zip(*results, strict=True)]
    return tuple(outs), tuple(None if t is None else 0 for t in outs)


def _to_front(t: Tensor, dim: int | None, size: int) -> Tensor:
    return t.unsqueeze(0).expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
