"""Selection and normalization of MoE routing: kernels against the definition, bit for bit."""

import numpy as np
import pytest
from moe_device import call, run

from tk_core.ops.moe.normalize import normalize_weight
from tk_core.ops.moe.scoring import ScoringFunc
from tk_core.ops.moe.topk import bitonic, list_length, sorting, topk_gate, topk_sum_and_topk_group_idx
from tk_core.reference import moe

pytestmark = pytest.mark.anywhere

SHAPES = [
    (72, 6),
    (32, 6),
    (64, 6),
    (96, 6),
    (16, 6),
    (36, 6),
    (108, 6),
    (128, 6),
    (144, 6),
    (256, 8),
    (1, 1),
    (33, 32),
    (384, 8),
    (1030, 3),
]
INDEX = ["int32", "int64"]


def difficult(shape, seed=0):
    """Normal scores; some rows with ties, with zeros of both signs, with and of -inf, ascending and descending ones."""
    rng = np.random.default_rng(seed)
    s = rng.standard_normal(shape).astype(np.float32)
    s[:20] = np.round(s[:20])
    s[20:24] = 0
    s[20:24, ::2] = -0.0
    s[24:40][rng.random((len(s[24:40]), *shape[1:])) < 0.8] = -np.inf
    s[40:41] = -np.inf
    s[41:42] = np.sort(s[41:42])
    s[42:43] = -np.sort(-s[42:43])
    return s


# ------------------------------------------------------------------ topk_gate


@pytest.mark.parametrize("idx", INDEX)
@pytest.mark.parametrize(("E", "K"), SHAPES)
def test_topk(E, K, idx):
    for T in (512, 1):
        scores = difficult((T, E))
        got = call(topk_gate, scores, num_topk=K, idx=idx)
        assert got.dtype == idx
        np.testing.assert_array_equal(got, moe.topk_gate(scores, K))


@pytest.mark.parametrize("T", [0, 4001, 8001])
def test_topk_rows(T):
    scores = difficult((T, 72))
    got = call(topk_gate, scores, num_topk=6)
    assert got.shape == (T, 6)
    np.testing.assert_array_equal(got, moe.topk_gate(scores, 6))


def test_topk_leading_axes():
    scores = difficult((60, 96)).reshape(3, 20, 96)
    got = call(topk_gate, scores, num_topk=6)
    np.testing.assert_array_equal(got.reshape(60, 6), moe.topk_gate(scores.reshape(60, 96), 6))


def test_topk_not_a_number():
    """Whatever its bits, NaN gives distinct indices in range."""
    scores = difficult((64, 36))
    bits = scores.view(np.uint32)
    bits[:, ::3] = 0x7FC00000
    bits[:, 1::3] = 0xFFFFFFFF
    got = np.sort(call(topk_gate, scores, num_topk=32), axis=1)
    assert got.min() >= 0
    assert got.max() < 36
    assert (np.diff(got, axis=1) > 0).all()


@pytest.mark.parametrize("K", [0, 33, -1])
def test_topk_errors(K):
    with pytest.raises(ValueError, match="num_topk"):
        call(topk_gate, np.zeros((4, 33), np.float32), num_topk=K)


def test_topk_types():
    with pytest.raises(ValueError, match="num_topk"):
        call(topk_gate, np.zeros((4, 5), np.float32), num_topk=6)
    with pytest.raises(ValueError, match="experts"):
        call(topk_gate, np.zeros((4, 10000), np.float32))
    with pytest.raises(ValueError, match="idx"):
        call(topk_gate, np.zeros((4, 5), np.float32), idx="int8")
    with pytest.raises(TypeError, match="scores"):
        call(topk_gate, np.zeros((4, 5), np.float64))


@pytest.mark.parametrize("n", [*range(1, 17), 20, 32])
def test_sorting_network(n):
    """By the 0-1 principle: what sorts every sequence of two values sorts all."""
    cases = np.arange(1 << n) if n <= 12 else np.random.default_rng(n).integers(0, 1 << n, 20000)
    x = (cases[:, None] >> np.arange(n)) & 1
    for i, j in sorting(n):
        x[:, i], x[:, j] = np.maximum(x[:, i], x[:, j]), np.minimum(x[:, i], x[:, j])
    assert (np.diff(x, axis=1) <= 0).all()


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("m", [1, 2, 4, 8, 16, 32])
def test_merge_keeps_the_largest(n, m):
    """A list of n and a piece of m <= n, both in order, as the kernels merge them."""
    if m > n:
        return
    rng = np.random.default_rng(n * m)
    a, b = -np.sort(-rng.integers(0, 20, (1000, n))), -np.sort(-rng.integers(0, 20, (1000, m)))
    want = -np.sort(-np.concatenate([a, b], axis=1))[:, :n]
    a[:, n - m :] = np.maximum(a[:, n - m :], b[:, ::-1])
    for i, j in bitonic(n):
        a[:, i], a[:, j] = np.maximum(a[:, i], a[:, j]), np.minimum(a[:, i], a[:, j])
    np.testing.assert_array_equal(a, want)


def test_lists_are_long_enough():
    for E in (1, 33, 36, 72, 256, 288, 384, 2000):
        for K in range(1, min(E, 32) + 1):
            assert list_length(E, K) >= min(K, -(-E // 128) * 4)


# ------------------------------------------------------------------ groups


@pytest.mark.parametrize("idx", INDEX)
@pytest.mark.parametrize("num_sum", [1, 2])
@pytest.mark.parametrize(("G", "Eg"), [(4, 18), (8, 9), (12, 6), (4, 64), (8, 32), (16, 16), (1, 5), (32, 3), (3, 2)])
def test_groups(G, Eg, num_sum, idx):
    scores = difficult((512, G, Eg))
    for num_groups in {1, min(2, G), min(4, G), G}:
        got = call(topk_sum_and_topk_group_idx, scores, num_topk_sum=num_sum, num_topk_groups=num_groups, idx=idx)
        assert got.dtype == idx
        np.testing.assert_array_equal(got, moe.topk_sum_and_topk_group_idx(scores, num_sum, num_groups))


def test_groups_without_rows():
    got = call(topk_sum_and_topk_group_idx, np.zeros((0, 4, 18), np.float32), num_topk_sum=2, num_topk_groups=2)
    assert got.shape == (0, 2)


@pytest.mark.parametrize(
    ("shape", "attrs", "what"),
    [
        ((4, 33, 2), {}, "groups"),
        ((4, 4, 1), {"num_topk_sum": 2}, "num_topk_sum"),
        ((4, 4, 9), {"num_topk_sum": 3}, "num_topk_sum"),
        ((4, 4, 9), {"num_topk_groups": 5}, "num_topk_groups"),
        ((4, 4, 9), {"num_topk_groups": 0}, "num_topk_groups"),
    ],
)
def test_group_errors(shape, attrs, what):
    with pytest.raises(ValueError, match=what):
        call(topk_sum_and_topk_group_idx, np.zeros(shape, np.float32), **attrs)


# ------------------------------------------------------------------ normalize_weight


@pytest.mark.parametrize("K", [1, 2, 6, 7, 8, 9, 32])
def test_normalize(K):
    weights = np.random.default_rng(K).random((4001, K), np.float32)
    weights[7] = 0
    denominator, normalized = call(normalize_weight, weights)
    want = moe.normalize_weight(weights)
    np.testing.assert_array_equal(denominator, want[0])
    np.testing.assert_array_equal(normalized, want[1])
    assert denominator[7] == np.float32(1e-20)
    assert (normalized[7] == 0).all()


@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("K", [1, 6, 8, 9])
def test_normalize_gradient(K, given):
    rng = np.random.default_rng(K)
    saved = call(normalize_weight, rng.random((301, K), np.float32))
    d = [g.astype(np.float32) if there else None for g, there in zip((rng.normal(size=301), rng.normal(size=(301, K))), given, strict=True)]
    got = run(normalize_weight.backward, [*d, *saved], {})["d_topk_weights"]
    np.testing.assert_allclose(got, moe.normalize_weight_bwd(*d, *saved), rtol=1e-5, atol=1e-6)


def test_normalize_edges():
    denominator, normalized = call(normalize_weight, np.zeros((0, 6), np.float32))
    assert denominator.shape == (0,)
    assert normalized.shape == (0, 6)
    with pytest.raises(ValueError, match="topk_weights"):
        call(normalize_weight, np.zeros((4, 33), np.float32))


# ------------------------------------------------------------------ names of scoring functions


def test_scoring_names():
    assert [int(f) for f in ScoringFunc] == [0, 1, 2, 3]
    assert str(ScoringFunc.SQRTSOFTPLUS) == "sqrtsoftplus"
    assert ScoringFunc.from_str("SoftMax") is ScoringFunc.SOFTMAX
    with pytest.raises(ValueError, match="ScoringFunc: label: expected"):
        ScoringFunc.from_str("relu")
