"""What the casts promise in PyTorch beside their bits: gradients, layouts, transforms, compilation."""

import numpy as np
import pytest
from quant_arrays import same
from quant_fixtures import torch, tq  # noqa: F401 - fixtures
from quant_fronts import QuantTorch

from tk_core import kernels
from tk_core.reference import quant as q


def test_no_gradient_but_of_fake_quant_and_cast(torch, tq):
    x = torch.randn(8, 128, requires_grad=True)
    for out in (*tq.per_token_cast(x, "e4m3", 32), tq.per_token_cast_with_sf_only(x, "e4m3", 32), *tq.per_block_cast(x, "e4m3", (32, 32))):
        assert not out.requires_grad
        assert out.grad_fn is None
    g = torch.randn(8, 128)
    (dx,) = torch.autograd.grad(tq.fake_quant(x, "e4m3", 32), x, g)
    assert torch.equal(dx, g)
    (dx,) = torch.autograd.grad(tq.cast(x, torch.bfloat16), x, g.bfloat16())
    assert torch.equal(dx, g.bfloat16().float())
    assert dx.dtype == torch.float32
    y = tq.fake_quant(x, "e4m3", 32)
    (first,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, torch.full_like(x, 2.0))
    with pytest.raises(RuntimeError, match=r"per_token_cast_and_cast_back: x: .*fake_quant"):
        tq.per_token_cast_and_cast_back(x, "e4m3", 32)
    with torch.no_grad():
        expected = tq.fake_quant(x, "e4m3", 32)
        tq.per_token_cast_and_cast_back(x, "e4m3", 32)
        assert torch.equal(x, expected)


def test_in_place_leaves_the_rest_of_a_buffer(torch, tq):
    buffer = torch.randn(9, 256)
    whole = buffer.clone()
    kernels.reset_stats()
    tq.per_token_cast_and_cast_back(buffer[:, :128], "e4m3", 64)
    assert kernels.stats()["copies"] == 0
    assert torch.equal(buffer[:, 128:], whole[:, 128:])
    assert torch.equal(buffer[:, :128], tq.fake_quant(whole[:, :128].contiguous(), "e4m3", 64))
    with pytest.raises(ValueError, match="dense rows to write to"):
        tq.per_token_cast_and_cast_back(torch.randn(256, 8).t()[:, :128], "e4m3", 64)
    x = torch.randn(4, 128)
    version = x._version
    tq.per_token_cast_and_cast_back(x, "e4m3", 64)
    assert x._version > version


def test_layouts_and_copies(torch, tq):
    """Rows that lie apart go straight to the kernel; anything else is copied once."""
    x = torch.randn(16, 256)
    want = tq.per_token_cast(x[:, :128].contiguous(), "e4m3", 32)
    for view, copies in ((x[:, :128], 0), (torch.randn(16, 130)[:, :128].copy_(x[:, :128]), 1), (x[:, :128].t().contiguous().t(), 1)):
        kernels.reset_stats()
        got = tq.per_token_cast(view, "e4m3", 32)
        assert kernels.stats()["copies"] == copies
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, want, strict=True))
    odd = torch.empty(16 * 128 + 1, dtype=torch.bfloat16)[1:].view(16, 128).copy_(x[:, :128])
    assert torch.equal(tq.per_token_cast(odd, "e4m3", 32)[1], tq.per_token_cast(odd.clone(), "e4m3", 32)[1])


def test_slices_of_column_major_scales(torch, tq):
    data, sf = tq.per_token_cast(torch.randn(256, 256), "e4m3", 128, None, True)
    kernels.reset_stats()
    got = tq.cast_back((data[128:], sf[128:]), "bf16", (1, 128))
    assert kernels.stats()["copies"] == 0
    assert torch.equal(got, tq.cast_back((data, sf), "bf16", (1, 128))[128:])
    other = tq.per_channel_cast((data[128:], sf[128:]), "e4m3", 128, False, 128)
    again = tq.per_channel_cast((data[128:].clone(), sf[128:].contiguous()), "e4m3", 128, False, 128)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(other, again, strict=True))


def test_results_that_the_caller_provides(torch, tq):
    x = torch.randn(8, 128)
    data, sf = tq.per_token_cast(x, "e4m3", 32)
    mine = torch.empty_like(data), torch.empty_like(sf)
    got = tq.per_token_cast(x, "e4m3", 32, out=mine)
    assert got[0] is mine[0]
    assert got[1] is mine[1]
    assert torch.equal(got[1], sf)
    assert torch.equal(got[0].float(), data.float())
    got = tq.per_token_cast(x, "e4m3", 32, out=(None, mine[1]))
    assert got[1] is mine[1]
    assert torch.equal(got[0].float(), data.float())
    assert tq.per_token_cast_with_sf_only(x, "e4m3", 32, out_sf=mine[1]) is mine[1]
    assert tq.per_token_cast_with_precomputed_sf(x, "e4m3", 32, sf, out=mine[0]) is mine[0]
    assert tq.per_block_cast(x, "e2m1", (32, 32), out=(torch.empty(8, 64, dtype=torch.int8), None))[1].shape == (1, 4)
    for out, kind, text in (
        ((mine[0][:4], None), ValueError, r"out\[0\]: expected shape \(8, 128\)"),
        ((None, mine[1].double()), TypeError, r"out\[1\]: expected dtype float32"),
        (mine[0], TypeError, "out: expected a pair"),
        ((torch.empty(8, 256, dtype=torch.float8_e4m3fn)[:, :128], None), ValueError, "contiguous"),
    ):
        with pytest.raises(kind, match=text):
            tq.per_token_cast(x, "e4m3", 32, out=out)
    with pytest.raises(ValueError, match="out: expected None with use_tma"):
        tq.per_token_cast(x, "e4m3", 32, use_tma_aligned_col_major_sf=True, out=mine)


def test_fp4_of_torch_is_an_alias(torch, tq):
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("torch without FP4")
    data, sf = tq.per_token_cast(torch.randn(8, 128), "e2m1", 32)
    assert torch.equal(tq.cast_back((data.view(torch.float4_e2m1fn_x2), sf), "fp32", (1, 32)), tq.cast_back((data, sf), "fp32", (1, 32)))


def test_operators(torch, tq):
    """The contract of torch operators, by torch's own checker."""
    from torch.library import opcheck

    from tk_core.ops.quant import cast, cast_back, channels, elementwise, lossless
    from tk_torch.library import bind

    x = torch.randn(128, 128)
    for op, tensors, attrs in (
        (cast.quantize_rows, [x, None], {"fmt": "e2m1", "block_k": 32}),
        (cast.quantize, [x, None, None, None], {"block_m": 32, "block_k": 32, "col": True}),
        (cast.fake_quant, [x.clone().requires_grad_()], {}),
        (channels.quantize_channels, [x, None, None], {}),
        (cast_back.dequantize_rows, list(tq.per_token_cast(x, "e4m3", 128)), {}),
        (lossless.recast_lossless, list(tq.per_token_cast(x, "e2m1", 32, round_sf=True)), {}),
        (elementwise.cast_elements, [x], {}),
    ):
        forward = bind(op).forward
        args = forward._pack(tensors, op.forward.attributes(attrs), forward.all)
        # torch's schema checker multiplies by zero, which there is no FP8 kernel for
        fp8 = torch.float8_e4m3fn in [
            t.dtype for t in (*tensors, *forward.run(tensors, op.forward.attributes(attrs), forward.all)) if t is not None
        ]
        opcheck(forward.operator, args, test_utils=("test_faketensor", *(() if fp8 else ("test_schema", "test_aot_dispatch_dynamic"))))


def test_compiles_without_a_break(torch, tq):
    graphs = []

    def backend(module, _):
        graphs.append([n.target for n in module.graph.nodes if n.op == "call_function"])
        return module

    def step(x, seed):
        data, sf = tq.per_token_cast(x, "e4m3", 32, None, True, True, True)
        y = tq.cast_back((data, sf), "bf16", (1, 32))
        z = tq.per_token_cast(x, "e2m1", 32, stochastic_cast=True, seed=seed)[0]
        return data, sf, y, z, tq.fake_quant(x, "e4m3", 32)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for rows, seed in ((2, 1), (9, 2), (13, 3)):
        x = torch.randn(rows, 128)
        for a, b in zip(compiled(x, seed), step(x, seed), strict=True):
            assert a.shape == b.shape
            assert a.stride() == b.stride()
            assert bits(a.clone()) == bits(b.clone())
    assert len(graphs) <= 2
    assert any(str(t) == "tk.quantize.default" for t in graphs[0])


def test_gradient_and_mutation_under_compile(torch, tq):
    x = torch.randn(6, 128, requires_grad=True)

    def loss(x):
        return (tq.fake_quant(x, "e4m3", 32) * 3).sum()

    (dx,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), x)
    assert torch.equal(dx, torch.full_like(x, 3.0))

    def change(x):
        y = x * 1
        tq.per_token_cast_and_cast_back(y, "e4m3", 32)
        return y

    with torch.no_grad():
        assert torch.equal(torch.compile(change, fullgraph=True, backend="aot_eager")(x), tq.fake_quant(x, "e4m3", 32))


def bits(t):
    return t.reshape(-1).contiguous().numpy().tobytes() if t.dtype.itemsize == 4 else bytes(t.reshape(-1).contiguous().untyped_storage())


def test_vmap_of_torch(torch, tq):
    x = torch.randn(3, 5, 128)
    for call in (
        lambda t: tq.per_token_cast(t, "e4m3", 32),
        lambda t: tq.per_token_cast(t, "e2m1", 32, None, True, True, True),
        lambda t: tq.per_token_cast(t, "e4m3", 32, stochastic_cast=True, seed=3),
        lambda t: tq.per_block_cast(t, "e4m3", (32, 32)),
        lambda t: (tq.fake_quant(t, "e4m3", 32),),
        lambda t: (tq.cast(t, torch.bfloat16),),
    ):
        got = torch.vmap(call)(x)
        for i in range(3):
            for a, b in zip(got, call(x[i]), strict=True):
                assert bits(a[i].clone()) == bits(b.clone())
    g = torch.func.vmap(torch.func.grad(lambda t: tq.fake_quant(t, "e4m3", 32).square().sum()))(x)
    assert torch.equal(g, 2 * torch.vmap(lambda t: tq.fake_quant(t, "e4m3", 32))(x))


def test_no_row_count_compiles_anything(torch, tq):
    def step(x):
        pair = tq.per_token_cast(x, "e4m3", 32, None, True, True, True)
        return tq.cast_back(pair, "bf16", (1, 32)), tq.per_block_cast(x, "e4m3", (32, 32)), tq.fake_quant(x, "e4m3", 32)

    step(torch.randn(3, 128))
    kernels.reset_stats()
    for rows in np.random.default_rng(0).integers(1, 3000, 60):
        step(torch.randn(int(rows), 128))
    assert kernels.stats()["compiles"] == kernels.stats()["loads"] == 0


def test_other_seeds_are_no_other_plans(torch, tq):
    from tk_core.ops.quant import cast
    from tk_torch.library import bind

    x = torch.randn(4, 128)
    runner = bind(cast.quantize).forward.runner
    first, _ = (tq.per_token_cast(x, "e4m3", 32, stochastic_cast=True, seed=s)[0] for s in (0, 1))
    before = len(runner._plans)
    others = [tq.per_token_cast(x, "e4m3", 32, stochastic_cast=True, seed=s)[0] for s in range(2, 20)]
    assert len(runner._plans) == before
    assert any(not torch.equal(first.view(torch.uint8), o.view(torch.uint8)) for o in others)


def test_weights(torch, tq):
    rng = np.random.default_rng(3)
    front = QuantTorch()

    def powers(*shape):
        return np.exp2(rng.integers(-20, 20, shape)).astype(np.float32)

    for b, shapes in ((128, [(3, 5), (2, 4, 8), (1, 1)]), (32, [(4, 8), (3, 4, 20), (12, 4)])):
        sf = [powers(*s) for s in shapes]
        flags = [True, False, False]
        want = q.batched_transpose_weight_sf(sf, b, flags)
        tensors = [front.array(s) for s in sf]
        got = tq.batched_transpose_weight_sf(tensors, b, flags, [None] * 3)
        for (a0, a1), (b0, b1) in zip(got, want, strict=True):
            assert tuple(s * 4 for s in a0.stride()) == b0.strides or 1 in b0.shape
            same(np.ascontiguousarray(a0.numpy()), np.ascontiguousarray(b0))
            same(np.ascontiguousarray(a1.numpy()), np.ascontiguousarray(b1))
        mine = [tuple(t.clone(memory_format=torch.preserve_format).zero_() for t in pair) for pair in got]
        again = tq.batched_transpose_weight_sf(tensors, b, flags, mine)
        assert all(a is m for pair, own in zip(again, mine, strict=True) for a, m in zip(pair, own, strict=True))
        assert all(torch.equal(a, g) for pair, own in zip(mine, got, strict=True) for a, g in zip(pair, own, strict=True))
    assert tq.batched_transpose_weight_sf([], 128, [], []) == []
    many = [front.array(powers(2, 3)) for _ in range(21)]
    got = tq.batched_transpose_weight_sf(many, 128, [False] * 21, [None] * 21)
    for t, pair in zip(many, got, strict=True):
        for a, b in zip(pair, q.batched_transpose_weight_sf([t.numpy()], 128)[0], strict=True):
            same(np.ascontiguousarray(a.numpy()), np.ascontiguousarray(b))
