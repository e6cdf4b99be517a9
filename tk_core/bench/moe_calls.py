"""Calls of the MoE benchmark: what runs, what it is compared with, and the bytes that the specification counts.

T tokens, K slots, E experts here of EP ranks, H columns, alignment A, V assignments, N rows of the expert-major buffer.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from tk_core.bench.moe_inputs import Part, Source, array, differs, far, first, sample
from tk_core.ops.moe.expand import expand_to_fused
from tk_core.ops.moe.gemm import grouped_gemm as gemm
from tk_core.reference import moe as oracle
from tk_core.reference import moe_gate as gates
from tk_core.reference import moe_mapping as maps
from tk_torch import moe
from tk_torch.library import bind

# Rows of a selection or a gate that are compared with the oracle.
GATED = 1024
# Copies of an argument that is changed in place: more than one timing takes.
COPIES = 64
FACTOR = 2.5
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "e4m3": torch.float8_e4m3fn}


class Call(NamedTuple):
    """What is timed; what is wrong with its results, an empty text when nothing is; the least bytes; V and N where there are any."""

    run: Callable[[], Any]
    check: Callable[[Any], str]
    bytes: int
    valid: int | None = None
    expanded: int | None = None


# ------------------------------------------------------------------ selection


def topk_gate(source: Source, T: int, E: int, K: int) -> Call:
    """Best K of E scores."""
    scores, rows = source.normal(T, E), sample(T, GATED)

    def check(got: torch.Tensor) -> str:
        return differs("topk_idx", got[rows], oracle.topk_gate(array(scores[rows]), K))

    return Call(lambda: moe.topk_gate(scores, K), check, 4 * T * E + 8 * T * K)


def topk_groups(source: Source, T: int, E: int, G: int, num_topk_sum: int, num_topk_groups: int) -> Call:
    """Best groups of experts."""
    scores = source.normal(T, G, E // G)

    def check(got: torch.Tensor) -> str:
        return differs("group_idx", got, oracle.topk_sum_and_topk_group_idx(array(scores), num_topk_sum, num_topk_groups))

    run = functools.partial(moe.topk_sum_and_topk_group_idx, scores, num_topk_sum, num_topk_groups)
    return Call(run, check, 4 * T * E + 8 * T * num_topk_groups)


def normalize_weight(source: Source, T: int, K: int) -> Call:
    """Uniform weights."""
    weights = source.uniform(T, K)

    def check(got: Any) -> str:
        return first(map(differs, ("denominator", "normalized_weights"), got, oracle.normalize_weight(array(weights))))

    return Call(lambda: moe.normalize_weight(weights), check, 8 * T * K + 4 * T)


# ------------------------------------------------------------------ gates


def moe_topk_gate(source: Source, T: int, E: int, K: int, training: bool = False) -> Call:
    """`training`: with everything that the gradient and an auxiliary loss need."""
    logits, bias, rows = source.normal(T, E), source.normal(E) * 0.1, sample(T, GATED)
    run = functools.partial(moe.moe_topk_gate, logits, K, False, 0, FACTOR, 0, bias=bias)
    scores, unmapped = torch.empty_like(logits), torch.empty((T, K), dtype=torch.int64, device=logits.device)
    trained = functools.partial(run, unmapped_topk_idx=unmapped, scores=scores, num_seqs=1)

    def check(got: Any) -> str:
        whole, u = got if training else trained(), array(scores)
        want = gates.moe_topk_gate_forward(array(logits[rows]), K, False, 0, FACTOR, 0, bias=array(bias), scores=u[rows])
        return (
            far("scores", scores[rows], gates.score(array(logits[rows]), "sqrtsoftplus", np.float64), 2e-6, 1e-30)
            or differs("topk_idx", got[0][rows], want.topk_idx)
            or differs("topk_weights", got[1][rows], want.topk_weights)
            or differs("unmapped_topk_idx", whole.unmapped_topk_idx[rows], want.unmapped_topk_idx)
            or far("scores_sum", whole.scores_sum, oracle.scores_sum(u), 1e-5, 0)
        )

    count = 4 * T * E + 4 * E + 12 * T * K
    return Call(trained if training else run, check, count + (8 * T * K + 4 * T * E + 4 * E if training else 0))


def gate_backward(source: Source, T: int, E: int, K: int, sums: bool = False) -> Call:
    """`sums`: with the gradient of the sums of scores."""
    scores = torch.empty((T, E), device=source.device)
    idx, weights = moe.moe_topk_gate(source.normal(T, E), K, False, 0, FACTOR, 0, scores=scores)
    grad, h, rows = source.normal(T, K), source.normal(1, E) if sums else None, sample(T, GATED)

    def check(got: torch.Tensor) -> str:
        given = (array(t[rows]) for t in (scores, idx, weights, grad))
        want = gates.moe_topk_gate_backward(*given, FACTOR, grad_scores_sum=array(h) if sums else None)
        return far("grad_logits", got[rows], want, 1e-5, 1e-6)

    run = functools.partial(moe.moe_topk_gate_backward, scores, idx, weights, grad, FACTOR, grad_scores_sum=h)
    return Call(run, check, 8 * T * E + 16 * T * K + (4 * E if sums else 0))


def top2_sum_gate(source: Source, T: int, E: int, K: int, G: int, Gk: int, scoring: str, S: int = 0, EP: int = 1, masked: int = 0) -> Call:
    """With EP ranks, TP rank 1 of 2; shared experts come with a map of 33 columns that changes nothing; the last tokens are masked."""
    logits, bias, rows, D = source.normal(T, E), source.normal(E) * 0.1, sample(T, GATED), 33
    mask = torch.arange(T, device=source.device) < T - masked if masked else None
    table = np.broadcast_to(np.arange(E + S, dtype=np.int32)[:, None], (E + S, D)).copy() if S else None
    count = np.ones(E + S, np.int32) if S else None
    ranks = (0, EP, 1, 2) if EP > 1 else (0, 1, 0, 1)
    attrs = (K, Gk, G, S > 0, S, 1.5, *ranks, scoring)
    tables = {} if table is None else {"to_physical_map": table, "logical_count": count}
    given = {name: torch.from_numpy(a).to(source.device) for name, a in tables.items()}
    run = functools.partial(moe.top2_sum_gate, logits, bias, *attrs, mask=mask, **given)

    def check(got: Any) -> str:
        scores = torch.empty_like(logits)
        run(scores=scores)
        part, u = array(logits[rows]), array(scores[rows])
        part_mask = None if mask is None else array(mask[rows])
        want = gates.top2_sum_gate(part, array(bias), *attrs, mask=part_mask, **tables, scores=u)
        true = gates.score(part, scoring, np.float64) * (1 if part_mask is None else part_mask[:, None])
        close = far("scores", scores[rows], true, 1e-5 if scoring == "softmax" else 2e-6, 1e-30)
        return close or differs("topk_idx", got[0][rows], want.topk_idx) or differs("topk_weights", got[1][rows], want.topk_weights)

    size = 4 * T * E + 4 * E + 12 * T * (K + S) + (T if masked else 0) + (4 * (E + S) * (D + 1) if S else 0)
    return Call(run, check, size)


# ------------------------------------------------------------------ counts, rows of indices


def group_count(source: Source, T: int, K: int, E: int, EP: int) -> Call:
    """Assignments of every expert here."""
    idx = source.routing(T, K, E, EP)

    def check(got: torch.Tensor) -> str:
        return differs("counts", got, oracle.group_count(array(idx), E))

    return Call(lambda: moe.group_count(idx, E), check, 8 * idx.numel() + 4 * E, int((idx >= 0).sum()))


def aux_fi(source: Source, T: int, K: int, E: int, EP: int, num_aux_topk: int) -> Call:
    """Their loads."""
    idx = source.routing(T, K, E, EP)

    def check(got: torch.Tensor) -> str:
        return differs("f", got, oracle.aux_fi(array(idx), E, num_aux_topk))

    return Call(lambda: moe.aux_fi(idx, E, num_aux_topk), check, 8 * idx.numel() + 4 * E, int((idx >= 0).sum()))


def mask_by_tp(source: Source, T: int, K: int, E: int, EP: int, TP: int, tp_rank: int) -> Call:
    """Experts of all ranks to those of one TP rank."""
    idx = source.routing(T, K, E, EP)
    attrs = (E * EP, EP, tp_rank, TP)

    def check(got: torch.Tensor) -> str:
        return differs("masked_indices", got, oracle.mask_indices_by_tp(array(idx), *attrs))

    return Call(lambda: moe.mask_indices_by_tp(idx, *attrs), check, 16 * idx.numel(), int((idx >= 0).sum()))


def unique_in_place(source: Source, T: int, K: int, E: int, EP: int, G: int) -> Call:
    """Every call gets its own copy of the groups: a second one has nothing to change."""
    groups = source.routing(T, K, E, EP).div(max(E * EP // G, 1), rounding_mode="floor")
    copies = [groups.clone() for _ in range(COPIES)]
    want = oracle.unique_group_indices(array(groups), G)
    turn = itertools.cycle(copies)

    def run() -> torch.Tensor:
        mine = next(turn)
        moe.inplace_unique_group_indices(mine, G)
        return mine

    changed = int((want != array(groups)).sum())
    return Call(run, lambda got: differs("group_indices", got, want), 8 * groups.numel() + 8 * changed, int((groups >= 0).sum()))


# ------------------------------------------------------------------ mapping


def mapping_bytes(T: int, K: int, E: int, N: int) -> int:
    """Indices, positions, three arrays of rows and three of experts."""
    return 12 * T * K + 12 * N + 12 * E


def get_fused_mapping(source: Source, T: int, K: int, E: int, EP: int, A: int) -> Call:
    """The kernels of the form that synchronizes: N is what is needed, the kernels run with what is always enough."""
    idx = source.routing(T, K, E, EP)
    bound = moe.max_num_expanded_tokens(*idx.shape, E, A)

    def check(got: Any) -> str:
        whole, chosen = maps.fused_mapping(array(idx), E, A, bound), maps.get_fused_mapping(array(idx), E, 0, A)
        synchronized = moe.get_fused_mapping(idx, E, 0, A)
        wrong = first(map(differs, whole._fields[:7] * 2, (*got[:7], *synchronized[:7]), (*whole[:7], *chosen[:7])))
        return wrong or ("" if synchronized[7] == chosen[7] else "the list of sizes differs from the oracle")

    needed = moe.get_fused_mapping(idx, E, 0, A)[0].numel()
    run = functools.partial(moe.get_fused_mapping, idx, E, bound, A)
    return Call(run, check, mapping_bytes(*idx.shape, E, needed), int((idx >= 0).sum()), needed)


def fused_mapping(source: Source, T: int, K: int, E: int, EP: int, A: int, dropless: bool = False) -> Call:
    """N is what is needed, or what is always enough."""
    idx = source.routing(T, K, E, EP, True)
    N = None if dropless else moe.get_fused_mapping(idx, E, 0, A)[0].numel()
    run = functools.partial(moe.fused_mapping, idx, num_experts=E, alignment=A, num_expanded_tokens=N)

    def check(got: Any) -> str:
        return first(map(differs, got._fields, got, maps.fused_mapping(array(idx), E, A, N)))

    N = moe.max_num_expanded_tokens(*idx.shape, E, A) if N is None else N
    return Call(run, check, mapping_bytes(*idx.shape, E, N), int((idx >= 0).sum()), N)


# ------------------------------------------------------------------ rows to experts and back


class Layout:
    """A routing's mapping with as many rows as it needs."""

    def __init__(self, source: Source, T: int, K: int, E: int, EP: int, A: int, fixed: bool) -> None:
        idx = source.routing(T, K, E, EP, fixed)
        self.maps = moe.get_fused_mapping(idx, E, 0, A)
        self.owners, _, self.slots, self.where = self.maps[:4]
        self.part = Part(self.maps)
        (self.T, self.K), self.N, self.V = idx.shape, self.owners.numel(), int((self.where >= 0).sum())


def expand(source: Source, T: int, K: int, E: int, EP: int, H: int, A: int, dtype: str, fixed: bool = False) -> Call:
    """Rows of tokens to those of the mapping."""
    m = Layout(source, T, K, E, EP, A, fixed)
    x = source.normal(m.T, H, dtype=DTYPES[dtype])

    def check(got: torch.Tensor) -> str:
        return differs("expanded", m.part.of_rows(got), maps.expand_to_fused(m.part.of_tokens(x), m.part.where, m.part.owners))

    count = x.element_size() * H * (m.T + m.N) + 4 * m.T * m.K + 4 * m.N
    return Call(lambda: moe.expand_to_fused(x, m.where, m.owners), check, count, m.V, m.N)


def expand_with_sf(source: Source, T: int, K: int, E: int, EP: int, H: int, A: int, block: int, fixed: bool = False) -> Call:
    """E4M3 with fp32 scales, row-major."""
    m = Layout(source, T, K, E, EP, A, fixed)
    pair = source.normal(m.T, H, dtype=torch.float8_e4m3fn), source.uniform(m.T, -(-H // block))

    def check(got: Any) -> str:
        given = tuple(map(m.part.of_tokens, pair))
        want = maps.expand_to_fused_with_sf(given, block, m.part.where, m.part.owners)
        return first(map(differs, ("out", "out_sf"), map(m.part.of_rows, got), want))

    count = (H + 4 * pair[1].shape[1]) * (m.T + m.N) + 4 * m.T * m.K + 4 * m.N
    return Call(lambda: moe.expand_to_fused_with_sf(pair, block, m.where, m.owners), check, count, m.V, m.N)


def expand_backward(source: Source, T: int, K: int, E: int, EP: int, H: int, A: int, dtype: str, fixed: bool = False) -> Call:
    """The gradient of the expansion by its rule."""
    m = Layout(source, T, K, E, EP, A, fixed)
    bound, d_out = bind(expand_to_fused), source.normal(m.N, H, dtype=DTYPES[dtype])

    def check(got: Any) -> str:
        want = maps.expand_to_fused_bwd(m.part.of_rows(d_out), m.part.where)
        return differs("d_x", m.part.of_tokens(got[0]), want)

    count = d_out.element_size() * H * (m.T + m.V) + 4 * m.T * m.K
    return Call(lambda: bound.backward.run([d_out, m.where], bound.defaults, bound.backward.all), check, count, m.V, m.N)


def reduce(
    source: Source,
    T: int,
    K: int,
    E: int,
    EP: int,
    H: int,
    A: int,
    dtype: str,
    with_sf: bool = False,
    long: bool = False,
    fixed: bool = False,
) -> Call:
    """With weights; `with_sf`: with a factor for every row; `long`: x has T * K rows, of which the others are not read."""
    m = Layout(source, T, K, E, EP, A, fixed)
    x = source.normal(max(m.T * m.K, m.N) if long else m.N, H, dtype=DTYPES[dtype])
    weights, sf = source.uniform(m.T, m.K), source.normal(len(x)) if with_sf else None
    pair = (x, sf) if with_sf else x

    def check(got: torch.Tensor) -> str:
        given = m.part.of_rows(x) if sf is None else (m.part.of_rows(x), m.part.of_rows(sf))
        return differs("out", m.part.of_tokens(got), maps.reduce_fused(given, m.part.of_tokens(weights), m.part.where))

    size = x.element_size() * H
    count = m.V * size + 8 * m.T * m.K + (4 * m.N if with_sf else 0) + m.T * size
    return Call(lambda: moe.reduce_fused(pair, weights, m.where), check, count, m.V, len(x))


def reduce_backward(
    source: Source, T: int, K: int, E: int, EP: int, H: int, A: int, dtype: str, rows_only: bool = False, fixed: bool = False
) -> Call:
    """`rows_only`: without the gradient of the weights."""
    m = Layout(source, T, K, E, EP, A, fixed)
    grad, weights = source.normal(m.T, H, dtype=DTYPES[dtype]), source.uniform(m.T, m.K)
    x = None if rows_only else source.normal(m.N, H, dtype=DTYPES[dtype])

    def check(got: Any) -> str:
        d, y = m.part.of_tokens(grad), None if rows_only else m.part.of_rows(x)
        need = {"need_grad_weights": not rows_only}
        want = maps.reduce_fused_backward(d, y, m.part.of_tokens(weights), m.part.where, m.part.slots, **need)
        wrong = differs("grad_x", m.part.of_rows(got[0]), want[0])
        if wrong or rows_only:
            return wrong
        atol = 1e-6 * math.sqrt(H) * float(np.abs(d.astype(np.float32)).max()) * float(np.abs(y.astype(np.float32)).max())
        return far("grad_topk_weights", got[1][m.part.tokens], want[1], 2e-5, atol)

    run = functools.partial(moe.reduce_fused_backward, grad, x, weights, m.where, m.slots, need_grad_weights=not rows_only)
    b = grad.element_size() * H
    count = b * (m.T + m.N) + 4 * m.N + 4 * m.T * m.K + (0 if rows_only else b * m.V + 8 * m.T * m.K)
    return Call(run, check, count, m.V, m.N)


def grouped_gemm(source: Source, T: int, K: int, E: int, EP: int, H: int, F: int, A: int, result: str, fixed: bool = False) -> Call:
    """`result`: the products, or one of their gradients by its rule. Two experts are compared with products in fp64."""
    m = Layout(source, T, K, E, EP, A, fixed)
    x, d_out = (moe.expand_to_fused(source.normal(m.T, C, dtype=torch.bfloat16), m.where, m.owners) for C in (H, F))
    w, (starts, ends) = (source.normal(E, H, F) / math.sqrt(H)).to(torch.bfloat16), m.maps[4:6]
    backward, wanted = bind(gemm).backward, ("d_x", "d_w", "out").index(result)

    def run() -> torch.Tensor:
        if result == "out":
            return moe.grouped_gemm(x, w, m.owners, starts, ends)
        return backward.run([d_out, x, w, m.owners, starts, ends], (), 1 << wanted)[wanted]

    def check(got: torch.Tensor) -> str:
        for e in sample(E, 2):
            rows = slice(int(starts[e]), int(ends[e]))
            factors = {"out": (x[rows], w[e]), "d_x": (d_out[rows], w[e].T), "d_w": (x[rows].T, d_out[rows])}
            want = torch.matmul(*(t.double() for t in factors[result]))
            part = (got[e] if result == "d_w" else got[rows]).double()
            if not ((part - want).norm() <= 4e-3 * want.norm()):
                return f"{result} of expert {e} is not within its tolerance"
        return ""

    return Call(run, check, 2 * (m.N * H + m.N * F + E * H * F), m.V, m.N)


def routing_chain(source: Source, T: int, K: int, E: int, H: int, A: int) -> Call:
    """Gate, mapping and expansion of one rank, with the number of rows that is always enough."""
    logits, x = source.normal(T, E), source.normal(T, H, dtype=torch.bfloat16)

    def run() -> Any:
        idx, weights = moe.moe_topk_gate(logits, K, False, 0, FACTOR, 0)
        mapping = moe.fused_mapping(idx, num_experts=E, alignment=A)
        return idx, weights, mapping, moe.expand_to_fused(x, mapping.token_topk_to_pos, mapping.pos_to_expert)

    def check(got: Any) -> str:
        idx, weights, mapping, out = got
        scores, rows = torch.empty_like(logits), sample(T, GATED)
        moe.moe_topk_gate(logits, K, False, 0, FACTOR, 0, scores=scores)
        want = gates.moe_topk_gate_forward(array(logits[rows]), K, False, 0, FACTOR, 0, scores=array(scores[rows]))
        wrong = differs("topk_idx", idx[rows], want.topk_idx) or differs("topk_weights", weights[rows], want.topk_weights)
        wrong = wrong or first(map(differs, mapping._fields, mapping, maps.fused_mapping(array(idx), E, A)))
        if wrong:
            return wrong
        part = Part(mapping)
        return differs("expanded", part.of_rows(out), maps.expand_to_fused(part.of_tokens(x), part.where, part.owners))

    N = moe.max_num_expanded_tokens(T, K, E, A)
    count = 4 * T * E + 12 * T * K + mapping_bytes(T, K, E, N) + 2 * H * (T + N) + 4 * T * K + 4 * N
    return Call(run, check, count, T * K, N)
