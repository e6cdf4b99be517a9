"""NumPy oracle of the MoE routing operations: the expert-major layout, expansion to it and reduction from it.

Everything is bit-exact but the gradient of the weights, which is fp64. Fused multiply-adds are exact: one rounding of the exact value.
Where maps contradict each other, what this file writes is not part of the contract.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tk_core.reference.moe import Array, group_count, in_range, quiet
from tk_core.reference.quant_formats import E4M3, E4M3_DTYPE, align, sf_logical, sf_storage

# Elements that a reduction widens at a time.
CHUNK = 1 << 20


# ------------------------------------------------------------------ layout


class FusedMapping(NamedTuple):
    """Where every row of the layout comes from, where every slot goes to, the segments, and how many slots found no place."""

    pos_to_expert: Array
    pos_to_token: Array
    pos_to_token_topk: Array
    token_topk_to_pos: Array
    expert_start: Array
    expert_end: Array
    num_tokens_per_expert: Array
    num_dropped: Array


def max_num_expanded_tokens(num_tokens: int, num_topk: int, num_experts: int, alignment: int) -> int:
    """Rows that are enough for any routing."""
    slots = num_tokens * num_topk
    return alignment * ((slots + (alignment - 1) * min(num_experts, slots)) // alignment)


def fused_mapping(
    topk_idx: Array,
    num_experts: int,
    alignment: int,
    num_expanded_tokens: int | None = None,
    expert_capacity: int | None = None,
) -> FusedMapping:
    """The static form: an expert's slots in ascending order, segments packed or of equal capacity; what does not fit is dropped."""
    num_tokens, num_topk = topk_idx.shape
    flat = topk_idx.reshape(-1).astype(np.int64)
    slots = np.flatnonzero(in_range(flat, num_experts))
    slots = slots[np.argsort(flat[slots], kind="stable")]
    experts = flat[slots]
    counts = np.bincount(experts, minlength=num_experts)
    rank = np.arange(slots.size) - (np.cumsum(counts) - counts)[experts]
    if expert_capacity is not None:
        end = np.arange(1, num_experts + 1) * expert_capacity
        start, rows = end - expert_capacity, num_experts * expert_capacity
        fits = rank < expert_capacity
    else:
        end = np.cumsum(align(counts, alignment))
        start = end - align(counts, alignment)
        bound = max_num_expanded_tokens(num_tokens, num_topk, num_experts, alignment)
        rows = bound if num_expanded_tokens is None else num_expanded_tokens
        fits = start[experts] + rank < rows
        start, end = np.minimum(start, rows), np.minimum(end, rows)
    slots, experts, positions = slots[fits], experts[fits], (start[experts] + rank)[fits]
    pos_to_expert, pos_to_token, pos_to_token_topk = np.full((3, rows), -1, np.int32)
    pos_to_expert[positions] = experts
    pos_to_token[positions] = slots // max(num_topk, 1)
    pos_to_token_topk[positions] = slots
    token_topk_to_pos = np.full(flat.size, -1, np.int32)
    token_topk_to_pos[slots] = positions
    segments = (part.astype(np.int32) for part in (start, end, end - start))
    dropped = np.array(counts.sum() - slots.size, np.int32)
    return FusedMapping(pos_to_expert, pos_to_token, pos_to_token_topk, token_topk_to_pos.reshape(topk_idx.shape), *segments, dropped)


def get_fused_mapping(
    topk_idx: Array, num_experts: int, num_expanded_tokens: int, alignment: int, force_no_sync: bool = False
) -> tuple[Array, Array, Array, Array, Array, Array, Array, list[int]]:
    """The eight results; without num_expanded_tokens the layout is as long as the routing needs, and the sizes are also on the host."""
    synced = num_expanded_tokens == 0 and not force_no_sync
    rows = int(align(group_count(topk_idx, num_experts).astype(np.int64), alignment).sum()) if synced else num_expanded_tokens
    mapping = fused_mapping(topk_idx, num_experts, alignment, rows)
    return *mapping[:7], mapping.num_tokens_per_expert.tolist() if synced else []


def psum_num_tokens_per_expert(topk_idx: Array, expert_start: Array, expert_end: Array) -> Array:
    """Where the valid rows of every segment end; segments that overflow end with the buffer."""
    counts = group_count(topk_idx, expert_start.size)
    return np.minimum(expert_start.astype(np.int64) + counts, expert_end).astype(np.int32)


# ------------------------------------------------------------------ to the layout


def _expand_rows(rows: Array, token_topk_to_pos: Array, pos_to_expert: Array) -> Array:
    """Rows of any kind at their positions, zeros on padding."""
    out = np.zeros((pos_to_expert.size, *rows.shape[1:]), rows.dtype)
    token, k = np.nonzero(in_range(token_topk_to_pos, pos_to_expert.size))
    out[token_topk_to_pos[token, k]] = rows[token]
    return out


def expand_to_fused(x: Array, token_topk_to_pos: Array, pos_to_expert: Array) -> Array:
    """A copy of its token in every valid row."""
    return _expand_rows(x, token_topk_to_pos, pos_to_expert)


def expand_to_fused_bwd(d_out: Array, token_topk_to_pos: Array) -> Array:
    """d_x: the sum over the copies in fp32, rounded once."""
    return reduce_fused(d_out, None, token_topk_to_pos)


def expand_to_fused_with_sf(
    x: tuple[Array, Array],
    num_per_channels: int,
    token_topk_to_pos: Array,
    pos_to_expert: Array,
    use_tma_aligned_col_major_sf: bool = False,
) -> tuple[Array, Array]:
    """Data and scales; column-major scales are a view of their padded storage. num_per_channels changes nothing."""
    data, sf = (_expand_rows(part, token_topk_to_pos, pos_to_expert) for part in x)
    return data, sf_logical(sf_storage(sf), sf.shape[0]) if use_tma_aligned_col_major_sf else sf


def expand_topk_weights(topk_weights: Array, pos_to_token_topk: Array) -> Array:
    """The weight of every row (N,), zero on padding."""
    valid = in_range(pos_to_token_topk, topk_weights.size)
    w_row = np.zeros(pos_to_token_topk.size, topk_weights.dtype)
    w_row[valid] = topk_weights.reshape(-1)[pos_to_token_topk[valid]]
    return w_row


def expand_topk_weights_bwd(d_w_row: Array, token_topk_to_pos: Array) -> Array:
    """d_topk_weights: every slot has one row or none."""
    valid = in_range(token_topk_to_pos, d_w_row.size)
    d_weights = np.zeros(token_topk_to_pos.shape, d_w_row.dtype)
    d_weights[valid] = d_w_row[token_topk_to_pos[valid]]
    return d_weights


# ------------------------------------------------------------------ from the layout


@quiet
def fma(a: Array, b: Array, c: Array) -> Array:
    """The fp32 value of a * b + c with one rounding.

    The fp64 product is exact. The fp64 sum is rounded to odd: where it is inexact, its last bit is set, towards zero or away from it, so
    that the second rounding sees what the first has lost. 53 bits to odd and then 24 to nearest are one rounding, subnormals included.
    """
    product, c = np.asarray(a, np.float64) * b, np.asarray(c, np.float64)
    total = np.asarray(product + c)
    back = total - product
    lost = (product - (total - back)) + (c - back)
    bits = total.view(np.int64)
    step = np.where((lost > 0) == (total > 0), 1, -1)
    odd = np.where(np.isfinite(total) & (lost != 0) & (bits & 1 == 0), bits + step, bits)
    return odd.view(np.float64).astype(np.float32)


@quiet
def rounded(values: Array, dtype: np.dtype) -> Array:
    """fp32 values to the nearest of a dtype; E4M3 saturates and keeps NaN."""
    return E4M3.store(E4M3.encode(values)) if dtype == E4M3_DTYPE else values.astype(dtype)


@quiet
def reduce_fused(
    x: Array | tuple[Array, Array],
    topk_weights: Array | None,
    token_topk_to_pos: Array,
    fp8_format: str = "",
    sf: Array | None = None,
) -> Array:
    """Weighted sums of the rows of every token by fused multiply-adds in the order of its slots, then times sf."""
    data, x_sf = x if isinstance(x, tuple) else (x, None)
    num_tokens, num_topk = token_topk_to_pos.shape
    hidden = data.shape[1]
    out = np.empty((num_tokens, hidden), E4M3_DTYPE if fp8_format else data.dtype)
    valid = in_range(token_topk_to_pos, data.shape[0])
    step = max(CHUNK // max(hidden, 1), 1)
    for first in range(0, num_tokens, step):
        tokens = np.arange(first, min(first + step, num_tokens))
        acc = np.zeros((tokens.size, hidden), np.float32)
        for k in range(num_topk):
            here = valid[tokens, k]
            pos = token_topk_to_pos[tokens[here], k]
            scale = np.ones(pos.size, np.float32)
            if topk_weights is not None:
                scale = scale * topk_weights[tokens[here], k]
            if x_sf is not None:
                scale = scale * x_sf[pos]
            acc[here] = fma(data[pos].astype(np.float32), scale[:, None], acc[here])
        out[tokens] = rounded(acc if sf is None else acc * np.float32(sf.item()), out.dtype)
    return out


@quiet
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
    """grad_x bit for bit in the dtype of grad_out, grad_topk_weights in fp64. x_sf scales the gradient of the weights alone."""
    num_topk = token_topk_to_pos.shape[1]
    grad_x = grad_weights = None
    if need_grad_x:
        grad_x = np.zeros((pos_to_token_topk.size, grad_out.shape[1]), grad_out.dtype)
        (row,) = np.nonzero(in_range(pos_to_token_topk, token_topk_to_pos.size))
        slot = pos_to_token_topk[row]
        grad_x[row] = grad_out[slot // max(num_topk, 1)]
        if topk_weights is not None:
            weights = topk_weights.reshape(-1)[slot]
            for first in range(0, row.size, 1024):
                part = slice(first, first + 1024)
                grad_x[row[part]] = rounded(weights[part, None] * grad_x[row[part]].astype(np.float32), grad_out.dtype)
    if need_grad_weights:
        grad_weights = np.zeros(token_topk_to_pos.shape, np.float64)
        token, k = np.nonzero(in_range(token_topk_to_pos, x.shape[0]))
        for t, slot in zip(token, k, strict=True):
            pos = token_topk_to_pos[t, slot]
            product = grad_out[t].astype(np.float64) @ x[pos].astype(np.float64)
            grad_weights[t, slot] = product if x_sf is None else product * np.float64(x_sf[pos])
    return grad_x, grad_weights
