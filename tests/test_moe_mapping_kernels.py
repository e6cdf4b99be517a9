"""Counts, index rows and the expert-major mapping: kernels against the oracle, bit for bit."""

import numpy as np
import pytest
from moe_arrays import check_mapping, routing, same
from moe_device import call

from tk_core.ops.moe.common import MAX_PARTS, parts_of
from tk_core.ops.moe.counts import aux_fi, group_count, psum_num_tokens_per_expert
from tk_core.ops.moe.indices import mask_indices_by_tp, unique_group_indices
from tk_core.ops.moe.mapping import get_fused_mapping, max_num_expanded_tokens
from tk_core.reference import moe
from tk_core.reference import moe_mapping as mm

pytestmark = pytest.mark.anywhere

INTS = [np.int64, np.int32]


def wild(shape, high, dtype, seed=0):
    """Indices inside and outside of [0, high), some as far outside as the dtype goes."""
    rng = np.random.default_rng([seed, *shape])
    idx = rng.integers(-3, high + 3, shape).astype(dtype)
    far = np.array([np.iinfo(dtype).min, np.iinfo(dtype).max, -1, high, 2**31 - 1], dtype)
    if dtype == np.int64:
        far = np.append(far, [2**32, 2**32 + 1, -(2**32)])
    return np.where(rng.random(shape) < 0.1, rng.choice(far, shape), idx)


# ------------------------------------------------------------------ counts


@pytest.mark.parametrize("dtype", INTS)
@pytest.mark.parametrize(
    ("T", "K", "G"), [(0, 6, 9), (1, 1, 1), (77, 9, 33), (4001, 6, 72), (20000, 8, 256), (500, 2, 1024), (999, 3, 65536)]
)
def test_group_count(T, K, G, dtype):
    idx = wild((T, K), G, dtype)
    counts = call(group_count, idx, num_groups=G)
    same(counts[0], moe.group_count(idx, G))


@pytest.mark.parametrize("num_seqs", [1, 3, 70000])
def test_group_count_of_sequences(num_seqs):
    idx = wild((num_seqs * (1 if num_seqs > 3 else 700), 4), 8, np.int32)
    counts = call(group_count, idx, num_groups=8, num_seqs=num_seqs)
    same(counts, moe.group_count(idx, 8, num_seqs=num_seqs).reshape(num_seqs, 8))


@pytest.mark.parametrize("dtype", INTS)
@pytest.mark.parametrize(("T", "K", "E", "aux"), [(0, 6, 9, 6), (1, 1, 1, 1), (4001, 6, 72, 1), (4001, 8, 256, 8), (333, 2, 7, 5)])
def test_aux_fi(T, K, E, aux, dtype):
    idx = wild((T, K), E, dtype)
    same(call(aux_fi, idx, num_experts=E, num_aux_topk=aux), moe.aux_fi(idx, E, aux))


@pytest.mark.parametrize("rows", [None, 300])
def test_psum(rows):
    idx = routing(500, 4, 12, dtype=np.int32)
    mapping = mm.fused_mapping(idx, 12, 128, rows)
    want = mm.psum_num_tokens_per_expert(idx, mapping.expert_start, mapping.expert_end)
    same(call(psum_num_tokens_per_expert, idx, mapping.expert_start, mapping.expert_end), want)
    if rows is None:
        same(call(psum_num_tokens_per_expert, idx, mapping.expert_start, None), want)


def test_parts_share_all_work():
    assert parts_of(0, 1) == 1
    assert parts_of(10**9, 4) == MAX_PARTS
    assert parts_of(10**9, 10**9) == 1


@pytest.mark.parametrize(
    ("op", "attrs", "name"),
    [
        (group_count, {"num_groups": 0}, "num_groups"),
        (group_count, {"num_groups": 3, "num_seqs": 2}, "num_seqs"),
        (group_count, {"num_groups": 3, "num_seqs": 0}, "num_seqs"),
        (aux_fi, {"num_experts": 0}, "num_experts"),
        (aux_fi, {"num_experts": 2, "num_aux_topk": 0}, "num_aux_topk"),
        (unique_group_indices, {"num_groups": 129}, "num_groups"),
        (unique_group_indices, {"num_groups": 0}, "num_groups"),
        (get_fused_mapping, {"num_experts": 1025}, "num_experts"),
        (get_fused_mapping, {"num_experts": 0}, "num_experts"),
        (get_fused_mapping, {"num_experts": 2, "alignment": 0}, "alignment"),
        (get_fused_mapping, {"num_experts": 2, "num_expanded_tokens": -1}, "num_expanded_tokens"),
        (get_fused_mapping, {"num_experts": 2, "alignment": 4, "expert_capacity": 6}, "expert_capacity"),
        (get_fused_mapping, {"num_experts": 2, "expert_capacity": 6, "num_expanded_tokens": 12}, "expert_capacity"),
        (get_fused_mapping, {"num_experts": 1024, "alignment": 2**22}, "alignment"),
    ],
)
def test_ranges(op, attrs, name):
    with pytest.raises(ValueError, match=name):
        call(op, np.zeros((3, 2), np.int64), **attrs)
    with pytest.raises(TypeError):
        call(op, np.zeros((3, 2), np.float32), **attrs)


# ------------------------------------------------------------------ rows of indices


@pytest.mark.parametrize("dtype", INTS)
@pytest.mark.parametrize(("n", "ep", "tp"), [(72, 8, 4), (256, 64, 8), (256, 1, 2), (9, 8, 2)])
def test_mask_by_tp(n, ep, tp, dtype):
    for T, K in ((0, 2), (1, 1), (401, 6), (37, 9)):
        idx = wild((T, K), n, dtype)
        kept = np.zeros((T, K), int)
        for rank in range(tp):
            want = moe.mask_indices_by_tp(idx, n, ep, rank, tp)
            same(call(mask_indices_by_tp, idx, None, n=n, num_ep_ranks=ep, num_tp_ranks=tp, tp_rank_value=rank), want)
            in_memory = np.array([rank], np.int32)
            same(call(mask_indices_by_tp, idx, in_memory, n=n, num_ep_ranks=ep, num_tp_ranks=tp), want)
            kept += want >= 0
        assert (kept == moe.in_range(idx, n)).all()


def test_mask_by_tp_ranges():
    good = {"n": 8, "num_ep_ranks": 2, "num_tp_ranks": 2, "tp_rank_value": 1}
    for bad in ({"num_ep_ranks": 9}, {"num_ep_ranks": 0}, {"num_tp_ranks": 0}, {"tp_rank_value": 2}, {"tp_rank_value": -1}):
        with pytest.raises(ValueError):
            call(mask_indices_by_tp, np.zeros((3, 2), np.int64), None, **{**good, **bad})


@pytest.mark.parametrize("dtype", INTS)
@pytest.mark.parametrize("groups", [1, 8, 64, 72, 128])
def test_unique(groups, dtype):
    for T, K in ((0, 2), (1, 1), (401, 6), (37, 9), (50, 32)):
        idx = wild((T, K), groups, dtype)
        before = idx.copy()
        same(call(unique_group_indices, idx, num_groups=groups), moe.unique_group_indices(idx, groups))
        same(idx, before)


# ------------------------------------------------------------------ mapping


def mapped(idx, E, A, rows=0, capacity=0):
    return call(get_fused_mapping, idx, num_experts=E, alignment=A, num_expanded_tokens=rows, expert_capacity=capacity)


def compare(got, want):
    for a, b in zip(got, want, strict=True):
        same(a.reshape(b.shape), b)


@pytest.mark.parametrize("dtype", INTS)
@pytest.mark.parametrize("A", [1, 16, 128])
@pytest.mark.parametrize(("T", "K", "E"), [(0, 3, 5), (1, 1, 1), (1, 8, 256), (4001, 2, 9), (2000, 6, 32), (4001, 9, 4), (500, 8, 1024)])
def test_mapping(T, K, E, A, dtype):
    idx = wild((T, K), E, dtype)
    bound = max_num_expanded_tokens(T, K, E, A)
    need = int(mm.get_fused_mapping(idx, E, 0, A)[5][-1])
    assert need <= bound == mm.max_num_expanded_tokens(T, K, E, A)
    # all that is needed, more, just too few, far too few, none
    for rows in {need, bound, bound + A, max(need - 1, 0), need // 3, 0}:
        got = mapped(idx, E, A, rows)
        compare(got, mm.fused_mapping(idx, E, A, rows))
        check_mapping(idx, E, A, got)
        assert got[7][0] == (moe.in_range(idx, E).sum() - (got[3] >= 0).sum())


@pytest.mark.parametrize("capacity", [16, 48, 1024])
def test_mapping_by_capacity(capacity):
    idx = routing(700, 4, 12)
    compare(mapped(idx, 12, 16, capacity=capacity), mm.fused_mapping(idx, 12, 16, expert_capacity=capacity))


def test_mapping_of_one_expert():
    idx = np.full((3000, 8), 5)
    compare(mapped(idx, 256, 128, 30000), mm.fused_mapping(idx, 256, 128, 30000))


def test_mapping_without_assignments():
    idx = np.full((300, 8), -1)
    compare(mapped(idx, 16, 128, 1000), mm.fused_mapping(idx, 16, 128, 1000))


@pytest.mark.parametrize("parts", [1, 5, 128])
def test_mapping_does_not_depend_on_the_number_of_programs(parts, monkeypatch):
    idx = routing(3001, 8, 32)
    monkeypatch.setattr("tk_core.ops.moe.mapping.parts_of", lambda length, groups: parts)
    compare(mapped(idx, 32, 128, 40000), mm.fused_mapping(idx, 32, 128, 40000))
