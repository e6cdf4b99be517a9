"""Balance of experts: the load-balance loss with its gradient, and the bias rule that needs no loss.

f[b, e] = E count[b, e] / (num_aux_topk n_b)      loss = (1 / B) sum_be f[b, e] q[b, e] / n_b      d_q[b, e] = d_loss f[b, e] / (B n_b)
bias_e <- bias_e + gamma sign(mean(count) - count_e)

The loss is one block, its gradient a thread an element. The bias rule is arithmetic on integers in operators that both frameworks have.
"""

from typing import Any

from tk_core.errors import type_error, value_error
from tk_core.op import Env, Launch, declare
from tk_core.ops.mhc.common import block_sums, lanes, thread
from tk_core.ops.moe.common import F32, I32
from tk_core.ops.quant.bits import divide

THREADS = 1024
MAX_SIZE = 2**31 - 2**20


def share_of_load(P, count, rows, E, num_aux_topk):
    """f of one expert, every product and quotient rounded."""
    return divide(P, P.mul(P.Cast(F32, count), P.Cast(F32, E)), P.mul(P.Cast(F32, rows), P.Cast(F32, num_aux_topk)))


def rows_of(P, num_rows, num_rows_value, b, there: bool):
    """n_b, at least one."""
    return P.max(num_rows[b] if there else num_rows_value, 1)


def loss(P, counts_dtype, has):
    """A block takes all sequences: its threads go through the elements in steps, and their sums are added in a fixed order."""
    B, E = P.dynamic("B"), P.dynamic("E")
    threads, L = 1 if P.cpu else THREADS, lanes(P)
    there, sums = "num_rows" in has, block_sums(P)

    @P.prim_func
    def main(
        scores_sum: P.Tensor((B, E), F32),
        counts: P.Tensor((B, E), counts_dtype),
        num_rows: P.Tensor((B,), I32),
        loss: P.Tensor((1,), F32),
        num_rows_value: P.int32,
        num_aux_topk: P.int32,
    ):
        with P.Kernel(1, threads=threads) as _:
            acc = P.alloc_local((1, L), F32)
            total = P.alloc_local((1,), F32)
            n = P.alloc_local((1,), I32)
            shared = P.alloc_shared((max(1, threads // 32),), F32)
            for lane in P.serial(L):
                acc[0, lane] = P.f32(0)
            for r in P.serial(P.ceildiv(B * E, threads)):
                i = r * threads + thread(P)
                if i < B * E:
                    n[0] = rows_of(P, num_rows, num_rows_value, i // E, there)
                    share = share_of_load(P, counts[i // E, i % E], n[0], E, num_aux_topk)
                    acc[0, 0] = P.fma(share, divide(P, scores_sum[i // E, i % E], P.Cast(F32, n[0])), acc[0, 0])
            sums(acc, total, shared, 1, threads)
            if thread(P) == 0:
                loss[0] = divide(P, total[0], P.Cast(F32, P.max(B, 1)))

    return main


def loss_bwd(P, counts_dtype, has):
    """A thread takes an element."""
    B, E = P.dynamic("B"), P.dynamic("E")
    threads = 1 if P.cpu else 256
    there = "num_rows" in has

    @P.prim_func
    def main(
        d_loss: P.Tensor((1,), F32),
        counts: P.Tensor((B, E), counts_dtype),
        num_rows: P.Tensor((B,), I32),
        d_scores_sum: P.Tensor((B, E), F32),
        num_rows_value: P.int32,
        num_aux_topk: P.int32,
    ):
        with P.Kernel(P.ceildiv(B * E, threads), threads=threads) as block:
            i = block * threads + thread(P)
            n = P.alloc_local((1,), I32)
            if i < B * E:
                n[0] = rows_of(P, num_rows, num_rows_value, i // E, there)
                share = share_of_load(P, counts[i // E, i % E], n[0], E, num_aux_topk)
                d_scores_sum[i // E, i % E] = divide(P, P.mul(d_loss[0], share), P.mul(P.Cast(F32, B), P.Cast(F32, n[0])))

    return main


def check(env: Env) -> None:
    op = "load_balance_loss"
    if env["num_aux_topk"] < 1:
        raise value_error(op, "num_aux_topk", "at least 1", env["num_aux_topk"])
    if env["B"] * env["E"] > MAX_SIZE:
        raise value_error(op, "scores_sum", f"at most {MAX_SIZE} entries", f"{env['B']} x {env['E']}")


DOC = """Load-balance loss of a gate, alpha where scores and load are balanced.

loss = (alpha / B) * sum_be f[b, e] * scores_sum[b, e] / n_b with f[b, e] = E * counts[b, e] / (num_aux_topk * n_b)

Args:
    scores_sum: [B, E] f32, shares of the experts in the scores, summed over the rows of every sequence.
    counts: [B, E] i32 or i64, how often every expert was chosen; of one sequence also [E].
    num_rows: rows n_b that take part, an int or [B] i32; counted as at least 1.
    num_aux_topk: experts of a row; a divisor.
    alpha: factor of the loss, a float or a scalar array.

Returns:
    f32 scalar.

Raises:
    TypeError: a dtype or a kind is another one.
    ValueError: shapes that do not fit, or num_aux_topk < 1.

Numerics:
    fp32, in an order that depends on the shape alone.

Gradient:
    To scores_sum: alpha * f[b, e] / (B * n_b). The counts are constants.

Source:
    Switch Transformers, 2021; DeepSeek-V3 Technical Report, 2024.
"""

SCALARS = "num_rows_value num_aux_topk"

load_balance_loss = declare(
    "load_balance_loss",
    "moe",
    "scores_sum[B, E]:f32 counts[B, E]:i32|i64 num_rows?[B]:i32 -> loss[1]:f32",
    [Launch(loss, f"scores_sum counts num_rows -> loss; {SCALARS}", key="counts_dtype")],
    attrs={"num_rows_value": 1, "num_aux_topk": 1},
    dynamic="num_rows_value",
    backward="d_loss counts num_rows -> d_scores_sum",
    backward_launches=[Launch(loss_bwd, f"d_loss counts num_rows -> d_scores_sum; {SCALARS}", key="counts_dtype")],
    check=check,
    doc=DOC,
)


def _judge_array(op: str, argument: str, value: Any, *dtypes: str) -> None:
    """An array of one of some dtypes."""
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    if not hasattr(value, "shape") or not dtype:
        raise type_error(op, argument, f"a {' or '.join(dtypes)} array", type(value).__name__)
    if dtype not in dtypes:
        raise type_error(op, argument, f"dtype {' or '.join(dtypes)}", dtype)


def judge_number(op: str, argument: str, value: Any) -> None:
    """A number, or an array that is one."""
    if isinstance(value, bool) or not (isinstance(value, int | float) or getattr(value, "shape", None) == ()):
        raise type_error(op, argument, "a float", f"{value!r} of type {type(value).__name__}")


def judge_loss(scores_sum: Any, counts: Any, num_rows: Any, num_aux_topk: Any, alpha: Any) -> tuple[Any, Any, dict[str, int]]:
    """Counts of two axes, rows of sequences where they are an array, and the attributes of a loss."""
    op = "load_balance_loss"
    _judge_array(op, "scores_sum", scores_sum, "float32")
    _judge_array(op, "counts", counts, "int32", "int64")
    if len(scores_sum.shape) != 2:
        raise value_error(op, "scores_sum", "shape (B, E)", tuple(scores_sum.shape))
    B, E = scores_sum.shape
    if tuple(counts.shape) not in ((B, E), (E,) if B == 1 else (B, E)):
        raise value_error(op, "counts", f"shape {(B, E)}", tuple(counts.shape))
    if isinstance(num_aux_topk, bool) or not isinstance(num_aux_topk, int):
        raise type_error(op, "num_aux_topk", "an int", f"{num_aux_topk!r} of type {type(num_aux_topk).__name__}")
    judge_number(op, "alpha", alpha)
    attrs = {"num_aux_topk": num_aux_topk}
    if isinstance(num_rows, int) and not isinstance(num_rows, bool):
        return counts.reshape(B, E), None, attrs | {"num_rows_value": max(num_rows, 1)}
    _judge_array(op, "num_rows", num_rows, "int32", "int64")
    if tuple(num_rows.shape) != (B,):
        raise value_error(op, "num_rows", f"an int or shape {(B,)}", tuple(num_rows.shape))
    return counts.reshape(B, E), num_rows, attrs


def update_expert_bias(bias: Any, counts: Any, gamma: float) -> Any:
    """The ranking bias of a gate after a step: raised where an expert had less than the mean load, lowered where it had more.

    bias_e + gamma * sign(mean(counts) - counts_e)

    Args:
        bias: [E] f32.
        counts: [..., E] i32, how often every expert was chosen; leading axes are summed.
        gamma: step.

    Returns:
        [E] f32, a new array.

    Raises:
        TypeError: a dtype or a kind is another one.
        ValueError: shapes that do not fit.

    Numerics:
        The sign is exact: integers are compared. Their sum must stay below 2**31 where there is no int64.

    Gradient:
        None; call it outside of differentiation, after the optimizer's step.

    Source:
        Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts, 2024.
    """
    op = "update_expert_bias"
    _judge_array(op, "bias", bias, "float32")
    _judge_array(op, "counts", counts, "int32", "int64")
    if len(bias.shape) != 1:
        raise value_error(op, "bias", "shape (E,)", tuple(bias.shape))
    E = bias.shape[0]
    if not counts.shape or counts.shape[-1] != E:
        raise value_error(op, "counts", f"shape (..., {E})", tuple(counts.shape))
    judge_number(op, "gamma", gamma)
    load = counts.reshape(-1, E).sum(0)
    total = load.sum()
    # mean > load, without the product of load and E that 32 bits might not hold
    mean, rest = total // E, total % E
    less = (load < mean) | ((load == mean) & (rest > 0))
    return bias + (less * 1.0 - (load > mean) * 1.0) * gamma
