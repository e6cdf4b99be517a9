"""What the mHC operations share: argument rules, the shape of a thread's work, and the canonical fp32 arithmetic.

Kernels here are written a thread at a time. A thread of CUDA owns `vector(P)` = 8 contiguous bf16 columns, one 16-byte
access; on the C target a block is one thread that owns 128 columns, so that the innermost loops vectorize.
"""

from tk_core.errors import value_error
from tk_core.op import Env

F32 = "float32"
F64 = "float64"
BF16 = "bfloat16"

# Token sums: at most that many programs leave a partial sum each, so that the order of the sum depends on the rows only.
MAX_PARTIALS = 128


def check_hidden(op: str, argument: str, env: Env) -> None:
    """H must be a multiple of 128: rows of whole 16-byte vectors for every thread of half a warp."""
    if env["H"] % 128 or env["H"] == 0:
        raise value_error(op, argument, "H a positive multiple of 128", f"H = {env['H']}")


def check_streams(op: str, argument: str, name: str, env: Env) -> None:
    """There must be at least one residual stream."""
    if env[name] < 1:
        raise value_error(op, argument, f"{name} >= 1", env[name])


def check_few_streams(op: str, argument: str, name: str, env: Env) -> None:
    """A block holds all mixes of a token, so their number is bounded."""
    if not 1 <= env[name] <= 16:
        raise value_error(op, argument, f"{name} from 1 to 16", env[name])


# ------------------------------------------------------------------ the shape of the work


def thread(P):
    """Index of the thread in its block."""
    return 0 if P.cpu else P.get_thread_binding(0)


def vector(P) -> int:
    """Contiguous columns of a thread."""
    return 128 if P.cpu else 8


def lanes(P) -> int:
    """Independent accumulators of one sum in one thread: a vector register on C."""
    return 16 if P.cpu else 1


def row_threads(H: int, limit: int = 1024) -> int:
    """Threads of a block that takes a whole row, 8 columns each, or an even part of a row that is longer than the limit.

    Whole rows in one block are 2 to 8 % faster on an H200 than several blocks a row: DRAM pages are used in one go.
    """
    vectors = H // 8
    parts = -(-vectors // limit)
    return -(-vectors // (32 * parts)) * 32


def stream_vector(n: int) -> int:
    """Streams of one vector access: 4 where n allows."""
    return next(width for width in (4, 2, 1) if n % width == 0)


# ------------------------------------------------------------------ canonical arithmetic


def affine(P, m, s, b):
    """m * s + b with one rounding."""
    return P.fma(m, s, b)


def sigma(P, z):
    """1 / (1 + exp(-z)) with a true division."""
    return P.f32(1) / P.add(P.f32(1), P.exp(-z))


def reciprocal(P, x):
    """1 / x to the nearest, for normal x.

    On CUDA the approximate reciprocal and one Newton step by FMA, which is what the compiler makes of 1 / x, without its
    branch to a slow path for subnormal x: that branch would serialize independent reciprocals.
    """
    if P.cpu:
        return P.f32(1) / x
    r = P.call_pure_extern(F32, "__fdividef", P.f32(1), x)
    return P.fma(r, P.fma(-x, r, P.f32(1)), r)


def softmax_rows(P):
    """Macro: p <- softmax over the rows of n x n matrices, element (i, j) of lane w at p[(i * n + j) * W + w]."""

    @P.macro
    def run(p, n, W):
        top = P.alloc_local((W,), F32)
        total = P.alloc_local((W,), F32)
        for i in P.unroll(n):
            for w in P.unroll(W):
                top[w] = p[i * n * W + w]
            for j in P.unroll(n - 1):
                for w in P.unroll(W):
                    top[w] = P.max(top[w], p[(i * n + j + 1) * W + w])
            for j in P.unroll(n):
                for w in P.unroll(W):
                    p[(i * n + j) * W + w] = P.exp(p[(i * n + j) * W + w] - top[w])
            for w in P.unroll(W):
                total[w] = p[i * n * W + w]
            for j in P.unroll(n - 1):
                for w in P.unroll(W):
                    total[w] = P.add(total[w], p[(i * n + j + 1) * W + w])
            for w in P.unroll(W):
                total[w] = reciprocal(P, total[w])
            for j in P.unroll(n):
                for w in P.unroll(W):
                    p[(i * n + j) * W + w] = P.mul(p[(i * n + j) * W + w], total[w])

    return run


def normalize(P, columns: bool):
    """Macro: p <- p / (sum + eps) over columns or over rows: sums in ascending order, one reciprocal each."""

    @P.macro
    def run(p, eps, n, W):
        total = P.alloc_local((n * W,), F32)
        for i in P.unroll(n):
            for w in P.unroll(W):
                total[i * W + w] = p[(i if columns else i * n) * W + w]
        for j in P.unroll(n - 1):
            for i in P.unroll(n):
                for w in P.unroll(W):
                    total[i * W + w] = P.add(total[i * W + w], p[((j + 1) * n + i if columns else i * n + j + 1) * W + w])
        for i in P.unroll(n):
            for w in P.unroll(W):
                total[i * W + w] = reciprocal(P, P.add(total[i * W + w], eps))
        for i in P.unroll(n):
            for j in P.unroll(n):
                for w in P.unroll(W):
                    p[(i * n + j) * W + w] = P.mul(p[(i * n + j) * W + w], total[(j if columns else i) * W + w])

    return run


# ------------------------------------------------------------------ sums


def sums_of_thread(P, K: int, threads: int) -> int:
    """How many of the K sums of a block a thread finishes: sums thread, thread + threads, ...; all of them on C."""
    return K if P.cpu else -(-K // threads)


def block_sums(P):
    """Macro: sum r * threads + thread of acc[k, :] over the lanes and threads of a block to out[r], in a fixed order.

    `shared` holds one value a warp and sum; `acc` is spent.
    """

    @P.macro
    def on_cuda(acc, out, shared, K, threads):
        tx = P.get_thread_binding(0)
        for k in P.unroll(K):
            for step in P.unroll(5):
                acc[k, 0] = P.add(acc[k, 0], P.shfl_xor(acc[k, 0], 16 >> step))
        if tx % 32 == 0:
            for k in P.unroll(K):
                shared[tx // 32 * K + k] = acc[k, 0]
        P.sync_threads()
        for r in P.unroll(sums_of_thread(P, K, threads)):
            if r * threads + tx < K:
                out[r] = shared[r * threads + tx]
                for warp in P.serial(threads // 32 - 1):
                    out[r] = P.add(out[r], shared[(warp + 1) * K + r * threads + tx])

    @P.macro
    def on_c(acc, out, shared, K, threads):
        for k in P.serial(K):
            out[k] = acc[k, 0]
            for lane in P.serial(lanes(P) - 1):
                out[k] = out[k] + acc[k, lane + 1]

    return on_c if P.cpu else on_cuda


def tile_of(units: int, most: int) -> int:
    """Tokens that a block takes at a time, `units` threads each."""
    return min(most, 1024 // units)


def partials_of(rows: int, tile: int) -> int:
    """Programs of a token sum over tiles of that many rows."""
    return min(-(-rows // tile), MAX_PARTIALS)


def tile_sums(P):
    """Macro: the fp64 sums of a program to `part[b]`: one a column, then one a vector of V columns; as an fp32 number and its rest.

    On CUDA thread unit // units, unit % units holds those of one row of the tile and one vector, and `shared` gathers them.
    """

    @P.macro
    def run(base_sum, scale_sum, shared, part, b, V, units, tile, threads):
        for k in P.serial(units if P.cpu else 1):
            unit = k + thread(P)
            mine = k if P.cpu else 0
            for v in P.unroll(V):
                shared[unit // units, unit % units * V + v] = base_sum[mine, v]
            shared[unit // units, units * V + unit % units] = scale_sum[mine]
        P.sync_threads()
        width = units * V + units
        total = P.alloc_local((1,), F64)
        for k in P.serial(width if P.cpu else -(-width // threads)):
            column = k if P.cpu else k * threads + thread(P)
            if column < width:
                total[0] = shared[0, column]
                for row in P.unroll(0 if P.cpu else tile - 1):
                    total[0] = total[0] + shared[row + 1, column]
                part[b, 0, column] = P.Cast(F32, total[0])
                part[b, 1, column] = P.Cast(F32, total[0] - P.Cast(F64, P.Cast(F32, total[0])))

    return run


def sum_partials(P, M, units, scales, per, want_scale, want_base):
    """A kernel of one block: d_mhc_base from the first M columns of `part`, d_mhc_scale from the other `units` ones.

    The first `scales` - 1 of these take `per` columns each, the last one takes the rest.

    A thread sums every 16th partial of a column; these 16 sums, then the columns of a segment, are summed in order. Wide
    partials leave threads for fewer than 16.
    """
    partials = P.dynamic("partials")
    width = M + units
    last = units - (scales - 1) * per
    groups = min(16, 1024 // width)
    threads = -(-width * groups // 32) * 32
    G = 1 if P.cpu else groups

    @P.prim_func
    def main(
        part: P.Tensor((partials, 2, width), F32),
        d_mhc_scale: P.Tensor((scales,), F32),
        d_mhc_base: P.Tensor((M,), F32),
    ):
        with P.Kernel(1, threads=threads) as _:
            total = P.alloc_local((1,), F64)
            some = P.alloc_shared((G, width), F64)
            sums = P.alloc_shared((width,), F64)
            for k in P.serial(width if P.cpu else 1):
                unit = k + thread(P)
                if unit < G * width:
                    total[0] = P.float64(0)
                    for p in P.serial(P.ceildiv(partials - unit // width, G)):
                        row = p * G + unit // width
                        column = unit % width
                        total[0] = total[0] + (P.Cast(F64, part[row, 0, column]) + P.Cast(F64, part[row, 1, column]))
                    some[unit // width, unit % width] = total[0]
            P.sync_threads()
            for k in P.serial(width if P.cpu else 1):
                column = k + thread(P)
                if column < width:
                    total[0] = some[0, column]
                    for g in P.unroll(G - 1):
                        total[0] = total[0] + some[g + 1, column]
                    sums[column] = total[0]
                    if want_base:
                        if column < M:
                            d_mhc_base[column] = P.Cast(F32, total[0])
            P.sync_threads()
            if want_scale:
                if thread(P) == 0:
                    for s in P.unroll(scales):
                        total[0] = P.float64(0)
                        for c in P.serial(P.if_then_else(s < scales - 1, per, last)):
                            total[0] = total[0] + sums[M + s * per + c]
                        d_mhc_scale[s] = P.Cast(F32, total[0])

    return main
