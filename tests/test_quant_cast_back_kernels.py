"""Kernels that lead back from quantized data, or from one element type to another, against the oracle, bit for bit."""

import itertools

import numpy as np
import pytest
from quant_arrays import BF16, F8, FLAG_SETS, SIZES, f32, normal, same
from quant_fronts import FRONTS

import tk_core
from tk_core.ops.quant.cast_back import dequantize, dequantize_rows
from tk_core.ops.quant.elementwise import cast_elements, cast_stochastic, pack_e2m1, unpack_e2m1
from tk_core.ops.quant.lossless import recast_lossless
from tk_core.reference import quant as q
from tk_core.reference import quant_formats as qf

F32 = np.dtype(np.float32)
DTYPES = {"bf16": BF16, "fp32": F32, "e4m3": F8}
PLAIN, COL, ROUND, PACKED, PACKED_COL = (FLAG_SETS[i] for i in (0, 1, 2, 4, 5))


def same_values(got, want):
    """The same bits, where NaN is NaN."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    bits = f"u{got.dtype.itemsize}"
    number = ~np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(got.view(bits)[number], want.view(bits)[number])
    assert np.isnan(got.astype(np.float32)[~number]).all()


def storage(sf, col):
    return qf.sf_storage(sf) if col else np.ascontiguousarray(sf)


def quantized(size, fmt, block, flags, e4m3_scales=False):
    """Data and scales; a row of zeros, one of small and one of large numbers among the rows."""
    x = normal(size, 3)
    x[::3] *= np.float32(1e-6)
    x[1::5] *= np.float32(1e20)
    x[2::7] = 0
    if block[0] == 1:
        return q.per_token_cast(x, fmt, block[1], None, *flags, use_e4m3_sf=e4m3_scales)
    if block[1] == 1:
        return q.per_channel_cast(x, fmt, block[0], flags[1], None, flags[2])
    return q.per_block_cast(x, fmt, block, *flags)


# ------------------------------------------------------------------ dequantize


# format, block (None: the row), flags, E4M3 scales, result, sizes; every layout of scales with every format
CASES = [
    ("e4m3", (1, 128), PLAIN, False, "bf16", [*SIZES[:2], SIZES[4]]),
    ("e4m3", (1, 128), PACKED_COL, False, "fp32", SIZES[1:2]),
    ("e4m3", (1, None), COL, False, "fp32", SIZES[1:2]),
    ("e4m3", (1, 16), PLAIN, True, "fp32", SIZES[3:4]),
    ("e4m3", (128, 128), ROUND, False, "bf16", SIZES[4:]),
    ("e4m3", (32, 32), PACKED, False, "fp32", SIZES[3:4]),
    ("e4m3", (128, 1), PLAIN, False, "bf16", SIZES[4:]),
    ("e4m3", (32, 1), PACKED, False, "fp32", SIZES[3:4]),
    ("e2m1", (1, 32), ROUND, False, "bf16", SIZES[1:2]),
    ("e2m1", (1, 128), PACKED_COL, False, "fp32", SIZES[1:2]),
    ("e2m1", (1, 64), PACKED, False, "bf16", SIZES[3:4]),
    ("e2m1", (1, 16), COL, True, "bf16", SIZES[2:3]),
    ("e2m1", (128, 128), PLAIN, False, "fp32", SIZES[3:4]),
    ("e5m6", (1, None), PLAIN, False, "bf16", [SIZES[2], (7, 8)]),
    ("e5m6", (1, None), PACKED_COL, False, "fp32", [SIZES[2], (7, 8)]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c[:2])) + f"-{c[4]}")
def test_dequantize(case):
    fmt, block, flags, e4m3_scales, out, sizes = case
    for size in sizes:
        blocks = (block[0], block[1] or size[1])
        data, sf = quantized(size, fmt, blocks, flags, e4m3_scales)
        want = q.cast_back((data, sf), out, blocks, "e5m6" if fmt == "e5m6" else None)
        stored = storage(sf, flags[0])
        named = {"to": out, "block_k": blocks[1]}
        same(tk_core.call(dequantize, data, stored, block_m=blocks[0], col=flags[0], **named), want)
        if blocks[0] == 1 and not flags[0] and size == sizes[-1]:
            same(tk_core.call(dequantize_rows, data, stored, **named), want)
            batched = tk_core.call(dequantize_rows, data[None], stored[None], **named)
            same(batched, want[None])


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1", "e5m6"])
def test_every_code(fmt):
    form = qf.FORMATS[fmt]
    codes = np.arange(1 << form.bits, dtype=np.uint16)
    data = form.store(np.resize(codes, (2, 64) if fmt == "e2m1" else (8, len(codes) // 8) if fmt == "e5m6" else (4, 64)))
    sf = np.exp2(np.arange(len(data), dtype=np.float32)[:, None] - 2) * np.float32(1.1)
    for out in ("bf16", "fp32"):
        block = (1, 64 if fmt != "e5m6" else 512)
        want = q.cast_back((data, sf), out, block, "e5m6" if fmt == "e5m6" else None)
        same_values(tk_core.call(dequantize, data, sf, to=out, block_k=block[1]), want)


def test_scales_of_any_value():
    """UE8M0 0 and 255, E4M3 NaN, zero and subnormal fp32 scales are applied as they are."""
    data = F8.type(1.75) * np.ones((6, 128), F8)
    words = np.array([[0x01020304], [0x00FF0080], [0x7F7F7F7F], [0], [-1], [0x10FE00FF]], np.int32)
    same_values(tk_core.call(dequantize, data, words, to="fp32", block_k=32), q.cast_back((data, words), "fp32", (1, 32)))
    sf = f32(["00000001", "00400000", "7F800000", "7FC00000", 0, -3])[:, None]
    same_values(tk_core.call(dequantize, data, sf, to="fp32", block_k=128), q.cast_back((data, sf), "fp32", (1, 128)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_scales_stay_in_their_block(bad):
    data, sf = quantized((33, 128), "e2m1", (1, 32), ROUND)
    clean = tk_core.call(dequantize, data, sf, block_k=32)
    sf[5, 2] = bad
    dirty = tk_core.call(dequantize, data, sf, block_k=32)
    keep = np.ones((33, 128), bool)
    keep[5, 64:96] = False
    same(dirty[keep], clean[keep])


def test_longer_rows_of_scales():
    """Column-major scales may have more rows than the data: a slice of the tokens of a larger tensor."""
    data, sf = quantized((33, 128), "e4m3", (1, 32), COL)
    longer = np.pad(storage(sf, True), ((0, 0), (0, 12)), constant_values=np.nan)
    same(tk_core.call(dequantize, data, longer, block_k=32, col=True), q.cast_back((data, sf), "bf16", (1, 32)))


def test_wrong_arguments():
    data, sf = quantized((33, 128), "e4m3", (1, 32), PLAIN)
    for changed, message in (
        ({"block_k": 12}, "block_k"),
        ({"block_k": 64}, "sf"),
        ({"block_m": 0}, "block_m"),
        ({"to": "fp16"}, "to"),
        ({"block_m": 33, "block_k": 1, "col": True}, "col"),
    ):
        with pytest.raises(ValueError, match=message):
            tk_core.call(dequantize, data, sf, **{"block_k": 32, **changed})
    with pytest.raises(ValueError, match="64"):
        tk_core.call(dequantize, data[:, :96].copy(), sf[:, :3].copy(), block_k=32)
    with pytest.raises(TypeError, match="dtype"):
        tk_core.call(dequantize, data, sf.astype(np.float64), block_k=32)


# ------------------------------------------------------------------ recast_lossless


BLOCKS = [(1, 128), (32, 32), (128, 128)]


def small_blocks(size, flags, low=-8, high=7):
    """E2M1 in blocks of 1 x 32 whose scales differ by powers of two; some blocks are all zero."""
    rng = np.random.default_rng(size)
    exponents = rng.integers(low, high, (size[0], -(-size[1] // 32)))
    x = normal(size, 4) * np.exp2(exponents.astype(np.float32)).repeat(32, axis=1)[:, : size[1]]
    x[rng.random(size) < 0.1] = -0.0
    x[::4, :32] = 0
    return q.per_token_cast(x, "e2m1", 32, None, *flags)


def recast(x, block, flags, x_flags):
    named = {"sf": "packed" if flags[2] else "round", "col": flags[0], "x_col": x_flags[0]}
    return tk_core.call(recast_lossless, x[0], storage(x[1], x_flags[0]), block_m=block[0], block_k=block[1], **named)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(
    ("x_flags", "flags", "sizes"), [(ROUND, ROUND, SIZES[1:2]), (PACKED_COL, PACKED_COL, SIZES[4:]), (ROUND, PACKED, SIZES[:1])]
)
def test_lossless(block, x_flags, flags, sizes):
    for size in sizes:
        x = small_blocks(size, x_flags)
        data, sf, inexact = recast(x, block, flags, x_flags)
        want = q.per_block_cast_lossless(x, "e4m3", (1, 32), block, *flags)
        same(data, want[0])
        same(sf, storage(want[1], flags[0]))  # the padding too
        back = q.cast_back(want, "fp32", block) == q.cast_back(x, "fp32", (1, 32))
        rows, columns = (np.arange(n) // b for n, b in zip(size, block, strict=True))
        assert (back | (inexact[rows][:, columns] == 1)).all()


def test_lossless_range():
    """d = -8 is exact, d = -9 is reported; blocks of zeros ask for nothing."""
    codes = np.ones((4, 64), np.int8) * 0x11
    exponents = np.array([[100, 92, 100, 100], [100, 91, 100, 100], [100, 91, 1, 254], [1, 1, 1, 1]], np.uint32)
    codes[2, 0:48] = np.int8(-0x78)  # zeros of both signs
    sf = (exponents << 23).view(np.float32)
    # E_out is six below the largest one
    sf[:2] *= np.array([[1, 2.0**-6, 1, 1]], np.float32)
    data, out, inexact = recast((codes, sf), (1, 128), ROUND, ROUND)
    want = q.per_block_cast_lossless((codes, sf), "e4m3", (1, 32), (1, 128), round_sf=True)
    same(data, want[0])
    same(out, want[1])
    d = qf.exponent_bytes(sf).astype(int) - qf.exponent_bytes(want[1]).astype(int)
    used = (np.abs(qf.unpack_nibbles(codes) & 7) > 0).reshape(4, 4, 32).any(axis=2)
    np.testing.assert_array_equal(inexact[:, 0], ((d < -8) & used).any(axis=1))
    with pytest.raises(ValueError, match="block_k"):
        recast((codes, sf), (1, 48), ROUND, ROUND)
    with pytest.raises(ValueError, match="x_sf"):
        recast((codes, sf[:3]), (1, 128), ROUND, ROUND)


# ------------------------------------------------------------------ element by element


def numbers(dtype):
    """All bf16 or all E4M3, and fp32 around them; an odd count."""
    if dtype == F8:
        return np.arange(255, dtype=np.uint8).view(F8)
    every = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    some = np.random.default_rng(0).integers(0, 1 << 32, 4001, np.uint32).view(np.float32)
    near = normal((4096,), 5, 100)
    return np.concatenate([every, some, near]).astype(dtype)


@pytest.mark.parametrize(("source", "to"), [p for p in itertools.product(DTYPES, DTYPES) if p[0] != p[1]])
def test_cast_elements(source, to):
    with np.errstate(all="ignore"):
        x = numbers(DTYPES[source])
        same_values(tk_core.call(cast_elements, x, to=to), q.cast(x, DTYPES[to]))
        whole = x[: len(x) // 3 * 3].reshape(3, -1)
        same_values(tk_core.call(cast_elements, whole, to=to), q.cast(whole, DTYPES[to]))


@pytest.mark.parametrize(("source", "to"), [("fp32", "bf16"), ("fp32", "e4m3"), ("bf16", "e4m3")])
def test_cast_stochastic(source, to):
    with np.errstate(all="ignore"):
        x = numbers(DTYPES[source])
        for seed in (0, 1, 0xFFFFFFF0):
            want = q.cast(x, DTYPES[to], True, seed=seed)
            same_values(tk_core.call(cast_stochastic, x, np.array([seed], np.uint32), to=to), want)
            signed = seed - (1 << 32) * (seed >> 31)
            same_values(tk_core.call(cast_stochastic, x, None, to=to, seed_value=signed), want)


def test_stochastic_mean():
    """The mean of what is added lies within five standard deviations of none."""
    n, v = 1 << 20, np.float32(1.03)
    got = tk_core.call(cast_stochastic, np.full(n, v), None, to="e4m3", seed_value=3).astype(np.float64)
    p = (float(v) - 1) * 8
    assert set(np.unique(got)) == {1.0, 1.125}
    assert abs((got - float(v)).mean() * 8) < 5 * (p * (1 - p) / n) ** 0.5


def test_stochastic_arguments():
    with pytest.raises(ValueError, match="narrower"):
        tk_core.call(cast_stochastic, np.zeros(4, BF16), None, to="bf16")
    with pytest.raises(ValueError, match="'bf16' or 'e4m3'"):
        tk_core.call(cast_stochastic, np.zeros(4, F32), None, to="fp32")


@pytest.mark.parametrize("out", DTYPES)
def test_unpack_e2m1(out):
    x = np.arange(-128, 127, dtype=np.int8).reshape(5, 3, 17)
    for packed in (x, x[0, 0]):
        same(tk_core.call(unpack_e2m1, packed, to=out), q.unpack_from_e2m1fn_x2(packed, DTYPES[out]))


@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_pack_e2m1(dtype):
    codes = np.random.default_rng(0).integers(0, 16, (3, 7, 22)).astype(dtype)
    packed = tk_core.call(pack_e2m1, codes)
    same(packed, q.pack_to_e2m1fn_x2(codes))
    same(qf.unpack_nibbles(packed), codes.astype(np.uint8))
    with pytest.raises(ValueError, match="even"):
        tk_core.call(pack_e2m1, codes[..., :3].copy())


# ------------------------------------------------------------------ full width, on whatever device there is


@pytest.mark.anywhere
@pytest.mark.parametrize("front", FRONTS)
def test_full_rows(front):
    """7168 columns, an odd number of rows, twice: the same bits."""
    front = FRONTS[front]()
    size = (131, 7168)
    for fmt, block, flags in (
        ("e4m3", (1, 128), PLAIN),
        ("e2m1", (1, 32), PACKED_COL),
        ("e4m3", (128, 1), PLAIN),
        ("e5m6", (1, 7168), ROUND),
    ):
        data, sf = quantized(size, fmt, block, flags)
        want = q.cast_back((data, sf), "bf16", block, "e5m6" if fmt == "e5m6" else None)
        for _ in range(2):
            arrays = [data, storage(sf, flags[0])]
            (got,) = front.forward(dequantize, arrays, block_m=block[0], block_k=block[1], col=flags[0])
            same(got, want)
    for block in BLOCKS[::2]:
        x = small_blocks(size, PACKED_COL)
        want = q.per_block_cast_lossless(x, "e4m3", (1, 32), block, *PACKED_COL)
        named = {"sf": "packed", "col": True, "x_col": True, "block_m": block[0], "block_k": block[1]}
        data, sf, _ = front.forward(recast_lossless, [x[0], storage(x[1], True)], **named)
        same(data.view(np.uint8), want[0].view(np.uint8))
        same(sf, storage(want[1], True))
    x = normal((1000003,), 6, 100)
    for to in ("bf16", "e4m3"):
        (got,) = front.forward(cast_stochastic, [x, np.array([5], np.uint32)], to=to)
        same(got.view(np.uint8), q.cast(x, DTYPES[to], True, seed=5).view(np.uint8))
