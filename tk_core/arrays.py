"""`tk_core.call`: run an operation on arrays of any library, without naming a front end.

torch tensors and JAX arrays go through their front end. CuPy and NumPy arrays (with the ml_dtypes of NumPy) are planned
and launched here; their results come from their own allocators. Arguments of another kind than the first are taken over
by DLPack, without a copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from tk_core.errors import type_error, value_error
from tk_core.op import Op, Rule
from tk_core.plan import Plan


def call(op: Op | str, *arrays: Any, **attributes: Any) -> Any:
    """Run an operation; there is no gradient on this path.

    Args:
        op: the operation or its name.
        *arrays: its arguments in order; None where one is optional. NumPy arrays or DLPack objects of one device.
        **attributes: its attributes.

    Returns:
        The public results as arrays of the first argument's kind: one array, or a tuple.

    Raises:
        TypeError: a wrong dtype, or an object that is no array.
        ValueError: a wrong shape, range or device.
    """
    if isinstance(op, str):
        from tk_core import registry

        op = registry.get(op)
    first = next((a for a in arrays if a is not None), None)
    kind = type(first).__module__.partition(".")[0]
    if kind == "torch":
        import torch

        from tk_torch.library import bind

        return bind(op)(*(_taken(a, torch.Tensor, torch.from_dlpack) for a in arrays), **attributes)
    if kind in ("jax", "jaxlib"):
        import jax

        from tk_jax.vjp import bind as bind_jax

        return bind_jax(op)(*(_taken(a, jax.Array, jax.dlpack.from_dlpack) for a in arrays), **attributes)
    if kind == "numpy":
        return op.public(_run_numpy(op.forward, arrays, attributes))
    if kind == "cupy":
        return op.public(_run_cupy(op.forward, arrays, attributes))
    if hasattr(first, "__dlpack__"):
        device_type, _ = first.__dlpack_device__()
        if device_type == 1:
            import numpy as np

            return op.public(_run_numpy(op.forward, [None if a is None else np.from_dlpack(a) for a in arrays], attributes))
    raise type_error(op.name, next(iter(op.forward.ins), "arguments"), "a NumPy array or a DLPack object", type(first).__name__)


def _taken(array: Any, kind: type, take: Any) -> Any:
    return array if array is None or isinstance(array, kind) or not hasattr(array, "__dlpack__") else take(array)


def _run_numpy(rule: Rule, arrays: Sequence[Any], attributes: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    from tk_core.dtypes import numpy_dtype

    ready = _contiguous([None if a is None else np.asarray(a) for a in arrays], np.ascontiguousarray)
    types = [None if a is None else (a.shape, a.dtype.name, "cpu") for a in ready]

    def empty(shape: tuple[int, ...], dtype: str) -> Any:
        return np.empty(shape, numpy_dtype(dtype))

    return _execute(rule, "c", ready, types, attributes, empty, _NumpyTensor, np.ndarray.fill)


def _run_cupy(rule: Rule, arrays: Sequence[Any], attributes: dict[str, Any]) -> dict[str, Any]:
    import cupy as cp

    from tk_core.device import arch_of
    from tk_core.dtypes import numpy_dtype

    ready = _contiguous([_taken(a, cp.ndarray, cp.from_dlpack) for a in arrays], cp.ascontiguousarray)
    types = [None if a is None else (a.shape, a.dtype.name, f"cuda:{a.device.id}") for a in ready]
    device = next(a.device for a in ready if a is not None)
    capability = device.compute_capability
    with device:
        return _execute(
            rule, arch_of(int(capability[:-1]), int(capability[-1])), ready, types, attributes,
            lambda shape, dtype: cp.empty(shape, numpy_dtype(dtype)), lambda a: a, cp.ndarray.fill,
        )  # fmt: skip


def _contiguous(arrays: Sequence[Any], copy: Any) -> list[Any]:
    """Arrays as kernels take them; what is not contiguous is copied once, and counted."""
    from tk_core.kernels import count_copy

    strided = [a is not None and not a.flags.c_contiguous for a in arrays]
    count_copy(sum(strided))
    return [copy(a) if s else a for a, s in zip(arrays, strided, strict=True)]


def _execute(
    rule: Rule, target: str, arrays: Sequence[Any], types: Sequence[Any], attributes: dict[str, Any], empty: Any, wrap: Any, fill: Any
) -> dict[str, Any]:
    """Plan, allocate and launch; results by name."""
    if len(arrays) != len(rule.ins):
        raise value_error(rule.name, "arguments", f"{len(rule.ins)} arrays ({', '.join(rule.ins)})", len(arrays))
    attrs = dict(zip(rule.attrs, rule.attributes(attributes), strict=True))
    types = [*types, *[None] * len(rule.accumulates)]
    plan = Plan(rule, target, types, attrs, frozenset(rule.outs))
    memory: list[Any] = [*arrays, *[None] * (plan.num_slots - len(arrays))]
    for slot, shape, dtype in (*plan.outs, *plan.work):
        memory[slot] = empty(shape, dtype)
    if not plan.steps:
        for slot in plan.zeros:
            fill(memory[slot], 0)
    flat = plan.flat or (None,) * len(memory)
    views = [a if a is None or shape is None else a.reshape(shape) for a, shape in zip(memory, flat, strict=False)]
    tensors = [None if a is None else wrap(a) for a in (*views, *memory[len(views) :])]
    for step in plan.steps:
        step.kernel.run(*step.gather(tensors), *step.scalars)
        step.kernel.calls += 1
    return {name: memory[rule.slots.index(name)] for name in rule.outs}


# ------------------------------------------------------------------ NumPy arrays by pointer: NumPy cannot export bfloat16


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


# a prototype of our own: the one in ctypes.pythonapi is shared with everybody in the process
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_New", ctypes.pythonapi))


class _NumpyTensor:
    """A DLPack view of a contiguous NumPy array of any dtype that kernels know; it lives as long as the call."""

    def __init__(self, array: Any) -> None:
        from tk_core.dtypes import DTYPES

        kind = DTYPES[array.dtype.name]
        axes = ctypes.c_int64 * max(array.ndim, 1)
        self._array = array
        self._shape = axes(*array.shape)
        strides, step = [], 1
        for extent in reversed(array.shape):
            strides.append(step)
            step *= extent
        self._strides = axes(*reversed(strides))
        tensor = _DLTensor(array.ctypes.data, 1, 0, array.ndim, kind.code, kind.bits, 1, self._shape, self._strides, 0)
        self._managed = _DLManagedTensor(tensor, None, None)

    def __dlpack__(self, **_: Any) -> Any:
        return _new_capsule(ctypes.addressof(self._managed), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0
