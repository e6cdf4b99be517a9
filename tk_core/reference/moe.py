"""NumPy oracle of the MoE routing operations: selection, weights, counting and the auxiliary loss.

The gates are in moe_gate, the expert-major layout and the moving of rows in moe_mapping. Indices and fp32 results are the definition bit
for bit, one rounding an operation in the stated order; what has a tolerance, and every gradient, is fp64. Results that are indices have
the dtype of the indices that go in, or index_dtype. Indices outside their range count as -1; other arguments are not judged.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray
EPS = np.float32(1e-20)
# keys, weights and losses of rows that do not take part may be NaN
quiet = np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore")


def in_range(indices: Array, bound: int) -> Array:
    """Where an index names one of `bound` things."""
    return (indices >= 0) & (indices < bound)


# ------------------------------------------------------------------ selection


def topk(keys: Array, num_topk: int, index_dtype: Any = np.int64) -> Array:
    """Positions of the largest keys of the last axis, descending, ties to the smaller position; -inf ranks last, also by position."""
    return np.argsort(-keys, axis=-1, kind="stable")[..., :num_topk].astype(index_dtype)


def topk_gate(scores: Array, num_topk: int, *, index_dtype: Any = np.int64) -> Array:
    """The experts of every token."""
    return topk(scores, num_topk, index_dtype)


@quiet
def topk_sum_and_topk_group_idx(scores: Array, num_topk_sum: int, num_topk_groups: int, *, index_dtype: Any = np.int64) -> Array:
    """The groups (T, G, Eg) with the highest scores; a group's score is its largest element, or the sum of its two largest."""
    largest = np.sort(scores, axis=-1)[..., ::-1]
    group_scores = largest[..., 0] if num_topk_sum == 1 else largest[..., 0] + largest[..., 1]
    return topk(group_scores, num_topk_groups, index_dtype)


def mask_indices_by_tp(indices: Array, n: int, num_ep_ranks: int, tp_rank: int, num_tp_ranks: int) -> Array:
    """Experts of all ranks, TP fastest, renumbered over the ranks with this tp_rank; -1 elsewhere."""
    per_rank = n // num_ep_ranks
    wide = indices.astype(np.int64)
    rank = wide // per_rank
    kept = in_range(wide, n) & (rank % num_tp_ranks == tp_rank)
    return np.where(kept, rank // num_tp_ranks * per_rank + wide % per_rank, -1).astype(indices.dtype)


def unique_group_indices(group_indices: Array, num_groups: int) -> Array:
    """Every group once a row, at its leftmost place, -1 for later ones; what names no group stays as it is."""
    result = group_indices.copy()
    for k in range(1, group_indices.shape[1]):
        seen = (group_indices[:, :k] == group_indices[:, k : k + 1]).any(axis=1)
        result[seen & in_range(group_indices[:, k], num_groups), k] = -1
    return result


# ------------------------------------------------------------------ weights


def sequential_denominator(weights: Array, valid: Array | None = None) -> Array:
    """1e-20 + w_0 + w_1 + ... (T,) in fp32 from left to right; slots that are not valid are left out."""
    total = np.full(weights.shape[0], EPS, np.float32)
    for k in range(weights.shape[1]):
        added = total + weights[:, k].astype(np.float32)
        total = added if valid is None else np.where(valid[:, k], added, total)
    return total


def normalize_weight(topk_weights: Array) -> tuple[Array, Array]:
    """The denominator (T,) and normalized_weights (T, K)."""
    denominator = sequential_denominator(topk_weights)
    return denominator, topk_weights / denominator[:, None]


def normalize_weight_bwd(d_denominator: Array | None, d_normalized: Array | None, denominator: Array, normalized: Array) -> Array:
    """d_topk_weights from the saved results; an absent cotangent counts as zero."""
    n, total = normalized.astype(np.float64), denominator.astype(np.float64)[:, None]
    d_weights = np.zeros_like(n)
    if d_normalized is not None:
        g = d_normalized.astype(np.float64)
        d_weights += (g - (g * n).sum(axis=1, keepdims=True)) / total
    if d_denominator is not None:
        d_weights += d_denominator.astype(np.float64)[:, None]
    return d_weights


# ------------------------------------------------------------------ counting


def group_count(group_idx: Array, num_groups: int, *, num_seqs: int = 1) -> Array:
    """Entries of every group: (num_groups,), or (num_seqs, num_groups) for sequences of equally many rows."""
    sequences = group_idx.reshape(num_seqs, group_idx.size // num_seqs)
    counts = [np.bincount(s[in_range(s, num_groups)].astype(np.int64), minlength=num_groups) for s in sequences]
    return np.array(counts[0] if num_seqs == 1 else counts, np.int32)


def aux_fi(topk_idx: Array, num_experts: int, num_aux_topk: int) -> Array:
    """Load: count * E / (T * num_aux_topk), an fp32 product and an fp32 division of integers; rows without an expert count in T."""
    rows = topk_idx.shape[0]
    if rows == 0:
        return np.zeros(num_experts, np.float32)
    return group_count(topk_idx, num_experts).astype(np.float32) * np.float32(num_experts) / np.float32(rows * num_aux_topk)


# ------------------------------------------------------------------ auxiliary loss


def sequences(rows: Array, num_seqs: int) -> Array:
    """(T, ...) as (B, T / B, ...) in fp64."""
    return rows.reshape(num_seqs, rows.shape[0] // num_seqs, *rows.shape[1:]).astype(np.float64)


def taking_part(scores: Array, mask: Array | None) -> Array:
    """Rows of the sums: those of the mask, but none whose scores are all zero, for there is nothing to divide by."""
    present = np.ones(scores.shape[0], bool) if mask is None else mask.astype(bool)
    return present & (np.where(present[:, None], scores, 0).astype(np.float64).sum(axis=1) != 0)


def scores_sum(scores: Array, mask: Array | None = None, num_seqs: int = 1) -> Array:
    """Shares of the experts in the scores of a row, summed over the rows of every sequence: (B, E)."""
    present = taking_part(scores, mask)[:, None]
    u = np.where(present, scores, 0).astype(np.float64)
    shares = u / np.where(present, u.sum(axis=1, keepdims=True), 1)
    return sequences(shares, num_seqs).sum(axis=1)


def scores_sum_bwd(d_sum: Array, scores: Array, mask: Array | None = None) -> Array:
    """d_scores; d_sum has a row a sequence."""
    present = taking_part(scores, mask)[:, None]
    u = np.where(present, scores, 0).astype(np.float64)
    total = np.where(present, u.sum(axis=1, keepdims=True), 1)
    h = d_sum.astype(np.float64).repeat(scores.shape[0] // d_sum.shape[0], axis=0)
    return np.where(present, (h - (h * u).sum(axis=1, keepdims=True) / total) / total, 0)


def _loss_terms(counts: Array, num_rows: Any, num_aux_topk: int) -> tuple[Array, Array]:
    """Load f (B, E), rows (B, 1): at least one, so that a sequence without rows adds nothing."""
    counts = np.atleast_2d(counts).astype(np.float64)
    rows = np.broadcast_to(np.maximum(np.asarray(num_rows, np.float64), 1).reshape(-1, 1), (counts.shape[0], 1))
    return counts * counts.shape[1] / (num_aux_topk * rows), rows


def load_balance_loss(scores_sum: Array, counts: Array, num_rows: Any, num_aux_topk: int, alpha: float) -> Array:
    """The mean over sequences of alpha * load * mean share; counts (B, E), or (E,) of one sequence; num_rows (B,) or a number."""
    load, rows = _loss_terms(counts, num_rows, num_aux_topk)
    return np.float64(alpha) / load.shape[0] * (load * scores_sum.astype(np.float64).reshape(load.shape) / rows).sum()


def load_balance_loss_bwd(d_loss: Any, counts: Array, num_rows: Any, num_aux_topk: int, alpha: float) -> Array:
    """d_scores_sum (B, E); the load is a constant."""
    load, rows = _loss_terms(counts, num_rows, num_aux_topk)
    return np.float64(d_loss) * alpha * load / (load.shape[0] * rows)


def update_expert_bias(bias: Array, counts: Array, gamma: float) -> Array:
    """A step of gamma up below the mean load and down above it, decided on integers; counts of several sequences are added up."""
    totals = np.atleast_2d(counts).astype(np.int64).sum(axis=0)
    return bias.astype(np.float32) + np.float32(gamma) * np.sign(totals.sum() - totals * totals.size).astype(np.float32)
