"""Quantization casts for JAX: FP8 (E4M3), FP4 (E2M1) and 12-bit (E5M6) data with scales of blocks.

A quantized tensor is a tuple (data, scales). Column-major scales are arrays in storage orientation, (G, Ra) with zeros behind the rows:
`sf_logical` gives the logical ones. Everything that is not an array (and no seed) is static under `jax.jit`. Only `cast` and `fake_quant`
are differentiable; differentiating another cast raises.

`jax.vmap` works for all of them. Sharded rows stay where they are in casts by rows with row-major scales; other casts gather what is
sharded automatically: call them inside `jax.shard_map`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tk_core.config import get_amax_clamp_for_quant, set_amax_clamp_for_quant
from tk_core.docs import with_doc
from tk_core.errors import type_error, value_error
from tk_core.ops.quant.calls import back, block, channel, elements, token, weights
from tk_core.ops.quant.calls.common import Data, Request, Scale, integer
from tk_jax.vjp import bind

__all__ = [
    "QuantTensor",
    "batched_transpose_weight_sf",
    "cast",
    "cast_back",
    "cast_back_e5m6",
    "fake_quant",
    "get_amax_clamp_for_quant",
    "pack_to_e2m1fn_x2",
    "per_block_cast",
    "per_block_cast_lossless",
    "per_block_cast_with_precomputed_sf",
    "per_block_cast_with_sf_only",
    "per_channel_cast",
    "per_channel_cast_and_transpose",
    "per_channel_cast_fused",
    "per_token_cast",
    "per_token_cast_and_cast_back",
    "per_token_cast_back",
    "per_token_cast_to_e5m6",
    "per_token_cast_with_precomputed_sf",
    "per_token_cast_with_sf_only",
    "set_amax_clamp_for_quant",
    "sf_logical",
    "unpack_from_e2m1fn_x2",
]

QuantTensor = tuple[Array, Array]
Block = tuple[int, int]

_COL = "`x_sf_col_major`: the scales of a quantized x are column-major, in storage orientation."


# ------------------------------------------------------------------ arrays as the judges see them


def _array(op: str, argument: str, a: Any) -> Array | np.ndarray:
    if not isinstance(a, jax.Array | np.ndarray):
        raise type_error(op, argument, "an array", type(a).__name__)
    return a


def _data(a: Any) -> Data:
    return Data(a.shape, a.dtype.name)


def _scale(op: str, argument: str, sf: Any, col: Any = False) -> Scale:
    if not isinstance(col, bool):
        raise type_error(op, "x_sf_col_major", "a bool", repr(col))
    sf = _array(op, argument, sf)
    return Scale(sf.shape, sf.dtype.name, col)


def _source(op: str, x: Any, col: Any = False) -> tuple[Any, Data, Any, Scale | None]:
    """An array, or data and scales."""
    if not isinstance(x, tuple | list):
        x = _array(op, "x", x)
        if col is not False:
            _scale(op, "x", x, col)
            raise value_error(op, "x_sf_col_major", "False with a tensor that is not quantized", col)
        return x, _data(x), None, None
    data, sf, about = _quantized(op, x, col)
    return data, _data(data), sf, about


def _quantized(op: str, x: Any, col: Any = False) -> tuple[Any, Any, Scale]:
    if not isinstance(x, tuple | list) or len(x) != 2:
        got = f"{len(x)} items" if isinstance(x, tuple | list) else type(x).__name__
        raise type_error(op, "x", "a pair (data, scales)", got)
    return _array(op, "x[0]", x[0]), x[1], _scale(op, "x[1]", x[1], col)


_ADVICE = "; fake_quant has a straight-through one"
_bound = functools.cache(functools.partial(bind, advice=_ADVICE))


def _run(request: Request, *arrays: Any) -> tuple[Array, ...]:
    """The wanted results."""
    return _bound(request.op, request.wanted, name=request.name)(*arrays, **request.attrs)


def _pair(results: tuple[Array, ...]) -> QuantTensor:
    return results[0], results[1]


def _seed(op: str, seed: Any) -> Array:
    """An operand, so that another seed is no other program."""
    if isinstance(seed, jax.Array | np.ndarray | np.generic):
        if seed.dtype != np.uint32 or seed.size != 1:
            raise type_error(op, "seed", "an int or a uint32 scalar", f"{seed.dtype} of shape {seed.shape}")
        return jnp.asarray(seed).reshape(1)
    return jnp.full((1,), integer(op, "seed", seed) % 2**32, jnp.uint32)


def sf_logical(sf: Array, R: int) -> Array:
    """The logical scales of column-major ones: the transpose of their storage without the padding.

    Args:
        sf: (G, Ra), as a cast with use_tma_aligned_col_major_sf returns it.
        R: rows of the logical scales: blocks of tokens.

    Returns:
        (R, G), dtype of sf.

    Raises:
        ValueError: sf has not two axes, or fewer than R rows.

    Numerics:
        exact.

    Gradient:
        none.
    """
    if _array("sf_logical", "sf", sf).ndim != 2:
        raise value_error("sf_logical", "sf", "two axes (G, Ra)", sf.shape)
    if not 0 <= integer("sf_logical", "R", R) <= sf.shape[1]:
        raise value_error("sf_logical", "R", f"0 to {sf.shape[1]}", R)
    return sf.T[:R]


# ------------------------------------------------------------------ rows


@with_doc(token.PER_TOKEN_CAST, _COL)
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
    seed: int | Array = 0,
    x_sf_col_major: bool = False,
) -> QuantTensor:
    op = "per_token_cast"
    data, about, sf, scale = _source(op, x, x_sf_col_major)
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf, stochastic_cast)
    request = token.per_token_cast(op, about, scale, fmt, num_per_channels, x_block_size, *flags)
    if request.op is token.cast.quantize_rows:
        return _pair(_run(request, data))
    return _pair(_run(request, data, sf, None, _seed(op, seed) if stochastic_cast else None))


@with_doc(token.SF_ONLY)
def per_token_cast_with_sf_only(
    x: Array,
    fmt: str,
    num_per_channels: int,
    x_block_size: None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
) -> Array:
    op = "per_token_cast_with_sf_only"
    x = _array(op, "x", x)
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf)
    return _run(token.per_token_cast_with_sf_only(op, _data(x), fmt, num_per_channels, x_block_size, *flags, None), x)[0]


@with_doc(token.PRECOMPUTED)
def per_token_cast_with_precomputed_sf(
    x: Array,
    fmt: str,
    num_per_channels: int,
    sf: Array,
    x_block_size: None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
) -> Array:
    op = "per_token_cast_with_precomputed_sf"
    x, scale = _array(op, "x", x), _scale(op, "sf", sf)
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf)
    return _run(token.per_token_cast_with_precomputed_sf(op, _data(x), fmt, num_per_channels, scale, x_block_size, *flags, None), x, sf)[0]


@with_doc(token.PER_TOKEN_CAST_TO_E5M6)
def per_token_cast_to_e5m6(
    x: Array,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    op = "per_token_cast_to_e5m6"
    x = _array(op, "x", x)
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    return _pair(_run(token.per_token_cast_to_e5m6(op, _data(x), num_per_channels, *flags), x))


@with_doc(token.FAKE_QUANT)
def fake_quant(x: Array, fmt: str, num_per_channels: int, round_sf: bool = False, use_e4m3_sf: bool = False) -> Array:
    op = "fake_quant"
    x = _array(op, "x", x)
    request = token.fake_quant(op, _data(x), fmt, num_per_channels, round_sf, use_e4m3_sf)
    return _bound(request.op)(x, **request.attrs)


@with_doc(token.CAST_AND_CAST_BACK)
def per_token_cast_and_cast_back(x: Array, fmt: str, num_per_channels: int, round_sf: bool = False, use_e4m3_sf: bool = False) -> Array:
    op = "per_token_cast_and_cast_back"
    x = _array(op, "x", x)
    request = token.fake_quant(op, _data(x), fmt, num_per_channels, round_sf, use_e4m3_sf, False)
    return _bound(request.op, ("y",), in_place=True, name=op)(x, **request.attrs)[0]


# ------------------------------------------------------------------ blocks


@with_doc(block.PER_BLOCK_CAST)
def per_block_cast(
    x: Array,
    fmt: str,
    block_size: Block,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    op = "per_block_cast"
    x = _array(op, "x", x)
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    return _pair(_run(block.per_block_cast(op, _data(x), fmt, block_size, *flags), x))


@with_doc(block.SF_ONLY)
def per_block_cast_with_sf_only(
    x: Array,
    fmt: str,
    block_size: Block,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> Array:
    op = "per_block_cast_with_sf_only"
    x = _array(op, "x", x)
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    return _run(block.per_block_cast_with_sf_only(op, _data(x), fmt, block_size, *flags, None), x)[0]


@with_doc(block.PRECOMPUTED)
def per_block_cast_with_precomputed_sf(
    x: Array,
    fmt: str,
    block_size: Block,
    sf: Array,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> Array:
    op = "per_block_cast_with_precomputed_sf"
    x, scale = _array(op, "x", x), _scale(op, "sf", sf)
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    return _run(block.per_block_cast_with_precomputed_sf(op, _data(x), fmt, block_size, scale, *flags, None), x, None, sf)[0]


@with_doc(block.LOSSLESS, _COL)
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
    x_sf_col_major: bool = False,
) -> QuantTensor | tuple[Array, Array, Array]:
    op = "per_block_cast_lossless"
    data, sf, scale = _quantized(op, x, x_sf_col_major)
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    results = _run(block.per_block_cast_lossless(op, _data(data), scale, fmt, x_block_size, out_block_size, *flags, check), data, sf)
    return (*results[:2], results[2].astype(bool)) if check else _pair(results)


# ------------------------------------------------------------------ channels


@with_doc(channel.PER_CHANNEL_CAST, _COL)
def per_channel_cast(
    x: Array | QuantTensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    use_packed_ue8m0: bool = False,
    *,
    x_sf_col_major: bool = False,
) -> QuantTensor:
    op = "per_channel_cast"
    data, about, sf, scale = _source(op, x, x_sf_col_major)
    request = channel.per_channel_cast(op, about, scale, fmt, num_per_tokens, round_sf, num_per_channels, use_packed_ue8m0)
    return _pair(_run(request, data, sf, None))


@with_doc(channel.PER_CHANNEL_CAST_FUSED, _COL)
def per_channel_cast_fused(
    x: Array | QuantTensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    pos_to_token: Array | None = None,
    *,
    x_sf_col_major: bool = False,
) -> QuantTensor:
    op = "per_channel_cast_fused"
    data, about, sf, scale = _source(op, x, x_sf_col_major)
    places = None if pos_to_token is None else _data(_array(op, "pos_to_token", pos_to_token))
    request = channel.per_channel_cast_fused(op, about, scale, fmt, num_per_tokens, round_sf, num_per_channels, places)
    return _pair(_run(request, data, sf, pos_to_token))


@with_doc(channel.PER_CHANNEL_CAST_AND_TRANSPOSE)
def per_channel_cast_and_transpose(x: Array, fmt: str, num_per_tokens: int, round_sf: bool = False) -> QuantTensor:
    op = "per_channel_cast_and_transpose"
    data, about, _, scale = _source(op, x)
    return _pair(_run(channel.per_channel_cast_and_transpose(op, about, scale, fmt, num_per_tokens, round_sf), data, None, None))


# ------------------------------------------------------------------ back


@with_doc(back.CAST_BACK, _COL)
def cast_back(x: QuantTensor, fmt: str, x_block_size: Block, x_special_fmt: str | None = None, *, x_sf_col_major: bool = False) -> Array:
    op = "cast_back"
    data, sf, scale = _quantized(op, x, x_sf_col_major)
    return _run(back.cast_back_of(op, _data(data), scale, fmt, x_block_size, x_special_fmt), data, sf)[0]


@with_doc(back.PER_TOKEN_CAST_BACK, _COL)
def per_token_cast_back(
    x: QuantTensor, fmt: str, num_per_channels: int, x_special_fmt: str | None = None, *, x_sf_col_major: bool = False
) -> Array:
    op = "per_token_cast_back"
    data, sf, scale = _quantized(op, x, x_sf_col_major)
    return _run(back.per_token_cast_back(op, _data(data), scale, fmt, num_per_channels, x_special_fmt), data, sf)[0]


@with_doc(back.CAST_BACK_E5M6, _COL)
def cast_back_e5m6(x: QuantTensor, fmt: str, x_block_size: Block, *, x_sf_col_major: bool = False) -> Array:
    op = "cast_back_e5m6"
    data, sf, scale = _quantized(op, x, x_sf_col_major)
    return _run(back.cast_back_e5m6(op, _data(data), scale, fmt, x_block_size), data, sf)[0]


# ------------------------------------------------------------------ element by element


def _dtype_name(op: str, argument: str, dtype: Any) -> str:
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        raise type_error(op, argument, "a dtype", repr(dtype)) from None


@with_doc(elements.CAST)
def cast(x: Array, dtype: Any, stochastic_rounding: bool = False, *, seed: int | Array = 0) -> Array:
    op = "cast"
    x = _array(op, "x", x)
    request = elements.cast(op, _data(x), _dtype_name(op, "dtype", dtype), stochastic_rounding)
    if not stochastic_rounding:
        return _bound(request.op)(x, **request.attrs)
    return _bound(request.op)(x.reshape(-1), _seed(op, seed), **request.attrs).reshape(x.shape)


@with_doc(elements.UNPACK)
def unpack_from_e2m1fn_x2(x: Array, out_dtype: Any = jnp.float32) -> Array:
    op = "unpack_from_e2m1fn_x2"
    x = _array(op, "x", x)
    return _run(elements.unpack_from_e2m1fn_x2(op, _data(x), _dtype_name(op, "out_dtype", out_dtype)), x)[0]


@with_doc(elements.PACK)
def pack_to_e2m1fn_x2(codes: Array) -> Array:
    op = "pack_to_e2m1fn_x2"
    codes = _array(op, "codes", codes)
    return _run(elements.pack_to_e2m1fn_x2(op, _data(codes)), codes)[0]


# ------------------------------------------------------------------ scales of weights


@with_doc(weights.DOC)
def batched_transpose_weight_sf(sf: Sequence[Array], block_size: int) -> list[tuple[Array, Array]]:
    op = weights.NAME
    sf = [_array(op, f"sf[{i}]", a) for i, a in enumerate(weights.sequence("sf", sf))]
    weights.judge([_data(a) for a in sf], block_size)
    results: list[tuple[Array, Array]] = []
    for first, declared in weights.launches(len(sf)):
        part = sf[first : first + len(declared.forward.ins)]
        outs = tuple(declared.forward.outs)
        got = _bound(declared, outs, name=op)(*(a if a.ndim == 3 else a[None] for a in part), block_size=block_size)
        pairs = zip(got[::2], got[1::2], strict=True)
        results += [(rows, columns) if a.ndim == 3 else (rows[0], columns[0]) for a, (rows, columns) in zip(part, pairs, strict=True)]
    return results
