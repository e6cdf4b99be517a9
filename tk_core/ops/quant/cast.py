"""`quantize`: codes and scales of a matrix in scaling blocks, and `fake_quant`: what is left of it after a cast and a cast back.

a = max(|x| of the block, clamp)        sf, inv: by the rule of the scale format, from a (scales.py)
data = Q(x * inv)                       of a quantized x with scales s: a from D(x) * s, data = Q(D(x) * (s * inv))

Every product is one fp32 operation, rounded once.
"""

from math import gcd

from tk_core.errors import value_error
from tk_core.op import Env, Launch, declare
from tk_core.ops.quant.bits import F32, U32
from tk_core.ops.quant.engine import as_stored, caster
from tk_core.ops.quant.formats import E2M1, E4M3, E5M6, FORMATS
from tk_core.ops.quant.geometry import geometry
from tk_core.ops.quant.layouts import E4M3_DTYPE, KINDS, sf_dtype, sf_shape
from tk_core.ops.quant.pieces import BF16, SOURCES, as_words
from tk_core.ops.quant.stochastic import prelude

DATA = {"e4m3": E4M3_DTYPE, "e2m1": "int8", "e5m6": "uint8"}


# ------------------------------------------------------------------ kernels


def shape_of(P, H, x_dtype, fmt, block_m, block_k, within=0, col_e4m3=False, vector=0, **shape):
    """The geometry of a cast; `within` is the width of input scaling blocks, the keywords behind are for tuning.

    A piece is what a load of 16 bytes brings, but whole groups of the format, and for half-byte codes whole blocks of 16.
    """
    if x_dtype == F32:
        best = {E4M3: 4, E2M1: 16, E5M6: 8}[fmt]
    else:
        best = {BF16: 16 if fmt is E2M1 else 8, E4M3_DTYPE: 16, "int8": 32}[x_dtype]
    if col_e4m3:
        # bytes of four rows are one word of a column, and threads of a warp below each other store neighbouring words
        shape = {"rows": 4, "deep": 4, "resident": 4} | shape
    vector = 64 if P.cpu else vector or best
    return geometry(P, H, block_m, block_k, gcd(vector, within or H), SOURCES[x_dtype].bits, **shape)


def quantize_kernel(
    P, C, H, x_dtype, x_sf_dtype, given_dtype, fmt, block_m, block_k, sf, sf_dtype, data_dtype, col,
    x_block_m, x_block_k, x_col, stochastic, has, **shape,
):  # fmt: skip
    """Every cast of a matrix: `has` tells of quantized input, given scales, a seed in memory, and what is wanted."""
    M, A, B = P.dynamic("M"), P.dynamic("A"), P.dynamic("B")
    form, kind = FORMATS[fmt], sf
    x_scale = (x_sf_dtype, x_block_m, x_block_k, x_col) if x_sf_dtype else None
    g = shape_of(P, H, x_dtype, form, block_m, block_k, x_block_k, col and kind == "e4m3", **shape)
    want_data, want_sf = "data" in has, "sf" in has
    body = caster(P, g, x_dtype, form, kind, col, x_scale, given_dtype, stochastic, False, want_data, want_sf)
    R = P.ceildiv(M, block_m)

    @P.prim_func
    def main(
        x: P.RowTensor((M, C), "x_row", x_dtype),
        x_sf: P.RowTensor((A, B), "x_sf_row", x_sf_dtype or F32),
        given: P.RowTensor((R, g.blocks), "given_row", given_dtype or F32),
        seed: P.Tensor((1,), U32),
        data: P.Tensor((M, H * (form.bits + 1) // 8), data_dtype),
        sf: P.Tensor(sf_shape(kind, col, R, g.blocks), sf_dtype),
        amax_clamp: P.float32,
        seed_value: P.int32,
    ):
        with P.Kernel(g.grid(P, M), threads=g.threads, prelude=prelude(P)) as b:
            x, data, sf = as_words(P, x, x_dtype), as_words(P, data, data_dtype), as_stored(P, g, sf, kind)
            draw = seed[0] if "seed" in has else P.reinterpret(seed_value, U32)
            body(b, M, x, x_sf, given, draw, data, sf, amax_clamp)

    return main


def quantize_rows_kernel(P, C, H, x_dtype, given_dtype, fmt, block_k, sf, sf_dtype, data_dtype, has, **shape):
    """The cast of rows that were not quantized, one or more scales a row."""
    M = P.dynamic("M")
    form, kind = FORMATS[fmt], sf
    g = shape_of(P, H, x_dtype, form, 1, block_k, **shape)
    body = caster(P, g, x_dtype, form, kind, given=given_dtype, want_data="data" in has, want_sf="sf" in has)

    @P.prim_func
    def main(
        x: P.RowTensor((M, C), "x_row", x_dtype),
        given: P.RowTensor((M, g.blocks), "given_row", given_dtype or F32),
        data: P.Tensor((M, H * (form.bits + 1) // 8), data_dtype),
        sf: P.Tensor(sf_shape(kind, False, M, g.blocks), sf_dtype),
        amax_clamp: P.float32,
    ):
        with P.Kernel(g.grid(P, M), threads=g.threads, prelude=prelude(P)) as b:
            x, data, sf = as_words(P, x, x_dtype), as_words(P, data, data_dtype), as_stored(P, g, sf, kind)
            body(b, M, x, None, given, None, data, sf, amax_clamp)

    return main


def fake_quant_kernel(P, H, x_dtype, fmt, block_k, sf, **shape):
    """The cast of rows whose codes are decoded again; y may be the memory of x."""
    M = P.dynamic("M")
    form = FORMATS[fmt]
    g = shape_of(P, H, x_dtype, form, 1, block_k, **shape)
    body = caster(P, g, x_dtype, form, sf, back=True, want_sf=False)

    @P.prim_func
    def main(x: P.RowTensor((M, H), "x_row", x_dtype), y: P.RowTensor((M, H), "y_row", x_dtype), amax_clamp: P.float32):
        with P.Kernel(g.grid(P, M), threads=g.threads, prelude=prelude(P)) as b:
            x, y = as_words(P, x, x_dtype), as_words(P, y, x_dtype)
            body(b, M, x, None, None, None, y, None, amax_clamp)

    return main


# ------------------------------------------------------------------ declarations


def check(name: str):
    """The rule of `quantize` and of its form by rows: formats, blocks and sizes that the declaration cannot say."""

    def run(env: Env) -> None:
        fmt, kind, bm, bk, col = env["fmt"], env["sf"], env.get("block_m", 1), env["block_k"], env.get("col", False)
        H = env["H"] = env["C"] * (2 if env["x_dtype"] == "int8" else 1)
        M = env.get("M", env["rows"])
        judge(name, env, H, bk)
        if bm not in (1, 32, 64, 128) or (bm > 1 and bk > 128):
            raise value_error(name, "block_m", "1, or 32, 64 or 128 with block_k up to 128", f"{bm} with block_k = {bk}")
        if env.get("stochastic") and fmt == "e5m6":
            raise value_error(name, "stochastic", "False for e5m6", True)
        R, G = -(-M // bm), -(-H // bk)
        if (env.get("R", R), env.get("G", G)) != (R, G):
            raise value_error(name, "given", f"shape {(R, G)}", (env["R"], env["G"]))
        quantized = env["x_dtype"] in (E4M3_DTYPE, "int8")
        if quantized:
            check_input(name, env, M, H)
        elif env.get("x_sf_dtype"):
            raise value_error(name, "x_sf", "None for an input that is not quantized", "an array")
        env["D"], env["data_dtype"] = H * (FORMATS[fmt].bits + 1) // 8, DATA[fmt]
        (env["S"], env["W"]), env["sf_dtype"] = sf_shape(kind, col, R, G), sf_dtype(kind)

    return run


def judge(name: str, env: Env, H: int, block_k: int) -> None:
    """What all casts take: a format, a scale kind, rows of 64 elements (e5m6: 8), blocks of 16 to 128 or of a whole row."""
    if env["fmt"] not in FORMATS:
        raise value_error(name, "fmt", " or ".join(map(repr, FORMATS)), env["fmt"])
    if env["sf"] not in KINDS:
        raise value_error(name, "sf", " or ".join(map(repr, KINDS)), env["sf"])
    unit = 8 if env["fmt"] == "e5m6" else 64
    if H % unit or not H:
        raise value_error(name, "x", f"rows of a positive multiple of {unit} elements", H)
    if block_k not in (16, 32, 64, 128, H):
        raise value_error(name, "block_k", f"16, 32, 64, 128 or {H}", block_k)
    if env["fmt"] == "e5m6" and (block_k != H or env["sf"] == "e4m3"):
        raise value_error(name, "fmt", "another one than e5m6 for blocks of a part of a row, and for E4M3 scales", (block_k, env["sf"]))


def check_input(name: str, env: Env, M: int, H: int) -> None:
    """Scales of quantized input must have the storage of their layout; columns of a column-major one may be longer."""
    dtype, bm, bk, col = env["x_sf_dtype"], env["x_block_m"], env["x_block_k"], env["x_col"]
    if not dtype:
        raise value_error(name, "x_sf", "scales of the quantized input", None)
    if bm < 1 or bk < 16 or (bk % 16 and bk != H):
        raise value_error(name, "x_block_k", "an input block of at least one row and a multiple of 16 columns", (bm, bk))
    R, G = sf_shape("packed" if dtype == "int32" else "plain", False, -(-M // bm), -(-H // bk))
    got = (env["A"], env["B"])
    if (got[0] != G or got[1] < R) if col else got != (R, G):
        raise value_error(name, "x_sf", f"shape {(G, f'>= {R}') if col else (R, G)}", got)


def check_fake_quant(env: Env) -> None:
    judge("fake_quant", env, env["H"], env["block_k"])
    if env["sf"] == "packed" or env["fmt"] == "e5m6":
        raise value_error("fake_quant", "sf", "scales that are not packed, and a format of at most 8 bits", (env["sf"], env["fmt"]))


QUANTIZE_DOC = """Cast to e4m3, e2m1 or e5m6 with one scale a block of block_m rows and block_k columns.

a = max(largest magnitude of the block, amax_clamp); sf = a / MAX or a rounding of it, data = Q(x * inv) to the nearest, ties to even codes.

Args:
    x: [M, C] bf16 or f32; or e4m3, or int8 with two e2m1 codes a byte, with x_sf.
    x_sf: scales of quantized x in storage orientation, blocks (x_block_m, x_block_k), column-major if x_col.
    given: [R, G] scales to use instead; only data is made then.
    seed: [1] uint32 for stochastic rounding, else seed_value.
    fmt: element format; e5m6 takes block_k = H.
    sf: 'plain' (fp32), 'round' (powers of two in fp32), 'packed' (their exponents, four a word), 'e4m3'.
    col: scales column-major, rows padded to 16 bytes with zeros.

Returns:
    data: [M, D], and sf: [S, W] in storage orientation.

Numerics:
    fp32, every operation rounded once; quantized x: data = Q(D(x) * (x_sf * inv)), largest magnitude of D(x) * x_sf.

Gradient:
    none.

Source:
    OCP Microscaling Formats 1.0 for block scales of powers of two.
"""

QUANTIZE_ROWS_DOC = """Cast rows to e4m3, e2m1 or e5m6 with one scale a block of block_k columns: `quantize` of any number of leading axes.

Args:
    x: [..., C] bf16 or f32.
    given: [..., G] scales to use instead; only data is made then.
    fmt: element format; e5m6 takes block_k = C.
    sf: 'plain' (fp32), 'round' (powers of two in fp32), 'packed' (their exponents, four a word), 'e4m3'.

Returns:
    data: [..., D], and sf: [..., W], row-major.

Numerics:
    fp32, every operation rounded once.

Gradient:
    none.

Source:
    OCP Microscaling Formats 1.0 for block scales of powers of two.
"""

FAKE_QUANT_DOC = """What a cast to e4m3 or e2m1 and back leaves of x: y = D(Q(x * inv)) * sf with one scale a block of block_k columns.

Args:
    x: [..., H] bf16 or f32.
    fmt: element format.
    sf: 'plain' (fp32), 'round' (powers of two), 'e4m3': the rule of the scale.

Returns:
    [..., H], the dtype of x.

Numerics:
    fp32, every operation rounded once, the result once more to the dtype of x. Equal to a cast and a cast back, bit for bit.

Gradient:
    straight through: d_x = d_y.

Source:
    OCP Microscaling Formats 1.0 for block scales of powers of two.
"""

ATTRS = {"fmt": "e4m3", "block_m": 1, "block_k": 128, "sf": "plain", "col": False, "x_block_m": 0, "x_block_k": 0, "x_col": False}
KEY = "C H x_dtype x_sf_dtype given_dtype fmt block_m block_k sf sf_dtype data_dtype col x_block_m x_block_k x_col stochastic"
ARGS = "x x_sf given seed -> data sf; amax_clamp seed_value"

quantize = declare(
    "quantize",
    "quant",
    "x[M, C]:bf16|f32|e4m3|i8 x_sf?[A, B]:f32|i32|e4m3 given?[R, G]:f32|e4m3 seed?[1]:u32 -> data?[M, D]:data_dtype sf?[S, W]:sf_dtype",
    [Launch(quantize_kernel, ARGS, key=KEY, name="cast")],
    attrs={**ATTRS, "stochastic": False, "seed_value": 0, "amax_clamp": 1e-4},
    check=check("quantize"),
    strided="x",
    loose="x_sf given",
    dynamic="seed_value",
    doc=QUANTIZE_DOC,
)

quantize_rows = declare(
    "quantize_rows",
    "quant",
    "x[..., C]:bf16|f32 given?[..., G]:f32|e4m3 -> data?[..., D]:data_dtype sf?[..., W]:sf_dtype",
    [Launch(quantize_rows_kernel, "x given -> data sf; amax_clamp", key="C H x_dtype given_dtype fmt block_k sf sf_dtype data_dtype")],
    attrs={"fmt": "e4m3", "block_k": 128, "sf": "plain", "amax_clamp": 1e-4},
    check=check("quantize_rows"),
    strided="x",
    loose="given",
    doc=QUANTIZE_ROWS_DOC,
)

fake_quant = declare(
    "fake_quant",
    "quant",
    "x[..., H]:bf16|f32 -> y[..., H]:x_dtype",
    [Launch(fake_quant_kernel, "x -> y; amax_clamp", key="H x_dtype fmt block_k sf")],
    attrs={"fmt": "e4m3", "block_k": 128, "sf": "plain", "amax_clamp": 1e-4},
    check=check_fake_quant,
    strided="x y",
    straight_through=True,
    doc=FAKE_QUANT_DOC,
)
