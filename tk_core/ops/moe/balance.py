"""The load-balance loss and the bias rule: arithmetic on a few numbers an expert, by the operators that arrays of both frameworks have.

f[b, e] = E count[b, e] / (num_aux_topk n_b)        loss = (alpha / B) sum_be f[b, e] q[b, e] / n_b
bias_e <- bias_e + gamma sign(mean(count) - count_e)
"""

from typing import Any

from tk_core.errors import type_error, value_error


def _judge_array(op: str, argument: str, value: Any, *dtypes: str) -> None:
    """An array of one of some dtypes."""
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    if not hasattr(value, "shape") or not dtype:
        raise type_error(op, argument, f"a {' or '.join(dtypes)} array", type(value).__name__)
    if dtype not in dtypes:
        raise type_error(op, argument, f"dtype {' or '.join(dtypes)}", dtype)


def _judge_number(op: str, argument: str, value: Any) -> None:
    """A number, or an array that is one."""
    if isinstance(value, bool) or not (isinstance(value, int | float) or getattr(value, "shape", None) == ()):
        raise type_error(op, argument, "a float", f"{value!r} of type {type(value).__name__}")


def load_balance_loss(scores_sum: Any, counts: Any, num_rows: Any, num_aux_topk: int, alpha: float) -> Any:
    """Load-balance loss of a gate, alpha where scores and load are balanced.

    loss = (alpha / B) * sum_be f[b, e] * scores_sum[b, e] / n_b with f[b, e] = E * counts[b, e] / (num_aux_topk * n_b)

    Args:
        scores_sum: [B, E] f32, shares of the experts in the scores, summed over the rows of every sequence.
        counts: [B, E] i32, how often every expert was chosen; of one sequence also [E].
        num_rows: rows n_b that take part, an int or [B] i32; counted as at least 1.
        num_aux_topk: experts of a row; a divisor.
        alpha: factor of the loss.

    Returns:
        f32 scalar.

    Raises:
        TypeError: a dtype or a kind is another one.
        ValueError: shapes that do not fit, or num_aux_topk < 1.

    Numerics:
        fp32.

    Gradient:
        To scores_sum: alpha * f[b, e] / (B * n_b). The counts are constants.

    Source:
        Switch Transformers, 2021; DeepSeek-V3 Technical Report, 2024.
    """
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
    if num_aux_topk < 1:
        raise value_error(op, "num_aux_topk", "at least 1", num_aux_topk)
    _judge_number(op, "alpha", alpha)
    if isinstance(num_rows, int) and not isinstance(num_rows, bool):
        rows: Any = float(max(num_rows, 1))
    else:
        _judge_array(op, "num_rows", num_rows, "int32", "int64")
        if tuple(num_rows.shape) != (B,):
            raise value_error(op, "num_rows", f"an int or shape {(B,)}", tuple(num_rows.shape))
        rows = num_rows.clip(min=1).reshape(B, 1)
    # in fp32, whose range no product of integers leaves
    share = counts.reshape(B, E) * float(E) / (rows * float(num_aux_topk))
    return (share * (scores_sum / rows)).sum() * (alpha / max(B, 1))


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
    _judge_number(op, "gamma", gamma)
    load = counts.reshape(-1, E).sum(0)
    total = load.sum()
    # mean > load, without the product of load and E that 32 bits might not hold
    mean, rest = total // E, total % E
    less = (load < mean) | ((load == mean) & (rest > 0))
    return bias + (less * 1.0 - (load > mean) * 1.0) * gamma
