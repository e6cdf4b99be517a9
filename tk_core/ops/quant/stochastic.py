"""Stochastic rounding: sixteen random bits an element from its index, its value and a seed, and casts that use them.

The value lies between two numbers of the format; f is the share of their distance that it is above the lower one, cut off
after sixteen bits. The result is the upper one if f + random reaches 2**16. Nothing is drawn: the same input and seed give
the same bits on every device and for every shape of the launch. NaN, which has no neighbours, is rounded as ever.

Kernels open with `P.Kernel(..., prelude=prelude(P))` of this module.
"""

from tk_core.bits import select, u32
from tk_core.ops.quant import bits
from tk_core.ops.quant.bits import U32, bit_select, bits_of, constant, float_of, has_e4m3
from tk_core.ops.quant.formats import E4M3, Format

# A function of C++ on every target: as an expression the hash would hold its index 64 times.
_HASH = """unsigned tk_mix(unsigned h) {
  h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
  h = (h ^ (h >> 13)) * 0xC2B2AE35u;
  return h ^ (h >> 16);
}
"""


def prelude(P) -> str:
    """That of the other casts, and the 32-bit finalizer of MurmurHash3."""
    return (bits.prelude(P) or "") + ('extern "C" inline ' if P.cpu else "static __device__ __forceinline__ ") + _HASH


def random_bits(P, index, seed, value_bits):
    """Sixteen bits for the element at a flat index (uint32, modulo 2**32) whose value, as fp32, has these bits."""
    mixed = P.call_pure_extern(U32, "tk_mix", index + seed * u32(0x9E3779B9))
    return P.call_pure_extern(U32, "tk_mix", mixed ^ value_bits) & u32(0xFFFF)


def encode_stochastic(P, fmt: Format, x, random):
    """`Format.encode` with stochastic rounding: a clean code. Both arguments appear several times in the result."""
    if _in_hardware(P, fmt):
        return fmt.encode(P, _on_grid(P, fmt, x, random))
    shift = 23 - fmt.mbits
    u = bits_of(P, x)
    # the random bits are added below the last place of the mantissa: a carry runs into the exponent if need be
    random = random << u32(shift - 16)
    rebias, normal = (127 - fmt.bias) << fmt.mbits, constant(P, fmt.min_normal)
    if P.sm:
        # a subnormal number is cut off at the same place of its sum with the smallest normal one
        a = P.min(P.abs(x), P.f32(fmt.max))
        t = bits_of(P, P.ieee_add(a, select(a < normal, normal, P.f32(0.0)), "rz"))
        code = ((t + random) >> u32(shift)) - select(a < normal, u32(rebias + (1 << fmt.mbits)), u32(rebias))
    else:
        magnitude = float_of(P, u & u32(0x7FFFFFFF))
        a = select(magnitude < constant(P, fmt.max), magnitude, constant(P, fmt.max))
        # its steps in fixed point, clipped, for the conversion of what does not fit is undefined
        fixed = P.Cast(U32, P.Cast("int32", P.min(a, normal) * P.f32(2.0**shift / fmt.step)))
        code = select(a < normal, (fixed + random) >> u32(shift), ((bits_of(P, a) + random) >> u32(shift)) - u32(rebias))
    # NaN went through as the largest number, whose code is part of that of NaN
    return code | select(P.isnan(x), u32(fmt.nan), u32(0)) | ((u >> u32(31 - fmt.bits)) & u32(1 << fmt.bits))


def pack_stochastic(P, fmt: Format, values, random):
    """`Format.pack` with stochastic rounding, for formats whose groups are one word: values and random bits -> [one word]."""
    if _in_hardware(P, fmt):
        return fmt.pack(P, [_on_grid(P, fmt, v, r) for v, r in zip(values, random, strict=True)])
    width = fmt.bits + 1
    word = encode_stochastic(P, fmt, values[0], random[0])
    for i in range(1, fmt.group):
        word = word | (encode_stochastic(P, fmt, values[i], random[i]) << u32(width * i))
    return [word]


def _in_hardware(P, fmt: Format) -> bool:
    return fmt is E4M3 and has_e4m3(P)


def _on_grid(P, fmt: Format, x, random):
    """CUDA only. x rounded to a number of the format, beyond its largest one to anything: what is left is a conversion that saturates."""
    shift = 23 - fmt.mbits
    small = P.abs(x) < P.f32(fmt.min_normal)
    base = select(small, P.f32(fmt.min_normal), P.f32(0.0))
    t = bits_of(P, P.ieee_add(P.abs(x), base, "rz")) + (random << u32(shift - 16))
    rounded = P.add(float_of(P, t & u32(0xFFFFFFFF << shift & 0xFFFFFFFF)), -base)
    return select(P.isnan(x), x, float_of(P, bit_select(P, 0x80000000, bits_of(P, x), bits_of(P, rounded))))


def bf16_stochastic(P, x, random):
    """The bf16 in the low half of a word: a sum below its last place. NaN keeps its upper bits and is made quiet."""
    u = bits_of(P, x)
    return select(P.isnan(x), (u >> u32(16)) | u32(0x40), (u + random) >> u32(16))
