"""The oracle of mapping, expansion and reduction against loops, exact arithmetic and the properties of the operations."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from moe_arrays import (
    check_mapping,
    gradient,
    moved,
    normal,
    routing,
    same,
)

from tk_core.reference import moe
from tk_core.reference import moe_mapping as mm
from tk_core.reference import quant_formats as qf

BF16 = np.dtype(ml_dtypes.bfloat16)
F8 = qf.E4M3_DTYPE
F32 = np.float32

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
