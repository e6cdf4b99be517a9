"""Selection, counts, weights, gates and the balance of load through both front ends: against the oracle, and with the same bits."""

import numpy as np
import pytest
from moe_arrays import GATE_SHAPES, SCORING, check_random_rows, difference, normal, physical_map, routing
from moe_fronts import FRONTS, agree, defaults

from tk_core.reference import moe as oracle
from tk_core.reference import moe_gate as gates

pytestmark = pytest.mark.anywhere


@pytest.fixture(params=FRONTS)
def front(request):
    return FRONTS[request.param]()


@pytest.fixture
def fronts():
    return [make() for make in FRONTS.values()]


def exact(front, name, *args, module=oracle, **named):
    """A public function gives what the oracle gives; indices have the width of the front end."""
    got = front.moe(name, *args, **named)
    want = getattr(module, name)(*args, **named)
    agree(got, want)
    return got


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).random(shape, np.float32)


# ------------------------------------------------------------------ selection


@pytest.mark.parametrize("T", [0, 1, 513])
@pytest.mark.parametrize(("E", "K"), [(72, 6), (32, 6), (16, 6), (36, 6), (256, 8), (1, 1), (33, 32), (384, 8)])
def test_topk_gate(front, T, E, K):
    scores = normal((T, E))
    scores[: T // 4] = scores[: T // 4].round(1)
    scores[T // 4 : T // 3, ::2] = -np.inf
    scores[T // 3 : T // 2] = 0.5
    scores[T // 2 : T // 2 + 9] *= np.float32(0) * np.sign(scores[T // 2 : T // 2 + 9])  # zeros of both signs tie
    assert exact(front, "topk_gate", scores, K).dtype == front.index


@pytest.mark.parametrize(("E", "G"), [(72, 4), (72, 8), (256, 16), (256, 8), (33, 3)])
@pytest.mark.parametrize(("n", "Gk"), [(1, 2), (2, 3)])
def test_topk_groups(front, E, G, n, Gk):
    for T in (257, 0):
        got = exact(front, "topk_sum_and_topk_group_idx", normal((T, G, E // G)).round(1), n, Gk)
        assert got.dtype == front.index


@pytest.mark.parametrize(("n", "ep"), [(72, 1), (72, 8), (256, 64), (77, 5), (384, 384)])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_mask_indices_by_tp(front, n, ep, tp):
    idx = np.random.default_rng(n).integers(-3, n + 3, (301, 6))
    kept = sum((exact(front, "mask_indices_by_tp", idx, n, ep, rank, tp) >= 0).astype(int) for rank in range(tp))
    np.testing.assert_array_equal(kept, (idx >= 0) & (idx < n))
    assert exact(front, "mask_indices_by_tp", idx[:0], n, ep, 0, tp).dtype == front.index


@pytest.mark.parametrize("groups", [1, 8, 72, 128])
def test_unique_group_indices(front, groups):
    for T, K in ((401, 6), (0, 6), (33, 32), (5, 1)):
        idx = np.random.default_rng(groups).integers(-3, groups + 3, (T, K))
        got = exact(front, "unique_group_indices", idx, groups)
        assert got.dtype == front.index
        if front.name == "torch":
            tensor = front.array(idx)
            assert front.m.inplace_unique_group_indices(tensor, groups) is None
            agree(front.numpy(tensor), got)


# ------------------------------------------------------------------ counts


@pytest.mark.parametrize("groups", [1, 9, 256, 1024, 65536])
def test_group_count(front, groups):
    idx = np.random.default_rng(groups).integers(-groups // 3 - 1, groups + 2, (18000, 6))
    idx[::10] = -1
    exact(front, "group_count", idx, groups)
    exact(front, "group_count", idx, groups, num_seqs=4)
    exact(front, "group_count", idx[:0], groups, num_seqs=4)
    exact(front, "group_count", np.full((300, 2), groups - 1), groups)
    exact(front, "group_count", np.full((300, 2), -1), groups)


@pytest.mark.parametrize(("E", "K"), [(9, 6), (384, 8), (1, 1), (33, 32)])
def test_aux_fi(front, E, K):
    for T in (18000, 1, 0):
        idx = routing(T, K, E)
        for divisor in (1, K, 7):
            exact(front, "aux_fi", idx, E, divisor)


# ------------------------------------------------------------------ weights


@pytest.mark.parametrize("K", [1, 2, 6, 7, 8, 9, 32])
def test_normalize_weight(fronts, K):
    w = random(257, K)
    w[3] = 0
    for front in fronts:
        _, normalized = exact(front, "normalize_weight", w)
        assert (normalized[3] == 0).all()
        exact(front, "normalize_weight", w[:0])
    w += np.float32(0.1)
    d, g = normal((257,)), normal((257, K))
    zeros = np.zeros_like(d), np.zeros_like(g)
    for cotangents, same in (((None, g), (zeros[0], g)), ((d, None), (d, zeros[1])), ((d, g), (d, g))):
        (first,), (second,) = (front.pull(front.m.normalize_weight, [w], cotangents) for front in fronts)
        agree(first, second)
        np.testing.assert_allclose(first, oracle.normalize_weight_bwd(*cotangents, *oracle.normalize_weight(w)), rtol=1e-5, atol=1e-6)
        for front in fronts:
            np.testing.assert_array_equal(front.pull(front.m.normalize_weight, [w], same)[0], first)


@pytest.mark.parametrize(("E", "B"), [(72, 1), (72, 4), (384, 2), (1, 1)])
def test_scores_sum(fronts, E, B):
    u, mask = random(256, E) + np.float32(0.1), random(256, seed=1) < 0.7
    u[5] = 0
    u[np.flatnonzero(~mask)[0]] = np.nan
    h = normal((B, E))
    for chosen in (mask, None):
        u = np.nan_to_num(u) if chosen is None else u
        results = [front.moe("scores_sum", u, chosen, B) for front in fronts]
        agree(*results)
        np.testing.assert_allclose(results[0], oracle.scores_sum(u, chosen, B), rtol=1e-5)
        where = [None if chosen is None else front.array(chosen) for front in fronts]
        calls = [lambda u, m=front.m, on=on: m.scores_sum(u, on, B) for front, on in zip(fronts, where, strict=True)]
        grads = [front.pull(call, [u], [h])[0] for front, call in zip(fronts, calls, strict=True)]
        agree(*grads)
        np.testing.assert_allclose(grads[0], oracle.scores_sum_bwd(h, u, chosen), rtol=1e-5, atol=1e-6 if E > 1 else 1e-5)
    for front in fronts:
        agree(front.moe("scores_sum", u[:0], None, B), np.zeros((B, E), np.float32))


# ------------------------------------------------------------------ gates


def router(T, E, seed=0):
    """Logits, of which some rows are all equal and some go far, and a bias."""
    logits = normal((T, E), seed)
    logits[: T // 20] = 1
    logits[T // 20 : T // 10] *= 15
    return logits, normal((E,), seed, 0.1)


def check_gate(fronts, name, logits, random_rows=None, num_physical=0, **named):
    """Indices and weights are those of the oracle on the scores that the gate has seen, the scores near it; JAX has the same bits."""
    attrs = defaults(name, named)
    got, scores = fronts[0].scores(name, logits, **named)
    agree(got, fronts[1].gate(name, logits, **named))
    assert got.topk_idx.dtype == np.int64
    want = getattr(gates, name)(logits, **attrs, scores=scores)
    rows = np.ones(len(logits), bool) if random_rows is None else ~random_rows
    for field in ("topk_idx", "topk_weights", "unmapped_topk_idx"):
        agree(getattr(got, field)[rows], getattr(want, field)[rows])
    if random_rows is not None:
        check_random_rows(got.topk_idx[random_rows], got.topk_weights[random_rows], num_physical)
        assert (got.unmapped_topk_idx[random_rows] == -1).all()
    present = rows if named.get("mask") is None else rows & named["mask"]
    assert (scores[~present] == 0).all()
    tolerance = 1e-5 if attrs["scoring_func"].lower() == "softmax" else 2e-6
    exact_scores = gates.score(logits[present], attrs["scoring_func"], np.float64)
    np.testing.assert_allclose(scores[present], exact_scores, rtol=tolerance, atol=1e-30)
    if named.get("num_seqs"):
        np.testing.assert_allclose(got.scores_sum, oracle.scores_sum(scores, named.get("mask"), named["num_seqs"]), rtol=1e-5)
    else:
        assert got.scores_sum is None
    return got, scores


@pytest.mark.parametrize(("number", "G", "Gk", "E", "S", "K"), [(i, *shape) for i, shape in enumerate(GATE_SHAPES)])
def test_top2_sum_gate(fronts, number, G, Gk, E, S, K):
    logits, bias = router(404, E)
    mask = random(404, seed=2) < 0.9
    logits[~mask] = np.nan
    fix = random(404, seed=3) < 0.3
    table, count = physical_map(E + S, 33, E + 32)
    if number % 2:
        table[:], count[:] = np.arange(E + S)[:, None], 1
    named = {
        "bias": bias, "num_topk": K, "num_topk_groups": Gk, "num_groups": G, "use_shared_as_routed": True, "num_shared_experts": S,
        "num_ep_ranks": 4, "num_tp_ranks": 2, "ep_rank": 3 * (number % 2), "scoring_func": SCORING[number % 3].title(), "mask": mask,
        "to_physical_map": table, "logical_count": count, "num_seqs": (None, 4)[number % 2],
    }  # fmt: skip
    kept = np.zeros((404, K + S), int)
    for tp_rank in (0, 1):
        got, _ = check_gate(fronts, "top2_sum_gate", logits, **named, tp_rank=tp_rank)
        kept += got.topk_idx >= 0
    assert (kept == mask[:, None]).all()
    fixed = np.random.default_rng(E).integers(-1, E + 1, (404, K))
    check_gate(fronts, "top2_sum_gate", logits, **named, tp_rank=1, fix_routing_mask=fix, fixed_topk_idx=fixed)


@pytest.mark.parametrize("scoring", SCORING)
@pytest.mark.parametrize(("E", "K", "G", "Gk"), [(72, 6, 8, 4), (70, 6, 0, 0)])
def test_a_gate_without_options(fronts, scoring, E, K, G, Gk):
    logits, bias = router(200, E)
    named = {"bias": bias, "num_topk": K, "num_topk_groups": Gk, "num_groups": G, "scoring_func": scoring}
    got, _ = check_gate(fronts, "top2_sum_gate", logits, **named)
    equal = check_gate(fronts, "top2_sum_gate", logits[:10], **{**named, "bias": np.zeros(E, np.float32)})[0]
    np.testing.assert_array_equal(equal.topk_idx, np.tile(np.arange(K), (10, 1)))
    fixed = {"fix_routing_mask": np.ones(200, bool), "fixed_topk_idx": got.unmapped_topk_idx}
    agree(check_gate(fronts, "top2_sum_gate", logits, **named, **fixed)[0], got)
    for num_seqs in (None, 2):
        empty = check_gate(fronts, "top2_sum_gate", logits[:0], **named, num_seqs=num_seqs)[0]
        assert empty.topk_idx.shape == (0, K)


@pytest.mark.parametrize(("number", "E", "S", "K"), [(0, 72, 1, 6), (1, 36, 2, 6), (2, 384, 0, 8), (3, 33, 1, 31)])
def test_moe_topk_gate(fronts, number, E, S, K):
    B, T = (1, 4)[number % 2], 304
    logits, bias = router(T, E)
    mask = np.ones((B, T // B), bool)
    mask[:, -7:] = False
    mask = mask.reshape(-1)
    logits[~mask] = np.nan
    image, chosen = random(T, seed=4) < 0.5, random(T, seed=5) < 0.3
    maps = dict(zip(("to_physical_map", "logical_count"), physical_map(E + S, 5, E + 4), strict=True))
    named = {"num_topk": K, "use_shared_as_routed": S > 0, "num_shared_experts": S or 2, "ep_rank": 2, "num_seqs": B, "mask": mask}
    named["scoring_func"] = SCORING[number % 3]
    check_gate(fronts, "moe_topk_gate_forward", logits, **named)
    fixed = np.random.default_rng(E).integers(-1, E, (T, K))
    named |= {"bias": bias, "image_bias": -bias, "image_token_mask": image, "fix_routing_mask": chosen, "fixed_topk_idx": fixed}
    check_gate(fronts, "moe_topk_gate", logits, **named, **maps)
    if K > 16:
        return  # kernels that draw many experts take long to compile
    here = chosen[::-1] & mask
    named |= {"random_rows": here, "num_physical": int(maps["logical_count"].sum()), "force_random": chosen[::-1], **maps}
    got, again = (check_gate(fronts, "moe_topk_gate", logits, **named)[0] for _ in range(2))
    agree(got, again)


def test_replicas_are_taken_in_turn_by_many_rows(fronts):
    """Without wrapping where 23333 t leaves 31 bits."""
    logits, bias = router(100_000, 8)
    maps = dict(zip(("to_physical_map", "logical_count"), physical_map(8, 7, 14), strict=True))
    check_gate(fronts, "top2_sum_gate", logits, bias=bias, num_topk=2, ep_rank=3, **maps)


def test_wild_values(fronts):
    """Counts of replicas are clamped, entries that name no expert are none, and scores that are not finite choose some experts."""
    logits, bias = router(200, 16)
    rng = np.random.default_rng(0)
    maps = {"to_physical_map": rng.integers(-9, 40, (16, 5), np.int32), "logical_count": rng.integers(-3, 9, 16, np.int32)}
    check_gate(fronts, "top2_sum_gate", logits, bias=bias, num_topk=4, **maps)
    logits[::5], logits[1::5], logits[2::5], logits[3::5, 0], logits[4::5, :14] = np.nan, np.inf, -np.inf, np.inf, np.nan
    for scoring in SCORING:
        for groups in ({}, {"num_groups": 4, "num_topk_groups": 2}):
            for front in fronts:
                got = front.gate("top2_sum_gate", logits, bias=bias, num_topk=4, scoring_func=scoring, **groups)
                ordered = np.sort(got.topk_idx, axis=1)
                assert (np.diff(ordered, axis=1) > 0).all()
                assert ordered.min() >= 0
                assert ordered.max() < 16


# ------------------------------------------------------------------ gradient of the gates


@pytest.mark.parametrize("scoring", SCORING)
@pytest.mark.parametrize(("name", "E", "K", "S"), [("moe_topk_gate", 72, 6, 1), ("moe_topk_gate", 384, 8, 0), ("top2_sum_gate", 72, 6, 1)])
def test_gradient_of_a_gate(fronts, scoring, name, E, K, S):
    """From each result alone and from both; an absent cotangent is a zero one; masked rows get nothing and NaN goes nowhere."""
    T, B = 256, 4
    logits, bias = router(T, E)
    mask, fix = random(T, seed=6) < 0.8, random(T, seed=7) < 0.3
    fixed = np.random.default_rng(1).integers(-1, E, (T, K))
    logits[~mask] = np.nan
    given = {"bias": bias, "mask": mask, "fix_routing_mask": fix, "fixed_topk_idx": fixed}
    named = {"num_topk": K, "use_shared_as_routed": S > 0, "num_shared_experts": S, "scoring_func": scoring, "num_seqs": B}
    if name == "top2_sum_gate":
        named |= {"num_groups": 8, "num_topk_groups": 4, "num_ep_ranks": 74, "num_tp_ranks": 2, "ep_rank": 3, "tp_rank": 1}
        given |= dict(zip(("to_physical_map", "logical_count"), physical_map(E + S, 3, E + 2), strict=True))
    got, scores = fronts[0].scores(name, logits, **named, **given)
    g, h = normal((T, K + S)), normal((B, E))

    def pull(front, *cotangents):
        def call(x):
            out = front.gate_on(name, x, **named, **front.put(given))
            return out.topk_weights, out.scores_sum

        return front.pull(call, [logits], cotangents)[0]

    routed = scores, got.unmapped_topk_idx, got.topk_weights[:, :K]
    for a, b in ((g, None), (None, h), (g, h)):
        first, second = (pull(front, a, b) for front in fronts)
        agree(first, second)
        assert (first[~mask] == 0).all()
        want = gates.moe_topk_gate_backward(*routed, None if a is None else a[:, :K], 1.5, scoring, None if b is None else mask, b)
        np.testing.assert_allclose(first, want, rtol=1e-5, atol=1e-6)
        assert difference(first, want) < 1e-11
        for front in fronts:
            np.testing.assert_array_equal(pull(front, g * 0 if a is None else a, h * 0 if b is None else b), first)
            if a is not None:
                alone = front.moe("moe_topk_gate_backward", *routed, a[:, :K], 1.5, scoring, None if b is None else mask, b)
                agree(alone, first)


@pytest.mark.parametrize(("E", "K", "B"), [(72, 6, 1), (33, 32, 4), (1, 1, 2)])
def test_moe_topk_gate_backward(fronts, E, K, B):
    """Any selection: duplicates add up, empty slots and rows without any give nothing."""
    T = 200
    rng = np.random.default_rng(E)
    idx = rng.integers(-2, E + 1, (T, K))
    idx[:9] = -1
    idx[9:18] = 0
    mask = rng.random(T) < 0.7
    for i, scoring in enumerate(SCORING):
        scores = gates.score(normal((T, E), 3), scoring)
        scores[18] = 0
        args = scores, idx, gates.route_weights(scores, idx, 1.5), normal((T, K)), 1.5, scoring
        for aux in ((), (mask, normal((B, E))), (None, normal((B, E)))):
            if E == 1 and scoring == "softmax":
                continue  # nothing but rounding
            first, second = (front.moe("moe_topk_gate_backward", *args, *aux) for front in fronts)
            agree(first, second)
            want = gates.moe_topk_gate_backward(*args, *aux)
            np.testing.assert_allclose(first, want, rtol=1e-5, atol=1e-6, err_msg=f"{i}")
            if not aux:
                assert (first[:9] == 0).all()
        agree(fronts[0].moe("moe_topk_gate_backward", *(a[:0] for a in args[:4]), 1.5, scoring), np.zeros((0, E), np.float32))


# ------------------------------------------------------------------ balance


@pytest.mark.parametrize(("E", "K", "B"), [(72, 6, 1), (256, 8, 4)])
def test_load_balance_loss(fronts, E, K, B):
    idx, q = routing(400, K, E), random(B, E) + np.float32(0.5)
    counts, rows = oracle.group_count(idx, E, num_seqs=B), np.array([400 // B] * (B - 1) + [0], np.int32)
    for num_rows in (400 // B, rows):
        want = oracle.load_balance_loss(q, counts, num_rows, K, 0.01)
        values, slopes = [], []
        for front in fronts:
            values.append(front.moe("load_balance_loss", q, counts, num_rows, K, 0.01))
            given, loss = front.put((counts, num_rows)), np.full((), 3, np.float32)
            slopes += front.pull(lambda q, m=front.m, given=given: m.load_balance_loss(q, *given, K, 0.01), [q], [loss])
        np.testing.assert_allclose(values[0], want, rtol=1e-5)
        np.testing.assert_allclose(slopes[0], oracle.load_balance_loss_bwd(3, counts, num_rows, K, 0.01), rtol=1e-5)
        agree(*values)
        agree(*slopes)
    for front in fronts:
        uniform = np.full((B, E), 60 * B / E, np.float32), np.full((B, E), 60 * K * B // E or 1, np.int32)
        if 60 * K * B % E == 0:
            np.testing.assert_allclose(front.moe("load_balance_loss", *uniform, 60 * B, K, 0.5), 0.5, rtol=1e-6)


def test_update_expert_bias(front):
    bias = normal((9,))
    for counts in (np.arange(9, dtype=np.int32), np.array([[4, 4, 5], [4, 4, 3]], np.int32).repeat(3, 1), np.zeros(9, np.int32)):
        agree(front.moe("update_expert_bias", bias, counts, 0.125), oracle.update_expert_bias(bias, counts, 0.125))
    big = np.full(9, 2**31 // 10, np.int32)
    big[3] -= 1
    agree(front.moe("update_expert_bias", bias, big, 0.125), oracle.update_expert_bias(bias, big, 0.125))


def test_scoring_functions_have_names():
    from tk_torch.moe import ScoringFunc

    assert [str(f) for f in ScoringFunc] == ["sigmoid", "sqrtsoftplus", "softmax", "identity"]
    assert ScoringFunc.from_str("SoftMax") is ScoringFunc.SOFTMAX
    with pytest.raises(ValueError, match="ScoringFunc: label: expected 'sigmoid' or"):
        ScoringFunc.from_str("relu")


# ------------------------------------------------------------------ less memory


@pytest.mark.parametrize("scoring", ["sigmoid", "sqrtsoftplus", "softmax"])
def test_a_gate_that_is_computed_again_has_the_same_gradient(fronts, scoring):
    """Under the frameworks' own checkpoints logits are kept instead of scores."""
    logits, dw, dq = normal((64, 32)), normal((64, 4), 1), normal((2, 32), 2)
    options = {"num_topk": 4, "use_shared_as_routed": False, "num_shared_experts": 0, "routed_scaling_factor": 2.0, "ep_rank": 0}
    slopes = []
    for front in fronts:

        def gate(x, front=front):
            out = front.m.moe_topk_gate(x, **options, scoring_func=scoring, num_seqs=2)
            return out.topk_weights, out.scores_sum

        def again(x, front=front, gate=gate):
            if front.name == "jax":
                return front.jax.checkpoint(gate)(x)
            return front.torch.utils.checkpoint.checkpoint(gate, x, use_reentrant=False)

        slopes += [front.pull(f, [logits], [dw, dq])[0] for f in (gate, again)]
    for other in slopes[1:]:
        agree(slopes[0], other)
