"""Back from codes: `cast_back` and its variants."""

from typing import Any

from tk_core.errors import type_error, value_error
from tk_core.ops.quant import cast_back
from tk_core.ops.quant.calls import docs
from tk_core.ops.quant.calls.common import E4M3, F32, INT8, INT32, UINT8, Data, Request, Scale, judge_scale, matrix, multiple, one_of, pair

TOKENS, CHANNELS = (1, 32, 128), (1, 16, 32, 64, 128)


def cast_back_of(
    op: str, x: Data, sf: Scale, fmt: Any, x_block_size: Any, x_special_fmt: Any = None, block_name: str = "x_block_size"
) -> Request:
    """Judge `cast_back`."""
    one_of(op, "fmt", fmt, ("bf16", "fp32"))
    if x_special_fmt is not None:
        one_of(op, "x_special_fmt", x_special_fmt, ("e5m6",))
    special = x_special_fmt == "e5m6"
    if x.dtype == UINT8 and not special:
        raise type_error(op, "x[0]", f"dtype {E4M3} or {INT8}, or uint8 with x_special_fmt='e5m6'", x.dtype)
    M, columns = matrix(op, "x[0]", x, (UINT8,) if special else (E4M3, INT8), "(M, physical H)")
    if special:
        multiple(op, "x[0]", "columns", columns, 12)
        H = columns * 2 // 3
    else:
        H = columns * 2 if x.dtype == INT8 else columns
        multiple(op, "x[0]", "H", H, 64)
    bm, bk = pair(op, block_name, x_block_size) if block_name == "x_block_size" else (1, x_block_size)
    if bm not in TOKENS or not (bk in CHANNELS or bk == H):
        raise value_error(op, block_name, "1, 32 or 128 tokens and 1, 16, 32, 64, 128 or H channels", f"{(bm, bk)} with H = {H}")
    judge_scale(op, "x[1]", sf, -(-M // bm), -(-H // bk), (F32, INT32, E4M3), tokens=bk == 1)
    rows = bm == 1 and not sf.col and bk > 1
    attrs = {"to": fmt, "block_k": bk} if rows else {"to": fmt, "block_m": bm, "block_k": bk, "col": sf.col}
    return Request(op, cast_back.dequantize_rows if rows else cast_back.dequantize, attrs, ("y",))


def per_token_cast_back(op: str, x: Data, sf: Scale, fmt: Any, num_per_channels: Any, x_special_fmt: Any = None) -> Request:
    """Judge `per_token_cast_back`."""
    if isinstance(num_per_channels, bool) or not isinstance(num_per_channels, int):
        raise type_error(op, "num_per_channels", "an int", f"{num_per_channels!r}")
    return cast_back_of(op, x, sf, fmt, num_per_channels, x_special_fmt, "num_per_channels")


def cast_back_e5m6(op: str, x: Data, sf: Scale, fmt: Any, x_block_size: Any) -> Request:
    """Judge `cast_back_e5m6`."""
    return cast_back_of(op, x, sf, fmt, x_block_size, "e5m6")


_X = """x: (data, sf): data float8_e4m3fn (M, H), int8 (M, H / 2) of two E2M1 codes a byte{more}; sf of its blocks, fp32,
        float8_e4m3fn or packed int32, row-major or column-major. Scales are applied as they are, powers of two or not.
    fmt: dtype of the result, 'bf16' or 'fp32'."""
_NUMERICS = "bit-exact: D(data) * sf rounded to fp32, then, for bf16, to bf16: two roundings."

CAST_BACK = docs.doc(
    "Dequantize: y = D(data) * sf of the element's block.",
    f"""{_X.format(more=", or uint8 (M, 3 * H / 2)")}
    x_block_size: (tokens, channels) that share a scale: 1, 32 or 128 tokens, 1, 16, 32, 64, 128 or H channels. With one channel packed
        exponents lie along the blocks of tokens, and scales are row-major.
    x_special_fmt: None, or 'e5m6' for uint8 data.""",
    "(M, H) bf16 or fp32.",
    numerics=_NUMERICS,
)
PER_TOKEN_CAST_BACK = docs.doc(
    "Dequantize rows: `cast_back` with the block (1, num_per_channels).",
    f"""{_X.format(more=", or uint8 (M, 3 * H / 2)")}
    num_per_channels: channels of a row that share a scale.
    x_special_fmt: None, or 'e5m6' for uint8 data.""",
    "(M, H) bf16 or fp32.",
    numerics=_NUMERICS,
)
CAST_BACK_E5M6 = docs.doc(
    "Dequantize codes of 12 bits: `cast_back` of uint8 data.",
    """x: (data, sf): data uint8 (M, 3 * H / 2), sf of its blocks.
    fmt: dtype of the result, 'bf16' or 'fp32'.
    x_block_size: (tokens, channels) that share a scale.""",
    "(M, H) bf16 or fp32.",
    numerics=_NUMERICS,
)
