"""`mhc_pre_norm_fn`: the flattened residual streams, RMS-normalised and projected on the mixes; the norm comes after the product.

F = fn * w (row by row)    x = vec(residual_t), K = n * H columns
y_j = sum_k x_k F[j, k]    q = sum_k x_k^2    r = 1 / sqrt(q / K + eps)    out_j = y_j r

With g = d_out:  dy = g r    dq = -1/2 (sum_j g_j y_j) r / (q + eps K)
d_x_k = sum_j dy_j F[j, k] + 2 x_k dq    dF[j, k] = sum_t dy_tj x_tk    d_fn = dF * w    d_w_k = sum_j dF[j, k] fn[j, k]

The parts of it are operations of their own, without a gradient, for users who fuse their own chains.
"""

import dataclasses

from tk_core.errors import type_error, value_error
from tk_core.op import Env, Launch, Op, declare
from tk_core.ops.mhc.common import check_hidden
from tk_core.ops.mhc.norm_fn_gemm import BACKWARD_COLUMNS, BACKWARD_ROWS, FORWARD_ROWS, STEP, gemm_bwd, gemm_sumsq, padded
from tk_core.ops.mhc.norm_fn_parts import LANES, merge_bwd, merge_fwd, reduce_rms, rms_bwd, split_fn, split_rows, sum_slices

# Blocks that fill a large GPU once, forward and backward. Constants, so that the order of every sum is the same on every GPU.
FORWARD_BLOCKS = 128
BACKWARD_BLOCKS = 264
# Tensor cores cut the sums that they carry, an error that grows with the number of steps (seen on H200: squared relative
# error 3e-11 after 7168 columns, 2e-10 after 8192 rows of two terms each). No sum is carried further than this.
LONGEST_COLUMNS = 8192
LONGEST_ROWS = 4096


# ---- sizes


def k_slices(rows: int, K: int, n_splits: int) -> int:
    """Slices of K: enough blocks to fill a GPU, up to 4 n_splits, each a whole number of steps."""
    steps = K // STEP
    wanted = min(4 * n_splits, -(-FORWARD_BLOCKS // -(-rows // FORWARD_ROWS)))
    least = -(-K // LONGEST_COLUMNS)
    return max((s for s in range(least, wanted + 1) if steps % s == 0), default=min(s for s in range(least, steps + 1) if steps % s == 0))


def row_slices(rows: int, K: int) -> tuple[int, int]:
    """Slices of the rows in the backward kernel, none of them empty, and the steps of each."""
    steps = -(-rows // BACKWARD_ROWS)
    wanted = max(BACKWARD_BLOCKS // (K // BACKWARD_COLUMNS), -(-rows // LONGEST_ROWS), 1)
    each = -(-steps // min(wanted, steps))
    return -(-steps // each), each


def derive(env: Env) -> Env:
    rows, K, J = max(env["rows"], 1), env["n"] * env["H"], env["J"]
    S = k_slices(rows, K, env["n_splits"])
    R, row_steps = row_slices(rows, K)
    return {"K": K, "G": 1, "width": K, "Jp": padded(J), "S": S, "steps": K // STEP // S, "R": R, "row_steps": row_steps}


# ---- argument rules


def check_mixes(op: str, argument: str, env: Env) -> None:
    if not 1 <= env["J"] <= LANES:
        raise value_error(op, argument, f"1 to {LANES} rows", f"{env['J']} rows")


def check_width(op: str, argument: str, env: Env) -> None:
    if env["K"] % STEP or env["K"] == 0:
        raise value_error(op, argument, f"K a positive multiple of {STEP}", f"K = {env['K']}")


def check_eps(op: str, argument: str, eps: object) -> None:
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise type_error(op, argument, "a number", repr(eps))
    if not eps > 0:
        raise value_error(op, argument, "a positive number", eps)


def check_count(op: str, argument: str, count: object) -> None:
    if isinstance(count, bool) or not isinstance(count, int):
        raise type_error(op, argument, "an int", repr(count))
    if count < 1:
        raise value_error(op, argument, "a positive int", count)


def check_precision(op: str, precision: object) -> None:
    if precision not in ("bf16x2", "tf32"):
        raise value_error(op, "precision", "'bf16x2' or 'tf32'", repr(precision))


def check(env: Env) -> None:
    op = "mhc_pre_norm_fn"
    check_hidden(op, "residual", env)
    if env["n"] < 1:
        raise value_error(op, "residual", "n >= 1 streams", f"n = {env['n']}")
    check_mixes(op, "mhc_fn", env)
    check_eps(op, "mhc_norm_eps", env["mhc_norm_eps"])
    check_count(op, "n_splits", env["n_splits"])
    check_precision(op, env["precision"])


DOC = """RMS-normalise the flattened residual streams and project them on the mixes.

out[t, j] = (sum_k x[t, k] F[j, k]) / sqrt(mean_k x[t, k]^2 + eps), with x[t] = vec(residual[t]) and F = mhc_fn * mhc_norm_weight

Args:
    residual: [..., n, H] bfloat16, the residual streams; n >= 1, H a multiple of 128.
    mhc_fn: [J, n * H] float32, the projection; 1 <= J <= 32.
    mhc_norm_weight: [n * H] float32, the weight of the norm, or None.
    mhc_norm_eps: Added to the mean square, > 0.
    n_splits: A hint: the largest number of slices in which K = n * H is summed is about four times this. It changes last bits only.
    precision: "bf16x2" writes every fp32 factor as the sum of two bfloat16 terms; "tf32" rounds it to tf32 first (nearest, ties
        away from zero), to compare with implementations that do so. Both run at the same speed.

Returns:
    out: [..., J] float32.

Raises:
    TypeError: a dtype or the type of an attribute does not fit.
    ValueError: a shape or the range of an attribute does not fit.

Numerics:
    fp32 accumulation in an order that depends on the shapes and n_splits alone. Relative error about 2e-6 (bf16x2), 2e-4 (tf32).
    d_residual is rounded to bfloat16 once, after the value already in an accumulator has been added.

Gradient:
    For residual, mhc_fn and mhc_norm_weight; all three can be accumulated in place.

Source:
    mHC: Manifold-Constrained Hyper-Connections (2025); the interface is that of TileKernels.
"""

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
    doc=DOC,
)


# ---- the parts


def accumulating(op: Op, names: str) -> Op:
    """The operation with results that a caller may have added to buffers of his own."""
    return dataclasses.replace(op, forward=dataclasses.replace(op.forward, accumulates=tuple(names.split())))


mhc_fn_normw_merge_fwd = declare(
    "mhc_fn_normw_merge_fwd",
    "mhc",
    "fn[J, K]:f32 normw[K]:f32 -> out_fn[J, K]:f32",
    [Launch(merge_fwd, "fn normw -> out_fn", key="K J")],
    check=lambda env: check_width("mhc_fn_normw_merge_fwd", "fn", env),
    doc="""Merge the weight of the norm into the projection: out_fn = fn * normw, row by row.

Args:
    fn: [J, K] float32, K a multiple of 128.
    normw: [K] float32.

Returns:
    out_fn: [J, K] float32.
""",
)


def check_merge_bwd(env: Env) -> None:
    check_width("mhc_fn_normw_merge_bwd", "fn", env)
    check_mixes("mhc_fn_normw_merge_bwd", "fn", env)


mhc_fn_normw_merge_bwd = accumulating(
    declare(
        "mhc_fn_normw_merge_bwd",
        "mhc",
        "fn[J, K]:f32 normw[K]:f32 out_fn_grad[J, K]:f32 -> fn_grad[J, K]:f32 normw_grad[K]:f32",
        [Launch(merge_bwd, "out_fn_grad fn normw -> fn_grad normw_grad", key="K J", fixed={"flat": True})],
        check=check_merge_bwd,
        doc="""Gradient of `mhc_fn_normw_merge_fwd`: fn_grad += out_fn_grad * normw, normw_grad[k] += sum_j out_fn_grad[j, k] fn[j, k].

Args:
    fn: [J, K] float32, J <= 32, K a multiple of 128.
    normw: [K] float32.
    out_fn_grad: [J, K] float32.

Returns:
    fn_grad [J, K] and normw_grad [K], float32; added to the accumulators where there are any.
""",
    ),
    "fn_grad normw_grad",
)


def check_gemm_fwd(env: Env) -> None:
    op = "mhc_prenorm_gemm_fwd"
    check_width(op, "x", env)
    check_mixes(op, "fn", env)
    check_count(op, "n_splits", env["n_splits"])
    check_precision(op, env["precision"])
    if env["K"] % (env["n_splits"] * STEP):
        raise value_error(op, "n_splits", f"a divisor of K / {STEP} = {env['K'] // STEP}", env["n_splits"])


mhc_prenorm_gemm_fwd = declare(
    "mhc_prenorm_gemm_fwd",
    "mhc",
    "x[..., K]:bf16 fn[J, K]:f32 -> out_mul_splitted[n_splits, rows, 1, J]:f32 sqrsum_splitted[n_splits, rows, 1]:f32",
    [
        Launch(split_fn, "fn no_weight -> F", key="K J precision"),
        Launch(gemm_sumsq, "x F -> out_mul_splitted sqrsum_splitted; steps", key="K J"),
    ],
    attrs={"n_splits": 1, "precision": "bf16x2"},
    # a name that no launch writes is absent
    work="F[2, Jp, K]:bf16 no_weight[K]:f32",
    check=check_gemm_fwd,
    derive=lambda env: {"Jp": padded(env["J"]), "steps": env["K"] // STEP // env["n_splits"]},
    doc="""Project rows on the mixes, with the sums of their squares, in n_splits slices of the columns.

out_mul_splitted[s, t, 0, j] = sum over slice s of x[t, k] fn[j, k];  sqrsum_splitted[s, t, 0] = sum over slice s of x[t, k]^2

Args:
    x: [..., K] bfloat16, K a multiple of 128 * n_splits.
    fn: [J, K] float32, J <= 32.
    n_splits: Slices of the columns, of equal width.
    precision: As in `mhc_pre_norm_fn`.

Returns:
    out_mul_splitted [n_splits, rows, 1, J] and sqrsum_splitted [n_splits, rows, 1], float32.
""",
)


def check_gemm_bwd(env: Env) -> None:
    op = "mhc_prenorm_gemm_bwd"
    check_width(op, "x", env)
    check_mixes(op, "fn", env)
    check_precision(op, env["precision"])


def derive_gemm_bwd(env: Env) -> Env:
    R, row_steps = row_slices(max(env["rows"], 1), env["K"])
    return {"Jp": padded(env["J"]), "R": R, "row_steps": row_steps}


mhc_prenorm_gemm_bwd = accumulating(
    declare(
        "mhc_prenorm_gemm_bwd",
        "mhc",
        "out_mul_grad[..., 1, J]:f32 sqrsum_grad[..., 1]:f32 x[..., K]:bf16 fn[J, K]:f32 -> x_grad[..., K]:bf16 fn_grad[J, K]:f32",
        [
            Launch(split_fn, "fn no_weight -> F", key="K J precision"),
            Launch(split_rows, "out_mul_grad -> dy", key="J precision"),
            Launch(gemm_bwd, "dy sqrsum_grad F x -> x_grad part; row_steps", key="K J"),
            Launch(sum_slices, "part -> fn_grad", key="K J"),
        ],
        attrs={"precision": "bf16x2"},
        work="F[2, Jp, K]:bf16 no_weight[K]:f32 dy[rows, 2, Jp]:bf16 part[R, J, K]:f32",
        check=check_gemm_bwd,
        derive=derive_gemm_bwd,
        doc="""Gradient of `mhc_prenorm_gemm_fwd`, for the sums over its slices.

x_grad[t, k] += sum_j out_mul_grad[t, j] fn[j, k] + 2 x[t, k] sqrsum_grad[t];  fn_grad[j, k] = sum_t out_mul_grad[t, j] x[t, k]

Args:
    out_mul_grad: [..., 1, J] float32.
    sqrsum_grad: [..., 1] float32.
    x: [..., K] bfloat16, K a multiple of 128.
    fn: [J, K] float32, J <= 32.
    precision: As in `mhc_pre_norm_fn`.

Returns:
    x_grad [..., K] bfloat16, added to the accumulator where there is one, and fn_grad [J, K] float32.
""",
    ),
    "x_grad",
)


def check_reduce(op: str, argument: str, env: Env) -> None:
    check_mixes(op, argument, env)
    check_count(op, "rms_group_size", env["rms_group_size"])
    check_eps(op, "rms_eps", env["rms_eps"])


mhc_reduce_partials_and_rmsnorm_fwd = declare(
    "mhc_reduce_partials_and_rmsnorm_fwd",
    "mhc",
    "out_mul_splitted[S, T, G, J]:f32 sqrsum_splitted[S, T, G]:f32 -> out_mul[T, G, J]:f32 sqrsum[T, G]:f32 out[T, J]:f32",
    [Launch(reduce_rms, "out_mul_splitted sqrsum_splitted -> out out_mul sqrsum; rms_eps", key="G J width")],
    attrs={"rms_group_size": 1, "rms_eps": 1e-6},
    check=lambda env: check_reduce("mhc_reduce_partials_and_rmsnorm_fwd", "out_mul_splitted", env),
    derive=lambda env: {"width": env["rms_group_size"], "rows": env["T"]},
    doc="""Add the slices of `mhc_prenorm_gemm_fwd` in ascending order and normalise in G groups of columns.

out[t, j] = sum_g out_mul[t, g, j] / sqrt(sqrsum[t, g] / rms_group_size + rms_eps)

Args:
    out_mul_splitted: [S, T, G, J] float32, J <= 32.
    sqrsum_splitted: [S, T, G] float32.
    rms_group_size: Columns of a group.
    rms_eps: Added to the mean square, > 0.

Returns:
    out_mul [T, G, J], sqrsum [T, G] and out [T, J], float32.
""",
)

mhc_reduce_partials_and_rmsnorm_bwd = declare(
    "mhc_reduce_partials_and_rmsnorm_bwd",
    "mhc",
    "out_grad[..., J]:f32 out_mul[..., G, J]:f32 sqrsum[..., G]:f32 -> out_mul_grad[..., G, J]:f32 sqrsum_grad[..., G]:f32",
    [Launch(rms_bwd, "out_grad out_mul sqrsum -> out_mul_grad sqrsum_grad; rms_eps", key="G J width")],
    attrs={"rms_group_size": 1, "rms_eps": 1e-6},
    check=lambda env: check_reduce("mhc_reduce_partials_and_rmsnorm_bwd", "out_mul", env),
    derive=lambda env: {"width": env["rms_group_size"]},
    doc="""Gradient of `mhc_reduce_partials_and_rmsnorm_fwd`, for the sums over its slices.

With r_g = 1 / sqrt(sqrsum_g / size + eps):  out_mul_grad_gj = out_grad_j r_g
sqrsum_grad_g = -1/2 (sum_j out_grad_j out_mul_gj) r_g / (sqrsum_g + eps size)

Args:
    out_grad: [..., J] float32, J <= 32.
    out_mul: [..., G, J] float32.
    sqrsum: [..., G] float32.
    rms_group_size: Columns of a group.
    rms_eps: Added to the mean square, > 0.

Returns:
    out_mul_grad [..., G, J] and sqrsum_grad [..., G], float32.
""",
)
