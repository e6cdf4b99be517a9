"""How a rule is spread over devices: rows stay where they are, everything else is replicated.

Three cases, told apart when a program is traced. Inside a full `shard_map` there is nothing to do. Explicit axes: a
`shard_map` over them, with the partition that the types name. Otherwise (automatic axes, or no mesh yet): a custom
partitioning, which XLA asks when it has decided on shardings. Inner axes that are sharded are gathered. Parameter gradients
are summed over the axes that share the rows, in one all-reduce for all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from tk_core.op import Rule
from tk_jax import compat
from tk_jax.ffi import Call, launch

# One entry for every leading axis: the mesh axes that share it.
Rows = tuple[tuple[str, ...], ...]


def sharded(call: Call, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The wanted results of a rule, computed by every device on the rows that it holds."""
    arrays = compat.vary(arrays)
    mesh = compat.explicit_mesh(arrays)
    if mesh is not None:
        return _explicit(call, arrays, mesh)
    if compat.inside_manual():
        return tuple(launch(call, arrays))
    return _partitioned(call)(*arrays)


def conform(rule: Rule, names: Sequence[str], arrays: Sequence[Any]) -> list[Any]:
    """Arrays in the explicit sharding in which a rule takes them; outside the gradient, so that its transpose is right."""
    mesh = compat.explicit_mesh(arrays)
    if mesh is None:
        return list(arrays)
    leads = [array.ndim - len(rule.ins[name].inner) if rule.ins[name].rows else 0 for name, array in zip(names, arrays, strict=True)]
    rows = _rows_of(leads, [compat.spec_of(array) for array in arrays])
    return [_resharded(array, mesh, _spec(rows[:lead], array.ndim)) for array, lead in zip(arrays, leads, strict=True)]


def _resharded(array: Any, mesh: AbstractMesh, spec: PartitionSpec) -> Any:
    if jax.typeof(array).sharding.mesh.explicit_axes and compat.spec_of(array) == tuple(spec):
        return array
    return compat.reshard(array, mesh, spec)


def _axes(entry: Any) -> tuple[str, ...]:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


def _rows_of(leads: Sequence[int], specs: Sequence[Sequence[Any]]) -> Rows:
    """The partition of the rows: for every leading axis what the first array says that says anything."""
    found: list[tuple[str, ...]] = [()] * max(leads, default=0)
    used: set[str] = set()
    for i in range(len(found)):
        for lead, spec in zip(leads, specs, strict=True):
            axes = _axes(spec[i]) if i < lead else ()
            if axes and used.isdisjoint(axes):
                found[i] = axes
                used.update(axes)
                break
    return tuple(found)


def _spec(rows: Rows, ndim: int) -> PartitionSpec:
    entries = [axes[0] if len(axes) == 1 else axes or None for axes in rows]
    return PartitionSpec(*entries, *(None,) * (ndim - len(entries)))


def _sums(call: Call) -> tuple[str, ...]:
    """Wanted results that every device has only its rows' part of."""
    return tuple(name for name in call.wanted if not call.has_rows(name))


def _may_split(call: Call) -> bool:
    return call.rule.partial_results or not _sums(call)


def _on_one_device(call: Call, rows: Rows, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The results on one device's rows; those without rows are summed over the devices that share the rows."""
    axes = tuple(axis for entry in rows for axis in entry)
    names = _sums(call)
    if axes:
        arrays = [_once(array, axes) if name in names else array for name, array in zip(call.operands, arrays, strict=True)]
    values = dict(zip(call.wanted, launch(call, compat.vary(arrays)), strict=True))
    if axes and names:
        values.update(zip(names, jax.lax.psum(tuple(values[name] for name in names), axes), strict=True))
    return tuple(values[name] for name in call.wanted)


def _once(accumulator: Any, axes: tuple[str, ...]) -> Any:
    """An accumulator of a sum over devices: the first of them adds to it, the others to zero."""
    return jnp.where(jax.lax.axis_index(axes) == 0, accumulator, jnp.zeros_like(accumulator))


# ------------------------------------------------------------------ explicit axes


def _explicit(call: Call, arrays: Sequence[Any], mesh: AbstractMesh) -> tuple[Any, ...]:
    leads = [call.lead_axes(name, array.ndim) for name, array in zip(call.operands, arrays, strict=True)]
    rows = _rows_of(leads, [compat.spec_of(array) for array in arrays]) if _may_split(call) else ((),) * max(leads, default=0)
    specs = [_spec(rows[:lead], array.ndim) for lead, array in zip(leads, arrays, strict=True)]
    arrays = [_resharded(array, mesh, spec) for array, spec in zip(arrays, specs, strict=True)]
    env = call.bind(arrays)
    results = tuple(
        _spec(rows if call.has_rows(name) else (), len(shape))
        for name, (shape, _) in zip(call.wanted, call.rule.result_types(env, call.wanted), strict=True)
    )
    split = jax.shard_map(
        lambda *shards: _on_one_device(call, rows, shards),
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=results,
        axis_names=compat.manual_axes(mesh),
    )
    return split(*arrays)


# ------------------------------------------------------------------ automatic axes


@functools.cache
def _partitioned(call: Call) -> Any:
    @custom_partitioning
    def rule(*arrays: Any) -> tuple[Any, ...]:
        return tuple(launch(call, arrays))

    def partition(mesh: Any, args: Any, results: Any) -> Any:
        leads = [call.lead_axes(name, len(arg.shape)) for name, arg in zip(call.operands, args, strict=True)]
        rows = _even_rows(call, mesh, leads, args)
        arg_shardings = tuple(NamedSharding(mesh, _spec(rows[:lead], len(arg.shape))) for lead, arg in zip(leads, args, strict=True))
        return mesh, functools.partial(_shards, call, rows), _result_shardings(call, mesh, rows, results), arg_shardings

    def infer(mesh: Any, args: Any, results: Any) -> Any:
        leads = [call.lead_axes(name, len(arg.shape)) for name, arg in zip(call.operands, args, strict=True)]
        return _result_shardings(call, mesh, _even_rows(call, mesh, leads, args), results)

    rule.def_partition(partition, infer_sharding_from_operands=infer, sharding_rule=functools.partial(_factors, call))
    return rule


def _shards(call: Call, rows: Rows, *shards: Any) -> tuple[Any, ...]:
    return _on_one_device(call, rows, shards)


def _result_shardings(call: Call, mesh: Any, rows: Rows, results: Any) -> tuple[NamedSharding, ...]:
    return tuple(
        NamedSharding(mesh, _spec(rows if call.has_rows(name) else (), len(result.shape)))
        for name, result in zip(call.wanted, results, strict=True)
    )


def _even_rows(call: Call, mesh: Any, leads: Sequence[int], args: Sequence[Any]) -> Rows:
    """The partition of the rows, without axes that would pad them: padded rows would be summed into parameter gradients."""
    longest = max(leads, default=0)
    if not _may_split(call):
        return ((),) * longest
    specs = [tuple(arg.sharding.spec) + (None,) * len(arg.shape) if isinstance(arg.sharding, NamedSharding) else () for arg in args]
    leads = [lead if spec else 0 for lead, spec in zip(leads, specs, strict=True)]
    rows = _rows_of(leads, specs) + ((),) * (longest - max(leads, default=0))
    sizes = next((arg.shape for lead, arg in zip(leads, args, strict=True) if lead == longest), ())
    devices = [_product(mesh.shape[axis] for axis in axes) for axes in rows]
    return tuple(axes if number and size % number == 0 else () for axes, number, size in zip(rows, devices, sizes, strict=False))


def _product(numbers: Any) -> int:
    return functools.reduce(lambda a, b: a * b, numbers, 1)


def _factors(call: Call, mesh: Any, values: Sequence[Any], results: Sequence[Any]) -> tuple[str, dict[str, Any]]:
    """The rule for Shardy: leading axes pass through, every inner axis must be whole."""
    whole: list[str] = []

    def term(prefix: str, name: str, kind: Any) -> str:
        ndim = len(kind.shape)
        lead = call.lead_axes(name, ndim)
        inner = [f"{prefix}x{axis}" for axis in range(ndim - lead)]
        whole.extend(inner)
        return " ".join([*(f"row{axis}" for axis in range(lead)), *inner])

    left = [term(f"a{i}", name, kind) for i, (name, kind) in enumerate(zip(call.operands, values, strict=True))]
    right = [term(f"r{i}", name, kind) for i, (name, kind) in enumerate(zip(call.wanted, results, strict=True))]
    return f"{', '.join(left)} -> {', '.join(right)}", {"need_replication_factors": tuple(whole)}
