"""What the mHC operations share: argument rules, the shape of a thread's work, and the canonical fp32 arithmetic.

Kernels here are written a thread at a time. A thread of CUDA owns `vector(P)` = 8 contiguous bf16 columns, one 16-byte
access; on the C target a block is one thread that owns 128 columns, so that the innermost loops vectorize.
"""

from tk_core.errors import value_error
from tk_core.op import Env

F32 = "float32"
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


def block_threads(H: int, choices: tuple[int, ...]) -> int:
    """The number of threads with which blocks of 8 columns a thread leave the fewest columns idle; the first one wins ties."""
    return min(choices, key=lambda threads: -(-H // (threads * 8)) * threads)


def stream_vector(n: int) -> int:
    """Streams of one vector access: 4 where n allows."""
    return next(width for width in (4, 2, 1) if n % width == 0)


# ------------------------------------------------------------------ canonical arithmetic


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


def block_sums(P):
    """Macro: out[k] = the sum of acc[k, :] over the lanes and threads of a block, in a fixed order; valid after it in all threads.

    `shared` holds one value a warp and sum. `acc` is spent.
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
        if tx < K:
            out[0] = shared[tx]
            for warp in P.serial(threads // 32 - 1):
                out[0] = P.add(out[0], shared[(warp + 1) * K + tx])

    @P.macro
    def on_c(acc, out, shared, K, threads):
        for k in P.serial(K):
            out[k] = acc[k, 0]
            for lane in P.serial(lanes(P) - 1):
                out[k] = out[k] + acc[k, lane + 1]

    return on_c if P.cpu else on_cuda
