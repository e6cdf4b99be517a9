"""`grouped_gemm` through both front ends: against fp64, with the same bits, gradients included."""

import ml_dtypes
import numpy as np
import pytest
from moe_arrays import difference, normal, routing
from moe_fronts import FRONTS, agree

from tk_core.reference import moe_mapping as mm

pytestmark = pytest.mark.anywhere

BF16 = ml_dtypes.bfloat16


@pytest.fixture
def fronts():
    return [make() for make in FRONTS.values()]


def problem(idx, E, H, F, N=None):
    """The mapping, rows, matrices and a cotangent; padding is zero, as the layer has it."""
    m = mm.fused_mapping(idx, E, 128, N)
    x = mm.expand_to_fused(normal((idx.shape[0], H)).astype(BF16), m.token_topk_to_pos, m.pos_to_expert)
    w = normal((E, H, F), 1, H**-0.5).astype(BF16)
    g = normal((len(x), F), 2).astype(BF16)
    g[m.pos_to_expert < 0] = 0
    return m, x, w, g


def expected(m, x, w, g):
    """In fp64."""
    x, w, g = (a.astype(np.float64) for a in (x, w, g))
    out, d_x, d_w = np.zeros((len(x), w.shape[2])), np.zeros_like(x), np.zeros_like(w)
    for e, (start, end) in enumerate(zip(m.expert_start, m.expert_end, strict=True)):
        out[start:end], d_x[start:end], d_w[e] = x[start:end] @ w[e], g[start:end] @ w[e].T, x[start:end].T @ g[start:end]
    return out, d_x, d_w


def results(front, m, x, w, g):
    """The products, and their gradients."""
    places = front.put((m.pos_to_expert, m.expert_start, m.expert_end))
    out = front.moe("grouped_gemm", x, w, m.pos_to_expert, m.expert_start, m.expert_end)
    return out, *front.pull(lambda x, w: front.m.grouped_gemm(x, w, *places), [x, w], [g])


SHAPES = [
    (300, 2, 5, 64, 64, None),
    (99, 3, 4, 192, 320, None),
    (1, 1, 3, 128, 64, None),
    (200, 2, 3, 64, 128, 300),
    (40, 2, 9, 256, 512, None),
]


@pytest.mark.parametrize(("T", "K", "E", "H", "F", "N"), SHAPES)
def test_products_and_gradients(fronts, T, K, E, H, F, N):
    """Also of buffers that are too short; everything behind the last segment is zero."""
    m, x, w, g = problem(routing(T, K, E), E, H, F, N)
    found = [results(front, m, x, w, g) for front in fronts]
    agree(*found)
    for got, want in zip(found[0], expected(m, x, w, g), strict=True):
        assert got.dtype == BF16
        assert difference(got, want) < 1e-5
    tail = m.expert_end.max()
    assert not found[0][0][tail:].any()
    assert not found[0][1][tail:].any()


def test_experts_without_rows(fronts):
    """Their matrices get a zero gradient, whatever memory held before; matrices that are no numbers go nowhere."""
    idx = routing(200, 2, 6)
    idx[(idx == 0) | (idx == 3)] = -1
    m, x, w, g = problem(idx, 6, 64, 64)
    w[[0, 3]] = np.nan
    for front in fronts:
        out, d_x, d_w = results(front, m, x, w, g)
        assert np.isfinite(out).all()
        assert np.isfinite(d_x).all()
        assert not d_w[[0, 3]].any()
        assert d_w[[1, 2, 4, 5]].any((1, 2)).all()


def test_no_assignment(fronts):
    m, x, w, g = problem(np.full((70, 2), -1), 3, 64, 64)
    for front in fronts:
        assert not any(a.any() for a in results(front, m, x, w, g))


def test_nothing_depends_on_the_other_segments(fronts):
    """A row times its matrix has the same bits wherever its segment lies."""
    idx = np.repeat(np.arange(3)[:, None], 100, 0)
    m, x, w, g = problem(idx, 3, 128, 64)
    whole = results(fronts[0], m, x, w, g)
    for e in range(3):
        own = mm.fused_mapping(np.where(idx == e, 0, -1), 1, 128, None)
        at = m.expert_start[e]
        part = [np.zeros((len(own.pos_to_expert), a.shape[1]), BF16) for a in (x, g)]
        for target, source in zip(part, (x, g), strict=True):
            target[:128] = source[at : at + 128]
        out, d_x, d_w = results(fronts[0], own, part[0], w[e : e + 1], part[1])
        agree((out[:128], d_x[:128], d_w[0]), (whole[0][at : at + 128], whole[1][at : at + 128], whole[2][e]))
