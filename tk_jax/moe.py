"""MoE routing for JAX: selection of experts and normalization of their weights. Indices are int32, -1 stands for none.

Gates, mapping, expansion and reduction are not public yet. What is not an array is static under `jax.jit`.
"""

from __future__ import annotations

from jax import Array

from tk_core.docs import documented
from tk_core.ops.moe import calls, normalize, scores_sum, topk
from tk_jax.vjp import bind

__all__ = ["normalize_weight", "scores_sum", "topk_gate", "topk_sum_and_topk_group_idx"]

_topk_gate = bind(topk.topk_gate)
_topk_groups = bind(topk.topk_sum_and_topk_group_idx)
_normalize_weight = bind(normalize.normalize_weight)
_scores_sum = bind(scores_sum.scores_sum)


@documented(topk.topk_gate)
def topk_gate(scores: Array, num_topk: int) -> Array:
    calls.rank("topk_gate", "scores", scores, "T, E")
    return _topk_gate(scores, num_topk=num_topk, idx="int32")


@documented(topk.topk_sum_and_topk_group_idx)
def topk_sum_and_topk_group_idx(scores: Array, num_topk_sum: int, num_topk_groups: int) -> Array:
    calls.rank("topk_sum_and_topk_group_idx", "scores", scores, "T, G, Eg")
    return _topk_groups(scores, num_topk_sum=num_topk_sum, num_topk_groups=num_topk_groups, idx="int32")


@documented(normalize.normalize_weight)
def normalize_weight(topk_weights: Array) -> tuple[Array, Array]:
    calls.rank("normalize_weight", "topk_weights", topk_weights, "T, K")
    return _normalize_weight(topk_weights)


@documented(scores_sum.scores_sum)
def scores_sum(scores: Array, mask: Array | None = None, num_seqs: int = 1) -> Array:
    return _scores_sum(scores, mask, num_seqs=num_seqs)
