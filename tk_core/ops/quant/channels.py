"""`quantize_channels`: E4M3 data with a scale for every channel of a block of tokens.

D[m, k] = x[m, k], or fl(D(x[m, k]) * x_sf) where x is quantized; row m is that of token pos_to_token[m] where that is given, zeros
where it names none. amax = max |D| over the num_per_tokens rows of a block, data = Q(fl(D * inverse)), scale and inverse by `sf`.

A block of threads reads a tile of x once. A thread holds 16 bytes of each of its rows in registers; only maxima and inverses meet
in shared memory. Transposed data needs no more: a thread has 16 neighbouring tokens of its channels, which are one store each.
"""

from tk_core.bits import u32
from tk_core.errors import value_error
from tk_core.op import Env, Launch, declare
from tk_core.ops.mhc.common import thread
from tk_core.ops.quant.bits import F32, U32, absmax_bf16x2, bits_of, float_of, has_e4m3, prelude
from tk_core.ops.quant.formats import E4M3
from tk_core.ops.quant.layouts import KINDS, PACK, read_scale, sf_dtype, sf_shape

BF16, E4M3_DTYPE = "bfloat16", "float8_e4m3fn"
BYTES = {F32: 4, BF16: 2, E4M3_DTYPE: 1}


def geometry(P, x_dtype: str, gathered: bool, transpose: bool) -> dict[str, int]:
    """Rows of a thread, neighbouring lanes, threads of a block and blocks of a multiprocessor that were fastest on an H200.

    64 KB to 128 KB are on their way to a multiprocessor at any time. A warp that stores transposed data has four vectors of channels
    of 128 rows: it reads 64 bytes of a row at once and writes 128.
    """
    if transpose:
        shape = {"rows": 16, "lanes": 4, "threads": 64, "resident": 8}
    elif gathered or x_dtype == E4M3_DTYPE:
        shape = {"rows": 8, "lanes": 32, "threads": 256, "resident": 4}
    else:
        shape = {"rows": 16, "lanes": 32, "threads": 128, "resident": 4}
    # registers are short where E4M3 is converted step by step, and for the quantized rows that make transposed data
    short = not has_e4m3(P) or (transpose and x_dtype == E4M3_DTYPE)
    return shape | {"resident": 1} if short else shape


class Tile:
    """Who holds what: a thread has `columns` channels of `rows` neighbouring rows; `groups` x `across` threads make a block.

    `lanes` threads in a row have neighbouring channels, then comes the next group of rows. On the C target the only thread of
    a block has all rows that share a scale, 32 channels wide, which is the least that a scale of x may span.
    """

    def __init__(self, P, x_dtype: str, num_per_tokens: int, rows: int, lanes: int, threads: int):
        # words that hold four neighbouring elements
        self.quad = BYTES[x_dtype]
        self.columns = 32 if P.cpu else 16 // self.quad
        self.words = self.columns * self.quad // 4
        self.height = num_per_tokens if P.cpu else 128
        self.rows = num_per_tokens if P.cpu else rows
        self.groups = self.height // self.rows
        self.threads = 1 if P.cpu else threads
        self.across = self.threads // self.groups
        self.lanes = min(lanes, self.across)
        self.width = self.across * self.columns
        # scales of a channel, and groups that share one
        self.blocks = self.height // num_per_tokens
        self.sharing = self.groups // self.blocks

    def place(self, P):
        """Group of rows and vector of channels of a thread."""
        lane, rest = thread(P) % self.lanes, thread(P) // self.lanes
        return rest % self.groups, rest // self.groups * self.lanes + lane


def elements(P, dtype: str, words):
    """Four neighbouring elements from the words that hold them, as fp32."""
    if dtype == F32:
        return [float_of(P, w) for w in words]
    if dtype == BF16:
        return [float_of(P, half) for w in words for half in (w << u32(16), w & u32(0xFFFF0000))]
    return E4M3.unpack(P, words)


def channels(P, H, x_dtype, x_sf_dtype, sf_dtype, num_per_tokens, sf, x_block_k, x_col, transpose, has, **other):
    """Straight, gathered and transposed: they differ in which rows are read and in what is stored at the end.

    `other`: what to take instead of `geometry`, for measurements.
    """
    gathered, scaled, words_of_max = "pos_to_token" in has, bool(x_sf_dtype), x_dtype == BF16 and P.sm >= 80
    M, S = P.dynamic("M"), P.dynamic("S")
    N = P.dynamic("N") if gathered else 1
    Mo = N if gathered else M
    shape = geometry(P, x_dtype, gathered, transpose) | other
    resident = shape.pop("resident")
    t = Tile(P, x_dtype, num_per_tokens, **shape)
    R, V, W, Q = t.rows, t.columns, t.words, t.quad
    parts, ragged = -(-H // t.width), H % t.width != 0
    scales = t.blocks * t.width
    scale = KINDS[sf]
    each = P.serial if P.cpu else P.unroll

    def row(token, first, r):
        return token[r] if gathered else first + r

    def there(token, here, r):
        # one comparison: negative numbers are large unsigned ones
        return P.Cast(U32, token[r]) < P.Cast(U32, M) if gathered else r < here

    def row_of(word, factor, r, q):
        """Channels 4 * q to 4 * q + 3 of a row, dequantized."""
        got = elements(P, x_dtype, [word[r, q * Q + i] for i in range(Q)])
        return [P.mul(v, factor[r]) for v in got] if scaled else got

    @P.macro
    def quad_max(word, factor, q, top, pair):
        """top <- the largest magnitudes of four channels of a thread."""
        if words_of_max:
            for w in P.unroll(Q):
                pair[w] = u32(0)
            for r in P.unroll(R):
                for w in P.unroll(Q):
                    pair[w] = absmax_bf16x2(P, pair[w], word[r, q * Q + w])
            for i, v in enumerate(elements(P, x_dtype, [pair[w] for w in range(Q)])):
                top[i] = v
        else:
            for i in P.unroll(4):
                top[i] = P.f32(0)
            for r in each(R):
                for i, v in enumerate(row_of(word, factor, r, q)):
                    top[i] = P.max(top[i], P.abs(v))

    @P.prim_func
    def main(
        x: P.Tensor((M, H), x_dtype),
        x_sf: P.RowTensor((P.dynamic("A"), P.dynamic("B")), "x_sf_row", x_sf_dtype) if scaled else P.Tensor((1, 1), F32),
        pos_to_token: P.Tensor((N,), "int32"),
        data: P.Tensor((H, Mo) if transpose else (Mo, H), E4M3_DTYPE),
        sf_out: P.Tensor((S, H), sf_dtype),
        amax_clamp: P.float32,
    ):
        with P.Kernel(P.ceildiv(Mo, t.height) * parts, threads=t.threads, prelude=prelude(P)) as b:
            if not P.cpu:
                P.annotate_min_blocks_per_sm(resident)
            # from here on x and data are words, and packed scales bytes; the C target knows them by these names only
            x = P.view(x, (M, H * Q // 4), U32)
            data = P.view(data, (H // 4 * Mo,) if transpose else (Mo, H // 4), U32)
            sf_out = P.view(sf_out, (S, H * PACK), "uint8") if sf == "packed" else sf_out
            word = P.alloc_local((R, W), U32)
            token = P.alloc_local((R,), "int32")
            factor = P.alloc_local((R,), F32)
            four = P.alloc_local((4,), F32)
            pair = P.alloc_local((Q,), U32)
            value = P.alloc_local((4, 4), F32)
            maximum = P.alloc_shared((t.groups, t.width), F32)
            group, vector = t.place(P)
            # variables: as expressions they would be computed anew, in 64 bits, for every access
            band = P.alloc_var("int32", init=b // parts * t.groups + group)
            unit = P.alloc_var("int32", init=b % parts * t.across + vector)
            first, column = band * R, unit * V
            # rows of the thread that there are
            here = P.alloc_var("int32", init=P.if_then_else(column < H, Mo - first, 0) if ragged else Mo - first)

            if gathered:
                for r in each(R):
                    token[r] = -1
                    if r < here:
                        token[r] = pos_to_token[first + r]
            for r in each(R):
                for w in P.vectorized(W):
                    word[r, w] = u32(0)
                factor[r] = P.f32(0)
                if there(token, here, r):
                    for w in P.vectorized(W):
                        word[r, w] = x[row(token, first, r), unit * W + w]
                    if scaled:
                        factor[r] = read_scale(P, x_sf, x_sf_dtype, x_col, row(token, first, r), column // x_block_k)

            # four channels at a time, here and at the end, so that registers are left for the rows
            for q in each(V // 4):
                quad_max(word, factor, q, four, pair)
                for i in P.vectorized(4):
                    maximum[group, vector * V + 4 * q + i] = four[i]
            P.sync_threads()
            for k in P.serial(-(-scales // t.threads)):
                at = k * t.threads + thread(P)
                if at < scales:
                    block, channel = at // t.width, at % t.width
                    i, j = b // parts * t.blocks + block, b % parts * t.width + channel
                    mine = block * t.sharing
                    # clamped at once: what the code generator of C has read of a variable, it does not read again after a change
                    amax = P.alloc_var(F32, init=P.max(maximum[mine, channel], amax_clamp))
                    for g in each(t.sharing - 1):
                        amax = P.max(amax, maximum[mine + 1 + g, channel])
                    stored = P.alloc_var(U32 if sf != "plain" else F32, init=scale.stored(P, amax, E4M3))
                    # in the place of a maximum that nobody else reads
                    maximum[mine, channel] = scale.inverse(P, amax, stored, E4M3)
                    if i * num_per_tokens < Mo and j < H:
                        if sf == "packed":
                            sf_out[i // PACK, j * PACK + i % PACK] = P.Cast("uint8", stored)
                            # the rest of the last word
                            if (i + 1) * num_per_tokens >= Mo:
                                for more in P.serial(PACK - 1 - i % PACK):
                                    sf_out[i // PACK, j * PACK + i % PACK + 1 + more] = P.Cast("uint8", 0)
                        else:
                            sf_out[i, j] = scale.value(P, stored)
            P.sync_threads()
            if scaled and P.sm:
                # nothing changes, but the compiler cannot know that a sign is not set: it would keep what it has dequantized and
                # compared, for which there are not enough registers
                here = here | P.Cast("int32", bits_of(P, amax_clamp) >> u32(31))
                for r in P.unroll(R):
                    for w in P.unroll(W):
                        word[r, w] = word[r, w] | (bits_of(P, amax_clamp) >> u32(31))
            codes = P.alloc_local((4, R // 4), U32)
            for q in each(V // 4):
                for i in P.vectorized(4):
                    four[i] = maximum[group // t.sharing * t.sharing, vector * V + 4 * q + i]
                if transpose:
                    for s in each(R // 4):
                        for k in P.unroll(4):
                            for i, v in enumerate(row_of(word, factor, 4 * s + k, q)):
                                value[i, k] = P.mul(v, four[i])
                        for i in P.unroll(4):
                            codes[i, s] = E4M3.pack(P, [value[i, k] for k in range(4)])[0]
                    if here > 0:
                        for i in P.unroll(4):
                            for s in P.vectorized(R // 4):
                                # a row of data is a multiple of 16 bytes
                                data[(P.Cast("int64", column + 4 * q + i) * (Mo // R) + band) * (R // 4) + s] = codes[i, s]
                else:
                    for r in each(R):
                        for i, v in enumerate(row_of(word, factor, r, q)):
                            value[0, i] = P.mul(v, four[i])
                        # the words of the elements before are done with
                        word[r, q] = E4M3.pack(P, [value[0, i] for i in range(4)])[0]
            if not transpose:
                for r in each(R):
                    if r < here:
                        for q in P.vectorized(V // 4):
                            data[first + r, unit * (V // 4) + q] = word[r, q]

    return main


def check(env: Env) -> None:
    def expect(argument: str, what: str, good: bool, got) -> None:
        if not good:
            raise value_error("quantize_channels", argument, what, got)

    H, npt, sf = env["H"], env["num_per_tokens"], env["sf"]
    gathered, scaled = "N" in env, bool(env["x_sf_dtype"])
    expect("num_per_tokens", "32 or 128", npt in (32, 128), npt)
    expect("sf", "'plain', 'round' or 'packed'", sf in ("plain", "round", "packed"), sf)
    expect(
        "amax_clamp",
        "a positive number, not too small to divide by",
        448 * 2.0**-126 <= env["amax_clamp"] < float("inf"),
        env["amax_clamp"],
    )
    expect("x", "H a positive multiple of 64", H > 0 and H % 64 == 0, f"H = {H}")
    expect("x_sf", "scales where x is quantized, and only there", scaled == (env["x_dtype"] == E4M3_DTYPE), env["x_sf_dtype"] or None)
    if scaled:
        block = env["x_block_k"]
        expect("x_block_k", "a multiple of 32 that divides H", block > 0 and block % 32 == 0 and H % block == 0, block)
        rows, groups = (env["B"], env["A"]) if env["x_col"] else (env["A"], env["B"])
        needed = -(-(H // block) // (PACK if env["x_sf_dtype"] == "int32" else 1))
        fits = groups == needed and (rows >= env["M"] if env["x_col"] else rows == env["M"])
        expect("x_sf", f"scales of {env['M']} rows and {needed} columns", fits, (env["A"], env["B"]))
    Mo = env["N"] if gathered else env["M"]
    expect("x", "a multiple of 128 rows where data is transposed", not env["transpose"] or Mo % 128 == 0, f"{Mo} rows")
    env["D0"], env["D1"] = (H, Mo) if env["transpose"] else (Mo, H)
    env["sf_dtype"] = sf_dtype(sf)
    env["S"] = sf_shape("packed", False, 1, -(-Mo // npt))[1] if sf == "packed" else -(-Mo // npt)


DOC = """Quantize to E4M3 with a scale for every channel of a block of tokens.

Args:
    x: [M, H] bf16, f32 or e4m3; H a multiple of 64.
    x_sf: scales of a quantized x in storage orientation, for blocks of one token and x_block_k channels.
    pos_to_token: [N] i32, the row of x that every row of data is made of; a value that names none makes zeros, which do not count.

Returns:
    data [M or N, H] e4m3, or [H, M or N] where transposed; sf [R, H], or [ceil(R / 4), H] with the exponents of four blocks a word.

Attributes:
    num_per_tokens: rows that share a scale, 32 or 128; the last block may hold fewer.
    sf: "plain" (amax / 448), "round" (a power of two), "packed" (its exponent).
    x_block_k, x_col: the block of the scales of x, and whether they are column-major.
    transpose: whether data is transposed; then the rows must be a multiple of 128.
    amax_clamp: the least amax.

Numerics:
    Bit-exact: fl(fl(D(x) * x_sf) * inverse), rounded to the nearest E4M3 number, ties to the even code.
"""

quantize_channels = declare(
    "quantize_channels",
    "quant",
    "x[M, H]:bf16|f32|e4m3 x_sf?[A, B]:f32|i32|e4m3 pos_to_token?[N]:i32 -> data[D0, D1]:e4m3 sf[S, H]:sf_dtype",
    [
        Launch(
            channels,
            "x x_sf pos_to_token -> data sf; amax_clamp",
            key="H x_dtype x_sf_dtype sf_dtype num_per_tokens sf x_block_k x_col transpose",
            # every access is guarded here
            pass_configs={"tl.disable_safe_memory_legalize": True},
        )
    ],
    attrs={"num_per_tokens": 128, "sf": "plain", "x_block_k": 0, "x_col": False, "transpose": False, "amax_clamp": 1e-4},
    loose="x_sf",
    check=check,
    doc=DOC,
)  # fmt: skip
