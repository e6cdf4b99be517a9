"""Pieces of a row in the quantization casts: neighbouring elements that a thread loads, encodes and stores together.

What is loaded is a source: words of which it knows the largest magnitude and the values. What is stored are codes of a format, or
the values that are left of them. On CUDA everything stays in registers; on C one loop does one thing, so that it vectorizes.
"""

from math import gcd

from tk_core.bits import select, u32
from tk_core.ops.quant.bits import F32, U32, absmax_bf16x2, amax_bf16, float_of, store_words
from tk_core.ops.quant.formats import E2M1, E4M3
from tk_core.ops.quant.layouts import E4M3_DTYPE
from tk_core.ops.quant.stochastic import encode_stochastic, pack_stochastic, random_bits

BF16 = "bfloat16"
I32 = "int32"


def loop(P, n):
    """A loop over what a thread has: registers need it unrolled, C does not."""
    return P.serial(n) if P.cpu else P.unroll(n)


def as_words(P, x, dtype: str):
    """A view of a matrix as rows of 32-bit words. C names a parameter after its last view: assign it to the name of the array."""
    from tilelang import tvm

    size = {F32: 4, BF16: 2}.get(dtype, 1)
    shape, row = (x.shape[0], x.shape[1] * size // 4), x.strides[0] if len(x.strides) else 0
    if not isinstance(row, tvm.tirx.Var):
        return P.view(x, shape, I32)
    # rows that lie apart begin at multiples of 16 bytes, which the stride shows to the compiler
    return P.view(x, shape, I32, strides=(row // (16 // size) * 4, 1))


# ------------------------------------------------------------------ sources: words -> largest magnitude, values


class Floats:
    """bf16 or fp32."""

    def __init__(self, bits: int):
        self.bits, self.group = bits, 32 // bits

    def amax(self, P, words):
        """CUDA: the largest magnitude."""
        if self.bits == 16:
            return amax_bf16(P, words)
        top = P.abs(float_of(P, words[0]))
        for word in words[1:]:
            top = P.max(top, P.abs(float_of(P, word)))
        return top

    def rank(self, P, word):
        """C: the largest magnitude of a word as a non-negative integer that grows with it."""
        low = (word << u32(16)) & u32(0x7FFFFFFF)
        return P.max(low, word & u32(0x7FFF0000)) if self.bits == 16 else word & u32(0x7FFFFFFF)

    def ranked(self, P, rank):
        """The magnitude of a rank."""
        return float_of(P, rank)

    def values(self, P, words):
        """All of some words."""
        halves = words if self.bits == 32 else [half for word in words for half in (word << u32(16), word & u32(0xFFFF0000))]
        return [float_of(P, half) for half in halves]


class Codes:
    """Codes of a format, whose scales are known besides. Without their signs they are in the order of their values."""

    def __init__(self, fmt):
        self.fmt, self.bits, self.group = fmt, fmt.bits + 1, fmt.group

    def amax(self, P, words):
        if self.fmt is E2M1:
            return amax_bf16(P, [pair for word in words for pair in E2M1.unpack_bf16(P, word)])
        # as the upper bytes of two bf16 they are in the same order
        top = words[0] & u32(0x7FFF7FFF)
        for half in [words[0] << u32(8), *(half for word in words[1:] for half in (word, word << u32(8)))]:
            top = absmax_bf16x2(P, top, half)
        return self.fmt.decode(P, P.max(top >> u32(24), (top >> u32(8)) & u32(0xFF)))

    def rank(self, P, word):
        mask = u32((1 << self.fmt.bits) - 1)
        codes = [(word >> u32(shift)) & mask for shift in range(0, 32, self.bits)]
        top = codes[0]
        for code in codes[1:]:
            top = P.max(top, code)
        return top

    def ranked(self, P, rank):
        return self.fmt.decode(P, rank)

    def values(self, P, words):
        return [value for word in words for value in self.fmt.unpack(P, [word])]


SOURCES = {BF16: Floats(16), F32: Floats(32), E4M3_DTYPE: Codes(E4M3), "int8": Codes(E2M1)}


# ------------------------------------------------------------------ a piece


def taker(P, g, source):
    """Macro: the values of a piece times a factor."""

    @P.macro
    def run(words, values, factor):
        for w in loop(P, g.vector // source.group):
            for v, value in enumerate(source.values(P, [words[w]])):
                values[w * source.group + v] = P.mul(value, factor)

    return run


def encoder(P, g, fmt, stochastic: bool):
    """Macro: the codes of the values of a piece in words; `first` is the flat index of the first one."""
    group = fmt.group

    def draw(values, v, first, seed):
        return random_bits(P, first + P.Cast(U32, v), seed, P.reinterpret(values[v], U32))

    def packed(values, u, first, seed):
        these = [values[u * group + e] for e in range(group)]
        if not stochastic:
            return fmt.pack(P, these)
        return pack_stochastic(P, fmt, these, [draw(values, u * group + e, first, seed) for e in range(group)])

    def encoded(values, v, first, seed):
        return encode_stochastic(P, fmt, values[v], draw(values, v, first, seed)) if stochastic else fmt.encode(P, values[v])

    @P.macro
    def on_cuda(values, words, first, seed):
        for u in P.unroll(g.vector // group):
            for i, word in enumerate(packed(values, u, first, seed)):
                words[u * fmt.words + i] = word

    @P.macro
    def on_c(values, words, first, seed):
        codes = P.alloc_local((g.vector,), U32)
        # one loop for the arithmetic, which vectorizes
        for v in P.serial(g.vector):
            codes[v] = encoded(values, v, first, seed)
        for u in P.serial(g.vector // group):
            for i, word in enumerate(fmt.join([codes[u * group + e] for e in range(group)])):
                words[u * fmt.words + i] = word

    return on_c if P.cpu else on_cuda


def decoder(P, g, fmt, dtype: str):
    """Macro: the codes of a piece to their values times a scale, in the words of a dtype."""
    wide = 2 if dtype == BF16 else 1

    def rounded(values):
        if dtype == F32:
            return P.reinterpret(values[0], U32)
        low, high = (P.Cast(U32, P.reinterpret(P.from_f32(v, BF16), "uint16")) for v in values)
        return low | (high << u32(16))

    @P.macro
    def run(codes, words, scale):
        values = P.alloc_local((g.vector,), F32)
        for u in loop(P, g.vector // fmt.group):
            for e, value in enumerate(fmt.unpack(P, [codes[u * fmt.words + w] for w in range(fmt.words)])):
                values[u * fmt.group + e] = P.mul(value, scale)
        for w in loop(P, g.vector // wide):
            words[w] = rounded([values[w * wide + e] for e in range(wide)])

    return run


def storer(P, g, n: int):
    """Macro: the n words of piece p of a row to memory, where there is such a piece."""
    width = gcd(4, n)
    # twelve bytes of a thread are sixteen of three threads out of four, where rows allow for it
    regroup = n == 3 and g.H % 32 == 0

    def windows(t, own, follow):
        six = [own[w] for w in range(3)] + [follow[w] for w in range(3)]
        return [select(t == 0, six[w], select(t == 1, six[w + 1], six[w + 2])) for w in range(4)]

    @P.macro
    def on_cuda(data, words, row, p, present):
        if regroup:
            # thread t of four stores words t to t + 3 of its own three and those of the next thread
            follow = P.alloc_local((3,), U32)
            window = P.alloc_local((4,), U32)
            for w in P.unroll(3):
                follow[w] = P.shfl_down(words[w], 1)
            for w, word in enumerate(windows(p % 4, words, follow)):
                window[w] = word
            if present and p % 4 < 3:
                store_words(P, data, (row, p // 4 * 12 + p % 4 * 4), [window[w] for w in range(4)])
        else:
            if present:
                for c in P.unroll(n // width):
                    store_words(P, data, (row, p * n + c * width), [words[c * width + w] for w in range(width)])

    @P.macro
    def on_c(data, words, row, p, present):
        if present:
            for w in P.serial(n):
                data[row, p * n + w] = P.reinterpret(words[w], I32)

    return on_c if P.cpu else on_cuda
