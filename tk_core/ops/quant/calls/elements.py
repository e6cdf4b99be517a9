"""Element by element: `cast`, and packing and unpacking of E2M1."""

from typing import Any

from tk_core.errors import type_error, value_error
from tk_core.ops.quant import elementwise
from tk_core.ops.quant.calls import docs
from tk_core.ops.quant.calls.common import E4M3, F32, FLOATS, INT8, INT32, UINT8, Data, Request, flag

NAMES = {"bfloat16": "bf16", F32: "fp32", E4M3: "e4m3"}
STOCHASTIC = {("float32", "bf16"), ("float32", "e4m3"), ("bfloat16", "e4m3")}


def _name(op: str, argument: str, dtype: str) -> str:
    if dtype not in NAMES:
        raise value_error(op, argument, " or ".join(NAMES), dtype)
    return NAMES[dtype]


def cast(op: str, x: Data, dtype: str, stochastic_rounding: Any) -> Request:
    """Judge `cast`; stochastic rounding takes x as one axis."""
    if x.dtype not in NAMES:
        raise type_error(op, "x", f"dtype {' or '.join(NAMES)}", x.dtype)
    to = _name(op, "dtype", dtype)
    if not flag(op, "stochastic_rounding", stochastic_rounding):
        return Request(op, elementwise.cast_elements, {"to": to}, ("y",))
    if (x.dtype, to) not in STOCHASTIC:
        raise value_error(op, "stochastic_rounding", "fp32 to bf16 or to e4m3, or bf16 to e4m3", f"{x.dtype} to {dtype}")
    return Request(op, elementwise.cast_stochastic, {"to": to}, ("y",))


def unpack_from_e2m1fn_x2(op: str, x: Data, out_dtype: str) -> Request:
    """Judge `unpack_from_e2m1fn_x2`."""
    if x.dtype not in (INT8, UINT8):
        raise type_error(op, "x", f"dtype {INT8} or {UINT8}", x.dtype)
    if not x.shape:
        raise value_error(op, "x", "at least one axis", ())
    return Request(op, elementwise.unpack_e2m1, {"to": _name(op, "out_dtype", out_dtype)}, ("y",))


def pack_to_e2m1fn_x2(op: str, codes: Data) -> Request:
    """Judge `pack_to_e2m1fn_x2`."""
    kinds = (INT8, UINT8, INT32, "int64")
    if codes.dtype not in kinds:
        raise type_error(op, "codes", f"dtype {' or '.join(kinds)}", codes.dtype)
    if not codes.shape or codes.shape[-1] % 2:
        raise value_error(op, "codes", "a last axis of even length", tuple(codes.shape))
    return Request(op, elementwise.pack_e2m1, {}, ("x",))


__all__ = ["CAST", "FLOATS", "PACK", "UNPACK", "cast", "pack_to_e2m1fn_x2", "unpack_from_e2m1fn_x2"]

CAST = docs.doc(
    "Convert every element: y = RN(x), or x rounded up with a probability equal to its distance from the number below.",
    """x: bf16, fp32 or float8_e4m3fn, any shape.
    dtype: bf16, fp32 or float8_e4m3fn.
    stochastic_rounding: for fp32 to bf16, fp32 to e4m3 and bf16 to e4m3; the same bits for the same seed.
    seed: of the stochastic rounding, taken modulo 2**32.""",
    "dtype, shape of x.",
    numerics="bit-exact: to the nearest, ties to even; saturating towards e4m3, overflowing to inf towards bf16.",
    gradient="the identity: d_x = d_y in the dtype of x; nothing is saved.",
)
UNPACK = docs.doc(
    "The values of E2M1 codes, two a byte, the first one low.",
    """x: (..., K) int8 or uint8.
    out_dtype: fp32, bf16 or float8_e4m3fn.""",
    "(..., 2 * K) out_dtype.",
    numerics="exact.",
)
PACK = docs.doc(
    "Put two E2M1 codes into a byte, the first one low; the reverse of reading codes, not of `unpack_from_e2m1fn_x2`'s values.",
    "codes: (..., 2 * K) int8, uint8, int32 or int64, from 0 to 15; higher bits are ignored.",
    "(..., K) int8.",
    numerics="exact.",
)
