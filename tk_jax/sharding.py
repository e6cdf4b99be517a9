"""How a rule is spread over devices: rows stay where they are, everything else is replicated.

Three cases, told apart when a program is traced. Inside a full `shard_map` there is nothing to do. Explicit axes: a
`shard_map` over them, with the partition that the types name. Otherwise (automatic axes, or no mesh yet): a custom
partitioning, which XLA asks when it has decided on shardings. Inner axes that are sharded are gathered; arguments that are
sharded differently follow the first of them. Parameter gradients are summed over the mesh axes that share the rows, in one
all-reduce for all of them. Axes that `vmap` loops over are shared like rows, but never summed over.

Where a mesh has manual or explicit axes beside automatic ones, XLA does not tell how the automatic ones share an array: it
gathers over them, which is right but slow. A `shard_map` over all axes is the way out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from tk_core.op import Rule
from tk_jax import compat
from tk_jax.ffi import Call, launch

# The mesh axes that share a leading axis, by its label ("row0", "loop0").
Partition = Mapping[str, tuple[str, ...]]
Labels = Sequence[tuple[str, ...]]


def sharded(call: Call, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The wanted results of a rule, computed by every device on the rows that it holds."""
    arrays = compat.vary(arrays)
    mesh = compat.explicit_mesh(arrays)
    if mesh is not None:
        return _explicit(call, arrays, mesh)
    if compat.inside_manual():
        return tuple(launch(call, arrays))
    return _partitioned(call)(*arrays)


def conform(rule: Rule, present: tuple[bool, ...], arrays: Sequence[Any]) -> list[Any]:
    """Arrays in the explicit sharding in which a rule takes them; outside the gradient, so that its transpose is right."""
    mesh = compat.explicit_mesh(arrays)
    if mesh is None:
        return list(arrays)
    call = Call(rule, (), (*present, *(False for _ in rule.accumulates)), ())
    labels = call.labels([array.ndim for array in arrays])
    return _resharded(arrays, mesh, labels, _partition_of(labels, [compat.spec_of(array) for array in arrays]))


def _resharded(arrays: Sequence[Any], mesh: AbstractMesh, labels: Labels, partition: Partition) -> list[Any]:
    moved = []
    for array, own in zip(arrays, labels, strict=True):
        spec = _spec(own, partition, array.ndim)
        there = compat.explicit_mesh([array]) is not None and compat.spec_of(array) == tuple(spec)
        moved.append(array if there else compat.reshard(array, mesh, spec))
    return moved


def _axes(entry: Any) -> tuple[str, ...]:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


def _partition_of(labels: Labels, specs: Sequence[Sequence[Any]]) -> Partition:
    """For every leading axis what the first array says that says anything; no mesh axis is used twice."""
    found: dict[str, tuple[str, ...]] = {}
    used: set[str] = set()
    for own, spec in zip(labels, specs, strict=True):
        for label, entry in zip(own, spec, strict=False):
            axes = _axes(entry)
            if axes and label not in found and used.isdisjoint(axes):
                found[label] = axes
                used.update(axes)
    return found


def _spec(labels: Sequence[str], partition: Partition, ndim: int) -> PartitionSpec:
    entries = [partition.get(label, ()) for label in labels]
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in entries), *(None,) * (ndim - len(entries)))


def _prefix(labels: Sequence[str], partition: Partition) -> PartitionSpec:
    return _spec(labels, partition, len(labels))


def _splittable(call: Call, partition: Partition) -> Partition:
    """Rows are shared only where every result has rows, or is a sum over them."""
    if call.rule.partial_results or all(call.has_rows(name) for name in call.wanted):
        return partition
    return {label: axes for label, axes in partition.items() if not label.startswith("row")}


def _on_one_device(call: Call, partition: Partition, *arrays: Any) -> tuple[Any, ...]:
    """The results on one device's rows; those without rows are summed over the devices that share the rows."""
    axes = tuple(axis for label, own in partition.items() if label.startswith("row") for axis in own)
    sums = [name for name in call.wanted if not call.has_rows(name)]
    if axes:
        arrays = tuple(_once(array, axes) if name in sums else array for name, array in zip(call.operands, arrays, strict=True))
    values = dict(zip(call.wanted, launch(call, compat.vary(arrays)), strict=True))
    if axes and sums:
        values.update(zip(sums, jax.lax.psum(tuple(values[name] for name in sums), axes), strict=True))
    return tuple(values[name] for name in call.wanted)


def _once(accumulator: Any, axes: tuple[str, ...]) -> Any:
    """An accumulator of a sum over devices: the first of them adds to it, the others to zero."""
    return jnp.where(jax.lax.axis_index(axes) == 0, accumulator, jnp.zeros_like(accumulator))


# ------------------------------------------------------------------ explicit axes


def _explicit(call: Call, arrays: Sequence[Any], mesh: AbstractMesh) -> tuple[Any, ...]:
    labels = call.labels([array.ndim for array in arrays])
    partition = _splittable(call, _partition_of(labels, [compat.spec_of(array) for array in arrays]))
    split = jax.shard_map(
        functools.partial(_on_one_device, call, partition),
        mesh=mesh,
        in_specs=tuple(_prefix(own, partition) for own in labels),
        out_specs=tuple(_prefix(own, partition) for own in call.result_labels(labels)),
        axis_names=compat.manual_axes(mesh),
    )
    return split(*_resharded(arrays, mesh, labels, partition))


# ------------------------------------------------------------------ automatic axes


@functools.cache
def _partitioned(call: Call) -> Any:
    @custom_partitioning
    def rule(*arrays: Any) -> tuple[Any, ...]:
        return tuple(launch(call, arrays))

    def partition(mesh: Any, args: Any, results: Any) -> Any:
        labels = call.labels([len(arg.shape) for arg in args])
        shared = _even(call, mesh, labels, args)
        given = tuple(NamedSharding(mesh, _prefix(own, shared)) for own in labels)
        return mesh, functools.partial(_on_one_device, call, shared), _results(call, mesh, labels, shared), given

    def infer(mesh: Any, args: Any, results: Any) -> Any:
        labels = call.labels([len(arg.shape) for arg in args])
        return _results(call, mesh, labels, _even(call, mesh, labels, args))

    rule.def_partition(partition, infer_sharding_from_operands=infer, sharding_rule=functools.partial(_factors, call))
    return rule


def _results(call: Call, mesh: Any, labels: Labels, partition: Partition) -> tuple[NamedSharding, ...]:
    return tuple(NamedSharding(mesh, _prefix(own, partition)) for own in call.result_labels(labels))


def _even(call: Call, mesh: Any, labels: Labels, args: Sequence[Any]) -> Partition:
    """The partition that the arguments have, without axes that would pad rows: padding would be summed into gradients."""
    specs = [tuple(arg.sharding.spec) if isinstance(arg.sharding, NamedSharding) else () for arg in args]
    sizes = {label: size for own, arg in zip(labels, args, strict=True) for label, size in zip(own, arg.shape, strict=False)}
    found = _splittable(call, _partition_of(labels, specs))
    return {label: axes for label, axes in found.items() if sizes[label] % math.prod(mesh.shape[axis] for axis in axes) == 0}


def _factors(call: Call, mesh: Any, values: Sequence[Any], results: Sequence[Any]) -> tuple[str, dict[str, Any]]:
    """The rule for Shardy: leading axes pass through, every inner axis must be whole."""
    labels = call.labels([len(kind.shape) for kind in values])
    whole: list[str] = []

    def term(prefix: str, own: Sequence[str], kind: Any) -> str:
        inner = [f"{prefix}x{axis}" for axis in range(len(kind.shape) - len(own))]
        whole.extend(inner)
        return " ".join([*own, *inner])

    left = [term(f"a{i}", own, kind) for i, (own, kind) in enumerate(zip(labels, values, strict=True))]
    right = [term(f"r{i}", own, kind) for i, (own, kind) in enumerate(zip(call.result_labels(labels), results, strict=True))]
    return f"{', '.join(left)} -> {', '.join(right)}", {"need_replication_factors": tuple(whole)}
