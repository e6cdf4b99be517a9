"""`recast_lossless`: E2M1 data with small blocks as E4M3 data with large ones, the same dequantized values.

With E the biased exponents of the scales: E_out = max(1, max(E_in over the block) - 6), data = Q(D(x) * 2**(E_in - E_out)).

E4M3 reaches from 2**-9 to 448, so six binades of E2M1 fit above the largest scale, and the values of a block whose scale is
up to 2**14 smaller than the largest one are still multiples of 2**-9.
"""

from math import gcd, lcm

from tk_core.bits import u32
from tk_core.errors import value_error
from tk_core.op import Env, Launch, declare
from tk_core.ops.mhc.common import thread
from tk_core.ops.quant.bits import U32, bits_of, float_of, prelude
from tk_core.ops.quant.cast_back import check_scales
from tk_core.ops.quant.formats import E2M1
from tk_core.ops.quant.layouts import E4M3_DTYPE, PACK, sf_dtype, sf_shape
from tk_core.ops.quant.tiles import IN_BOUNDS

# Elements of a thread at a time: 16 bytes of output, one input block.
V = 16
# Columns of a block of threads, if that is a number of whole output blocks, and its rows.
COLUMNS, ROWS = 512, 32
# Vectors that a thread reads before it makes the first one.
AHEAD = 8


class Tile:
    """What a block of threads makes: whole output blocks; one output block, or those of a word of scales, on the C target."""

    def __init__(self, P, H: int, block_m: int, block_k: int, packed: bool):
        together = PACK if packed else 1
        wide = together * block_k
        self.blocks_k = together if P.cpu else min(max(COLUMNS // wide, 1), -(-H // wide)) * together
        self.blocks_m = 1 if P.cpu else lcm(ROWS, block_m) // block_m
        self.blocks, self.words = self.blocks_m * self.blocks_k, self.blocks_m * self.blocks_k // together
        self.words_k = self.blocks_k // together
        self.rows, self.columns = self.blocks_m * block_m, self.blocks_k * block_k
        self.parts = -(-H // self.columns)
        self.vectors_k = self.columns // V
        self.vectors = self.rows * self.vectors_k
        whole = [t for t in range(32, 513, 32) if self.vectors % t == 0]
        self.threads = 1 if P.cpu else max((t for t in whole if self.vectors // t % AHEAD == 0), default=max(whole))
        self.ahead = 1 if P.cpu else gcd(self.vectors // self.threads, AHEAD)
        self.rounds = self.vectors // (self.threads * self.ahead)

    def steps(self, count: int, each: int = 1) -> int:
        """How often all threads go on until `count` things are done by groups of `each` threads."""
        return -(-count * each // self.threads)


def read_exponent(P, sf, dtype: str, col: bool, i, j):
    """The biased exponent of a power of two in storage orientation; of other scales the exponent field."""
    if dtype == "int32":
        word = sf[j // PACK, i] if col else sf[i, j // PACK]
        return (P.reinterpret(word, U32) >> P.Cast(U32, j % PACK * 8)) & u32(0xFF)
    return (bits_of(P, sf[j, i] if col else sf[i, j]) >> u32(23)) & u32(0xFF)


def lossless(P, C, H, x_sf_dtype, sf_dtype, x_block_m, x_block_k, block_m, block_k, col, x_col, has):
    """Exponents of the output blocks of a tile first, from scales alone, then its data."""
    M, A, B, R, G = P.dynamic("M"), P.dynamic("A"), P.dynamic("B"), P.dynamic("R"), -(-H // block_k)
    packed = sf_dtype == "int32"
    words_of_row = -(-G // PACK) if packed else G
    tile = Tile(P, H, block_m, block_k, packed)
    # input blocks of an output block, and the lanes that look through them
    inner_m, inner_k = block_m // x_block_m, block_k // x_block_k
    inner = inner_m * inner_k
    lanes = 1 if P.cpu else min(32, 1 << (inner - 1).bit_length())
    rows_in, blocks_in, rows_out = P.ceildiv(M, x_block_m), -(-H // x_block_k), P.ceildiv(M, block_m)
    S, W = (words_of_row, R) if col else (R, words_of_row)
    check_range = "inexact" in has

    def vector_of(b, part, step, r):
        """Row, first column and output block in the tile of vector r of a thread. Rows beyond the last one are the last one again."""
        vector = (step * tile.ahead + r) * tile.threads + thread(P)
        row = P.min(vector // tile.vectors_k, M - 1 - b * tile.rows)
        column = vector % tile.vectors_k * V
        return b * tile.rows + row, part * tile.columns + column, row // block_m * tile.blocks_k + column // block_k

    @P.macro
    def read(x, x_sf, codes, exponent, b, part, step):
        """The codes of some vectors of a thread, and the exponents of their blocks."""
        for r in P.unroll(tile.ahead):
            m, k, _ = vector_of(b, part, step, r)
            if k < H:
                for w in P.vectorized(2):
                    codes[r, w] = x[m, k // 8 + w]
                exponent[r] = read_exponent(P, x_sf, x_sf_dtype, x_col, m // x_block_m, k // x_block_k)

    @P.macro
    def largest_exponents(x_sf, top, b, part):
        """top[block of the tile] = its E_out. Input blocks beyond the matrix are the last ones again."""
        largest = P.alloc_local((1,), U32)
        for step in P.serial(tile.steps(tile.blocks, lanes)):
            block = (step * tile.threads + thread(P)) // lanes
            largest[0] = u32(7)
            if block < tile.blocks:
                for s in P.serial(-(-inner // lanes)):
                    at = P.min(s * lanes + thread(P) % lanes, inner - 1)
                    i = P.min((b * tile.blocks_m + block // tile.blocks_k) * inner_m + at // inner_k, rows_in - 1)
                    j = P.min((part * tile.blocks_k + block % tile.blocks_k) * inner_k + at % inner_k, blocks_in - 1)
                    largest[0] = P.max(largest[0], read_exponent(P, x_sf, x_sf_dtype, x_col, i, j))
            for k in P.unroll(lanes.bit_length() - 1):
                largest[0] = P.max(largest[0], P.shfl_xor(largest[0], 1 << k))
            if block < tile.blocks and thread(P) % lanes == 0:
                top[block] = largest[0] - u32(6)

    @P.macro
    def store_scales(sf, top, b, part):
        """The scales of the tile; those of blocks beyond the matrix are zero."""
        for step in P.serial(tile.steps(tile.words)):
            word = step * tile.threads + thread(P)
            i = b * tile.blocks_m + word // tile.words_k
            j = part * tile.words_k + word % tile.words_k
            if word < tile.words and i < R and j < words_of_row:
                stored = P.alloc_var(U32)
                stored = u32(0)
                if i < rows_out:
                    if packed:
                        for t in P.unroll(PACK):
                            if j * PACK + t < G:
                                stored = stored | (top[word * PACK + t] << P.Cast(U32, 8 * t))
                    else:
                        stored = top[word] << u32(23)
                if col:
                    sf[j, i] = P.reinterpret(stored, sf_dtype)
                else:
                    sf[i, j] = P.reinterpret(stored, sf_dtype)

    @P.prim_func
    def main(
        x: P.Tensor((M, C), "int8"),
        x_sf: P.RowTensor((A, B), "x_sf_row", x_sf_dtype),
        data: P.Tensor((M, H), E4M3_DTYPE),
        sf: P.Tensor((S, W), sf_dtype),
        inexact: P.Tensor((rows_out, G), "uint8"),
    ):
        with P.Kernel(P.ceildiv(R, tile.blocks_m) * tile.parts, threads=tile.threads, prelude=prelude(P)) as place:
            b, part = place // tile.parts, place % tile.parts
            if not P.cpu:
                P.annotate_min_blocks_per_sm(1024 // tile.threads)
            x = P.view(x, (M, C // 4), "int32")
            data = P.view(data, (M, H // 4), "int32")
            top = P.alloc_shared((tile.blocks,), U32)
            outside = P.alloc_shared((tile.blocks,), U32)
            codes = P.alloc_local((tile.ahead, 2), "int32")
            exponent = P.alloc_local((tile.ahead,), U32)
            made = P.alloc_local((4,), "int32")
            table = P.alloc_local((2,), U32)
            if check_range:
                for step in P.serial(tile.steps(tile.blocks)):
                    if step * tile.threads + thread(P) < tile.blocks:
                        outside[step * tile.threads + thread(P)] = u32(0)
            largest_exponents(x_sf, top, b, part)
            P.sync_threads()
            store_scales(sf, top, b, part)
            # alignment of column-major scales may ask for tiles without rows
            for step in P.serial(P.if_then_else(b * tile.rows < M, tile.rounds, 0)):
                read(x, x_sf, codes, exponent, b, part, step)
                for r in P.unroll(tile.ahead):
                    m, k, block = vector_of(b, part, step, r)
                    if k < H:
                        # 2**(E_in - E_out), at most 2**6; far below the range everything is zero
                        biased = P.max(P.Cast("int32", exponent[r]) - P.Cast("int32", top[block]) + 127, 1)
                        for t, entry in enumerate(E2M1.e4m3_table(P, float_of(P, P.Cast(U32, biased) << u32(23)))):
                            table[t] = entry
                        for w in P.unroll(2):
                            for h, word in enumerate(E2M1.lookup(P, P.reinterpret(codes[r, w], U32), table[0], table[1])):
                                made[2 * w + h] = P.reinterpret(word, "int32")
                        for w in P.vectorized(4):
                            data[m, k // 4 + w] = made[w]
                        if check_range:
                            if biased < 127 - 8 and ((codes[r, 0] | codes[r, 1]) & 0x77777777) != 0:
                                outside[block] = u32(1)
            if check_range:
                P.sync_threads()
                for step in P.serial(tile.steps(tile.blocks)):
                    block = step * tile.threads + thread(P)
                    i = b * tile.blocks_m + block // tile.blocks_k
                    j = part * tile.blocks_k + block % tile.blocks_k
                    if block < tile.blocks and i < rows_out and j < G:
                        inexact[i, j] = P.Cast("uint8", outside[block])

    return main


def check(env: Env) -> None:
    op = "recast_lossless"
    env["H"] = H = 2 * env["C"]
    if H % 32 or not H:
        raise value_error(op, "x", "a positive multiple of 32 columns", H)
    if env["sf"] not in ("round", "packed"):
        raise value_error(op, "sf", "'round' or 'packed'", env["sf"])
    for name in ("x_block_m", "block_m"):
        if env[name] < 1:
            raise value_error(op, name, "at least 1", env[name])
    if env["x_block_k"] < V or env["x_block_k"] % V:
        raise value_error(op, "x_block_k", f"a multiple of {V}", env["x_block_k"])
    for axis in "mk":
        if env[f"block_{axis}"] % env[f"x_block_{axis}"]:
            raise value_error(op, f"block_{axis}", f"a multiple of x_block_{axis} = {env[f'x_block_{axis}']}", env[f"block_{axis}"])
    R, G = -(-env["M"] // env["x_block_m"]), -(-H // env["x_block_k"])
    check_scales(op, "x_sf", (env["A"], env["B"]), env["x_sf_dtype"], R, G, env["x_col"])
    env["R"], env["G"] = -(-env["M"] // env["block_m"]), -(-H // env["block_k"])
    env["S"], env["W"] = sf_shape(env["sf"], env["col"], env["R"], env["G"])
    env["sf_dtype"] = sf_dtype(env["sf"])


DOC = """E2M1 data with power-of-two scales as E4M3 data in larger blocks, with the same dequantized values.

Args:
    x: [M, H / 2] i8, two E2M1 codes a byte, the first one low; H a multiple of 32.
    x_sf: the scales of its blocks in storage orientation, f32 or i32 holding four UE8M0 exponents; only exponents count.

Attributes:
    x_block_m, x_block_k: the blocks of x; x_block_k a multiple of 16.
    block_m, block_k: the blocks of the result, multiples of those of x.
    sf: "round" for f32 scales, "packed" for four UE8M0 exponents in an i32.
    x_col, col: the scales are column-major.

Returns:
    data: [M, H] e4m3.
    sf: its scales, powers of two.
    inexact: u8, where wanted: 1 for blocks that hold a value whose scale is more than 2**14 below the largest one.

Raises:
    TypeError: a dtype is another one.
    ValueError: the blocks do not fit into each other, or a shape does not fit them.

Numerics:
    Bit-exact. Values outside that range are rounded to the nearest.

Gradient:
    None.

Source:
    OCP Microscaling Formats (MX) Specification 1.0, 2023.
"""

recast_lossless = declare(
    "recast_lossless",
    "quant",
    "x[M, C]:i8 x_sf[A, B]:f32|i32 -> data[M, H]:e4m3 sf[S, W]:sf_dtype inexact?[R, G]:u8",
    [
        Launch(
            lossless,
            "x x_sf -> data sf inexact",
            key="C H x_sf_dtype sf_dtype x_block_m x_block_k block_m block_k col x_col",
            pass_configs=IN_BOUNDS,
        )
    ],
    attrs={"x_block_m": 1, "x_block_k": 32, "block_m": 1, "block_k": 128, "sf": "round", "col": False, "x_col": False},
    check=check,
    strided="x_sf",
    loose="x_sf",
    doc=DOC,
)
