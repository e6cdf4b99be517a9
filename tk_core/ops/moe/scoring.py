"""Scores of experts: how a gate makes them of logits, their derivative, and the keys by which they are ranked.

sigmoid         u = 1 / (1 + exp(-x))                                            du/dx = u (1 - u)
sqrtsoftplus    u = sqrt(softplus(x)), softplus(x) = x > 20 ? x : log1p(exp x)   du/dx = (1 - exp(-u^2)) / 2u, 0 at u = 0
softmax         u = exp(x - max) / sum                                        du/dx = diag(u) - u u^T

A key is an integer that is ordered as its fp32 number is; both zeros have one key, NaN is the largest or the smallest one.
"""

from enum import IntEnum

from tk_core.bits import f32_bits, select, u32
from tk_core.errors import type_error, value_error

F32 = "float32"
I32 = "int32"
U32 = "uint32"
# less than the key of every number: no expert
NONE = -(2**31)


class ScoringFunc(IntEnum):
    """How a gate makes scores of logits. `IDENTITY` is a name only: gates refuse it."""

    SIGMOID = 0
    SQRTSOFTPLUS = 1
    SOFTMAX = 2
    IDENTITY = 3

    def __str__(self) -> str:
        return self.name.lower()

    @classmethod
    def from_str(cls, label: str) -> "ScoringFunc":
        """The function of that name in any case.

        Args:
            label: "sigmoid", "sqrtsoftplus", "softmax" or "identity".

        Returns:
            The member.

        Raises:
            TypeError: label is no str.
            ValueError: there is no such function.
        """
        if not isinstance(label, str):
            raise type_error("ScoringFunc", "label", "a str", f"{label!r} of type {type(label).__name__}")
        if label.upper() not in cls.__members__:
            raise value_error("ScoringFunc", "label", " or ".join(repr(str(member)) for member in cls), repr(label))
        return cls[label.upper()]


# what the gates take
SCORINGS = ("sigmoid", "sqrtsoftplus", "softmax")


# The approximate reciprocal of a normal number, in one instruction. Softplus as max(x, 0) + log1p(exp(-|x|)), where log1p(z) = 2 atanh(s)
# with s = z / (2 + z), at most 1/3: 2 s and a polynomial in s^2 that is off by 2^-27 of it.
PRELUDE = """
static __device__ __forceinline__ float tk_reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
static __device__ __forceinline__ float tk_softplus(float x) {
  float z = expf(-fabsf(x)), d = 2.0f + z, r = tk_reciprocal(d), s = z * r;
  s = fmaf(fmaf(-s, z - (d - 2.0f), fmaf(-s, d, z)), r, s);
  float q = s * s;
  float p = fmaf(fmaf(fmaf(0.268675476f, q, 0.282339573f), q, 0.400076717f), q, 0.666666389f);
  return fmaxf(x, 0.0f) + fmaf(s * q, p, s + s);
}
"""


def score(P, scoring: str, x):
    """u(x) of a function that looks at one logit; within 2 ulp."""
    if scoring == "sigmoid":
        # e / (1 + e) for negative x: what exp and the sum are off by would add up in 1 / (1 + 1 / e)
        e = P.exp(-P.abs(x))
        return share(P, select(x < P.f32(0), e, P.f32(1)), e)
    if P.cpu:
        return P.sqrt(select(x > P.f32(20), x, P.call_pure_extern(F32, "log1pf", P.exp(x))))
    return P.sqrt(P.call_pure_extern(F32, "tk_softplus", x))


def share(P, a, e):
    """a / (1 + e) for e from 0 to 1, rounded about once: the rest of the sum is part of the remainder of the division."""
    total = P.add(P.f32(1), e)
    rest = P.add(e, -P.add(total, P.f32(-1)))
    if P.cpu:
        factor = P.f32(1) / total
    else:
        first = P.call_pure_extern(F32, "tk_reciprocal", total)
        factor = P.fma(first, P.fma(-total, first, P.f32(1)), first)
    quotient = P.mul(a, factor)
    return P.fma(P.fma(-quotient, rest, P.fma(-quotient, total, a)), factor, quotient)


def slope(P, scoring: str, u):
    """du/dx from u, for the functions that look at one logit."""
    if scoring == "sigmoid":
        return u * (P.f32(1) - u)
    # expm1: 1 - exp would cancel for small u
    rise = P.call_pure_extern(F32, "expm1f", -(u * u))
    return select(u > P.f32(0), -rise / P.max(u + u, smallest(P)), P.f32(0))


def smallest(P):
    """The smallest positive fp32 number, which stands in for a zero that would be divided by."""
    return P.reinterpret(u32(1), F32)


def key_of(P, x):
    """The rank of a number as an integer. The argument appears several times in the result."""
    # + 0: the negative zero becomes the positive one, and on CUDA every NaN the positive one
    bits = P.reinterpret(select(x == P.f32(0), P.f32(0), x) if P.cpu else P.ieee_add(x, P.f32(0)), I32)
    key = flip(P, bits)
    return P.max(key, P.Cast(I32, NONE + 1)) if P.cpu else key


def number_of(P, key):
    """The reverse of `key_of`."""
    return P.reinterpret(flip(P, key), F32)


def flip(P, bits):
    """Magnitudes of negative numbers turned around, sign kept: its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def tiny(P):
    """What every sum of weights begins with."""
    return P.reinterpret(u32(f32_bits(1e-20)), F32)
