"""The golden vectors of the specification through both front ends: not by way of the oracle."""

import numpy as np
import pytest
import quant_golden as golden
from quant_arrays import BF16, F8, FLT_MAX, NAMES, codes_of, f32
from quant_fronts import FRONTS
from test_quant_casts import dtype_of

from tk_core.reference import quant_formats as qf

pytestmark = pytest.mark.anywhere


@pytest.fixture(params=FRONTS)
def front(request):
    return FRONTS[request.param]()


def word(a):
    """The bit pattern of a single number."""
    return a.view({1: np.uint8, 4: np.uint32}[a.itemsize]).item()


def row_of(values, width=64):
    """One row, zeros behind the values."""
    row = np.zeros((1, width), np.float32)
    row[0, : len(values)] = values
    return row


@pytest.mark.parametrize("fmt", NAMES)
def test_codes(front, fmt):
    """Rows whose scale is one: by given scales, and in 12 bits by a largest value of MAX."""
    inputs, codes = zip(*golden.CODES[fmt], strict=True)
    values = f32(inputs)
    if fmt == "e5m6":
        rows = np.zeros((len(values), 64), np.float32)
        rows[:, 0], rows[:, 1] = values, 65024
        inside = np.abs(values) <= 65024
        data, sf = front.quant("per_token_cast", rows[inside], fmt, 64)
        assert (sf == 1).all()
        assert codes_of(data, fmt)[:, 0].tolist() == np.array(codes)[inside].tolist()
        return
    data = front.quant("per_token_cast_with_precomputed_sf", row_of(values), fmt, 64, np.ones((1, 1), np.float32))
    assert codes_of(data, fmt)[0, : len(codes)].tolist() == list(codes)


def test_packing(front):
    one = np.ones((1, 1), np.float32)
    data = front.quant("per_token_cast_with_precomputed_sf", row_of(f32(golden.E2M1_ROW)), "e2m1", 64, one)
    assert data[0, : len(golden.E2M1_BYTES)].tolist() == golden.E2M1_BYTES
    data, sf = front.quant("per_token_cast", f32(golden.E5M6_ROW)[None], "e5m6", 8)
    assert sf.item() == 1
    assert data.view("<u4")[0].tolist() == golden.E5M6_ROW_WORDS


def largest(key, top):
    named = {"MAX": top, "below": np.nextafter(top, np.float32(0)), "above": np.nextafter(top, np.float32(np.inf)), "double": 2 * top}
    return {**named, "FLT_MAX": FLT_MAX}.get(key, key)


@pytest.mark.parametrize("fmt", NAMES)
def test_scales(front, fmt):
    rows = {key: by_format[fmt] for key, by_format in golden.SCALES.items()} | golden.SCALES_OF_MAX
    x = np.zeros((len(rows), 64), np.float32)
    x[:, 3] = [largest(key, np.float32(qf.FORMATS[fmt].max)) for key in rows]
    plain = front.quant("per_token_cast", x, fmt, 64)[1]
    rounded = front.quant("per_token_cast", x, fmt, 64, round_sf=True)[1]
    packed = front.quant("per_token_cast", x, fmt, 64, round_sf=True, use_packed_ue8m0=True)[1]
    assert plain.view(np.uint32)[:, 0].tolist() == [sf for sf, _, _ in rows.values()]
    assert rounded.view(np.uint32)[:, 0].tolist() == [e << 23 for _, _, e in rows.values()]
    assert packed[:, 0].tolist() == [e for _, _, e in rows.values()]


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_e4m3_scales(front, fmt):
    rows = [row for row in golden.E4M3_SCALES if row[0] == fmt]
    x = np.zeros((len(rows), 64), np.float32)
    x[:, :16] = np.array([[amax] for _, amax, *_ in rows])
    data, sf = front.quant("per_token_cast", x, fmt, 16, use_e4m3_sf=True)
    assert sf.view(np.uint8)[:, 0].tolist() == [byte for _, _, byte, _, _ in rows]
    for got, (*_, code) in zip(codes_of(data, fmt)[:, 0], rows, strict=True):
        assert code is None or got == code


@pytest.mark.parametrize(("fmt", "flags", "sf", "data"), golden.BLOCK_RESULTS)
def test_block(front, fmt, flags, sf, data):
    got = front.quant("per_token_cast", row_of(f32(golden.BLOCK)), fmt, 16, **flags)
    assert got[0].tobytes()[: len(data)] == data
    assert word(got[1][:, :1]) == sf


@pytest.mark.parametrize(("round_sf", "sf", "words"), golden.E5M6_BLOCK_RESULTS)
def test_block_e5m6(front, round_sf, sf, words):
    data, got = front.quant("per_token_cast_to_e5m6", f32(golden.BLOCK)[None], 16, round_sf=round_sf)
    assert data.view("<u4")[0].tolist() == words
    assert word(got) == sf


def test_layouts(front):
    """Blocks whose largest value is MAX times the power that the golden exponent names."""
    i, j = np.indices((5, 5))
    x = np.zeros((5, 5 * 64), np.float32)
    x[:, ::64] = np.ldexp(448.0, 0x77 + j + 8 * i - 127)
    flags = {"round_sf": True, "use_packed_ue8m0": True}
    assert front.quant("per_token_cast", x, "e4m3", 64, **flags)[1].view(np.uint32).tolist() == golden.PACKED_WORDS
    stored = front.quant("per_token_cast", x, "e4m3", 64, use_tma_aligned_col_major_sf=True, **flags)[1]
    assert stored.view(np.uint32).tolist() == golden.COL_MAJOR_STORAGE
    columns = np.zeros((5 * 128, 64), np.float32)
    columns[::128, :5] = np.ldexp(448.0, 0x77 + j + 8 * i - 127).T
    tokens = front.quant("per_channel_cast", columns, "e4m3", 128, True, use_packed_ue8m0=True)[1]
    assert tokens.view(np.uint32).T[:5].tolist() == golden.PACKED_WORDS
    sf = front.quant("per_token_cast", np.ones((130, 192), np.float32), "e4m3", 64, use_e4m3_sf=True, use_tma_aligned_col_major_sf=True)[1]
    assert sf.shape == (3, 144)


def test_lossless(front):
    exponents = np.array([[120, 115, 109, 106], [120, 105, 105, 120]])
    codes = np.tile(np.array(golden.LOSSLESS_CODES), (2, 16))
    data, sf = front.quant("per_block_cast_lossless", (qf.E2M1.store(codes), qf.from_bits(exponents << 23)), "e4m3", (1, 32), (1, 128))
    assert (qf.bits_of(sf) >> 23).tolist() == [[golden.LOSSLESS_E_OUT]] * 2
    for row, block in np.ndindex(2, 4):
        assert data[row, 32 * block : 32 * block + 32].tobytes() == golden.LOSSLESS[exponents[row, block]] * 4, (row, block)


def test_order_of_operations(front):
    g = golden.MULTIPLIER
    x = row_of(f32([g["amax"], g["x"]]))
    data, sf = front.quant("per_token_cast", x, "e4m3", 64)
    assert codes_of(data, "e4m3")[0, 1] == g["code"]
    assert codes_of(front.quant("per_token_cast_with_precomputed_sf", x, "e4m3", 64, sf), "e4m3")[0, 1] == g["precomputed_code"]

    g = golden.REQUANTIZE
    row = np.zeros((1, 128), np.int64)
    row[0, :2] = g["codes"]
    got = front.quant("per_token_cast", (qf.E4M3.store(row), f32([g["sf"]])[None]), "e4m3", 128, (1, 128))
    assert codes_of(got[0], "e4m3")[0, 1] == g["per_token"]
    column = np.zeros((128, 128), np.int64)
    column[:2, 0] = g["codes"]
    got = front.quant("per_channel_cast", (qf.E4M3.store(column), np.tile(f32([g["sf"]]), (128, 1))), "e4m3", 128, False, 128)
    assert codes_of(got[0], "e4m3")[1, 0] == g["per_channel"]

    g = golden.DEQUANTIZE
    x = (np.full((1, 64), g["value"], F8), f32([g["sf"]])[None])
    assert (front.quant("cast_back", x, "fp32", (1, 64)).view(np.uint32) == g["fp32"]).all()
    assert (front.quant("cast_back", x, "bf16", (1, 64)).astype(np.float32) == g["bf16"]).all()


@pytest.mark.parametrize(("fmt", "amax", "ocp", "ours"), golden.OCP)
def test_ocp(front, fmt, amax, ocp, ours):
    x = row_of(f32([amax]))
    assert word(front.quant("per_token_cast_with_sf_only", x, fmt, 64, round_sf=True)) >> 23 == ours
    assert ours - ocp in (0, 1)


def test_stochastic(front):
    v = f32(golden.STOCHASTIC_INPUT)
    assert codes_of(front.quant("cast", v, dtype_of(front, "float8_e4m3fn"), True), "e4m3").tolist() == golden.STOCHASTIC_CODES["e4m3"]
    inputs, words = golden.STOCHASTIC_BF16
    assert front.quant("cast", f32(inputs), dtype_of(front, "bfloat16"), True).astype(BF16).view(np.uint16).tolist() == words
    # a block whose largest value is MAX has scale one, and the first eight elements have the positions 0 to 7
    for fmt, top in (("e2m1", 6.0), ("e4m3", 448.0)):
        row = row_of([*v, top])
        data, sf = front.quant("per_token_cast", row, fmt, 64, stochastic_cast=True)
        assert sf.item() == 1
        assert codes_of(data, fmt)[0, : len(v)].tolist() == golden.STOCHASTIC_CODES[fmt]


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_every_bf16_by_given_scales(front, fmt):
    """All 2**16, also beyond the largest number; those of NaN are not specified where the format has none."""
    x = np.arange(1 << 16, dtype=np.uint16).view(BF16).reshape(64, 1024)
    data = front.quant("per_token_cast_with_precomputed_sf", x, fmt, 128, np.ones((64, 8), np.float32))
    values = x.astype(np.float32)
    finite = np.isfinite(values)
    assert (codes_of(data, fmt)[finite] == qf.FORMATS[fmt].encode(values)[finite]).all()
    if fmt == "e4m3":
        assert ((codes_of(data, fmt)[np.isnan(values)] & 0x7F) == 0x7F).all()
