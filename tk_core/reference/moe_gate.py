"""NumPy oracle of the MoE routing operations: scoring functions, gates, gradient of the gates.

Given `scores`, indices and weights of a gate are the definition on them bit for bit; without, the gate scores the logits itself. Gradients
are fp64. In place of the buffers that the torch interface writes, a gate returns what it would leave in them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tk_core.reference.moe import (
    EPS,
    Array,
    in_range,
    mask_indices_by_tp,
    quiet,
    scores_sum,
    scores_sum_bwd,
    sequential_denominator,
    topk,
    topk_sum_and_topk_group_idx,
)

SCORING = ("sigmoid", "sqrtsoftplus", "softmax")


class Gate(NamedTuple):
    """Results of a gate. Scores are zero on rows that are masked or random; scores_sum is there where num_seqs is given."""

    topk_idx: Array
    topk_weights: Array
    unmapped_topk_idx: Array
    scores: Array
    scores_sum: Array | None


# ------------------------------------------------------------------ scoring


def _scoring(scoring_func: str) -> str:
    if scoring_func.lower() not in SCORING:
        raise ValueError(f"scoring_func: expected one of {SCORING}, got {scoring_func!r}")
    return scoring_func.lower()


@quiet
def score(logits: Array, scoring_func: str, dtype: Any = np.float32) -> Array:
    """Scores of the experts in fp32, every operation and function rounded once, or in fp64."""
    x = logits.astype(dtype)

    def once(function: np.ufunc, values: Array) -> Array:
        return function(values.astype(np.float64)).astype(dtype)

    name = _scoring(scoring_func)
    if name == "sigmoid":
        return 1 / (1 + once(np.exp, -x))
    if name == "sqrtsoftplus":
        return np.sqrt(np.where(x > 20, x, once(np.log1p, once(np.exp, x))))
    powers = once(np.exp, x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True, dtype=np.float64).astype(dtype)


@quiet
def score_bwd(d_scores: Array, scores: Array, scoring_func: str) -> Array:
    """d_logits from the saved scores."""
    d, u = d_scores.astype(np.float64), scores.astype(np.float64)
    name = _scoring(scoring_func)
    if name == "sigmoid":
        return d * u * (1 - u)
    if name == "sqrtsoftplus":
        return np.where(u == 0, 0, -d * np.expm1(-u * u) / (2 * u))
    return u * (d - (u * d).sum(axis=-1, keepdims=True))


# ------------------------------------------------------------------ parts of a gate


def _ranking_keys(logits: Array, scores: Array, bias: Array, scoring_func: str) -> Array:
    ranked = logits if _scoring(scoring_func) == "softmax" else scores
    return ranked.astype(np.float32) + bias.astype(np.float32)


def _limit_groups(keys: Array, num_topk_groups: int, num_groups: int) -> Array:
    """Keys of experts outside the best groups become -inf."""
    if num_topk_groups == num_groups:
        return keys
    grouped = keys.reshape(keys.shape[0], num_groups, keys.shape[1] // num_groups)
    chosen = np.zeros(grouped.shape[:2], bool)
    np.put_along_axis(chosen, topk_sum_and_topk_group_idx(grouped, 2, num_topk_groups), True, axis=1)
    return np.where(chosen[:, :, None], grouped, -np.inf).astype(np.float32).reshape(keys.shape)


def _to_physical(logical: Array, to_physical_map: Array | None, logical_count: Array | None, ep_rank: int) -> Array:
    """One of the replicas of every expert, by row and rank."""
    if to_physical_map is None:
        return logical
    expert = np.where(logical < 0, 0, logical)
    replicas = np.clip(logical_count.astype(np.int64), 1, to_physical_map.shape[1])[expert]
    turn = ep_rank + 23333 * np.arange(logical.shape[0], dtype=np.int64)
    return np.where(logical < 0, -1, to_physical_map[expert, turn[:, None] % replicas])


def _num_physical(num_experts: int, to_physical_map: Array | None) -> int:
    return num_experts if to_physical_map is None else num_experts + to_physical_map.shape[1] - 1


@quiet
def route_weights(scores: Array, topk_idx: Array, routed_scaling_factor: float) -> Array:
    """Normalized and scaled scores of the slots, zero in empty ones."""
    valid = in_range(topk_idx, scores.shape[1])
    u = np.take_along_axis(scores, np.where(valid, topk_idx, 0).astype(np.int64), axis=1)
    weights = u / sequential_denominator(u, valid)[:, None] * np.float32(routed_scaling_factor)
    return np.where(valid, weights, 0).astype(np.float32)


def random_experts(ep_rank: int, row: int, count: int, num_physical: int) -> tuple[Array, Array]:
    """Distinct experts and weights in (0, 1] of a row that is routed at random. The contract is their distribution, not these values."""
    rng = np.random.default_rng([ep_rank, row])
    return rng.choice(num_physical, count, replace=False), 1 - rng.random(count, np.float32)


@quiet
def _gate(
    keys: Array,
    scores: Array,
    num_topk: int,
    num_shared: int,
    routed_scaling_factor: float,
    ep_rank: int,
    mask: Array | None,
    random: Array | None,
    fix_routing_mask: Array | None,
    fixed_topk_idx: Array | None,
    to_physical_map: Array | None,
    logical_count: Array | None,
    num_seqs: int | None,
) -> Gate:
    """The gate behind its keys, with physical indices of all ranks in int64."""
    rows, num_experts = scores.shape
    present = np.ones(rows, bool) if mask is None else mask.astype(bool)
    random = present & (np.zeros(rows, bool) if random is None else random.astype(bool))
    routed = (present & ~random)[:, None]
    logical = topk(keys, num_topk)
    if fix_routing_mask is not None:
        logical = np.where(fix_routing_mask.astype(bool)[:, None], fixed_topk_idx, logical)
    logical = np.where(routed & in_range(logical, num_experts), logical, -1).astype(np.int64)
    scores = np.where(routed, scores, 0).astype(np.float32)
    shared = np.where(routed, num_experts + np.arange(num_shared), -1)
    idx = _to_physical(np.concatenate([logical, shared], axis=1), to_physical_map, logical_count, ep_rank).astype(np.int64)
    weights = np.concatenate([route_weights(scores, logical, routed_scaling_factor), (shared >= 0).astype(np.float32)], axis=1)
    if to_physical_map is not None:
        idx = np.where(in_range(idx, _num_physical(num_experts, to_physical_map)), idx, -1)
        num_physical = int(np.clip(logical_count, 1, to_physical_map.shape[1]).sum())
    else:
        num_physical = num_experts + num_shared
    for row in np.flatnonzero(random):
        idx[row], weights[row] = random_experts(ep_rank, int(row), num_topk + num_shared, num_physical)
    return Gate(idx, weights, logical, scores, None if num_seqs is None else scores_sum(scores, present, num_seqs))


def _with_dtype(gate: Gate, index_dtype: Any) -> Gate:
    return gate._replace(topk_idx=gate.topk_idx.astype(index_dtype), unmapped_topk_idx=gate.unmapped_topk_idx.astype(index_dtype))


# ------------------------------------------------------------------ gates


@quiet
def top2_sum_gate(
    logits: Array,
    bias: Array,
    num_topk: int,
    num_topk_groups: int,
    num_groups: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    num_ep_ranks: int,
    tp_rank: int,
    num_tp_ranks: int,
    scoring_func: str,
    mask: Array | None = None,
    fix_routing_mask: Array | None = None,
    to_physical_map: Array | None = None,
    logical_count: Array | None = None,
    fixed_topk_idx: Array | None = None,
    scores: Array | None = None,
    *,
    num_seqs: int | None = None,
    index_dtype: Any = np.int64,
) -> Gate:
    """Experts of the best groups, as seen by the ranks of one TP rank; slots of other ranks keep their weights."""
    u = score(logits, scoring_func) if scores is None else scores
    keys = _limit_groups(_ranking_keys(logits, u, bias, scoring_func), num_topk_groups, num_groups)
    num_shared = num_shared_experts if use_shared_as_routed else 0
    fixed = (fix_routing_mask, fixed_topk_idx)
    maps = (to_physical_map, logical_count)
    gate = _gate(keys, u, num_topk, num_shared, routed_scaling_factor, ep_rank, mask, None, *fixed, *maps, num_seqs)
    num_physical = _num_physical(logits.shape[1], to_physical_map)
    local = mask_indices_by_tp(gate.topk_idx, num_physical, num_ep_ranks, tp_rank, num_tp_ranks)
    return _with_dtype(gate._replace(topk_idx=local), index_dtype)


@quiet
def moe_topk_gate_forward(
    logits: Array,
    num_topk: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    scoring_func: str = "sqrtsoftplus",
    mask: Array | None = None,
    bias: Array | None = None,
    image_bias: Array | None = None,
    image_token_mask: Array | None = None,
    fix_routing_mask: Array | None = None,
    to_physical_map: Array | None = None,
    logical_count: Array | None = None,
    fixed_topk_idx: Array | None = None,
    force_random: Array | None = None,
    scores: Array | None = None,
    *,
    num_seqs: int | None = None,
    index_dtype: Any = np.int64,
) -> Gate:
    """The gate without groups and ranks; rows of image tokens rank by a bias of their own."""
    u = score(logits, scoring_func) if scores is None else scores
    row_bias = np.zeros(logits.shape[1], np.float32) if bias is None else bias
    if image_token_mask is not None:
        row_bias = np.where(image_token_mask.astype(bool)[:, None], image_bias, row_bias)
    keys = _ranking_keys(logits, u, row_bias, scoring_func)
    num_shared = num_shared_experts if use_shared_as_routed else 0
    fixed = (fix_routing_mask, fixed_topk_idx)
    maps = (to_physical_map, logical_count)
    gate = _gate(keys, u, num_topk, num_shared, routed_scaling_factor, ep_rank, mask, force_random, *fixed, *maps, num_seqs)
    return _with_dtype(gate, index_dtype)


moe_topk_gate = moe_topk_gate_forward


# ------------------------------------------------------------------ gradient


def route_weights_bwd(d_weights: Array, scores: Array, topk_idx: Array, topk_weights: Array, routed_scaling_factor: float) -> Array:
    """d_scores: slots with the same expert add up, empty ones give nothing."""
    u = scores.astype(np.float64)
    valid = in_range(topk_idx, u.shape[1])
    expert = np.where(valid, topk_idx, 0).astype(np.int64)
    g = np.where(valid, d_weights, 0).astype(np.float64)
    denominator = np.float64(EPS) + np.where(valid, np.take_along_axis(u, expert, axis=1), 0).sum(axis=1, keepdims=True)
    inner = (g * np.where(valid, topk_weights, 0)).sum(axis=1, keepdims=True)
    d_scores = np.zeros_like(u)
    slot = np.where(valid, (routed_scaling_factor * g - inner) / denominator, 0)
    np.add.at(d_scores, (np.arange(u.shape[0])[:, None], expert), slot)
    return d_scores


def moe_topk_gate_backward(
    scores: Array,
    topk_idx: Array,
    topk_weights: Array,
    grad_topk_weights: Array | None,
    routed_scaling_factor: float,
    scoring_func: str = "sqrtsoftplus",
    mask: Array | None = None,
    grad_scores_sum: Array | None = None,
) -> Array:
    """grad_logits of both gates from logical indices and routed slots alone; an absent cotangent counts as zero."""
    d_scores = np.zeros(scores.shape, np.float64)
    if grad_topk_weights is not None:
        d_scores += route_weights_bwd(grad_topk_weights, scores, topk_idx, topk_weights, routed_scaling_factor)
    if grad_scores_sum is not None:
        d_scores += scores_sum_bwd(grad_scores_sum, scores, mask)
    return score_bwd(d_scores, scores, scoring_func)
