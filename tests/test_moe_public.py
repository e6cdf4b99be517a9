"""Rows on their way to experts and back through both front ends: against the oracle, and with the same bits, gradients included."""

import inspect

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_arrays import check_mapping, normal, routing
from moe_fronts import FRONTS, agree
from quant_fronts import stored

from tk_core.reference import moe_mapping as mm

pytestmark = pytest.mark.anywhere

BF16, F8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
FLOATS = {"bf16": BF16, "f32": np.dtype(np.float32), "f16": np.dtype(np.float16)}


@pytest.fixture(params=FRONTS)
def front(request):
    return FRONTS[request.param]()


@pytest.fixture
def fronts():
    return [make() for make in FRONTS.values()]


def need_of(idx, E, A):
    counts = np.bincount(idx[(idx >= 0) & (idx < E)], minlength=E)
    return int((-(-counts // A) * A).sum())


# ------------------------------------------------------------------ mapping


def routings():
    """Routings by name, each with its number of experts and alignment."""
    wild = np.random.default_rng(0).integers(-(2**31), 2**31 - 1, (301, 6))
    wild[::2] = routing(151, 6, 9)
    return {
        "real": (routing(18000, 6, 9), 9, 128),
        "many": (routing(401, 8, 384), 384, 16),
        "slots": (routing(50, 32, 33), 33, 64),
        "one": (np.zeros((1, 1), np.int64), 1, 1),
        "none": (np.full((301, 6), -1), 9, 16),
        "empty": (np.zeros((0, 6), np.int64), 9, 16),
        "crowd": (np.full((301, 6), 5), 9, 16),
        "wild": (wild, 9, 7),
    }


ROUTINGS = routings()


@pytest.mark.parametrize("name", ROUTINGS)
def test_mapping(front, name):
    idx, E, A = ROUTINGS[name]
    bound = front.m.max_num_expanded_tokens(*idx.shape, E, A)
    assert bound == mm.max_num_expanded_tokens(*idx.shape, E, A)
    need = need_of(idx, E, A)
    assert need <= bound
    for rows in (None, need, bound + A, need * 2 // 3 + 1):
        got = front.moe("fused_mapping", idx, num_experts=E, alignment=A, num_expanded_tokens=rows)
        want = mm.fused_mapping(idx, E, A, rows)
        agree(tuple(got), tuple(want))
        assert got.num_dropped.shape == ()
        check_mapping(idx, E, A, got)
        valid = (idx >= 0) & (idx < E)
        assert got.num_dropped == valid.sum() - (got.token_topk_to_pos >= 0).sum()
        if rows:
            agree(front.moe("get_fused_mapping", idx, E, rows, A), (*want[:7], []))
            agree(front.moe("get_fused_mapping", idx, E, rows, A, True), (*want[:7], []))
        ends = None if rows is None else got.expert_end
        psum = front.moe("psum_num_tokens_per_expert", idx, got.expert_start, ends)
        agree(psum, mm.psum_num_tokens_per_expert(idx, got.expert_start, got.expert_end))
    for capacity in (A, 4 * A):
        got = front.moe("fused_mapping", idx, num_experts=E, alignment=A, expert_capacity=capacity)
        agree(tuple(got), tuple(mm.fused_mapping(idx, E, A, None, capacity)))
        check_mapping(idx, E, A, got)
        assert got.pos_to_expert.shape == (E * capacity,)


@pytest.mark.parametrize("name", ROUTINGS)
def test_mapping_as_long_as_the_routing_needs(name):
    """PyTorch only: a length that depends on data, by looking at the counts."""
    front = FRONTS["torch"]()
    idx, E, A = ROUTINGS[name]
    got = front.moe("get_fused_mapping", idx, E, 0, A)
    agree(got, mm.get_fused_mapping(idx, E, 0, A))
    assert got[0].shape == (need_of(idx, E, A),)
    assert got[7] == got[6].tolist()
    agree(front.moe("get_fused_mapping", idx, E, 0, A, force_no_sync=True), mm.get_fused_mapping(idx, E, 0, A, True))


@pytest.mark.parametrize("strides", [(0, 0), (3, 2)])
def test_a_mapping_of_nothing_with_any_strides(strides):
    """To torch, an empty tensor is contiguous whatever its strides are."""
    torch = pytest.importorskip("torch")
    front = FRONTS["torch"]()
    idx = torch.empty(0, 6, dtype=torch.int64, device=front.device).as_strided((0, 6), strides)
    assert idx.is_contiguous()
    assert front.m.get_fused_mapping(idx, 3, 0, 16)[7] == [0, 0, 0]


def test_jax_has_no_mapping_of_a_length_that_depends_on_data():
    idx, E, A = ROUTINGS["one"]
    text = "get_fused_mapping: num_expanded_tokens: expected a positive number, for shapes are static; or use fused_mapping, got 0"
    for args in ((E, 0, A), (E, 0, A, True)):
        with pytest.raises(ValueError, match=text):
            FRONTS["jax"]().moe("get_fused_mapping", idx, *args)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_mappings_are_consistent(data):
    front = FRONTS["torch"]()
    (E, K), A = data.draw(st.sampled_from([(9, 6), (1, 1), (33, 32)])), data.draw(st.integers(1, 40))
    T, seed = data.draw(st.integers(0, 60)), data.draw(st.integers(0, 2**16))
    idx = np.random.default_rng(seed).integers(-2, E + 2, (T, K))
    if data.draw(st.booleans()):
        idx[idx % 3 != 0] = -1
    rows = data.draw(st.none() | st.integers(0, need_of(idx, E, A) + A))
    got = front.moe("fused_mapping", idx, num_experts=E, alignment=A, num_expanded_tokens=rows)
    check_mapping(idx, E, A, got)
    agree(tuple(got), tuple(mm.fused_mapping(idx, E, A, rows)))
    count = (got.pos_to_expert[:, None] == np.arange(E)).sum(0)
    dense = front.moe("group_count", np.where(got.token_topk_to_pos >= 0, idx, -1), E)
    np.testing.assert_array_equal(count, dense)


# ------------------------------------------------------------------ to the experts


def layouts(T=90, K=6, E=9, A=16):
    """Mappings with padding, with more of it, with too few rows, by capacity."""
    idx = routing(T, K, E)
    yield mm.fused_mapping(idx, E, A)
    yield mm.fused_mapping(idx, E, A, need_of(idx, E, A) + 3 * A)
    yield mm.fused_mapping(idx, E, A, 101)
    yield mm.fused_mapping(idx, E, A, None, 2 * A)


def wilder(where, N):
    """The same positions, with what names no row in every way that there is."""
    none = np.random.default_rng(1).choice(np.array([-1, -7, N, N + 1, 2**31 - 1, -(2**31)], np.int32), where.shape)
    return np.where((where >= 0) & (where < N), where, none)


def padded(rows, owners):
    """NaN in the rows that nobody owns."""
    rows = rows.copy()
    rows[owners < 0] = np.nan
    return rows


@pytest.mark.parametrize(("H", "dtype"), [(576, "bf16"), (2048, "f32"), (7168, "bf16"), (7, "f16"), (576, "f8"), (64, "i8")])
def test_expand(fronts, H, dtype):
    dtype = {**FLOATS, "f8": F8, "i8": np.dtype(np.int8)}[dtype]
    x = normal((90, H), scale=10).astype(dtype)
    for m in layouts():
        want = mm.expand_to_fused(x, m.token_topk_to_pos, m.pos_to_expert)
        where = wilder(m.token_topk_to_pos, len(want))
        for front in fronts:
            agree(front.moe("expand_to_fused", x, where, m.pos_to_expert), want)
        if dtype.itemsize > 1:
            g = padded(normal(want.shape).astype(dtype), m.pos_to_expert)
            for front in fronts:
                maps = front.put((where, m.pos_to_expert))
                (got,) = front.pull(lambda x, f=front, maps=maps: f.m.expand_to_fused(x, *maps), [x], [g])
                agree(got, mm.expand_to_fused_bwd(g, m.token_topk_to_pos))
    for front in fronts:
        got = front.moe("expand_to_fused", x[:0], m.token_topk_to_pos[:0], np.full(33, -1, np.int32))
        agree(got, np.zeros((33, H), dtype))


SCALES = {
    "plain": {},
    "rounded": {"round_sf": True},
    "packed": {"round_sf": True, "use_packed_ue8m0": True},
    "e4m3": {"use_e4m3_sf": True},
}


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize(("H", "block"), [(576, 32), (2048, 128)])
def test_expand_with_scales_of_a_cast(front, fmt, kind, H, block):
    pair = front.quant("per_token_cast", normal((90, H)).astype(BF16), fmt, block, **SCALES[kind])
    for m in (*layouts(), mm.fused_mapping(np.full((90, 6), -1), 9, 16, 33)):
        for col in (False, True):
            args = pair, block, wilder(m.token_topk_to_pos, m.pos_to_expert.size), m.pos_to_expert, col
            want = stored(mm.expand_to_fused_with_sf(*args), col)
            if front.name == "jax":
                got = front.moe("expand_to_fused_with_sf", *args)
            else:
                data, sf = front.m.expand_to_fused_with_sf(*front.put(args))
                assert sf.shape == (m.pos_to_expert.size, pair[1].shape[1])
                got = front.numpy(data), front.scales(sf, {"use_tma_aligned_col_major_sf": col})
            agree(got, want)


def test_expand_topk_weights(fronts):
    w = normal((90, 6))
    for m in layouts():
        N = m.pos_to_expert.size
        maps = wilder(m.token_topk_to_pos, N), wilder(m.pos_to_token_topk, w.size)
        g = padded(normal((N,)), m.pos_to_expert)
        for front in fronts:
            agree(front.moe("expand_topk_weights", w, *maps), mm.expand_topk_weights(w, m.pos_to_token_topk))
            there = front.put(maps)
            (got,) = front.pull(lambda w, f=front, there=there: f.m.expand_topk_weights(w, *there), [w], [g])
            agree(got, mm.expand_topk_weights_bwd(g, m.token_topk_to_pos))


# ------------------------------------------------------------------ and back


@pytest.mark.parametrize(("H", "dtype"), [(576, "bf16"), (2048, "f32"), (7168, "bf16"), (7, "f16")])
@pytest.mark.parametrize("weighted", [True, False])
def test_reduce(front, H, dtype, weighted):
    for m in layouts():
        N = m.pos_to_expert.size
        x = padded(normal((N, H), scale=4).astype(FLOATS[dtype]), m.pos_to_expert)
        w = normal((90, 6)) if weighted else None
        where = wilder(m.token_topk_to_pos, N)
        x_sf, sf = normal((N,), 1), normal((1,), 2, 30.0)
        for rows in (x, (x, x_sf)):
            agree(front.moe("reduce_fused", rows, w, where), mm.reduce_fused(rows, w, where))
            agree(front.moe("reduce_fused", rows, w, where, "e4m3", sf), mm.reduce_fused(rows, w, where, "e4m3", sf))
        agree(front.moe("reduce_fused", x, w, where, fp8_format="e4m3"), mm.reduce_fused(x, w, where, "e4m3"))
        agree(front.moe("reduce_fused", x, None if w is None else w[:0], where[:0]), np.zeros((0, H), x.dtype))


def test_e4m3_saturates_and_keeps_nan(front):
    x = np.array([[1e3, -1e30, np.inf, np.nan, 448, 465, -0.0, 2.0**-10]], np.float32).repeat(8, 1)
    where = np.zeros((1, 1), np.int32)
    got = front.moe("reduce_fused", x, None, where, "e4m3", np.ones(1, np.float32))
    np.testing.assert_array_equal(got[0, ::8].astype(np.float32), [448, -448, 448, np.nan, 448, 448, 0, 0])


def tolerance(H, g, x):
    """Of the gradient of weights."""
    largest = [float(np.nanmax(np.abs(a.astype(np.float32)))) for a in (g, x)]
    return {"rtol": 2e-5, "atol": 1e-6 * np.sqrt(H) * largest[0] * largest[1]}


@pytest.mark.parametrize(("H", "dtype"), [(576, "bf16"), (2048, "f32"), (7168, "bf16"), (64, "f16")])
def test_gradients_of_reduce(fronts, H, dtype):
    """To both, to each alone, and of the public gradient; padding rows may hold NaN."""
    for m in layouts():
        N, w = m.pos_to_expert.size, normal((90, 6))
        x, g = padded(normal((N, H)).astype(FLOATS[dtype]), m.pos_to_expert), normal((90, H), 1).astype(FLOATS[dtype])
        x_sf = normal((N,), 1)
        where, owners = wilder(m.token_topk_to_pos, N), np.where(m.pos_to_token_topk < 0, -9, m.pos_to_token_topk).astype(np.int32)
        want_x, want_w = mm.reduce_fused_backward(g, x, w, m.token_topk_to_pos, m.pos_to_token_topk)
        plain_x, scaled_w = mm.reduce_fused_backward(g, x, None, m.token_topk_to_pos, m.pos_to_token_topk, x_sf)
        found = []
        for front in fronts:
            at, rows, factors, weights = front.put((where, x, x_sf, w))
            reduce = front.m.reduce_fused
            d_x, d_w = front.pull(lambda x, w, r=reduce, at=at: r(x, w, at), [x, w], [g])
            agree(d_x, want_x)
            agree(front.pull(lambda x, r=reduce, at=at, w=weights: r(x, w, at), [x], [g])[0], want_x)
            agree(front.pull(lambda x, r=reduce, at=at: r(x, None, at), [x], [g])[0], plain_x)
            agree(front.pull(lambda w, r=reduce, at=at, x=rows: r(x, w, at), [w], [g])[0], d_w)
            (d_pair,) = front.pull(lambda w, r=reduce, at=at, x=(rows, factors): r(x, w, at), [w], [g])
            np.testing.assert_allclose(d_w, want_w, **tolerance(H, g, x))
            np.testing.assert_allclose(d_pair, scaled_w, **tolerance(H, g, x))
            both = front.moe("reduce_fused_backward", g, x, w, where, owners)
            agree(both, (d_x, d_w))
            agree(front.moe("reduce_fused_backward", g, None, w, where, owners, need_grad_weights=False), (d_x, None))
            agree(front.moe("reduce_fused_backward", g, x, w, where, owners, x_sf, need_grad_x=False), (None, d_pair))
            agree(front.moe("reduce_fused_backward", g, None, w, where, owners, need_grad_x=False, need_grad_weights=False), (None, None))
            found.append((d_x, d_w, d_pair))
        agree(*found)


# ------------------------------------------------------------------ the whole way


def chain(front, x, logits, bias, rows, T=64):
    """From a router to experts that double their rows and back, NaN in the padding."""
    m = front.m
    out = front.gate_on("top2_sum_gate", logits, bias=bias, num_topk=4, num_groups=4, num_topk_groups=2, num_seqs=2, scoring_func="sigmoid")
    maps = m.fused_mapping(out.topk_idx, num_experts=16, alignment=8, num_expanded_tokens=rows)
    xe = m.expand_to_fused(x, maps.token_topk_to_pos, maps.pos_to_expert)
    w_row = m.expand_topk_weights(out.topk_weights, maps.token_topk_to_pos, maps.pos_to_token_topk)
    where = front.torch.where if front.name == "torch" else front.jax.numpy.where
    ye = where((maps.pos_to_expert < 0)[:, None], float("nan"), xe * 2)
    return m.reduce_fused(ye, out.topk_weights, maps.token_topk_to_pos), w_row, out.scores_sum


@pytest.mark.parametrize("rows", [None, 500, 100])
@pytest.mark.parametrize("T", [64, 0])
def test_the_whole_way(fronts, rows, T):
    """Same bits of all results and gradients; nothing of the padding arrives anywhere; what was dropped is nothing."""
    x, logits, bias = normal((T, 192)), normal((T, 16)), normal((16,), 1, 0.1)
    N = mm.max_num_expanded_tokens(T, 4, 16, 8) if rows is None else rows
    g, h = normal((T, 192), 1), normal((2, 16), 2)
    results = []
    for front in fronts:
        b = front.array(bias)
        forward = front.take(chain(front, *front.put((x, logits)), b, rows))
        grads = front.pull(lambda x, y, f=front, b=b: chain(f, x, y, b, rows), [x, logits], [g, None, h])
        by_row = front.pull(lambda x, y, f=front, b=b: chain(f, x, y, b, rows), [x, logits], [g, normal((N,), 3), None])
        results.append((forward, tuple(grads), tuple(by_row)))
        assert all(np.isfinite(a).all() for a in (forward[0], *grads, *by_row))
        assert grads[0].shape == (T, 192)
    agree(*results)
    if T and rows is None:
        np.testing.assert_allclose(results[0][0][0], 2 * 1.5 * x, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(results[0][1][0], 2 * 1.5 * g, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ names


def test_public_names():
    """Every name of the area, with a docstring of all sections; the front ends differ where memory is written."""
    modules = [make().m for make in FRONTS.values()]
    for module in modules:
        assert sorted(module.__all__) == list(module.__all__)
        for name in module.__all__:
            text = inspect.getdoc(getattr(module, name))
            if name not in ("FusedMapping", "GateOutput", "ScoringFunc", "max_num_expanded_tokens"):
                assert all(section in (text or "") for section in ("Args:", "Returns:")), name
    assert set(modules[0].__all__) - set(modules[1].__all__) == {"ScoringFunc", "inplace_unique_group_indices"}
    assert set(modules[1].__all__) <= set(modules[0].__all__)
