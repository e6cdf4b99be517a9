"""The public routing functions through both front ends: against the oracle, to the bit where it is exact."""

import numpy as np
import pytest
from frontends import Jax, Torch

from tk_core.reference import moe as oracle

pytestmark = pytest.mark.anywhere


@pytest.fixture(params=[Torch, Jax])
def front(request):
    return request.param()


def run(front, name, *args, **named):
    """A public function on NumPy arrays."""
    import importlib

    function = getattr(importlib.import_module(f"tk_{front.name}.moe"), name)
    out = function(*(front.array(a) if isinstance(a, np.ndarray) else a for a in args), **named)
    return tuple(map(front.numpy, out)) if isinstance(out, tuple) else front.numpy(out)


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("T", [0, 1, 513])
@pytest.mark.parametrize(("E", "K"), [(72, 6), (32, 6), (16, 6), (36, 6), (256, 8), (1, 1), (33, 32), (384, 8)])
def test_topk_gate(front, T, E, K):
    scores = normal(T, E)
    scores[: T // 4] = scores[: T // 4].round(1)
    scores[T // 4 : T // 3, ::2] = -np.inf
    scores[T // 3 : T // 2] = 0.5
    got = run(front, "topk_gate", scores, K)
    assert got.dtype == (np.int64 if front.name == "torch" else np.int32)
    np.testing.assert_array_equal(got, np.argsort(-scores, axis=1, kind="stable")[:, :K])


@pytest.mark.parametrize(("E", "G"), [(72, 4), (72, 8), (256, 16), (256, 8)])
@pytest.mark.parametrize(("n", "Gk"), [(1, 2), (2, 4)])
def test_topk_groups(front, E, G, n, Gk):
    scores = normal(257, G, E // G).round(1)
    got = run(front, "topk_sum_and_topk_group_idx", scores, n, Gk)
    top = -np.sort(-scores, axis=2)
    sums = top[:, :, 0] if n == 1 else top[:, :, 0] + top[:, :, 1]
    np.testing.assert_array_equal(got, np.argsort(-sums, axis=1, kind="stable")[:, :Gk])


@pytest.mark.parametrize("K", [1, 2, 6, 8, 9, 32])
def test_normalize_weight(front, K):
    w = np.random.default_rng(K).random((257, K), np.float32)
    w[3] = 0
    total = np.full(257, 1e-20, np.float32)
    for k in range(K):
        total = total + w[:, k]
    got = run(front, "normalize_weight", w)
    assert got[0].tobytes() == total.tobytes()
    assert got[1].tobytes() == (w / total[:, None]).tobytes()
    assert (got[1][3] == 0).all()


def test_gradient_of_normalize_weight(front):
    from tk_core.ops.moe.normalize import normalize_weight

    w = np.random.default_rng(0).random((65, 8), np.float32) + np.float32(0.1)
    d, g = normal(65), normal(65, 8)
    total = w.astype(np.float64).sum(1, keepdims=True)
    n = w / total
    for cotangents, want in (
        ((None, g), (g - (g * n).sum(1, keepdims=True)) / total),
        ((d, None), np.broadcast_to(d[:, None], w.shape)),
        ((d, g), (g - (g * n).sum(1, keepdims=True)) / total + d[:, None]),
    ):
        _, (got,) = front.gradients(normalize_weight, [w], cotangents)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_seqs", [1, 4])
def test_scores_sum(front, num_seqs):
    from tk_core.ops.moe.scores_sum import scores_sum

    u = np.random.default_rng(1).random((256, 72), np.float32)
    mask = np.random.default_rng(2).random(256) < 0.7
    for chosen in (None, mask):
        got = run(front, "scores_sum", u, *(() if chosen is None else (chosen,)), num_seqs=num_seqs)
        np.testing.assert_allclose(got, oracle.scores_sum(u, chosen, num_seqs), rtol=1e-5)
    share = u.astype(np.float64) / u.astype(np.float64).sum(1, keepdims=True)
    h = normal(num_seqs, 72)
    rows = h.repeat(256 // num_seqs, 0)
    want = (rows - (rows * share).sum(1, keepdims=True)) / u.astype(np.float64).sum(1, keepdims=True)
    _, (got,) = front.gradients(scores_sum, [u, None], [h], wrt=[0], num_seqs=num_seqs)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "args", "kind", "text"),
    [
        ("topk_gate", (normal(3),  1), ValueError, r"topk_gate: scores: expected shape \(T, E\), got \(3,\)"),
        ("topk_gate", (normal(3, 4), 5), ValueError, "topk_gate: num_topk: expected 1 to 4, got 5"),
        ("topk_gate", (normal(3, 4), 0), ValueError, "topk_gate: num_topk: expected 1 to 4, got 0"),
        ("topk_gate", (normal(3, 4), 1.0), TypeError, "topk_gate: num_topk: expected a value of type int"),
        ("topk_gate", (normal(3, 4).astype(np.float16), 1), TypeError, "topk_gate: scores: expected dtype float32, got float16"),
        ("topk_sum_and_topk_group_idx", (normal(3, 4, 2), 3, 1), ValueError, "topk_sum_and_topk_group_idx: num_topk_sum: expected 1 or 2"),
        ("topk_sum_and_topk_group_idx", (normal(3, 4, 2), 1, 5), ValueError, "topk_sum_and_topk_group_idx: num_topk_groups: expected 1 to 4"),
        ("normalize_weight", (normal(3, 33),), ValueError, "normalize_weight: topk_weights: expected 1 to 32 weights a row, got 33"),
        ("scores_sum", (normal(6, 4), None, 4), ValueError, "scores_sum: "),
    ],
)  # fmt: skip
def test_errors_say_the_same(front, name, args, kind, text):
    with pytest.raises(kind, match=text):
        run(front, name, *args)


def test_scoring_functions_have_names():
    from tk_torch.moe import ScoringFunc

    assert [str(f) for f in ScoringFunc] == ["sigmoid", "sqrtsoftplus", "softmax", "identity"]
    assert ScoringFunc.from_str("SoftMax") is ScoringFunc.SOFTMAX
    with pytest.raises(ValueError, match="ScoringFunc: label: expected 'sigmoid' or"):
        ScoringFunc.from_str("relu")
