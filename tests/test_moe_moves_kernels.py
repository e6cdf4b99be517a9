"""Rows to their experts and back: kernels against the oracle, bit for bit but for the gradient of weights."""

import ml_dtypes
import numpy as np
import pytest
from moe_arrays import normal, routing, same
from moe_device import call, run

from tk_core.ops.moe.expand import expand_to_fused, expand_to_fused_with_sf, expand_topk_weights
from tk_core.ops.moe.reduce import reduce_fused, reduce_fused_backward
from tk_core.reference import moe_mapping as mm
from tk_core.reference.quant_formats import sf_storage

pytestmark = pytest.mark.anywhere

BF16, F8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
FLOATS = {"bf16": BF16, "f32": np.dtype(np.float32), "f16": np.dtype(np.float16)}
# tokens, slots, experts
SIZES = [(0, 2, 3), (1, 1, 1), (150, 2, 9), (90, 6, 32), (77, 9, 4), (5, 32, 64)]


def mapping(T, K, E, rows=None, A=16):
    return mm.fused_mapping(routing(T, K, E), E, A, rows)


def codes(shape, dtype, seed=0):
    """Any bits: copies do not care."""
    dtype = np.dtype(dtype)
    return np.random.default_rng([seed, *shape]).integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]


def wilder(where, N):
    """The same rows, what names none of them in every way that there is."""
    none = np.random.default_rng(1).choice(np.array([-1, -7, N, N + 1, 2**31 - 1, -(2**31)], np.int32), where.shape)
    return np.where((where >= 0) & (where < N), where, none)


def backward(op, *arrays, **attrs):
    return run(op.backward, arrays, attrs)


def padded(x, owners):
    """NaN in the rows that nobody owns."""
    x = x.copy()
    x[owners < 0] = np.nan
    return x


# ------------------------------------------------------------------ to the experts


@pytest.mark.parametrize("rows", [None, 50, 3000])
@pytest.mark.parametrize(("T", "K", "E"), SIZES)
def test_expand(T, K, E, rows):
    m = mapping(T, K, E, rows)
    x = codes((T, 576), BF16)
    want = mm.expand_to_fused(x, m.token_topk_to_pos, m.pos_to_expert)
    same(call(expand_to_fused, x, m.token_topk_to_pos, m.pos_to_expert), want)
    same(call(expand_to_fused, x, wilder(m.token_topk_to_pos, len(want)), m.pos_to_expert), want)


@pytest.mark.parametrize("dtype", [BF16, np.float32, np.float16, F8, np.int8, np.uint8, np.int32])
@pytest.mark.parametrize("H", [1, 7, 18, 64, 2048, 7168])
def test_expand_any_row(H, dtype):
    m = mapping(40, 3, 5)
    x = codes((40, H), dtype)
    same(call(expand_to_fused, x, m.token_topk_to_pos, m.pos_to_expert), mm.expand_to_fused(x, m.token_topk_to_pos, m.pos_to_expert))


@pytest.mark.parametrize("dtype", FLOATS)
def test_expand_gradient(dtype):
    for T, K, E in SIZES:
        m = mapping(T, K, E)
        d_out = padded(normal((m.pos_to_expert.size, 192)).astype(FLOATS[dtype]), m.pos_to_expert)
        same(backward(expand_to_fused, d_out, m.token_topk_to_pos)["d_x"], mm.expand_to_fused_bwd(d_out, m.token_topk_to_pos))


@pytest.mark.parametrize("col", [False, True])
@pytest.mark.parametrize("sf_dtype", [np.float32, np.int32, F8])
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize(("T", "K", "E"), [(0, 2, 3), (150, 2, 9), (77, 9, 4)])
def test_expand_with_sf(T, K, E, block, sf_dtype, col):
    for rows, columns, dtype in ((None, 576, F8), (61, 576, F8), (2000, 160, np.int8)):
        m = mapping(T, K, E, rows)
        H = columns * (2 if dtype == np.int8 else 1)
        S = -(-H // block) if sf_dtype != np.int32 else -(-H // (4 * block))
        x, sf = codes((T, columns), dtype), codes((T, S), sf_dtype, 1)
        got = call(expand_to_fused_with_sf, x, sf, m.token_topk_to_pos, m.pos_to_expert, num_per_channels=block, col=col)
        want = mm.expand_to_fused_with_sf((x, sf), block, m.token_topk_to_pos, m.pos_to_expert, col)
        same(got[0], want[0])
        same(got[1], sf_storage(want[1]) if col else want[1])


def test_expand_with_sf_of_many_scales():
    m = mapping(20, 3, 5)
    x, sf = codes((20, 7168), F8), codes((20, 224), np.float32, 1)
    got = call(expand_to_fused_with_sf, x, sf, m.token_topk_to_pos, m.pos_to_expert, num_per_channels=32)
    for a, b in zip(got, mm.expand_to_fused_with_sf((x, sf), 32, m.token_topk_to_pos, m.pos_to_expert), strict=True):
        same(a, b)


@pytest.mark.parametrize(("T", "K", "E"), SIZES)
def test_expand_weights(T, K, E):
    for rows in (None, 50):
        m = mapping(T, K, E, rows)
        w, owners = normal((T, K)), wilder(m.pos_to_token_topk, T * K)
        same(call(expand_topk_weights, w, m.token_topk_to_pos, owners), mm.expand_topk_weights(w, m.pos_to_token_topk))
        d_w_row = padded(normal(m.pos_to_expert.shape), m.pos_to_expert)
        got = backward(expand_topk_weights, d_w_row, wilder(m.token_topk_to_pos, d_w_row.size))["d_topk_weights"]
        same(got, mm.expand_topk_weights_bwd(d_w_row, m.token_topk_to_pos))


# ------------------------------------------------------------------ and back


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_reduce(dtype, weighted, scaled):
    for T, K, E in SIZES if dtype == "bf16" else SIZES[2:4]:
        for rows, H in ((None, 576), (50, 576)):
            m = mapping(T, K, E, rows)
            N = m.pos_to_expert.size
            x = padded(normal((N, H)).astype(FLOATS[dtype]), m.pos_to_expert)
            w, x_sf = normal((T, K), 1) if weighted else None, normal((N,), 2) if scaled else None
            pair = (x, x_sf) if scaled else x
            where = wilder(m.token_topk_to_pos, N)
            same(call(reduce_fused, x, w, where, x_sf, None), mm.reduce_fused(pair, w, m.token_topk_to_pos))
            for sf in (None, np.array([-300.0], np.float32)):
                got = call(reduce_fused, x, w, where, x_sf, sf, fp8_format="e4m3")
                same(got, mm.reduce_fused(pair, w, m.token_topk_to_pos, "e4m3", sf))


@pytest.mark.parametrize("H", [1, 7, 64, 2048, 7168])
def test_reduce_any_row(H):
    m = mapping(40, 6, 12, A=1)
    w = np.random.default_rng(0).random((40, 6), np.float32)
    for dtype in FLOATS.values():
        # more rows than there are assignments: the others are not read
        x = np.concatenate([normal((m.pos_to_expert.size, H)), np.full((100, H), np.nan, np.float32)]).astype(dtype)
        same(call(reduce_fused, x, w, m.token_topk_to_pos, None, None), mm.reduce_fused(x, w, m.token_topk_to_pos))


def test_reduce_saturates_and_keeps_nan():
    x = np.array([[1e9, -np.inf, np.nan, 1e-9, 448, 464, -1.0, 0] * 8], np.float32)
    where = np.array([[0], [-1]], np.int32)
    sf = np.array([-1.0], np.float32)
    same(call(reduce_fused, x, None, where, None, sf, fp8_format="e4m3"), mm.reduce_fused(x, None, where, "e4m3", sf))


def check_gradients(got, want, H, scale):
    same(got["d_x"], want[0])
    np.testing.assert_allclose(got["d_topk_weights"], want[1], rtol=2e-5, atol=1e-6 * np.sqrt(H) * scale)
    assert got["d_topk_weights"].dtype == np.float32


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_reduce_backward(dtype, weighted, scaled):
    for T, K, E in SIZES if dtype == "bf16" else SIZES[2:4]:
        for rows, H in ((None, 576), (50, 200), (3000, 200)):
            m = mapping(T, K, E, rows)
            N = m.pos_to_expert.size
            x = padded(normal((N, H)).astype(FLOATS[dtype]), m.pos_to_expert)
            d_out = normal((T, H), 3).astype(FLOATS[dtype])
            w, x_sf = normal((T, K), 1) if weighted else None, normal((N,), 2) if scaled else None
            want = mm.reduce_fused_backward(d_out, x, w, m.token_topk_to_pos, m.pos_to_token_topk, x_sf)
            scale = np.abs(d_out.astype(np.float32)).max(initial=0) * np.nan_to_num(x.astype(np.float32)).max(initial=0) * 4
            maps = wilder(m.token_topk_to_pos, N), m.pos_to_token_topk
            got = call(reduce_fused_backward, d_out, x, w, *maps, x_sf)
            check_gradients(dict(zip(reduce_fused_backward.returns, got, strict=True)), want, H, scale)
            check_gradients(backward(reduce_fused, d_out, x, w, maps[0], x_sf), want, H, scale)


def test_reduce_backward_of_another_dtype():
    m = mapping(60, 4, 8)
    x, d_out = normal((m.pos_to_expert.size, 320)), normal((60, 320), 3).astype(BF16)
    want = mm.reduce_fused_backward(d_out, x, None, m.token_topk_to_pos, m.pos_to_token_topk)
    got = call(reduce_fused_backward, d_out, x, None, m.token_topk_to_pos, m.pos_to_token_topk, None)
    check_gradients(dict(zip(reduce_fused_backward.returns, got, strict=True)), want, 320, 20)


def test_one_is_the_transpose_of_the_other():
    m = mapping(80, 5, 16, 120)
    x, y = np.round(normal((80, 64)) * 8), np.round(normal((m.pos_to_expert.size, 64)) * 8)
    expanded = call(expand_to_fused, x, m.token_topk_to_pos, m.pos_to_expert)
    reduced = call(reduce_fused, y, None, m.token_topk_to_pos, None, None)
    assert (expanded.astype(np.float64) * y).sum() == (x.astype(np.float64) * reduced).sum()


def test_arguments_that_do_not_fit():
    m = mapping(20, 2, 4)
    N = m.pos_to_expert.size
    x, y = normal((20, 64)), normal((N, 64))
    where = m.token_topk_to_pos
    with pytest.raises(ValueError, match="token_topk_to_pos"):
        call(expand_to_fused, x, where[:-1], m.pos_to_expert)
    with pytest.raises(TypeError, match="token_topk_to_pos"):
        call(expand_to_fused, x, where.astype(np.int64), m.pos_to_expert)
    with pytest.raises(ValueError, match="fp8_format"):
        call(reduce_fused, y, None, where, None, None, fp8_format="e5m2")
    with pytest.raises(ValueError, match="sf"):
        call(reduce_fused, y, None, where, None, np.ones(1, np.float32))
    with pytest.raises(ValueError, match="sf"):
        call(reduce_fused, y, None, where, None, np.ones(2, np.float32), fp8_format="e4m3")
    with pytest.raises(ValueError, match="x_sf"):
        call(reduce_fused, y, None, where, np.ones(N + 1, np.float32), None)
    with pytest.raises(ValueError, match="token_topk_to_pos"):
        call(reduce_fused, y, np.ones((20, 3), np.float32), where, None, None)
    quantized, sf = codes((20, 64), F8), codes((20, 2), np.float32)
    with pytest.raises(ValueError, match="sf"):
        call(expand_to_fused_with_sf, quantized, sf, where, m.pos_to_expert, num_per_channels=128)
    with pytest.raises(ValueError, match="num_per_channels"):
        call(expand_to_fused_with_sf, quantized, sf, where, m.pos_to_expert, num_per_channels=64)
