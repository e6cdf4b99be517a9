"""Formats and scales of the oracle: every code, every bf16, every exponent."""

import ml_dtypes
import numpy as np
import pytest
from quant_arrays import (
    ALL_BF16,
    BF16,
    F8,
    FLT_MAX,
    NAMES,
    f32,
    normal,
    same,
)

from tk_core.reference import quant as q
from tk_core.reference import quant_formats as qf

# ------------------------------------------------------------------ 1.1: formats, exhaustively


def nearest_by_search(v, form):
    """The finite code of the nearest magnitude, even codes first, over all codes."""
    codes = np.arange(form.max_code + 1)
    codes = np.concatenate([codes[::2], codes[1::2]])
    grid = form.table[codes].astype(np.float64)
    result = np.empty(v.size, np.int64)
    magnitude = np.minimum(np.abs(v).astype(np.float64), 2 * grid.max())  # farther away the maximum stays the nearest
    for part in np.array_split(np.arange(v.size), max(1, v.size // 1024)):
        # in fp64 a distance is exact wherever two of them can be equal: there v and both values lie in neighbouring binades
        result[part] = codes[np.abs(magnitude[part][:, None] - grid).argmin(axis=1)]
    return result | np.signbit(v).astype(np.int64) << (form.bits - 1)


@pytest.mark.parametrize("fmt", NAMES)
def test_every_bf16_is_encoded_to_the_nearest(fmt):
    form = qf.FORMATS[fmt]
    finite = np.isfinite(ALL_BF16)
    positive = finite & ~np.signbit(ALL_BF16)
    # magnitudes once; the sign is looked at for all
    want = nearest_by_search(ALL_BF16[positive], form)
    assert (form.encode(ALL_BF16[positive]) == want).all()
    assert (form.encode(-ALL_BF16[positive]) == want | 1 << (form.bits - 1)).all()
    assert (form.encode(f32([np.inf, -np.inf])) == [form.max_code, form.max_code | 1 << (form.bits - 1)]).all()


@pytest.mark.parametrize("fmt", NAMES)
def test_fp32_around_every_boundary(fmt):
    form = qf.FORMATS[fmt]
    grid = form.table[: form.max_code + 1]
    middle = (grid[1:] + grid[:-1]) / np.float32(2)
    v = np.concatenate([grid, middle])
    v = np.concatenate([v, np.nextafter(v, np.float32(0)), np.nextafter(v, np.float32(np.inf)), f32([FLT_MAX, 1e-45, 1e-38])])
    assert (form.encode(v) == nearest_by_search(v, form)).all()
    ties = form.encode(middle)
    assert (ties % 2 == 0).all()
    assert (np.abs(ties.astype(int) - np.arange(form.max_code) - 0.5) == 0.5).all()


def test_ml_dtypes_agrees():
    keep = ~np.isnan(ALL_BF16)
    with np.errstate(invalid="ignore"):
        want = np.clip(ALL_BF16, -448, 448).astype(F8)
    got = qf.E4M3.store(qf.E4M3.encode(ALL_BF16))
    same(got[keep], want[keep])
    assert np.isnan(got[~keep].astype(np.float32)).all()
    want = np.clip(ALL_BF16[keep], -6, 6).astype(ml_dtypes.float4_e2m1fn)
    assert (qf.E2M1.encode(ALL_BF16[keep]) == want.view(np.uint8)).all()
    wide = normal((100_000,), 3, 40.0) * 2.0 ** np.random.default_rng(1).integers(-16, 6, 100_000).astype(np.float32)
    same(qf.E4M3.store(qf.E4M3.encode(wide)), np.clip(wide, -448, 448).astype(F8))
    assert (qf.E2M1.encode(wide) == np.clip(wide, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)).all()


def test_decode_every_code():
    codes = np.arange(256, dtype=np.uint8)
    same(qf.E4M3.decode(codes), codes.view(F8).astype(np.float32))
    nibbles = np.arange(16, dtype=np.uint8)
    same(qf.E2M1.decode(nibbles), nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32))
    assert qf.E2M1.table[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    halves = (np.arange(4096, dtype=np.uint16) << 4).view(np.float16).astype(np.float32)
    finite = np.isfinite(halves)
    same(qf.E5M6.table[finite], halves[finite])
    assert np.array_equal(qf.E5M6.table, halves, equal_nan=True)


@pytest.mark.parametrize("fmt", NAMES)
def test_codes_survive_storage_and_decoding(fmt):
    form = qf.FORMATS[fmt]
    codes = np.arange(1 << form.bits)
    data = form.store(codes.reshape(2, -1))
    assert (form.load(data).reshape(-1) == codes).all()
    finite = np.isfinite(form.table)
    assert (form.encode(form.table[finite]) == codes[finite]).all()
    special = "e5m6" if fmt == "e5m6" else None
    sf = f32([0.375, 2.0])[:, None]
    for name, dtype in (("fp32", np.dtype(np.float32)), ("bf16", BF16)):
        want = (form.table.reshape(2, -1) * sf).astype(dtype)
        got = q.cast_back((data, sf), name, (1, codes.size // 2), special)
        assert np.array_equal(got.astype(np.float32), want.astype(np.float32), equal_nan=True)
        assert got.dtype == dtype


# ------------------------------------------------------------------ 1.2: scales


def smallest_exponent(a, top):
    """The smallest e with a <= top·2^e, plus 127, by counting in exact fp64."""
    powers = float(top) * 2.0 ** np.arange(-140.0, 130.0)
    return (a.astype(np.float64)[:, None] > powers).sum(axis=1) - 140 + 127


@pytest.mark.parametrize("fmt", NAMES)
def test_rounded_scales_of_every_exponent(fmt):
    form = qf.FORMATS[fmt]
    top = int(qf.bits_of(form.max)) & 0x7FFFFF
    mantissas = np.unique(np.concatenate([np.arange(4), 0x7FFFFF - np.arange(4), top + np.arange(-3, 4)]) & 0x7FFFFF)
    mantissas = np.concatenate([mantissas, np.random.default_rng(0).integers(0, 1 << 23, 20)])
    amax = qf.from_bits((np.arange(255)[:, None] << 23 | mantissas).reshape(-1))
    stored, inv = qf.scales(amax, form, True, False)
    want = smallest_exponent(np.maximum(amax, qf.CLAMPS[fmt, False]), form.max)
    assert (qf.bits_of(stored) == want << 23).all()
    assert (qf.bits_of(inv) == (254 - want) << 23).all()
    assert (want.min(), want.max()) == {"e4m3": (0x69, 0xF7), "e2m1": (0x01, 0xFD), "e5m6": (0x62, 0xF0)}[fmt]
    assert (stored * inv == 1).all()


@pytest.mark.parametrize("fmt", NAMES)
def test_every_mantissa(fmt):
    """Bits of the quotient give the exact exponent; a product with the reciprocal only for two formats, as the specification says."""
    form = qf.FORMATS[fmt]
    a = qf.from_bits(np.arange(0x3F800000, 0x40000000))
    exact = np.where(a.astype(np.float64) <= np.ldexp(float(form.max), -int(np.log2(form.max))), 0, 1) - int(np.log2(form.max)) + 127
    assert (qf.bits_of(qf.rounded_scales(a, form).stored) >> 23 == exact).all()
    product = 1 + ((qf.bits_of(a * (np.float32(1) / form.max)) - 1) >> 23)
    assert (product != exact).sum() == (1 if fmt == "e5m6" else 0)
    # plain scales: the largest element exceeds the maximum by one unit in the last place at most, and saturates
    top = a * qf.plain_scales(a, form).inv
    assert (top <= np.nextafter(form.max, np.float32(np.inf))).all()
    assert (top >= np.nextafter(form.max, np.float32(0))).all()


def test_ue8m0_bytes():
    every = np.arange(256, dtype=np.uint8)
    with np.errstate(invalid="ignore"):
        want = every.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(qf.decode_ue8m0(every), want, equal_nan=True)
    assert qf.bits_of(qf.decode_ue8m0(every[:1])).item() == 0x00400000
    words = qf.pack_words(every.reshape(4, 64)[:, :62])
    assert words.shape == (4, 16)
    same(qf.unpack_words(words, 62), np.ascontiguousarray(every.reshape(4, 64)[:, :62]))
    assert (qf.unpack_words(words, 64)[:, 62:] == 0).all()
    # the byte view of row-major words is the plain MX scale array
    same(words.view(ml_dtypes.float8_e8m0fnu)[:, :62].view(np.uint8), np.ascontiguousarray(every.reshape(4, 64)[:, :62]))
