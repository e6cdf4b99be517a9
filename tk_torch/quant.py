"""Quantization casts for PyTorch: FP8 (E4M3), FP4 (E2M1) and 12-bit (E5M6) data with scales of blocks.

A quantized tensor is a tuple (data, scales). Column-major scales are views with strides (1, Ra). No cast is differentiable but
`cast` and `fake_quant`; results never require a gradient otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tk_core import config
from tk_core.config import get_amax_clamp_for_quant, set_amax_clamp_for_quant
from tk_core.docs import with_doc
from tk_core.errors import type_error, value_error
from tk_core.ops.quant import cast as cast_kernels
from tk_core.ops.quant import cast_back as cast_back_kernels
from tk_core.ops.quant import channels, elementwise, lossless
from tk_core.ops.quant.calls import back, block, channel, elements, token, weights
from tk_core.ops.quant.calls.common import Data, Request, Scale, integer
from tk_torch.launch import DTYPE_NAMES
from tk_torch.library import TorchOp, bind

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
    "unpack_from_e2m1fn_x2",
]

QuantTensor = tuple[Tensor, Tensor]
Block = tuple[int, int]

# bound here, not where they are called: a tracer must not see the operators being registered
_OPS = {
    op.name: bind(op)
    for op in (
        cast_kernels.quantize,
        cast_kernels.quantize_rows,
        cast_kernels.fake_quant,
        cast_back_kernels.dequantize,
        cast_back_kernels.dequantize_rows,
        lossless.recast_lossless,
        channels.quantize_channels,
        elementwise.cast_elements,
        elementwise.cast_stochastic,
        elementwise.unpack_e2m1,
        elementwise.pack_e2m1,
        *weights.operations(),
    )
}

_FP4 = getattr(torch, "float4_e2m1fn_x2", None)
_is_compiling = torch.compiler.is_compiling


# ------------------------------------------------------------------ arrays as the judges see them


def _tensor(op: str, argument: str, t: Any) -> Tensor:
    if not isinstance(t, Tensor):
        raise type_error(op, argument, "an array", type(t).__name__)
    return t.view(torch.int8) if t.dtype is _FP4 else t


def _data(t: Tensor) -> Data:
    return Data(t.shape, DTYPE_NAMES[t.dtype])


def _stored(op: str, argument: str, sf: Any) -> tuple[Tensor, Scale]:
    """Scales in storage orientation; of a single column both orientations are the same memory."""
    sf = _tensor(op, argument, sf)
    col = sf.ndim == 2 and sf.stride(0) == 1 and sf.stride(1) != 1 and sf.shape[1] != 1
    stored = sf.t() if col else sf
    return stored, Scale(stored.shape, DTYPE_NAMES[sf.dtype], col)


def _source(op: str, x: Any) -> tuple[Tensor, Data, Tensor | None, Scale | None]:
    """A tensor, or data and scales."""
    if not isinstance(x, tuple | list):
        x = _tensor(op, "x", x)
        return x, _data(x), None, None
    data, sf, about = _quantized(op, x)
    return data, _data(data), sf, about


def _quantized(op: str, x: Any) -> tuple[Tensor, Tensor, Scale]:
    if not isinstance(x, tuple | list) or len(x) != 2:
        got = f"{len(x)} items" if isinstance(x, tuple | list) else type(x).__name__
        raise type_error(op, "x", "a pair (data, scales)", got)
    data, (sf, about) = _tensor(op, "x[0]", x[0]), _stored(op, "x[1]", x[1])
    if sf.device != data.device:
        raise value_error(op, "x[1]", f"device {data.device}, that of x[0]", sf.device)
    return data, sf, about


def _outs(op: str, out: Any) -> tuple[Data | None, Data | None] | None:
    if out is None:
        return None
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise type_error(op, "out", "a pair (data, scales), each an array or None", type(out).__name__)
    return tuple(None if t is None else _data(_tensor(op, f"out[{i}]", t)) for i, t in enumerate(out))


def _out(op: str, argument: str, t: Any) -> Data | None:
    return None if t is None else _data(_tensor(op, argument, t))


# ------------------------------------------------------------------ judging and running


class _Call(NamedTuple):
    """A request with everything that does not depend on the arrays: which operator, its attributes, the mask of its results."""

    request: Request
    bound: TorchOp
    values: tuple
    mask: int
    absent: tuple[None, ...]


def _call(request: Request) -> _Call:
    bound = _OPS[request.op.name]
    mask = sum(1 << i for i, name in enumerate(request.op.forward.outs) if name in request.wanted)
    return _Call(request, bound, bound.attributes(request.attrs), mask, (None,) * bound.num_ins)


@functools.lru_cache(4096, typed=True)
def _remembered(judge: Callable[..., Request], clamps: tuple, *args: Any) -> _Call:
    return _call(judge(*args))


def _ask(judge: Callable[..., Request], *args: Any) -> _Call:
    """What a call is to run; remembered, except where a tracer would see the memory change or sizes are symbols."""
    if not _is_compiling():
        try:
            return _remembered(judge, config.amax_clamps(), *args)
        except TypeError:  # what cannot be hashed, or a wrong argument, which is judged again
            pass
    return _call(judge(*args))


def _run(call: _Call, *tensors: Tensor | None, out: Sequence[Tensor | None] | None = None, **more: Any) -> list[Tensor]:
    """The wanted results."""
    if out is None and not more:
        results = call.bound.forward.call((*tensors, *call.absent[len(tensors) :]), call.values, call.mask)
    else:
        request = call.request
        given = {name: t for name, t in zip(request.op.forward.outs, out or (), strict=False) if t is not None}
        results = call.bound.some(request.wanted, *tensors, given=given, **request.attrs, **more)
    return [t for t in results if t is not None]


def _pair(call: _Call, results: list[Tensor]) -> QuantTensor:
    return results[0], _view(call, results[1])


def _view(call: _Call, sf: Tensor) -> Tensor:
    """Column-major scales without the padding of their storage."""
    rows = call.request.rows
    if not rows:
        return sf
    return sf.t() if rows == sf.shape[1] else sf.t().narrow(0, 0, rows)


def _seed(op: str, seed: Any, like: Tensor) -> tuple[Tensor | None, dict[str, int]]:
    """A scalar; where a graph is traced a tensor, so that another seed is no other graph."""
    if not _is_compiling():
        integer(op, "seed", seed)
    wrapped = (seed + 2**31) % 2**32 - 2**31
    if _is_compiling():
        return torch.full((1,), wrapped, dtype=torch.int32, device=like.device).view(torch.uint32), {}
    return None, {"seed_value": wrapped}


# ------------------------------------------------------------------ rows


@with_doc(token.PER_TOKEN_CAST, "`out`: (data, sf) to write to, each may be None; row-major scales only.")
def per_token_cast(
    x: Tensor | QuantTensor,
    fmt: str,
    num_per_channels: int,
    x_block_size: Block | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    stochastic_cast: bool = False,
    out: tuple[Tensor | None, Tensor | None] | None = None,
    *,
    seed: int = 0,
) -> QuantTensor:
    op = "per_token_cast"
    data, about, sf, scale = _source(op, x)
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf, stochastic_cast)
    call = _ask(token.per_token_cast, op, about, scale, fmt, num_per_channels, x_block_size, *flags, _outs(op, out))
    if call.request.op is cast_kernels.quantize_rows:
        return _pair(call, _run(call, data, out=out))
    number, seeded = _seed(op, seed, data) if stochastic_cast else (None, {})
    return _pair(call, _run(call, data, sf, None, number, out=out, **seeded))


@with_doc(token.SF_ONLY, "`out_sf`: an array to write to; row-major scales only.")
def per_token_cast_with_sf_only(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    x_block_size: None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    out_sf: Tensor | None = None,
) -> Tensor:
    op = "per_token_cast_with_sf_only"
    x = _tensor(op, "x", x)
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf)
    call = _ask(token.per_token_cast_with_sf_only, op, _data(x), fmt, num_per_channels, x_block_size, *flags, _out(op, "out_sf", out_sf))
    return _view(call, _run(call, x, out=(None, out_sf))[0])


@with_doc(token.PRECOMPUTED, "`out`: an array to write to.")
def per_token_cast_with_precomputed_sf(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    sf: Tensor,
    x_block_size: None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    op = "per_token_cast_with_precomputed_sf"
    x, (sf, scale) = _tensor(op, "x", x), _stored(op, "sf", sf)
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf)
    call = _ask(
        token.per_token_cast_with_precomputed_sf, op, _data(x), fmt, num_per_channels, scale, x_block_size, *flags, _out(op, "out", out)
    )
    return _run(call, x, sf, out=(out,))[0]


@with_doc(token.PER_TOKEN_CAST_TO_E5M6)
def per_token_cast_to_e5m6(
    x: Tensor,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    op = "per_token_cast_to_e5m6"
    x = _tensor(op, "x", x)
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    call = _ask(token.per_token_cast_to_e5m6, op, _data(x), num_per_channels, *flags)
    return _pair(call, _run(call, x))


@with_doc(token.FAKE_QUANT)
def fake_quant(x: Tensor, fmt: str, num_per_channels: int, round_sf: bool = False, use_e4m3_sf: bool = False) -> Tensor:
    op = "fake_quant"
    x = _tensor(op, "x", x)
    call = _ask(token.fake_quant, op, _data(x), fmt, num_per_channels, round_sf, use_e4m3_sf)
    return call.bound(x, **call.request.attrs)


@with_doc(token.CAST_AND_CAST_BACK, "An x that requires a gradient is refused while gradients are recorded (RuntimeError).")
def per_token_cast_and_cast_back(x: Tensor, fmt: str, num_per_channels: int, round_sf: bool = False, use_e4m3_sf: bool = False) -> None:
    op = "per_token_cast_and_cast_back"
    x = _tensor(op, "x", x)
    call = _ask(token.fake_quant, op, _data(x), fmt, num_per_channels, round_sf, use_e4m3_sf, False)
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{op}: x: expected an array that requires no gradient: use fake_quant, whose gradient is straight-through")
    with torch.no_grad():
        call.bound(x, out={"y": x}, **call.request.attrs)


# ------------------------------------------------------------------ blocks


@with_doc(block.PER_BLOCK_CAST, "`out`: (data, sf) to write to, each may be None; row-major scales only.")
def per_block_cast(
    x: Tensor,
    fmt: str,
    block_size: Block,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: tuple[Tensor | None, Tensor | None] | None = None,
) -> QuantTensor:
    op = "per_block_cast"
    x = _tensor(op, "x", x)
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    call = _ask(block.per_block_cast, op, _data(x), fmt, block_size, *flags, _outs(op, out))
    return _pair(call, _run(call, x, out=out))


@with_doc(block.SF_ONLY, "`out_sf`: an array to write to; row-major scales only.")
def per_block_cast_with_sf_only(
    x: Tensor,
    fmt: str,
    block_size: Block,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out_sf: Tensor | None = None,
) -> Tensor:
    op = "per_block_cast_with_sf_only"
    x = _tensor(op, "x", x)
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    call = _ask(block.per_block_cast_with_sf_only, op, _data(x), fmt, block_size, *flags, _out(op, "out_sf", out_sf))
    return _view(call, _run(call, x, out=(None, out_sf))[0])


@with_doc(block.PRECOMPUTED, "`out`: an array to write to.")
def per_block_cast_with_precomputed_sf(
    x: Tensor,
    fmt: str,
    block_size: Block,
    sf: Tensor,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    op = "per_block_cast_with_precomputed_sf"
    x, (sf, scale) = _tensor(op, "x", x), _stored(op, "sf", sf)
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    call = _ask(block.per_block_cast_with_precomputed_sf, op, _data(x), fmt, block_size, scale, *flags, _out(op, "out", out))
    return _run(call, x, None, sf, out=(out,))[0]


@with_doc(block.LOSSLESS)
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
    op = "per_block_cast_lossless"
    data, sf, scale = _quantized(op, x)
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    call = _ask(block.per_block_cast_lossless, op, _data(data), scale, fmt, x_block_size, out_block_size, *flags, check)
    results = _run(call, data, sf)
    if check and bool(results[2].any()):
        raise value_error(op, "x[1]", block.INEXACT, f"{int(results[2].sum())} output blocks outside")
    return _pair(call, results)


# ------------------------------------------------------------------ channels


@with_doc(channel.PER_CHANNEL_CAST)
def per_channel_cast(
    x: Tensor | QuantTensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    op = "per_channel_cast"
    data, about, sf, scale = _source(op, x)
    call = _ask(channel.per_channel_cast, op, about, scale, fmt, num_per_tokens, round_sf, num_per_channels, use_packed_ue8m0)
    return _pair(call, _run(call, data, sf, None))


@with_doc(channel.PER_CHANNEL_CAST_FUSED)
def per_channel_cast_fused(
    x: Tensor | QuantTensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    pos_to_token: Tensor | None = None,
) -> QuantTensor:
    op = "per_channel_cast_fused"
    data, about, sf, scale = _source(op, x)
    places = None if pos_to_token is None else _data(_tensor(op, "pos_to_token", pos_to_token))
    call = _ask(channel.per_channel_cast_fused, op, about, scale, fmt, num_per_tokens, round_sf, num_per_channels, places)
    return _pair(call, _run(call, data, sf, pos_to_token))


@with_doc(channel.PER_CHANNEL_CAST_AND_TRANSPOSE)
def per_channel_cast_and_transpose(x: Tensor, fmt: str, num_per_tokens: int, round_sf: bool = False) -> QuantTensor:
    op = "per_channel_cast_and_transpose"
    data, about, _, scale = _source(op, x)
    call = _ask(channel.per_channel_cast_and_transpose, op, about, scale, fmt, num_per_tokens, round_sf)
    return _pair(call, _run(call, data, None, None))


# ------------------------------------------------------------------ back


@with_doc(back.CAST_BACK)
def cast_back(x: QuantTensor, fmt: str, x_block_size: Block, x_special_fmt: str | None = None) -> Tensor:
    op = "cast_back"
    data, sf, scale = _quantized(op, x)
    return _run(_ask(back.cast_back_of, op, _data(data), scale, fmt, x_block_size, x_special_fmt), data, sf)[0]


@with_doc(back.PER_TOKEN_CAST_BACK)
def per_token_cast_back(x: QuantTensor, fmt: str, num_per_channels: int, x_special_fmt: str | None = None) -> Tensor:
    op = "per_token_cast_back"
    data, sf, scale = _quantized(op, x)
    return _run(_ask(back.per_token_cast_back, op, _data(data), scale, fmt, num_per_channels, x_special_fmt), data, sf)[0]


@with_doc(back.CAST_BACK_E5M6)
def cast_back_e5m6(x: QuantTensor, fmt: str, x_block_size: Block) -> Tensor:
    op = "cast_back_e5m6"
    data, sf, scale = _quantized(op, x)
    return _run(_ask(back.cast_back_e5m6, op, _data(data), scale, fmt, x_block_size), data, sf)[0]


# ------------------------------------------------------------------ element by element


def _dtype_name(op: str, argument: str, dtype: Any) -> str:
    if not isinstance(dtype, torch.dtype):
        raise type_error(op, argument, "a dtype", repr(dtype))
    return DTYPE_NAMES[dtype]


@with_doc(elements.CAST)
def cast(x: Tensor, dtype: torch.dtype, stochastic_rounding: bool = False, *, seed: int = 0) -> Tensor:
    op = "cast"
    x = _tensor(op, "x", x)
    call = _ask(elements.cast, op, _data(x), _dtype_name(op, "dtype", dtype), stochastic_rounding)
    if not stochastic_rounding:
        return call.bound(x, **call.request.attrs)
    number, seeded = _seed(op, seed, x)
    return call.bound(x.reshape(-1), number, **call.request.attrs, **seeded).view(x.shape)


@with_doc(elements.UNPACK)
def unpack_from_e2m1fn_x2(x: Tensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
    op = "unpack_from_e2m1fn_x2"
    x = _tensor(op, "x", x)
    return _run(_ask(elements.unpack_from_e2m1fn_x2, op, _data(x), _dtype_name(op, "out_dtype", out_dtype)), x)[0]


@with_doc(elements.PACK)
def pack_to_e2m1fn_x2(codes: Tensor) -> Tensor:
    op = "pack_to_e2m1fn_x2"
    codes = _tensor(op, "codes", codes)
    return _run(_ask(elements.pack_to_e2m1fn_x2, op, _data(codes)), codes)[0]


# ------------------------------------------------------------------ scales of weights


@with_doc(weights.DOC)
def batched_transpose_weight_sf(
    sf: Sequence[Tensor],
    block_size: int,
    transpose_sf1s: Sequence[bool],
    outs: Sequence[tuple[Tensor, Tensor] | None],
    *,
    check: bool = False,
) -> list[tuple[Tensor, Tensor]]:
    op = weights.NAME
    sf = [_tensor(op, f"sf[{i}]", t) for i, t in enumerate(weights.sequence("sf", sf))]
    for argument, value in (("transpose_sf1s", transpose_sf1s), ("outs", outs)):
        weights.same_length(argument, weights.sequence(argument, value), len(sf))
    weights.judge([_data(t) for t in sf], block_size)
    for i, t in enumerate(sf):
        if t.device != sf[0].device:
            raise value_error(op, f"sf[{i}]", f"device {sf[0].device}, that of sf[0]", t.device)
        if check and bool(((t.contiguous().view(torch.int32) & -0x7F800001) != 0).any()):
            raise value_error(op, f"sf[{i}]", weights.INEXACT, "a sign or mantissa bits")
    transposed = [_flag(f"transpose_sf1s[{i}]", flag) for i, flag in enumerate(transpose_sf1s)]
    given = [_given(i, out, t, block_size, flag) for i, (out, t, flag) in enumerate(zip(outs, sf, transposed, strict=True))]
    results: list[tuple[Tensor, Tensor]] = []
    for first, declared in weights.launches(len(sf)):
        count = len(declared.forward.ins)
        part = slice(first, first + count)
        batched = [t if t.ndim == 3 else t.unsqueeze(0) for t in sf[part]]
        named = {name: t for i, pair in enumerate(given[part]) for name, t in zip((f"rows_{i}", f"columns_{i}"), pair or (), strict=False)}
        got = _OPS[declared.name].some(tuple(declared.forward.outs), *batched, given=named, block_size=block_size)
        results += zip(got[::2], got[1::2], strict=True)
    views = []
    for out, t, flag, (rows, columns) in zip(outs, sf, transposed, results, strict=True):
        if out is None:
            rows, columns = (rows, columns) if t.ndim == 3 else (rows.squeeze(0), columns.squeeze(0))
            views.append((rows.mT, columns if flag else columns.mT))
        else:
            views.append(tuple(out))
    return views


def _flag(argument: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise type_error(weights.NAME, argument, "a bool", f"{value!r} of type {type(value).__name__}")
    return value


def _given(i: int, out: Any, sf: Tensor, size: int, flag: bool) -> tuple[Tensor, Tensor] | None:
    """An earlier result as the storage that the operation writes."""
    if out is None:
        return None
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise type_error(weights.NAME, f"outs[{i}]", "None or a pair (sf0, sf1)", type(out).__name__)
    stored = []
    for j, (t, as_storage) in enumerate(zip(out, (False, flag), strict=True)):
        argument = f"outs[{i}][{j}]"
        t = _tensor(weights.NAME, argument, t)
        along, across = (sf.shape[-1], sf.shape[-2]) if j else (sf.shape[-2], sf.shape[-1])
        shape = (*sf.shape[:-2], -(-across // 4), along * size)
        t = t if as_storage else t.mT if t.ndim >= 2 else t
        if t.dtype != torch.int32:
            raise type_error(weights.NAME, argument, "dtype int32", DTYPE_NAMES[t.dtype])
        if tuple(t.shape) != shape or not t.is_contiguous():
            text = (
                f"shape {shape}, dense"
                if as_storage
                else f"shape {(*shape[:-2], shape[-1], shape[-2])}, the transposed view of its storage"
            )
            raise value_error(weights.NAME, argument, text, f"{tuple(out[j].shape)} with strides {out[j].stride()}")
        if t.device != sf.device:
            raise value_error(weights.NAME, argument, f"device {sf.device}, that of sf", t.device)
        if t.data_ptr() % 32:
            raise value_error(weights.NAME, argument, "a 32-byte aligned array", f"address {t.data_ptr():#x}")
        stored.append(t if t.ndim == 3 else t.unsqueeze(0))
    return stored[0], stored[1]
