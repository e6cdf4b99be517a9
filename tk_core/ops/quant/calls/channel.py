"""Casts by columns: one scale a channel over a block of tokens."""

from typing import Any

from tk_core.errors import type_error, value_error
from tk_core.ops.quant import channels
from tk_core.ops.quant.calls import docs
from tk_core.ops.quant.calls.common import (
    E4M3,
    F32,
    FLOATS,
    INT32,
    Data,
    Request,
    Scale,
    clamp,
    integer,
    judge_scale,
    multiple,
    one_of,
    rows_multiple,
    sf_kind,
    source,
)  # fmt: skip


def _tokens(op: str, n: Any, allowed: tuple[int, ...]) -> int:
    integer(op, "num_per_tokens", n)
    if n not in allowed:
        raise value_error(op, "num_per_tokens", " or ".join(map(str, allowed)), n)
    return n


def per_channel_cast(
    op: str, x: Data, x_sf: Scale | None, fmt: Any, num_per_tokens: Any, round_sf: Any, num_per_channels: Any, use_packed_ue8m0: Any
) -> Request:
    """Judge `per_channel_cast`."""
    one_of(op, "fmt", fmt, ("e4m3",))
    n = _tokens(op, num_per_tokens, (32, 128))
    kind = sf_kind(op, round_sf, use_packed_ue8m0)
    M, H, bk = source(op, x, x_sf, num_per_channels, "num_per_channels", FLOATS, (E4M3,))
    rows_multiple(op, "x", "M", M, 128)
    multiple(op, "x", "H", H, 64 if bk is None else 128)
    attrs: dict[str, Any] = {"num_per_tokens": n, "sf": kind, "amax_clamp": clamp(fmt, kind)}
    if bk is not None:
        one_of(op, "num_per_channels", bk, (32, 128))
        judge_scale(op, "x[1]", x_sf, M, -(-H // bk), (F32, INT32, E4M3))
        attrs |= {"x_block_k": bk, "x_col": x_sf.col}
    return Request(op, channels.quantize_channels, attrs, ("data", "sf"))


def per_channel_cast_fused(
    op: str, x: Data, x_sf: Scale | None, fmt: Any, num_per_tokens: Any, round_sf: Any, num_per_channels: Any, pos_to_token: Data | None
) -> Request:
    """Judge `per_channel_cast_fused`."""
    one_of(op, "fmt", fmt, ("e4m3",))
    n = _tokens(op, num_per_tokens, (128,))
    kind = sf_kind(op, round_sf)
    M, H, bk = source(op, x, x_sf, num_per_channels, "num_per_channels", FLOATS, (E4M3,))
    multiple(op, "x", "H", H, 128)
    attrs: dict[str, Any] = {"num_per_tokens": n, "sf": kind, "amax_clamp": clamp(fmt, kind)}
    if bk is not None:
        one_of(op, "num_per_channels", bk, (128,))
        if x_sf.col:
            raise value_error(op, "x[1]", "row-major scales", "column-major ones")
        judge_scale(op, "x[1]", x_sf, M, H // bk, (F32,))
        attrs |= {"x_block_k": bk}
    if pos_to_token is None:
        rows_multiple(op, "x", "M", M, 128)
    else:
        if pos_to_token.dtype != INT32:
            raise type_error(op, "pos_to_token", f"dtype {INT32}", pos_to_token.dtype)
        if len(pos_to_token.shape) != 1:
            raise value_error(op, "pos_to_token", "shape (Mo,)", tuple(pos_to_token.shape))
        rows_multiple(op, "pos_to_token", "Mo", pos_to_token.shape[0], 16)
    return Request(op, channels.quantize_channels, attrs, ("data", "sf"))


def per_channel_cast_and_transpose(op: str, x: Data, x_sf: Scale | None, fmt: Any, num_per_tokens: Any, round_sf: Any) -> Request:
    """Judge `per_channel_cast_and_transpose`."""
    one_of(op, "fmt", fmt, ("e4m3",))
    n = _tokens(op, num_per_tokens, (32, 128))
    kind = sf_kind(op, round_sf)
    M, H, _ = source(op, x, x_sf, None, "x", FLOATS[:1], ())
    rows_multiple(op, "x", "M", M, 128)
    multiple(op, "x", "H", H, 64)
    return Request(
        op, channels.quantize_channels, {"num_per_tokens": n, "sf": kind, "amax_clamp": clamp(fmt, kind), "transpose": True}, ("data", "sf")
    )


_NUMERICS = docs.NUMERICS + " Quantized input is multiplied by its scale and by the factor, with a rounding each."

PER_CHANNEL_CAST = docs.doc(
    "Quantize columns in blocks of tokens: data[m, k] = Q(x[m, k] * MAX / amax), amax over num_per_tokens tokens of a channel.",
    """x: (M, H) bf16 or fp32, M a multiple of 128, H of 64; or (data, sf) of e4m3 with blocks (1, num_per_channels), H a multiple of 128.
    fmt: 'e4m3'.
    num_per_tokens: tokens that share a scale, 32 or 128.
    round_sf: scales are powers of two.
    num_per_channels: None, or channels that share a scale in a quantized x, 32 or 128.
    use_packed_ue8m0: store exponents, four neighbouring blocks of tokens an int32; needs round_sf.""",
    "(data, sf): data (M, H) float8_e4m3fn; sf fp32 (M / num_per_tokens, H), packed int32 (ceil(M / num_per_tokens / 4), H).",
    numerics=_NUMERICS,
)
PER_CHANNEL_CAST_FUSED = docs.doc(
    "`per_channel_cast` of gathered rows: row p of the result is row pos_to_token[p] of x.",
    """x: (M, H) bf16 or fp32, H a multiple of 128; or (data, sf) of e4m3 with fp32 scales (M, H / 128).
    fmt: 'e4m3'.
    num_per_tokens: 128.
    round_sf: scales are powers of two.
    num_per_channels: None, or 128 with a quantized x.
    pos_to_token: None, or int32 (Mo,), Mo a multiple of 16; a negative entry, or one that is not below M, is an empty row: data 0, no share
        in amax. Rows may repeat. Without it Mo = M, a multiple of 128.""",
    "(data, sf): data (Mo, H) float8_e4m3fn, sf fp32 (ceil(Mo / 128), H); the last block may be partial.",
    numerics=_NUMERICS,
)
PER_CHANNEL_CAST_AND_TRANSPOSE = docs.doc(
    "`per_channel_cast` with the data transposed, in one pass.",
    """x: (M, H) bf16, M a multiple of 128, H of 64.
    fmt: 'e4m3'.
    num_per_tokens: tokens that share a scale, 32 or 128.
    round_sf: scales are powers of two.""",
    "(data, sf): data (H, M) float8_e4m3fn; sf fp32 (M / num_per_tokens, H), not transposed.",
)
