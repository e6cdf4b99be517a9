"""The oracle of the quantization casts against the golden vectors of the specification."""

import numpy as np
import pytest
import quant_golden as golden
from quant_arrays import BF16, F8, FLT_MAX, NAMES, codes_of, f32, same, same_pair

from tk_core.reference import quant as q
from tk_core.reference import quant_formats as qf

# ------------------------------------------------------------------ 6: golden vectors


@pytest.mark.parametrize("fmt", NAMES)
def test_golden_codes(fmt):
    inputs, codes = zip(*golden.CODES[fmt], strict=True)
    assert qf.FORMATS[fmt].encode(f32(inputs)).tolist() == list(codes)


def test_golden_packing():
    assert qf.E2M1.store(qf.E2M1.encode(f32(golden.E2M1_ROW))).tolist() == golden.E2M1_BYTES
    data = qf.E5M6.store(np.array(golden.E5M6_PACKED))
    assert data.tobytes() == golden.E5M6_BYTES
    assert data.view("<u4").tolist() == golden.E5M6_WORDS
    codes = qf.E5M6.encode(f32(golden.E5M6_ROW))
    assert codes.tolist() == golden.E5M6_ROW_CODES
    assert qf.E5M6.store(codes).view("<u4").tolist() == golden.E5M6_ROW_WORDS


def amax_of(key, top):
    named = {"MAX": top, "below": np.nextafter(top, np.float32(0)), "above": np.nextafter(top, np.float32(np.inf)), "double": 2 * top}
    return np.array([{**named, "FLT_MAX": FLT_MAX}.get(key, key)], np.float32)


@pytest.mark.parametrize("fmt", NAMES)
def test_golden_scales(fmt):
    form = qf.FORMATS[fmt]
    rows = {key: by_format[fmt] for key, by_format in golden.SCALES.items()} | golden.SCALES_OF_MAX
    for key, (sf, inv, exponent) in rows.items():
        plain = qf.scales(amax_of(key, form.max), form, False, False)
        assert (qf.bits_of(plain.stored)[0], qf.bits_of(plain.inv)[0]) == (sf, inv), key
        rounded = qf.scales(amax_of(key, form.max), form, True, False)
        assert qf.bits_of(rounded.stored)[0] == exponent << 23, key
        assert qf.bits_of(rounded.inv)[0] == (254 - exponent) << 23, key


@pytest.mark.parametrize(("fmt", "amax", "byte", "inv", "code"), golden.E4M3_SCALES)
def test_golden_e4m3_scales(fmt, amax, byte, inv, code):
    x = np.full((1, 16), amax, np.float32)
    data, sf = q.per_token_cast(x, fmt, 16, use_e4m3_sf=True)
    assert sf.dtype == F8
    assert sf.view(np.uint8).item() == byte
    if inv is not None:
        assert qf.bits_of(qf.inverse(sf)).item() == inv
    if code is not None:
        assert codes_of(data, fmt)[0, 0] == code


def test_golden_clamps():
    assert {key: qf.bits_of(value) for key, value in qf.CLAMPS.items() if key[0] != "e5m6"} == golden.CLAMPS
    assert qf.CLAMPS["e5m6", False] == np.float32(1e-4)


@pytest.mark.parametrize(("fmt", "flags", "sf", "data"), golden.BLOCK_RESULTS)
def test_golden_block(fmt, flags, sf, data):
    got = q.per_token_cast(f32(golden.BLOCK)[None], fmt, 16, **flags)
    assert got[0].tobytes() == data
    assert got[1].view(np.uint8 if got[1].dtype == F8 else np.uint32).item() == sf


@pytest.mark.parametrize(("round_sf", "sf", "words"), golden.E5M6_BLOCK_RESULTS)
def test_golden_block_e5m6(round_sf, sf, words):
    data, got = q.per_token_cast_to_e5m6(f32(golden.BLOCK)[None], 16, round_sf=round_sf)
    assert data.view("<u4")[0].tolist() == words
    assert got.view(np.uint32).item() == sf
    same_pair((data, got), q.per_token_cast(f32(golden.BLOCK)[None], "e5m6", 16, round_sf=round_sf))
    packed = q.per_token_cast_to_e5m6(f32(golden.BLOCK)[None], 16, True, True, True)[1]
    assert packed.tolist() == [[0x71]]


def test_golden_layouts():
    i, j = np.indices((5, 5))
    stored = qf.from_bits((0x77 + j + 8 * i) << 23)
    packed = qf.lay_out(stored, packed=True)
    assert packed.view(np.uint32).tolist() == golden.PACKED_WORDS
    view = qf.lay_out(stored, col_major=True, packed=True)
    assert view.strides == (4, 32)
    same(view, packed)
    assert qf.sf_storage(view).view(np.uint32).tolist() == golden.COL_MAJOR_STORAGE
    tokens = qf.lay_out(stored.T, packed=True, token_packed=True)
    assert tokens.view(np.uint32).T.tolist() == golden.PACKED_WORDS
    assert tokens.flags.c_contiguous
    e4m3 = qf.lay_out(np.ones((130, 3), F8), col_major=True)
    assert (e4m3.shape, e4m3.strides, qf.sf_storage(e4m3).shape) == ((130, 3), (1, 144), (3, 144))


def test_golden_lossless():
    exponents = np.array([[120, 115, 109, 106], [120, 105, 105, 120]])
    codes = np.tile(np.array(golden.LOSSLESS_CODES), (2, 16))
    x = (qf.E2M1.store(codes), qf.from_bits(exponents << 23))
    data, sf = q.per_block_cast_lossless(x, "e4m3", (1, 32), (1, 128))
    assert (qf.bits_of(sf) >> 23).tolist() == [[golden.LOSSLESS_E_OUT]] * 2
    for row, block in np.ndindex(2, 4):
        expected = golden.LOSSLESS[exponents[row, block]] * 4
        assert data[row, 32 * block : 32 * block + 32].tobytes() == expected, (row, block)
    same(q.per_block_cast_lossless((x[0][:1], x[1][:1]), "e4m3", (1, 32), (1, 128), check=True)[0], data[:1])
    with pytest.raises(ValueError, match="2\\^14"):
        q.per_block_cast_lossless(x, "e4m3", (1, 32), (1, 128), check=True)


def test_golden_order_of_operations():
    g = golden.MULTIPLIER
    x = f32([g["amax"], g["x"]])[None]
    data, sf = q.per_token_cast(x, "e4m3", 2)
    assert qf.bits_of(qf.plain_scales(x[:, :1], qf.E4M3).inv).item() == g["inv"]
    assert qf.bits_of(qf.inverse(sf)).item() == g["inverse"]
    assert codes_of(data, "e4m3")[0, 1] == g["code"]
    assert codes_of(q.per_token_cast_with_precomputed_sf(x, "e4m3", 2, sf), "e4m3")[0, 1] == g["precomputed_code"]

    g = golden.REQUANTIZE
    data, sf = qf.E4M3.store(np.array([g["codes"]])), f32([g["sf"]])[None]
    amax = qf.E4M3.decode(np.array([[g["codes"][0]]])) * sf
    assert qf.bits_of(qf.plain_scales(amax, qf.E4M3).inv).item() == g["inv"]
    assert codes_of(q.per_token_cast((data, sf), "e4m3", 2, (1, 2))[0], "e4m3")[0, 1] == g["per_token"]
    # the two elements of one block along the tokens, both with this scale
    column = (data.T, np.concatenate([sf, sf]))
    assert codes_of(q.per_channel_cast(column, "e4m3", 2, num_per_channels=32)[0], "e4m3")[1, 0] == g["per_channel"]

    g = golden.DEQUANTIZE
    x = (np.array([[g["value"]]], F8), f32([g["sf"]])[None])
    assert qf.bits_of(q.cast_back(x, "fp32", (1, 1))).item() == g["fp32"]
    assert float(q.cast_back(x, "bf16", (1, 1)).item()) == g["bf16"]


@pytest.mark.parametrize(("fmt", "amax", "ocp", "ours"), golden.OCP)
def test_golden_ocp(fmt, amax, ocp, ours):
    form = qf.FORMATS[fmt]
    assert int(np.floor(np.log2(amax))) - {"e4m3": 8, "e2m1": 2}[fmt] + 127 == ocp
    assert qf.bits_of(qf.scales(f32([amax]), form, True, False).stored).item() >> 23 == ours


def test_golden_stochastic():
    v = f32(golden.STOCHASTIC_INPUT)
    for seed, bits in golden.STOCHASTIC_BITS.items():
        assert qf.random_bits(v, seed).tolist() == bits
    random = qf.random_bits(v, 0)
    for fmt, codes in golden.STOCHASTIC_CODES.items():
        assert qf.FORMATS[fmt].encode_stochastic(v, random).tolist() == codes
    assert codes_of(q.cast(v, F8, True), "e4m3").tolist() == golden.STOCHASTIC_CODES["e4m3"]
    inputs, words = golden.STOCHASTIC_BF16
    assert q.cast(f32(inputs), BF16, True).view(np.uint16).tolist() == words
