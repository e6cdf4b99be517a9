"""Element and scale formats of the quantization casts, bit by bit: against ml_dtypes, brute force and NumPy."""

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch

from tk_core import compiler, kernels
from tk_core.device import arch_of
from tk_core.ffi import tvm_ffi
from tk_core.ops.quant import bits
from tk_core.ops.quant.formats import E2M1, E4M3, FORMATS
from tk_core.ops.quant.scales import SCALES

pytestmark = pytest.mark.anywhere

# "permute": what is generated for CUDA where there is no conversion in hardware, run on the CPU with the instructions imitated
DEVICES = ["cpu", "permute", *(["cuda"] if torch.cuda.is_available() else [])]
PERMUTE = """
extern "C" inline unsigned tk_select(unsigned mask, unsigned a, unsigned b) { return (a & mask) | (b & ~mask); }
extern "C" inline unsigned tk_absmax_bf16x2(unsigned top, unsigned x) {
  unsigned low = x & 0x7FFF, high = x & 0x7FFF0000;
  return (low > (top & 0xFFFF) ? low : top & 0xFFFF) | (high > (top & 0xFFFF0000) ? high : top & 0xFFFF0000);
}
extern "C" inline unsigned tk_prmt(unsigned a, unsigned b, unsigned selector) {
  unsigned long long table = ((unsigned long long)b << 32) | a;
  unsigned r = 0;
  for (int i = 0; i < 4; i++) {
    unsigned s = selector >> (4 * i), byte = (table >> (8 * (s & 7))) & 0xFF;
    r |= (s & 8 ? (byte & 0x80 ? 0xFF : 0) : byte) << (8 * i);
  }
  return r;
}
"""
DLPACK = {np.dtype(np.float32): "float32", np.dtype(np.int32): "int32"}
ML_DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e2m1": ml_dtypes.float4_e2m1fn}


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(params=FORMATS)
def fmt(request):
    return FORMATS[request.param]


@pytest.fixture
def run(device, tmp_path):
    """Builds a kernel and runs it: arrays in, a copy of the last `outputs` arrays back."""
    count = itertools.count()

    def go(builder, arrays, outputs):
        target = arch_of(*torch.cuda.get_device_capability()) if device == "cuda" else "c"
        path = tmp_path / f"k{next(count)}.so"
        P = compiler.dialect(target)
        P.sm = 80 if device == "permute" else P.sm
        compiler.build(builder(P), target, [DLPACK[a.dtype] for a in arrays], path, {})
        if target != "c":
            kernels._load_cuda_runtime()
        tensors = [torch.from_numpy(a).to("cuda" if device == "cuda" else "cpu") for a in arrays]
        tvm_ffi.load_module(str(path))["main"](*tensors)
        return [t.cpu().numpy() for t in tensors[-outputs:]]

    return go


def prelude(P):
    return PERMUTE if P.cpu and P.sm else bits.prelude(P)


def i32(n, *more):
    return np.full((n, *more), -1, np.int32)


def index(P, b, threads=128):
    """The element of a thread; on C a block is one thread and one element."""
    return b if P.cpu else b * threads + P.get_thread_binding(0)


def grid(P, n, threads=128):
    return n if P.cpu else P.ceildiv(n, threads)


# ------------------------------------------------------------------ oracles


def decoded(fmt):
    """Every code as float64, from the meaning of its fields."""
    code = np.arange(2 << fmt.bits)
    e, m = (code >> fmt.mbits) & ((1 << fmt.ebits) - 1), code & ((1 << fmt.mbits) - 1)
    value = np.where(e == 0, m * fmt.step, (2**fmt.mbits + m) * fmt.step * 2.0 ** np.maximum(e - 1, 0))
    return np.where(code >> fmt.bits, -value, value)


def positive(fmt):
    """The finite numbers from zero to the largest one: the index is the code."""
    grid = decoded(fmt)[: 1 << fmt.bits]
    return grid[grid <= fmt.max]


def nearest(fmt, x):
    """Brute force on the grid: nearest, ties to the even code, saturating, sign kept."""
    grid = positive(fmt)
    a = np.minimum(np.abs(x.astype(np.float64)), fmt.max)
    hi = np.clip(np.searchsorted(grid, a), 1, len(grid) - 1)
    below, above = a - grid[hi - 1], grid[hi] - a
    code = np.where((below < above) | ((below == above) & (hi % 2 == 1)), hi - 1, hi)
    return code | (np.signbit(x).astype(np.int64) << fmt.bits)


def with_neighbours(x, ulps=2):
    bits = x.astype(np.float32).view(np.int32)
    moved = [bits + d for d in range(-ulps, ulps + 1)]
    return np.concatenate(moved).view(np.float32)


def inputs(fmt):
    """All bf16; two ulps around every rounding boundary and number; fp32 extremes. A multiple of 8."""
    grid = positive(fmt)
    boundaries = np.concatenate([(grid[1:] + grid[:-1]) / 2, grid[1:], [fmt.max * 1.03, 465.0, 7.0, 65280.0, 65536.0]])
    special = np.array([0x00000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF], np.uint32)
    rng = np.random.default_rng(0)
    some = rng.integers(0, 2**32, 20000, np.uint32).view(np.float32)
    near = (rng.standard_normal(20000) * fmt.max / 3).astype(np.float32)
    one = np.concatenate([with_neighbours(boundaries), special.view(np.float32), [np.float32(0)]]).astype(np.float32)
    every = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    x = np.concatenate([every, one, (one.view(np.uint32) | 0x80000000).view(np.float32), some, near])
    return np.concatenate([x, np.zeros(-len(x) % 8, np.float32)])


def packed(fmt, code):
    """Codes -> bytes as the specification lays them out -> words."""
    code = code.reshape(-1, fmt.group).astype(np.uint64)
    if fmt.name == "e5m6":
        texts = ["".join(f"{c:03x}" for c in row) for row in code]
        return np.array([[int(t[8 * i : 8 * i + 8], 16) for i in range(3)] for t in texts], np.uint64).astype(np.uint32)
    width = 32 // fmt.group
    return (code << np.arange(0, 32, width, dtype=np.uint64)).sum(1).astype(np.uint32)[:, None]


# ------------------------------------------------------------------ elements


def encoder(P, fmt):
    n, G, W = P.dynamic("N"), fmt.group, fmt.words
    F32, I32 = "float32", "int32"

    @P.prim_func
    def main(
        x: P.Tensor((n, G), F32), by_definition: P.Tensor((n, G), I32), code: P.Tensor((n, G), I32), words: P.Tensor((n, W), I32)
    ):  # fmt: skip
        with P.Kernel(grid(P, n), threads=128, prelude=prelude(P)) as b:
            v = P.alloc_local((G,), F32)
            row = index(P, b)
            if row < n:
                for g in P.unroll(G):
                    v[g] = x[row, g]
                for g in P.unroll(G):
                    by_definition[row, g] = P.reinterpret(fmt.encode_by_definition(P, v[g]), I32)
                    code[row, g] = P.reinterpret(fmt.encode(P, v[g]), I32)
                for k, word in enumerate(fmt.pack(P, [v[g] for g in range(G)])):
                    words[row, k] = P.reinterpret(word, I32)

    return main


def test_encode(fmt, run):
    x = inputs(fmt)
    n = len(x) // fmt.group
    got = run(lambda P: encoder(P, fmt), [x.reshape(n, -1), i32(n, fmt.group), i32(n, fmt.group), i32(n, fmt.words)], 3)
    by_definition, code, words = got[0].ravel(), got[1].ravel(), got[2].view(np.uint32)
    number = ~np.isnan(x)
    want = nearest(fmt, np.where(number, x, 0))
    np.testing.assert_array_equal(by_definition[number], want[number])
    np.testing.assert_array_equal(code[number], want[number])
    assert set(by_definition[~number]) == {fmt.nan}
    magnitude = (1 << fmt.bits) - 1
    assert set(code[~number] & magnitude) == {fmt.nan}
    if fmt.name in ML_DTYPES:
        clipped = np.clip(x[number], -fmt.max, fmt.max).astype(ML_DTYPES[fmt.name]).view(np.uint8)
        np.testing.assert_array_equal(code[number], clipped & (2 * magnitude + 1))
    whole = number.reshape(n, -1).all(1)
    np.testing.assert_array_equal(words[whole], packed(fmt, want)[whole])


def f32_of(bits):
    return float(np.uint32(bits).view(np.float32))


ELEMENTS = {
    "e4m3": [
        (0.0, 0x00), (-0.0, 0x80), (2.0**-9, 0x01), (2.0**-10, 0x00), (f32_of(0x3A800001), 0x01), (3 * 2.0**-10, 0x02),
        (5 * 2.0**-10, 0x02), (-(2.0**-11), 0x80), (0.0146484375, 0x08), (2.0**-6, 0x08), (1.0, 0x38), (1.0625, 0x38), (1.125, 0x39),
        (1.1875, 0x3A), (17, 0x58), (19, 0x5A), (240, 0x77), (248, 0x78), (264, 0x78), (432, 0x7E), (448, 0x7E), (464, 0x7E),
        (1e4, 0x7E), (-448, 0xFE), (-1e4, 0xFE),
    ],
    "e2m1": [
        (0.25, 0), (f32_of(0x3E800001), 1), (f32_of(0x3F3FFFFF), 1), (0.75, 2), (1.25, 2), (f32_of(0x3FA00001), 3), (1.75, 4), (2.5, 4),
        (f32_of(0x40200001), 5), (3.5, 6), (5, 6), (f32_of(0x40A00001), 7), (7, 7), (1e9, 7), (-0.2, 8), (-0.25, 8), (-0.75, 0xA),
        (-6, 0xF),
    ],
    "e5m6": [
        (1, 0x3C0), (1.0078125, 0x3C0), (f32_of(0x3F810008), 0x3C1), (1.015625, 0x3C1), (1.0234375, 0x3C2), (1.984375, 0x3FF),
        (1.9921875, 0x400), (3, 0x420), (100, 0x564), (-1.5, 0xBE0), (65024, 0x7BF), (f32_of(0x477EFFFD), 0x7BF), (2.0**-14, 0x040),
        (2.0**-14 * 63 / 64, 0x03F), (2.0**-20, 0x001), (2.0**-21, 0x000), (0.75 * 2.0**-20, 0x001), (1.5 * 2.0**-20, 0x002),
        (2.5 * 2.0**-20, 0x002), (3.5 * 2.0**-20, 0x004), (63.4 * 2.0**-20, 0x03F),
    ],
}  # fmt: skip
# values of a group, its words
GROUPS = {
    "e4m3": ([1.0, -448, 2.0**-9, -0.0], [0x8001FE38]),
    "e2m1": ([-0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -6], [0xFEECCAA8]),
    "e5m6": ([1, -2, 0.5, 65024, 2.0**-14, 2.0**-20, -0.0, 1.0078125], [0x3C0C0038, 0x07BF0400, 0x018003C0]),
}


def test_elements_of_the_specification(fmt, run):
    group, words = GROUPS[fmt.name]
    values, codes = zip(*ELEMENTS[fmt.name], strict=True)
    x = np.array([*group, *values], np.float32)
    x = np.concatenate([x, np.zeros(-len(x) % fmt.group, np.float32)])
    n = len(x) // fmt.group
    got = run(lambda P: encoder(P, fmt), [x.reshape(n, -1), i32(n, fmt.group), i32(n, fmt.group), i32(n, fmt.words)], 3)
    for code in got[:2]:
        assert tuple(code.ravel()[fmt.group :][: len(codes)]) == codes
    assert got[2][0].view(np.uint32).tolist() == words


def decoder(P, fmt):
    n, m, G, W = P.dynamic("N"), P.dynamic("M"), fmt.group, fmt.words
    F32, I32 = "float32", "int32"

    @P.prim_func
    def main(
        code: P.Tensor((n,), I32), words: P.Tensor((m, W), I32),
        by_definition: P.Tensor((n,), F32), value: P.Tensor((n,), F32), group: P.Tensor((m, G), F32),
    ):  # fmt: skip
        with P.Kernel(grid(P, n), threads=128, prelude=prelude(P)) as b:
            w = P.alloc_local((W,), "uint32")
            row = index(P, b)
            if row < n:
                c = P.reinterpret(code[row], "uint32")
                by_definition[row] = fmt.decode_by_definition(P, c)
                value[row] = fmt.decode(P, c)
            if row < m:
                for k in P.unroll(W):
                    w[k] = P.reinterpret(words[row, k], "uint32")
                for g, v in enumerate(fmt.unpack(P, [w[k] for k in range(W)])):
                    group[row, g] = v

    return main


def test_decode(fmt, run):
    code = np.arange(2 << fmt.bits, dtype=np.int32)
    want = decoded(fmt).astype(np.float32)
    if fmt.name == "e4m3":
        want[code & 0x7F == 0x7F] = np.nan
    if fmt.name in ML_DTYPES:
        np.testing.assert_array_equal(want, code.astype(np.uint8).view(ML_DTYPES[fmt.name]).astype(np.float32))
    # every code at every place of a group
    many = np.concatenate([np.roll(code, s) for s in range(fmt.group)])
    words = packed(fmt, many).view(np.int32)
    arrays = [np.concatenate([code] * fmt.group), words, *(np.zeros(len(many), np.float32) for _ in range(2))]
    arrays.append(np.zeros((len(words), fmt.group), np.float32))
    expected = want[many]
    by_definition, value, group = run(lambda P: decoder(P, fmt), arrays, 3)
    number = ~np.isnan(want)
    for got in (by_definition[: len(code)], value[: len(code)]):
        assert np.isnan(got[~number]).all()
        np.testing.assert_array_equal(got[number].view(np.int32), want[number].view(np.int32))
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(group.ravel()[number].view(np.int32), expected[number].view(np.int32))
    assert np.isnan(group.ravel()[~number]).all()


# ------------------------------------------------------------------ words of E2M1


def e2m1_words(P):
    n = P.dynamic("N")
    I32 = "int32"

    @P.prim_func
    def main(
        word: P.Tensor((n,), I32), low: P.Tensor((n,), I32), high: P.Tensor((n,), I32), factor: P.Tensor((n,), "float32"),
        bytes_: P.Tensor((n, 2), I32), pairs: P.Tensor((n, 4), I32), table: P.Tensor((n, 2), I32),
    ):  # fmt: skip
        with P.Kernel(grid(P, n), threads=128, prelude=prelude(P)) as b:
            row = index(P, b)
            if row < n:
                w = P.alloc_var("uint32", init=P.reinterpret(word[row], "uint32"))
                lo = P.alloc_var("uint32", init=P.reinterpret(low[row], "uint32"))
                hi = P.alloc_var("uint32", init=P.reinterpret(high[row], "uint32"))
                f = P.alloc_var("float32", init=factor[row])
                for k, v in enumerate(E2M1.lookup(P, w, lo, hi)):
                    bytes_[row, k] = P.reinterpret(v, I32)
                for k, v in enumerate(E2M1.unpack_bf16(P, w)):
                    pairs[row, k] = P.reinterpret(v, I32)
                for k, v in enumerate(E2M1.e4m3_table(P, f)):
                    table[row, k] = P.reinterpret(v, I32)

    return main


def test_words_of_e2m1(run):
    rng = np.random.default_rng(1)
    n = 4096
    code = rng.integers(0, 16, (n, 8))
    code[:16] = np.arange(16)[:, None]
    table = rng.integers(0, 128, (n, 8)).astype(np.uint8)
    factor = (2.0 ** (np.arange(n) % 40 - 30)).astype(np.float32)
    word = packed(E2M1, code.ravel()).ravel().view(np.int32)
    low, high = (np.ascontiguousarray(t).view(np.int32).ravel() for t in (table[:, :4], table[:, 4:]))
    got = run(e2m1_words, [word, low, high, factor, i32(n, 2), i32(n, 4), i32(n, 2)], 3)
    np.testing.assert_array_equal(got[0].view(np.uint8).reshape(n, 8), np.take_along_axis(table, code & 7, 1) | (code >> 3 << 7))
    value = decoded(E2M1)[code].astype(np.float32)
    np.testing.assert_array_equal(got[1].view(np.uint16).reshape(n, 8), value.view(np.uint32) >> 16)
    scaled = (positive(E2M1).astype(np.float32) * factor[:, None]).astype(np.float32)
    np.testing.assert_array_equal(got[2].view(np.uint8).reshape(n, 8), nearest(E4M3, scaled))


def bf16_packer(P):
    n = P.dynamic("N")
    I32 = "int32"

    @P.prim_func
    def main(
        pairs: P.Tensor((n, 4), I32), inverse: P.Tensor((n,), I32), word: P.Tensor((n,), I32), amax: P.Tensor((n,), "float32")
    ):  # fmt: skip
        with P.Kernel(grid(P, n), threads=128, prelude=prelude(P)) as b:
            w = P.alloc_local((4,), "uint32")
            row = index(P, b)
            if row < n:
                for k in P.unroll(4):
                    w[k] = P.reinterpret(pairs[row, k], "uint32")
                f = P.alloc_var("uint32", init=P.reinterpret(inverse[row], "uint32"))
                for v in E2M1.pack_bf16(P, [w[k] for k in range(4)], f):
                    word[row] = P.reinterpret(v, I32)
                amax[row] = bits.amax_bf16(P, [w[k] for k in range(4)])

    return main


def every_bf16():
    x = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    return np.concatenate([x[np.isfinite(x)], np.zeros(2 * 256 % 8, np.float32)])


POWERS = [-126, -3, 0, 1, 9, 126]


def test_pack_bf16(run):
    x = np.tile(every_bf16(), len(POWERS))
    factor = np.repeat(2.0 ** np.array(POWERS), len(every_bf16())).astype(np.float32)
    pairs = np.ascontiguousarray((x.view(np.uint32) >> 16).astype(np.uint16)).view(np.int32).reshape(-1, 4)
    inverse = (factor[::8].view(np.uint32) >> 16) * np.uint32(0x10001)
    word, amax = run(bf16_packer, [pairs, inverse.view(np.int32), i32(len(pairs)), np.zeros(len(pairs), np.float32)], 2)
    np.testing.assert_array_equal(amax, np.abs(x.reshape(-1, 8)).max(1))
    with np.errstate(over="ignore"):
        want = nearest(E2M1, x * factor)
    np.testing.assert_array_equal(word.view(np.uint32), packed(E2M1, want).ravel())


def round_to_bf16(v):
    """fp64 that fp32 holds exactly -> the nearest bf16, as fp32."""
    exact = v.astype(np.float32)
    np.testing.assert_array_equal(exact.astype(np.float64), v)
    bits = exact.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


@pytest.mark.parametrize("power", POWERS)
def test_the_steps_in_bf16_are_exact(power):
    """The arithmetic of `tk_e2m1x8_bf16`, step by step in correctly rounded bf16: an oracle where there is no GPU."""
    x = every_bf16()
    product = np.minimum(np.abs(x.astype(np.float64)) * 2.0**power, 6)
    # bf16 products are exact, except for those far below the smallest step; all of the latter round to zero
    product = np.where(product < 2.0**-9, np.where(product > 0, 2.0**-9, 0), product)
    v = round_to_bf16(product)
    binade = np.maximum((v.view(np.uint32) & 0x7F800000).view(np.float32), np.float32(1))
    t = round_to_bf16(binade.astype(np.float64) * 67 + v).view(np.uint32) >> 16
    with np.errstate(over="ignore"):
        want = nearest(E2M1, x * np.float32(2.0**power))
    np.testing.assert_array_equal((t + (t >> 6)) & 7, want & 7)


# ------------------------------------------------------------------ scales


def scaler(P, fmt):
    n = P.dynamic("N")
    F32, I32 = "float32", "int32"
    plain, power, small = (SCALES[name] for name in ("fp32", "ue8m0", "e4m3"))

    @P.prim_func
    def main(
        amax: P.Tensor((n,), F32), scales: P.Tensor((n, 3), F32), inverses: P.Tensor((n, 3), F32), known: P.Tensor((n, 3), F32),
        codes: P.Tensor((n, 4), I32),
    ):  # fmt: skip
        with P.Kernel(grid(P, n), threads=128, prelude=prelude(P)) as b:
            row = index(P, b)
            if row < n:
                a = P.alloc_var(F32, init=amax[row])
                s = P.alloc_var(F32, init=plain.stored(P, a, fmt))
                e = P.alloc_var("uint32", init=power.stored(P, a, fmt))
                q = P.alloc_var("uint32", init=small.stored(P, a, fmt))
                for k, (scale, stored) in enumerate(((plain, s), (power, e), (small, q))):
                    scales[row, k] = scale.value(P, stored)
                    inverses[row, k] = scale.inverse(P, a, stored, fmt)
                    known[row, k] = scale.inverse_of(P, stored)
                codes[row, 0] = P.reinterpret(e, I32)
                codes[row, 1] = P.reinterpret(power.round_up(P, s), I32)
                codes[row, 2] = P.reinterpret(q, I32)
                codes[row, 3] = P.reinterpret(power.inverse_bf16x2(P, e), I32)

    return main


def test_scales(fmt, run):
    f32 = np.float32
    edges = {m + d for m in (0, 0x200000, 0x400000, 0x600000, 0x7C0000, 0x800000) for d in (-2, -1, 0, 1, 2)} | {0x16DB6D, 0x2AAAAA}
    mantissas = np.array(sorted(m for m in edges if 0 <= m < 1 << 23), np.uint32)
    amax = ((np.arange(255, dtype=np.uint32)[:, None] << 23) | mantissas).ravel().view(f32)
    amax = np.concatenate([amax[amax >= f32(fmt.clamp)], [f32(fmt.clamp)], np.exp2(np.random.default_rng(2).uniform(-13, 127, 4000))])
    amax = amax.astype(f32)
    n = len(amax)
    got = run(lambda P: scaler(P, fmt), [amax, *(np.zeros((n, 3), f32) for _ in range(3)), i32(n, 4)], 4)
    scales, inverses, known, codes = (np.ascontiguousarray(g.T) for g in got)

    def same(a, b):
        np.testing.assert_array_equal(a.view(np.int32), np.asarray(b, a.dtype).view(np.int32))

    one, top = np.full(n, 1, f32), np.full(n, fmt.max, f32)
    with np.errstate(divide="ignore", over="ignore"):
        same(scales[0], amax / top)
        same(inverses[0], top / amax)
        same(known[0], one / (amax / top))
        # the smallest integer exponent, by exact comparison
        fraction, exponent = np.frexp(amax.astype(np.float64) / 1.0)
        limit, shift = np.frexp(fmt.max)
        power = exponent - shift + (fraction > limit)
        same(codes[0], power + 127)
        same(codes[1], power + 127)
        assert codes[0].min() >= 1
        assert codes[0].max() <= 253
        same(scales[1], np.ldexp(one, power))
        same(inverses[1], np.ldexp(one, -power))
        same(known[1], inverses[1])
        same(codes[3].view(np.uint32), (inverses[1].view(np.uint32) >> 16) * np.uint32(0x10001))
        q = nearest(E4M3, amax / top)
        same(codes[2], q)
        value = positive(E4M3)[q].astype(f32)
        same(scales[2], value)
        # amax is clamped so that a scale is never zero
        some = value > 0
        same(inverses[2][some], (one / value)[some])
        same(known[2][some], (one / value)[some])


# amax, then for each format: plain scale, its multiplier, rounded exponent
GOLDEN = {
    "e4m3": {
        1.0: (0x3B124925, 0x43E00000, 0x77),
        3.0: (0x3BDB6DB7, 0x43155555, 0x78),
        3.4028234663852886e38: (0x7B124924, 0x03E00001, 0xF7),
    },
    "e2m1": {
        1.0: (0x3E2AAAAB, 0x40C00000, 0x7D),
        3.0: (0x3F000000, 0x40000000, 0x7E),
        3.4028234663852886e38: (0x7E2AAAAA, 0x00C00001, 0xFD),
    },
    "e5m6": {
        1.0: (0x37810204, 0x477E0000, 0x70),
        3.0: (0x38418306, 0x46A95555, 0x71),
        3.4028234663852886e38: (0x77810204, 0x077E0001, 0xF0),
    },
}
CLAMPED = {"e4m3": (0x346FACAD, 0x4A88B800, 0x69), "e2m1": (0x00800000, 0x7E800000, 0x01), "e5m6": (0x30D35DD3, 0x4E1B0780, 0x62)}


def test_scales_of_the_specification(fmt, run):
    golden = {**GOLDEN[fmt.name], fmt.clamp: CLAMPED[fmt.name]}
    below, above = np.nextafter(np.float32(fmt.max), np.float32([0, np.inf]))
    golden |= {fmt.max: (0x3F800000, 0x3F800000, 0x7F), 2 * fmt.max: (0x40000000, 0x3F000000, 0x80)}
    golden |= {float(below): (0x3F7FFFFF, 0x3F800001, 0x7F), float(above): (0x3F800001, 0x3F7FFFFF, 0x80)}
    amax = np.array(list(golden), np.float32)
    n = len(amax)
    scales, inverses, _, codes = run(lambda P: scaler(P, fmt), [amax, *(np.zeros((n, 3), np.float32) for _ in range(3)), i32(n, 4)], 4)
    got = zip(scales[:, 0].view(np.uint32).tolist(), inverses[:, 0].view(np.uint32).tolist(), codes[:, 0].tolist(), strict=True)
    assert list(got) == list(golden.values())


def powers(P):
    n = P.dynamic("N")
    ue8m0 = SCALES["ue8m0"]

    @P.prim_func
    def main(code: P.Tensor((n,), "int32"), value: P.Tensor((n,), "float32"), inverse: P.Tensor((n,), "float32")):
        with P.Kernel(grid(P, n), threads=128) as b:
            row = index(P, b)
            if row < n:
                e = P.alloc_var("uint32", init=P.reinterpret(code[row], "uint32"))
                value[row] = ue8m0.value(P, e)
                inverse[row] = ue8m0.inverse_of(P, e)

    return main


def test_every_power_of_two(run):
    code = np.arange(256, dtype=np.int32)
    value, inverse = run(powers, [code, np.zeros(256, np.float32), np.zeros(256, np.float32)], 2)
    want = code.astype(np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(value, want)
    np.testing.assert_array_equal(value[:255].view(np.int32)[1:], code[1:255] << 23)
    assert value[:1].view(np.int32)[0] == 0x00400000
    np.testing.assert_array_equal(inverse[1:254], 1 / want[1:254])
