"""What differs between jax 0.9 and 0.11, and the few names that jax offers outside its top level. Nothing else here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

__all__ = ["Primitive", "abstract_result", "explicit_mesh", "inside_manual", "manual_axes", "mlir", "spec_of", "vary", "varying"]


def varying(array: Any) -> frozenset[str]:
    """The mesh axes of an enclosing `shard_map` over which an array differs from device to device."""
    kind = jax.typeof(array)
    manual = getattr(kind, "manual_axis_type", None)
    # jax 0.9 has the set itself on the type
    return frozenset(kind.vma if manual is None else manual.varying)


def vary(arrays: Sequence[Any]) -> list[Any]:
    """The same arrays, all varying over the same mesh axes. The transpose of this is the sum over those axes."""
    axes = [varying(array) for array in arrays]
    every = frozenset().union(*axes)
    return [
        jax.lax.pcast(array, tuple(sorted(every - own)), to="varying") if every - own else array
        for array, own in zip(arrays, axes, strict=True)
    ]


def abstract_result(like: Sequence[Any], shape: Sequence[int], dtype: Any) -> Any:
    """A result type that varies over the axes of the given types and is sharded over nothing."""
    first = max(like, key=_number_of_axes)
    sharding = first.sharding.update(spec=PartitionSpec(*(None,) * len(shape)))
    return first.update(shape=tuple(shape), dtype=dtype, weak_type=False, sharding=sharding)


def _number_of_axes(kind: Any) -> int:
    manual = getattr(kind, "manual_axis_type", None)
    return len(kind.vma if manual is None else manual.varying)


def explicit_mesh(arrays: Sequence[Any]) -> AbstractMesh | None:
    """The mesh with explicit axes that the types of some arrays name, else that of `jax.set_mesh`; None without one."""
    # jax 0.11 does not put the mesh of the context on the type of an array that nobody has placed
    meshes = (*(jax.typeof(array).sharding.mesh for array in arrays), jax.sharding.get_abstract_mesh())
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def manual_axes(mesh: AbstractMesh) -> frozenset[str]:
    """What `shard_map` must be told to take the explicit axes: nothing where that is all there are.

    An axis that an enclosing `vmap` runs over must not be named, and nothing public tells which one it is.
    """
    names = frozenset(mesh.explicit_axes)
    return frozenset() if len(names) == len(mesh.axis_names) else names


def spec_of(array: Any) -> tuple[Any, ...]:
    """The partition of an array as its type tells it, one entry an axis."""
    kind = jax.typeof(array)
    spec = tuple(kind.sharding.spec)
    return spec + (None,) * (len(kind.shape) - len(spec))


def reshard(array: Any, mesh: AbstractMesh, spec: PartitionSpec) -> Any:
    """The same values under another explicit sharding."""
    return jax.sharding.reshard(array, NamedSharding(mesh, spec))


def inside_manual() -> bool:
    """Whether every axis of the mesh is manual here, as inside a full `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and len(mesh.manual_axes) == len(mesh.axis_names)
