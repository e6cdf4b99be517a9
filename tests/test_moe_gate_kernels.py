"""Gates: indices and weights from the kernel's own scores bit for bit, scores and gradients within their tolerances."""

import numpy as np
import pytest
from moe_device import call, run

from tk_core.ops.moe.gate import moe_topk_gate, top2_sum_gate
from tk_core.ops.moe.gate_backward import moe_topk_gate_backward
from tk_core.ops.moe.scores_sum import scores_sum
from tk_core.reference import moe
from tk_core.reference import moe_gate as oracle

pytestmark = pytest.mark.anywhere

SCORING = oracle.SCORING
# G, Gk, E, S, K
CONFIGS = [
    (0, 0, 72, 1, 6), (0, 0, 32, 2, 6), (0, 0, 64, 2, 6), (0, 0, 96, 2, 6), (0, 0, 16, 2, 6), (0, 0, 36, 2, 6), (0, 0, 108, 2, 6),
    (0, 0, 128, 2, 6), (0, 0, 144, 2, 6), (8, 8, 256, 2, 8), (8, 4, 256, 2, 8), (4, 2, 72, 0, 6), (0, 0, 384, 0, 8),
]  # fmt: skip
ARGS = tuple(moe_topk_gate.forward.ins)


def gate(logits, attrs, op=moe_topk_gate, **arrays):
    """Results by name."""
    got = call(op, logits, *(arrays.get(name) for name in ARGS[1:]), **attrs)
    return dict(zip(op.returns, got, strict=True))


def router(T, E, seed=0):
    """Logits and a bias; in some rows all logits are equal, some go far."""
    rng = np.random.default_rng([seed, E])
    logits = rng.standard_normal((T, E)).astype(np.float32)
    logits[:10] = 1
    logits[10:20] *= 15
    return logits, (rng.standard_normal(E) * 0.1).astype(np.float32), rng


def replicas(rng, E, S, D):
    """A map whose columns are valid up to a random count."""
    return rng.integers(0, E + D - 1, (E + S, D)).astype(np.int32), rng.integers(1, D + 1, E + S).astype(np.int32)


def same(got, want, rows=slice(None)):
    for name in ("topk_idx", "topk_weights", "unmapped_topk_idx"):
        np.testing.assert_array_equal(got[name][rows], getattr(want, name)[rows], name)


def check_scores(got, logits, scoring, counted):
    rtol = 1e-5 if scoring == "softmax" else 2e-6
    np.testing.assert_allclose(got["scores"][counted], oracle.score(logits[counted], scoring, np.float64), rtol=rtol, atol=1e-30)
    assert (got["scores"][~counted] == 0).all()


# ------------------------------------------------------------------ scores


@pytest.mark.parametrize("scoring", ["sigmoid", "sqrtsoftplus"])
def test_scores_within_two_ulp(scoring):
    x = np.concatenate([np.linspace(-80, 60, 40001), np.linspace(-1, 1, 40001), [19.999998, 20, 20.000002]]).astype(np.float32)[:, None]
    got = gate(x, {"scoring_func": scoring})["scores"].astype(np.float64)
    want = oracle.score(x, scoring, np.float64)
    assert (np.abs(got - want) <= 2 * np.spacing(want.astype(np.float32))).all()


# ------------------------------------------------------------------ groups, ranks, maps


@pytest.mark.parametrize("scoring", SCORING)
@pytest.mark.parametrize(("G", "Gk", "E", "S", "K"), CONFIGS)
def test_top2_sum_gate(G, Gk, E, S, K, scoring):
    T, D = 401, 33
    logits, bias, rng = router(T, E)
    mask = rng.random(T) < 0.9
    logits[~mask] = np.nan
    fix, fixed = rng.random(T) < 0.3, rng.integers(-1, E + 1, (T, K))
    maps = replicas(rng, E, S, D)
    for ep_rank, tp_rank in ((0, 0), (3, 1)):
        attrs = {
            "num_topk": K, "num_shared_experts": S, "num_topk_groups": Gk, "num_groups": G, "num_ep_ranks": 4, "num_tp_ranks": 2,
            "scoring_func": scoring, "routed_scaling_factor": 1.5, "ep_rank_value": ep_rank, "tp_rank_value": tp_rank,
        }  # fmt: skip
        arrays = {"bias": bias, "mask": mask, "fix_routing_mask": fix, "fixed_topk_idx": fixed}
        got = gate(logits, attrs, top2_sum_gate, **arrays, to_physical_map=maps[0], logical_count=maps[1])
        ranks = (1.5, ep_rank, 4, tp_rank, 2, scoring)
        want = oracle.top2_sum_gate(logits, bias, K, Gk, G, S > 0, S, *ranks, mask, fix, *maps, fixed, got["scores"])
        same(got, want)
        check_scores(got, logits, scoring, mask)


@pytest.mark.parametrize("idx", ["int32", "int64"])
def test_ranks_in_memory(idx):
    """Ranks as operands give what ranks as attributes give, and every slot is with one TP rank."""
    logits, bias, rng = router(200, 72)
    maps = dict(zip(("to_physical_map", "logical_count"), replicas(rng, 72, 0, 9), strict=True))
    attrs = {"num_topk": 6, "num_ep_ranks": 8, "num_tp_ranks": 4, "scoring_func": "sigmoid", "idx": idx}
    kept = np.zeros((200, 6), int)
    for tp in range(4):
        one = gate(logits, {**attrs, "ep_rank_value": 5, "tp_rank_value": tp}, bias=bias, **maps)
        two = gate(logits, attrs, bias=bias, ep_rank=np.array([5], np.int32), tp_rank=np.array([tp], np.int32), **maps)
        assert one["topk_idx"].dtype == idx
        for name in one:
            np.testing.assert_array_equal(one[name], two[name])
        kept += one["topk_idx"] >= 0
    assert (kept == 1).all()


def test_turns_of_many_rows():
    """Replicas are taken in turn by arithmetic that does not wrap."""
    T = 100_000
    logits, bias, rng = router(T, 8)
    maps = replicas(rng, 8, 0, 7)
    attrs = {"num_topk": 2, "scoring_func": "sigmoid", "ep_rank_value": 3}
    got = gate(logits, attrs, bias=bias, to_physical_map=maps[0], logical_count=maps[1])
    same(
        got, oracle.moe_topk_gate_forward(logits, 2, False, 0, 1.0, 3, "sigmoid", None, bias, None, None, None, *maps, scores=got["scores"])
    )


def test_wild_maps():
    """Counts are clamped, entries that name no physical expert are -1."""
    logits, bias, rng = router(300, 16)
    table = rng.integers(-40, 60, (16, 5)).astype(np.int32)
    count = rng.integers(-3, 9, 16).astype(np.int32)
    got = gate(logits, {"num_topk": 4}, bias=bias, to_physical_map=table, logical_count=count)
    assert got["topk_idx"].min() == -1
    assert got["topk_idx"].max() < 20
    same(
        got,
        oracle.moe_topk_gate_forward(
            logits, 4, False, 0, 1.0, 0, bias=bias, to_physical_map=table, logical_count=count, scores=got["scores"]
        ),
    )


# ------------------------------------------------------------------ biases, random and fixed routing


@pytest.mark.parametrize("idx", ["int32", "int64"])
@pytest.mark.parametrize("scoring", SCORING)
@pytest.mark.parametrize(("E", "S", "K"), [(72, 1, 6), (384, 0, 8), (36, 2, 6)])
def test_moe_topk_gate(E, S, K, scoring, idx):
    T = 512
    logits, bias, rng = router(T, E)
    image, mask, random = rng.random(T) < 0.5, rng.random(T) < 0.9, rng.random(T) < 0.3
    attrs = {"num_topk": K, "num_shared_experts": S, "scoring_func": scoring, "routed_scaling_factor": 2.5, "idx": idx}
    for b, ib, im in ((None, None, None), (bias, None, None), (bias, -bias, image), (None, bias, image)):
        got = gate(logits, attrs, bias=b, image_bias=ib, image_token_mask=im, mask=mask, force_random=random)
        want = oracle.moe_topk_gate_forward(logits, K, S > 0, S, 2.5, 0, scoring, mask, b, ib, im, scores=got["scores"])
        same(got, want, ~(random & mask))
        check_scores(got, logits, scoring, mask & ~random)
        assert got["topk_idx"].dtype == idx


@pytest.mark.parametrize("mapped", [False, True])
def test_random_routing(mapped):
    """Distinct experts, all of them as often as others at every slot, uniform weights, and the same on every call."""
    T, E, S, K, D = 20_000, 20, 1, 4, 5
    logits, _, rng = router(T, E)
    maps = replicas(rng, E, S, D) if mapped else (None, None)
    N = int(maps[1].sum()) if mapped else E + S
    attrs = {"num_topk": K, "num_shared_experts": S}
    arrays = {"force_random": np.ones(T, bool), "to_physical_map": maps[0], "logical_count": maps[1]}
    got = gate(logits, attrs, **arrays)
    idx, weights = got["topk_idx"], got["topk_weights"]
    assert idx.min() >= 0
    assert idx.max() < N
    assert (np.diff(np.sort(idx, axis=1), axis=1) > 0).all()
    counts = np.stack([np.bincount(idx[:, k], minlength=N) for k in range(K + S)])
    assert (np.abs(counts - T / N) < 5.5 * np.sqrt(T / N)).all()
    pairs = np.bincount(idx[:, 0] * N + idx[:, 1], minlength=N * N).reshape(N, N)
    assert (np.abs(pairs[~np.eye(N, dtype=bool)] - T / N / (N - 1)) < 6.5 * np.sqrt(T / N / (N - 1))).all()
    assert 0 < weights.min() < 1e-3
    assert 1 - 1e-3 < weights.max() <= 1
    assert abs(weights.mean() - 0.5) < 0.01
    assert (got["unmapped_topk_idx"] == -1).all()
    assert (got["scores"] == 0).all()
    again = gate(logits, attrs, **arrays)
    np.testing.assert_array_equal(idx, again["topk_idx"])
    np.testing.assert_array_equal(weights, again["topk_weights"])
    other = gate(logits, {**attrs, "ep_rank_value": 1}, **arrays)
    assert (idx != other["topk_idx"]).any(axis=1).mean() > 0.9


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_fixed_routing(dtype):
    """Any index is memory-safe, duplicates count, and the natural selection given back changes nothing."""
    logits, bias, rng = router(300, 64)
    natural = gate(logits, {"num_topk": 6}, bias=bias)
    given = natural["unmapped_topk_idx"].astype(dtype)
    fixed = gate(logits, {"num_topk": 6}, bias=bias, fix_routing_mask=np.ones(300, bool), fixed_topk_idx=given)
    for name in natural:
        np.testing.assert_array_equal(natural[name], fixed[name])
    wild = rng.integers(-3, 67, (300, 6)).astype(dtype)
    wild[0] = [0, 0, 5, 5, 5, -1]
    wild[1] = np.iinfo(dtype).max
    wild[2] = np.iinfo(dtype).min
    got = gate(logits, {"num_topk": 6}, bias=bias, fix_routing_mask=np.ones(300, bool), fixed_topk_idx=wild)
    want = oracle.moe_topk_gate_forward(
        logits, 6, False, 0, 1.0, 0, bias=bias, fix_routing_mask=np.ones(300, bool), fixed_topk_idx=wild, scores=got["scores"]
    )
    same(got, want)
    assert (got["topk_weights"][1:3] == 0).all()


@pytest.mark.parametrize("scoring", SCORING)
def test_equal_logits(scoring):
    got = gate(np.zeros((7, 64), np.float32), {"num_topk": 4, "num_groups": 8, "num_topk_groups": 4, "scoring_func": scoring})
    assert (got["topk_idx"] == np.arange(4)).all()
    np.testing.assert_allclose(got["topk_weights"], 0.25, rtol=1e-6)


# ------------------------------------------------------------------ sums of scores


@pytest.mark.parametrize("num_seqs", [1, 4])
@pytest.mark.parametrize("scoring", SCORING)
def test_gate_scores_sum(scoring, num_seqs):
    T = 1200
    logits, bias, rng = router(T, 108)
    mask, random = rng.random(T) < 0.8, rng.random(T) < 0.2
    attrs = {"num_topk": 6, "scoring_func": scoring}
    plain = gate(logits, attrs, bias=bias, mask=mask, force_random=random)
    got = gate(logits, {**attrs, "num_seqs": num_seqs}, bias=bias, mask=mask, force_random=random)
    for name in ("topk_idx", "topk_weights", "unmapped_topk_idx", "scores"):
        np.testing.assert_array_equal(plain[name], got[name])
    np.testing.assert_allclose(got["scores_sum"], moe.scores_sum(got["scores"], mask, num_seqs), rtol=1e-5)
    assert plain["scores_sum"].shape == (0, 108)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("T", "E", "B"), [(600, 72, 4), (33, 256, 1), (5, 7, 1), (40_000, 36, 2), (6, 384, 6)])
def test_scores_sum(T, E, B, masked):
    rng = np.random.default_rng(T)
    u = rng.random((T, E), np.float32)
    u[4] = 0
    mask = rng.random(T) < 0.7 if masked else None
    np.testing.assert_allclose(call(scores_sum, u, mask, num_seqs=B), moe.scores_sum(u, mask, B), rtol=1e-5)
    h = rng.standard_normal((B, E)).astype(np.float32)
    got = run(scores_sum.backward, [h, u, mask], {"num_seqs": B})["d_scores"]
    np.testing.assert_allclose(got, moe.scores_sum_bwd(h, u, mask), rtol=1e-5, atol=1e-6)


def test_without_rows():
    got = gate(np.zeros((0, 16), np.float32), {"num_topk": 4, "num_seqs": 2})
    assert got["topk_idx"].shape == (0, 4)
    assert (got["scores_sum"] == np.zeros((2, 16))).all()
    assert (call(scores_sum, np.zeros((0, 16), np.float32), None, num_seqs=3) == np.zeros((3, 16))).all()
    none = np.zeros((0, 4), np.float32)
    assert call(moe_topk_gate_backward, np.zeros((0, 16), np.float32), none.astype(int), none, none, None, None).shape == (0, 16)


# ------------------------------------------------------------------ gradient


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    got = got.astype(np.float64)
    total = (got**2 + want**2).sum()
    assert total == 0 or ((got - want) ** 2).sum() / total < 1e-11


def selection(rng, scores, K):
    """Natural slots, some rows with duplicates, empty slots, indices out of range, and nothing at all."""
    idx = moe.topk_gate(scores, K)
    n = len(idx) // 4
    idx[:n] = rng.integers(-1, scores.shape[1] + 1, (n, K))
    idx[n : n + 5] = idx[n : n + 5, :1]
    idx[n + 5 : n + 9] = -1
    return idx


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("scoring", SCORING)
@pytest.mark.parametrize(("E", "K"), [(72, 6), (36, 6), (16, 6), (256, 8), (384, 8), (33, 32)])
def test_backward(E, K, scoring, dtype):
    T = 512
    logits, _, rng = router(T, E)
    scores = gate(logits, {"scoring_func": scoring})["scores"]
    scores[30] = 0
    idx = selection(rng, scores, K)
    weights = oracle.route_weights(scores, idx, 1.5)
    g = rng.standard_normal((T, K)).astype(np.float32)
    mask = rng.random(T) < 0.7
    for B, m in ((0, None), (1, mask), (4, mask), (2, None)):
        h = rng.standard_normal((B, E)).astype(np.float32) if B else None
        arrays = [scores, idx.astype(dtype), weights, g, m if B else None, h]
        got = call(moe_topk_gate_backward, *arrays, routed_scaling_factor=1.5, scoring_func=scoring)
        close(got, oracle.moe_topk_gate_backward(scores, idx, weights, g, 1.5, scoring, m if B else None, h))
        if not B:
            assert (got[~((idx >= 0) & (idx < E)).any(axis=1)] == 0).all()


@pytest.mark.parametrize("scoring", SCORING)
def test_gate_gradient(scoring):
    """The rule of the gate: shared slots carry none, absent cotangents skip their term."""
    T, E, S, K, B = 400, 64, 2, 6, 4
    logits, bias, rng = router(T, E)
    attrs = {"num_topk": K, "num_shared_experts": S, "scoring_func": scoring, "routed_scaling_factor": 1.5, "num_seqs": B}
    mask = rng.random(T) < 0.9
    r = gate(logits, attrs, bias=bias, mask=mask)
    g = rng.standard_normal((T, K + S)).astype(np.float32)
    h = rng.standard_normal((B, E)).astype(np.float32)
    for dw, dq in ((g, h), (g, None), (None, h)):
        saved = [r["scores"], r["unmapped_topk_idx"], r["topk_weights"], mask]
        got = run(moe_topk_gate.backward, [dw, dq, *saved], attrs)["d_logits"]
        slots = None if dw is None else dw[:, :K]
        close(
            got, oracle.moe_topk_gate_backward(r["scores"], r["unmapped_topk_idx"], r["topk_weights"][:, :K], slots, 1.5, scoring, mask, dq)
        )
        assert (got[~mask] == 0).all()


# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("attrs", "arrays", "what"),
    [
        ({"num_topk": 0}, {}, "num_topk"),
        ({"num_topk": 17}, {}, "num_topk"),
        ({"num_shared_experts": 3}, {}, "num_shared_experts"),
        ({"scoring_func": "identity"}, {}, "scoring_func"),
        ({"num_groups": 4}, {}, "num_groups"),
        ({"num_groups": 4, "num_topk_groups": 5}, {}, "num_topk_groups"),
        ({"num_groups": 3, "num_topk_groups": 2}, {}, "num_groups"),
        ({"num_groups": 16, "num_topk_groups": 2}, {}, "two experts"),
        ({"num_groups": 8, "num_topk_groups": 2, "num_topk": 5}, {}, "num_topk"),
        ({"num_tp_ranks": 2, "tp_rank_value": 2}, {}, "tp_rank"),
        ({"num_ep_ranks": 17}, {}, "num_ep_ranks"),
        ({"num_ep_ranks": 2, "num_shared_experts": 1}, {}, "num_shared_experts"),
        ({"num_seqs": 3}, {}, "num_seqs"),
        ({"idx": "int16"}, {}, "idx"),
        ({}, {"bias": (15,)}, "bias"),
        ({}, {"mask": (9,)}, "mask"),
        ({}, {"image_bias": (16,)}, "image_bias"),
        ({}, {"to_physical_map": (16, 2)}, "to_physical_map"),
        ({}, {"to_physical_map": (15, 2), "logical_count": (15,)}, "to_physical_map"),
        ({}, {"fix_routing_mask": (10,)}, "fix_routing_mask"),
        ({}, {"fix_routing_mask": (10,), "fixed_topk_idx": (10, 2)}, "fixed_topk_idx"),
        ({}, {"force_random": (11,)}, "force_random"),
    ],
)
def test_errors(attrs, arrays, what):
    kinds = {"mask": bool, "fix_routing_mask": bool, "force_random": bool, "fixed_topk_idx": np.int64, "to_physical_map": np.int32}
    made = {name: np.ones(shape, kinds.get(name, np.int32 if name == "logical_count" else np.float32)) for name, shape in arrays.items()}
    with pytest.raises(ValueError, match=what):
        gate(np.zeros((10, 16), np.float32), attrs, **made)


def test_wrong_dtypes():
    logits = np.zeros((10, 16), np.float32)
    with pytest.raises(TypeError, match="mask"):
        gate(logits, {}, mask=np.ones(10, np.int32))
    with pytest.raises(TypeError, match="fixed_topk_idx"):
        gate(logits, {}, fix_routing_mask=np.ones(10, bool), fixed_topk_idx=np.ones((10, 1), np.int16))
