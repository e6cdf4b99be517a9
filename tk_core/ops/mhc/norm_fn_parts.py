"""The small kernels around the matrix kernels of `mhc_pre_norm_fn`: operands, normalisation, parameter gradients.

The formulas are those of norm_fn.py.
"""

from tk_core.ops.mhc.common import BF16, F32
from tk_core.ops.mhc.norm_fn_gemm import padded

# One warp a row: there are at most this many mixes.
LANES = 32
ROWS = 8
# Partial sums that are loaded at once, to be added one after the other.
AHEAD = 8


# ---- operands of the matrix kernels


def split(P, value, precision, term):
    """Term 0 or 1 of value = hi + lo in bfloat16; "tf32" first rounds to 10 bits, which two terms hold exactly."""
    if precision == "tf32":
        value = round_tf32(P, value)
    hi = P.from_f32(value, BF16)
    return hi if term == 0 else P.from_f32(value - P.to_f32(hi, BF16), BF16)


def round_tf32(P, value):
    """Nearest, ties away from zero; a NaN stays one."""
    bits = P.reinterpret(value, "int32")
    rounded = P.reinterpret(P.bitwise_and(bits + 0x1000, -0x2000), F32)
    return P.if_then_else(P.isnan(value), value, rounded)


def merge_fwd(P, K, J, threads=128):
    """out_fn = fn * normw, row by row."""
    B = 128 if P.cpu else threads * 8

    @P.prim_func
    def main(fn: P.Tensor((J, K), F32), w: P.Tensor((K,), F32), out: P.Tensor((J, K), F32)):
        with P.Kernel(J, P.ceildiv(K, B), threads=threads) as (j, b):
            for k in P.Parallel(B):
                if b * B + k < K:
                    out[j, b * B + k] = fn[j, b * B + k] * w[b * B + k]

    return main


def split_fn(P, K, J, precision, has, threads=128):
    """F[0] + F[1] = fn * w; rows J and beyond are zero, for the padding of the matrix instructions."""
    Jp = padded(J)
    B = 128 if P.cpu else threads * 8
    weighted = "mhc_norm_weight" in has

    @P.prim_func
    def main(fn: P.Tensor((J, K), F32), w: P.Tensor((K,), F32), F: P.Tensor((2, Jp, K), BF16)):
        with P.Kernel(Jp, P.ceildiv(K, B), threads=threads) as (j, b):
            v = P.alloc_fragment((B,), F32)
            ws = P.alloc_fragment((B,), F32)
            if j < J:
                P.load(fn[j, b * B : b * B + B], v, F32)
            else:
                P.clear(v)
            if weighted:
                P.load(w[b * B : b * B + B], ws, F32)
                for k in P.Parallel(B):
                    v[k] = v[k] * ws[k]
            for k in P.Parallel(B):
                if b * B + k < K:
                    F[0, j, b * B + k] = split(P, v[k], precision, 0)
            for k in P.Parallel(B):
                if b * B + k < K:
                    F[1, j, b * B + k] = split(P, v[k], precision, 1)

    return main


def split_rows(P, J, precision):
    """dy[t, 0] + dy[t, 1] = g[t], padded with zeros like F."""
    T, Jp = P.dynamic("T"), padded(J)

    @P.prim_func
    def main(g: P.Tensor((T, 1, J), F32), dy: P.Tensor((T, 2, Jp), BF16)):
        with P.Kernel(P.ceildiv(T, ROWS), threads=ROWS * LANES) as b:
            for i, j in P.Parallel(ROWS, Jp):
                v = P.alloc_var(F32, init=0)
                if b * ROWS + i < T:
                    if j < J:
                        v = g[b * ROWS + i, 0, j]
                    dy[b * ROWS + i, 0, j] = split(P, v, precision, 0)
                    dy[b * ROWS + i, 1, j] = split(P, v, precision, 1)

    return main


# ---- normalisation


def rms(P, q, width, eps):
    """The factor that normalises a row whose `width` squares sum to q."""
    return P.f32(1) / P.sqrt(q / P.f32(width) + eps)


def reduce_rms(P, G, J, width, has, flat=False):
    """Sums the slices in ascending order and normalises: out_j = sum over the groups of y_gj r_g."""
    T, S = P.dynamic("T"), P.dynamic("S")
    keep_y, keep_q = bool(has & {"y", "out_mul"}), bool(has & {"q", "sqrsum"})

    @P.prim_func
    def main(
        part: P.Tensor((S, T, G, J), F32),
        psq: P.Tensor((S, T, G), F32),
        out: P.Tensor((T, J), F32),
        y: P.Tensor((T, J) if flat else (T, G, J), F32),
        q: P.Tensor((T,) if flat else (T, G), F32),
        eps: P.float32,
    ):
        with P.Kernel(P.ceildiv(T, ROWS), threads=ROWS * LANES) as b:
            y = P.reshape(y, (T, G, J))
            q = P.reshape(q, (T, G))
            for i, j in P.Parallel(ROWS, LANES):
                dots = P.alloc_local((AHEAD,), F32)
                squares = P.alloc_local((AHEAD,), F32)
                total = P.alloc_var(F32, init=0)
                if b * ROWS + i < T and j < J:
                    for g in P.serial(G):
                        dot = P.alloc_var(F32, init=0)
                        square = P.alloc_var(F32, init=0)
                        for s in P.serial(P.ceildiv(S, AHEAD)):
                            for u in P.unroll(AHEAD):
                                dots[u] = 0
                                squares[u] = 0
                                if s * AHEAD + u < S:
                                    dots[u] = part[s * AHEAD + u, b * ROWS + i, g, j]
                                    squares[u] = psq[s * AHEAD + u, b * ROWS + i, g]
                            for u in P.unroll(AHEAD):
                                dot = dot + dots[u]
                                square = square + squares[u]
                        if keep_y:
                            y[b * ROWS + i, g, j] = dot
                        if keep_q:
                            if j == 0:
                                q[b * ROWS + i, g] = square
                        total = P.fma(dot, rms(P, square, width, eps), total)
                    out[b * ROWS + i, j] = total

    return main


def rms_bwd(P, G, J, width, precision="", flat=False):
    """dy and dq; dy in two bfloat16 terms where a precision is given, fp32 otherwise."""
    T, Jp = P.dynamic("T"), padded(J)
    terms = precision != ""

    @P.prim_func
    def main(
        d_out: P.Tensor((T, J), F32),
        y: P.Tensor((T, J) if flat else (T, G, J), F32),
        q: P.Tensor((T,) if flat else (T, G), F32),
        dy: P.Tensor((T, 2, Jp) if terms else (T, G, J), BF16 if terms else F32),
        dq: P.Tensor((T, G), F32),
        eps: P.float32,
    ):
        with P.Kernel(P.ceildiv(T, ROWS), G, threads=ROWS * LANES) as (b, g):
            y = P.reshape(y, (T, G, J))
            q = P.reshape(q, (T, G))
            product = P.alloc_fragment((ROWS, LANES), F32)
            dot = P.alloc_fragment((ROWS,), F32)
            for i, j in P.Parallel(ROWS, LANES):
                product[i, j] = 0
                if b * ROWS + i < T and j < J:
                    product[i, j] = d_out[b * ROWS + i, j] * y[b * ROWS + i, g, j]
            P.reduce_sum(product, dot)
            for i in P.Parallel(ROWS):
                if b * ROWS + i < T:
                    square = q[b * ROWS + i, g]
                    dq[b * ROWS + i, g] = P.f32(-0.5) * dot[i] * (rms(P, square, width, eps) / (square + eps * P.f32(width)))
            for i, j in P.Parallel(ROWS, Jp):
                v = P.alloc_var(F32, init=0)
                if b * ROWS + i < T:
                    if j < J:
                        v = d_out[b * ROWS + i, j] * rms(P, q[b * ROWS + i, g], width, eps)
                    if terms:
                        dy[b * ROWS + i, 0, j] = split(P, v, precision, 0)
                        dy[b * ROWS + i, 1, j] = split(P, v, precision, 1)
                    else:
                        if j < J:
                            dy[b * ROWS + i, g, j] = v

    return main


# ---- parameter gradients


def merge_bwd(P, K, J, has, flat=False, threads=128):
    """dF = sum of the partial sums in ascending order; d_fn = dF * w, d_w = column sums of dF * fn."""
    R = 1 if flat else P.dynamic("R")
    weighted = bool(has & {"mhc_norm_weight", "normw"})
    want_fn, add_fn = bool(has & {"d_mhc_fn", "fn_grad"}), bool(has & {"+d_mhc_fn", "+fn_grad"})
    want_w, add_w = bool(has & {"d_mhc_norm_weight", "normw_grad"}), bool(has & {"+d_mhc_norm_weight", "+normw_grad"})
    # a thread owns a column: all J loads of a partial sum are under way at once
    layout = None if P.cpu else P.Fragment([J, threads], forward_fn=lambda j, c: (c, j))

    @P.prim_func
    def main(
        part: P.Tensor((J, K) if flat else (R, J, K), F32),
        fn: P.Tensor((J, K), F32),
        w: P.Tensor((K,), F32),
        d_fn: P.Tensor((J, K), F32),
        d_w: P.Tensor((K,), F32),
    ):
        with P.Kernel(K // threads, threads=threads) as b:
            part = P.reshape(part, (R, J, K))
            total = P.alloc_fragment((J, threads), F32)
            column = P.alloc_fragment((threads,), F32)
            for j, c in P.Parallel(J, threads, loop_layout=layout):
                total[j, c] = 0
            for r in P.serial(R):
                for j, c in P.Parallel(J, threads):
                    total[j, c] = total[j, c] + part[r, j, b * threads + c]
            if want_w:
                for c in P.Parallel(threads):
                    column[c] = 0
                for j in P.unroll(J):
                    for c in P.Parallel(threads):
                        column[c] = column[c] + total[j, c] * fn[j, b * threads + c]
                for c in P.Parallel(threads):
                    if add_w:
                        column[c] = column[c] + d_w[b * threads + c]
                    d_w[b * threads + c] = column[c]
            if want_fn:
                for j, c in P.Parallel(J, threads):
                    if weighted:
                        total[j, c] = total[j, c] * w[b * threads + c]
                    if add_fn:
                        total[j, c] = total[j, c] + d_fn[j, b * threads + c]
                    d_fn[j, b * threads + c] = total[j, c]

    return main


def sum_slices(P, K, J, threads=128):
    """The sum of the partial sums in ascending order."""
    R = P.dynamic("R")

    @P.prim_func
    def main(part: P.Tensor((R, J, K), F32), out: P.Tensor((J, K), F32)):
        with P.Kernel(J, K // threads, threads=threads) as (j, b):
            total = P.alloc_fragment((threads,), F32)
            for c in P.Parallel(threads):
                total[c] = 0
            for r in P.serial(R):
                for c in P.Parallel(threads):
                    total[c] = total[c] + part[r, j, b * threads + c]
            for c in P.Parallel(threads):
                out[j, b * threads + c] = total[c]

    return main
