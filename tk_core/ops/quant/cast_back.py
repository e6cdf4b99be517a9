"""`dequantize`: values from quantized data and its scales.

y[m, k] = D(x[m, k]) * sf[m // block_m, k // block_k] in fp32, rounded once more where y is bf16.
"""

from tk_core.bits import u32
from tk_core.errors import value_error
from tk_core.op import Env, Launch, declare
from tk_core.ops.quant.bits import F32, U32, U64, prelude
from tk_core.ops.quant.formats import E2M1, E4M3, E5M6
from tk_core.ops.quant.layouts import PACK, read_scale
from tk_core.ops.quant.tiles import IN_BOUNDS, Tiles

BF16 = "bfloat16"
FORMAT_OF = {"float8_e4m3fn": E4M3, "int8": E2M1, "uint8": E5M6}
OUT = {"bf16": BF16, "fp32": F32}


class Codes:
    """How a thread reads V neighbouring codes: `count` integers, `each` of them for a group, and what leads from them to values.

    A vector of fp32 may be half of a group of the format.
    """

    def __init__(self, fmt, V: int):
        half = fmt.group > V
        self.fmt, self.group = fmt, min(V, fmt.group)
        self.shared = half and fmt is E5M6
        self.bits = 16 if half and fmt is E2M1 else 32
        self.each = 2 if self.shared else fmt.words
        self.count = V // self.group * self.each
        self.dtype = f"int{self.bits}"
        # integers of one access: three words have none, and two that are shared may lie anywhere
        self.together = 1 if fmt is E5M6 else self.count

    def first(self, unit):
        """Where those of a vector begin in a row."""
        return unit // 2 * 3 + unit % 2 if self.shared else unit * self.count

    def values(self, P, integers, unit):
        """A group, decoded, fp32."""
        words = [P.Cast(U32, P.reinterpret(i, f"uint{self.bits}")) for i in integers]
        if self.shared:  # the upper or the lower 48 bits of three words, moved to the top
            joined = (P.Cast(U64, words[0]) << P.Cast(U64, u32(32))) | P.Cast(U64, words[1])
            joined = joined << P.Cast(U64, unit % 2 * 16)
            words = [P.Cast(U32, joined >> P.Cast(U64, u32(32))), P.Cast(U32, joined), u32(0)]
        return (E5M6.unpack_half if self.fmt is E5M6 else self.fmt.unpack)(P, words)[: self.group]


def dequantize_tiles(P, C, H, x_dtype, sf_dtype, y_dtype, block_m, block_k, col):
    """A thread reads its codes of some rows, then their scales, and writes vectors of 16 bytes.

    Rows beyond the last one are the last one again: no access needs a guard, and all loads are on their way before the first is used.
    """
    M, A, B = P.dynamic("M"), P.dynamic("A"), P.dynamic("B")
    # scales of single channels are worth keeping for more rows
    tiles = Tiles(P, H, 4 if y_dtype == F32 else 2, rows=4 if block_k == 1 else 2, block_k=block_k)
    V, U = tiles.vector, tiles.rows
    codes = Codes(FORMAT_OF[x_dtype], V)
    W, each, per_load = codes.count, codes.each, codes.together
    channels = block_k == 1
    tokens = channels and sf_dtype == "int32"
    # neighbouring rows share their scales where a block takes all of them
    S, K = 1 if block_m % U == 0 else U, V if channels else 1

    @P.prim_func
    def main(
        x: P.Tensor((M, C), x_dtype),
        sf: P.RowTensor((A, B), "sf_row", sf_dtype),
        y: P.Tensor((M, H), y_dtype),
    ):
        with P.Kernel(tiles.grid(P, M), threads=tiles.threads, prelude=prelude(P)) as b:
            x = P.view(x, (M, C * 8 // codes.bits), codes.dtype)
            packed = P.alloc_local((U, W), codes.dtype)
            scale = P.alloc_local((S, K), F32)
            value = P.alloc_local((V,), F32)
            rounded = P.alloc_local((U, V), P.storage(y_dtype))
            for k in P.serial(tiles.serial):
                first, unit = tiles.place(P, b, k)
                if unit < tiles.units:
                    for r in P.unroll(U):
                        for w in P.unroll(W // per_load):
                            for i in P.vectorized(per_load):
                                packed[r, w * per_load + i] = x[P.min(first + r, M - 1), codes.first(unit) + w * per_load + i]
                    for r in P.unroll(S):
                        for c in P.unroll(K):
                            i, j = P.min(first + r, M - 1) // block_m, (unit * V + c) // block_k
                            scale[r, c] = read_scale(P, sf, sf_dtype, col, i, j, tokens)
                    for r in P.unroll(U):
                        for g in P.unroll(V // codes.group):
                            for i, decoded in enumerate(codes.values(P, [packed[r, g * each + w] for w in range(each)], unit)):
                                value[g * codes.group + i] = P.mul(decoded, scale[r % S, (g * codes.group + i) % K])
                        for v in P.vectorized(V):
                            rounded[r, v] = P.from_f32(value[v], y_dtype)
                        for v in P.vectorized(V):
                            y[P.min(first + r, M - 1), unit * V + v] = rounded[r, v]

    return main


def check(name: str):
    """The rule of both forms: sizes and dtypes that the declaration cannot say."""

    def run(env: Env) -> None:
        C, fmt, block_k = env["C"], FORMAT_OF[env["x_dtype"]], env["block_k"]
        block_m, col = env.get("block_m", 1), env.get("col", False)
        H = {E4M3: C, E2M1: 2 * C, E5M6: 2 * C // 3}[fmt]
        if fmt is E5M6 and (C % 12 or not C):
            raise value_error(name, "x", "rows of a positive multiple of 12 bytes", f"C = {C}")
        if fmt is not E5M6 and (H % 64 or not H):
            raise value_error(name, "x", "a positive multiple of 64 columns", f"{H}")
        if env["to"] not in OUT:
            raise value_error(name, "to", "'bf16' or 'fp32'", env["to"])
        if block_m < 1:
            raise value_error(name, "block_m", "at least 1", block_m)
        if not (block_k == 1 or block_k == H or (block_k > 1 and block_k % 8 == 0)):
            raise value_error(name, "block_k", "1, a multiple of 8, or all columns", block_k)
        if col and block_k == 1:
            raise value_error(name, "col", "False for a scale a channel", col)
        env["H"], env["y_dtype"] = H, OUT[env["to"]]
        R, G = -(-env.get("M", env["rows"]) // block_m), -(-H // block_k)
        shape = (env.get("A", R), env["B"])
        check_scales(name, "sf", shape, env["sf_dtype"], R, G, col, tokens=block_k == 1)

    return run


def check_scales(op: str, name: str, shape: tuple[int, int], dtype: str, R: int, G: int, col: bool, tokens: bool = False) -> None:
    """Scales of R x G blocks must have the storage of their layout; rows of column-major ones may be longer."""
    if dtype == "int32":
        R, G = (-(-R // PACK), G) if tokens else (R, -(-G // PACK))
    if (shape[0] != G or shape[1] < R) if col else shape != (R, G):
        raise value_error(op, name, f"shape ({G}, {R} or more)" if col else f"shape {(R, G)}", shape)


DOC = """Values from quantized data: x times the scale of its block.

Args:
    x: quantized data in rows: e4m3 [.., H], i8 [.., H / 2] (two E2M1 a byte) or u8 [.., 3 H / 2] (E5M6, twelve bits each).
    sf: scales of blocks in storage orientation: f32, e4m3, or i32 holding four UE8M0 exponents, packed along the channels,
        or along the tokens where block_k is 1.

Attributes:
    to: "bf16" or "fp32".
    block_k: channels of a block: 1, a multiple of 8, or H.

Returns:
    [.., H] in the dtype of `to`.

Raises:
    TypeError: a dtype is another one.
    ValueError: H is no multiple of 64 (E5M6: of 8), or the scales do not fit the blocks.

Numerics:
    Bit-exact: the product in fp32, rounded once more to bf16 where that is wanted.

Gradient:
    None.

Source:
    OCP Microscaling Formats (MX) Specification 1.0, 2023.
"""

KEY = "C H x_dtype sf_dtype y_dtype block_k"

dequantize = declare(
    "dequantize",
    "quant",
    "x[M, C]:e4m3|i8|u8 sf[A, B]:f32|i32|e4m3 -> y[M, H]:y_dtype",
    [Launch(dequantize_tiles, "x sf -> y", key=KEY + " block_m col", pass_configs=IN_BOUNDS)],
    attrs={"to": "bf16", "block_m": 1, "block_k": 128, "col": False},
    check=check("dequantize"),
    strided="sf",
    loose="sf",
    doc=DOC,
)

dequantize_rows = declare(
    "dequantize_rows",
    "quant",
    "x[..., C]:e4m3|i8|u8 sf[..., B]:f32|i32|e4m3 -> y[..., H]:y_dtype",
    [Launch(dequantize_tiles, "x sf -> y", key=KEY, fixed={"block_m": 1, "col": False}, pass_configs=IN_BOUNDS)],
    attrs={"to": "bf16", "block_k": 128},
    check=check("dequantize_rows"),
    doc=DOC,
)
