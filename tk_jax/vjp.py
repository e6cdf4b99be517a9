"""A declared operation as a JAX function: gradient, batching, sharding and the compiled kernels, all read off the `Op`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from tk_core.errors import type_error
from tk_core.op import Op, Rule
from tk_jax import compat
from tk_jax.batching import batchable
from tk_jax.ffi import Call, type_of
from tk_jax.sharding import conform


def bind(op: Op, returns: tuple[str, ...] = (), in_place: bool = False, name: str = "", advice: str = "") -> Callable[..., Any]:
    """The operation as a function of arrays and static attributes.

    Args:
        op: the declaration.
        returns: the results to compute where that is not all public ones; the function gives them as a tuple.
        in_place: the only result takes the memory of the first argument where XLA may overwrite it; not differentiable then.
        name: what errors about gradients call the operation.
        advice: what they say to do instead; with it integer results are refused as well, whose gradient would silently be zero.

    Returns:
        `function(*arrays, **attrs)`: arrays in the order of the declaration (`None` for an absent optional one; trailing ones may
        be left out), attributes by name. It can be differentiated once in reverse mode, and works under every other transformation.
    """
    rule = op.forward

    def function(*arrays: Any, **attrs: Any) -> Any:
        values = rule.attributes(attrs)
        if len(arrays) != len(rule.ins):
            arrays = _completed(rule, arrays)
        present = tuple(array is not None for array in arrays)
        given = [as_array(rule, name, array) for name, array in zip(rule.ins, arrays, strict=True) if array is not None]
        return _compiled(op, values, present, returns, in_place, name, advice)(*given)

    function.__name__ = function.__qualname__ = op.name
    function.__doc__ = op.doc
    return function


def _completed(rule: Rule, arrays: Sequence[Any]) -> tuple[Any, ...]:
    if len(arrays) > len(rule.ins):
        raise type_error(rule.name, "arguments", f"at most {len(rule.ins)} arrays ({', '.join(rule.ins)})", len(arrays))
    return (*arrays, *(None,) * (len(rule.ins) - len(arrays)))


def as_array(rule: Rule, name: str, value: Any) -> Any:
    """A JAX array of a JAX or NumPy array; raises for anything else, and where JAX would cut a dtype to 32 bits."""
    if isinstance(value, jax.Array):
        return value
    arg = rule.outs[name] if name not in rule.ins else rule.ins[name]
    if not isinstance(value, np.ndarray | np.generic):
        raise type_error(rule.name, name, arg.kind, type(value).__name__)
    if value.dtype.name not in arg.dtypes:
        raise type_error(rule.name, name, f"dtype {' or '.join(arg.dtypes)}", value.dtype.name)
    return jnp.asarray(value)


@functools.cache
def _compiled(
    op: Op,
    values: tuple,
    present: tuple[bool, ...],
    returns: tuple[str, ...] = (),
    in_place: bool = False,
    name: str = "",
    advice: str = "",
) -> Any:
    """One function for a set of attributes and present arguments; jit keeps a program for every set of shapes."""
    rule = op.forward
    attrs = dict(zip(rule.attrs, values, strict=True))
    names = tuple(name for name, there in zip(rule.ins, present, strict=True) if there)
    if op.backward is not None:
        differentiable = _differentiable(op, attrs, present, names, returns)
    else:
        call = Call.of(rule, attrs, present, returns or rule.outs, in_place)
        public = tuple if returns else lambda results: op.public(dict(zip(call.wanted, results, strict=True)))
        if op.straight_through and not in_place:
            differentiable = _straight_through(name or op.name, call, public)
        else:
            differentiable = _not_differentiable(name or op.name, advice, call, public)

    def function(*arrays: Any) -> Any:
        given = iter(arrays)
        # judged here, on the shapes that the caller sees, not on those of one shard or of a whole batch
        rule.bind([type_of(next(given)) if there else None for there in present], attrs)
        return differentiable(*conform(rule, present, compat.vary(arrays)))

    function.__name__ = function.__qualname__ = op.name
    return jax.jit(function)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Wanted:
    """Gradients that are asked for; static, so that it may travel with the residuals."""

    names: tuple[str, ...]


def _differentiable(op: Op, attrs: Mapping[str, Any], present: tuple[bool, ...], names: tuple[str, ...], returns: tuple[str, ...]) -> Any:
    rule, backward = op.forward, op.backward
    given_back = returns or op.returns

    # every result, also those that only the gradient needs; without a gradient those that nobody would see are left out
    call = Call.of(rule, attrs, present, rule.outs)
    plain = Call.of(rule, attrs, present, [name for name, arg in rule.outs.items() if name in given_back or not arg.optional])

    def public(values: Mapping[str, Any]) -> Any:
        return tuple(values[name] for name in returns) if returns else op.public(values)

    def primal(*arrays: Any) -> Any:
        return public(dict(zip(plain.wanted, batchable(plain)(*arrays), strict=True)))

    def forward(*primals: Any) -> tuple[Any, Any]:
        arrays = [primal.value for primal in primals]
        perturbed = [name for name, primal in zip(names, primals, strict=True) if primal.perturbed]
        wanted = tuple(f"d_{name}" for name in perturbed if f"d_{name}" in backward.outs)
        saved = [name for name in op.saved if op.only_for.get(name, wanted and wanted[0]) in wanted] if wanted else []
        results = dict(zip(call.wanted, _final(call, op.name)(*arrays), strict=True))
        known = dict(zip(names, arrays, strict=True)) | results
        return public(results), (_Wanted(wanted), {name: known[name] for name in saved if name in known})

    def pull(residuals: Any, cotangents: Any) -> tuple[Any, ...]:
        wanted, saved = residuals
        several = cotangents if returns or len(op.returns) > 1 else (cotangents,)
        given = {name: ct for name, ct in zip(given_back, several, strict=True) if not isinstance(ct, SymbolicZero)}
        if not given or not wanted.names:
            return (None,) * len(names)
        arrays = [saved[name] if name in op.saved and name in saved else given.get(name[2:]) for name in backward.ins]
        gradients = call_rule(backward, arrays, attrs, wanted.names, differentiated=op.name)
        return tuple(gradients.get(f"d_{name}") for name in names)

    primal.__name__ = op.name
    function = jax.custom_vjp(primal)
    function.defvjp(forward, pull, symbolic_zeros=True)
    return function


def _not_differentiable(name: str, advice: str, call: Call, public: Callable[[Any], Any]) -> Any:
    """An operation without a gradient: whoever differentiates it is told so, instead of getting zeros."""

    def primal(*arrays: Any) -> Any:
        return public(batchable(call)(*arrays))

    primal.__name__ = name
    function = jax.custom_jvp(primal)

    def refuse(primals: Any, tangents: Any) -> Any:
        results = function(*primals)
        perturbed = any(not isinstance(tangent, SymbolicZero) for tangent in tangents)
        if perturbed and (advice or any(jnp.issubdtype(result.dtype, jnp.inexact) for result in jax.tree.leaves(results))):
            raise NotImplementedError(f"{name}: the gradient is not implemented{advice}")
        return results, jax.tree.map(lambda result: zero_from_primal(result, symbolic_zeros=False), results)

    function.defjvp(refuse, symbolic_zeros=True)
    return function


def refuse_gradient(name: str, what: str, array: Any) -> Any:
    """The array as it is; whoever differentiates through it is told that there is no gradient for `what`."""
    if not isinstance(array, jax.Array):
        return array

    @jax.custom_jvp
    def same(value: Any) -> Any:
        return value

    def refuse(primals: Any, tangents: Any) -> Any:
        if not isinstance(tangents[0], SymbolicZero):
            raise NotImplementedError(f"{name}: the gradient is not implemented for {what}")
        return primals[0], zero_from_primal(primals[0], symbolic_zeros=False)

    same.defjvp(refuse, symbolic_zeros=True)
    return same(array)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _DType:
    """The dtype of an argument; static, so that it may travel with the residuals."""

    name: str


def _straight_through(name: str, call: Call, public: Callable[[Any], Any]) -> Any:
    """The gradient of the first argument is the cotangent in its dtype; can be differentiated again."""

    def primal(*arrays: Any) -> Any:
        return public(batchable(call)(*arrays))

    def forward(*arrays: Any) -> tuple[Any, _DType]:
        return function(*arrays), _DType(arrays[0].dtype.name)

    def pull(dtype: _DType, cotangent: Any) -> tuple[Any, ...]:
        return (cotangent.astype(dtype.name), *(None,) * (sum(call.present) - 1))

    primal.__name__ = name
    function = jax.custom_vjp(primal)
    function.defvjp(forward, pull)
    return function


def bind_backward(op: Op) -> Callable[..., dict[str, Any]]:
    """The gradient rule as a function of its own, for callers that accumulate into gradients in place.

    Args:
        op: a declaration with a gradient rule.

    Returns:
        `function(*arrays, wanted=None, acc=None, **attrs)`: arrays as in `op.backward.ins`, `wanted` the names of the gradients to
        compute (all), `acc` arrays by the name of the gradient that is to be added to them. It gives the gradients by name.
    """
    rule = op.backward
    if rule is None:
        raise ValueError(f"{op.name}: has no gradient rule")

    def function(*arrays: Any, wanted: Iterable[str] | None = None, acc: Mapping[str, Any] | None = None, **attrs: Any) -> dict[str, Any]:
        named = dict(zip(rule.attrs, rule.attributes(attrs), strict=True))
        given = [None if array is None else as_array(rule, name, array) for name, array in zip(rule.ins, arrays, strict=True)]
        return call_rule(rule, given, named, tuple(rule.outs) if wanted is None else wanted, acc, differentiated=op.name)

    function.__name__ = function.__qualname__ = rule.name
    return function


def call_rule(
    rule: Rule,
    arrays: Sequence[Any],
    attrs: Mapping[str, Any],
    wanted: Iterable[str],
    acc: Mapping[str, Any] | None = None,
    *,
    differentiated: str = "",
) -> dict[str, Any]:
    """Call one rule; it has no gradient of its own.

    Args:
        rule: the rule.
        arrays: its arguments in order, `None` for absent ones.
        attrs: every attribute by name.
        wanted: the results to compute.
        acc: accumulators by the name of the result that is added to them. The result takes the accumulator's memory where XLA
            may overwrite it, as under `jax.jit(..., donate_argnums=...)`; otherwise XLA copies it first.
        differentiated: the operation to name where somebody differentiates this.

    Returns:
        The wanted results by name.
    """
    added = [(acc or {}).get(name) for name in rule.accumulates]
    operands = [*arrays, *added]
    call = Call.of(rule, attrs, [operand is not None for operand in operands], wanted)
    run = _final(call, differentiated or rule.name)
    results = run(*compat.vary([operand for operand in operands if operand is not None]))
    return dict(zip(call.wanted, results, strict=True))


@functools.cache
def _final(call: Call, name: str) -> Any:
    """A call that raises where it is differentiated again: without this, JAX would differentiate around the kernels."""

    def refuse(*arrays: Any) -> Any:
        raise NotImplementedError(f"{name}: double backward is not implemented")

    def primal(*arrays: Any) -> tuple[Any, ...]:
        return batchable(call)(*arrays)

    primal.__name__ = name
    function = jax.custom_vjp(primal)
    function.defvjp(refuse, refuse)
    return function
