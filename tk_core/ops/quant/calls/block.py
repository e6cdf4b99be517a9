"""Casts by two-dimensional blocks: `per_block_cast` and its variants, and the lossless change from FP4 to FP8."""

from typing import Any

from tk_core.errors import value_error
from tk_core.ops.quant import cast, lossless
from tk_core.ops.quant.calls import docs
from tk_core.ops.quant.calls.common import (
    F32,
    FLOATS,
    INT8,
    INT32,
    Data,
    Request,
    Scale,
    clamp,
    flag,
    judge_out,
    judge_scale,
    logical_rows,
    matrix,
    multiple,
    one_of,
    pair,
    physical,
    sf_kind,
)  # fmt: skip
from tk_core.ops.quant.calls.token import precomputed_flags
from tk_core.ops.quant.layouts import sf_dtype


def _block(op: str, block_size: Any) -> tuple[int, int]:
    block = pair(op, "block_size", block_size)
    if block[0] not in (32, 128) or block[1] not in (32, 128):
        raise value_error(op, "block_size", "32 or 128 tokens and channels", block)
    return block


def per_block_cast(
    op: str, x: Data, fmt: Any, block_size: Any, use_tma_aligned_col_major_sf: Any, round_sf: Any, use_packed_ue8m0: Any,
    out: tuple[Data | None, Data | None] | None = None, wanted: tuple[str, ...] = ("data", "sf"),
) -> Request:  # fmt: skip
    """Judge `per_block_cast`, or the same without data."""
    one_of(op, "fmt", fmt, ("e4m3", "e2m1"))
    col = flag(op, "use_tma_aligned_col_major_sf", use_tma_aligned_col_major_sf)
    kind = sf_kind(op, round_sf, use_packed_ue8m0)
    bm, bk = _block(op, block_size)
    M, H = matrix(op, "x", x, FLOATS)
    multiple(op, "x", "H", H, 64)
    R, G = -(-M // bm), -(-H // bk)
    if out is not None:
        if col:
            raise value_error(op, "out", "None with use_tma_aligned_col_major_sf", "an array to write to")
        width, dtype = physical(fmt, H)
        judge_out(op, "out[0]" if len(wanted) == 2 else "out", out[0], (M, width), dtype)
        judge_out(op, "out[1]" if len(wanted) == 2 else "out_sf", out[1], (R, -(-G // 4) if kind == "packed" else G), sf_dtype(kind))
    attrs = {"fmt": fmt, "block_m": bm, "block_k": bk, "sf": kind, "col": col, "amax_clamp": clamp(fmt, kind)}
    return Request(op, cast.quantize, attrs, wanted, logical_rows(kind, col, R))


def per_block_cast_with_sf_only(
    op: str, x: Data, fmt: Any, block_size: Any, col: Any, round_sf: Any, packed: Any, out: Data | None
) -> Request:
    """Judge `per_block_cast_with_sf_only`."""
    return per_block_cast(op, x, fmt, block_size, col, round_sf, packed, None if out is None else (None, out), ("sf",))


def per_block_cast_with_precomputed_sf(
    op: str, x: Data, fmt: Any, block_size: Any, sf: Scale, col: Any, round_sf: Any, packed: Any, out: Data | None
) -> Request:
    """Judge `per_block_cast_with_precomputed_sf`."""
    one_of(op, "fmt", fmt, ("e4m3", "e2m1"))
    precomputed_flags(op, sf, col, round_sf, packed)
    bm, bk = _block(op, block_size)
    M, H = matrix(op, "x", x, FLOATS)
    multiple(op, "x", "H", H, 64)
    judge_scale(op, "sf", sf, -(-M // bm), -(-H // bk), (F32,))
    judge_out(op, "out", out, (M, physical(fmt, H)[0]), physical(fmt, H)[1])
    return Request(op, cast.quantize, {"fmt": fmt, "block_m": bm, "block_k": bk, "sf": "plain"}, ("data",))


def per_block_cast_lossless(
    op: str, x: Data, x_sf: Scale, fmt: Any, x_block_size: Any, out_block_size: Any, col: Any, round_sf: Any, packed: Any, check: Any
) -> Request:
    """Judge `per_block_cast_lossless`."""
    one_of(op, "fmt", fmt, ("e4m3",))
    flag(op, "use_tma_aligned_col_major_sf", col)
    flag(op, "round_sf", round_sf)
    kind = "packed" if sf_kind(op, round_sf, packed) == "packed" else "round"
    flag(op, "check", check)
    M, columns = matrix(op, "x[0]", x, (INT8,), "(M, H / 2)")
    H = columns * 2
    multiple(op, "x[0]", "H", H, 32)
    xm, xk = pair(op, "x_block_size", x_block_size)
    bm, bk = pair(op, "out_block_size", out_block_size)
    for argument, size in (("x_block_size", xk), ("out_block_size", bk)):
        if size < 16 or size & (size - 1):
            raise value_error(op, argument, "a power of two of at least 16 channels", size)
    if xm < 1 or bm < 1 or bm % xm or bk % xk:
        raise value_error(op, "out_block_size", f"a multiple of x_block_size {(xm, xk)} in both axes", (bm, bk))
    judge_scale(op, "x[1]", x_sf, -(-M // xm), -(-H // xk), (F32, INT32))
    attrs = {"x_block_m": xm, "x_block_k": xk, "block_m": bm, "block_k": bk, "sf": kind, "col": col, "x_col": x_sf.col}
    wanted = ("data", "sf", "inexact") if check else ("data", "sf")
    return Request(op, lossless.recast_lossless, attrs, wanted, logical_rows(kind, col, -(-M // bm)))


INEXACT = "blocks within 2**14 of the largest scale of their output block: other values would not be exact"

_X = f"""x: (M, H) bf16 or fp32, H a multiple of 64.
    {docs.FMT}
    block_size: (tokens, channels) that share a scale, 32 or 128 each; blocks at the edge may be partial."""

PER_BLOCK_CAST = docs.doc(
    "Quantize in blocks of tokens and channels: data = Q(x * MAX / amax), sf = amax / MAX, amax over a block.",
    f"{_X}\n    {docs.FLAGS}",
    f"(data, sf): data (M, H) or (M, H / 2); sf of ceil(M / bm) x ceil(H / bk) blocks, {docs.SF}",
)
SF_ONLY = docs.doc("The scales of `per_block_cast`, without the data.", f"{_X}\n    {docs.FLAGS}", f"sf of the blocks, {docs.SF}")
PRECOMPUTED = docs.doc(
    "The data of `per_block_cast` for scales that are given: data = Q(x * (1 / sf)).",
    f"""{_X}
    sf: (ceil(M / bm), ceil(H / bk)) fp32, positive and finite, row-major.
    use_tma_aligned_col_major_sf, use_packed_ue8m0: False.
    round_sf: without effect.""",
    "data (M, H) or (M, H / 2).",
    numerics="bit-exact; 1 / sf is rounded, so that plain scales can lead to another code than `per_block_cast` at a tie.",
)
LOSSLESS = docs.doc(
    "Change E2M1 data with fine blocks into E4M3 data of the same values with coarse blocks: sf = 2**(max E - 6), data = D(q) * 2**E / sf.",
    f"""x: (data, sf), data (M, H / 2) int8 of two codes a byte, H a multiple of 32; sf powers of two, fp32 or packed exponents. The sign
        and mantissa of fp32 scales are ignored.
    fmt: 'e4m3'.
    x_block_size: (tokens, channels) of the blocks of x, e.g. (1, 32).
    out_block_size: those of the result, multiples of the former: (1, 128), (32, 32), (128, 128), ...
    {docs.FLAGS}
    check: whether to look for values that are not exact. It synchronizes.""",
    f"""(data, sf): data (M, H) float8_e4m3fn, sf of the output blocks, {docs.SF}
    In JAX with check a third result: bool (R, G), true where an output block holds values that are not exact.""",
    raises=docs.RAISES + "\n    ValueError: in PyTorch with check, values are not exact.",
    numerics="exact where the scale of an input block is at least 2**-14 of the largest one in its output block, otherwise to the nearest.",
)
