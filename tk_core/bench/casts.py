"""The casts of real use, as the judges of the public functions see them: what is compiled ahead of time and checked for spills."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tk_core.bench.bound import Bound, bound
from tk_core.op import Type
from tk_core.ops.quant import weight_sf
from tk_core.ops.quant.calls import back, block, channel, elements, token
from tk_core.ops.quant.calls.common import E4M3, F32, FLOATS, INT8, INT32, UINT8, Data, Request, Scale

BF16 = FLOATS[0]
M = 8192
# column-major, rounded, packed
PLAIN, ROUND, PACKED_COL = (False, False, False), (False, True, False), (True, True, True)


def requests(H: int) -> Iterator[tuple[Request, Sequence[Type | None]]]:
    """Every call for one hidden size, and the types of its arguments."""
    x, wide = Data((M, H), BF16), Data((M, H), F32)
    e4m3, e2m1, e5m6 = Data((M, H), E4M3), Data((M, H // 2), INT8), Data((M, H // 2 * 3), UINT8)

    def scales(bm: int, bk: int) -> Scale:
        return Scale((-(-M // bm), -(-H // bk)), F32, False)

    def packed(bk: int) -> Scale:
        return Scale((-(-H // bk // 4), M), INT32, True)

    op = "per_token_cast"
    for data, fmt, g, flags in (
        (x, "e4m3", 128, PLAIN), (x, "e4m3", 128, ROUND), (x, "e4m3", 128, PACKED_COL), (x, "e4m3", 32, PACKED_COL),
        (x, "e4m3", H, PLAIN), (wide, "e4m3", 128, PLAIN), (wide, "e4m3", 32, PACKED_COL), (x, "e2m1", 32, ROUND),
        (x, "e2m1", 32, PACKED_COL), (x, "e2m1", 128, PLAIN), (wide, "e2m1", 32, ROUND), (x, "e5m6", H, ROUND), (wide, "e5m6", H, ROUND),
    ):  # fmt: skip
        yield token.per_token_cast(op, data, None, fmt, g, None, *flags), _types(data)
    for col in (False, True):
        yield token.per_token_cast(op, x, None, "e2m1", 16, None, col, False, False, True), _types(x)
    yield token.per_token_cast(op, x, None, "e4m3", 128, None, *PLAIN, False, True), _types(x)
    for data, sf, bm in ((e4m3, scales(128, 128), (128, 128)), (e4m3, scales(1, 128), (1, 128)), (e2m1, scales(1, 32), (1, 32))):
        yield token.per_token_cast(op, data, sf, "e4m3", 128, bm, *PACKED_COL), _types(data, sf)
    yield token.per_token_cast_with_sf_only(op, x, "e4m3", 128, None, *PLAIN, False, None), _types(x)
    yield token.per_token_cast_with_precomputed_sf(op, x, "e4m3", 128, scales(1, 128), None, *PLAIN, False, None), _types(x, scales(1, 128))
    for fmt, g in (("e4m3", 128), ("e2m1", 32)):
        yield token.fake_quant(op, x, fmt, g), _types(x)
    for data, fmt, size in ((x, "e4m3", 128), (x, "e4m3", 32), (wide, "e4m3", 128), (x, "e2m1", 32), (x, "e2m1", 128)):
        yield block.per_block_cast(op, data, fmt, (size, size), *ROUND), _types(data)
    for coarse in ((1, 128), (32, 32), (128, 128)):
        yield block.per_block_cast_lossless(op, e2m1, scales(1, 32), "e4m3", (1, 32), coarse, *ROUND, False), _types(e2m1, scales(1, 32))
    places = Data((4 * M,), INT32)
    for n in (32, 128):
        yield channel.per_channel_cast(op, x, None, "e4m3", n, False, None, False), _types(x)
        yield channel.per_channel_cast_and_transpose(op, x, None, "e4m3", n, False), _types(x)
    yield channel.per_channel_cast(op, e4m3, scales(1, 128), "e4m3", 128, False, 128, False), _types(e4m3, scales(1, 128))
    yield channel.per_channel_cast_fused(op, x, None, "e4m3", 128, False, None, places), _types(x, None, places)
    yield channel.per_channel_cast_fused(op, e4m3, scales(1, 128), "e4m3", 128, False, 128, places), _types(e4m3, scales(1, 128), places)
    for out in ("bf16", "fp32"):
        for data, sf, size in (
            (e4m3, scales(1, 128), (1, 128)), (e4m3, packed(32), (1, 32)), (e4m3, scales(1, H), (1, H)), (e4m3, scales(128, 1), (128, 1)),
            (e4m3, scales(128, 128), (128, 128)), (e2m1, scales(1, 32), (1, 32)), (e2m1, scales(32, 32), (32, 32)),
        ):  # fmt: skip
            yield back.cast_back_of(op, data, sf, out, size), _types(data, sf)
        yield back.cast_back_of(op, e5m6, scales(1, H), out, (1, H), "e5m6"), _types(e5m6, scales(1, H))
    for data, to, stochastic in ((wide, BF16, False), (x, E4M3, False), (wide, E4M3, False), (e4m3, BF16, False)):
        yield elements.cast(op, data, to, stochastic), _types(data)
    flat = Data((M * H,), F32)
    yield elements.cast(op, flat, BF16, True), _types(flat)
    yield elements.unpack_from_e2m1fn_x2(op, e2m1, F32), _types(e2m1)
    yield elements.pack_to_e2m1fn_x2(op, Data((M, H), UINT8)), _types(Data((M, H), UINT8))
    declared = weight_sf.weight_sf
    yield Request(op, declared, {"block_size": 128}, tuple(declared.forward.outs)), [((1, H // 128, H // 128), F32, "")]


def _types(*arrays: Data | Scale | None) -> list[Type | None]:
    return [None if a is None else (a.shape, a.dtype, "") for a in arrays]


def calls(H: int) -> Iterator[Bound]:
    """The same, bound to their types."""
    for request, types in requests(H):
        yield bound(request.op, request.op.forward, types, request.attrs, request.wanted)
