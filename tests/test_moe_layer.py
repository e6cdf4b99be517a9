"""The MoE layer of both frameworks from end to end: values, gradients, sizes of buffers, edges."""

import jax
import numpy as np
import pytest
from frontends import Jax, Torch, same_bits
from moe_arrays import difference, same
from moe_dense import PARAMETERS, dense
from moe_layers import GRADIENTS, SMALL, close, exact_products, problem, route, routing_functions, run_layer, same_results, vjp

pytestmark = pytest.mark.anywhere

# ------------------------------------------------------------------ against plain loops in fp64


@pytest.mark.parametrize("weights_in", ["reduce", "swiglu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_and_gradients(front, dtype, weights_in):
    values, x, d_y, idx = problem(dtype=dtype)
    options = {"alpha": 0.1, "routed_scaling_factor": 1.5}
    got = run_layer(front, values, x, d_y, num_topk=4, weights_in=weights_in, **options)
    want = dense(values, x, idx, d_y, **options)
    np.testing.assert_array_equal(got["topk_idx"], idx)
    np.testing.assert_array_equal(got["load"], np.bincount(idx.ravel(), minlength=16))
    np.testing.assert_allclose(got["loss"], want["loss"], 1e-5)
    assert got["num_dropped"] == 0
    assert got["y"].dtype == got["x"].dtype == x.dtype
    if dtype == "float32":
        close(got, want)
    else:
        assert all(difference(got[name], want[name]) < 1e-5 for name in ("y", *GRADIENTS))


@pytest.mark.parametrize("weights_in", ["reduce", "swiglu"])
@pytest.mark.parametrize("limit", [{}, {"num_expanded_tokens": 1000}, {"expert_capacity": 128}], ids=str)
def test_segments_of_whole_blocks(front, weights_in, limit):
    """The default alignment: products by `grouped_gemm`, or batched ones."""
    values, x, d_y, idx = problem(rows=100, hidden=128, intermediate=64, experts=8, topk=2, dtype="bfloat16")
    got = run_layer(front, values, x, d_y, num_topk=2, weights_in=weights_in, alignment=128, **limit)
    want = dense(values, x, idx, d_y)
    assert got["num_dropped"] == 0
    assert all(difference(got[name], want[name]) < 2e-5 for name in ("y", *GRADIENTS))


@pytest.mark.parametrize("scoring_func", ["sigmoid", "softmax"])
def test_sequences_mask_and_scoring(front, scoring_func):
    """The loss is that of every sequence; masked rows take no part."""
    values, x, d_y, idx = problem(**SMALL, lead=(4, 10), scoring_func=scoring_func)
    mask = np.random.default_rng(0).random((4, 10)) < 0.7
    mask[3] = False
    options = {"alpha": 0.5, "mask": mask, "scoring_func": scoring_func}
    got = run_layer(front, values, x, d_y, num_topk=2, **options)
    want = dense(values, x, np.where(mask.reshape(-1, 1), idx, -1), d_y, **options)
    close(got, want)
    np.testing.assert_allclose(got["loss"], want["loss"], 1e-5)
    assert not got["y"][~mask].any()
    assert not got["x"][~mask].any()
    np.testing.assert_array_equal(got["topk_idx"][~mask.ravel()], -1)
    np.testing.assert_array_equal(got["load"], np.bincount(idx[mask.ravel()].ravel(), minlength=8))


@pytest.mark.parametrize("groups", [(0, 0), (4, 2)], ids=["all", "limited"])
def test_shared_experts_and_groups(front, groups):
    values, x, d_y, _ = problem(**SMALL, shared=2)
    got = run_layer(front, values, x, d_y, num_topk=2, num_groups=groups[0], num_topk_groups=groups[1])
    close(got, dense(values, x, got["topk_idx"], d_y))
    if groups[0]:
        # the groups of a row's experts
        assert all(len(set(row // 2)) <= 2 for row in got["topk_idx"])


# ------------------------------------------------------------------ both frameworks


def test_frameworks_agree():
    values, x, d_y, _ = problem(**SMALL)
    found = [run_layer(front(), values, x, d_y, num_topk=2, alpha=0.1) for front in (Torch, Jax)]
    np.testing.assert_array_equal(found[0]["topk_idx"], found[1]["topk_idx"])
    np.testing.assert_array_equal(found[0]["load"], found[1]["load"])
    np.testing.assert_allclose(found[0]["loss"], found[1]["loss"], 1e-6)
    close(*found, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_of_the_layer_are_the_same_to_the_bit(dtype):
    """The frameworks' own products differ, so that both are given the same ones."""
    rows, hidden, experts, topk, alignment = 257, 256, 16, 4, 16
    rng = np.random.default_rng(5)
    size = routing_functions(Torch()).max_num_expanded_tokens(rows, topk, experts, alignment)
    logits = rng.standard_normal((rows, experts)).astype(np.float32)
    x, results, d_expanded, d_y = (rng.standard_normal((n, hidden)).astype(dtype) for n in (rows, size, size, rows))
    d_row, d_sum = rng.standard_normal(size).astype(np.float32), rng.standard_normal((1, experts)).astype(np.float32)

    def chain(front):
        m = routing_functions(front)

        def run(logits, x, results):
            gate = route(front, logits, topk)
            maps = m.fused_mapping(gate.topk_idx, num_experts=experts, alignment=alignment)
            expanded = m.expand_to_fused(x, maps.token_topk_to_pos, maps.pos_to_expert)
            y = m.reduce_fused(results, gate.topk_weights, maps.token_topk_to_pos)
            w_row = m.expand_topk_weights(gate.topk_weights, maps.token_topk_to_pos, maps.pos_to_token_topk)
            counts = m.group_count(gate.unmapped_topk_idx, experts)
            return expanded, y, w_row, gate.scores_sum, gate.topk_weights, counts, *maps

        return vjp(front, run, (logits, x, results), (d_expanded, d_y, d_row, d_sum))

    for found in zip(*(chain(front()) for front in (Torch, Jax)), strict=True):
        for a, b in zip(*found, strict=True):
            same(a, b)


# ------------------------------------------------------------------ sizes of the buffers


def test_one_compilation_for_every_routing():
    """Neither the routing nor the bias changes what was compiled."""
    from tk_jax.nn import moe

    traces = []

    @jax.jit
    def run(params, x):
        traces.append(1)
        with exact_products(jax):
            return moe(params, x, num_topk=2)

    values, x, _, _ = problem(**SMALL)
    loads = set()
    for expert in range(4):
        bias = np.zeros(8, np.float32)
        bias[expert] = 10
        y, aux = run(values | {"bias": bias}, x)
        loads.add(tuple(np.asarray(aux.load).tolist()))
        close({"y": y}, dense(values, x, np.asarray(aux.topk_idx)), ["y"])
    assert len(loads) == 4
    assert len(traces) == 1


def test_buffers_of_every_sufficient_size(front):
    """What is needed, one alignment more, and the bound give the same numbers."""
    values, x, d_y, idx = problem(**SMALL)
    need = int((-(-np.bincount(idx.ravel(), minlength=8) // 16) * 16).sum())
    want = run_layer(front, values, x, d_y, num_topk=2)
    for rows in (need, need + 16):
        got = run_layer(front, values, x, d_y, num_topk=2, num_expanded_tokens=rows)
        assert got["num_dropped"] == 0
        # on a GPU, XLA chooses the products of every size anew
        tolerance = 1e-6 if front.name == "torch" or jax.default_backend() == "cpu" else 1e-5
        close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("limit", [{"num_expanded_tokens": 56}, {"expert_capacity": 16}], ids=str)
def test_dropped_rows_are_counted_and_add_nothing(front, limit):
    values, x, d_y, idx = problem(**SMALL)
    values["bias"][3] = 10  # all rows choose expert 3
    got = run_layer(front, values, x, d_y, num_topk=2, **limit)
    idx = got["topk_idx"]
    dropped, starts, start = [], {}, 0
    for e in range(8):
        starts[e] = start
        start += -(-(idx == e).sum() // 16) * 16
    for e in range(8):
        for rank, (t, k) in enumerate(zip(*np.nonzero(idx == e), strict=True)):
            if rank >= 16 if "expert_capacity" in limit else starts[e] + rank >= 56:
                dropped.append((t, k))
    assert got["num_dropped"] == len(dropped) > 10
    close(got, dense(values, x, idx, d_y, dropped=dropped))


@pytest.mark.parametrize("weights_in", ["reduce", "swiglu"])
def test_rows_behind_the_segments_may_hold_anything(front, monkeypatch, weights_in):
    """As products on a GPU leave them, in results and in gradients of rows."""
    values, x, d_y, _ = problem(**SMALL)
    options = {"num_topk": 2, "weights_in": weights_in}
    want = run_layer(front, values, x, d_y, **options)
    if front.name == "torch":
        import torch

        from tk_torch.nn import moe as layer

        class Poison(torch.autograd.Function):
            @staticmethod
            def forward(ctx, rows, tail):
                ctx.save_for_backward(tail)
                return rows.masked_fill(tail, torch.nan)

            @staticmethod
            def backward(ctx, d_rows):
                return d_rows.masked_fill(*ctx.saved_tensors, torch.nan), None

        def product(x, w, ends):
            tail = torch.arange(x.shape[0], device=x.device)[:, None] >= ends[-1]
            return Poison.apply(plain(Poison.apply(x, tail), w, ends), tail)

    else:
        import jax.numpy as jnp

        import tk_jax.nn as layer

        @jax.custom_vjp
        def poison(rows, tail):
            return jnp.where(tail, jnp.nan, rows)

        poison.defvjp(lambda rows, tail: (poison(rows, tail), tail), lambda tail, d_rows: (jnp.where(tail, jnp.nan, d_rows), None))

        def product(x, w, sizes):
            tail = jnp.arange(x.shape[0])[:, None] >= sizes.sum()
            return poison(plain(poison(x, tail), w, sizes), tail)

    plain = layer.grouped_product
    monkeypatch.setattr(layer, "grouped_product", product)
    same_results(front, run_layer(front, values, x, d_y, **options), want)


# ------------------------------------------------------------------ edges


@pytest.mark.parametrize("weights_in", ["reduce", "swiglu"])
@pytest.mark.parametrize("shape", [(0, 64), (0, 5, 64), (3, 0, 64)], ids=str)
def test_no_rows(front, shape, weights_in):
    values, _, _, _ = problem(**SMALL)
    x = np.zeros(shape, np.float32)
    got = run_layer(front, values, x, x, num_topk=2, alpha=0.1, weights_in=weights_in)
    assert got["y"].shape == got["x"].shape == shape
    assert got["topk_idx"].shape == (0, 2)
    assert got["loss"] == 0
    assert got["num_dropped"] == 0
    assert not got["load"].any()
    for name in PARAMETERS:
        assert same_bits(got[name], np.zeros_like(values[name])), name


def test_what_does_not_fit(front):
    values, x, _, _ = problem(**SMALL)
    with pytest.raises(ValueError, match=r"moe: x: expected shape \(\.\.\., 64\), got \(\.\.\., 32\)"):
        run_layer(front, values, x[:, :32], num_topk=2)
    with pytest.raises(ValueError, match="moe: weights_in: expected 'reduce' or 'swiglu', got 'router'"):
        run_layer(front, values, x, num_topk=2, weights_in="router")
    with pytest.raises(ValueError, match="num_topk"):
        run_layer(front, values, x, num_topk=9)
