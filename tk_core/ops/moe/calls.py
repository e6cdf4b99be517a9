"""What the public routing functions of both front ends share: their results, and what is judged before an operation judges the rest."""

from typing import Any, NamedTuple

from tk_core.errors import type_error, value_error
from tk_core.ops.moe import mapping
from tk_core.ops.quant.calls.common import flag, integer

# Kernels have scalars of 32 bits.
MOST = 2**31 - 1


class GateOutput(NamedTuple):
    """What a gate gives: physical and logical experts, weights, and the sum of scores of every sequence where it is wanted."""

    topk_idx: Any
    topk_weights: Any
    unmapped_topk_idx: Any
    scores_sum: Any


class FusedMapping(NamedTuple):
    """Where every assignment has its row, and what every row is; the fields are those of `get_fused_mapping`."""

    pos_to_expert: Any
    pos_to_token: Any
    pos_to_token_topk: Any
    token_topk_to_pos: Any
    expert_start: Any
    expert_end: Any
    num_tokens_per_expert: Any
    num_dropped: Any


def rank(op: str, argument: str, array: Any, axes: str) -> None:
    """An array has as many axes as the text has names; what is no array is judged later."""
    got = getattr(array, "shape", None)
    if got is not None and len(got) != axes.count(",") + 1:
        raise value_error(op, argument, f"shape ({axes})", tuple(got))


def slots(op: str, argument: str, array: Any) -> None:
    """Indices have two axes, of which the second is not empty."""
    rank(op, argument, array, "T, K")
    got = getattr(array, "shape", (0, 1))
    if got[1] < 1:
        raise value_error(op, argument, "at least one slot a token", tuple(got))


def number(op: str, argument: str, value: Any, least: int, most: int = MOST) -> int:
    """An int of a range."""
    if not least <= integer(op, argument, value) <= most:
        raise value_error(op, argument, f"{least} to {most}" if most < MOST else f"at least {least}, in 32 bits", value)
    return value


def tp_rank(op: str, value: Any, num_tp_ranks: Any) -> int:
    """A rank among the tensor-parallel ones."""
    return number(op, "tp_rank", value, 0, number(op, "num_tp_ranks", num_tp_ranks, 1) - 1)


# ------------------------------------------------------------------ gates


def gate_attributes(
    op: str, num_topk: Any, use_shared_as_routed: Any, num_shared_experts: Any, factor: Any, scoring_func: Any, num_seqs: Any, idx: str
) -> dict[str, Any]:
    """Attributes that both gates have."""
    shared = integer(op, "num_shared_experts", num_shared_experts)
    if not flag(op, "use_shared_as_routed", use_shared_as_routed):
        shared = 0
    if use_shared_as_routed and shared not in (1, 2):
        raise value_error(op, "num_shared_experts", "1 or 2 with use_shared_as_routed", shared)
    if num_seqs is not None and integer(op, "num_seqs", num_seqs) < 1:
        raise value_error(op, "num_seqs", "at least 1", num_seqs)
    return {
        "num_topk": num_topk,
        "num_shared_experts": shared,
        "routed_scaling_factor": factor,
        "scoring_func": scoring(op, scoring_func),
        "num_seqs": num_seqs or 0,
        "idx": idx,
    }


def group_attributes(op: str, num_topk_groups: Any, num_groups: Any, num_ep_ranks: Any, num_tp_ranks: Any) -> dict[str, Any]:
    """Attributes that only `top2_sum_gate` has."""
    return {
        "num_topk_groups": integer(op, "num_topk_groups", num_topk_groups),
        "num_groups": integer(op, "num_groups", num_groups),
        "num_ep_ranks": integer(op, "num_ep_ranks", num_ep_ranks),
        "num_tp_ranks": number(op, "num_tp_ranks", num_tp_ranks, 1),
    }


def scoring(op: str, label: Any) -> str:
    """The name of a scoring function in lower case; the operation judges whether a gate has it."""
    if not isinstance(label, str):
        raise type_error(op, "scoring_func", "a str", f"{label!r} of type {type(label).__name__}")
    return label.lower()


def mask_with_sums(op: str, mask: Any, grad_scores_sum: Any, scores: Any) -> None:
    """A mask concerns the sums of scores alone, and sequences have equally many rows."""
    if mask is not None and grad_scores_sum is None:
        raise value_error(op, "grad_scores_sum", "an array where there is a mask", "None")
    rows, sequences = getattr(scores, "shape", (0,))[0], getattr(grad_scores_sum, "shape", ()) or (1,)
    if sequences[0] < 1 or rows % sequences[0]:
        raise value_error(op, "grad_scores_sum", f"a positive number of rows that divides {rows}", sequences[0])


# ------------------------------------------------------------------ mapping


def max_num_expanded_tokens(num_tokens: int, num_topk: int, num_experts: int, alignment: int) -> int:
    """Rows that are always enough, whatever the routing: every assignment, and the padding of as many experts as can have any.

    Args:
        num_tokens: tokens T.
        num_topk: experts of a token.
        num_experts: experts that may have tokens.
        alignment: rows of an expert are a multiple of it.

    Returns:
        int.

    Raises:
        TypeError: an argument is no int.
        ValueError: an argument is out of its range.
    """
    op, given = "max_num_expanded_tokens", {"num_tokens": num_tokens, "num_topk": num_topk}
    for argument, value in given.items():
        number(op, argument, value, 0)
    number(op, "num_experts", num_experts, 1)
    number(op, "alignment", alignment, 1)
    return mapping.max_num_expanded_tokens(num_tokens, num_topk, num_experts, alignment)


def mapping_attributes(op: str, topk_idx: Any, num_experts: Any, alignment: Any, rows: Any, capacity: Any = None) -> dict[str, int]:
    """Attributes of a mapping; without a number of rows it is the one that is always enough."""
    slots(op, "topk_idx", topk_idx)
    integer(op, "num_experts", num_experts)
    if integer(op, "alignment", alignment) < 1:
        raise value_error(op, "alignment", "at least 1", alignment)
    if capacity is not None:
        if rows is not None:
            raise value_error(op, "expert_capacity", "None where num_expanded_tokens is given", capacity)
        if integer(op, "expert_capacity", capacity) < 1:
            raise value_error(op, "expert_capacity", "at least 1", capacity)
        rows = 0
    elif rows is None:
        rows = mapping.max_num_expanded_tokens(*getattr(topk_idx, "shape", (0, 0)), num_experts, alignment)
    return {
        "num_experts": num_experts,
        "alignment": alignment,
        "num_expanded_tokens": integer(op, "num_expanded_tokens", rows),
        "expert_capacity": capacity or 0,
    }


# ------------------------------------------------------------------ values, in debug mode


def judge_largest(op: str, argument: str, limit: int, what: str, largest: Any) -> None:
    """Debug mode: the largest index is below a limit."""
    if int(largest) >= limit:
        raise value_error(op, argument, f"{what} below {limit}", int(largest))


def judge_finite(op: str, argument: str, wrong: Any) -> None:
    """Debug mode: no number of rows that take part is infinite or NaN."""
    if int(wrong):
        raise value_error(op, argument, "finite numbers", f"{int(wrong)} that are not")


def judge_counts(op: str, argument: str, most: int, smallest: Any, largest: Any) -> None:
    """Debug mode: counts of replicas are those of columns that exist."""
    if int(smallest) < 1 or int(largest) > most:
        raise value_error(op, argument, f"1 to {most}", f"{int(smallest)} to {int(largest)}")


# ------------------------------------------------------------------ reduction


def rows_and_factors(op: str, x: Any) -> tuple[Any, Any]:
    """Rows, and one factor for each where x is a pair."""
    if not isinstance(x, tuple | list):
        return x, None
    if len(x) != 2:
        raise type_error(op, "x", "an array or a pair (x, x_sf)", f"{len(x)} items")
    if x[1] is None:
        raise type_error(op, "x[1]", "a float32 array of shape (N,)", "None")
    return x[0], x[1]


def wanted_gradients(need_grad_x: Any, need_grad_weights: Any, x: Any) -> list[str]:
    """The results of `reduce_fused_backward` that are asked for."""
    op = "reduce_fused_backward"
    wanted = ["d_x"] if flag(op, "need_grad_x", need_grad_x) else []
    if flag(op, "need_grad_weights", need_grad_weights):
        if x is None:
            raise type_error(op, "x", "an array, for the gradient of the weights", "None")
        wanted.append("d_topk_weights")
    return wanted
