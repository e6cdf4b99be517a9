"""Every operation of the oracle: requantization, channels, gather, lossless, casts back, stochastic rounding."""

import numpy as np
import pytest
from quant_arrays import ALL_BF16, BF16, F8, FLAG_SETS, FLT_MAX, PUBLIC_FLAGS, codes_of, difference, f32, normal, same, same_pair

from tk_core.reference import quant as q
from tk_core.reference import quant_formats as qf

# ------------------------------------------------------------------ 2: operations


@pytest.mark.parametrize("flags", [*FLAG_SETS, "e4m3"])
@pytest.mark.parametrize("block", [(1, 32), (1, 128), (32, 32), (128, 128)])
def test_requantization(flags, block):
    """Scales of any layout; with powers of two, and where the input is plain, it is the cast of the dequantized values."""
    x = normal((130, 576), 11)
    for fmt_in in ("e4m3", "e2m1"):
        if flags == "e4m3" and block[0] > 1:
            continue
        if block[0] > 1:
            quantized = q.per_block_cast(x, fmt_in, block, *flags)
        else:
            named = {"use_e4m3_sf": True} if flags == "e4m3" else dict(zip(PUBLIC_FLAGS, flags, strict=True))
            quantized = q.per_token_cast(x, fmt_in, block[1], **named)
        values = q.cast_back(quantized, "fp32", block)
        for fmt, g, round_sf in (("e4m3", 32, True), ("e4m3", 128, False), ("e2m1", 32, False), ("e2m1", 128, True)):
            got = q.per_token_cast(quantized, fmt, g, block, round_sf=round_sf)
            direct = q.per_token_cast(values, fmt, g, round_sf=round_sf)
            same(got[1], direct[1])
            powers = flags != "e4m3" and flags[1]
            if powers or round_sf:
                same(got[0], direct[0])
            else:
                distance = codes_of(got[0], fmt).astype(int) - codes_of(direct[0], fmt)
                assert np.abs(distance).max() <= 1


@pytest.mark.parametrize("npt", [32, 128])
@pytest.mark.parametrize("round_sf", [False, True])
def test_per_channel(npt, round_sf):
    x = normal((384, 192), 12)
    data, sf = q.per_channel_cast(x, "e4m3", npt, round_sf)
    # the cast of the transposed matrix along its rows
    turned = q.per_token_cast(np.ascontiguousarray(x.T), "e4m3", npt, round_sf=round_sf)
    same_pair((data, sf), (np.ascontiguousarray(turned[0].T), np.ascontiguousarray(turned[1].T)))
    transposed = q.per_channel_cast_and_transpose(x, "e4m3", npt, round_sf)
    same_pair(transposed, (turned[0], sf))
    assert transposed[0].flags.c_contiguous
    if round_sf:
        packed = q.per_channel_cast(x, "e4m3", npt, True, use_packed_ue8m0=True)
        same(packed[0], data)
        assert packed[1].shape == (-(-384 // npt // 4), 192)
        same(qf.read_scales(packed[1], sf.shape, token_packed=True), sf)
        same(q.cast_back(packed, "bf16", (npt, 1)), q.cast_back((data, sf), "bf16", (npt, 1)))
    for g in (32, 128):
        for flags in ((False, False, False), (True, True, True), (True, False, False)):
            quantized = q.per_token_cast(x, "e4m3", g, None, *flags)
            values = q.per_token_cast_back(quantized, "fp32", g)
            same_pair(q.per_channel_cast(quantized, "e4m3", npt, round_sf, g), q.per_channel_cast(values, "e4m3", npt, round_sf))


@pytest.mark.parametrize("round_sf", [False, True])
def test_gather(round_sf):
    x = normal((200, 256), 13)
    rng = np.random.default_rng(0)
    positions = rng.integers(0, 200, 400).astype(np.int32)
    positions[rng.random(400) < 0.2] = -1
    positions[:128] = np.where(np.arange(128) % 2, -5, 10**6)
    rows = np.where(((positions >= 0) & (positions < 200))[:, None], x[np.clip(positions, 0, 199)], np.float32(0))
    data, sf = q.per_channel_cast_fused(x, "e4m3", 128, round_sf, pos_to_token=positions)
    same_pair((data, sf), q.per_channel_cast(rows, "e4m3", 128, round_sf))
    assert (data[:128].view(np.uint8) == 0).all()
    assert (qf.bits_of(sf[0]) == ((127 - 22) << 23 if round_sf else 0x346FACAD)).all()
    assert sf.shape == (4, 256)
    quantized = q.per_token_cast(x, "e4m3", 128)
    got = q.per_channel_cast_fused(quantized, "e4m3", 128, round_sf, 128, positions)
    values = q.per_token_cast_back(quantized, "fp32", 128)
    same_pair(got, q.per_channel_cast_fused(values, "e4m3", 128, round_sf, pos_to_token=positions))
    same_pair(q.per_channel_cast_fused(x[:128], "e4m3", 128, round_sf), q.per_channel_cast(x[:128], "e4m3", 128, round_sf))


@pytest.mark.parametrize("flags_in", [(False, True, False), (True, True, True), (False, True, True)])
@pytest.mark.parametrize("flags_out", [(False, True, False), (True, True, True), (False, False, False)])
@pytest.mark.parametrize("block", [(1, 128), (32, 32), (128, 128)])
def test_lossless(flags_in, flags_out, block):
    rng = np.random.default_rng(14)
    x = normal((130, 576), 14) * 2.0 ** rng.integers(-110, 127, (130, 1)).astype(np.float64)
    x = np.clip(x, -FLT_MAX / 8, FLT_MAX / 8)
    # values of an output block lie within 2^9; whole input blocks of zeros may be anywhere
    reach = q._spread(q._block_max(np.abs(x), block), block, x.shape) / 2.0**9
    x = np.copysign(np.maximum(np.abs(x), reach), x).astype(np.float32)
    x[5, 32:64] = 0
    x[7, :256] = -0.0
    quantized = q.per_token_cast(x, "e2m1", 32, None, *flags_in)
    out = q.per_block_cast_lossless(quantized, "e4m3", (1, 32), block, *flags_out, check=True)
    same(q.cast_back(out, "fp32", block), q.cast_back(quantized, "fp32", (1, 32)))


def test_lossless_extremes():
    """d = -8 is exact; the output exponent never falls below 1; the smallest input beside the largest rounds to zero."""
    codes = np.tile(np.arange(16), 16)[None]
    for exponents in ([120, 106, 112, 118, 113, 107, 106, 120], [1, 2, 3, 1, 7, 1, 1, 1], [0, 1, 0, 1, 3, 0, 2, 0]):
        x = (qf.E2M1.store(codes), qf.pack_words(np.array([exponents])))
        data, sf = q.per_block_cast_lossless(x, "e4m3", (1, 32), (1, 128), check=True)
        assert (qf.exponent_bytes(sf) >= 1).all()
        same(q.cast_back((data, sf), "fp32", (1, 128)), q.cast_back(x, "fp32", (1, 32)))
    x = (qf.E2M1.store(codes[:, :128]), qf.pack_words(np.array([[254, 1, 0, 254]])))
    data, sf = q.per_block_cast_lossless(x, "e4m3", (1, 32), (1, 128))
    assert (data[:, 32:96].view(np.uint8) == np.where(codes[:, :64] >= 8, 0x80, 0)).all()
    with pytest.raises(ValueError, match="2\\^14"):
        q.per_block_cast_lossless(x, "e4m3", (1, 32), (1, 128), check=True)


def test_cast_back_is_close():
    x = normal((257, 576), 15)
    for flags in FLAG_SETS:
        for g in (128, 576):
            for fmt, bound in (("e4m3", 1e-3), ("e2m1", 2e-2), ("e5m6", 1e-4)):
                quantized = q.per_token_cast(x, fmt, g, None, *flags)
                y = q.per_token_cast_back(quantized, "fp32", g, "e5m6" if fmt == "e5m6" else None)
                assert difference(x, y) < bound
                bf16 = q.per_token_cast_back(quantized, "bf16", g, "e5m6" if fmt == "e5m6" else None)
                same(bf16, y.astype(BF16))


def test_bias():
    for fmt in ("e4m3", "e2m1"):
        x = normal((512, 576), 16)
        y = q.per_token_cast_back(q.per_token_cast(x, fmt, 64), "fp32", 64)
        fraction = (y < x).mean() + (y == x).mean() / 2
        assert abs(fraction - 0.5) < 10 / np.sqrt(x.size)


@pytest.mark.parametrize("value", [2.0**-20, 2.0**-14 * 63 / 64, 2.0**-14])
def test_e5m6_small_values(value):
    x = np.full((3, 576), value, np.float32)
    x[:, -1] = 65024
    for flags in FLAG_SETS:
        data, sf = q.per_token_cast_to_e5m6(x, 576, *flags)
        assert (qf.read_scales(sf, (3, 1)) == 1).all()
        same(q.cast_back_e5m6((data, sf), "fp32", (1, 576)), x)


def test_inputs_of_any_stride_and_width():
    wide = normal((64, 256), 17)
    same_pair(q.per_token_cast(wide[:, :128], "e4m3", 128), q.per_token_cast(wide[:, :128].copy(), "e4m3", 128))
    narrow = wide.astype(BF16)
    same_pair(q.per_block_cast(narrow, "e2m1", (32, 32)), q.per_block_cast(narrow.astype(np.float32), "e2m1", (32, 32)))


def test_cast_of_elements():
    v = np.concatenate([ALL_BF16[np.isfinite(ALL_BF16)], normal((2, 3, 4096), 18).reshape(-1), f32([FLT_MAX, -FLT_MAX])])
    v = v[: v.size // 6 * 6].reshape(2, 3, -1)
    with np.errstate(over="ignore"):
        same(q.cast(v, BF16), v.astype(BF16))
    same(q.cast(v, F8), np.clip(v, -448, 448).astype(F8))
    every = np.arange(256, dtype=np.uint8).view(F8)
    for dtype in (np.float32, BF16):
        got = q.cast(every, dtype)
        assert got.dtype == dtype
        assert np.array_equal(got.astype(np.float32), every.astype(np.float32), equal_nan=True)
    assert q.cast(f32([1.5]).reshape(()), F8, True).shape == ()
    assert float(q.cast(f32([FLT_MAX]), BF16).item()) == np.inf
    for source, target in ((np.float32, np.float32), (F8, BF16), (BF16, np.float32), (BF16, BF16), (F8, F8)):
        with pytest.raises(ValueError, match="stochastic"):
            q.cast(np.ones(4, source), target, True)


def test_fake_quant():
    x = normal((33, 192), 19)
    for dtype in (np.float32, BF16):
        for flags in ((False, False), (True, False), (False, True)):
            for g in (16, 64):
                given = x.astype(dtype)
                quantized = q.per_token_cast(given, "e2m1", g, round_sf=flags[0], use_e4m3_sf=flags[1])
                want = q.per_token_cast_back(quantized, "fp32" if dtype == np.float32 else "bf16", g)
                same(q.per_token_cast_and_cast_back(given, "e2m1", g, *flags), want)


# ------------------------------------------------------------------ stochastic rounding


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_stochastic_stays_between_neighbours(fmt):
    form = qf.FORMATS[fmt]
    x = np.concatenate([normal((64, 256), 20), form.table[np.isfinite(form.table)].repeat(256).reshape(-1, 256)])
    v = x * np.float32(form.max / np.abs(x).max())
    up, down = (form.encode_stochastic(v, np.full(v.shape, r)) for r in (65535, 0))
    magnitude = np.abs(form.decode(down))
    assert (magnitude <= np.abs(v)).all()
    assert (np.abs(form.decode(up)) >= magnitude).all()
    for seed in (0, 1, -1, 2**31):
        codes = form.encode_stochastic(v, qf.random_bits(v, seed))
        assert ((codes == up) | (codes == down)).all()
        assert (np.abs(codes.astype(int) - form.encode(v)) <= 1).all()
        assert (np.signbit(form.decode(codes)) == np.signbit(v)).all()
    every = form.table[np.isfinite(form.table)]
    assert (form.encode_stochastic(every, np.full(every.shape, 65535)) == form.encode(every)).all()
    beyond = form.encode_stochastic(f32([form.max, FLT_MAX, -FLT_MAX]), np.full(3, 65535))
    assert beyond.tolist() == [form.max_code, form.max_code, form.max_code | 1 << (form.bits - 1)]


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_stochastic_by_search(fmt):
    """The rule as it is written, with neighbours found in the grid, in exact fp64."""
    form = qf.FORMATS[fmt]
    grid = form.table[: form.max_code + 1].astype(np.float64)
    fractions = np.array([0, 1, 2**-16, 3 * 2**-16, 0.5, 1 - 2**-16, 1 - 2**-17])[:, None]
    between = (grid[:-1] + fractions * (grid[1:] - grid[:-1])).reshape(-1)
    v = np.concatenate([between, -between, normal((4096,), 24), ALL_BF16[np.isfinite(ALL_BF16)][::37]]).astype(np.float32)
    magnitude = np.minimum(np.abs(v).astype(np.float64), grid[-1])
    low = np.searchsorted(grid, magnitude, "right") - 1
    high = np.minimum(low + 1, form.max_code)
    step = np.where(low == high, 1, grid[high] - grid[low])
    f = np.floor(65536 * (magnitude - grid[low]) / step).astype(int)
    sign = np.signbit(v).astype(int) << (form.bits - 1)
    for random in (qf.random_bits(v, 3).astype(int), np.clip(65536 - f, 0, 65535), np.clip(65535 - f, 0, 65535)):
        want = np.where(f + random >= 65536, high, low) | sign
        assert (form.encode_stochastic(v, random) == want).all()


def test_stochastic_is_repeatable_and_indexed_by_position():
    x = normal((33, 128), 21)
    for fmt in ("e4m3", "e2m1"):
        for flags in ({}, {"round_sf": True}, {"use_e4m3_sf": True}):
            first = q.per_token_cast(x, fmt, 32, stochastic_cast=True, seed=5, **flags)
            same_pair(first, q.per_token_cast(x, fmt, 32, stochastic_cast=True, seed=5, **flags))
            other = q.per_token_cast(x, fmt, 32, stochastic_cast=True, seed=6, **flags)
            same(first[1], other[1])
            assert (codes_of(first[0], fmt) != codes_of(other[0], fmt)).any()
    # element (m, k) takes the bits of the flat index m·H + k
    flat = q.cast(x, F8, True, seed=5)
    same(q.cast(x.reshape(-1), F8, True, seed=5).reshape(x.shape), flat)
    same(q.cast(x, F8, True, seed=5 + 2**32), flat)


def test_stochastic_mean():
    n = 1 << 22
    for value in (0.3, -2.2):
        v = np.full(n, value, np.float32)
        random = qf.random_bits(v, 0)
        for form in (qf.E4M3, qf.E2M1):
            low, high = (form.decode(form.encode_stochastic(v[:1], np.array([r])))[0] for r in (0, 65535))
            step = abs(float(high) - float(low))
            p = (abs(float(v[0])) - abs(float(low))) / step
            mean = form.decode(form.encode_stochastic(v, random)).mean(dtype=np.float64)
            assert abs(mean - float(v[0])) < 5 * step * np.sqrt(p * (1 - p) / n)


def test_stochastic_bf16():
    v = ALL_BF16[np.isfinite(ALL_BF16)]
    same(q.cast(v, BF16, True), v.astype(BF16))
    v = normal((1 << 16,), 22)
    y = q.cast(v, BF16, True).astype(np.float32)
    below = qf.from_bits(qf.bits_of(v) & 0xFFFF0000)
    above = qf.from_bits((qf.bits_of(v) & 0xFFFF0000) + 0x10000)
    assert ((y == below) | (y == above)).all()
    assert np.isnan(q.cast(qf.from_bits(np.full(64, 0x7FFFFFFF)), BF16, True).astype(np.float32)).all()
    same(q.cast(v.astype(BF16), F8, True), q.cast(v.astype(BF16).astype(np.float32), F8, True))


# ------------------------------------------------------------------ helpers of the public interface


def test_e2m1_helpers():
    data = np.arange(256, dtype=np.uint8).reshape(4, 4, 16)
    for dtype in (np.int8, np.uint8):
        values = q.unpack_from_e2m1fn_x2(data.view(dtype))
        assert (values.dtype, values.shape) == (np.float32, (4, 4, 32))
        same(values[..., 0::2], qf.E2M1.table[data & 15])
        same(values[..., 1::2], qf.E2M1.table[data >> 4])
        assert q.unpack_from_e2m1fn_x2(data, BF16).dtype == BF16
    codes = np.random.default_rng(0).integers(0, 16, (3, 5, 8))
    same(qf.E2M1.load(q.pack_to_e2m1fn_x2(codes)), codes.astype(np.uint8))
    with pytest.raises(ValueError, match="axis"):
        q.unpack_from_e2m1fn_x2(np.array(3, np.int8))


@pytest.mark.parametrize(("block", "sizes"), [(32, (4, 12)), (32, (20, 8)), (128, (1, 3)), (128, (18, 5))])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_weight_scales(block, sizes, batch):
    exponents = np.random.default_rng(0).integers(1, 255, (*batch, *sizes))
    sf = qf.from_bits(exponents << 23)
    (sf0, sf1), (again, stored) = q.batched_transpose_weight_sf([sf, sf], block, [False, True], check=True)
    n, k = sizes[0] * block, sizes[1] * block
    same(sf0, again)
    assert (sf0.shape, sf1.shape) == ((*batch, n, -(-sizes[1] // 4)), (*batch, k, -(-sizes[0] // 4)))
    assert (sf0.strides[-2:], sf1.strides[-2:]) == ((4, 4 * n), (4, 4 * k))
    if batch:
        assert (sf0.strides[0], sf1.strides[0]) == (4 * n * sf0.shape[-1], 4 * k * sf1.shape[-1])
    same(stored, np.ascontiguousarray(np.swapaxes(sf1, -1, -2)))
    assert stored.flags.c_contiguous
    for index in np.ndindex(*batch):
        for result, e in ((sf0[index], exponents[index]), (sf1[index], exponents[index].T)):
            for r, j in np.ndindex(*result.shape):
                if r % block in (0, block - 1):
                    row = e[r // block, 4 * j : 4 * j + 4]
                    assert int(result[r, j]) & 0xFFFFFFFF == sum(int(byte) << 8 * t for t, byte in enumerate(row))


def test_weight_scales_follow_the_block_cast():
    x = normal((256, 384), 23)
    data, sf = q.per_block_cast(x, "e4m3", (128, 128), round_sf=True)
    ((sf0, sf1),) = q.batched_transpose_weight_sf([sf], 128)
    same(q.cast_back((data, sf0), "fp32", (1, 128)), q.cast_back((data, sf), "fp32", (128, 128)))
    turned = np.ascontiguousarray(data.T)
    same(q.cast_back((turned, sf1), "fp32", (1, 128)), np.ascontiguousarray(q.cast_back((data, sf), "fp32", (128, 128)).T))
    assert q.batched_transpose_weight_sf([], 128) == []
    with pytest.raises(ValueError, match="powers of two"):
        q.batched_transpose_weight_sf([-sf], 128, check=True)
    with pytest.raises(ValueError, match="entries"):
        q.batched_transpose_weight_sf([sf], 128, [])
