"""`vmap` of a rule. Batched rows are more rows; a batch of parameters, or of parameter gradients, is one call an example."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

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
        if _is_rows(call, batched):
            results = _as_rows(call, size, batched, arrays)
        else:
            results = batchable(call._replace(loops=(tuple(batched), *call.loops)))(*arrays)
        return results, (True,) * len(call.wanted)

    return function


def _is_rows(call: Call, batched: Sequence[bool]) -> bool:
    """Whether one call on more rows gives every example its own results."""
    operands = (name for name, there in zip(call.operands, batched, strict=True) if there)
    return all(call.has_rows(name) for name in (*operands, *call.wanted))


def _as_rows(call: Call, size: int, batched: Sequence[bool], arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The batch axis becomes the first of the rows' axes, behind the axes that are looped over."""
    widened = []
    for name, looped, there, array in zip(call.operands, call.loop_labels, batched, arrays, strict=True):
        depth = len(looped)
        if there:
            widened.append(jnp.moveaxis(array, 0, depth))
        elif call.has_rows(name):
            shape = (*array.shape[:depth], size, *array.shape[depth:])
            widened.append(jnp.broadcast_to(jnp.expand_dims(array, depth), shape))
        else:
            widened.append(array)
    return tuple(jnp.moveaxis(result, len(call.loops), 0) for result in batchable(call)(*widened))
