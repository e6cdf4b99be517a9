"""NumPy oracle of the quantization casts, part one: element formats, scale rules, stochastic bits and scale layouts.

Everything is bit-exact. fp32 arithmetic is NumPy's: one IEEE operation each, round to nearest even, no flush to zero.
Inputs that are not finite give unspecified codes and scales of their own block; what this file chooses for them is
written beside the code and is not part of the contract.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import ml_dtypes
import numpy as np

Array = np.ndarray
E4M3_DTYPE = np.dtype(ml_dtypes.float8_e4m3fn)
BF16_DTYPE = np.dtype(ml_dtypes.bfloat16)


def align(value: int, multiple: int) -> int:
    """The value rounded up to a multiple."""
    return -(-value // multiple) * multiple


def bits_of(values: Array) -> Array:
    """The bit patterns of fp32 values."""
    return np.asarray(values, np.float32).view(np.uint32)


def from_bits(bits: Array) -> Array:
    """The fp32 values of bit patterns."""
    return np.asarray(bits).astype(np.uint32).view(np.float32)


# ------------------------------------------------------------------ storage of codes


def pack_nibbles(codes: Array) -> Array:
    """(…, H) codes of four bits to int8 (…, H/2), even elements in the low nibble."""
    codes = codes.astype(np.uint8)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).view(np.int8)


def unpack_nibbles(data: Array) -> Array:
    """The inverse of pack_nibbles, for int8 and uint8."""
    data = data.view(np.uint8)
    pairs = np.stack([data & 15, data >> 4], axis=-1)
    return pairs.reshape(*data.shape[:-1], 2 * data.shape[-1])


def pack_12bit(codes: Array) -> Array:
    """(…, H) codes of twelve bits to uint8 (…, 3H/2): eight codes are three little-endian words, first code on top."""
    *rows, width = codes.shape
    h = np.moveaxis(codes.reshape(*rows, width // 8, 8).astype(np.uint32), -1, 0)
    words = np.empty((*rows, width // 8, 3), "<u4")
    words[..., 0] = h[0] << 20 | h[1] << 8 | h[2] >> 4
    words[..., 1] = (h[2] & 0xF) << 28 | h[3] << 16 | h[4] << 4 | h[5] >> 8
    words[..., 2] = (h[5] & 0xFF) << 24 | h[6] << 12 | h[7]
    return words.reshape(*rows, 3 * width // 8).view(np.uint8)


def unpack_12bit(data: Array) -> Array:
    """The inverse of pack_12bit."""
    *rows, width = data.shape
    words = np.ascontiguousarray(data).view("<u4").reshape(*rows, width // 12, 3)
    w0, w1, w2 = np.moveaxis(words, -1, 0)
    codes = np.empty((*rows, width // 12, 8), np.uint16)
    codes[..., 0] = w0 >> 20
    codes[..., 1] = w0 >> 8 & 0xFFF
    codes[..., 2] = (w0 & 0xFF) << 4 | w1 >> 28
    codes[..., 3] = w1 >> 16 & 0xFFF
    codes[..., 4] = w1 >> 4 & 0xFFF
    codes[..., 5] = (w1 & 0xF) << 8 | w2 >> 24
    codes[..., 6] = w2 >> 12 & 0xFFF
    codes[..., 7] = w2 & 0xFFF
    return codes.reshape(*rows, 8 * (width // 12))


# ------------------------------------------------------------------ element formats


@dataclass(frozen=True)
class Format:
    """An element format: sign, exponent, mantissa, subnormals, saturation. Codes are integers with the sign on top.

    nan_code is the magnitude code of a NaN; formats without NaN saturate it. Unspecified for all but E4M3.
    """

    name: str
    bits: int
    mantissa: int
    min_exponent: int
    max_code: int
    nan_code: int
    store: Callable[[Array], Array]
    load: Callable[[Array], Array]

    @cached_property
    def table(self) -> Array:
        """The fp32 value of every code. Codes above the maximum are inf where their mantissa is zero, else NaN, as in fp16."""
        magnitude = np.arange(1 << (self.bits - 1))
        exponent, fraction = magnitude >> self.mantissa, magnitude & ((1 << self.mantissa) - 1)
        significand = fraction + (exponent > 0) * (1 << self.mantissa)
        value = np.ldexp(significand.astype(np.float32), np.maximum(exponent, 1) - 1 + self.min_exponent - self.mantissa)
        value = np.where(magnitude > self.max_code, np.where(fraction == 0, np.inf, np.nan), value)
        return np.concatenate([value, -value]).astype(np.float32)

    @cached_property
    def max(self) -> np.float32:
        """The largest finite value."""
        return self.table[self.max_code]

    def decode(self, codes: Array) -> Array:
        """Exact fp32 values."""
        return self.table[codes]

    def _steps(self, v: Array) -> tuple[Array, Array]:
        """|v|, saturated, in grid steps of its binade, and the code of zero steps of that binade.

        A binade with exponent e starts at 2^mantissa steps, so that the code of n steps is n + (e - min_exponent)·2^mantissa, and
        one step more is the next code also across binades. The scaling by a power of two is exact.
        """
        magnitude = np.fmin(np.abs(v), self.max)  # fmin: the maximum where v is NaN
        exponent = np.maximum((magnitude.view(np.int32) >> 23) - 127, self.min_exponent)
        scale = from_bits((127 + self.mantissa - exponent) << 23)
        return magnitude * scale, (exponent - self.min_exponent) << self.mantissa

    def _signed(self, v: Array, magnitude: Array) -> Array:
        magnitude = np.where(np.isnan(v), self.nan_code, magnitude)
        return (magnitude | np.signbit(v).astype(np.int32) << (self.bits - 1)).astype(np.uint16)

    def encode(self, v: Array) -> Array:
        """Codes of the nearest values, ties to even codes, saturating, signs kept."""
        v = np.asarray(v, np.float32)
        steps, base = self._steps(v)
        return self._signed(v, base + np.rint(steps).astype(np.int32))

    def encode_stochastic(self, v: Array, random: Array) -> Array:
        """Codes of the grid value below |v|, or of the next one where fraction + random reaches 2^16."""
        v = np.asarray(v, np.float32)
        steps, base = self._steps(v)
        below = np.floor(steps)
        fraction = np.floor((steps - below) * np.float32(65536)).astype(np.int32)
        up = fraction + random.astype(np.int32) >= 65536
        return self._signed(v, base + below.astype(np.int32) + up)


E4M3 = Format("e4m3", 8, 3, -6, 0x7E, 0x7F, lambda c: c.astype(np.uint8).view(E4M3_DTYPE), lambda d: d.view(np.uint8))
E2M1 = Format("e2m1", 4, 1, 0, 0x7, 0x7, pack_nibbles, unpack_nibbles)
E5M6 = Format("e5m6", 12, 6, -14, 0x7BF, 0x7BF, pack_12bit, unpack_12bit)
FORMATS = {f.name: f for f in (E4M3, E2M1, E5M6)}


def format_of(data: Array, special: str | None = None) -> Format:
    """The format of stored data by its dtype; 12-bit data only where it is named."""
    if special not in (None, "e5m6"):
        raise ValueError(f"x_special_fmt: expected None or 'e5m6', got {special!r}")
    by_dtype = {np.dtype(np.uint8): E5M6} if special else {E4M3_DTYPE: E4M3, np.dtype(np.int8): E2M1}
    if data.dtype not in by_dtype:
        raise TypeError(f"x: expected data of dtype {[str(d) for d in by_dtype]}, got {data.dtype}")
    return by_dtype[data.dtype]


# ------------------------------------------------------------------ stochastic rounding


def _finalize(h: Array) -> Array:
    """The 32-bit finalizer of MurmurHash3."""
    h = (h ^ h >> 16) * np.uint32(0x85EBCA6B)
    h = (h ^ h >> 13) * np.uint32(0xC2B2AE35)
    return h ^ h >> 16


def random_bits(v: Array, seed: int) -> Array:
    """Sixteen bits an element from its flat index modulo 2^32, its bit pattern and the seed."""
    index = np.arange(v.size, dtype=np.uint64).astype(np.uint32).reshape(v.shape)
    offset = np.uint32(seed * 0x9E3779B9 & 0xFFFFFFFF)
    return _finalize(_finalize(index + offset) ^ bits_of(v)) & np.uint32(0xFFFF)


def bf16_stochastic(v: Array, random: Array) -> Array:
    """bf16 by adding the random bits below its last place; NaN as in the nearest cast, else the sum could turn it into a number."""
    rounded = (bits_of(v) + random >> 16).astype(np.uint16)
    nearest = np.asarray(v, np.float32).astype(BF16_DTYPE)
    return np.where(np.isnan(v), nearest, rounded.view(BF16_DTYPE))


# ------------------------------------------------------------------ scale rules

# the smallest maximum of a block, by format and E4M3 scale; the last is not adjustable
CLAMPS = {
    ("e4m3", False): np.float32(1e-4),
    ("e4m3", True): np.float32(448 * 2.0**-9),
    ("e2m1", False): np.float32(6 * 2.0**-126),
    ("e2m1", True): np.float32(6 * 2.0**-9),
    ("e5m6", False): np.float32(1e-4),
}


class Scales(NamedTuple):
    """What is stored (fp32, or E4M3 bytes) and the fp32 factor of the input."""

    stored: Array
    inv: Array


def plain_scales(a: Array, fmt: Format) -> Scales:
    """The factor is a division of its own, not 1/sf."""
    return Scales(a / fmt.max, fmt.max / a)


def rounded_scales(a: Array, fmt: Format) -> Scales:
    """The smallest power of two that does not saturate. Maxima that are not finite give 2^128 (byte 255) and the factor 0."""
    exponent = np.minimum(1 + ((bits_of(a / fmt.max).astype(np.int64) - 1) >> 23), 255)
    return Scales(from_bits(exponent << 23), from_bits(np.maximum(254 - exponent, 0) << 23))


def e4m3_scales(a: Array, fmt: Format) -> Scales:
    """E4M3 of the plain scale, saturating."""
    stored = E4M3.store(E4M3.encode(a / fmt.max))
    return Scales(stored, inverse(stored))


def inverse(sf: Array) -> Array:
    """The factor that belongs to scales that are given."""
    return np.float32(1) / (E4M3.decode(E4M3.load(sf)) if sf.dtype == E4M3_DTYPE else sf.astype(np.float32))


def scales(amax: Array, fmt: Format, round_sf: bool, use_e4m3_sf: bool, amax_clamp: float | None = None) -> Scales:
    """Scales of blocks from their maxima by the rule of the flags."""
    if (fmt.name, use_e4m3_sf) not in CLAMPS:
        raise ValueError(f"use_e4m3_sf: expected False for {fmt.name}, got {use_e4m3_sf}")
    adjustable = amax_clamp is not None and fmt is not E5M6
    clamp = np.float32(amax_clamp) if adjustable else CLAMPS[fmt.name, use_e4m3_sf]
    rule = e4m3_scales if use_e4m3_sf else rounded_scales if round_sf else plain_scales
    return rule(np.maximum(amax, clamp), fmt)


# ------------------------------------------------------------------ layouts of scales


def exponent_bytes(sf: Array) -> Array:
    """The exponent fields of fp32 scales: their UE8M0 bytes. Sign and mantissa are ignored."""
    return (bits_of(sf) >> 23 & 0xFF).astype(np.uint8)


def decode_ue8m0(exponents: Array) -> Array:
    """fp32 powers of two; byte 0 is 2^-127 and byte 255 is NaN (OCP)."""
    bits = exponents.astype(np.uint32) << 23
    bits = np.where(exponents == 0, 0x00400000, bits)
    return from_bits(np.where(exponents == 255, 0x7FC00000, bits))


def pack_words(exponents: Array) -> Array:
    """Bytes (…, G) to int32 (…, ⌈G/4⌉), little-endian, zeros behind the last."""
    *rows, groups = exponents.shape
    padded = np.zeros((*rows, align(groups, 4)), np.uint8)
    padded[..., :groups] = exponents
    return padded.view("<i4")


def unpack_words(words: Array, groups: int) -> Array:
    """The first bytes (…, G) of int32 (…, ⌈G/4⌉)."""
    return np.ascontiguousarray(words).view(np.uint8)[..., :groups]


def sf_storage(sf: Array) -> Array:
    """Column-major storage (…, columns, R aligned to 16 bytes) of scales (…, R, columns), zeros behind the last row: JAX's orientation."""
    *batch, rows, columns = sf.shape
    storage = np.zeros((*batch, columns, align(rows, 16 // sf.itemsize)), sf.dtype)
    storage[..., :rows] = np.swapaxes(sf, -1, -2)
    return storage


def sf_logical(storage: Array, rows: int) -> Array:
    """Scales (…, R, columns) with strides (1, aligned R) from column-major storage: torch's orientation."""
    return np.swapaxes(storage, -1, -2)[..., :rows, :]


def lay_out(stored: Array, col_major: bool = False, packed: bool = False, token_packed: bool = False) -> Array:
    """Logical scales (R, G) to their public array; a column-major one is a view of its padded storage."""
    if packed and token_packed:
        sf = np.ascontiguousarray(pack_words(exponent_bytes(stored).T).T)
    elif packed:
        sf = pack_words(exponent_bytes(stored))
    else:
        sf = stored
    return sf_logical(sf_storage(sf), sf.shape[0]) if col_major else sf


def exponents_of(sf: Array, shape: tuple[int, int], token_packed: bool = False) -> Array:
    """UE8M0 bytes (R, G) of fp32 or packed scales of any layout."""
    if sf.dtype != np.int32:
        return exponent_bytes(sf)
    return unpack_words(sf.T, shape[0]).T if token_packed else unpack_words(sf, shape[1])


def read_scales(sf: Array, shape: tuple[int, int], token_packed: bool = False) -> Array:
    """fp32 scales (R, G) of any layout; strides do not matter here."""
    if sf.dtype == E4M3_DTYPE:
        return E4M3.decode(E4M3.load(sf))
    if sf.dtype == np.int32:
        return decode_ue8m0(exponents_of(sf, shape, token_packed))
    return sf.astype(np.float32)
