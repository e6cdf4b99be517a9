"""Element formats and scale formats of the quantization casts: the device-side building blocks of every cast kernel.

A format is one small class. `encode` and `decode` take and give one element; `encode_by_definition` and
`decode_by_definition` say bit by bit what they must be, and the tests hold them against each other. `pack` and `unpack`
take a whole group of elements to and from 32-bit words in memory order, which is where a target's own instructions pay.

Codes are uint32 expressions, the code in the low bits. Values are fp32 expressions. An expression given here appears
several times in the result: pass loads from registers and plain arithmetic, which compilers merge, never a random draw.

Kernels that use any of it open with `P.Kernel(..., prelude=prelude(P))`, which defines the few CUDA instructions that
TileLang has no name for. A value must not be a constant: the C code generator reads bits through an address.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from tk_core.bits import f32_bits, select, u32
from tk_core.ops.quant.bits import F32, U32, U64, bit_select, bits_of, byte_permute, constant, float_of, has_e4m3

# ------------------------------------------------------------------ element formats


@dataclass(frozen=True)
class Format(ABC):
    """Sign, exponent and mantissa bits with subnormals. `group` elements fill `words` 32-bit words without a gap."""

    name: str
    ebits: int
    mbits: int
    max: float
    nan: int
    group: int
    words: int
    # smallest amax of a block that is scaled in fp32 or UE8M0, by default
    clamp: float

    @property
    def bias(self) -> int:
        return (1 << (self.ebits - 1)) - 1

    @property
    def bits(self) -> int:
        """Of a code, without its sign."""
        return self.ebits + self.mbits

    @property
    def min_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def step(self) -> float:
        """Smallest positive number, the distance of subnormals."""
        return 2.0 ** (1 - self.bias - self.mbits)

    @property
    def clamp_e4m3(self) -> float:
        """Smallest amax of a block whose scale is E4M3, by default: its scale is the smallest positive one."""
        return self.max * 2.0**-9

    # ---- the definition

    def encode_by_definition(self, P, x):
        """Nearest code, ties to the even one; beyond `max` it is `max`; the sign stays, also of zero; NaN has one code."""
        shift = 23 - self.mbits
        u = bits_of(P, x)
        magnitude = float_of(P, u & u32(0x7FFFFFFF))
        a = select(magnitude < constant(P, self.max), magnitude, constant(P, self.max))
        v = bits_of(P, a)
        # normal numbers: round the mantissa in place, then rebias the exponent
        rebias = u32((127 - self.bias) << self.mbits)
        normal = ((v + u32((1 << (shift - 1)) - 1) + ((v >> u32(shift)) & u32(1))) >> u32(shift)) - rebias
        # subnormal numbers: a sum whose last place is one step rounds to a multiple of it
        magic = self.step * 2.0**23
        subnormal = bits_of(P, a + constant(P, magic)) - u32(f32_bits(magic))
        code = select(a < constant(P, self.min_normal), subnormal, normal)
        # comparisons are of floats: the simplifier turns those of masked integers into divisions
        return select(P.isnan(x), u32(self.nan), code | ((u >> u32(31)) << u32(self.bits)))

    def decode_by_definition(self, P, code):
        """Exact. Does not rely on fp32 subnormals, which a process may flush and which are slow on x86."""
        magnitude = code & u32((1 << self.bits) - 1)
        normal = float_of(P, (magnitude << u32(23 - self.mbits)) + u32((127 - self.bias) << 23))
        subnormal = P.Cast(F32, P.Cast("int32", magnitude)) * constant(P, self.step)
        # read as a subnormal, a normal code is at least the smallest normal number
        value = select(subnormal < constant(P, self.min_normal), subnormal, normal)
        return float_of(P, bits_of(P, value) | ((code >> u32(self.bits)) << u32(31)))

    # ---- the same in few instructions

    def rounded(self, P, x, clean: int = 0):
        """A word whose low `bits` bits are the code of |x|, NaN as `max`; with `clean`, so many low bits are nothing but the code.

        Let 2**e be the binade of |x|, at least the one of the smallest normal number. In 2**(e + 23 - mbits) + |x| the last
        place is the step of the format there, so the sum rounds as it should: its mantissa is k, |x| in steps. The code
        is k + ((e - emin) << mbits), and the second term is the sum's own exponent field moved down, up to a constant. An even
        number of further steps in the addend takes the constant to zero modulo 2**clean and leaves ties where they are.
        """
        clean = clean or self.bits
        shift = 23 - self.mbits
        exponent = (127 + 1 - self.bias + shift) << self.mbits
        addend = 2.0**shift + (-exponent % (1 << clean)) * 2.0**-self.mbits
        a = P.min(P.abs(x), P.f32(self.max))
        binade = P.max(float_of(P, bits_of(P, a) & u32(0x7F800000)), P.f32(self.min_normal))
        # the product is exact, contracted into an FMA or not
        t = bits_of(P, a + binade * P.f32(addend))
        return t + (t >> u32(shift))

    def encode(self, P, x):
        """As `encode_by_definition`, but NaN may become `max` in formats that have no NaN."""
        # the low bits of the shifted word are replaced, its highest one is the sign
        return bit_select(P, (1 << self.bits) - 1, self.rounded(P, x), bits_of(P, x) >> u32(31 - self.bits))

    def decode(self, P, code):
        """As `decode_by_definition`."""
        if not P.sm:
            return self.decode_by_definition(P, code)
        return self.decode_top(P, code << u32(31 - self.bits))

    def decode_top(self, P, u):
        """Decodes the highest bits of a word. Relies on fp32 subnormals, so not for C."""
        # exponent and mantissa in their places make a number that is too small by a power of two, subnormals included
        mask = 0x80000000 | ((1 << self.bits) - 1) << (23 - self.mbits)
        field = P.reinterpret(P.reinterpret(u, "int32") >> (8 - self.ebits), U32) & u32(mask)
        return float_of(P, field) * P.f32(2.0 ** (127 - self.bias))

    # ---- groups

    @abstractmethod
    def join(self, codes):
        """`group` clean codes -> `words` words."""

    def pack(self, P, values):
        """`group` values -> `words` words."""
        return self.join([self.encode(P, v) for v in values])

    @abstractmethod
    def unpack(self, P, words):
        """`words` words -> `group` values."""


class _E4M3(Format):
    """One byte. The hardware converts from sm_89 on, two elements an instruction."""

    def encode(self, P, x):
        if has_e4m3(P):
            return self.pack(P, [x] * 4)[0] & u32(0xFF)
        return select(P.isnan(x), u32(self.nan), super().encode(P, x))

    def decode_by_definition(self, P, code):
        value = super().decode_by_definition(P, code)
        return select(P.Cast("int32", code & u32(0x7F)) == self.nan, constant(P, float("nan")), value)

    def decode(self, P, code):
        if has_e4m3(P):
            return self.unpack(P, [code])[0]
        value = Format.decode(self, P, code)
        return select(P.Cast("int32", code & u32(0x7F)) == self.nan, constant(P, float("nan")), value) if P.sm else value

    def join(self, codes):
        return [join_bytes(codes)]

    def pack(self, P, values):
        return [P.call_pure_extern(U32, "tk_e4m3x4", *values)] if has_e4m3(P) else super().pack(P, values)

    def unpack(self, P, words):
        if not has_e4m3(P):
            return [self.decode(P, (words[0] >> u32(8 * i)) & u32(0xFF)) for i in range(4)]
        pairs = [P.call_pure_extern(U32, "tk_e4m3x2_half" + high, words[0]) for high in ("", "_high")]
        return [P.call_pure_extern(F32, "tk_half_f32" + high, pair) for pair in pairs for high in ("", "_high")]


class _E2M1(Format):
    """Half a byte, the first of two elements low. No hardware conversion before sm_100: table lookups by byte permutation."""

    def join(self, codes):
        return [join_bytes([codes[i] | (codes[i + 1] << u32(4)) for i in range(0, 8, 2)])]

    def pack(self, P, values):
        if not P.sm:
            return super().pack(P, values)
        # four clean codes are added up at their places, what lies above is cut off by the permutation
        half = []
        for start in (0, 4):
            sum4 = self.rounded(P, values[start + 3], clean=16)
            for i in (2, 1, 0):
                sum4 = (sum4 << u32(4)) + self.rounded(P, values[start + i], clean=16)
            half.append(sum4)
        # signs: a funnel shift an element collects the four highest bits of each value
        signs = bits_of(P, values[7]) >> u32(28)
        for i in range(6, -1, -1):
            signs = (signs << u32(4)) | (bits_of(P, values[i]) >> u32(28))
        return [bit_select(P, 0x77777777, byte_permute(P, half[0], half[1], u32(0x5410)), signs)]

    def unpack(self, P, words):
        if not P.sm:
            return [self.decode(P, (words[0] >> u32(4 * i)) & u32(0xF)) for i in range(8)]
        values = []
        for pair in self.unpack_bf16(P, words[0]):
            values += [float_of(P, pair << u32(16)), float_of(P, pair & u32(0xFFFF0000))]
        return values

    def lookup(self, P, word, low, high):
        """Eight codes -> eight bytes in two words. Byte i of high:low is the one of magnitude i, without its highest bit,
        which becomes the sign: two table reads and three instructions for the signs."""
        if not P.sm:
            table = P.Cast(U64, low) | (P.Cast(U64, high) << P.Cast(U64, u32(32)))
            read = [_table_byte(P, table, (word >> u32(4 * i)) & u32(0xF)) for i in range(8)]
            return [join_bytes(read[:4]), join_bytes(read[4:])]
        # sign replication of the table 80 gives FF for a set sign and 80 for a clear one: bit 6 is the sign
        words = []
        for i in range(2):
            part = word >> u32(16 * i) if i else word
            signs = byte_permute(P, u32(0x80808080), u32(0x80808080), part) << u32(1)
            words.append(bit_select(P, 0x80808080, signs, byte_permute(P, low, high, part & u32(0x7777))))
        return words

    def unpack_bf16(self, P, word):
        """Eight codes -> eight bf16 in four words, exact, the first of two elements low."""
        if not P.sm:
            top = [bits_of(P, v) >> u32(16) for v in self.unpack(P, [word])]
            return [top[i] | (top[i + 1] << u32(16)) for i in range(0, 8, 2)]
        upper = self.lookup(P, word, u32(0x3F3F3F00), u32(0x40404040))
        selectors = [word & u32(0x7777), (word >> u32(16)) & u32(0x7777)]
        lower = [byte_permute(P, u32(0xC0800000), u32(0xC0804000), s) for s in selectors]
        return [byte_permute(P, lower[i // 2], upper[i // 2], u32((0x5140, 0x7362)[i % 2])) for i in range(4)]

    def pack_bf16(self, P, pairs, inverse):
        """Eight bf16 in four words, times a power of two that the word `inverse` holds as bf16 in both halves -> [one word].

        The product is exact, so two elements at a time can be multiplied and rounded in bf16.
        """
        if P.sm >= 90:
            return [P.call_pure_extern(U32, "tk_e2m1x8_bf16", *pairs, inverse)]
        factor = float_of(P, inverse << u32(16))
        halves = [float_of(P, h) for p in pairs for h in (p << u32(16), p & u32(0xFFFF0000))]
        return self.pack(P, [h * factor for h in halves])

    def e4m3_table(self, P, factor):
        """What `lookup` needs to turn codes into E4M3 codes of the value times a positive factor: (low, high)."""
        products = [P.mul(P.f32(m), factor) for m in (0.5, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
        # the first one stands in for zero: a constant has no address, which is how C reads its bits
        return E4M3.pack(P, products[:4])[0] & u32(0xFFFFFF00), E4M3.pack(P, products[4:])[0]


class _E5M6(Format):
    """Twelve bits: the upper ones of an fp16. Eight codes are a string of 96 bits, cut into words, the most significant first."""

    def join(self, codes):
        h = codes
        # sums, not unions: a shift and an addition are one instruction on CUDA
        return [
            (h[0] << u32(20)) + ((h[1] << u32(8)) + (h[2] >> u32(4))),
            (h[2] << u32(28)) + ((h[3] << u32(16)) + ((h[4] << u32(4)) + (h[5] >> u32(8)))),
            (h[5] << u32(24)) + ((h[6] << u32(12)) + h[7]),
        ]

    def unpack(self, P, words):
        if P.sm:
            return [self.decode_top(P, top) for top in self.tops(words)]
        return [self.decode(P, top >> u32(20)) for top in self.tops(words)]

    def unpack_half(self, P, words):
        """As `unpack`, but exponent 31, which `pack` never writes, is what it is in an fp16: infinity or NaN."""
        if has_e4m3(P):
            return [P.call_pure_extern(F32, "tk_half_f32_high", top & u32(0xFFF00000)) for top in self.tops(words)]
        values = self.unpack(P, words)
        beyond = [select(P.abs(v) < constant(P, 65537.0), v * constant(P, float("inf")), constant(P, float("nan"))) for v in values]
        return [select(P.abs(v) < constant(P, 65536.0), v, special) for v, special in zip(values, beyond, strict=True)]

    def tops(self, words):
        """The codes of a group as the highest bits of words; what is below them is left over."""
        a, b, c = words
        joined = [(a << u32(24)) | (b >> u32(8)), (b << u32(28)) | (c >> u32(4))]
        return [a, a << u32(12), joined[0], b << u32(4), b << u32(16), joined[1], c << u32(8), c << u32(20)]


def _table_byte(P, table, code):
    """The byte that a table of eight has for the magnitude of an E2M1 code, with its sign."""
    byte = P.Cast(U32, table >> P.Cast(U64, (code & u32(7)) * u32(8))) & u32(0x7F)
    return byte | ((code >> u32(3)) << u32(7))


def join_bytes(b):
    """Four clean bytes as a word, the first one low."""
    return b[0] | (b[1] << u32(8)) | (b[2] << u32(16)) | (b[3] << u32(24))


E4M3 = _E4M3("e4m3", 4, 3, 448.0, 0x7F, group=4, words=1, clamp=1e-4)
E2M1 = _E2M1("e2m1", 2, 1, 6.0, 0x7, group=8, words=1, clamp=6.0 * 2.0**-126)
E5M6 = _E5M6("e5m6", 5, 6, 65024.0, 0x7BF, group=8, words=3, clamp=1e-4)

FORMATS = {f.name: f for f in (E4M3, E2M1, E5M6)}
