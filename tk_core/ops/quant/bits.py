"""Bits of numbers in kernels, and the CUDA instructions that TileLang has no name for.

Nothing here imports TileLang before a kernel is built: declarations are read where there is none.
"""

from tk_core.bits import f32_bits, u32

F32 = "float32"
U32 = "uint32"
U64 = "uint64"


def bits_of(P, x):
    """The bit pattern of an fp32 value."""
    return P.reinterpret(x, U32)


def float_of(P, u):
    """The fp32 value of a bit pattern."""
    return P.reinterpret(u, F32)


def constant(P, value: float):
    """An fp32 constant that the simplifier does not see: it turns a division by a constant into a multiplication."""
    return float_of(P, u32(f32_bits(value)))


def divide(P, a, b):
    """a / b to the nearest, subnormals included."""
    return a / b if P.cpu else P.ieee_fdiv(a, b)


def bit_select(P, mask: int, a, b):
    """The bits of a where the mask has ones, those of b elsewhere."""
    # one instruction on CUDA, but left alone nvcc makes two of it wherever it knows some bits of b
    return P.call_pure_extern(U32, "tk_select", u32(mask), a, b) if P.sm else ((a ^ b) & u32(mask)) ^ b


def byte_permute(P, a, b, selector):
    """CUDA only. Byte i of the result is byte (nibble i of the selector, mod 8) of b:a, or its sign eight times if bit 3 is set."""
    return P.call_pure_extern(U32, "tk_prmt", a, b, selector)


def amax_bf16(P, pairs):
    """Largest magnitude of the bf16 in some words, two to a word, as fp32."""
    if not P.sm:
        halves = [float_of(P, h) for p in pairs for h in (p << u32(16), p & u32(0xFFFF0000))]
        top = P.abs(halves[0])
        for h in halves[1:]:
            top = P.max(top, P.abs(h))
        return top
    top = pairs[0] & u32(0x7FFF7FFF)
    for pair in pairs[1:]:
        top = absmax_bf16x2(P, top, pair)
    return P.max(float_of(P, top << u32(16)), float_of(P, top & u32(0xFFFF0000)))


def absmax_bf16x2(P, top, pair):
    """CUDA only. The larger of two bf16, no sign set, and the magnitudes of two others."""
    return P.call_pure_extern(U32, "tk_absmax_bf16x2", top, pair)


def has_e4m3(P) -> bool:
    """Whether the target converts E4M3 in hardware."""
    return P.sm >= 89


def store_words(P, buffer, index, words):
    """CUDA only. Neighbouring words, a power of two of at most four, in one store: nvcc takes some vector stores apart."""
    return P.call_extern("handle", f"tk_store{len(words)}", P.address_of(buffer[index]), *words)


# ------------------------------------------------------------------ instructions that TileLang has no name for


# prmt itself: __byte_perm does not promise to replicate signs
_PRELUDE = r"""
static __device__ __forceinline__ unsigned tk_select(unsigned mask, unsigned a, unsigned b) {
  unsigned r;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(r) : "r"(mask), "r"(a), "r"(b));
  return r;
}
static __device__ __forceinline__ unsigned tk_absmax_bf16x2(unsigned top, unsigned x) {
  unsigned r;
  asm("{ .reg .b32 a; abs.bf16x2 a, %2; max.bf16x2 %0, %1, a; }" : "=r"(r) : "r"(top), "r"(x));
  return r;
}
static __device__ __forceinline__ void tk_store1(const void* p, unsigned a) {
  *(unsigned*)p = a;
}
static __device__ __forceinline__ void tk_store2(const void* p, unsigned a, unsigned b) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(a), "r"(b));
}
static __device__ __forceinline__ void tk_store4(const void* p, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(a), "r"(b), "r"(c), "r"(d));
}
static __device__ __forceinline__ unsigned tk_prmt(unsigned a, unsigned b, unsigned selector) {
  unsigned r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}
"""

_PRELUDE_89 = r"""
static __device__ __forceinline__ unsigned tk_e4m3x4(float a, float b, float c, float d) {
  unsigned r;
  asm("{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; mov.b32 %0, {l, h}; }"
      : "=r"(r) : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}
// of two in a word: the low or the high one, which the instructions select for nothing
static __device__ __forceinline__ unsigned tk_e4m3x2_half(unsigned codes) {
  unsigned r;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, l; }" : "=r"(r) : "r"(codes));
  return r;
}
static __device__ __forceinline__ unsigned tk_e4m3x2_half_high(unsigned codes) {
  unsigned r;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, h; }" : "=r"(r) : "r"(codes));
  return r;
}
static __device__ __forceinline__ float tk_half_f32(unsigned halves) {
  float r;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(r) : "r"(halves));
  return r;
}
static __device__ __forceinline__ float tk_half_f32_high(unsigned halves) {
  float r;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }" : "=f"(r) : "r"(halves));
  return r;
}
"""

# `Format.rounded` on two bf16 at a time: 8 bits of precision, so the addend is 2**(e + 6), and 3 = 6 steps clear the constant.
_PRELUDE_90 = r"""
static __device__ __forceinline__ unsigned tk_e2m1x2(unsigned x, unsigned inverse) {
  unsigned v, t, m;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(x), "r"(inverse));
  asm("abs.bf16x2 %0, %0;" : "+r"(v));
  asm("min.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(v), "r"(0x40C040C0u));
  asm("max.bf16x2 %0, %1, %2;" : "=r"(m) : "r"(v & 0x7F807F80u), "r"(0x3F803F80u));
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(t) : "r"(m), "r"(0x42864286u), "r"(v));
  return (t + (t >> 6)) & 0x00070007u;
}
static __device__ __forceinline__ unsigned tk_e2m1x8_bf16(unsigned a, unsigned b, unsigned c, unsigned d, unsigned inverse) {
  // elements i and i + 4 share a word, so that nibble i of both halves is shifted by the same amount
  const unsigned p = __byte_perm(a, c, 0x5410), q = __byte_perm(a, c, 0x7632);
  const unsigned r = __byte_perm(b, d, 0x5410), s = __byte_perm(b, d, 0x7632);
  const unsigned pq = tk_e2m1x2(p, inverse) + (tk_e2m1x2(q, inverse) << 4);
  const unsigned rs = tk_e2m1x2(r, inverse) + (tk_e2m1x2(s, inverse) << 4);
  return pq + (rs << 8) | ((p >> 12) & 0x00080008u) | ((q >> 8) & 0x00800080u) | ((r >> 4) & 0x08000800u) | (s & 0x80008000u);
}
"""


def prelude(P) -> str | None:
    """Device functions that the kernels of a target call; None where there are none."""
    if not P.sm:
        return None
    return _PRELUDE + (_PRELUDE_89 if P.sm >= 89 else "") + (_PRELUDE_90 if P.sm >= 90 else "")
