"""DTensor rules from the declarations: rows may be sharded along any leading axis, parameter gradients are partial sums.

A plain tensor mixed with a DTensor raises, as everywhere in torch: distribute a parameter with `Replicate()` first.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tk_torch.library import Direction


def has_dtensor(tensors: Any) -> bool:
    """Whether a call concerns DTensor; asks no more than the type's name, so that nothing is imported for others."""
    return any(type(t).__name__ == "DTensor" for t in tensors)


@functools.cache
def register(direction: Direction) -> None:
    """Register the sharding rule of one operator, the first time that it meets a DTensor."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    rule = direction.rule
    args = [*rule.ins.values(), *(rule.outs[name] for name in rule.accumulates), *direction.carried_args]

    def placements(*values: Any) -> list[tuple[list[Any], list[Any]]]:
        tensors, attributes, mask = direction.split(values)
        wanted = [mask >> i & 1 for i in range(len(rule.outs))]
        found = []
        # an operation without rows takes whole tensors
        lead = next((len(t.shape) - len(arg.inner) for arg, t in zip(args, tensors, strict=True) if t is not None and arg.rows), 0)
        # an accumulator of a parameter gradient is whole on every rank: it cannot take a partial sum
        buffers = zip(args[len(rule.ins) :], tensors[len(rule.ins) :], strict=True)
        whole = any(t is not None and not arg.rows for arg, t in buffers)
        for axis in (None, *(() if whole else range(lead))):
            rows = Replicate() if axis is None else Shard(axis)
            sums = Replicate() if axis is None else Partial()
            results = [
                Replicate() if not want else rows if arg.rows else sums if direction.selective else Replicate()
                for want, arg in zip(wanted, rule.outs.values(), strict=True)
            ]
            given = [None if t is None else rows if arg.rows else Replicate() for arg, t in zip(args, tensors, strict=True)]
            extra = [None] * (len(attributes) + direction.selective)
            found.append((results, [*given[: len(rule.ins)], *extra, *given[len(rule.ins) : len(values) - len(extra)]]))
        return found

    register_sharding(direction.operator)(placements)
