"""`sinkhorn_normalize`: the exponential of a matrix scaled towards rows and columns that sum to one.

P = softmax(x, axis -1)          Y = P + eps          Y <- Y / (column sums + eps)
repeat - 1 times:                Y <- Y / (row sums + eps), then Y <- Y / (column sums + eps)

The gradient runs through every step. Every iterate is u_i * Y0_ij * v_j with Y0 = P + eps and one scale u_i a row, v_j a
column, so only these are kept. With h = dY * u_i * v_j the rule of a column step, dY = (dY' - sum_i dY' Y') / (sum + eps),
reads h_ij -= (sum_i h_ij Y0_ij) * v'_j * u_i: neither the iterates nor a division are needed on the way back. At its start
u = v = 1 and h = dY0, and dx = P * (h - sum_j h P).
"""

from tk_core.errors import value_error
from tk_core.op import Env, Launch, declare
from tk_core.ops.mhc.common import F32, check_streams, normalize, reciprocal, softmax_rows, thread

# Shared memory that the scales of one block may take.
_SHARED_BYTES = 96 * 1024


def tokens_of_thread(P) -> int:
    """One token a thread; 16 on C, innermost, so that every step vectorizes over tokens."""
    return 16 if P.cpu else 1


def load_matrices(P, n):
    """Macro: matrices of W tokens from `first` on, element (i, j) of token w to p[(i * n + j) * W + w]; zero beyond the rows."""
    W = tokens_of_thread(P)

    @P.macro
    def run(x, p, first, T):
        for w in P.serial(W):
            for i in P.unroll(n):
                if first + w < T:
                    for j in P.vectorized(n):
                        p[(i * n + j) * W + w] = x[first + w, i, j]
                else:
                    for j in P.unroll(n):
                        p[(i * n + j) * W + w] = P.f32(0)

    return run


def store_matrices(P, n):
    """Macro: the reverse of `load_matrices`."""
    W = tokens_of_thread(P)

    @P.macro
    def run(p, x, first, T):
        for w in P.serial(W):
            if first + w < T:
                for i in P.unroll(n):
                    for j in P.vectorized(n):
                        x[first + w, i, j] = p[(i * n + j) * W + w]

    return run


def sinkhorn(P, n, repeat, threads=64):
    """A thread keeps a matrix in registers."""
    T = P.dynamic("T")
    W = tokens_of_thread(P)
    B = W if P.cpu else threads
    load, store = load_matrices(P, n), store_matrices(P, n)
    softmax, rows, columns = softmax_rows(P), normalize(P, False), normalize(P, True)

    @P.prim_func
    def main(x: P.Tensor((T, n, n), F32), out: P.Tensor((T, n, n), F32), eps: P.float32):
        with P.Kernel(P.ceildiv(T, B), threads=threads) as b:
            p = P.alloc_local((n * n * W,), F32)
            first = b * B + thread(P)
            load(x, p, first, T)
            softmax(p, n, W)
            for e in P.unroll(n * n):
                for w in P.unroll(W):
                    p[e * W + w] = P.add(p[e * W + w], eps)
            columns(p, eps, n, W)
            for _ in P.serial(repeat - 1):
                rows(p, eps, n, W)
                columns(p, eps, n, W)
            store(p, out, first, T)

    return main


def scale_step(P, n, columns: bool):
    """Macro: one step of the forward in scales: mine <- mine / (mine * sum(other * Y0) + eps), kept as number `step`."""
    W = tokens_of_thread(P)

    @P.macro
    def run(y, mine, other, kept, step, lane, eps):
        total = P.alloc_local((n * W,), F32)
        for i in P.unroll(n):
            for w in P.unroll(W):
                total[i * W + w] = P.mul(other[w], y[(i if columns else i * n) * W + w])
        for j in P.unroll(n - 1):
            for i in P.unroll(n):
                for w in P.unroll(W):
                    total[i * W + w] = P.fma(
                        other[(j + 1) * W + w], y[((j + 1) * n + i if columns else i * n + j + 1) * W + w], total[i * W + w]
                    )
        for i in P.unroll(n):
            for w in P.unroll(W):
                mine[i * W + w] = P.mul(mine[i * W + w], reciprocal(P, P.fma(mine[i * W + w], total[i * W + w], eps)))
        for i in P.vectorized(n * W):
            kept[step, lane, i] = mine[i]

    return run


def gradient_step(P, n, columns: bool):
    """Macro: h_ij -= (sum of h * Y0 over the axis of the step) * mine * other."""
    W = tokens_of_thread(P)

    @P.macro
    def run(h, y, mine, other):
        dot = P.alloc_local((n * W,), F32)
        for i in P.unroll(n):
            for w in P.unroll(W):
                dot[i * W + w] = P.mul(h[(i if columns else i * n) * W + w], y[(i if columns else i * n) * W + w])
        for j in P.unroll(n - 1):
            for i in P.unroll(n):
                for w in P.unroll(W):
                    dot[i * W + w] = P.fma(
                        h[((j + 1) * n + i if columns else i * n + j + 1) * W + w],
                        y[((j + 1) * n + i if columns else i * n + j + 1) * W + w],
                        dot[i * W + w],
                    )
        for i in P.unroll(n):
            for w in P.unroll(W):
                dot[i * W + w] = P.mul(dot[i * W + w], -mine[i * W + w])
        for i in P.unroll(n):
            for j in P.unroll(n):
                for w in P.unroll(W):
                    h[(i * n + j) * W + w] = P.fma(
                        dot[(j if columns else i) * W + w], other[(i if columns else j) * W + w], h[(i * n + j) * W + w]
                    )

    return run


def sinkhorn_bwd(P, n, repeat):
    """A thread recomputes the scales of its matrix, keeps them in shared memory, and walks back."""
    T = P.dynamic("T")
    W = tokens_of_thread(P)
    steps = 2 * repeat - 1  # step 2k is a column step, step 2k + 1 a row step
    threads = 64 if steps * n * 4 * 64 <= _SHARED_BYTES else 32
    B = W if P.cpu else threads
    load, store = load_matrices(P, n), store_matrices(P, n)
    softmax = softmax_rows(P)
    scale_rows, scale_columns = scale_step(P, n, False), scale_step(P, n, True)
    rows_bwd, columns_bwd = gradient_step(P, n, False), gradient_step(P, n, True)

    @P.prim_func
    def main(d_out: P.Tensor((T, n, n), F32), x: P.Tensor((T, n, n), F32), d_x: P.Tensor((T, n, n), F32), eps: P.float32):
        with P.Kernel(P.ceildiv(T, B), threads=threads) as b:
            p = P.alloc_local((n * n * W,), F32)
            y = P.alloc_local((n * n * W,), F32)
            h = P.alloc_local((n * n * W,), F32)
            u = P.alloc_local((n * W,), F32)
            v = P.alloc_local((n * W,), F32)
            dot = P.alloc_local((n * W,), F32)
            kept = P.alloc_shared((steps, 1 if P.cpu else threads, n * W), F32)
            lane = thread(P)
            first = b * B + lane
            load(x, p, first, T)
            load(d_out, h, first, T)
            softmax(p, n, W)
            for e in P.unroll(n * n):
                for w in P.unroll(W):
                    y[e * W + w] = P.add(p[e * W + w], eps)
            for e in P.unroll(n * W):
                u[e] = P.f32(1)
                v[e] = P.f32(1)
            scale_columns(y, v, u, kept, 0, lane, eps)
            for k in P.serial(repeat - 1):
                scale_rows(y, u, v, kept, 2 * k + 1, lane, eps)
                scale_columns(y, v, u, kept, 2 * k + 2, lane, eps)
            for i in P.unroll(n):
                for j in P.unroll(n):
                    for w in P.unroll(W):
                        h[(i * n + j) * W + w] = h[(i * n + j) * W + w] * u[i * W + w] * v[j * W + w]
            for back in P.serial(repeat - 1):
                columns_bwd(h, y, v, u)
                for e in P.vectorized(n * W):
                    v[e] = kept[2 * (repeat - 2 - back), lane, e]
                rows_bwd(h, y, u, v)
                # the row scales before the first row step are ones
                if back < repeat - 2:
                    for e in P.vectorized(n * W):
                        u[e] = kept[2 * (repeat - 2 - back) - 1, lane, e]
                else:
                    for e in P.unroll(n * W):
                        u[e] = P.f32(1)
            columns_bwd(h, y, v, u)
            for i in P.unroll(n):
                for w in P.unroll(W):
                    dot[i * W + w] = P.f32(0)
                for j in P.unroll(n):
                    for w in P.unroll(W):
                        dot[i * W + w] = P.fma(h[(i * n + j) * W + w], p[(i * n + j) * W + w], dot[i * W + w])
                for j in P.unroll(n):
                    for w in P.unroll(W):
                        h[(i * n + j) * W + w] = p[(i * n + j) * W + w] * (h[(i * n + j) * W + w] - dot[i * W + w])
            store(h, d_x, first, T)

    return main


def check(env: Env) -> None:
    check_streams("sinkhorn_normalize", "x", "n", env)
    if env["repeat"] < 1:
        raise value_error("sinkhorn_normalize", "repeat", "at least 1", env["repeat"])


DOC = """Scale the exponential of matrices towards doubly stochastic ones.

Y = softmax(x, axis -1) + eps; Y = Y / (sum over axis -2 + eps); then repeat - 1 times rows, Y / (sum over axis -1 + eps),
and columns again.

Args:
    x: [..., n, n] f32, logits.
    repeat: number of row and column normalizations; the softmax is the first one of the rows.
    eps: added to the softmax and to every sum.

Returns:
    [..., n, n] f32; columns sum to 1 - eps, rows as well as the iterations have converged.

Raises:
    TypeError: x is not f32.
    ValueError: x is not square, or repeat < 1.

Numerics:
    fp32, sums in ascending order, one rounded reciprocal a row or column and a product. With eps = 0 a column whose
    entries all underflow gives NaN.

Gradient:
    Through every iteration, recomputed from x.

Source:
    mHC: Manifold-Constrained Hyper-Connections, 2025.
"""

sinkhorn_normalize = declare(
    "sinkhorn_normalize",
    "mhc",
    "x[..., n, n]:f32 -> out[..., n, n]:f32",
    [Launch(sinkhorn, "x -> out; eps", key="n repeat")],
    attrs={"repeat": 10, "eps": 1e-6},
    backward="d_out x -> d_x",
    backward_launches=[Launch(sinkhorn_bwd, "d_out x -> d_x; eps", key="n repeat")],
    check=check,
    doc=DOC,
)
