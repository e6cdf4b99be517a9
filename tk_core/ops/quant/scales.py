"""Scale formats of the quantization casts: fp32, UE8M0 and E4M3, each with what is stored and the factor that quantizes.

Amax comes clamped. The formulas are those of the specification, bit for bit.
"""

from tk_core.bits import f32_bits, select, u32
from tk_core.ops.mhc.common import reciprocal
from tk_core.ops.quant.bits import bits_of, constant, divide, float_of
from tk_core.ops.quant.formats import E4M3, Format

# ------------------------------------------------------------------ scale formats


class Fp32Scale:
    """amax / MAX. The multiplier is MAX / amax, not the inverse of the scale: one rounding."""

    name = "fp32"

    def stored(self, P, a, fmt: Format):
        """What is stored for a block whose amax, clamped from below, is a: here an fp32 value."""
        return divide(P, a, constant(P, fmt.max))

    def inverse(self, P, a, stored, fmt: Format):
        """What elements are multiplied by, from the clamped amax and from what `stored` gave for it."""
        return divide(P, constant(P, fmt.max), a)

    def value(self, P, stored):
        """The scale, fp32."""
        return stored

    def inverse_of(self, P, stored):
        """The multiplier where only the scale is known."""
        return divide(P, constant(P, 1.0), stored)


class Ue8m0Scale:
    """The smallest power of two that amax / MAX does not exceed, stored as its biased exponent (uint32, one byte)."""

    name = "ue8m0"

    def stored(self, P, a, fmt: Format):
        # Dividing by a power of two subtracts it from the exponent field, and an excess in the mantissa carries into it.
        # So the comparison of a with MAX * 2**e for all e at once is a subtraction of bit patterns; a is never subnormal.
        return (bits_of(P, a) + u32(((127 << 23) + 0x7FFFFF - f32_bits(fmt.max)) & 0xFFFFFFFF)) >> u32(23)

    def inverse(self, P, a, stored, fmt: Format):
        return self.inverse_of(P, stored)

    def round_up(self, P, scale):
        """The code of the smallest power of two that is at least a positive normal number."""
        return (bits_of(P, scale) + u32(0x7FFFFF)) >> u32(23)

    def value(self, P, stored):
        """Exact for codes 1 to 254; 0 is 2**-127, 255 is NaN."""
        e = P.Cast("int32", stored)
        ends = select(e == 0, u32(0x00400000), u32(0x7FC00000))
        return float_of(P, select((e == 0) | (e == 255), ends, stored << u32(23)))

    def inverse_of(self, P, stored):
        """Exact for codes 1 to 253, which finite input leads to."""
        return float_of(P, (u32(254) - stored) << u32(23))

    def inverse_bf16x2(self, P, stored):
        """`inverse_of` as bf16 in both halves of a word."""
        return ((u32(254) - stored) << u32(7)) * u32(0x00010001)


class E4m3Scale:
    """amax / MAX to the nearest E4M3 number (uint32, one byte); the multiplier is the inverse of what was stored."""

    name = "e4m3"

    def stored(self, P, a, fmt: Format):
        if P.cpu:
            return E4M3.encode(P, divide(P, a, constant(P, fmt.max)))
        # the quotient and one correction are a division rounded once, for all of these divisors, as long as nothing underflows:
        # the smallest scale keeps a far from that
        q = P.mul(a, P.f32(1 / fmt.max))
        return E4M3.encode(P, P.fma(P.fma(-q, P.f32(fmt.max), a), P.f32(1 / fmt.max), q))

    def inverse(self, P, a, stored, fmt: Format):
        return self.inverse_of(P, stored)

    def value(self, P, stored):
        return E4M3.decode(P, stored)

    def inverse_of(self, P, stored):
        return reciprocal(P, self.value(P, stored))


SCALES = {s.name: s for s in (Fp32Scale(), Ue8m0Scale(), E4m3Scale())}
