"""The oracle on blocks: loops, shapes, layouts, edge cases, properties of the specification."""

import ml_dtypes
import numpy as np
import pytest
import quant_golden as golden
from quant_arrays import (
    BF16,
    F8,
    FLAG_SETS,
    NAMES,
    SIZES,
    codes_of,
    normal,
    same,
    same_pair,
)

from tk_core.reference import quant as q
from tk_core.reference import quant_formats as qf

# ------------------------------------------------------------------ blocks, written as loops


def block_by_loops(x, fmt, block, round_sf):
    """Codes and fp32 scales with ml_dtypes casts, a block at a time."""
    top, clamp = {"e4m3": (448, 1e-4), "e2m1": (6, 6 * 2.0**-126)}[fmt]
    dtype = {"e4m3": F8, "e2m1": ml_dtypes.float4_e2m1fn}[fmt]
    m, h = x.shape
    codes = np.zeros((m, h), np.uint8)
    sf = np.zeros((-(-m // block[0]), -(-h // block[1])), np.float32)
    for i, j in np.ndindex(*sf.shape):
        rows = slice(i * block[0], min((i + 1) * block[0], m))
        columns = slice(j * block[1], min((j + 1) * block[1], h))
        a = max(np.abs(x[rows, columns]).max(), np.float32(clamp))
        if round_sf:
            exponent = next(e for e in range(-127, 129) if float(a) <= top * 2.0**e)
            sf[i, j], inv = 2.0**exponent, np.float32(2.0**-exponent)
        else:
            sf[i, j], inv = a / np.float32(top), np.float32(top) / a
        codes[rows, columns] = np.clip(x[rows, columns] * inv, -top, top).astype(dtype).view(np.uint8)
    return codes, sf


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("block", [(1, 16), (1, 64), (1, 128), (32, 32), (32, 128), (128, 128), (32, 1), (128, 1)])
@pytest.mark.parametrize("round_sf", [False, True])
def test_blocks_by_loops(size, block, round_sf):
    for fmt in ("e4m3", "e2m1"):
        for scale in (1e20, 1e-6):
            x = normal(size, 1, scale)[:65]
            x[0] = 0
            codes, sf = block_by_loops(x, fmt, block, round_sf)
            if block[0] == 1:
                got = q.per_token_cast(x, fmt, block[1], round_sf=round_sf)
            elif block[1] == 1:
                got = q.per_channel_cast(x, fmt, block[0], round_sf)
            else:
                got = q.per_block_cast(x, fmt, block, round_sf=round_sf)
            assert (codes_of(got[0], fmt) == codes).all()
            same(got[1], sf)


def test_shapes_and_dtypes():
    x = normal((5, 576))
    for fmt, dtype, width in (("e4m3", F8, 576), ("e2m1", np.int8, 288), ("e5m6", np.uint8, 864)):
        data, sf = q.per_token_cast(x, fmt, 576)
        assert (data.dtype, data.shape, sf.shape) == (dtype, (5, width), (5, 1))
    assert q.per_token_cast(x, "e4m3", 128)[1].shape == (5, 5)
    for flags, dtype, shape, strides in (
        ({}, np.float32, (5, 5), (5, 1)),
        ({"use_e4m3_sf": True}, F8, (5, 5), (5, 1)),
        ({"use_tma_aligned_col_major_sf": True}, np.float32, (5, 5), (1, 8)),
        ({"use_tma_aligned_col_major_sf": True, "use_e4m3_sf": True}, F8, (5, 5), (1, 16)),
        ({"round_sf": True, "use_packed_ue8m0": True}, np.int32, (5, 2), (2, 1)),
        ({"use_tma_aligned_col_major_sf": True, "round_sf": True, "use_packed_ue8m0": True}, np.int32, (5, 2), (1, 8)),
    ):
        sf = q.per_token_cast(x, "e4m3", 128, **flags)[1]
        assert (sf.dtype, sf.shape, tuple(s // sf.itemsize for s in sf.strides)) == (dtype, shape, strides)
        if "use_tma_aligned_col_major_sf" in flags:
            storage = qf.sf_storage(sf)
            assert (sf.base.view(np.uint8) == storage.view(np.uint8)).all()
            assert not storage[:, 5:].view(np.uint8).any()
            same(qf.sf_logical(storage, 5), sf)
    for rows, columns in ((1, 5), (5, 1), (1, 1)):
        sf = q.per_token_cast(x[:rows], "e4m3", -(-576 // columns), use_tma_aligned_col_major_sf=True)[1]
        assert sf.strides == (4, 4 * qf.align(rows, 4))
    sf = q.per_channel_cast(normal((256, 64)), "e4m3", 32, True, use_packed_ue8m0=True)[1]
    assert (sf.dtype, sf.shape) == (np.int32, (2, 64))


def test_no_rows():
    x = np.zeros((0, 576), np.float32)
    for flags in FLAG_SETS:
        columns = 2 if flags[2] else 5
        for fmt, width in (("e4m3", 576), ("e2m1", 288)):
            for data, sf in (q.per_token_cast(x, fmt, 128, None, *flags), q.per_block_cast(x, fmt, (128, 128), *flags)):
                assert (data.shape, sf.shape) == ((0, width), (0, columns))
                assert q.cast_back((data, sf), "bf16", (1, 128)).shape == (0, 576)
        data, sf = q.per_token_cast(x, "e5m6", 576, None, *flags)
        assert (data.shape, sf.shape) == ((0, 864), (0, 1))
        assert q.cast_back_e5m6((data, sf), "fp32", (1, 576)).shape == (0, 576)
        e2m1 = q.per_token_cast(x, "e2m1", 32, round_sf=True)
        data, sf = q.per_block_cast_lossless(e2m1, "e4m3", (1, 32), (32, 32), *flags)
        assert (data.shape, sf.shape) == ((0, 576), (0, 5 if flags[2] else 18))
    assert q.per_channel_cast(x, "e4m3", 128, True, None, True)[1].shape == (0, 576)
    assert q.per_channel_cast_fused(x, "e4m3", 128, pos_to_token=np.zeros(0, np.int32))[0].shape == (0, 576)
    data, sf = q.per_channel_cast_and_transpose(x, "e4m3", 32)
    assert (data.shape, sf.shape) == ((576, 0), (0, 576))
    assert q.cast(x, F8, True).shape == (0, 576)
    assert q.fake_quant(x, "e2m1", 32).shape == (0, 576)
    assert q.per_token_cast_with_precomputed_sf(x, "e2m1", 32, np.ones((0, 18), np.float32)).shape == (0, 288)


@pytest.mark.parametrize("fmt", NAMES)
def test_zero_blocks(fmt):
    x = np.zeros((2, 64), np.float32)
    x[:, ::2] = -0.0
    sf_bits, exponent = golden.ZERO_BLOCKS[fmt]
    for round_sf in (False, True):
        data, sf = q.per_token_cast(x, fmt, 64, round_sf=round_sf)
        sign = 1 << (qf.FORMATS[fmt].bits - 1)
        assert (codes_of(data, fmt) == np.tile([sign, 0], 32)).all()
        assert (qf.bits_of(sf) == ((exponent + 127) << 23 if round_sf else sf_bits)).all()
    if fmt != "e5m6":
        assert (q.per_token_cast(x, fmt, 16, use_e4m3_sf=True)[1].view(np.uint8) == 1).all()


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_clamp(fmt):
    x = normal((4, 64), 2, 1e-3)
    sf = q.per_token_cast_with_sf_only(x, fmt, 64, amax_clamp=0.5)
    same(sf, np.full((4, 1), np.float32(0.5) / qf.FORMATS[fmt].max, np.float32))


def test_flag_combinations():
    x = np.ones((4, 128), np.float32)
    for flags in ({"use_packed_ue8m0": True}, {"use_e4m3_sf": True, "round_sf": True}):
        with pytest.raises(ValueError, match="expected"):
            q.per_token_cast(x, "e4m3", 128, **flags)
    with pytest.raises(ValueError, match="e5m6"):
        q.per_token_cast(x, "e5m6", 128, use_e4m3_sf=True)
    with pytest.raises(ValueError, match="e5m6"):
        q.per_token_cast(x, "e5m6", 128, stochastic_cast=True)
    with pytest.raises(ValueError, match="x_block_size"):
        q.per_token_cast(x, "e4m3", 128, (1, 128))
    with pytest.raises(ValueError, match="x_block_size"):
        q.per_token_cast(q.per_token_cast(x, "e4m3", 128), "e4m3", 128)
    with pytest.raises(ValueError, match="x_special_fmt"):
        q.cast_back(q.per_token_cast(x, "e4m3", 128), "bf16", (1, 128), "e4m3")
    with pytest.raises(TypeError, match="dtype"):
        q.cast_back(q.per_token_cast(x, "e5m6", 128), "bf16", (1, 128))
    with pytest.raises(ValueError, match="round_sf"):
        q.per_channel_cast(x, "e4m3", 4, use_packed_ue8m0=True)


# ------------------------------------------------------------------ 5: properties


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1", "e5m6"])
def test_p1_rounded_scales_fit(fmt):
    form = qf.FORMATS[fmt]
    x = normal((64, 128)) * np.float32(2) ** np.random.default_rng(0).integers(-10, 100, (64, 1)).astype(np.float32)
    result = qf.scales(np.abs(x).max(axis=1, keepdims=True), form, True, False)
    top = np.abs(x * result.inv).max(axis=1)
    assert (top <= form.max).all()
    assert (top > form.max / 2).all()
    data, _ = q.per_token_cast(x, fmt, 128, round_sf=True)
    assert np.isfinite(form.decode(form.load(data))).all()


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_p2_rounded_values_stay(fmt):
    x = normal((64, 576), 5)
    once = q.per_token_cast_back(q.per_token_cast(x, fmt, 32, round_sf=True), "fp32", 32)
    twice = q.per_token_cast_back(q.per_token_cast(once, fmt, 32, round_sf=True), "fp32", 32)
    same(once, twice)
    for dtype in (np.float32, BF16):
        y = q.fake_quant(x.astype(dtype), fmt, 32, True)
        assert y.dtype == dtype
        same(q.fake_quant(y, fmt, 32, True), y)


@pytest.mark.parametrize("fmt", NAMES)
def test_p3_powers_of_two_shift_the_exponent(fmt):
    x = normal((16, 128), 6)
    data, sf = q.per_token_cast(x, fmt, 128, round_sf=True)
    for n in (-5, 3, 60):
        shifted = q.per_token_cast(x * np.float32(2.0**n), fmt, 128, round_sf=True)
        same(shifted[0], data)
        assert (qf.bits_of(shifted[1]).astype(int) - qf.bits_of(sf).astype(int) == n << 23).all()


@pytest.mark.parametrize("fmt", NAMES)
@pytest.mark.parametrize("round_sf", [False, True])
def test_p4_p5_signs_and_permutations(fmt, round_sf):
    x = normal((16, 256), 7)
    data, sf = q.per_token_cast(x, fmt, 256 if fmt == "e5m6" else 32, round_sf=round_sf)
    codes = codes_of(data, fmt)
    negative = q.per_token_cast(-x, fmt, 256 if fmt == "e5m6" else 32, round_sf=round_sf)
    assert (codes_of(negative[0], fmt) == codes ^ (1 << (qf.FORMATS[fmt].bits - 1))).all()
    same(negative[1], sf)
    order = np.random.default_rng(0).permutation(16)
    permuted = q.per_token_cast(x[order], fmt, 256 if fmt == "e5m6" else 32, round_sf=round_sf)
    same_pair(permuted, (data[order], sf[order]))
    if fmt != "e5m6":
        columns = np.random.default_rng(1).permutation(8)
        blocks = x.reshape(16, 8, 32)[:, columns].reshape(16, 256)
        permuted = q.per_token_cast(blocks, fmt, 32, round_sf=round_sf)
        assert (codes_of(permuted[0], fmt) == codes.reshape(16, 8, 32)[:, columns].reshape(16, 256)).all()
        same(permuted[1], sf[:, columns])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("flags", FLAG_SETS)
def test_p6_p7_layouts_and_variants(size, flags):
    x = normal(size, 8).astype(BF16)
    for fmt in ("e4m3", "e2m1"):
        for block in ((1, 32), (1, 128), (1, size[1]), (32, 32), (128, 128)):
            if block[0] == 1:
                names, args = (q.per_token_cast, q.per_token_cast_with_sf_only, q.per_token_cast_with_precomputed_sf), (fmt, block[1])
                got = names[0](x, *args, None, *flags)
                sf_only = names[1](x, *args, None, *flags)
            else:
                names, args = (q.per_block_cast, q.per_block_cast_with_sf_only, q.per_block_cast_with_precomputed_sf), (fmt, block)
                got = names[0](x, *args, *flags)
                sf_only = names[1](x, *args, *flags)
            base = names[0](x, *args, round_sf=flags[1])
            same(got[0], base[0])
            same(sf_only, got[1])
            shape = base[1].shape
            same(qf.read_scales(got[1], shape), base[1])
            same(q.cast_back(got, "fp32", block), q.cast_back(base, "fp32", block))
            if flags[1]:
                same(names[2](x, *args, base[1]), base[0])


def test_p7_e4m3_scales():
    x = normal((33, 128), 9)
    for fmt in ("e4m3", "e2m1"):
        data, sf = q.per_token_cast(x, fmt, 16, use_e4m3_sf=True)
        same(q.per_token_cast_with_precomputed_sf(x, fmt, 16, sf), data)
        col_major = q.per_token_cast(x, fmt, 16, use_e4m3_sf=True, use_tma_aligned_col_major_sf=True)
        same_pair(col_major, (data, sf))
        same(q.per_token_cast_back(col_major, "bf16", 16), q.per_token_cast_back((data, sf), "bf16", 16))


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_p9_non_finite_values_stay_in_their_block(bad):
    x = normal((64, 256), 10)
    dirty = x.copy()
    dirty[3, 70] = bad
    per_token, per_block, per_channel = np.ones((3, 64, 256), bool)
    per_token[3, 64:96] = False
    per_block[:32, 64:96] = False
    per_channel[:32, 70] = False
    flag_sets = [{}, {"round_sf": True}, {"round_sf": True, "use_packed_ue8m0": True}]
    for fmt in ("e4m3", "e2m1"):
        for flags in [*flag_sets, {"use_e4m3_sf": True}, {"stochastic_cast": True}]:
            runs = [q.per_token_cast(v, fmt, 32, **flags) for v in (x, dirty)]
            check_outside(runs, fmt, per_token, (1, 32))
        for flags in flag_sets:
            check_outside([q.per_block_cast(v, fmt, (32, 32), **flags) for v in (x, dirty)], fmt, per_block, (32, 32))
            check_outside([q.per_channel_cast(v, fmt, 32, **flags) for v in (x, dirty)], fmt, per_channel, (32, 1))
    for flags in flag_sets:
        runs = [q.per_token_cast(v, "e5m6", 256, **flags) for v in (x, dirty)]
        keep = np.arange(64) != 3
        same_pair([a[keep] for a in runs[0]], [a[keep] for a in runs[1]])


def check_outside(runs, fmt, keep, block):
    (clean, clean_sf), (dirty, dirty_sf) = runs
    assert (codes_of(clean, fmt) == codes_of(dirty, fmt))[keep].all()
    shape = (-(-keep.shape[0] // block[0]), -(-keep.shape[1] // block[1]))
    values = [qf.read_scales(sf, shape, block[1] == 1) for sf in (clean_sf, dirty_sf)]
    assert (values[0] == values[1])[keep[:: block[0], :: block[1]]].all()
