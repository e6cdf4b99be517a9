"""`mhc_pre_norm_fn`: the flattened residual streams, RMS-normalised and projected on the mixes; the norm comes after the product.

F = fn * w (row by row)    x = vec(residual_t), K = n * H columns
y_j = sum_k x_k F[j, k]    q = sum_k x_k^2    r = 1 / sqrt(q / K + eps)    out_j = y_j r

With g = d_out:  dy = g r    dq = -1/2 (sum_j g_j y_j) r / (q + eps K)
d_x_k = sum_j dy_j F[j, k] + 2 x_k dq    dF[j, k] = sum_t dy_tj x_tk    d_fn = dF * w    d_w_k = sum_j dF[j, k] fn[j, k]
"""

from tk_core.errors import type_error, value_error
from tk_core.op import Env, Launch, declare
from tk_core.ops.mhc.common import BF16, F32, check_hidden
from tk_core.ops.mhc.norm_fn_gemm import BACKWARD_COLUMNS, BACKWARD_ROWS, FORWARD_ROWS, STEP, gemm_bwd, gemm_sumsq, padded

# One warp a row: J is at most this.
LANES = 32
ROWS = 8
# Blocks that fill a large GPU once. A constant, so that the order of every sum is the same on every GPU.
BLOCKS = 128


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


def reduce_rms(P, G, J, width, flat=False):
    """Sums the slices in ascending order and normalises: out_j = sum over the groups of y_gj r_g."""
    T, S = P.dynamic("T"), P.dynamic("S")

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
                total = P.alloc_var(F32, init=0)
                if b * ROWS + i < T and j < J:
                    for g in P.serial(G):
                        dot = P.alloc_var(F32, init=0)
                        square = P.alloc_var(F32, init=0)
                        for s in P.serial(S):
                            dot = dot + part[s, b * ROWS + i, g, j]
                            square = square + psq[s, b * ROWS + i, g]
                        y[b * ROWS + i, g, j] = dot
                        if j == 0:
                            q[b * ROWS + i, g] = square
                        total = P.fma(dot, rms(P, square, width, eps), total)
                    out[b * ROWS + i, j] = total

    return main


def rms_bwd(P, G, J, width, precision="", flat=False):
    """dy and dq of the formulas above; dy in two bfloat16 terms where a precision is given, fp32 otherwise."""
    T, Jp = P.dynamic("T"), padded(J)
    dtype = BF16 if precision else F32

    @P.prim_func
    def main(
        d_out: P.Tensor((T, J), F32),
        y: P.Tensor((T, J) if flat else (T, G, J), F32),
        q: P.Tensor((T,) if flat else (T, G), F32),
        dy: P.Tensor((T, 2, Jp) if precision else (T, G, J), dtype),
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
                    if precision:
                        dy[b * ROWS + i, 0, j] = split(P, v, precision, 0)
                        dy[b * ROWS + i, 1, j] = split(P, v, precision, 1)
                    else:
                        if j < J:
                            dy[b * ROWS + i, g, j] = v

    return main


# ---- parameter gradients


def merge_bwd(P, K, J, has, flat=False, threads=128):
    """dF = sum of the partial sums in ascending order; d_fn = dF * w, d_w = column sums of dF * fn."""
    R = P.dynamic("R")
    weighted = bool(has & {"mhc_norm_weight", "normw"})
    want_fn, add_fn = bool(has & {"d_mhc_fn", "fn_grad"}), bool(has & {"+d_mhc_fn", "+fn_grad"})
    want_w, add_w = bool(has & {"d_mhc_norm_weight", "normw_grad"}), bool(has & {"+d_mhc_norm_weight", "+normw_grad"})

    @P.prim_func
    def main(
        part: P.Tensor((J, K) if flat else (R, J, K), F32),
        fn: P.Tensor((J, K), F32),
        w: P.Tensor((K,), F32),
        d_fn: P.Tensor((J, K), F32),
        d_w: P.Tensor((K,), F32),
    ):
        with P.Kernel(P.ceildiv(K, threads), threads=threads) as b:
            part = P.reshape(part, (1 if flat else R, J, K))
            for c in P.Parallel(threads):
                k = b * threads + c
                total = P.alloc_local((J,), F32)
                weight = P.alloc_var(F32, init=1)
                d_weight = P.alloc_var(F32, init=0)
                if weighted:
                    weight = w[k]
                for j in P.unroll(J):
                    total[j] = 0
                # all J loads of a partial sum are under way at once
                for r in P.serial(1 if flat else R):
                    for j in P.unroll(J):
                        total[j] = total[j] + part[r, j, k]
                for j in P.unroll(J):
                    if want_w:
                        d_weight = d_weight + total[j] * fn[j, k]
                    if want_fn:
                        if weighted:
                            total[j] = total[j] * weight
                        if add_fn:
                            total[j] = total[j] + d_fn[j, k]
                        d_fn[j, k] = total[j]
                if want_w:
                    if add_w:
                        d_weight = d_weight + d_w[k]
                    d_w[k] = d_weight

    return main


# ---- sizes and rules


def k_slices(rows: int, K: int, n_splits: int) -> int:
    """Slices of K: enough blocks to fill a GPU, at most 4 n_splits, each a whole number of steps."""
    wanted = min(4 * n_splits, -(-BLOCKS // -(-rows // FORWARD_ROWS)))
    return max(s for s in range(1, wanted + 1) if K // STEP % s == 0)


def row_slices(rows: int, K: int) -> int:
    """Slices of the rows in the backward kernel: what keeps a large GPU evenly busy, counting two steps of start-up a block."""
    columns = -(-K // BACKWARD_COLUMNS)
    steps = -(-rows // BACKWARD_ROWS)
    return min(range(1, min(steps, 16) + 1), key=lambda r: -(-columns * r // BLOCKS) * (-(-steps // r) + 2))


def derive(env: Env) -> Env:
    rows, K, J = env["rows"], env["n"] * env["H"], env["J"]
    S = k_slices(max(rows, 1), K, env["n_splits"])
    steps = -(-rows // BACKWARD_ROWS)
    row_steps = -(-steps // row_slices(max(rows, 1), K))
    sizes = {"K": K, "G": 1, "width": K, "Jp": padded(J)}
    return {**sizes, "S": S, "steps": K // STEP // S, "R": -(-steps // max(row_steps, 1)), "row_steps": row_steps}


def check(env: Env) -> None:
    op = "mhc_pre_norm_fn"
    check_hidden(op, "residual", env)
    if env["n"] < 1:
        raise value_error(op, "residual", "n >= 1 streams", f"n = {env['n']}")
    check_mixes(op, "mhc_fn", env)
    check_eps(op, "mhc_norm_eps", env["mhc_norm_eps"])
    check_splits(op, env["n_splits"])
    check_precision(op, env["precision"])


def check_mixes(op: str, argument: str, env: Env) -> None:
    if not 1 <= env["J"] <= LANES:
        raise value_error(op, argument, f"1 to {LANES} rows", f"{env['J']} rows")


def check_eps(op: str, argument: str, eps: object) -> None:
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise type_error(op, argument, "a number", repr(eps))
    if not eps > 0:
        raise value_error(op, argument, "a positive number", eps)


def check_splits(op: str, n_splits: object) -> None:
    if isinstance(n_splits, bool) or not isinstance(n_splits, int):
        raise type_error(op, "n_splits", "an int", repr(n_splits))
    if n_splits < 1:
        raise value_error(op, "n_splits", "a positive int", n_splits)


def check_precision(op: str, precision: object) -> None:
    if precision not in ("bf16x2", "tf32"):
        raise value_error(op, "precision", "'bf16x2' or 'tf32'", repr(precision))


mhc_pre_norm_fn = declare(
    "mhc_pre_norm_fn",
    "mhc",
    "residual[..., n, H]:bf16 mhc_fn[J, n*H]:f32 mhc_norm_weight?[n*H]:f32 -> out[..., J]:f32 y[..., J]:f32 q[...]:f32",
    [
        Launch(split_fn, "mhc_fn mhc_norm_weight -> F", key="K J precision"),
        Launch(gemm_sumsq, "residual F -> part psq; steps", key="K J n H"),
        Launch(reduce_rms, "part psq -> out y q; mhc_norm_eps", key="G J width", fixed={"flat": True}),
    ],
    returns="out",
    attrs={"mhc_norm_eps": 1e-6, "n_splits": 16, "precision": "bf16x2"},
    work="F[2, Jp, K]:bf16 part[S, rows, 1, J]:f32 psq[S, rows, 1]:f32",
    check=check,
    derive=derive,
    backward="d_out residual mhc_fn mhc_norm_weight y q -> d_residual d_mhc_fn d_mhc_norm_weight",
    backward_launches=[
        Launch(split_fn, "mhc_fn mhc_norm_weight -> F", key="K J precision"),
        Launch(rms_bwd, "d_out y q -> dy dq; mhc_norm_eps", key="G J width precision", fixed={"flat": True}),
        Launch(gemm_bwd, "dy dq F residual -> d_residual part; row_steps", key="K J n H"),
        Launch(merge_bwd, "part mhc_fn mhc_norm_weight -> d_mhc_fn d_mhc_norm_weight", key="K J"),
    ],
    backward_work="F[2, Jp, K]:bf16 dy[rows, 2, Jp]:bf16 dq[rows, 1]:f32 part[R, J, K]:f32",
    backward_derive=derive,
    accumulates="d_residual d_mhc_fn d_mhc_norm_weight",
)
