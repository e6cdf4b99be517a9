"""`vmap` of a rule. Batched rows are more rows; a batch of parameters, or of parameter gradients, is one call an example."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from tk_jax.ffi import Call
from tk_jax.sharding import sharded


@functools.cache
def batchable(call: Call) -> Any:
    """The function of a call's operands to the tuple of its wanted results; it has a batching rule."""

    @custom_vmap
    def function(*arrays: Any) -> tuple[Any, ...]:
        return sharded(call, arrays)

    @function.def_vmap
    def rule(size: int, batched: Sequence[bool], *arrays: Any) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
        results = _as_rows(call, size, batched, arrays) if _is_rows(call, batched) else _one_by_one(call, batched, arrays)
        return results, (True,) * len(call.wanted)

    return function


def _is_rows(call: Call, batched: Sequence[bool]) -> bool:
    """Whether one call on more rows gives every example its own results."""
    operands = (name for name, there in zip(call.operands, batched, strict=True) if there)
    return all(call.has_rows(name) for name in (*operands, *call.wanted))


def _as_rows(call: Call, size: int, batched: Sequence[bool], arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The batch axis becomes the first of the rows' axes."""
    widened = [
        jnp.broadcast_to(array, (size, *array.shape)) if call.has_rows(name) and not there else array
        for name, there, array in zip(call.operands, batched, arrays, strict=True)
    ]
    return batchable(call)(*widened)


def _one_by_one(call: Call, batched: Sequence[bool], arrays: Sequence[Any]) -> tuple[Any, ...]:
    """A loop over the examples; a loop inside a loop where vmaps are nested."""

    def example(own: Sequence[Any]) -> tuple[Any, ...]:
        rest = iter(own)
        return batchable(call)(*(next(rest) if there else array for there, array in zip(batched, arrays, strict=True)))

    return jax.lax.map(example, [array for there, array in zip(batched, arrays, strict=True) if there])
