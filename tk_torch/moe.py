"""MoE routing for PyTorch: selection of experts and normalization of their weights. Indices are int64, -1 stands for none.

Gates, mapping, expansion and reduction are not public yet.
"""

from __future__ import annotations

from torch import Tensor

from tk_core.docs import documented
from tk_core.ops.moe import calls, normalize, scores_sum, topk
from tk_core.ops.moe.scoring import ScoringFunc
from tk_torch.library import bind

__all__ = ["ScoringFunc", "normalize_weight", "scores_sum", "topk_gate", "topk_sum_and_topk_group_idx"]

_topk_gate = bind(topk.topk_gate)
_topk_groups = bind(topk.topk_sum_and_topk_group_idx)
_normalize_weight = bind(normalize.normalize_weight)
_scores_sum = bind(scores_sum.scores_sum)


@documented(topk.topk_gate)
def topk_gate(scores: Tensor, num_topk: int) -> Tensor:
    calls.rank("topk_gate", "scores", scores, "T, E")
    return _topk_gate(scores, num_topk=num_topk, idx="int64")


@documented(topk.topk_sum_and_topk_group_idx)
def topk_sum_and_topk_group_idx(scores: Tensor, num_topk_sum: int, num_topk_groups: int) -> Tensor:
    calls.rank("topk_sum_and_topk_group_idx", "scores", scores, "T, G, Eg")
    return _topk_groups(scores, num_topk_sum=num_topk_sum, num_topk_groups=num_topk_groups, idx="int64")


@documented(normalize.normalize_weight)
def normalize_weight(topk_weights: Tensor) -> tuple[Tensor, Tensor]:
    calls.rank("normalize_weight", "topk_weights", topk_weights, "T, K")
    return _normalize_weight(topk_weights)


@documented(scores_sum.scores_sum)
def scores_sum(scores: Tensor, mask: Tensor | None = None, num_seqs: int = 1) -> Tensor:
    return _scores_sum(scores, mask, num_seqs=num_seqs)
