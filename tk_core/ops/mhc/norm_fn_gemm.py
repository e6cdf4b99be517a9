"""The two matrix kernels of `mhc_pre_norm_fn`: x @ F^T with row sums of squares, and its gradient.

F and dy come as two bfloat16 terms, hi + lo, so that products of bfloat16 tensor cores are as good as nearly fp32 ones.
x is read once in either direction. On the C target the same sums are plain fp32 loops that the compiler vectorizes.
"""

from tk_core.ops.mhc.common import BF16, F32

# Columns of one step and rows of one block of the forward kernel: S slices of K are whole numbers of steps.
STEP = 128
FORWARD_ROWS = 256
# Rows of one step and columns of one block of the backward kernel.
BACKWARD_ROWS = 64
BACKWARD_COLUMNS = 128


def padded(J):
    """Rows of F in each of its two terms: one step of a matrix instruction takes 16 of them."""
    return -(-J // 16) * 16


def x_shape(T, K, n, H):
    """Rows of x as streams, or flat where n is 0."""
    return (T, n, H) if n else (T, K)


def large_shared(P):
    """Whether an architecture has more than 200 kB of shared memory."""
    return P.sm in (90, 100, 103)


def staged(P, stages):
    """Stages of a pipeline: TileLang 0.1.15 has none below sm_90 for a number of steps known only at run time."""
    return stages if P.sm >= 90 else 0


def gemm_sumsq(P, K, J, n=0, H=0):
    """part[s, t, 0, j] = sum over slice s of x[t, k] * F[j, k]; psq[s, t, 0] likewise of x[t, k]^2."""
    if P.cpu:
        return _gemm_sumsq_c(P, K, J, n, H)
    T, S, Jp = P.dynamic("T"), P.dynamic("S"), padded(J)
    BM, BK, threads = (FORWARD_ROWS, STEP, 256) if large_shared(P) else (128, STEP // 2, 128)
    # 16-byte shared loads for the squares; inference would choose single elements
    vectors = BK // 8
    rows = threads // vectors
    layout = P.Fragment([BM, BK], forward_fn=lambda i, j: (i % rows * vectors + j // 8, i // rows * 8 + j % 8))

    @P.prim_func
    def main(
        x: P.Tensor(x_shape(T, K, n, H), BF16),
        F: P.Tensor((2, Jp, K), BF16),
        part: P.Tensor((S, T, 1, J), F32),
        psq: P.Tensor((S, T, 1), F32),
        steps: P.int32,
    ):
        with P.Kernel(P.ceildiv(T, BM), S, threads=threads) as (b, s):
            x = P.reshape(x, (T, K))
            F = P.reshape(F, (2 * Jp, K))
            xs = P.alloc_shared((BM, BK), BF16)
            fs = P.alloc_shared((2 * Jp, BK), BF16)
            acc = P.alloc_fragment((BM, 2 * Jp), F32)
            low = P.alloc_fragment((BM, Jp), F32)
            squares = P.alloc_fragment((BM, BK), F32)
            total = P.alloc_fragment((BM,), F32)
            P.clear(acc)
            for i, j in P.Parallel(BM, BK, loop_layout=layout):
                squares[i, j] = 0
            for k in P.Pipelined(steps * (STEP // BK), num_stages=staged(P, 2)):
                P.copy(x[b * BM, s * steps * STEP + k * BK], xs)
                P.copy(F[0, s * steps * STEP + k * BK], fs)
                P.gemm(xs, fs, acc, transpose_B=True, policy=P.GemmWarpPolicy.FullRow)
                for i, j in P.Parallel(BM, BK):
                    squares[i, j] = squares[i, j] + P.to_f32(xs[i, j], BF16) * P.to_f32(xs[i, j], BF16)
            P.reduce_sum(squares, total)
            # a loop may index a fragment in one way only, hence the copy of the second half
            for i, j in P.Parallel(BM, Jp):
                low[i, j] = acc[i, j + Jp]
            for i, j in P.Parallel(BM, Jp):
                if b * BM + i < T and j < J:
                    part[s, b * BM + i, 0, j] = acc[i, j] + low[i, j]
            for i in P.Parallel(BM):
                if b * BM + i < T:
                    psq[s, b * BM + i, 0] = total[i]

    return main


def _gemm_sumsq_c(P, K, J, n, H, BM=64):
    """k outermost, j innermost and contiguous: independent sums, vectorized without reassociation."""
    T, S, Jp = P.dynamic("T"), P.dynamic("S"), padded(J)

    @P.prim_func
    def main(
        x: P.Tensor(x_shape(T, K, n, H), BF16),
        F: P.Tensor((2, Jp, K), BF16),
        part: P.Tensor((S, T, 1, J), F32),
        psq: P.Tensor((S, T, 1), F32),
        steps: P.int32,
    ):
        with P.Kernel(P.ceildiv(T, BM), S, threads=1) as (b, s):
            x = P.reshape(x, (T, K))
            xf = P.alloc_local((STEP,), F32)
            ft = P.alloc_local((STEP, Jp), F32)
            acc = P.alloc_local((BM, Jp), F32)
            squares = P.alloc_local((BM,), F32)
            square = P.alloc_local((1,), F32)
            for i, j in P.grid(BM, Jp):
                acc[i, j] = 0
            for i in P.serial(BM):
                squares[i] = 0
            for c in P.serial(steps):
                for j, k in P.grid(Jp, STEP):
                    hi = P.to_f32(F[0, j, (s * steps + c) * STEP + k], BF16)
                    ft[k, j] = hi + P.to_f32(F[1, j, (s * steps + c) * STEP + k], BF16)
                for i in P.serial(P.min(BM, T - b * BM)):
                    for k in P.serial(STEP):
                        xf[k] = P.to_f32(x[b * BM + i, (s * steps + c) * STEP + k], BF16)
                    for k in P.serial(STEP):
                        for j in P.serial(Jp):
                            acc[i, j] = acc[i, j] + xf[k] * ft[k, j]
                    for k in P.serial(STEP):
                        xf[k] = xf[k] * xf[k]
                    P.reduce_sum(xf, square)
                    squares[i] = squares[i] + square[0]
            for i in P.serial(P.min(BM, T - b * BM)):
                psq[s, b * BM + i, 0] = squares[i]
                for j in P.serial(J):
                    part[s, b * BM + i, 0, j] = acc[i, j]

    return main


def gemm_bwd(P, K, J, has, n=0, H=0):
    """d_x[t, k] = sum_j dy[t, j] * F[j, k] + 2 * x[t, k] * dq[t]; part[r, j, k] = sum over rows of slice r of dy[t, j] * x[t, k].

    A block owns some columns and walks over the rows of its slice: the sums over rows stay in registers.
    """
    want_x, want_part, add = bool(has & {"d_residual", "x_grad"}), "part" in has, bool(has & {"+d_residual", "+x_grad"})
    if P.cpu:
        return _gemm_bwd_c(P, K, J, n, H, want_x, want_part, add)
    from tilelang.layout import make_swizzled_layout

    T, R, Jp, BT = P.dynamic("T"), P.dynamic("R"), padded(J), BACKWARD_ROWS
    BN = BACKWARD_COLUMNS if large_shared(P) else BACKWARD_COLUMNS // 2
    # two blocks a multiprocessor share its shared memory
    stages = 2 if add or not large_shared(P) else 3
    hopper = P.sm == 90
    # on Hopper the products for d_x are under way together; the wait of the last product is for all of them
    gemm = P.wgmma_gemm if hopper else P.gemm
    across = P.GemmWarpPolicy.FullCol if hopper else P.GemmWarpPolicy.Square
    down = P.GemmWarpPolicy.FullRow if hopper else P.GemmWarpPolicy.Square

    @P.prim_func
    def main(
        dy: P.Tensor((T, 2, Jp), BF16),
        dq: P.Tensor((T, 1), F32),
        F: P.Tensor((2, Jp, K), BF16),
        x: P.Tensor(x_shape(T, K, n, H), BF16),
        d_x: P.Tensor(x_shape(T, K, n, H), BF16),
        part: P.Tensor((R, J, K), F32),
        steps: P.int32,
    ):
        with P.Kernel(K // BN, R, threads=256) as (b, r):
            if hopper:
                P.annotate_min_blocks_per_sm(2)
                P.no_set_max_nreg()
            dy = P.reshape(dy, (T, 2 * Jp))
            x = P.reshape(x, (T, K))
            F = P.reshape(F, (2 * Jp, K))
            # two views: through one buffer, the loads of later rows would wait for the stores of earlier ones
            old = P.reshape(d_x, (T, K))
            d_x = P.reshape(d_x, (T, K))
            xs = P.alloc_shared((BT, BN), BF16)
            dys = P.alloc_shared((BT, 2 * Jp), BF16)
            f_hi = P.alloc_shared((Jp, BN), BF16)
            f_lo = P.alloc_shared((Jp, BN), BF16)
            olds = P.alloc_shared((BT, BN), BF16)
            news = P.alloc_shared((BT, BN), BF16)
            dx = P.alloc_fragment((BT, BN), F32)
            df = P.alloc_fragment((BN, Jp), F32)
            q = P.alloc_fragment((BT,), F32)
            if want_x:
                P.copy(F[0, b * BN], f_hi)
                P.copy(F[Jp, b * BN], f_lo)
            if add:
                P.annotate_layout({olds: make_swizzled_layout(olds)})
            if want_part:
                P.clear(df)
            for t in P.Pipelined(P.min(steps, P.ceildiv(T, BT) - r * steps), num_stages=staged(P, stages)):
                P.copy(dy[(r * steps + t) * BT, 0], dys)
                P.copy(x[(r * steps + t) * BT, b * BN], xs)
                if add:
                    P.copy(old[(r * steps + t) * BT, b * BN], olds)
                if want_x:
                    for i in P.Parallel(BT):
                        q[i] = P.if_then_else((r * steps + t) * BT + i < T, 2 * dq[(r * steps + t) * BT + i, 0], P.float32(0))
                    gemm(dys[0:BT, 0:Jp], f_hi, dx, policy=across, clear_accum=True)
                    gemm(dys[0:BT, 0:Jp], f_lo, dx, policy=across)
                    if want_part:
                        gemm(dys[0:BT, Jp : 2 * Jp], f_hi, dx, policy=across)
                    else:
                        P.gemm(dys[0:BT, Jp : 2 * Jp], f_hi, dx, policy=across)
                if want_part:
                    gemm(xs, dys[0:BT, 0:Jp], df, transpose_A=True, policy=down)
                    P.gemm(xs, dys[0:BT, Jp : 2 * Jp], df, transpose_A=True, policy=down)
                if want_x:
                    for i, j in P.Parallel(BT, BN):
                        dx[i, j] = dx[i, j] + q[i] * P.to_f32(xs[i, j], BF16)
                    if add:
                        for i, j in P.Parallel(BT, BN):
                            dx[i, j] = dx[i, j] + P.to_f32(olds[i, j], BF16)
                    if hopper:
                        # the store of the rows before has had the time of the products
                        P.tma_store_wait(0)
                        P.copy(dx, news)
                        P.tma_copy(news, d_x[(r * steps + t) * BT : (r * steps + t) * BT + BT, b * BN : b * BN + BN])
                    else:
                        P.copy(dx, news)
                        P.copy(news, d_x[(r * steps + t) * BT, b * BN])
            if want_x and hopper:
                P.tma_store_wait(0)
            if want_part:
                for i, j in P.Parallel(BN, Jp):
                    if j < J:
                        part[r, j, b * BN + i] = df[i, j]

    return main


def _gemm_bwd_c(P, K, J, n, H, want_x, want_part, add, BN=128):
    """Columns innermost and contiguous: independent sums, vectorized without reassociation."""
    T, R, Jp = P.dynamic("T"), P.dynamic("R"), padded(J)

    @P.prim_func
    def main(
        dy: P.Tensor((T, 2, Jp), BF16),
        dq: P.Tensor((T, 1), F32),
        F: P.Tensor((2, Jp, K), BF16),
        x: P.Tensor(x_shape(T, K, n, H), BF16),
        d_x: P.Tensor(x_shape(T, K, n, H), BF16),
        part: P.Tensor((R, J, K), F32),
        steps: P.int32,
    ):
        with P.Kernel(K // BN, R, threads=1) as (b, r):
            x = P.reshape(x, (T, K))
            d_x = P.reshape(d_x, (T, K))
            ff = P.alloc_local((J, BN), F32)
            df = P.alloc_local((J, BN), F32)
            xf = P.alloc_local((BN,), F32)
            dx = P.alloc_local((BN,), F32)
            g = P.alloc_local((J,), F32)
            for j, k in P.grid(J, BN):
                ff[j, k] = P.to_f32(F[0, j, b * BN + k], BF16) + P.to_f32(F[1, j, b * BN + k], BF16)
                df[j, k] = 0
            for i in P.serial(P.min(steps * BACKWARD_ROWS, T - r * steps * BACKWARD_ROWS)):
                t = r * steps * BACKWARD_ROWS + i
                for j in P.serial(J):
                    g[j] = P.to_f32(dy[t, 0, j], BF16) + P.to_f32(dy[t, 1, j], BF16)
                for k in P.serial(BN):
                    xf[k] = P.to_f32(x[t, b * BN + k], BF16)
                if want_part:
                    for j, k in P.grid(J, BN):
                        df[j, k] = df[j, k] + g[j] * xf[k]
                if want_x:
                    for k in P.serial(BN):
                        dx[k] = 2 * dq[t, 0] * xf[k]
                    for j, k in P.grid(J, BN):
                        dx[k] = dx[k] + g[j] * ff[j, k]
                    if add:
                        for k in P.serial(BN):
                            dx[k] = dx[k] + P.to_f32(d_x[t, b * BN + k], BF16)
                    for k in P.serial(BN):
                        d_x[t, b * BN + k] = P.from_f32(dx[k], BF16)
            if want_part:
                for j, k in P.grid(J, BN):
                    part[r, j, b * BN + k] = df[j, k]

    return main
