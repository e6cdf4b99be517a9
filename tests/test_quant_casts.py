"""Every public cast through both front ends, to the bit of the oracle: so torch and JAX agree as well."""

import numpy as np
import pytest
from quant_arrays import ALL_BF16, BF16, FLAG_SETS, FLT_MAX, PUBLIC_FLAGS, normal, same
from quant_fronts import FRONTS, stored

from tk_core.reference import quant as q

pytestmark = pytest.mark.anywhere


@pytest.fixture(params=FRONTS)
def front(request):
    return FRONTS[request.param]()


def flags_of(flags):
    return dict(zip(PUBLIC_FLAGS, flags, strict=True))


def samples(shape, dtype, seed=0):
    """Normal numbers with a row of zeros, tiny and huge rows."""
    x = normal(shape, seed)
    x[1::7] *= np.float32(1e-6)
    x[2::7] *= np.float32(1e20)
    x[3::7] = 0
    x[4::7, ::5] = -0.0
    return x.astype(BF16) if dtype == "bf16" else x


def check(front, name, *args, **named):
    """A call against the oracle."""
    got, want = front.quant(name, *args, **named), stored(getattr(q, name)(*args, **named), named.get("use_tma_aligned_col_major_sf"))
    for a, b in zip(got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,), strict=True):
        same(a, b)
    return got


# ------------------------------------------------------------------ rows

ROWS = [
    # (M, H), dtype, fmt, g, flags
    ((33, 128), "bf16", "e4m3", 128, FLAG_SETS[0]),
    ((33, 128), "bf16", "e4m3", 128, FLAG_SETS[1]),
    ((130, 192), "bf16", "e4m3", 32, FLAG_SETS[5]),
    ((5, 576), "fp32", "e4m3", 128, FLAG_SETS[4]),
    ((5, 576), "bf16", "e4m3", 64, FLAG_SETS[2]),
    ((257, 320), "fp32", "e4m3", 16, FLAG_SETS[3]),
    ((9, 7168), "bf16", "e4m3", 128, FLAG_SETS[0]),
    ((9, 7168), "bf16", "e4m3", 7168, FLAG_SETS[5]),
    ((5, 576), "fp32", "e4m3", 576, FLAG_SETS[0]),
    ((1, 64), "bf16", "e2m1", 32, FLAG_SETS[5]),
    ((33, 128), "fp32", "e2m1", 128, FLAG_SETS[0]),
    ((5, 576), "bf16", "e2m1", 128, FLAG_SETS[5]),
    ((130, 192), "bf16", "e2m1", 16, FLAG_SETS[1]),
    ((9, 7168), "bf16", "e2m1", 32, FLAG_SETS[2]),
    ((5, 576), "bf16", "e2m1", 576, FLAG_SETS[0]),
    ((33, 128), "bf16", "e5m6", 128, FLAG_SETS[0]),
    ((5, 576), "fp32", "e5m6", 576, FLAG_SETS[5]),
    ((9, 7168), "bf16", "e5m6", 7168, FLAG_SETS[2]),
    ((7, 200), "fp32", "e5m6", 200, FLAG_SETS[1]),
]


@pytest.mark.parametrize(("shape", "dtype", "fmt", "g", "flags"), ROWS)
def test_per_token_cast(front, shape, dtype, fmt, g, flags):
    check(front, "per_token_cast", samples(shape, dtype), fmt, g, **flags_of(flags))


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize(("g", "col"), [(16, False), (128, True)])
def test_e4m3_scales(front, fmt, g, col):
    named = {"use_e4m3_sf": True, "use_tma_aligned_col_major_sf": col}
    check(front, "per_token_cast", samples((130, 192), "bf16"), fmt, g, **named)
    check(front, "per_token_cast", samples((3, 192), "bf16"), fmt, g, **named)


def test_e5m6_by_its_name(front):
    check(front, "per_token_cast_to_e5m6", samples((33, 128), "bf16"), 128)


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1", "e5m6"])
def test_every_bf16(front, fmt):
    """All finite inputs, in rows whose scale is one."""
    x = ALL_BF16[np.isfinite(ALL_BF16)]
    top = {"e4m3": 448.0, "e2m1": 6.0, "e5m6": 65024.0}[fmt]
    rows = np.zeros((-(-x.size // 127), 128), np.float32)
    inside = np.where(np.abs(x) <= top, x, np.float32(0))
    rows[:, :127].reshape(-1)[: x.size] = np.resize(inside, x.size)
    padded = np.zeros(rows.shape[0] * 127, np.float32)
    padded[: x.size] = inside
    rows[:, :127] = padded.reshape(-1, 127)
    rows[:, 127] = top
    for flags in (FLAG_SETS[0], FLAG_SETS[2]):
        _, sf = check(front, "per_token_cast", rows.astype(BF16), fmt, 128, **flags_of(flags))
        assert (sf == 1).all()


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1", "e5m6"])
def test_every_exponent(front, fmt):
    """Scales of all fp32 exponents, with mantissas at both ends, in every kind of scale."""
    exponents = np.arange(0, 255, dtype=np.uint32) << 23
    bits = np.concatenate([exponents | m for m in (0, 1, 0x3FFFFF, 0x400000, 0x600000, 0x7F0000, 0x7FFFFF)])
    x = normal((bits.size, 64), 3) * 0
    x[:, 5] = bits.view(np.float32)
    x[:, 9] = -x[:, 5] / np.float32(3)
    x = np.clip(x, -FLT_MAX, FLT_MAX)
    for flags in (FLAG_SETS[0], FLAG_SETS[2], FLAG_SETS[4]):
        check(front, "per_token_cast", x, fmt, 64, **flags_of(flags))
    if fmt != "e5m6":
        check(front, "per_token_cast", x, fmt, 64, use_e4m3_sf=True)


REQUANTIZED = [
    # input format, its block and flags; output format, g, flags
    ("e4m3", (128, 128), FLAG_SETS[0], "e4m3", 128, FLAG_SETS[5]),
    ("e4m3", (1, 128), FLAG_SETS[1], "e4m3", 32, FLAG_SETS[0]),
    ("e2m1", (32, 32), FLAG_SETS[5], "e4m3", 128, FLAG_SETS[2]),
    ("e2m1", (1, 32), FLAG_SETS[4], "e2m1", 128, FLAG_SETS[0]),
    ("e4m3", (32, 32), FLAG_SETS[3], "e2m1", 32, FLAG_SETS[5]),
    ("e4m3", (1, 32), "e4m3", "e4m3", 64, FLAG_SETS[3]),
]


@pytest.mark.parametrize(("x_fmt", "block", "x_flags", "fmt", "g", "flags"), REQUANTIZED)
@pytest.mark.parametrize("shape", [(130, 192), (5, 576)])
def test_requantization(front, x_fmt, block, x_flags, fmt, g, flags, shape):
    x = quantized(samples(shape, "fp32"), x_fmt, block, x_flags)
    check(front, "per_token_cast", x, fmt, g, block, **flags_of(flags))


def quantized(x, fmt, block, flags):
    if flags == "e4m3":
        return q.per_token_cast(x, fmt, block[1], use_e4m3_sf=True)
    named = flags_of(flags)
    return q.per_token_cast(x, fmt, block[1], **named) if block[0] == 1 else q.per_block_cast(x, fmt, block, **named)


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("flags", [FLAG_SETS[0], FLAG_SETS[5], "e4m3"])
def test_scales_only_and_given_scales(front, fmt, flags):
    x = samples((33, 128), "bf16")
    named = {"use_e4m3_sf": True} if flags == "e4m3" else flags_of(flags)
    check(front, "per_token_cast_with_sf_only", x, fmt, 32, **named)
    if flags == "e4m3" or not flags[0]:
        sf = q.per_token_cast(x, fmt, 32, **named)[1]
        got = front.quant("per_token_cast_with_precomputed_sf", x, fmt, 32, sf, use_e4m3_sf=flags == "e4m3")
        same(got, q.per_token_cast_with_precomputed_sf(x, fmt, 32, sf))


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_stochastic(front, fmt, dtype):
    x = samples((33, 128), dtype)
    for seed in (0, 1, 2**32 - 1):
        check(front, "per_token_cast", x, fmt, 32, stochastic_cast=True, seed=seed)
    check(front, "per_token_cast", x, fmt, 32, stochastic_cast=True, seed=3, **flags_of(FLAG_SETS[5]))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("fmt", "g", "named"), [("e4m3", 128, {}), ("e2m1", 16, {"use_e4m3_sf": True}), ("e4m3", 32, {"round_sf": True})])
def test_fake_quant(front, fmt, g, dtype, named):
    x = samples((33, 256), dtype)
    want = q.fake_quant(x, fmt, g, **named)
    same(front.quant("fake_quant", x, fmt, g, **named), want)
    if front.name == "jax":
        same(front.quant("per_token_cast_and_cast_back", x, fmt, g, **named), want)
    back = q.per_token_cast_back(q.per_token_cast(x, fmt, g, **named), "fp32", g)
    same(want, back.astype(x.dtype))


# ------------------------------------------------------------------ blocks


BLOCKS = [
    ((130, 192), "bf16", "e4m3", (128, 128), FLAG_SETS[0]),
    ((130, 192), "bf16", "e4m3", (32, 32), FLAG_SETS[5]),
    ((257, 320), "fp32", "e4m3", (128, 128), FLAG_SETS[5]),
    ((33, 128), "fp32", "e2m1", (32, 32), FLAG_SETS[2]),
    ((257, 320), "bf16", "e2m1", (128, 128), FLAG_SETS[1]),
    ((5, 576), "bf16", "e4m3", (32, 128), FLAG_SETS[4]),
    ((130, 192), "bf16", "e2m1", (128, 32), FLAG_SETS[3]),
    ((129, 7168), "bf16", "e4m3", (128, 128), FLAG_SETS[2]),
]


@pytest.mark.parametrize(("shape", "dtype", "fmt", "block", "flags"), BLOCKS)
def test_per_block_cast(front, shape, dtype, fmt, block, flags):
    x = samples(shape, dtype)
    data, _ = check(front, "per_block_cast", x, fmt, block, **flags_of(flags))
    check(front, "per_block_cast_with_sf_only", x, fmt, block, **flags_of(flags))
    if not flags[0] and not flags[2]:
        sf = q.per_block_cast(x, fmt, block, **flags_of(flags))[1]
        given = front.quant("per_block_cast_with_precomputed_sf", x, fmt, block, sf)
        same(given, q.per_block_cast_with_precomputed_sf(x, fmt, block, sf))
        if flags[1]:
            same(given, data)


@pytest.mark.parametrize("out_block", [(1, 128), (32, 32), (128, 128)])
@pytest.mark.parametrize("x_flags", [FLAG_SETS[2], FLAG_SETS[5]])
@pytest.mark.parametrize("flags", [FLAG_SETS[2], FLAG_SETS[5]])
def test_lossless(front, out_block, x_flags, flags):
    rng = np.random.default_rng(5)
    for shape in ((33, 128), (130, 192)):
        spread = np.exp2(rng.integers(-4, 4, shape)).astype(np.float32)
        x = quantized(normal(shape, 6) * spread, "e2m1", (1, 32), x_flags)
        got = check(front, "per_block_cast_lossless", x, "e4m3", (1, 32), out_block, **flags_of(flags))
        want = q.cast_back(x, "fp32", (1, 32))
        same(q.cast_back(q.per_block_cast_lossless(x, "e4m3", (1, 32), out_block, **flags_of(flags)), "fp32", out_block), want)
        assert got[0].shape == shape


def test_lossless_says_what_is_not_exact(front):
    x = np.ones((2, 256), np.float32)
    x[0, :32] = np.float32(2.0**-15)
    x[1, :32] = np.float32(2.0**-14)
    x[1, 32:64] = 0
    for rows, wrong in (((0, 2), True), ((1, 2), False)):
        codes = q.per_token_cast(x[rows[0] : rows[1]], "e2m1", 32, round_sf=True)
        if front.name == "jax":
            flagged = front.quant("per_block_cast_lossless", codes, "e4m3", (1, 32), (1, 128), check=True)[2]
            assert flagged.dtype == bool
            assert flagged.any() == wrong
            assert not flagged[:, 1].any()
        elif wrong:
            with pytest.raises(ValueError, match=r"per_block_cast_lossless: x\[1\]: expected blocks within"):
                front.quant("per_block_cast_lossless", codes, "e4m3", (1, 32), (1, 128), check=True)
        else:
            front.quant("per_block_cast_lossless", codes, "e4m3", (1, 32), (1, 128), check=True)


# ------------------------------------------------------------------ channels


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("tokens", [32, 128])
@pytest.mark.parametrize("kind", ["plain", "round", "packed"])
def test_per_channel_cast(front, dtype, tokens, kind):
    x = samples((384, 192), dtype)
    check(front, "per_channel_cast", x, "e4m3", tokens, kind != "plain", use_packed_ue8m0=kind == "packed")


@pytest.mark.parametrize(("g", "flags"), [(128, FLAG_SETS[0]), (32, FLAG_SETS[5]), (128, FLAG_SETS[1]), (32, "e4m3")])
@pytest.mark.parametrize(("tokens", "packed"), [(128, False), (32, True)])
def test_per_channel_cast_of_quantized(front, g, flags, tokens, packed):
    x = quantized(samples((256, 384), "fp32"), "e4m3", (1, g), flags)
    check(front, "per_channel_cast", x, "e4m3", tokens, packed, g, use_packed_ue8m0=packed)


@pytest.mark.parametrize("round_sf", [False, True])
@pytest.mark.parametrize("source", ["bf16", "fp32", "e4m3"])
def test_gather(front, source, round_sf):
    x = samples((200, 256), "fp32" if source == "e4m3" else source)
    g = 128 if source == "e4m3" else None
    x = q.per_token_cast(x, "e4m3", 128) if g else x
    rng = np.random.default_rng(0)
    places = rng.integers(0, 200, 400).astype(np.int32)
    places[rng.random(400) < 0.2] = -1
    places[:128] = np.where(np.arange(128) % 2, -5, 10**6)
    data, _ = check(front, "per_channel_cast_fused", x, "e4m3", 128, round_sf, g, pos_to_token=places)
    assert (data[:128].view(np.uint8) == 0).all()
    whole = tuple(part[:128] for part in x) if g else x[:128]
    check(front, "per_channel_cast_fused", whole, "e4m3", 128, round_sf, g)


@pytest.mark.parametrize("round_sf", [False, True])
@pytest.mark.parametrize("tokens", [32, 128])
def test_transposed(front, tokens, round_sf):
    check(front, "per_channel_cast_and_transpose", samples((384, 192), "bf16"), "e4m3", tokens, round_sf)


# ------------------------------------------------------------------ back

BACK = [
    # input format, its block, flags
    ("e4m3", (1, 128), FLAG_SETS[0]),
    ("e4m3", (1, 32), FLAG_SETS[5]),
    ("e4m3", (1, 576), FLAG_SETS[0]),
    ("e4m3", (128, 128), FLAG_SETS[2]),
    ("e4m3", (32, 32), FLAG_SETS[5]),
    ("e4m3", (1, 16), "e4m3"),
    ("e2m1", (1, 32), FLAG_SETS[2]),
    ("e2m1", (1, 128), FLAG_SETS[4]),
    ("e2m1", (32, 32), FLAG_SETS[1]),
    ("e2m1", (128, 128), FLAG_SETS[5]),
    ("e2m1", (1, 16), "e4m3"),
]


@pytest.mark.parametrize(("fmt", "block", "flags"), BACK)
@pytest.mark.parametrize("out", ["bf16", "fp32"])
def test_cast_back(front, fmt, block, flags, out):
    x = quantized(samples((130, 576), "fp32"), fmt, block, flags)
    check(front, "cast_back", x, out, block)
    if block[0] == 1:
        check(front, "per_token_cast_back", x, out, block[1])


@pytest.mark.parametrize("out", ["bf16", "fp32"])
@pytest.mark.parametrize("packed", [False, True])
def test_cast_back_of_channels(front, packed, out):
    x = q.per_channel_cast(samples((384, 192), "bf16"), "e4m3", 32, packed, use_packed_ue8m0=packed)
    check(front, "cast_back", x, out, (32, 1))


@pytest.mark.parametrize("out", ["bf16", "fp32"])
def test_cast_back_of_e5m6(front, out):
    x = q.per_token_cast_to_e5m6(samples((33, 576), "fp32"), 576)
    check(front, "cast_back_e5m6", x, out, (1, 576))
    check(front, "cast_back", x, out, (1, 576), "e5m6")
    x = q.per_token_cast_to_e5m6(samples((5, 200), "fp32"), 200, *FLAG_SETS[5])
    check(front, "per_token_cast_back", x, out, 200, "e5m6")


@pytest.mark.parametrize("out", ["bf16", "fp32"])
def test_every_code(front, out):
    one = np.ones((1, 1), np.float32)
    e4m3 = np.arange(256, dtype=np.uint8).view("float8_e4m3fn").reshape(1, 256)
    got, want = front.quant("cast_back", (e4m3, one), out, (1, 256)), q.cast_back((e4m3, one), out, (1, 256))
    nan = np.arange(256) % 128 == 127
    assert np.isnan(got[:, nan]).all()
    same(got[:, ~nan], want[:, ~nan])
    e2m1 = np.arange(256, dtype=np.uint8).view(np.int8).reshape(1, 256)
    same(front.quant("cast_back", (e2m1, one), out, (1, 512)), q.cast_back((e2m1, one), out, (1, 512)))
    from tk_core.reference.quant_formats import E5M6

    codes = np.arange(4096)
    codes = codes[(codes & 0x7C0) != 0x7C0]
    data = E5M6.store(codes.reshape(1, -1))
    H = codes.size
    same(front.quant("cast_back", (data, one), out, (1, H), "e5m6"), q.cast_back((data, one), out, (1, H), "e5m6"))


def test_every_packed_exponent(front):
    """0 is 2**-127 and 255 is NaN."""
    exponents = np.arange(256, dtype=np.uint8).reshape(-1, 4)
    sf = exponents.view(np.int32)
    data = np.full((64, 128), 1.5, np.float32).astype("float8_e4m3fn")
    got = front.quant("cast_back", (data, sf), "fp32", (1, 32))
    with np.errstate(over="ignore"):
        want = q.cast_back((data, sf), "fp32", (1, 32))
    same(got[:63], want[:63])
    assert np.isnan(got[63, 96:]).all()
    assert not np.isnan(got[63, :96]).any()


# ------------------------------------------------------------------ element by element


@pytest.mark.parametrize("to", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("source", ["float32", "bfloat16", "float8_e4m3fn"])
def test_cast(front, source, to):
    x = np.concatenate([ALL_BF16[np.isfinite(ALL_BF16)], samples((7, 64), "fp32").reshape(-1)])[:65000].astype(np.float32)
    x = x.reshape(5, -1, 8)
    x = q.cast(x, np.dtype(source)) if source != "float32" else x
    got = front.quant("cast", x, dtype_of(front, to))
    same(got, q.cast(x, np.dtype(to)))


@pytest.mark.parametrize(("source", "to"), [("float32", "bfloat16"), ("float32", "float8_e4m3fn"), ("bfloat16", "float8_e4m3fn")])
def test_stochastic_cast(front, source, to):
    x = samples((33, 65), "fp32").astype(source)
    for seed in (0, 7):
        same(front.quant("cast", x, dtype_of(front, to), True, seed=seed), q.cast(x, np.dtype(to), True, seed=seed))


def dtype_of(front, name):
    return getattr(front.torch, name) if front.name == "torch" else np.dtype(name)


def test_unpack_and_pack(front):
    packed = np.arange(256, dtype=np.uint8).view(np.int8).reshape(2, 4, 32)
    for out in ("float32", "bfloat16"):
        got = front.quant("unpack_from_e2m1fn_x2", packed, dtype_of(front, out))
        same(got, q.unpack_from_e2m1fn_x2(packed, np.dtype(out)))
    codes = np.random.default_rng(1).integers(0, 16, (3, 64))
    for dtype in (np.int32, np.uint8):
        same(front.quant("pack_to_e2m1fn_x2", codes.astype(dtype)), q.pack_to_e2m1fn_x2(codes))


# ------------------------------------------------------------------ edges


def test_no_rows(front):
    x = np.zeros((0, 576), np.float32)
    for flags in (FLAG_SETS[0], FLAG_SETS[2], FLAG_SETS[4]):
        check(front, "per_token_cast", x, "e4m3", 128, **flags_of(flags))
    for fmt, g in (("e2m1", 32), ("e5m6", 576)):
        check(front, "per_token_cast", x, fmt, g)
    check(front, "per_block_cast", x, "e4m3", (128, 128))
    check(front, "per_channel_cast", x, "e4m3", 128)
    check(front, "per_channel_cast", x, "e4m3", 32, True, use_packed_ue8m0=True)
    check(front, "per_channel_cast_and_transpose", x.astype(BF16), "e4m3", 128)
    check(front, "cast_back", q.per_token_cast(x, "e4m3", 128), "bf16", (1, 128))
    check(front, "fake_quant", x, "e4m3", 64)
    same(front.quant("cast", x, dtype_of(front, "bfloat16")), x.astype(BF16))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_block(front, bad):
    x = samples((160, 256), "fp32")
    spoiled = x.copy()
    spoiled[37, 70] = bad
    for name, args, block in (
        ("per_token_cast", ("e4m3", 64), (1, 64)),
        ("per_token_cast", ("e2m1", 32), (1, 32)),
        ("per_token_cast", ("e5m6", 256), (1, 256)),
        ("per_block_cast", ("e4m3", (32, 32)), (32, 32)),
        ("per_block_cast", ("e2m1", (128, 128)), (128, 128)),
    ):
        for round_sf in (False, True):
            data, sf = front.quant(name, spoiled, *args, round_sf=round_sf)
            data0, sf0 = getattr(q, name)(x, *args, round_sf=round_sf)
            clean = np.ones(sf0.shape, bool)
            clean[37 // block[0], 70 // block[1]] = False
            assert (sf.view(np.uint32)[clean] == sf0.view(np.uint32)[clean]).all()
            width = data.shape[1] * block[1] // 256
            elements = clean.repeat(block[0], 0)[:160].repeat(width, 1)[:, : data.shape[1]]
            assert (data.view(np.uint8)[elements] == data0.view(np.uint8)[elements]).all()
    data, sf = front.quant("per_token_cast", spoiled, "e4m3", 64, use_packed_ue8m0=True, round_sf=True)
    _, sf0 = q.per_token_cast(x, "e4m3", 64, use_packed_ue8m0=True, round_sf=True)
    clean = np.ones((160, 4), bool)
    clean[37, 1] = False
    assert (sf.view(np.uint8)[clean] == sf0.view(np.uint8)[clean]).all()


def test_the_same_bits_every_time(front):
    x = samples((257, 320), "bf16")
    first = [a.tobytes() for a in front.quant("per_token_cast", x, "e2m1", 32, round_sf=True)]
    for _ in range(10):
        assert [a.tobytes() for a in front.quant("per_token_cast", x, "e2m1", 32, round_sf=True)] == first


def test_the_smallest_amax_is_a_setting(front):
    from tk_core.config import get_amax_clamp_for_quant, reset_runtime_config, set_amax_clamp_for_quant

    x = samples((33, 128), "fp32")
    check(front, "per_token_cast", x, "e4m3", 32)
    set_amax_clamp_for_quant("e4m3", False, 0.5)
    try:
        assert get_amax_clamp_for_quant("e4m3", False) == 0.5
        got, want = front.quant("per_token_cast", x, "e4m3", 32), q.per_token_cast(x, "e4m3", 32, amax_clamp=0.5)
        same(got[0], want[0])
        same(got[1], want[1])
    finally:
        reset_runtime_config()
    check(front, "per_token_cast", x, "e4m3", 32)
