"""The oracle of the gates and their gradient against loops, finite differences and autograd."""

import numpy as np
import pytest
from moe_arrays import (
    GATE_SHAPES,
    SCORING,
    check_random_rows,
    difference,
    gradient,
    normal,
    physical_map,
    same,
)

from tk_core.reference import moe, moe_gate

F32 = np.float32

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
