"""Casts by rows: `per_token_cast` and its variants, and fake quantization."""

from typing import Any

from tk_core.errors import type_error, value_error
from tk_core.ops.quant import cast
from tk_core.ops.quant.calls import docs
from tk_core.ops.quant.calls.common import (
    E4M3,
    F32,
    FLOATS,
    INT8,
    INT32,
    Data,
    Request,
    Scale,
    clamp,
    flag,
    integer,
    judge_out,
    judge_scale,
    logical_rows,
    matrix,
    multiple,
    one_of,
    pair,
    physical,
    sf_kind,
    source,
)  # fmt: skip
from tk_core.ops.quant.layouts import sf_dtype

GROUPS = (16, 32, 64, 128)
X_BLOCKS = ((1, 32), (1, 128), (32, 32), (128, 128))


def _group(op: str, g: Any, H: int, whole_rows: bool = True) -> int:
    integer(op, "num_per_channels", g)
    if g not in GROUPS and not (whole_rows and g == H):
        raise value_error(op, "num_per_channels", f"16, 32, 64 or 128{', or H' if whole_rows else ''}", f"{g} with H = {H}")
    return g


def per_token_cast(
    op: str,
    x: Data,
    x_sf: Scale | None,
    fmt: Any,
    num_per_channels: Any,
    x_block_size: Any = None,
    use_tma_aligned_col_major_sf: Any = False,
    round_sf: Any = False,
    use_packed_ue8m0: Any = False,
    use_e4m3_sf: Any = False,
    stochastic_cast: Any = False,
    out: tuple[Data | None, Data | None] | None = None,
    wanted: tuple[str, ...] = ("data", "sf"),
    formats: tuple[str, ...] = ("e4m3", "e2m1", "e5m6"),
) -> Request:
    """Judge `per_token_cast`, or the same without data."""
    one_of(op, "fmt", fmt, formats)
    col = flag(op, "use_tma_aligned_col_major_sf", use_tma_aligned_col_major_sf)
    kind = sf_kind(op, round_sf, use_packed_ue8m0, use_e4m3_sf)
    flag(op, "stochastic_cast", stochastic_cast)
    M, H, block = source(op, x, x_sf, x_block_size, "x_block_size", FLOATS, (E4M3, INT8))
    multiple(op, "x", "H", H, 8 if fmt == "e5m6" else 64)
    g = _group(op, num_per_channels, H)
    attrs: dict[str, Any] = {"fmt": fmt, "block_k": g, "sf": kind, "amax_clamp": clamp(fmt, kind)}
    if fmt == "e5m6":
        if g != H:
            raise value_error(op, "num_per_channels", f"H = {H} with fmt 'e5m6'", g)
        for name, value in (("stochastic_cast", stochastic_cast), ("use_e4m3_sf", use_e4m3_sf)):
            if value:
                raise value_error(op, name, "False with fmt 'e5m6'", value)
    if block is not None:
        _judge_quantized(op, x_sf, block, M, H, g, fmt)
        attrs |= {"x_block_m": block[0], "x_block_k": block[1], "x_col": x_sf.col}
    groups = -(-H // g)
    if out is not None:
        if col:
            raise value_error(op, "out", "None with use_tma_aligned_col_major_sf", "an array to write to")
        width, dtype = physical(fmt, H)
        judge_out(op, "out[0]" if len(wanted) == 2 else "out", out[0], (M, width), dtype)
        words = -(-groups // 4) if kind == "packed" else groups
        judge_out(op, "out[1]" if len(wanted) == 2 else "out_sf", out[1], (M, words), sf_dtype(kind))
    general = col or block is not None or stochastic_cast
    if general:
        attrs |= {"col": col, "stochastic": stochastic_cast}
    return Request(op, cast.quantize if general else cast.quantize_rows, attrs, wanted, logical_rows(kind, col, M))


def _judge_quantized(op: str, sf: Scale, block: Any, M: int, H: int, g: int, fmt: str) -> None:
    block = pair(op, "x_block_size", block)
    if block not in X_BLOCKS:
        raise value_error(op, "x_block_size", " or ".join(map(str, X_BLOCKS)), block)
    if g not in GROUPS or fmt == "e5m6":
        raise value_error(op, "num_per_channels", "16, 32, 64 or 128 with a quantized tensor", g)
    judge_scale(op, "x[1]", sf, -(-M // block[0]), -(-H // block[1]), (F32, INT32, E4M3))


def no_block(op: str, x_block_size: Any) -> None:
    """The place that another argument had in earlier interfaces."""
    if isinstance(x_block_size, bool):
        raise type_error(op, "x_block_size", "None: pass use_tma_aligned_col_major_sf and what follows by keyword", x_block_size)
    if x_block_size is not None:
        raise value_error(op, "x_block_size", "None", f"{x_block_size!r}")


def per_token_cast_with_sf_only(
    op: str,
    x: Data,
    fmt: Any,
    num_per_channels: Any,
    x_block_size: Any,
    col: Any,
    round_sf: Any,
    packed: Any,
    e4m3_sf: Any,
    out: Data | None,
) -> Request:
    """Judge `per_token_cast_with_sf_only`."""
    no_block(op, x_block_size)
    outs = None if out is None else (None, out)
    return per_token_cast(
        op, x, None, fmt, num_per_channels, None, col, round_sf, packed, e4m3_sf, False, outs, ("sf",), ("e4m3", "e2m1")
    )  # fmt: skip


def per_token_cast_with_precomputed_sf(
    op: str, x: Data, fmt: Any, num_per_channels: Any, sf: Scale, x_block_size: Any, col: Any, round_sf: Any, packed: Any, e4m3_sf: Any,
    out: Data | None,
) -> Request:  # fmt: skip
    """Judge `per_token_cast_with_precomputed_sf`."""
    no_block(op, x_block_size)
    one_of(op, "fmt", fmt, ("e4m3", "e2m1"))
    precomputed_flags(op, sf, col, round_sf, packed)
    flag(op, "use_e4m3_sf", e4m3_sf)
    M, H = matrix(op, "x", x, FLOATS)
    multiple(op, "x", "H", H, 64)
    g = _group(op, num_per_channels, H)
    judge_scale(op, "sf", sf, M, -(-H // g), (E4M3,) if e4m3_sf else (F32,))
    width, dtype = physical(fmt, H)
    judge_out(op, "out", out, (M, width), dtype)
    return Request(op, cast.quantize_rows, {"fmt": fmt, "block_k": g, "sf": "e4m3" if e4m3_sf else "plain"}, ("data",))


def precomputed_flags(op: str, sf: Scale, col: Any, round_sf: Any, packed: Any) -> None:
    """Scales that are given are row-major and not packed; round_sf says nothing about them."""
    flag(op, "round_sf", round_sf)
    for name, value in (("use_tma_aligned_col_major_sf", col), ("use_packed_ue8m0", packed)):
        if flag(op, name, value):
            raise value_error(op, name, "False with precomputed scales", value)
    if sf.col:
        raise value_error(op, "sf", "row-major scales", "column-major ones")


def per_token_cast_to_e5m6(op: str, x: Data, num_per_channels: Any, col: Any, round_sf: Any, packed: Any) -> Request:
    """Judge `per_token_cast_to_e5m6`."""
    return per_token_cast(op, x, None, "e5m6", num_per_channels, None, col, round_sf, packed)


def fake_quant(
    op: str, x: Data, fmt: Any, num_per_channels: Any, round_sf: Any = False, use_e4m3_sf: Any = False, anywhere: bool = True
) -> Request:
    """Judge `fake_quant`, whose rows may be any leading axes, and `per_token_cast_and_cast_back`, which takes a matrix."""
    one_of(op, "fmt", fmt, ("e4m3", "e2m1"))
    kind = sf_kind(op, round_sf, False, use_e4m3_sf)
    H = x.shape[-1] if anywhere and x.shape and x.dtype in FLOATS else matrix(op, "x", x, FLOATS)[1]
    multiple(op, "x", "H", H, 64)
    g = _group(op, num_per_channels, H, whole_rows=False)
    if H % g:
        raise value_error(op, "num_per_channels", f"a divisor of H = {H}", g)
    return Request(op, cast.fake_quant, {"fmt": fmt, "block_k": g, "sf": kind, "amax_clamp": clamp(fmt, kind)}, ("y",))


_X = """x: (M, H) bf16 or fp32; or a quantized tensor (data, sf) of e4m3 or e2m1, with `x_block_size`. H a multiple of 64 (e5m6: of 8).
    fmt: 'e4m3' (float8_e4m3fn), 'e2m1' (int8, two codes a byte, the first one low) or 'e5m6' (uint8, eight codes of 12 bits in 12 bytes).
    num_per_channels: channels g that share a scale: 16, 32, 64, 128 or H (e5m6: H)."""
_E4M3_SF = "use_e4m3_sf: scales are float8_e4m3fn, and elements are multiplied by the inverse of the rounded scale."

PER_TOKEN_CAST = docs.doc(
    "Quantize rows in groups of channels: data[m, k] = Q(x[m, k] * MAX / amax), sf = amax / MAX, amax over 1 x g channels of a row.",
    f"""{_X}
    x_block_size: None, or the scaling block (tokens, channels) of a quantized x: (1, 32), (1, 128), (32, 32) or (128, 128).
    {docs.FLAGS}
    {_E4M3_SF}
    stochastic_cast: round up with a probability equal to the distance from the code below; the same bits for the same seed.
    seed: of the stochastic rounding, taken modulo 2**32.""",
    f"(data, sf): data (M, H), (M, H / 2) or (M, 3 * H / 2); sf of M x ceil(H / g) blocks, {docs.SF}",
)

PER_TOKEN_CAST_TO_E5M6 = docs.doc(
    "Quantize whole rows to 12 bits: sign, 5 exponent bits, 6 mantissa bits; eight codes fill three 32-bit words.",
    f"""x: (M, H) bf16 or fp32, H a multiple of 8.
    num_per_channels: H.
    {docs.FLAGS}""",
    f"(data, sf): data (M, 3 * H / 2) uint8, sf of M x 1 blocks, {docs.SF}",
)

SF_ONLY = docs.doc(
    "The scales of `per_token_cast`, without the data.",
    f"""x: (M, H) bf16 or fp32, H a multiple of 64.
    {docs.FMT}
    num_per_channels: channels g that share a scale: 16, 32, 64, 128 or H.
    x_block_size: None.
    {docs.FLAGS}
    {_E4M3_SF}""",
    f"sf of M x ceil(H / g) blocks, {docs.SF}",
)

PRECOMPUTED = docs.doc(
    "The data of `per_token_cast` for scales that are given: data[m, k] = Q(x[m, k] * (1 / sf)).",
    f"""x: (M, H) bf16 or fp32, H a multiple of 64.
    {docs.FMT}
    num_per_channels: channels g that share a scale: 16, 32, 64, 128 or H.
    sf: (M, ceil(H / g)) fp32, or float8_e4m3fn with use_e4m3_sf; positive and finite, row-major.
    x_block_size: None.
    use_tma_aligned_col_major_sf, use_packed_ue8m0: False.
    round_sf: without effect.
    use_e4m3_sf: sf is float8_e4m3fn.""",
    "data (M, H) or (M, H / 2).",
    numerics="bit-exact; 1 / sf is rounded, so that plain scales can lead to another code than `per_token_cast` at a tie.",
)

FAKE_QUANT = docs.doc(
    "Round values to what a quantized tensor can hold: y = Q(x * MAX / amax) * sf, as `per_token_cast` and `per_token_cast_back` would.",
    f"""x: (..., H) bf16 or fp32, H a multiple of 64 and of num_per_channels.
    {docs.FMT}
    num_per_channels: channels of a row that share a scale: 16, 32, 64 or 128.
    round_sf: scales are powers of two.
    use_e4m3_sf: scales are E4M3 numbers; not with round_sf.""",
    "(..., H), dtype of x.",
    gradient="straight-through: d_x = d_y; nothing is saved.",
)

CAST_AND_CAST_BACK = docs.doc(
    "`fake_quant` in place: x becomes Q(x * MAX / amax) * sf.",
    f"""x: (M, H) bf16 or fp32, dense rows that may lie apart; H a multiple of 64 and of num_per_channels.
    {docs.FMT}
    num_per_channels: channels of a row that share a scale: 16, 32, 64 or 128.
    round_sf: scales are powers of two; doing it again then changes nothing.
    use_e4m3_sf: scales are E4M3 numbers; not with round_sf.""",
    "None in PyTorch, x is changed; in JAX the new array, in the memory of x where that is donated.",
)
