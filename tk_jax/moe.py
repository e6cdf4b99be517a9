"""MoE routing for JAX: gates, mapping to an expert-major buffer, expansion, reduction, counts and balance.

Indices of experts, positions and counts are int32; indices may be int64 under x64. -1 stands for none. What is not an array is static under
`jax.jit`, but for ranks, which may be traced scalars. Buffers have static sizes: routing changes no shape, and `num_dropped` tells what did
not fit. In debug mode (`tk_core.config.set_debug`) indices and scores are judged, under jit by a callback.

`jax.vmap` works for all of them. What is sharded automatically is gathered: call them inside `jax.shard_map`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tk_core import config
from tk_core.docs import documented, with_doc
from tk_core.errors import type_error, value_error
from tk_core.ops.moe import balance, calls, counts, docs, expand, gate, gate_backward, gemm, indices, mapping, normalize, reduce, topk
from tk_core.ops.moe import scores_sum as sums
from tk_core.ops.moe.balance import update_expert_bias
from tk_core.ops.moe.calls import FusedMapping, GateOutput, max_num_expanded_tokens
from tk_jax.vjp import bind, refuse_gradient

__all__ = [
    "FusedMapping",
    "GateOutput",
    "aux_fi",
    "expand_to_fused",
    "expand_to_fused_with_sf",
    "expand_topk_weights",
    "fused_mapping",
    "get_fused_mapping",
    "group_count",
    "grouped_gemm",
    "load_balance_loss",
    "mask_indices_by_tp",
    "max_num_expanded_tokens",
    "moe_topk_gate",
    "moe_topk_gate_backward",
    "moe_topk_gate_forward",
    "normalize_weight",
    "psum_num_tokens_per_expert",
    "reduce_fused",
    "reduce_fused_backward",
    "scores_sum",
    "top2_sum_gate",
    "topk_gate",
    "topk_sum_and_topk_group_idx",
    "unique_group_indices",
    "update_expert_bias",
]

Rank = int | Array

_topk_gate = bind(topk.topk_gate)
_topk_groups = bind(topk.topk_sum_and_topk_group_idx)
_gate_backward = bind(gate_backward.moe_topk_gate_backward)
_normalize_weight = bind(normalize.normalize_weight)
_mask_by_tp = bind(indices.mask_indices_by_tp)
_unique = bind(indices.unique_group_indices)
_group_count = bind(counts.group_count)
_aux_fi = bind(counts.aux_fi)
_psum = bind(counts.psum_num_tokens_per_expert)
_get_fused_mapping = bind(mapping.get_fused_mapping)
_fused_mapping = bind(mapping.fused_mapping)
_expand = bind(expand.expand_to_fused)
_expand_with_sf = bind(expand.expand_to_fused_with_sf)
_expand_weights = bind(expand.expand_topk_weights)
_grouped_gemm = bind(gemm.grouped_gemm)
_reduce = bind(reduce.reduce_fused)
_scores_sum = bind(sums.scores_sum)
_load_balance_loss = bind(balance.load_balance_loss)


# ------------------------------------------------------------------ debug mode


def _judge(judge: Callable[..., None], *values: Any) -> None:
    """Judge numbers that are on the device, at once or, where they are traced, when the program runs."""
    if any(isinstance(value, jax.core.Tracer) for value in values):
        jax.debug.callback(judge, *values)
    else:
        judge(*values)


def _is_array(value: Any) -> bool:
    return isinstance(value, Array | np.ndarray)


def _judge_indices(op: str, argument: str, index: Any, limit: int, what: str) -> None:
    """Debug mode: no index beyond its range."""
    if config.get_debug() and _is_array(index) and index.size:
        _judge(functools.partial(calls.judge_largest, op, argument, limit, what), index.max())


# ------------------------------------------------------------------ selection


@documented(topk.topk_gate)
def topk_gate(scores: Array, num_topk: int) -> Array:
    calls.rank("topk_gate", "scores", scores, "T, E")
    if config.get_debug() and _is_array(scores):
        _judge(functools.partial(calls.judge_finite, "topk_gate", "scores"), jnp.isnan(scores).sum())
    return _topk_gate(scores, num_topk=num_topk, idx="int32")


@documented(topk.topk_sum_and_topk_group_idx)
def topk_sum_and_topk_group_idx(scores: Array, num_topk_sum: int, num_topk_groups: int) -> Array:
    calls.rank("topk_sum_and_topk_group_idx", "scores", scores, "T, G, Eg")
    return _topk_groups(scores, num_topk_sum=num_topk_sum, num_topk_groups=num_topk_groups, idx="int32")


@documented(normalize.normalize_weight)
def normalize_weight(topk_weights: Array) -> tuple[Array, Array]:
    calls.rank("normalize_weight", "topk_weights", topk_weights, "T, K")
    return _normalize_weight(topk_weights)


def _rank(op: str, argument: str, rank: Any, most: int = calls.MOST) -> tuple[Array | None, int]:
    """A rank as an operand, or as an attribute."""
    if isinstance(rank, int) and not isinstance(rank, bool):
        return None, calls.number(op, argument, rank, 0, most)
    if getattr(rank, "shape", None) != () or not jnp.issubdtype(rank.dtype, jnp.integer):
        raise type_error(op, argument, "an int or an integer scalar", f"{rank!r} of type {type(rank).__name__}")
    return jnp.asarray(rank, jnp.int32).reshape(1), 0


@documented(indices.mask_indices_by_tp, "tp_rank: an int, or an i32 scalar array as `jax.lax.axis_index` gives it.")
def mask_indices_by_tp(indices: Array, n: int, num_ep_ranks: int, tp_rank: Rank, num_tp_ranks: int) -> Array:
    op = "mask_indices_by_tp"
    calls.rank(op, "indices", indices, "T, K")
    _judge_indices(op, "indices", indices, n, "experts")
    operand, value = _rank(op, "tp_rank", tp_rank, calls.number(op, "num_tp_ranks", num_tp_ranks, 1) - 1)
    return _mask_by_tp(indices, operand, n=n, num_ep_ranks=num_ep_ranks, num_tp_ranks=num_tp_ranks, tp_rank_value=value)


# ------------------------------------------------------------------ gates

_RESULTS = ("topk_idx", "topk_weights", "unmapped_topk_idx")
_GATES = {
    (op.name, sums): bind(op, _RESULTS + ("scores_sum",) * sums) for op in (gate.top2_sum_gate, gate.moe_topk_gate) for sums in (0, 1)
}


def _gate(op: str, arrays: tuple[Any, ...], attrs: dict[str, Any], ep_rank: Rank, tp_rank: Rank) -> GateOutput:
    """Run a gate on the arguments of its declaration up to logical_count."""
    ep, ep_value = _rank(op, "ep_rank", ep_rank)
    tp, tp_value = _rank(op, "tp_rank", tp_rank, attrs.get("num_tp_ranks", 1) - 1)
    if config.get_debug():
        _judge_gate(op, *arrays)
    bound = _GATES[op, int(attrs["num_seqs"] > 0)]
    results = bound(*arrays, ep, tp, ep_rank_value=ep_value, tp_rank_value=tp_value, **attrs)
    return GateOutput(*results, *(None,) * (4 - len(results)))


def _judge_gate(op: str, *arrays: Any) -> None:
    """Debug mode: finite logits in rows that take part, experts and replicas that exist."""
    logits, _, _, _, mask, _, fix, fixed, table, count = arrays
    if not _is_array(logits) or logits.ndim != 2 or not logits.size:
        return
    wrong = ~jnp.isfinite(logits).all(1)
    if _is_array(mask) and mask.shape == wrong.shape:
        wrong = wrong & mask
    _judge(functools.partial(calls.judge_finite, op, "logits"), wrong.sum())
    if _is_array(fixed) and _is_array(fix) and fix.shape == fixed.shape[:1] and fixed.size:
        _judge_indices(op, "fixed_topk_idx", jnp.where(fix[:, None], fixed, -1), logits.shape[1], "experts")
    if _is_array(count) and _is_array(table) and table.ndim == 2 and count.size:
        _judge(functools.partial(calls.judge_counts, op, "logical_count", table.shape[1]), count.min(), count.max())
        _judge_indices(op, "to_physical_map", table, logits.shape[1] + table.shape[1] - 1, "physical experts")


@with_doc(docs.TOP2_JAX)
def top2_sum_gate(
    logits: Array,
    bias: Array,
    *,
    num_topk: int,
    num_topk_groups: int,
    num_groups: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    num_ep_ranks: int,
    num_tp_ranks: int,
    scoring_func: str,
    ep_rank: Rank,
    tp_rank: Rank,
    mask: Array | None = None,
    fix_routing_mask: Array | None = None,
    fixed_topk_idx: Array | None = None,
    to_physical_map: Array | None = None,
    logical_count: Array | None = None,
    num_seqs: int | None = None,
) -> GateOutput:
    op = "top2_sum_gate"
    if bias is None:
        raise type_error(op, "bias", "a float32 array of shape (E,)", "None")
    attrs = calls.gate_attributes(
        op, num_topk, use_shared_as_routed, num_shared_experts, routed_scaling_factor, scoring_func, num_seqs, "int32"
    )
    attrs |= calls.group_attributes(op, num_topk_groups, num_groups, num_ep_ranks, num_tp_ranks)
    arrays = (logits, bias, None, None, mask, None, fix_routing_mask, fixed_topk_idx, to_physical_map, logical_count)
    return _gate(op, arrays, attrs, ep_rank, tp_rank)


@with_doc(docs.TOPK_JAX)
def moe_topk_gate(
    logits: Array,
    *,
    num_topk: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: Rank,
    scoring_func: str = "sqrtsoftplus",
    mask: Array | None = None,
    bias: Array | None = None,
    image_bias: Array | None = None,
    image_token_mask: Array | None = None,
    fix_routing_mask: Array | None = None,
    fixed_topk_idx: Array | None = None,
    to_physical_map: Array | None = None,
    logical_count: Array | None = None,
    force_random: Array | None = None,
    num_seqs: int | None = None,
) -> GateOutput:
    op = "moe_topk_gate"
    attrs = calls.gate_attributes(
        op, num_topk, use_shared_as_routed, num_shared_experts, routed_scaling_factor, scoring_func, num_seqs, "int32"
    )
    biases = (bias, image_bias, image_token_mask)
    arrays = (logits, *biases, mask, force_random, fix_routing_mask, fixed_topk_idx, to_physical_map, logical_count)
    return _gate(op, arrays, attrs, ep_rank, 0)


moe_topk_gate_forward = moe_topk_gate


@documented(gate_backward.moe_topk_gate_backward)
def moe_topk_gate_backward(
    scores: Array,
    topk_idx: Array,
    topk_weights: Array,
    grad_topk_weights: Array,
    routed_scaling_factor: float,
    scoring_func: str = "sqrtsoftplus",
    mask: Array | None = None,
    grad_scores_sum: Array | None = None,
) -> Array:
    op = "moe_topk_gate_backward"
    calls.rank(op, "scores", scores, "T, E")
    calls.mask_with_sums(op, mask, grad_scores_sum, scores)
    _judge_indices(op, "topk_idx", topk_idx, getattr(scores, "shape", (0, 0))[1], "experts")
    arrays = (scores, topk_idx, topk_weights, grad_topk_weights, mask, grad_scores_sum)
    return _gate_backward(*arrays, routed_scaling_factor=routed_scaling_factor, scoring_func=calls.scoring(op, scoring_func))


@documented(sums.scores_sum)
def scores_sum(scores: Array, mask: Array | None = None, num_seqs: int = 1) -> Array:
    return _scores_sum(scores, mask, num_seqs=num_seqs)


@documented(balance.load_balance_loss)
def load_balance_loss(scores_sum: Array, counts: Array, num_rows: int | Array, num_aux_topk: int, alpha: float | Array) -> Array:
    counts, rows, attrs = balance.judge_loss(scores_sum, counts, num_rows, num_aux_topk, alpha)
    return _load_balance_loss(scores_sum, counts, None if rows is None else rows.astype(jnp.int32), **attrs).reshape(()) * alpha


# ------------------------------------------------------------------ counts


@documented(counts.group_count, "The result is [num_groups] where num_seqs is 1.")
def group_count(group_idx: Array, num_groups: int, *, num_seqs: int = 1) -> Array:
    calls.slots("group_count", "group_idx", group_idx)
    found = _group_count(group_idx, num_groups=num_groups, num_seqs=num_seqs)
    return found.reshape(-1) if num_seqs == 1 else found


@documented(counts.aux_fi)
def aux_fi(topk_idx: Array, num_experts: int, num_aux_topk: int) -> Array:
    calls.slots("aux_fi", "topk_idx", topk_idx)
    _judge_indices("aux_fi", "topk_idx", topk_idx, num_experts, "experts")
    return _aux_fi(topk_idx, num_experts=num_experts, num_aux_topk=num_aux_topk)


@documented(indices.unique_group_indices)
def unique_group_indices(group_indices: Array, num_groups: int) -> Array:
    calls.rank("unique_group_indices", "group_indices", group_indices, "T, K")
    return _unique(group_indices, num_groups=num_groups)


# ------------------------------------------------------------------ mapping


@documented(
    mapping.get_fused_mapping,
    "num_expanded_tokens is positive. Returns pos_to_expert, pos_to_token, pos_to_token_topk, token_topk_to_pos, expert_start,\n"
    "    expert_end, num_tokens_per_expert and an empty list; `fused_mapping` tells what was dropped.",
)
def get_fused_mapping(
    topk_idx: Array, num_experts: int, num_expanded_tokens: int, alignment: int, force_no_sync: bool = False
) -> tuple[Array, Array, Array, Array, Array, Array, Array, list[int]]:
    op = "get_fused_mapping"
    calls.flag(op, "force_no_sync", force_no_sync)
    if calls.integer(op, "num_expanded_tokens", num_expanded_tokens) < 1:
        raise value_error(op, "num_expanded_tokens", "a positive number, for shapes are static; or use fused_mapping", num_expanded_tokens)
    attrs = calls.mapping_attributes(op, topk_idx, num_experts, alignment, num_expanded_tokens)
    _judge_indices(op, "topk_idx", topk_idx, num_experts, "experts")
    return *_get_fused_mapping(topk_idx, **attrs)[:7], []


@documented(
    mapping.fused_mapping,
    "Returns a FusedMapping, in which num_dropped is a scalar. Without num_expanded_tokens and expert_capacity, N is\n    "
    "`max_num_expanded_tokens(T, K, num_experts, alignment)`, which never drops anything.",
)
def fused_mapping(
    topk_idx: Array, *, num_experts: int, alignment: int, num_expanded_tokens: int | None = None, expert_capacity: int | None = None
) -> FusedMapping:
    attrs = calls.mapping_attributes("fused_mapping", topk_idx, num_experts, alignment, num_expanded_tokens, expert_capacity)
    _judge_indices("fused_mapping", "topk_idx", topk_idx, num_experts, "experts")
    *maps, dropped = _fused_mapping(topk_idx, **attrs)
    return FusedMapping(*maps, dropped.reshape(()))


@documented(counts.psum_num_tokens_per_expert)
def psum_num_tokens_per_expert(topk_idx: Array, expert_start: Array, expert_end: Array | None = None) -> Array:
    calls.slots("psum_num_tokens_per_expert", "topk_idx", topk_idx)
    return _psum(topk_idx, expert_start, expert_end)


# ------------------------------------------------------------------ rows to experts and back


def _judge_positions(op: str, where: Any, rows: Any) -> None:
    """Debug mode: positions are those of rows that there are."""
    if getattr(rows, "shape", ()):
        _judge_indices(op, "token_topk_to_pos", where, rows.shape[0], "positions")


@documented(expand.expand_to_fused)
def expand_to_fused(x: Array, token_topk_to_pos: Array, pos_to_expert: Array) -> Array:
    _judge_positions("expand_to_fused", token_topk_to_pos, pos_to_expert)
    return _expand(x, token_topk_to_pos, pos_to_expert)


@documented(
    expand.expand_to_fused_with_sf,
    "x is the pair (data, sf). Column-major scales are arrays in storage orientation, [S, rows].",
)
def expand_to_fused_with_sf(
    x: tuple[Array, Array],
    num_per_channels: int,
    token_topk_to_pos: Array,
    pos_to_expert: Array,
    use_tma_aligned_col_major_sf: bool = False,
) -> tuple[Array, Array]:
    op = "expand_to_fused_with_sf"
    if not isinstance(x, tuple | list) or len(x) != 2:
        raise type_error(op, "x", "a pair (data, scales)", f"{len(x)} items" if isinstance(x, tuple | list) else type(x).__name__)
    col = calls.flag(op, "use_tma_aligned_col_major_sf", use_tma_aligned_col_major_sf)
    _judge_positions(op, token_topk_to_pos, pos_to_expert)
    return _expand_with_sf(*x, token_topk_to_pos, pos_to_expert, num_per_channels=num_per_channels, col=col)


@documented(expand.expand_topk_weights)
def expand_topk_weights(topk_weights: Array, token_topk_to_pos: Array, pos_to_token_topk: Array) -> Array:
    _judge_positions("expand_topk_weights", token_topk_to_pos, pos_to_token_topk)
    return _expand_weights(topk_weights, token_topk_to_pos, pos_to_token_topk)


@documented(gemm.grouped_gemm)
def grouped_gemm(x: Array, w: Array, pos_to_expert: Array, expert_start: Array, expert_end: Array) -> Array:
    return _grouped_gemm(x, w, pos_to_expert, expert_start, expert_end)


@documented(
    reduce.reduce_fused,
    "x is an array, or the pair (x, x_sf), of which only topk_weights have a gradient. With fp8_format there is none.",
)
def reduce_fused(
    x: Array | tuple[Array, Array], topk_weights: Array | None, token_topk_to_pos: Array, fp8_format: str = "", sf: Array | None = None
) -> Array:
    op = "reduce_fused"
    rows, x_sf = calls.rows_and_factors(op, x)
    _judge_positions(op, token_topk_to_pos, rows)
    num_rows = rows.shape[0] if getattr(rows, "shape", ()) else 0
    if fp8_format:
        rows, topk_weights = (refuse_gradient(op, "fp8_format", array) for array in (rows, topk_weights))
    elif x_sf is not None:
        rows = refuse_gradient(op, "the rows of a pair (x, x_sf)", rows)
    return _reduce(rows, topk_weights, token_topk_to_pos, x_sf, sf, fp8_format=fp8_format, num_rows=num_rows)


@functools.cache
def _reduce_backward(wanted: tuple[str, ...]) -> Callable[..., tuple[Array, ...]]:
    return bind(reduce.reduce_fused_backward, wanted)


@documented(reduce.reduce_fused_backward, "need_grad_x, need_grad_weights: which of both are wanted; the other one is None.")
def reduce_fused_backward(
    grad_out: Array,
    x: Array | None,
    topk_weights: Array | None,
    token_topk_to_pos: Array,
    pos_to_token_topk: Array,
    x_sf: Array | None = None,
    *,
    need_grad_x: bool = True,
    need_grad_weights: bool = True,
) -> tuple[Array | None, Array | None]:
    wanted = tuple(calls.wanted_gradients(need_grad_x, need_grad_weights, x))
    _judge_positions("reduce_fused_backward", token_topk_to_pos, pos_to_token_topk)
    if not wanted:
        return None, None
    found = dict(zip(wanted, _reduce_backward(wanted)(grad_out, x, topk_weights, token_topk_to_pos, pos_to_token_topk, x_sf), strict=True))
    return found.get("d_x"), found.get("d_topk_weights")
