"""The oracle of the MoE routing operations against loops, exact arithmetic, finite differences and the properties of the operations."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from moe_arrays import (
    GATE_SHAPES,
    SCORING,
    TOPK_SHAPES,
    check_mapping,
    check_random_rows,
    difference,
    gradient,
    moved,
    normal,
    physical_map,
    routing,
    same,
)

from tk_core.bench.routing import FIXED, moe_list, random_routing
from tk_core.reference import moe, moe_gate
from tk_core.reference import moe_mapping as mm
from tk_core.reference import quant_formats as qf

BF16 = np.dtype(ml_dtypes.bfloat16)
F8 = qf.E4M3_DTYPE
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


# ------------------------------------------------------------------ scoring


@pytest.mark.parametrize("scoring", SCORING)
def test_scoring_values_and_derivatives(scoring):
    x = np.linspace(-30, 30, 88).reshape(8, 11) + 0.011
    g = normal(x.shape).astype(np.float64)
    u = moe_gate.score(x, scoring, np.float64)
    want = gradient(lambda x: (g * moe_gate.score(x, scoring, np.float64)).sum(), x, 1e-5)
    np.testing.assert_allclose(moe_gate.score_bwd(g, u, scoring), want, rtol=1e-5, atol=1e-9)
    narrow = moe_gate.score(x.astype(F32), scoring)
    assert narrow.dtype == F32
    np.testing.assert_allclose(narrow, moe_gate.score(x.astype(F32), scoring, np.float64), rtol=1e-5 if scoring == "softmax" else 4e-7)
    same(moe_gate.score(x, scoring.upper()), moe_gate.score(x, scoring))
    assert moe_gate.score(x[:0], scoring).shape == (0, 11)


def test_scoring_of_small_values():
    """The derivative of sqrtsoftplus keeps its digits where exp(-u^2) is 1, and is zero where the score is."""
    x = np.linspace(-80, 60, 1401).astype(F32)[:, None]
    u = moe_gate.score(x, "sqrtsoftplus")
    wide = x.astype(np.float64)
    exact = 1 / (1 + np.exp(-wide)) / (2 * np.sqrt(np.log1p(np.exp(wide))))
    np.testing.assert_allclose(moe_gate.score_bwd(np.ones_like(x), u, "sqrtsoftplus"), exact, rtol=2e-7)
    np.testing.assert_allclose(moe_gate.score(F32([[-50]]), "sqrtsoftplus"), 1.389e-11, rtol=1e-3)
    tiny = moe_gate.score(F32([[-105, -1e4]]), "sqrtsoftplus")
    assert (tiny == 0).all()
    assert (moe_gate.score_bwd(np.ones((1, 2)), tiny, "sqrtsoftplus") == 0).all()
    for name in ("identity", "relu"):
        with pytest.raises(ValueError, match="scoring_func"):
            moe_gate.score(x, name)


# ------------------------------------------------------------------ gates


def loop_gate(logits, scores, bias, k, groups, num_shared, c, scoring, mask=None, fix=None, fixed=None, maps=None, rank=0, tp=(1, 0, 1)):
    """The definition of a gate, row by row and number by number; tp None leaves physical indices of all ranks."""
    rows, experts = logits.shape
    slots = k + num_shared
    columns = 1 if maps is None else maps[0].shape[1]
    physical = experts + columns - 1
    idx, weights, logical = np.full((rows, slots), -1), np.zeros((rows, slots), F32), np.full((rows, k), -1)
    for t in range(rows):
        if mask is not None and not mask[t]:
            continue
        key = [F32((logits if scoring == "softmax" else scores)[t, e] + (bias[t] if bias.ndim == 2 else bias)[e]) for e in range(experts)]
        if groups[0] != groups[1]:
            size = experts // groups[0]
            tops = [sorted(key[g * size : (g + 1) * size])[-2:] for g in range(groups[0])]
            best = sorted(range(groups[0]), key=lambda g: (-F32(tops[g][0] + tops[g][1]), g))[: groups[1]]
            key = [v if e // size in best else F32(-np.inf) for e, v in enumerate(key)]
        chosen = sorted(range(experts), key=lambda e: (-key[e], e))[:k]
        if fix is not None and fix[t]:
            chosen = [int(e) if 0 <= e < experts else -1 for e in fixed[t]]
        total = F32(1e-20)
        for e in chosen:
            total = F32(total + scores[t, e]) if e >= 0 else total
        for slot, e in enumerate([*chosen, *range(experts, experts + num_shared)]):
            if slot < k:
                logical[t, slot] = e
                weights[t, slot] = F32(F32(scores[t, e] / total) * F32(c)) if e >= 0 else 0
            else:
                weights[t, slot] = 1
            if e >= 0 and maps is not None:
                e = int(maps[0][e, (rank + 23333 * t) % min(max(int(maps[1][e]), 1), columns)])
                e = e if 0 <= e < physical else -1
            if e >= 0 and tp is not None:
                per_rank = physical // tp[0]
                owner = e // per_rank
                e = owner // tp[2] * per_rank + e % per_rank if owner % tp[2] == tp[1] else -1
            idx[t, slot] = e
    return idx, weights, logical


def check_gate(got, want):
    for a, b in zip(got[:3], want, strict=True):
        same(a, b.astype(a.dtype))


@pytest.mark.parametrize("shape", GATE_SHAPES)
@pytest.mark.parametrize("scoring", SCORING)
def test_top2_sum_gate(shape, scoring):
    num_groups, topk_groups, experts, shared, k = shape
    rows, c = 40, 1.5
    logits, bias = normal((rows, experts)), normal((experts,), 1)
    logits[:8] = np.round(logits[:8])
    bias[: experts // 2] = 0
    bias -= 9 * (experts == 256)  # no key above that of an expert outside the groups, were that zero
    mask = np.arange(rows) < rows - 3
    logits[~mask] = np.nan
    rng = np.random.default_rng(0)
    fix, fixed = rng.random(rows) < 0.5, rng.integers(-1, experts + 1, (rows, k))
    maps = physical_map(experts + shared, 33, experts + 32)
    maps[0][0] = [-4, experts + 32] * 16 + [5]
    maps[1][:3] = [33, 0, 99]
    scores = moe_gate.score(logits, scoring)
    groups = (num_groups, topk_groups)
    for use_shared in (False, True):
        num_shared = shared if use_shared else 0
        for given in ({}, {"mask": mask}, {"mask": mask, "fix": fix, "fixed": fixed}):
            named = {"mask": given.get("mask"), "fix_routing_mask": given.get("fix"), "fixed_topk_idx": given.get("fixed")}
            if not given:
                logits_here, scores_here = np.nan_to_num(logits), moe_gate.score(np.nan_to_num(logits), scoring)
            else:
                logits_here, scores_here = logits, scores
            for rank, tp_rank in ((0, 0), (3, 1)):
                for with_map in (False, True):
                    if use_shared and not with_map:
                        continue
                    got = moe_gate.top2_sum_gate(
                        *(logits_here, bias, k, topk_groups, num_groups, use_shared, shared, c, rank, 4, tp_rank, 2, scoring),
                        **named,
                        **(dict(zip(("to_physical_map", "logical_count"), maps, strict=True)) if with_map else {}),
                        scores=scores_here,
                    )
                    tp, used = (4, tp_rank, 2), maps if with_map else None
                    want = loop_gate(
                        logits_here, scores_here, bias, k, groups, num_shared, c, scoring, **given, maps=used, rank=rank, tp=tp
                    )
                    check_gate(got, want)
    narrow = moe_gate.top2_sum_gate(
        logits, bias, k, topk_groups, num_groups, False, 0, c, 0, 1, 0, 1, scoring, mask, num_seqs=4, index_dtype=np.int32
    )
    assert narrow.topk_idx.dtype == narrow.unmapped_topk_idx.dtype == np.int32
    same(narrow.scores, np.where(mask[:, None], scores, 0).astype(F32))
    np.testing.assert_allclose(narrow.scores_sum, moe.scores_sum(scores, mask, 4))
    # weights are normalized ones, scaled
    u = np.take_along_axis(scores, np.maximum(narrow.unmapped_topk_idx, 0), axis=1)[mask]
    same(narrow.topk_weights[mask], (moe.normalize_weight(u)[1] * F32(c)).astype(F32))


def test_equal_experts_and_no_rows():
    for groups in ((0, 0), (4, 2)):
        for scoring in SCORING:
            args = (8, groups[1], groups[0], False, 0, 1.5, 0, 1, 0, 1, scoring)
            gate = moe_gate.top2_sum_gate(np.zeros((3, 32), F32), np.zeros(32, F32), *args)
            assert (gate.topk_idx == np.arange(8)).all()
            np.testing.assert_allclose(gate.topk_weights, 1.5 / 8, rtol=1e-6)
            empty = moe_gate.top2_sum_gate(np.zeros((0, 32), F32), np.zeros(32, F32), *args, num_seqs=2)
            assert [part.shape for part in empty] == [(0, 8), (0, 8), (0, 8), (0, 32), (2, 32)]


def test_replicas_of_late_rows():
    """The turn of a row is computed in 64 bits."""
    rows = 100_000
    maps = physical_map(4, 7, 10)
    maps[1][0] = 7
    logits = np.tile(F32([[4, 3, 2, 1]]), (rows, 1))
    got = moe_gate.top2_sum_gate(
        *(logits, np.zeros(4, F32), 1, 0, 0, False, 0, 1.0, 3, 1, 0, 1, "sigmoid"), to_physical_map=maps[0], logical_count=maps[1]
    ).topk_idx[:, 0]
    for t in (0, 1, 92_036, 92_037, 99_999):
        assert got[t] == maps[0][0, (3 + 23333 * t) % int(maps[1][0])]


@pytest.mark.parametrize(("experts", "shared", "k"), [(72, 1, 6), (16, 2, 6), (384, 2, 8)])
@pytest.mark.parametrize("scoring", SCORING)
def test_moe_topk_gate(experts, shared, k, scoring):
    rows, c = 48, 2.5
    logits, bias, image_bias = normal((rows, experts)), normal((experts,), 1), normal((experts,), 2)
    rng = np.random.default_rng(1)
    mask, image, random, fix = rng.random((4, rows)) < np.array([0.8, 0.5, 0.3, 0.3])[:, None]
    logits[~mask] = np.nan
    fixed = rng.integers(-1, experts, (rows, k))
    scores = moe_gate.score(logits, scoring)
    maps = physical_map(experts + shared, 9, experts + 8)
    maps[0][::3, ::2] = -4
    maps[0][1::3, 1::2] = experts + 8
    zeros = np.zeros(experts, F32)
    for used_bias, used_image in ((None, False), (bias, False), (bias, True), (None, True)):
        row_bias = np.where(image[:, None] & used_image, image_bias, zeros if used_bias is None else used_bias)
        images = {"image_bias": image_bias, "image_token_mask": image} if used_image else {}
        for with_map in (False, True):
            used = maps if with_map else None
            named = {**images, **(dict(zip(("to_physical_map", "logical_count"), maps, strict=True)) if with_map else {})}
            got = moe_gate.moe_topk_gate(
                *(logits, k, True, shared, c, 2, scoring, mask, used_bias),
                **named,
                fix_routing_mask=fix,
                fixed_topk_idx=fixed,
                scores=scores,
            )
            fixes = {"fix": fix, "fixed": fixed}
            want = loop_gate(logits, scores, row_bias, k, (0, 0), shared, c, scoring, mask, **fixes, maps=used, rank=2, tp=None)
            check_gate(got, want)
            drawn = moe_gate.moe_topk_gate(
                *(logits, k, True, shared, c, 2, scoring, mask, used_bias),
                **named,
                **{"fix_routing_mask": fix, "fixed_topk_idx": fixed, "force_random": random, "scores": scores, "num_seqs": 4},
            )
            there = mask & random
            check_random_rows(drawn.topk_idx[there], drawn.topk_weights[there], int(maps[1].sum()) if with_map else experts + shared)
            assert (drawn.unmapped_topk_idx[there] == -1).all()
            assert (drawn.scores[there | ~mask] == 0).all()
            for part, other in zip(drawn[:4], got[:4], strict=True):
                same(part[~there], other[~there])
            np.testing.assert_allclose(drawn.scores_sum, moe.scores_sum(scores, mask & ~random, 4))


# ------------------------------------------------------------------ gradient of the gates


@pytest.mark.parametrize("scoring", SCORING)
@pytest.mark.parametrize("seqs", [1, 3])
@pytest.mark.parametrize("parts", ["both", "route", "aux"])
@pytest.mark.parametrize("masked", [False, True])
def test_gate_gradient(scoring, seqs, parts, masked):
    rows, experts, k, c = 6, 7, 4, 1.5
    logits = normal((rows, experts)).astype(np.float64)
    idx = np.random.default_rng(0).integers(-1, experts, (rows, k))
    idx[2] = [3, 3, -1, 3]
    idx[4] = -1
    mask = np.arange(rows) != 4 if masked else None
    g = normal((rows, k)).astype(np.float64) if parts != "aux" else None
    h = normal((seqs, experts)).astype(np.float64) if parts != "route" else None

    def weights(logits):
        u = moe_gate.score(logits, scoring, np.float64)
        w = np.where(idx >= 0, np.take_along_axis(u, np.maximum(idx, 0), axis=1), 0)
        return u, c * w / (1e-20 + w.sum(axis=1, keepdims=True))

    def total(logits):
        u, w = weights(logits)
        route = 0 if g is None else (g * w).sum()
        return route + (0 if h is None else (h * moe.scores_sum(u, mask, seqs)).sum())

    u, w = weights(logits)
    got = moe_gate.moe_topk_gate_backward(u, idx, w, g, c, scoring, mask, h)
    np.testing.assert_allclose(got, gradient(total, logits, 1e-5), rtol=1e-6, atol=1e-8)
    zero_g, zero_h = np.zeros((rows, k)) if g is None else g, np.zeros((seqs, experts)) if h is None else h
    assert (moe_gate.moe_topk_gate_backward(u, idx, w, zero_g, c, scoring, mask, zero_h) == got).all()
    if masked:
        assert (got[4] == 0).all()


@pytest.mark.parametrize("scoring", SCORING)
def test_gate_gradient_of_zeros(scoring):
    """Nothing selected, scores of zero, no rows: zeros and not NaN."""
    none = np.full((2, 3), -1)
    g, h = normal((2, 3)), normal((1, 5))
    scores = np.zeros((2, 5), F32)
    assert (moe_gate.moe_topk_gate_backward(scores, none, np.zeros((2, 3), F32), g, 1.0, scoring, None, h) == 0).all()
    some = np.tile(np.arange(3), (2, 1))
    assert (moe_gate.moe_topk_gate_backward(scores, some, np.zeros((2, 3), F32), g, 1.0, scoring) == 0).all()
    u = moe_gate.score(normal((2, 5)), scoring)
    assert (moe_gate.moe_topk_gate_backward(u, none, np.zeros((2, 3), F32), g, 1.0, scoring) == 0).all()
    assert (moe_gate.moe_topk_gate_backward(u, none + 9, np.zeros((2, 3), F32), g, 1.0, scoring) == 0).all()
    assert moe_gate.moe_topk_gate_backward(u[:0], none[:0], g[:0], g[:0], 1.0, scoring, None, h).shape == (0, 5)


@pytest.mark.parametrize("scoring", SCORING)
def test_gate_gradient_against_autograd(scoring):
    torch = pytest.importorskip("torch")
    rows, experts, k, c, seqs = 30, 24, 6, 2.0, 3
    logits = normal((rows, experts))
    idx = np.random.default_rng(3).integers(-1, experts, (rows, k))
    mask = np.random.default_rng(4).random(rows) < 0.8
    idx[~mask] = -1
    g, h = normal((rows, k)), normal((seqs, experts))
    x = torch.tensor(logits.astype(np.float64), requires_grad=True)
    scored = {
        "sigmoid": lambda: torch.sigmoid(x),
        "sqrtsoftplus": lambda: torch.nn.functional.softplus(x).sqrt(),
        "softmax": lambda: torch.softmax(x, 1),
    }
    u = scored[scoring]()
    valid = torch.tensor(idx >= 0)
    w = torch.where(valid, u.gather(1, torch.tensor(np.maximum(idx, 0))), 0)
    w = c * w / (w.sum(1, keepdim=True) + 1e-20)
    q = torch.where(torch.tensor(mask)[:, None], u / u.sum(1, keepdim=True), 0).reshape(seqs, -1, experts).sum(1)
    ((w * torch.tensor(g)).sum() + (q * torch.tensor(h)).sum()).backward()
    got = moe_gate.moe_topk_gate_backward(u.detach().numpy(), idx, w.detach().numpy(), g, c, scoring, mask, h)
    np.testing.assert_allclose(got, x.grad.numpy(), rtol=1e-12, atol=1e-13)
    # and from the fp32 results that a kernel saves
    saved = moe_gate.moe_topk_gate_forward(
        logits, k, False, 0, c, 0, scoring, mask, fix_routing_mask=np.ones(rows, bool), fixed_topk_idx=idx
    )
    narrow = moe_gate.moe_topk_gate_backward(saved.scores, saved.unmapped_topk_idx, saved.topk_weights, g, c, scoring, mask, h)
    np.testing.assert_allclose(narrow, x.grad.numpy(), rtol=1e-5, atol=1e-6)
    assert difference(narrow, x.grad.numpy()) < 1e-11


# ------------------------------------------------------------------ mapping


def loop_mapping(topk_idx, experts, alignment, rows):
    """pos_to_token_topk, token_topk_to_pos, starts and ends of the unlimited layout, cut at `rows`."""
    flat, position, starts, ends = topk_idx.reshape(-1), 0, [], []
    to_slot, to_pos = np.full(rows, -1, np.int32), np.full(flat.size, -1, np.int32)
    for e in range(experts):
        starts.append(min(position, rows))
        count = 0
        for i in np.flatnonzero(flat == e):
            if position + count < rows:
                to_slot[position + count], to_pos[i] = i, position + count
            count += 1
        position += -(-count // alignment) * alignment
        ends.append(min(position, rows))
    return to_slot, to_pos.reshape(topk_idx.shape), np.array(starts, np.int32), np.array(ends, np.int32), position


@pytest.mark.parametrize("alignment", [1, 3, 16, 64, 128])
@pytest.mark.parametrize(("tokens", "k", "experts"), [(0, 4, 5), (57, 6, 9), (33, 8, 1), (1, 1, 1), (200, 2, 33), (40, 5, 1024)])
def test_mapping(alignment, tokens, k, experts):
    idx = routing(tokens, k, experts, alignment)
    idx[::7] = np.where(idx[::7] < 0, experts + 3, idx[::7])  # out of range is nothing
    idx[3::7] = idx[3::7, :1]  # an expert may come several times in a row
    need = loop_mapping(idx, experts, alignment, 0)[-1]
    bound = mm.max_num_expanded_tokens(tokens, k, experts, alignment)
    assert need <= bound
    assert bound % alignment == 0
    valid = (idx >= 0) & (idx < experts)
    for rows in (None, need, need + 5, bound + alignment, need // 2, 1, 0):
        got = mm.fused_mapping(idx, experts, alignment, rows)
        size = bound if rows is None else rows
        check_mapping(idx, experts, alignment, got)
        to_slot, to_pos, start, end, _ = loop_mapping(idx, experts, alignment, size)
        same(got.pos_to_token_topk, to_slot)
        same(got.token_topk_to_pos, to_pos)
        same(got.expert_start, start)
        same(got.expert_end, end)
        assert got.num_dropped == valid.sum() - (to_pos >= 0).sum()
        assert got.num_dropped.dtype == np.int32
        assert size < need or got.num_dropped == 0
    synced = mm.get_fused_mapping(idx, experts, 0, alignment)
    assert synced[0].size == need
    assert synced[7] == synced[6].tolist()
    for a, b in zip(synced, mm.fused_mapping(idx, experts, alignment, need), strict=True):
        if isinstance(a, np.ndarray):
            same(a, b)
    assert mm.get_fused_mapping(idx, experts, need + 3, alignment)[7] == []
    unsynced = mm.get_fused_mapping(idx, experts, 0, alignment, force_no_sync=True)
    assert unsynced[0].size == 0
    assert unsynced[7] == []
    assert (unsynced[3] == -1).all()
    full = mm.fused_mapping(idx, experts, alignment)
    ends = mm.psum_num_tokens_per_expert(idx, full.expert_start, full.expert_end)
    same(ends, (full.expert_start + moe.group_count(idx, experts)).astype(np.int32))
    small = mm.fused_mapping(idx, experts, alignment, need // 2)
    ends = mm.psum_num_tokens_per_expert(idx, small.expert_start, small.expert_end)
    assert (ends - small.expert_start == [(small.pos_to_expert == e).sum() for e in range(experts)]).all()


def test_mapping_of_nothing():
    for idx in (np.full((9, 3), -1), np.zeros((0, 3), np.int64)):
        synced = mm.get_fused_mapping(idx, 4, 0, 16)
        assert synced[0].size == 0
        assert synced[7] == [0] * 4
        static = mm.get_fused_mapping(idx, 4, 10, 16)
        assert all((part == -1).all() and part.shape == (10,) for part in static[:3])
        assert all((part == 0).all() for part in static[4:7])
    assert mm.max_num_expanded_tokens(0, 3, 4, 16) == 0
    assert mm.max_num_expanded_tokens(2, 1, 1024, 16) == 32
    assert mm.max_num_expanded_tokens(100, 8, 4, 128) == 128 * ((800 + 127 * 4) // 128)


def test_bound_is_reached():
    """No smaller size is enough for every routing."""
    for tokens, k, experts, alignment in ((3, 2, 4, 4), (5, 2, 3, 3), (2, 2, 2, 8)):
        worst = 0
        for flat in np.ndindex(*[experts] * (tokens * k)) if experts ** (tokens * k) < 70000 else ():
            counts = np.bincount(flat, minlength=experts)
            worst = max(worst, int((-(-counts // alignment) * alignment).sum()))
        assert worst == mm.max_num_expanded_tokens(tokens, k, experts, alignment)


@pytest.mark.parametrize("capacity", [4, 8, 200])
def test_capacity(capacity):
    idx = routing(60, 4, 7)
    got = mm.fused_mapping(idx, 7, 4, expert_capacity=capacity)
    check_mapping(idx, 7, 4, got, packed=False)
    assert (got.num_tokens_per_expert == capacity).all()
    assert got.pos_to_expert.size == 7 * capacity
    assert got.num_dropped == np.maximum(moe.group_count(idx, 7) - capacity, 0).sum()


# ------------------------------------------------------------------ expand


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32, F8, np.int8])
def test_expand(dtype):
    idx = routing(37, 4, 5)
    for rows in (None, 20):
        to_pos, to_expert, to_slot = moved(idx, 5, 8, rows)
        x = np.random.default_rng(0).integers(0, 256, 37 * 24 * np.dtype(dtype).itemsize, np.uint8).view(dtype).reshape(37, 24)
        out = mm.expand_to_fused(x, to_pos, to_expert)
        assert out.dtype == dtype
        for p in range(to_expert.size):
            same(out[p], x[to_slot[p] // 4] if to_slot[p] >= 0 else np.zeros(24, dtype))
        poisoned = np.where(to_pos < 0, to_expert.size + 3, to_pos)
        same(mm.expand_to_fused(x, poisoned, to_expert), out)
    assert mm.expand_to_fused(x[:0], to_pos[:0], np.full(6, -1, np.int32)).tobytes() == bytes(6 * 24 * np.dtype(dtype).itemsize)
    assert mm.expand_to_fused(x, np.full_like(to_pos, -1), np.zeros(0, np.int32)).shape == (0, 24)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("column_major", [False, True])
def test_expand_with_scales(packed, column_major):
    idx = routing(37, 4, 5)
    to_pos, to_expert, _ = moved(idx, 5, 9, 45)
    data = np.random.default_rng(0).integers(0, 127, (37, 576), np.uint8).view(F8)
    sf = np.random.default_rng(1).integers(1, 2**30, (37, 2 if packed else 5)).astype(np.int32)
    sf = sf if packed else sf.view(np.float32)
    out, out_sf = mm.expand_to_fused_with_sf((data, sf), 128, to_pos, to_expert, column_major)
    same(out, mm.expand_to_fused(data, to_pos, to_expert))
    same(out_sf, mm.expand_to_fused(sf, to_pos, to_expert))
    if column_major:
        assert out_sf.strides == (4, 48 * 4)
        storage = qf.sf_storage(out_sf)
        assert (storage[:, 45:].view(np.int32) == 0).all()
        assert (out_sf.base[..., 45:] == 0).all()
    else:
        assert out_sf.flags.c_contiguous
    empty, empty_sf = mm.expand_to_fused_with_sf((data[:0], sf[:0]), 128, to_pos[:0], np.full(45, -1, np.int32), column_major)
    assert (empty.view(np.uint8) == 0).all()
    assert (empty_sf.view(np.int32) == 0).all()


def test_expand_weights():
    idx = routing(37, 4, 5)
    to_pos, _, to_slot = moved(idx, 5, 8, 60)
    w = normal((37, 4))
    w_row = mm.expand_topk_weights(w, to_slot)
    same(w_row, np.array([w.reshape(-1)[i] if i >= 0 else 0 for i in to_slot], F32))
    g = normal(w_row.shape)
    g[to_slot < 0] = np.nan
    d = mm.expand_topk_weights_bwd(g, to_pos)
    same(d, np.array([[g[p] if p >= 0 else 0 for p in row] for row in to_pos], F32))
    np.testing.assert_allclose((np.nan_to_num(g).astype(float) * w_row).sum(), (d.astype(float) * w).sum())
    assert mm.expand_topk_weights(w[:0], np.full(3, -1, np.int32)).tolist() == [0, 0, 0]


# ------------------------------------------------------------------ reduce


def nearest(value):
    """The fp32 value of an exact number."""
    if value == 0:
        return F32(0)
    magnitude, exponent = abs(value), 0
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while magnitude < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    steps = round(magnitude / unit)  # ties to even
    result = float(steps * unit)
    result = np.inf if result > float(np.finfo(F32).max) else result
    return F32(-result if value < 0 else result)


def test_fma_rounds_once():
    rng = np.random.default_rng(0)
    a, b, c = rng.integers(0, 2**32, (3, 6000), np.uint32).view(F32)
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    a, b, c = a[finite], b[finite], c[finite]
    # near ties and cancellation: c close to the product, or far below half a unit of it
    m, n = normal((3000,)), normal((3000,), 1)
    close = -(m * n) * (1 + rng.integers(-3, 4, 3000) * 2.0**-22).astype(F32)
    short = rng.integers(1, 2**12, (2, 3000)).astype(F32)
    far = np.ldexp(rng.choice([-1, 1], 3000), -rng.integers(0, 80, 3000)).astype(F32)
    small = np.ldexp(short, -rng.integers(60, 76, (2, 3000))).astype(F32)
    a = np.concatenate([a, m, rng.choice([-1, 1], 3000) * (1 + short[0] * F32(2**-12)), small[0], small[0]]).astype(F32)
    b = np.concatenate([b, n, 1 + short[1] * F32(2**-12), small[1], small[1]])
    c = np.concatenate([c, close, far, np.zeros(3000, F32), np.ldexp(rng.choice([-1, 1], 3000), -149).astype(F32)])
    got = mm.fma(a, b, c)
    for x, y, z, r in zip(a, b, c, got, strict=True):
        want = nearest(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
        assert r == want, (x, y, z)
    # a tie of the product that only the third operand decides, beyond the reach of fp64
    x, tie = F32(1 + 2**-12), F32(1 + 2**-11)
    assert mm.fma(x, x, F32(2**-60)) == tie + F32(2**-23)
    assert mm.fma(x, x, F32(-(2**-60))) == tie
    assert F32(np.float64(x) * x + 2.0**-60) == tie
    for triple in ((np.inf, 1, 1), (np.inf, 0, 1), (3e38, 2, -np.inf), (np.nan, 1, 1), (np.inf, 1, -np.inf), (3e38, 3e38, 1)):
        with np.errstate(all="ignore"):
            np.testing.assert_equal(mm.fma(*map(F32, triple)), F32(np.float64(F32(triple[0])) * F32(triple[1]) + F32(triple[2])))


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16, F8])
@pytest.mark.parametrize("fp8", ["", "e4m3"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_reduce(dtype, fp8, weighted, scaled):
    idx = routing(23, 5, 6)
    to_pos, to_expert, _ = moved(idx, 6, 4)
    x = normal((to_expert.size + 7, 64)).astype(dtype)
    x[to_expert.size :] = np.nan
    x[: to_expert.size][to_expert < 0] = np.nan
    w = normal((23, 5), 1) if weighted else None
    x_sf = normal((x.shape[0],), 2) if scaled else None
    sf = F32([-1.7]) if fp8 else None
    out = mm.reduce_fused((x, x_sf) if scaled else x, w, to_pos, fp8, sf)
    assert out.dtype == (F8 if fp8 else dtype)
    for t in range(23):
        acc = np.zeros(64, F32)
        for k in range(5):
            if (p := to_pos[t, k]) >= 0:
                s = F32(F32(w[t, k] if weighted else 1) * F32(x_sf[p] if scaled else 1))
                acc = F32([nearest(Fraction(float(v)) * Fraction(float(s)) + Fraction(float(a))) for v, a in zip(x[p], acc, strict=True)])
        acc = acc * F32(-1.7) if fp8 else acc
        if out.dtype == F8:
            acc = np.clip(acc, -448, 448)
        same(out[t], acc.astype(out.dtype))
    assert np.isfinite(out.astype(F32)).all()
    assert mm.reduce_fused(x, None, to_pos[:0]).shape == (0, 64)
    poisoned = np.where(to_pos < 0, np.where(np.arange(5) % 2, -7, x.shape[0]), to_pos).astype(np.int32)
    same(mm.reduce_fused((x, x_sf) if scaled else x, w, poisoned, fp8, sf), out)


def test_reduce_specials():
    """Rows without positions are zero with the sign of sf; E4M3 saturates and keeps NaN; without fp8 infinities stay."""
    none, one = np.full((2, 3), -1, np.int32), np.array([[0], [1], [2], [3], [4]], np.int32)
    x = F32([[np.inf], [-np.inf], [np.nan], [449], [-1e30]])
    same(mm.reduce_fused(x, None, none), np.zeros((2, 1), F32))
    same(mm.reduce_fused(x, None, none, "e4m3", F32([-2])), np.full((2, 1), -0.0, F8))
    out = mm.reduce_fused(x, None, one, "e4m3").astype(F32)[:, 0]
    np.testing.assert_equal(out, [448, -448, np.nan, 448, -448])
    np.testing.assert_equal(mm.reduce_fused(x, None, one), x)
    same(mm.reduce_fused(F32([[-0.0]]), None, np.zeros((1, 1), np.int32)), F32([[0.0]]))


def test_reduce_by_chunks(monkeypatch):
    idx = routing(50, 3, 4)
    to_pos, to_expert, _ = moved(idx, 4, 4)
    x = normal((to_expert.size, 64)).astype(BF16)
    whole = mm.reduce_fused(x, None, to_pos)
    monkeypatch.setattr(mm, "CHUNK", 64 * 7)
    same(mm.reduce_fused(x, None, to_pos), whole)


def test_fused_and_separate_roundings_differ():
    """The tests of kernels can tell them apart."""
    idx = routing(200, 6, 8, empty=0)
    to_pos, to_expert, _ = moved(idx, 8, 1)
    x, w = normal((to_expert.size, 64)), np.random.default_rng(0).random((200, 6), F32)
    acc = np.zeros((200, 64), F32)
    for k in range(6):
        acc += np.where(to_pos[:, k, None] >= 0, w[:, k, None] * x[to_pos[:, k]], 0).astype(F32)
    assert (acc != mm.reduce_fused(x, w, to_pos)).mean() > 0.05


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("weighted", [False, True])
def test_reduce_gradient(dtype, weighted):
    idx = routing(23, 5, 6)
    to_pos, to_expert, to_slot = moved(idx, 6, 4, 60)
    g = normal((23, 64)).astype(dtype)
    x = normal((60, 64), 1).astype(dtype)
    x[to_expert < 0] = np.nan
    w = np.random.default_rng(0).random((23, 5), F32) if weighted else None
    x_sf = normal((60,), 2)
    x_sf[to_expert < 0] = np.nan
    grad_x, grad_w = mm.reduce_fused_backward(g, x, w, to_pos, to_slot)
    assert grad_x.dtype == dtype
    for p in range(60):
        t, k = divmod(to_slot[p], 5)
        want = g[t] if not weighted else (w[t, k] * g[t].astype(F32)).astype(dtype)
        same(grad_x[p], want if to_slot[p] >= 0 else np.zeros(64, dtype))
    if not weighted:
        same(grad_x, mm.expand_to_fused(g, to_pos, to_expert))
    for t in range(23):
        for k in range(5):
            p = to_pos[t, k]
            want = (g[t].astype(float) * x[p].astype(float)).sum() if p >= 0 else 0
            np.testing.assert_allclose(grad_w[t, k], want, rtol=1e-12, atol=1e-12)
    scaled = mm.reduce_fused_backward(g, x, w, to_pos, to_slot, x_sf)
    same(scaled[0], grad_x)
    np.testing.assert_allclose(scaled[1], grad_w * np.where(to_pos >= 0, x_sf[to_pos], 0), rtol=1e-12)
    assert mm.reduce_fused_backward(g, None, w, to_pos, to_slot, need_grad_weights=False)[1] is None
    assert mm.reduce_fused_backward(g, x, w, to_pos, to_slot, need_grad_x=False)[0] is None
    empty = mm.reduce_fused_backward(g[:0], x, None if w is None else w[:0], to_pos[:0], np.full(60, -1, np.int32))
    assert (empty[0].astype(F32) == 0).all()
    assert empty[1].shape == (0, 5)


def test_adjoints():
    """Expand and reduce are transposes of each other, and so are reduce and its gradients."""
    idx = routing(23, 5, 6)
    to_pos, to_expert, to_slot = moved(idx, 6, 4)
    rows = to_expert.size
    x, y, z, w = normal((23, 64)), normal((rows, 64), 1), normal((23, 64), 2), normal((23, 5), 3)

    def dot(a, b):
        return (a.astype(np.float64) * b.astype(np.float64)).sum()

    np.testing.assert_allclose(dot(mm.expand_to_fused(x, to_pos, to_expert), y), dot(x, mm.expand_to_fused_bwd(y, to_pos)), rtol=1e-5)
    grad_y, grad_w = mm.reduce_fused_backward(z, y, w, to_pos, to_slot)
    np.testing.assert_allclose(dot(mm.reduce_fused(y, w, to_pos), z), dot(y, grad_y), rtol=1e-5)
    np.testing.assert_allclose(dot(mm.reduce_fused(y, w, to_pos), z), dot(w, grad_w), rtol=1e-5)
    x64, w64 = y.astype(np.float64), w.astype(np.float64)

    def total(w64):
        terms = np.where(to_pos[..., None] >= 0, w64[..., None] * x64[to_pos], 0)
        return (terms.sum(axis=1) * z).sum()

    np.testing.assert_allclose(grad_w, gradient(total, w64), rtol=1e-6, atol=1e-7)


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
