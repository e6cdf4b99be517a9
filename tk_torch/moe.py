"""MoE routing for PyTorch: gates, mapping to an expert-major buffer, expansion, reduction, counts and balance.

Indices of experts are int64, positions and counts int32; -1 stands for none. In debug mode (`tk_core.config.set_debug`) arrays are read
to judge indices and scores; otherwise what is out of range counts as none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tk_core import config
from tk_core.docs import documented, with_doc
from tk_core.errors import type_error, value_error
from tk_core.ops.moe import balance, calls, counts, docs, expand, gate, gate_backward, gemm, indices, mapping, normalize, reduce, topk
from tk_core.ops.moe import scores_sum as sums
from tk_core.ops.moe.balance import update_expert_bias
from tk_core.ops.moe.calls import FusedMapping, GateOutput, max_num_expanded_tokens
from tk_core.ops.moe.scoring import ScoringFunc
from tk_torch.launch import DTYPE_NAMES
from tk_torch.library import TorchOp, bind, is_plain

__all__ = [
    "FusedMapping",
    "GateOutput",
    "ScoringFunc",
    "aux_fi",
    "expand_to_fused",
    "expand_to_fused_with_sf",
    "expand_topk_weights",
    "fused_mapping",
    "get_fused_mapping",
    "group_count",
    "grouped_gemm",
    "inplace_unique_group_indices",
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

# bound here, not where they are called: a tracer must not see the operators being registered
_topk_gate = bind(topk.topk_gate)
_topk_groups = bind(topk.topk_sum_and_topk_group_idx)
_top2_sum_gate = bind(gate.top2_sum_gate)
_moe_topk_gate = bind(gate.moe_topk_gate)
_gate_backward = bind(gate_backward.moe_topk_gate_backward)
_normalize_weight = bind(normalize.normalize_weight)
_mask_by_tp = bind(indices.mask_indices_by_tp)
_unique = bind(indices.unique_group_indices)
_unique_in_place = bind(indices.inplace_unique_group_indices)
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
_reduce_backward = bind(reduce.reduce_fused_backward)
_scores_sum = bind(sums.scores_sum)
_load_balance_loss = bind(balance.load_balance_loss)

_is_compiling = torch.compiler.is_compiling


def _debugging(*tensors: Any) -> bool:
    """Whether arrays are read to judge them."""
    return config.get_debug() and not _is_compiling() and is_plain(tensors)


def _judge_indices(op: str, argument: str, index: Tensor | None, limit: int, what: str) -> None:
    """Debug mode: no index beyond its range."""
    if isinstance(index, Tensor) and index.numel() and _debugging(index):
        calls.judge_largest(op, argument, limit, what, index.max())


# ------------------------------------------------------------------ selection


@documented(topk.topk_gate)
def topk_gate(scores: Tensor, num_topk: int) -> Tensor:
    calls.rank("topk_gate", "scores", scores, "T, E")
    if isinstance(scores, Tensor) and _debugging(scores):
        calls.judge_finite("topk_gate", "scores", scores.isnan().sum())
    return _topk_gate(scores, num_topk=num_topk, idx="int64")


@documented(topk.topk_sum_and_topk_group_idx)
def topk_sum_and_topk_group_idx(scores: Tensor, num_topk_sum: int, num_topk_groups: int) -> Tensor:
    calls.rank("topk_sum_and_topk_group_idx", "scores", scores, "T, G, Eg")
    return _topk_groups(scores, num_topk_sum=num_topk_sum, num_topk_groups=num_topk_groups, idx="int64")


@documented(normalize.normalize_weight)
def normalize_weight(topk_weights: Tensor) -> tuple[Tensor, Tensor]:
    calls.rank("normalize_weight", "topk_weights", topk_weights, "T, K")
    return _normalize_weight(topk_weights)


@documented(indices.mask_indices_by_tp)
def mask_indices_by_tp(indices: Tensor, n: int, num_ep_ranks: int, tp_rank: int, num_tp_ranks: int) -> Tensor:
    op = "mask_indices_by_tp"
    calls.rank(op, "indices", indices, "T, K")
    _judge_indices(op, "indices", indices, n, "experts")
    rank = calls.tp_rank(op, tp_rank, num_tp_ranks)
    return _mask_by_tp(indices, None, n=n, num_ep_ranks=num_ep_ranks, num_tp_ranks=num_tp_ranks, tp_rank_value=rank)


# ------------------------------------------------------------------ gates


def _gate(
    bound: TorchOp,
    tensors: tuple[Any, ...],
    attrs: dict[str, Any],
    unmapped_topk_idx: Tensor | None,
    scores: Tensor | None,
    out: tuple[Tensor, Tensor] | None = None,
) -> Any:
    """Run a gate on the arguments of its declaration up to logical_count; its buffers are written in place where their layout allows it."""
    op, logits, fix_routing_mask = bound.op.name, tensors[0], tensors[6]
    given = {"unmapped_topk_idx": unmapped_topk_idx, "scores": scores}
    if out is not None:
        if not isinstance(out, tuple | list) or len(out) != 2:
            raise type_error(op, "out", "a pair (topk_idx, topk_weights)", type(out).__name__)
        given |= {"topk_idx": out[0], "topk_weights": out[1]}
    given = {name: t for name, t in given.items() if t is not None}
    _judge_buffers(op, given, logits, attrs)
    if fix_routing_mask is not None and unmapped_topk_idx is None:
        raise value_error(op, "unmapped_topk_idx", "an array, from which rows of fix_routing_mask are read", "None")
    fixed = unmapped_topk_idx if fix_routing_mask is not None else None
    arguments = (*tensors[:7], fixed, *tensors[7:])
    if _debugging(*arguments):
        _judge_gate(op, attrs, *arguments)
    # rows apart, which the kernel does not write
    apart = given.pop("unmapped_topk_idx") if unmapped_topk_idx is not None and not _is_dense(unmapped_topk_idx) else None
    if out is not None and torch.is_grad_enabled() and isinstance(logits, Tensor) and logits.requires_grad:
        raise RuntimeError(f"{op}: the gradient is not implemented with out=")
    wanted = ["topk_idx", "topk_weights", *given]
    if attrs["num_seqs"]:
        wanted += ["unmapped_topk_idx", "scores_sum"]
    if apart is not None:
        wanted.append("unmapped_topk_idx")
    if _is_compiling() or not is_plain(arguments) or (torch.is_grad_enabled() and isinstance(logits, Tensor) and logits.requires_grad):
        wanted += ["unmapped_topk_idx", "scores", "scores_sum"]  # what the gradient needs
    idx, weights, unmapped, _, total = bound.some(wanted, *arguments, given=given, **attrs)
    if apart is not None:
        apart.copy_(unmapped)
    return (
        GateOutput(idx, weights, unmapped if unmapped_topk_idx is None else unmapped_topk_idx, total)
        if attrs["num_seqs"]
        else (idx, weights)
    )


def _is_dense(t: Any) -> bool:
    """Whether kernels can write to it."""
    return not isinstance(t, Tensor) or (t.is_contiguous() and (_is_compiling() or not is_plain((t,)) or not t.data_ptr() & 15))


def _judge_buffers(op: str, given: dict[str, Any], logits: Any, attrs: dict[str, Any]) -> None:
    """What a gate writes to, of the shape that the logits and the attributes tell; rows of unmapped_topk_idx may lie apart."""
    if not isinstance(logits, Tensor) or logits.ndim != 2 or not isinstance(attrs["num_topk"], int):
        return  # judged later
    rows, slots = logits.shape[0], attrs["num_topk"]
    columns = slots + attrs["num_shared_experts"]
    shapes = {"unmapped_topk_idx": (rows, slots), "scores": logits.shape, "topk_idx": (rows, columns), "topk_weights": (rows, columns)}
    for name, t in given.items():
        argument = {"topk_idx": "out[0]", "topk_weights": "out[1]"}.get(name, name)
        dtype = torch.int64 if name.endswith("idx") else torch.float32
        _judge_written(op, argument, t, (dtype,), shapes[name], logits, name == "unmapped_topk_idx")


def _judge_written(
    op: str, argument: str, t: Any, dtypes: tuple[torch.dtype, ...], shape: Sequence[int], like: Tensor, apart: bool = False
) -> None:
    """An argument that is written; `apart`: its rows may lie apart."""
    if not isinstance(t, Tensor):
        raise type_error(op, argument, "an array to write to", type(t).__name__)
    if t.dtype not in dtypes:
        raise type_error(op, argument, f"dtype {' or '.join(DTYPE_NAMES[dtype] for dtype in dtypes)}", DTYPE_NAMES[t.dtype])
    if tuple(t.shape) != tuple(shape):
        raise value_error(op, argument, f"shape {tuple(shape)}", tuple(t.shape))
    if t.device != like.device:
        raise value_error(op, argument, f"device {like.device}", t.device)
    rows, columns = shape
    dense = (t.stride(1) == 1 or columns == 1) and (t.stride(0) >= columns or rows == 1) if apart else t.is_contiguous()
    if not dense and t.numel():
        raise value_error(op, argument, "dense rows to write to" if apart else "a contiguous array to write to", f"strides {t.stride()}")


def _judge_gate(op: str, attrs: dict[str, Any], *arguments: Any) -> None:
    """Debug mode: finite logits in rows that take part, experts and replicas that exist."""
    named = dict(zip(gate.moe_topk_gate.forward.ins, arguments, strict=False))
    logits, mask, fix = named["logits"], named["mask"], named["fix_routing_mask"]
    if not isinstance(logits, Tensor) or logits.ndim != 2 or not logits.numel():
        return
    wrong = ~logits.isfinite().all(1)
    if isinstance(mask, Tensor) and mask.shape == wrong.shape:
        wrong = wrong & mask
    calls.judge_finite(op, "logits", wrong.sum())
    fixed = named["fixed_topk_idx"]
    if (
        isinstance(fixed, Tensor)
        and isinstance(fix, Tensor)
        and fix.dtype is torch.bool
        and fix.shape == fixed.shape[:1]
        and fixed[fix].numel()
    ):
        calls.judge_largest(op, "unmapped_topk_idx", logits.shape[1], "experts", fixed[fix].max())
    count, table = named["logical_count"], named["to_physical_map"]
    if isinstance(count, Tensor) and isinstance(table, Tensor) and table.ndim == 2 and count.numel():
        calls.judge_counts(op, "logical_count", table.shape[1], count.min(), count.max())
        calls.judge_largest(op, "to_physical_map", logits.shape[1] + table.shape[1] - 1, "physical experts", table.max())


@with_doc(docs.TOP2_TORCH)
def top2_sum_gate(
    logits: Tensor,
    bias: Tensor,
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
    mask: Tensor | None = None,
    fix_routing_mask: Tensor | None = None,
    to_physical_map: Tensor | None = None,
    logical_count: Tensor | None = None,
    unmapped_topk_idx: Tensor | None = None,
    scores: Tensor | None = None,
    *,
    num_seqs: int | None = None,
) -> tuple[Tensor, Tensor] | GateOutput:
    op = "top2_sum_gate"
    if bias is None:
        raise type_error(op, "bias", "a float32 array of shape (E,)", "None")
    attrs = calls.gate_attributes(
        op, num_topk, use_shared_as_routed, num_shared_experts, routed_scaling_factor, scoring_func, num_seqs, "int64"
    )
    attrs |= calls.group_attributes(op, num_topk_groups, num_groups, num_ep_ranks, num_tp_ranks)
    attrs |= {"ep_rank_value": calls.number(op, "ep_rank", ep_rank, 0), "tp_rank_value": calls.tp_rank(op, tp_rank, num_tp_ranks)}
    tensors = (logits, bias, None, None, mask, None, fix_routing_mask, to_physical_map, logical_count)
    return _gate(_top2_sum_gate, tensors, attrs, unmapped_topk_idx, scores)


@with_doc(docs.TOPK_TORCH)
def moe_topk_gate(
    logits: Tensor,
    num_topk: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    scoring_func: str = "sqrtsoftplus",
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    image_bias: Tensor | None = None,
    image_token_mask: Tensor | None = None,
    fix_routing_mask: Tensor | None = None,
    to_physical_map: Tensor | None = None,
    logical_count: Tensor | None = None,
    unmapped_topk_idx: Tensor | None = None,
    force_random: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    scores: Tensor | None = None,
    *,
    num_seqs: int | None = None,
) -> tuple[Tensor, Tensor] | GateOutput:
    op = "moe_topk_gate"
    attrs = calls.gate_attributes(
        op, num_topk, use_shared_as_routed, num_shared_experts, routed_scaling_factor, scoring_func, num_seqs, "int64"
    )
    attrs["ep_rank_value"] = calls.number(op, "ep_rank", ep_rank, 0)
    tensors = (logits, bias, image_bias, image_token_mask, mask, force_random, fix_routing_mask, to_physical_map, logical_count)
    return _gate(_moe_topk_gate, tensors, attrs, unmapped_topk_idx, scores, out)


moe_topk_gate_forward = moe_topk_gate


@documented(gate_backward.moe_topk_gate_backward, "`out`: an array to write to.")
def moe_topk_gate_backward(
    scores: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    grad_topk_weights: Tensor,
    routed_scaling_factor: float,
    scoring_func: str = "sqrtsoftplus",
    mask: Tensor | None = None,
    grad_scores_sum: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    op = "moe_topk_gate_backward"
    calls.rank(op, "scores", scores, "T, E")
    calls.mask_with_sums(op, mask, grad_scores_sum, scores)
    _judge_indices(op, "topk_idx", topk_idx, scores.shape[1] if isinstance(scores, Tensor) else 0, "experts")
    if out is not None and isinstance(scores, Tensor):
        _judge_written(op, "out", out, (torch.float32,), scores.shape, scores)
    return _gate_backward(
        scores, topk_idx, topk_weights, grad_topk_weights, mask, grad_scores_sum,
        out=None if out is None else {"grad_logits": out},
        routed_scaling_factor=routed_scaling_factor, scoring_func=calls.scoring(op, scoring_func),
    )  # fmt: skip


@documented(sums.scores_sum)
def scores_sum(scores: Tensor, mask: Tensor | None = None, num_seqs: int = 1) -> Tensor:
    return _scores_sum(scores, mask, num_seqs=num_seqs)


@documented(balance.load_balance_loss)
def load_balance_loss(scores_sum: Tensor, counts: Tensor, num_rows: int | Tensor, num_aux_topk: int, alpha: float | Tensor) -> Tensor:
    counts, rows, attrs = balance.judge_loss(scores_sum, counts, num_rows, num_aux_topk, alpha)
    return _load_balance_loss(scores_sum, counts, None if rows is None else rows.int(), **attrs).view(()) * alpha


# ------------------------------------------------------------------ counts


@documented(counts.group_count, "The result is [num_groups] where num_seqs is 1.")
def group_count(group_idx: Tensor, num_groups: int, *, num_seqs: int = 1) -> Tensor:
    calls.slots("group_count", "group_idx", group_idx)
    found = _group_count(group_idx, num_groups=num_groups, num_seqs=num_seqs)
    return found.view(-1) if num_seqs == 1 else found


@documented(counts.aux_fi)
def aux_fi(topk_idx: Tensor, num_experts: int, num_aux_topk: int) -> Tensor:
    calls.slots("aux_fi", "topk_idx", topk_idx)
    _judge_indices("aux_fi", "topk_idx", topk_idx, num_experts, "experts")
    return _aux_fi(topk_idx, num_experts=num_experts, num_aux_topk=num_aux_topk)


@documented(indices.unique_group_indices)
def unique_group_indices(group_indices: Tensor, num_groups: int) -> Tensor:
    calls.rank("unique_group_indices", "group_indices", group_indices, "T, K")
    return _unique(group_indices, num_groups=num_groups)


@documented(indices.inplace_unique_group_indices, "The argument is changed, and nothing is returned.")
def inplace_unique_group_indices(group_indices: Tensor, num_groups: int) -> None:
    op = "inplace_unique_group_indices"
    calls.rank(op, "group_indices", group_indices, "T, K")
    _judge_written(op, "group_indices", group_indices, (torch.int64, torch.int32), getattr(group_indices, "shape", ()), group_indices)
    _unique_in_place(group_indices, num_groups=num_groups, out={"out": group_indices})


# ------------------------------------------------------------------ mapping


def _mapping(bound: TorchOp, topk_idx: Tensor, attrs: dict[str, int]) -> FusedMapping:
    _judge_indices(bound.op.name, "topk_idx", topk_idx, attrs["num_experts"], "experts")
    *maps, dropped = bound(topk_idx, **attrs)
    return FusedMapping(*maps, dropped.view(()))


@documented(
    mapping.get_fused_mapping,
    "Returns pos_to_expert, pos_to_token, pos_to_token_topk, token_topk_to_pos, expert_start, expert_end, num_tokens_per_expert and "
    "the last\n    one again as a list of ints, empty where the host was not synchronized. With num_expanded_tokens 0, the host reads the "
    "counts\n    and N is what the segments need; with force_no_sync, N is 0.",
)
def get_fused_mapping(
    topk_idx: Tensor, num_experts: int, num_expanded_tokens: int, alignment: int, force_no_sync: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, list[int]]:
    op = "get_fused_mapping"
    rows = calls.integer(op, "num_expanded_tokens", num_expanded_tokens)
    synchronize = not calls.flag(op, "force_no_sync", force_no_sync) and rows == 0
    attrs = calls.mapping_attributes(op, topk_idx, num_experts, alignment, None if synchronize else rows)
    maps = _mapping(_get_fused_mapping, topk_idx, attrs)[:7]
    if not synchronize:
        return *maps, []
    sizes = maps[6].tolist()
    needed = sum(sizes)
    return *(rows[:needed] for rows in maps[:3]), *maps[3:], sizes


@documented(
    mapping.fused_mapping,
    "Returns a FusedMapping, in which num_dropped is a scalar. Without num_expanded_tokens and expert_capacity, N is\n    "
    "`max_num_expanded_tokens(T, K, num_experts, alignment)`, which never drops anything.",
)
def fused_mapping(
    topk_idx: Tensor, *, num_experts: int, alignment: int, num_expanded_tokens: int | None = None, expert_capacity: int | None = None
) -> FusedMapping:
    attrs = calls.mapping_attributes("fused_mapping", topk_idx, num_experts, alignment, num_expanded_tokens, expert_capacity)
    return _mapping(_fused_mapping, topk_idx, attrs)


@documented(counts.psum_num_tokens_per_expert)
def psum_num_tokens_per_expert(topk_idx: Tensor, expert_start: Tensor, expert_end: Tensor | None = None) -> Tensor:
    calls.slots("psum_num_tokens_per_expert", "topk_idx", topk_idx)
    return _psum(topk_idx, expert_start, expert_end)


# ------------------------------------------------------------------ rows to experts and back


def _judge_positions(op: str, where: Any, rows: Any) -> None:
    """Debug mode: positions are those of rows that there are."""
    if isinstance(rows, Tensor) and rows.ndim:
        _judge_indices(op, "token_topk_to_pos", where, rows.shape[0], "positions")


@documented(expand.expand_to_fused)
def expand_to_fused(x: Tensor, token_topk_to_pos: Tensor, pos_to_expert: Tensor) -> Tensor:
    _judge_positions("expand_to_fused", token_topk_to_pos, pos_to_expert)
    return _expand(x, token_topk_to_pos, pos_to_expert)


@documented(
    expand.expand_to_fused_with_sf,
    "x is the pair (data, sf). Column-major scales come as a view [N, S] with strides (1, rows).",
)
def expand_to_fused_with_sf(
    x: tuple[Tensor, Tensor],
    num_per_channels: int,
    token_topk_to_pos: Tensor,
    pos_to_expert: Tensor,
    use_tma_aligned_col_major_sf: bool = False,
) -> tuple[Tensor, Tensor]:
    op = "expand_to_fused_with_sf"
    if not isinstance(x, tuple | list) or len(x) != 2:
        raise type_error(op, "x", "a pair (data, scales)", f"{len(x)} items" if isinstance(x, tuple | list) else type(x).__name__)
    col = calls.flag(op, "use_tma_aligned_col_major_sf", use_tma_aligned_col_major_sf)
    _judge_positions(op, token_topk_to_pos, pos_to_expert)
    out, sf = _expand_with_sf(*x, token_topk_to_pos, pos_to_expert, num_per_channels=num_per_channels, col=col)
    return out, sf.t().narrow(0, 0, out.shape[0]) if col else sf


@documented(expand.expand_topk_weights)
def expand_topk_weights(topk_weights: Tensor, token_topk_to_pos: Tensor, pos_to_token_topk: Tensor) -> Tensor:
    _judge_positions("expand_topk_weights", token_topk_to_pos, pos_to_token_topk)
    return _expand_weights(topk_weights, token_topk_to_pos, pos_to_token_topk)


@documented(gemm.grouped_gemm)
def grouped_gemm(x: Tensor, w: Tensor, pos_to_expert: Tensor, expert_start: Tensor, expert_end: Tensor) -> Tensor:
    return _grouped_gemm(x, w, pos_to_expert, expert_start, expert_end)


@documented(
    reduce.reduce_fused,
    "x is an array, or the pair (x, x_sf), of which only topk_weights have a gradient. `out`: an array to write to; with it and with\n    "
    "fp8_format there is no gradient.",
)
def reduce_fused(
    x: Tensor | tuple[Tensor, Tensor],
    topk_weights: Tensor | None,
    token_topk_to_pos: Tensor,
    fp8_format: str = "",
    sf: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    op = "reduce_fused"
    rows, x_sf = calls.rows_and_factors(op, x)
    _judge_positions(op, token_topk_to_pos, rows)
    if torch.is_grad_enabled():
        closed = [rows, topk_weights] if fp8_format or out is not None else [rows] if x_sf is not None else []
        if any(isinstance(t, Tensor) and t.requires_grad for t in closed):
            what = "fp8_format" if fp8_format else "out=" if out is not None else "the rows of a pair (x, x_sf)"
            raise RuntimeError(f"{op}: the gradient is not implemented for {what}")
    num_rows = rows.shape[0] if isinstance(rows, Tensor) and rows.ndim else 0
    given = None if out is None else {"out": out}
    return _reduce(rows, topk_weights, token_topk_to_pos, x_sf, sf, out=given, fp8_format=fp8_format, num_rows=num_rows)


@documented(reduce.reduce_fused_backward, "need_grad_x, need_grad_weights: which of both are wanted; the other one is None.")
def reduce_fused_backward(
    grad_out: Tensor,
    x: Tensor | None,
    topk_weights: Tensor | None,
    token_topk_to_pos: Tensor,
    pos_to_token_topk: Tensor,
    x_sf: Tensor | None = None,
    *,
    need_grad_x: bool = True,
    need_grad_weights: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    wanted = calls.wanted_gradients(need_grad_x, need_grad_weights, x)
    _judge_positions("reduce_fused_backward", token_topk_to_pos, pos_to_token_topk)
    if not wanted:
        return None, None
    grad_x, grad_weights = _reduce_backward.some(wanted, grad_out, x, topk_weights, token_topk_to_pos, pos_to_token_topk, x_sf)
    return grad_x, grad_weights
