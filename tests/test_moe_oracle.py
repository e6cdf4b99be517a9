"""The oracle of selection, weights, counts and the auxiliary loss against loops, exact arithmetic and finite differences."""

import numpy as np
import pytest
from moe_arrays import (
    TOPK_SHAPES,
    gradient,
    normal,
    routing,
    same,
)

from tk_core.bench.routing import FIXED, moe_list, random_routing
from tk_core.reference import moe

F32 = np.float32

# ------------------------------------------------------------------ selection


@pytest.mark.parametrize(("experts", "k"), TOPK_SHAPES)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_topk_is_a_stable_descending_sort(experts, k, dtype):
    scores = normal((64, experts))
    scores[:16] = np.round(scores[:16])  # ties
    scores[16] = 0
    scores[17, ::2] = -0.0
    scores[18, 1:] = -np.inf
    scores[19] = -np.inf
    got = moe.topk_gate(scores, k, index_dtype=dtype)
    assert got.dtype == dtype
    for row, idx in zip(scores, got, strict=True):
        assert idx.tolist() == sorted(range(experts), key=lambda e: (-row[e], e))[:k]
    assert moe.topk_gate(scores[:0], k).shape == (0, k)


@pytest.mark.parametrize(("groups", "size"), [(4, 18), (8, 9), (12, 6), (16, 16), (4, 64), (1, 1), (32, 2)])
@pytest.mark.parametrize("num_sum", [1, 2])
def test_topk_groups(groups, size, num_sum):
    if num_sum > size:
        return
    scores = normal((40, groups, size))
    scores[:20] = np.round(scores[:20])
    for chosen in {1, min(2, groups), groups}:
        got = moe.topk_sum_and_topk_group_idx(scores, num_sum, chosen)
        for row, idx in zip(scores, got, strict=True):
            best = [sorted(map(float, group))[::-1] for group in row]
            totals = [b[0] if num_sum == 1 else float(F32(b[0] + b[1])) for b in best]
            assert idx.tolist() == sorted(range(groups), key=lambda g: (-totals[g], g))[:chosen]
    assert moe.topk_sum_and_topk_group_idx(scores[:0], num_sum, 1).shape == (0, 1)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(("n", "ep", "tp"), [(72, 8, 2), (256, 64, 8), (256, 8, 4), (72, 1, 4), (256, 64, 4), (24, 6, 3)])
def test_mask_by_tp(dtype, n, ep, tp):
    idx = np.random.default_rng(0).integers(-3, n + 3, (50, 8)).astype(dtype)
    valid = (idx >= 0) & (idx < n)
    per_rank = n // ep
    survivors = np.zeros(idx.shape, int)
    for rank in range(tp):
        got = moe.mask_indices_by_tp(idx, n, ep, rank, tp)
        assert got.dtype == dtype
        survivors += got >= 0
        # the experts of the ranks of this TP rank, in order, have the numbers 0, 1, 2, ...
        mine = [e for r in range(rank, ep, tp) for e in range(r * per_rank, (r + 1) * per_rank)]
        number = {e: i for i, e in enumerate(mine)}
        assert got.tolist() == [[number.get(int(i), -1) for i in row] for row in idx]
    assert (survivors == valid).all()
    same(moe.mask_indices_by_tp(idx, n, 1, 0, 1), np.where(valid, idx, -1).astype(dtype))
    assert moe.mask_indices_by_tp(idx[:0], n, ep, 0, tp).shape == (0, 8)


def test_unique_groups():
    idx = np.array([[3, 3, 1, 3], [-1, -1, 0, 0], [9, 9, 2, -5], [-5, 7, 8, 8]])
    want = [[3, -1, 1, -1], [-1, -1, 0, -1], [9, 9, 2, -5], [-5, 7, 8, 8]]
    same(moe.unique_group_indices(idx, 8), np.array(want))
    idx = np.random.default_rng(0).integers(-2, 8, (200, 9)).astype(np.int32)
    got = moe.unique_group_indices(idx, 8)
    for before, after in zip(idx, got, strict=True):
        kept = [g for g in after if g >= 0]
        assert sorted(kept) == sorted({g for g in before if g >= 0})
        assert [g if g < 0 or g not in before[:i] else -1 for i, g in enumerate(before)] == after.tolist()
    assert moe.unique_group_indices(idx[:0], 8).shape == (0, 9)


# ------------------------------------------------------------------ weights


@pytest.mark.parametrize("k", [1, 2, 6, 7, 8, 9, 32])
def test_normalize_in_order(k):
    w = np.random.default_rng(k).random((300, k), F32)
    w[0] = 0
    denominator, normalized = moe.normalize_weight(w)
    assert denominator.dtype == normalized.dtype == F32
    for t in range(300):
        total = F32(1e-20)
        for value in w[t]:
            total = F32(total + value)
        assert denominator[t] == total
        assert (normalized[t] == [F32(value / total) for value in w[t]]).all()
    assert denominator[0] == F32(1e-20)
    assert (normalized[0] == 0).all()
    np.testing.assert_allclose(normalized, w / (w.sum(axis=1, keepdims=True, dtype=np.float64) + 1e-20), rtol=1e-6)


def test_normalize_gradient():
    w = np.random.default_rng(0).random((3, 5)) + 0.1
    g, d = normal((3, 5)).astype(np.float64), normal((3,)).astype(np.float64)

    def total(w, of_n=1.0, of_d=1.0):
        s = 1e-20 + w.sum(axis=1)
        return of_n * (g * w / s[:, None]).sum() + of_d * (d * s).sum()

    s = 1e-20 + w.sum(axis=1)
    n = w / s[:, None]
    np.testing.assert_allclose(moe.normalize_weight_bwd(d, g, s, n), gradient(total, w), rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(moe.normalize_weight_bwd(None, g, s, n), gradient(lambda w: total(w, 1, 0), w), rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(moe.normalize_weight_bwd(d, None, s, n), gradient(lambda w: total(w, 0, 1), w), rtol=1e-7, atol=1e-9)
    assert (moe.normalize_weight_bwd(None, None, s, n) == 0).all()
    same(moe.normalize_weight_bwd(0 * d, g, s, n), moe.normalize_weight_bwd(None, g, s, n))
    zero = moe.normalize_weight(np.zeros((1, 2), F32))
    np.testing.assert_allclose(moe.normalize_weight_bwd(None, np.ones((1, 2), F32), *zero), 1e20, rtol=1e-7)


# ------------------------------------------------------------------ counting, auxiliary loss


@pytest.mark.parametrize("groups", [1, 7, 256, 65536])
def test_count(groups):
    idx = np.random.default_rng(0).integers(-2, groups + 2, (120, 6)).astype(np.int64)
    got = moe.group_count(idx, groups)
    assert got.dtype == np.int32
    assert got.shape == (groups,)
    for g in {0, groups // 2, groups - 1}:
        assert got[g] == (idx == g).sum()
    assert got.sum() == ((idx >= 0) & (idx < groups)).sum()
    split = moe.group_count(idx, groups, num_seqs=4)
    assert split.shape == (4, groups)
    same(split[1], moe.group_count(idx[30:60], groups))
    assert (moe.group_count(idx[:0], groups) == 0).all()
    assert moe.group_count(idx[:0], groups, num_seqs=3).shape == (3, groups)


@pytest.mark.parametrize("aux_topk", [1, 6])
def test_load(aux_topk):
    idx = routing(1001, 6, 72)
    got = moe.aux_fi(idx, 72, aux_topk)
    assert got.dtype == F32
    for e in range(72):
        assert got[e] == F32(F32(F32((idx == e).sum()) * F32(72)) / F32(1001 * aux_topk))
    assert (moe.aux_fi(idx[:0], 72, aux_topk) == 0).all()


@pytest.mark.parametrize("seqs", [1, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_scores_sum(seqs, masked):
    u = np.random.default_rng(0).random((8, 5)) + 0.01
    mask = np.arange(8) % 3 != 1 if masked else None
    h = normal((seqs, 5)).astype(np.float64)

    def loop(u):
        q = np.zeros((seqs, 5))
        for t in range(8):
            if mask is None or mask[t]:
                q[t // (8 // seqs)] += u[t] / u[t].sum()
        return q

    np.testing.assert_allclose(moe.scores_sum(u, mask, seqs), loop(u), rtol=1e-14)
    want = gradient(lambda u: (h * loop(u)).sum(), u)
    np.testing.assert_allclose(moe.scores_sum_bwd(h, u, mask), want, rtol=1e-6, atol=1e-9)
    assert (moe.scores_sum(u[:0], None, seqs) == np.zeros((seqs, 5))).all()
    assert moe.scores_sum_bwd(h, u[:0]).shape == (0, 5)
    poisoned = u.copy()
    if masked:
        poisoned[~mask] = np.nan
    poisoned[0] = 0
    assert np.isfinite(moe.scores_sum(poisoned, mask, seqs)).all()
    assert np.isfinite(moe.scores_sum_bwd(h, poisoned, mask)).all()


def test_loss():
    counts, rows = np.array([[3, 1, 2], [0, 4, 2]], np.int32), np.array([3, 3])
    q = np.random.default_rng(0).random((2, 3))
    loss = sum(0.1 / 2 * 3 * counts[b, e] / (2 * rows[b]) * q[b, e] / rows[b] for b in range(2) for e in range(3))
    np.testing.assert_allclose(moe.load_balance_loss(q, counts, rows, 2, 0.1), loss, rtol=1e-14)
    want = gradient(lambda q: 1.5 * moe.load_balance_loss(q, counts, rows, 2, 0.1), q)
    np.testing.assert_allclose(moe.load_balance_loss_bwd(1.5, counts, rows, 2, 0.1), want, rtol=1e-8)
    # one sequence without a mask: the load is that of aux_fi; balance gives alpha
    idx = np.arange(24).reshape(8, 3) % 6
    scores = np.full((8, 6), 0.7, F32)
    counted, shares = moe.group_count(idx, 6), moe.scores_sum(scores)
    np.testing.assert_allclose(moe.load_balance_loss(shares, counted, 8, 3, 0.25), 0.25, rtol=1e-14)
    d_sum = moe.load_balance_loss_bwd(1.0, counted, 8, 3, 0.25)
    np.testing.assert_allclose(d_sum, 0.25 * moe.aux_fi(idx, 6, 3)[None] / 8, rtol=1e-6)
    np.testing.assert_allclose(moe.scores_sum_bwd(d_sum, scores), 0, atol=1e-16)
    assert moe.load_balance_loss(np.zeros((2, 3)), np.zeros((2, 3), np.int32), 0, 2, 1.0) == 0


def test_bias_update():
    same(moe.update_expert_bias(np.zeros(4, F32), np.array([1, 2, 3, 2]), 0.5), np.array([0.5, 0, -0.5, 0], F32))
    counts = np.array([[1, 0, 1], [0, 2, 1]], np.int32)
    same(moe.update_expert_bias(np.ones(3, F32), counts, 0.25), np.array([1.25, 0.75, 0.75], F32))


# ------------------------------------------------------------------ routing


EXPECTED_ROWS = {
    (72, 8): {2: 7551, 6: 18088, 8: 21651, 9: 23107},
    (256, 8): {2: 7516, 6: 17765, 8: 21184, 9: 22581},
    (256, 64): {2: 7955, 6: 23307, 8: 30711, 9: 34345},
}


@pytest.mark.parametrize("case", list(moe_list()))
def test_random_routing(case):
    idx = random_routing(*case)
    assert abs(idx.shape[0] / EXPECTED_ROWS[case.experts, case.ranks][case.topk] - 1) < 0.03
    valid = idx >= 0
    assert abs(valid.sum() / (case.tokens * case.topk) - 1) < 0.05
    assert valid.any(axis=1).all()
    assert idx.max() == case.local_experts - 1
    ordered = np.sort(idx, axis=1)
    assert ((ordered[:, 1:] != ordered[:, :-1]) | (ordered[:, 1:] < 0)).all()
    counts = moe.group_count(idx, case.local_experts)
    assert abs(counts / counts.mean() - 1).max() < 0.3


def test_random_routing_is_repeatable():
    for case in ((50, 6, 72, 8), (0, 1, 1, 1), (1, 8, 2048, 8), (5, 1, 1, 1)):
        same(random_routing(*case, seed=3), random_routing(*case, seed=3))
    assert not np.array_equal(random_routing(50, 6, 72, 1, 0), random_routing(50, 6, 72, 1, 1))
    kept = random_routing(50, 6, 72, 8, keep_empty=True, dtype=np.int32)
    assert kept.shape == (400, 6)
    assert kept.dtype == np.int32
    same(kept[(kept >= 0).any(axis=1)], random_routing(50, 6, 72, 8, dtype=np.int32))
    assert {case.experts % case.ranks for case in moe_list(full=True)} == {0}
    assert [case.tokens * case.ranks for case, _, _ in FIXED] == [16384, 8192]
