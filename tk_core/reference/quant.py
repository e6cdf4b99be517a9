"""NumPy oracle of the quantization casts, part two: the operations, bit for bit, composed of quant_formats.

Arrays come and go as the storage dtypes of the public interface: float8_e4m3fn, int8 (two E2M1 a byte), uint8 (E5M6), scales float32,
int32 (four UE8M0 a word) or float8_e4m3fn. Column-major scales are views with the strides of the torch interface; sf_storage gives
the JAX orientation and sf_logical leads back. Arguments are those of the public functions without out, out_sf and outs, plus
amax_clamp, which stands for the setting of the process; shapes are not judged, and block sizes may be any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tk_core.reference.quant_formats import (
    BF16_DTYPE,
    E2M1,
    E4M3,
    E4M3_DTYPE,
    FORMATS,
    Array,
    Format,
    bf16_stochastic,
    exponent_bytes,
    exponents_of,
    format_of,
    from_bits,
    inverse,
    lay_out,
    pack_words,
    random_bits,
    read_scales,
    scales,
    sf_logical,
    sf_storage,
    unpack_nibbles,
)

QuantTensor = tuple[Array, Array]
Block = tuple[int, int]
# blocks that hold NaN or Inf divide and multiply by them, and an infinite product saturates
_quiet = np.errstate(over="ignore", invalid="ignore", divide="ignore")


# ------------------------------------------------------------------ blocks


def _grid(shape: tuple[int, ...], block: Block) -> tuple[int, int]:
    """Blocks in a matrix, partial ones included."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def _block_max(a: Array, block: Block) -> Array:
    """The maxima of the blocks of a matrix without negative entries: padding by zeros changes none."""
    rows, columns = _grid(a.shape, block)
    padded = np.zeros((rows * block[0], columns * block[1]), a.dtype)
    padded[: a.shape[0], : a.shape[1]] = a
    return padded.reshape(rows, block[0], columns, block[1]).max(axis=(1, 3))


def _spread(a: Array, block: Block, shape: tuple[int, ...]) -> Array:
    """The entry of its block for every element."""
    return a.repeat(block[0], axis=0)[: shape[0]].repeat(block[1], axis=1)[:, : shape[1]]


# ------------------------------------------------------------------ inputs


def _quantized(x: QuantTensor, block: Block, special: str | None = None) -> tuple[Array, Array]:
    """Decoded values and their scales, both an entry an element."""
    fmt = format_of(x[0], special)
    values = fmt.decode(fmt.load(x[0]))
    sf = read_scales(x[1], _grid(values.shape, block), token_packed=block[1] == 1)
    return values, _spread(sf, block, values.shape)


def _source(x: Array | QuantTensor, block: Block | None) -> tuple[Array, Array | None]:
    """Values before scaling, and scales where x is quantized."""
    if not isinstance(x, tuple):
        if block is not None:
            raise ValueError(f"x_block_size: expected None for a plain tensor, got {block}")
        return x.astype(np.float32), None
    if block is None:
        raise ValueError("x_block_size: expected the block of a quantized tensor, got None")
    return _quantized(x, block)


def _check_flags(col_major: bool, round_sf: bool, packed: bool, use_e4m3_sf: bool = False, token_packed: bool = False) -> None:
    """Combinations that have no meaning."""
    if packed and not round_sf:
        raise ValueError("use_packed_ue8m0: expected round_sf as well, got round_sf=False")
    if use_e4m3_sf and (round_sf or packed):
        raise ValueError("use_e4m3_sf: expected neither round_sf nor use_packed_ue8m0, got one of them")
    if packed and token_packed and col_major:
        raise ValueError("use_tma_aligned_col_major_sf: expected False for scales packed along tokens, got True")


# ------------------------------------------------------------------ one matrix in blocks of any size


@_quiet
def _cast(
    x: Array | QuantTensor,
    fmt: Format,
    block: Block,
    x_block: Block | None,
    col_major: bool,
    round_sf: bool,
    packed: bool,
    use_e4m3_sf: bool = False,
    seed: int | None = None,
    amax_clamp: float | None = None,
    dequantize_first: bool = False,
) -> tuple[Array, Array]:
    """Codes, and scales in their layout. Scales along tokens (blocks one channel wide) pack along tokens. seed: stochastic rounding.

    A quantized input is multiplied by the product of its scale and the factor, or, dequantize_first, by one after the other.
    """
    token_packed = block[1] == 1
    _check_flags(col_major, round_sf, packed, use_e4m3_sf, token_packed)
    raw, sf_in = _source(x, x_block)
    values = raw if sf_in is None else raw * sf_in
    result = scales(_block_max(np.abs(values), block), fmt, round_sf, use_e4m3_sf, amax_clamp)
    inv = _spread(result.inv, block, values.shape)
    # a finite factor, for it may be that of zeros with a large scale, in a block whose own scale is small
    v = values * inv if sf_in is None or dequantize_first else raw * np.fmin(sf_in * inv, np.finfo(np.float32).max)
    codes = fmt.encode(v) if seed is None else fmt.encode_stochastic(v, random_bits(v, seed))
    return codes, lay_out(result.stored, col_major, packed, token_packed)


@_quiet
def _cast_with(x: Array, fmt: str, block: Block, sf: Array) -> Array:
    """Data by given scales."""
    values = x.astype(np.float32)
    codes = FORMATS[fmt].encode(values * _spread(inverse(sf), block, values.shape))
    return FORMATS[fmt].store(codes)


# ------------------------------------------------------------------ per token


def per_token_cast(
    x: Array | QuantTensor,
    fmt: str,
    num_per_channels: int,
    x_block_size: Block | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    stochastic_cast: bool = False,
    *,
    seed: int = 0,
    amax_clamp: float | None = None,
) -> QuantTensor:
    """Blocks of one token and num_per_channels channels."""
    if stochastic_cast and fmt == "e5m6":
        raise ValueError("stochastic_cast: expected False for e5m6, got True")
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf)
    random = seed if stochastic_cast else None
    codes, sf = _cast(x, FORMATS[fmt], (1, num_per_channels), x_block_size, *flags, random, amax_clamp)
    return FORMATS[fmt].store(codes), sf


def per_token_cast_to_e5m6(
    x: Array,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    """One scale a row, codes of twelve bits."""
    return per_token_cast(x, "e5m6", num_per_channels, None, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)


def per_token_cast_with_sf_only(x: Array, fmt: str, num_per_channels: int, *flags: Any, **named: Any) -> Array:
    """The scales of per_token_cast; the arguments behind are its own."""
    return per_token_cast(x, fmt, num_per_channels, *flags, **named)[1]


def per_token_cast_with_precomputed_sf(x: Array, fmt: str, num_per_channels: int, sf: Array) -> Array:
    """The data by given row-major scales, fp32 or E4M3; no flag changes them."""
    return _cast_with(x, fmt, (1, num_per_channels), sf)


# ------------------------------------------------------------------ per block


def per_block_cast(
    x: Array,
    fmt: str,
    block_size: Block,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    *,
    amax_clamp: float | None = None,
) -> QuantTensor:
    """Blocks of tokens and channels."""
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    codes, sf = _cast(x, FORMATS[fmt], block_size, None, *flags, amax_clamp=amax_clamp)
    return FORMATS[fmt].store(codes), sf


def per_block_cast_with_sf_only(x: Array, fmt: str, block_size: Block, *flags: Any, **named: Any) -> Array:
    """The scales of per_block_cast; the arguments behind are its own."""
    return per_block_cast(x, fmt, block_size, *flags, **named)[1]


def per_block_cast_with_precomputed_sf(x: Array, fmt: str, block_size: Block, sf: Array) -> Array:
    """The data by given row-major fp32 scales; no flag changes them."""
    return _cast_with(x, fmt, block_size, sf)


def per_block_cast_lossless(
    x: QuantTensor,
    fmt: str,
    x_block_size: Block,
    out_block_size: Block,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    *,
    check: bool = False,
) -> QuantTensor:
    """E2M1 to E4M3 in coarser blocks with the same dequantized values. check: ValueError where a value may not be exact.

    The check is the stated range: every input block with a value other than zero has d >= -8. Blocks below it that happen to be exact
    (even codes) count as out of range.
    """
    _check_flags(use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    codes = unpack_nibbles(x[0])
    exponents = exponents_of(x[1], _grid(codes.shape, x_block_size), token_packed=x_block_size[1] == 1).astype(np.int32)
    ratio = (out_block_size[0] // x_block_size[0], out_block_size[1] // x_block_size[1])
    out = np.maximum(_block_max(exponents, ratio) - 6, 1)
    d = exponents - _spread(out, ratio, exponents.shape)
    if check and (_block_max(codes & 7, x_block_size) > 0)[d < -8].any():
        raise ValueError(
            "x: expected blocks with values to lie within 2^14 of the largest scale of their output block, got a smaller scale"
        )
    power = from_bits((127 + np.maximum(d, -126)) << 23)  # below the clamp every value rounds to zero anyway
    data = FORMATS[fmt].encode(E2M1.decode(codes) * _spread(power, x_block_size, codes.shape))
    return FORMATS[fmt].store(data), lay_out(from_bits(out << 23), use_tma_aligned_col_major_sf, use_packed_ue8m0)


# ------------------------------------------------------------------ per channel


def per_channel_cast(
    x: Array | QuantTensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    use_packed_ue8m0: bool = False,
    *,
    amax_clamp: float | None = None,
) -> QuantTensor:
    """Blocks of num_per_tokens tokens and one channel; a quantized input has blocks of one token and num_per_channels channels."""
    x_block = None if num_per_channels is None else (1, num_per_channels)
    flags = (False, round_sf, use_packed_ue8m0)
    block = (num_per_tokens, 1)
    codes, sf = _cast(x, FORMATS[fmt], block, x_block, *flags, amax_clamp=amax_clamp, dequantize_first=True)
    return FORMATS[fmt].store(codes), sf


@_quiet
def per_channel_cast_fused(
    x: Array | QuantTensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    pos_to_token: Array | None = None,
    *,
    amax_clamp: float | None = None,
) -> QuantTensor:
    """per_channel_cast of gathered rows; positions outside the tokens are empty rows, that is zeros."""
    raw, sf = _source(x, None if num_per_channels is None else (1, num_per_channels))
    values = raw if sf is None else raw * sf
    if pos_to_token is not None:
        present = (pos_to_token >= 0) & (pos_to_token < values.shape[0])
        gathered = np.zeros((pos_to_token.size, values.shape[1]), np.float32)
        gathered[present] = values[pos_to_token[present]]
        values = gathered
    return per_channel_cast(values, fmt, num_per_tokens, round_sf, amax_clamp=amax_clamp)


def per_channel_cast_and_transpose(
    x: Array, fmt: str, num_per_tokens: int, round_sf: bool = False, *, amax_clamp: float | None = None
) -> QuantTensor:
    """per_channel_cast with its data transposed, its scales not."""
    data, sf = per_channel_cast(x, fmt, num_per_tokens, round_sf, amax_clamp=amax_clamp)
    return np.ascontiguousarray(data.T), sf


# ------------------------------------------------------------------ back


_FLOATS = {"bf16": BF16_DTYPE, "fp32": np.dtype(np.float32)}


@_quiet
def cast_back(x: QuantTensor, fmt: str, x_block_size: Block, x_special_fmt: str | None = None) -> Array:
    """Values times scales in fp32, then rounded once more to bf16 where that is wanted."""
    values, sf = _quantized(x, x_block_size, x_special_fmt)
    return (values * sf).astype(_FLOATS[fmt])


def per_token_cast_back(x: QuantTensor, fmt: str, num_per_channels: int, x_special_fmt: str | None = None) -> Array:
    """cast_back with blocks of one token."""
    return cast_back(x, fmt, (1, num_per_channels), x_special_fmt)


def cast_back_e5m6(x: QuantTensor, fmt: str, x_block_size: Block) -> Array:
    """cast_back of codes of twelve bits."""
    return cast_back(x, fmt, x_block_size, "e5m6")


@_quiet
def per_token_cast_and_cast_back(
    x: Array,
    fmt: str,
    num_per_channels: int,
    round_sf: bool = False,
    use_e4m3_sf: bool = False,
    *,
    amax_clamp: float | None = None,
) -> Array:
    """The rounded values in the dtype of x, as a new array."""
    named = {"round_sf": round_sf, "use_e4m3_sf": use_e4m3_sf, "amax_clamp": amax_clamp}
    quantized = per_token_cast(x, fmt, num_per_channels, **named)
    return per_token_cast_back(quantized, "fp32", num_per_channels).astype(x.dtype)


fake_quant = per_token_cast_and_cast_back


# ------------------------------------------------------------------ element by element


@_quiet
def cast(x: Array, dtype: Any, stochastic_rounding: bool = False, *, seed: int = 0) -> Array:
    """Nearest, saturating only towards E4M3, or stochastic towards a narrower dtype."""
    dtype = np.dtype(dtype)
    if stochastic_rounding and (dtype not in (BF16_DTYPE, E4M3_DTYPE) or x.dtype in (dtype, E4M3_DTYPE)):
        raise ValueError(f"stochastic_rounding: expected fp32 to bf16 or to e4m3, or bf16 to e4m3, got {x.dtype} to {dtype}")
    flat = x.reshape(-1)
    v = E4M3.decode(E4M3.load(flat)) if x.dtype == E4M3_DTYPE else flat.astype(np.float32)
    if not stochastic_rounding:
        result = E4M3.store(E4M3.encode(v)) if dtype == E4M3_DTYPE else v.astype(dtype)
    elif dtype == BF16_DTYPE:
        result = bf16_stochastic(v, random_bits(v, seed))
    else:
        result = E4M3.store(E4M3.encode_stochastic(v, random_bits(v, seed)))
    return result.reshape(x.shape)


def unpack_from_e2m1fn_x2(x: Array, out_dtype: Any = np.float32) -> Array:
    """Values (…, 2K) of packed E2M1 (…, K)."""
    if x.ndim == 0:
        raise ValueError(f"x: expected at least one axis, got shape {x.shape}")
    return E2M1.decode(unpack_nibbles(x)).astype(out_dtype)


def pack_to_e2m1fn_x2(codes: Array) -> Array:
    """int8 (…, K) of integer codes 0..15 (…, 2K)."""
    if codes.ndim == 0 or codes.shape[-1] % 2:
        raise ValueError(f"codes: expected an even last axis, got shape {codes.shape}")
    return E2M1.store(codes)


# ------------------------------------------------------------------ scales of weights


def _rows_of_weight(exponents: Array, block_size: int) -> Array:
    """Packed scales of every row of a weight in column-major storage."""
    return sf_storage(pack_words(exponents.repeat(block_size, axis=-2)))


def batched_transpose_weight_sf(
    sf: Sequence[Array], block_size: int, transpose_sf1s: Sequence[bool] | None = None, *, check: bool = False
) -> list[tuple[Array, Array]]:
    """Packed scales of the rows of every weight and of its transpose, as column-major views; sf1 is its storage where transposed.

    check: ValueError where a scale has a sign or a mantissa.
    """
    transposed = [False] * len(sf) if transpose_sf1s is None else list(transpose_sf1s)
    if len(transposed) != len(sf):
        raise ValueError(f"transpose_sf1s: expected {len(sf)} entries, got {len(transposed)}")
    results = []
    for scale, as_storage in zip(sf, transposed, strict=True):
        exponents = exponent_bytes(scale)
        if check and (np.asarray(scale).view(np.uint32) != exponents.astype(np.uint32) << 23).any():
            raise ValueError("sf: expected powers of two, got a sign or mantissa bits")
        sf0 = _rows_of_weight(exponents, block_size)
        sf1 = _rows_of_weight(np.swapaxes(exponents, -1, -2), block_size)
        results.append((sf_logical(sf0, sf0.shape[-1]), sf1 if as_storage else sf_logical(sf1, sf1.shape[-1])))
    return results
