"""Casts without scales, element by element: `cast_elements`, `cast_stochastic`, `unpack_e2m1`, `pack_e2m1`.

All of them go through flat arrays: a thread takes V neighbouring elements at a time, 16 bytes of the wider side.
"""

from tk_core.bits import u32
from tk_core.errors import value_error
from tk_core.op import Env, Launch, declare
from tk_core.ops.mhc.common import thread
from tk_core.ops.quant import bits, stochastic
from tk_core.ops.quant.bits import F32, U32, bits_of
from tk_core.ops.quant.formats import E2M1, E4M3
from tk_core.ops.quant.layouts import E4M3_DTYPE
from tk_core.ops.quant.tiles import IN_BOUNDS

BF16 = "bfloat16"
DTYPE_OF = {"bf16": BF16, "fp32": F32, "e4m3": E4M3_DTYPE}
SIZE = {BF16: 2, F32: 4, E4M3_DTYPE: 1}
THREADS = 256
# vectors of a thread, all loaded before the first one is cast
UNROLL = 2


def widen(P, x, dtype: str):
    """An element of storage, fp32."""
    return E4M3.decode(P, P.Cast(U32, x)) if P.cpu and dtype == E4M3_DTYPE else P.to_f32(x, dtype)


def narrow(P, x, dtype: str):
    """fp32 as an element of storage, to the nearest."""
    return P.Cast("uint8", E4M3.encode(P, x)) if P.cpu and dtype == E4M3_DTYPE else P.from_f32(x, dtype)


def as_element(P, code, dtype: str):
    """Clean bits as an element of storage."""
    integer = P.Cast("uint8" if dtype == E4M3_DTYPE else "uint16", code)
    return integer if P.cpu else P.reinterpret(integer, dtype)


def vector_access(P, V: int):
    """Macros (load, store): V elements between a flat array of N and registers, one access but for what the end cuts."""

    @P.macro
    def load(registers, r, array, at, N):
        if at + V <= N:
            for v in P.vectorized(V):
                registers[r, v] = array[at + v]
        else:
            for v in P.serial(V):
                if at + v < N:
                    registers[r, v] = array[at + v]

    @P.macro
    def store(array, at, registers, N):
        if at + V <= N:
            for v in P.vectorized(V):
                array[at + v] = registers[v]
        else:
            for v in P.serial(V):
                if at + v < N:
                    array[at + v] = registers[v]

    return load, store


def flat(P, N, V: int):
    """Blocks, threads, and the first element of a vector of a thread."""
    if P.cpu:
        return P.ceildiv(N, V), 1, lambda b, r: P.Cast("int64", b) * V
    first = lambda b, r: ((P.Cast("int64", b) * UNROLL + r) * THREADS + thread(P)) * V  # noqa: E731
    return P.ceildiv(N, V * UNROLL * THREADS), UNROLL, first


def elements(P, x_dtype, y_dtype):
    """To the nearest."""
    N = P.dynamic("N", "int64")
    V = 64 if P.cpu else 16 // max(SIZE[x_dtype], SIZE[y_dtype])
    blocks, unroll, first = flat(P, N, V)
    load, store = vector_access(P, V)

    @P.prim_func
    def main(x: P.Tensor((N,), x_dtype), y: P.Tensor((N,), y_dtype)):
        with P.Kernel(blocks, threads=THREADS, prelude=bits.prelude(P)) as b:
            xs = P.alloc_local((unroll, V), P.storage(x_dtype))
            wide = P.alloc_local((V,), F32)
            ys = P.alloc_local((V,), P.storage(y_dtype))
            for r in P.unroll(unroll):
                load(xs, r, x, first(b, r), N)
            for r in P.unroll(unroll):
                for v in P.vectorized(V):
                    wide[v] = widen(P, xs[r, v], x_dtype)
                for v in P.vectorized(V):
                    ys[v] = narrow(P, wide[v], y_dtype)
                store(y, first(b, r), ys, N)

    return main


def elements_stochastic(P, x_dtype, y_dtype, has):
    """The random bits of an element depend on its flat index, its value and the seed."""
    N = P.dynamic("N", "int64")
    V = 16 // SIZE[x_dtype]
    blocks, unroll, first = flat(P, N, V)
    load, store = vector_access(P, V)
    from_memory = "seed" in has

    @P.prim_func
    def main(x: P.Tensor((N,), x_dtype), seed: P.Tensor((1,), U32), y: P.Tensor((N,), y_dtype), seed_value: P.int32):
        with P.Kernel(blocks, threads=THREADS, prelude=stochastic.prelude(P)) as b:
            xs = P.alloc_local((unroll, V), P.storage(x_dtype))
            wide = P.alloc_local((V,), F32)
            random = P.alloc_local((V,), U32)
            ys = P.alloc_local((V,), P.storage(y_dtype))
            chosen = P.alloc_local((1,), U32)
            if from_memory:
                chosen[0] = seed[0]
            else:
                chosen[0] = P.reinterpret(seed_value, U32)
            for r in P.unroll(unroll):
                load(xs, r, x, first(b, r), N)
            for r in P.unroll(unroll):
                for v in P.unroll(V):
                    wide[v] = widen(P, xs[r, v], x_dtype)
                for v in P.unroll(V):
                    index = P.Cast(U32, first(b, r) + v)
                    random[v] = stochastic.random_bits(P, index, chosen[0], bits_of(P, wide[v]))
                for v in P.unroll(V):
                    if y_dtype == BF16:
                        ys[v] = as_element(P, stochastic.bf16_stochastic(P, wide[v], random[v]), y_dtype)
                    else:
                        ys[v] = as_element(P, stochastic.encode_stochastic(P, E4M3, wide[v], random[v]), y_dtype)
                store(y, first(b, r), ys, N)

    return main


def unpack(P, x_dtype, y_dtype):
    """A byte is two elements, the first one low."""
    M, K, L = P.dynamic("M", "int64"), P.dynamic("K", "int64"), P.dynamic("L", "int64")
    V = 8
    N = M * K
    blocks, unroll, first = flat(P, 2 * N, V)
    load, _ = vector_access(P, V // 2)
    _, store = vector_access(P, V)

    @P.prim_func
    def main(x: P.Tensor((M, K), x_dtype), y: P.Tensor((M, L), y_dtype)):
        with P.Kernel(blocks, threads=THREADS, prelude=bits.prelude(P)) as b:
            x = P.view(x, (N,), x_dtype)
            y = P.view(y, (M * L,), P.storage(y_dtype))
            xs = P.alloc_local((unroll, V // 2), x_dtype)
            wide = P.alloc_local((V,), F32)
            ys = P.alloc_local((V,), P.storage(y_dtype))
            for r in P.unroll(unroll):
                load(xs, r, x, first(b, r) // 2, N)
            for r in P.unroll(unroll):
                for v in P.unroll(V):
                    byte = P.Cast(U32, P.reinterpret(xs[r, v // 2], "uint8"))
                    wide[v] = E2M1.decode(P, (byte >> P.Cast(U32, v % 2 * 4)) & u32(0xF))
                for v in P.vectorized(V):
                    ys[v] = narrow(P, wide[v], y_dtype)
                store(y, first(b, r), ys, 2 * N)

    return main


def pack(P, codes_dtype):
    """Two codes a byte, the first one low; bits above a code are dropped."""
    M, K, L = P.dynamic("M", "int64"), P.dynamic("K", "int64"), P.dynamic("L", "int64")
    V = 4
    N = M * K
    blocks, unroll, first = flat(P, N, V)
    load, _ = vector_access(P, 2 * V)
    _, store = vector_access(P, V)

    @P.prim_func
    def main(codes: P.Tensor((M, L), codes_dtype), x: P.Tensor((M, K), "int8")):
        with P.Kernel(blocks, threads=THREADS) as b:
            codes = P.view(codes, (M * L,), codes_dtype)
            x = P.view(x, (N,), "int8")
            cs = P.alloc_local((unroll, 2 * V), codes_dtype)
            ys = P.alloc_local((V,), "int8")
            for r in P.unroll(unroll):
                load(cs, r, codes, first(b, r) * 2, 2 * N)
            for r in P.unroll(unroll):
                for v in P.unroll(V):
                    low, high = P.Cast(U32, cs[r, 2 * v]) & u32(0xF), P.Cast(U32, cs[r, 2 * v + 1]) & u32(0xF)
                    ys[v] = P.Cast("int8", P.reinterpret(low | (high << u32(4)), "int32"))
                store(x, first(b, r), ys, N)

    return main


# ------------------------------------------------------------------ declarations


def check_choice(op: str, name: str, *choices: str):
    """A rule: the attribute is one of the choices, and tells the dtype of the result."""

    def check(env: Env) -> None:
        if env[name] not in choices:
            raise value_error(op, name, " or ".join(map(repr, choices)), repr(env[name]))
        env["y_dtype"] = DTYPE_OF[env[name]]

    return check


def check_stochastic(env: Env) -> None:
    check_choice("cast_stochastic", "to", "bf16", "e4m3")(env)
    if env["x_dtype"] == env["y_dtype"]:
        raise value_error("cast_stochastic", "to", "a dtype narrower than that of x", repr(env["to"]))


def check_pack(env: Env) -> None:
    if env["L"] % 2:
        raise value_error("pack_e2m1", "codes", "an even last axis", env["L"])
    env["K"] = env["L"] // 2


cast_elements = declare(
    "cast_elements",
    "quant",
    "x[...]:bf16|f32|e4m3 -> y[...]:y_dtype",
    [Launch(elements, "x -> y", key="x_dtype y_dtype", pass_configs=IN_BOUNDS)],
    attrs={"to": "bf16"},
    check=check_choice("cast_elements", "to", "bf16", "fp32", "e4m3"),
    straight_through=True,
    doc="""Elements in another dtype, rounded to the nearest, ties to even.

Args:
    x: [...] bf16, f32 or e4m3.

Attributes:
    to: "bf16", "fp32" or "e4m3".

Returns:
    [...] in that dtype.

Raises:
    TypeError: a dtype is another one.
    ValueError: `to` is another one.

Numerics:
    Bit-exact, NaN but for its payload. Casts to e4m3 saturate at 448, those to bf16 overflow to infinity.

Gradient:
    None.

Source:
    IEEE 754; OCP 8-bit Floating Point Specification 1.0, 2023.
""",
)

cast_stochastic = declare(
    "cast_stochastic",
    "quant",
    "x[N]:bf16|f32 seed?[1]:u32 -> y[N]:y_dtype",
    [Launch(elements_stochastic, "x seed -> y; seed_value", key="x_dtype y_dtype", pass_configs=IN_BOUNDS)],
    attrs={"to": "e4m3", "seed_value": 0},
    dynamic="seed_value",
    straight_through=True,
    check=check_stochastic,
    doc="""Elements in a narrower dtype, rounded up or down at random in proportion to the distances.

Args:
    x: [N] bf16 or f32.
    seed: [1] u32, a seed in memory; where absent, `seed_value` is the seed.

Attributes:
    to: "bf16" or "e4m3".
    seed_value: a seed, int32 bits.

Returns:
    [N] in that dtype.

Raises:
    TypeError: a dtype is another one.
    ValueError: `to` is another one, or no narrower dtype than that of x.

Numerics:
    Bit-exact: the random bits are a hash of the index, the value and the seed. Representable values stay; e4m3 saturates at 448.

Gradient:
    None.

Source:
    Stochastic rounding: Gupta et al., Deep Learning with Limited Numerical Precision, 2015.
""",
)

unpack_e2m1 = declare(
    "unpack_e2m1",
    "quant",
    "x[..., K]:i8|u8 -> y[..., 2 * K]:y_dtype",
    [Launch(unpack, "x -> y", key="x_dtype y_dtype", pass_configs=IN_BOUNDS)],
    attrs={"to": "fp32"},
    check=check_choice("unpack_e2m1", "to", "fp32", "bf16", "e4m3"),
    doc="""The values of packed E2M1 codes.

Args:
    x: [..., K] i8 or u8, two codes a byte, the first one low.

Attributes:
    to: "fp32", "bf16" or "e4m3".

Returns:
    [..., 2 K] in that dtype.

Raises:
    TypeError: a dtype is another one.
    ValueError: `to` is another one.

Numerics:
    Exact.

Gradient:
    None.

Source:
    OCP Microscaling Formats (MX) Specification 1.0, 2023.
""",
)

pack_e2m1 = declare(
    "pack_e2m1",
    "quant",
    "codes[..., L]:i8|u8|i32|i64 -> x[..., K]:i8",
    [Launch(pack, "codes -> x", key="codes_dtype", pass_configs=IN_BOUNDS)],
    check=check_pack,
    doc="""E2M1 codes, two a byte.

Args:
    codes: [..., L] integers 0 to 15; L even.

Returns:
    [..., L / 2] i8, the first of two codes low.

Raises:
    TypeError: a dtype is another one.
    ValueError: L is odd.

Numerics:
    Exact. Of other integers the four lowest bits count.

Gradient:
    None.

Source:
    OCP Microscaling Formats (MX) Specification 1.0, 2023.
""",
)
