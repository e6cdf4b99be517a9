"""What the casts promise beside their bits: errors, gradients, layouts, transforms, compilation, interchange."""

import functools

import ml_dtypes
import numpy as np
import pytest
from quant_arrays import BF16, normal, same
from quant_fronts import FRONTS, QuantTorch

from tk_core import kernels
from tk_core.reference import quant as q

X = normal((32, 128), 1).astype(BF16)
F8 = np.dtype(ml_dtypes.float8_e4m3fn)
QUANTIZED = q.per_token_cast(X, "e4m3", 32)
FP4 = q.per_token_cast(X, "e2m1", 32, round_sf=True)
ROUNDED = {"round_sf": True, "use_packed_ue8m0": True}


@pytest.fixture(params=FRONTS)
def front(request):
    made = FRONTS[request.param]()
    made.jitted = False
    return made


# ------------------------------------------------------------------ errors

ERRORS = [
    ("per_token_cast", (X.astype(np.float16), "e4m3", 32), {}, "TypeError: per_token_cast: x: expected dtype bfloat16 or float32, got float16"),
    ("per_token_cast", (X[0], "e4m3", 32), {}, r"ValueError: per_token_cast: x: expected shape (M, H), got (128,)"),
    ("per_token_cast", (X, "fp8", 32), {}, "ValueError: per_token_cast: fmt: expected 'e4m3' or 'e2m1' or 'e5m6', got 'fp8'"),
    ("per_token_cast", (X, 4, 32), {}, "TypeError: per_token_cast: fmt: expected a value of type str, got 4"),
    ("per_token_cast", (X, "e4m3", 48), {}, "ValueError: per_token_cast: num_per_channels: expected 16, 32, 64 or 128, or H, got 48 with H = 128"),
    ("per_token_cast", (X, "e4m3", 32.0), {}, "TypeError: per_token_cast: num_per_channels: expected an int, got 32.0 of type float"),
    ("per_token_cast", (X[:, :96].copy(), "e4m3", 32), {}, "ValueError: per_token_cast: x: expected H a positive multiple of 64, got H = 96"),
    ("per_token_cast", (X, "e4m3", 32), {"round_sf": 1}, "TypeError: per_token_cast: round_sf: expected a bool, got 1 of type int"),
    ("per_token_cast", (X, "e4m3", 32), {"use_packed_ue8m0": True}, "ValueError: per_token_cast: use_packed_ue8m0: expected round_sf=True"),
    ("per_token_cast", (X, "e4m3", 32), {"use_e4m3_sf": True, "round_sf": True}, "ValueError: per_token_cast: use_e4m3_sf: expected neither"),
    ("per_token_cast", (X, "e4m3", 32, (1, 32)), {}, "ValueError: per_token_cast: x_block_size: expected None"),
    ("per_token_cast", (QUANTIZED, "e4m3", 32), {}, "ValueError: per_token_cast: x_block_size: expected the block size"),
    ("per_token_cast", (QUANTIZED, "e4m3", 32, (1, 64)), {}, "ValueError: per_token_cast: x_block_size: expected (1, 32) or"),
    ("per_token_cast", (QUANTIZED, "e4m3", 32, (1, 128)), {}, "ValueError: per_token_cast: x[1]: expected shape (32, 1), got (32, 4)"),
    ("per_token_cast", (QUANTIZED, "e4m3", 32, 32), {}, "TypeError: per_token_cast: x_block_size: expected a pair of ints"),
    ("per_token_cast", ((X, QUANTIZED[1]), "e4m3", 32, (1, 32)), {}, "TypeError: per_token_cast: x[0]: expected dtype float8_e4m3fn or int8, got bfloat16"),
    ("per_token_cast", ((QUANTIZED[0], X), "e4m3", 32, (1, 32)), {}, "TypeError: per_token_cast: x[1]: expected dtype float32 or int32 or"),
    ("per_token_cast", ((QUANTIZED[0],), "e4m3", 32, (1, 32)), {}, "TypeError: per_token_cast: x: expected a pair (data, scales), got 1 items"),
    ("per_token_cast", ("x", "e4m3", 32), {}, "TypeError: per_token_cast: x: expected an array, got str"),
    ("per_token_cast", (X, "e5m6", 64), {}, "ValueError: per_token_cast: num_per_channels: expected H = 128 with fmt 'e5m6', got 64"),
    ("per_token_cast", (X, "e5m6", 128), {"stochastic_cast": True}, "ValueError: per_token_cast: stochastic_cast: expected False with fmt"),
    ("per_token_cast", (X, "e5m6", 128), {"use_e4m3_sf": True}, "ValueError: per_token_cast: use_e4m3_sf: expected False with fmt"),
    ("per_token_cast", (X, "e4m3", 32), {"stochastic_cast": True, "seed": 1.5}, "TypeError: per_token_cast: seed: expected an int, got 1.5"),
    ("per_token_cast_with_sf_only", (X, "e5m6", 128), {}, "ValueError: per_token_cast_with_sf_only: fmt: expected 'e4m3' or 'e2m1'"),
    ("per_token_cast_with_sf_only", (X, "e4m3", 32, True), {}, "TypeError: per_token_cast_with_sf_only: x_block_size: expected None: pass use_tma"),
    ("per_token_cast_with_sf_only", (X, "e4m3", 32, (1, 32)), {}, "ValueError: per_token_cast_with_sf_only: x_block_size: expected None, got"),
    ("per_token_cast_with_precomputed_sf", (X, "e4m3", 32, QUANTIZED[1], True), {}, "TypeError: per_token_cast_with_precomputed_sf: x_block_size"),
    ("per_token_cast_with_precomputed_sf", (X, "e4m3", 64, QUANTIZED[1]), {}, "ValueError: per_token_cast_with_precomputed_sf: sf: expected shape (32, 2)"),
    ("per_token_cast_with_precomputed_sf", (X, "e4m3", 32, QUANTIZED[1]), ROUNDED, "ValueError: per_token_cast_with_precomputed_sf: use_packed_ue8m0"),
    ("per_token_cast_with_precomputed_sf", (X, "e4m3", 32, QUANTIZED[1]), {"use_e4m3_sf": True}, "TypeError: per_token_cast_with_precomputed_sf: sf: expected dtype float8_e4m3fn"),
    ("per_token_cast_to_e5m6", (X, 64), {}, "ValueError: per_token_cast_to_e5m6: num_per_channels: expected H = 128"),
    ("per_block_cast", (X, "e4m3", (64, 128)), {}, "ValueError: per_block_cast: block_size: expected 32 or 128 tokens and channels, got (64, 128)"),
    ("per_block_cast", (X, "e5m6", (32, 32)), {}, "ValueError: per_block_cast: fmt: expected 'e4m3' or 'e2m1'"),
    ("per_block_cast", (X, "e4m3", (32, 32, 1)), {}, "ValueError: per_block_cast: block_size: expected a pair of ints"),
    ("per_block_cast_with_precomputed_sf", (X, "e4m3", (32, 32), QUANTIZED[1]), {}, "ValueError: per_block_cast_with_precomputed_sf: sf: expected shape (1, 4)"),
    ("per_block_cast_lossless", (QUANTIZED, "e4m3", (1, 32), (1, 128)), {}, "TypeError: per_block_cast_lossless: x[0]: expected dtype int8"),
    ("per_block_cast_lossless", (FP4, "e2m1", (1, 32), (1, 128)), {}, "ValueError: per_block_cast_lossless: fmt: expected 'e4m3'"),
    ("per_block_cast_lossless", (FP4, "e4m3", (1, 32), (1, 16)), {}, "ValueError: per_block_cast_lossless: out_block_size: expected a multiple of"),
    ("per_channel_cast", (X, "e4m3", 32), {}, "ValueError: per_channel_cast: x: expected M a multiple of 128, got M = 32"),
    ("per_channel_cast", (X, "e2m1", 32), {}, "ValueError: per_channel_cast: fmt: expected 'e4m3', got 'e2m1'"),
    ("per_channel_cast", (X, "e4m3", 64), {}, "ValueError: per_channel_cast: num_per_tokens: expected 32 or 128, got 64"),
    ("per_channel_cast_fused", (X, "e4m3", 32), {}, "ValueError: per_channel_cast_fused: num_per_tokens: expected 128, got 32"),
    ("per_channel_cast_fused", (X, "e4m3", 128), {"pos_to_token": np.zeros(16, np.int8)}, "TypeError: per_channel_cast_fused: pos_to_token: expected dtype int32, got int8"),
    ("per_channel_cast_fused", (X, "e4m3", 128), {"pos_to_token": np.zeros(17, np.int32)}, "ValueError: per_channel_cast_fused: pos_to_token: expected Mo a multiple of 16, got Mo = 17"),
    ("per_channel_cast_and_transpose", (X.astype(np.float32), "e4m3", 32), {}, "TypeError: per_channel_cast_and_transpose: x: expected dtype bfloat16, got float32"),
    ("cast_back", (QUANTIZED, "fp16", (1, 32)), {}, "ValueError: cast_back: fmt: expected 'bf16' or 'fp32', got 'fp16'"),
    ("cast_back", (QUANTIZED, "bf16", (2, 32)), {}, "ValueError: cast_back: x_block_size: expected 1, 32 or 128 tokens"),
    ("cast_back", (QUANTIZED, "bf16", (1, 32), "e4m3"), {}, "ValueError: cast_back: x_special_fmt: expected 'e5m6', got 'e4m3'"),
    ("cast_back", (X, "bf16", (1, 32)), {}, "TypeError: cast_back: x: expected a pair (data, scales), got"),
    ("cast_back", ((np.zeros((2, 96), np.uint8), np.ones((2, 1), np.float32)), "bf16", (1, 64)), {}, "TypeError: cast_back: x[0]: expected dtype float8_e4m3fn or int8, or uint8 with"),
    ("per_token_cast_back", (QUANTIZED, "bf16", (1, 32)), {}, "TypeError: per_token_cast_back: num_per_channels: expected an int"),
    ("fake_quant", (X, "e5m6", 128), {}, "ValueError: fake_quant: fmt: expected 'e4m3' or 'e2m1'"),
    ("fake_quant", (normal((4, 192), 0), "e4m3", 128), {}, "ValueError: fake_quant: num_per_channels: expected a divisor of H = 192, got 128"),
    ("fake_quant", (X, "e4m3", 32), {"round_sf": True, "use_e4m3_sf": True}, "ValueError: fake_quant: use_e4m3_sf: expected neither"),
    ("cast", (X.astype(np.int32), "bf16"), {}, "TypeError: cast: x: expected dtype bfloat16 or float32 or float8_e4m3fn, got int32"),
    ("pack_to_e2m1fn_x2", (np.zeros((2, 3), np.int32),), {}, "ValueError: pack_to_e2m1fn_x2: codes: expected a last axis of even length, got (2, 3)"),
    ("unpack_from_e2m1fn_x2", (np.zeros((), np.int8),), {}, "ValueError: unpack_from_e2m1fn_x2: x: expected at least one axis, got ()"),
    ("unpack_from_e2m1fn_x2", (X,), {}, "TypeError: unpack_from_e2m1fn_x2: x: expected dtype int8 or uint8, got bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "args", "named", "text"), ERRORS, ids=range(len(ERRORS)))
def test_errors_say_the_same(front, name, args, named, text):
    if name == "cast":
        args = (args[0], front.torch.bfloat16 if front.name == "torch" else "bfloat16")
    kind, _, message = text.partition(": ")
    with pytest.raises({"TypeError": TypeError, "ValueError": ValueError}[kind]) as info:
        front.quant(name, *args, **named)
    assert str(info.value).startswith(message)


def test_clamps_are_judged():
    from tk_core.config import get_amax_clamp_for_quant, set_amax_clamp_for_quant

    assert [get_amax_clamp_for_quant(f, s) for f in ("e4m3", "e2m1") for s in (False, True)] == [1e-4, 0.875, 6 * 2.0**-126, 6 * 2.0**-9]
    for args, kind in (
        (("e5m6", False, 1.0), ValueError),
        (("e4m3", False, 447 * 2.0**-126), ValueError),
        (("e2m1", True, 5 * 2.0**-9), ValueError),
        (("e4m3", False, float("inf")), ValueError),
        (("e4m3", False, float("nan")), ValueError),
        (("e4m3", 0, 1.0), TypeError),
        (("e4m3", False, "1"), TypeError),
    ):
        with pytest.raises(kind, match="set_amax_clamp_for_quant: "):
            set_amax_clamp_for_quant(*args)


# ------------------------------------------------------------------ torch


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def tq():
    return pytest.importorskip("tk_torch.quant")


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


@pytest.mark.parametrize(
    ("sf", "size", "flags", "outs", "text"),
    [
        ([np.ones((1, 1), np.float64)], 128, [False], [None], r"TypeError: sf\[0\]: expected dtype float32"),
        ([np.ones((1,), np.float32)], 128, [False], [None], r"ValueError: sf\[0\]: expected shape"),
        ([np.ones((1, 1), np.float32)], 32, [False], [None], r"ValueError: sf\[0\]: expected a weight of multiples of 128"),
        ([np.ones((1, 1), np.float32)], 64, [False], [None], r"ValueError: block_size: expected 32 or 128"),
        ([np.ones((1, 1), np.float32)], 128, [], [None], r"ValueError: transpose_sf1s: expected 1 entries"),
        ([np.ones((1, 1), np.float32)], 128, [0], [None], r"TypeError: transpose_sf1s\[0\]: expected a bool"),
        ([np.ones((1, 1), np.float32)], 128, [False], [], r"ValueError: outs: expected 1 entries"),
        ([np.ones((1, 1), np.float32)], 128, [False], [1], r"TypeError: outs\[0\]: expected None or a pair"),
        ([np.full((1, 1), 3, np.float32)], 128, [False], [None], r"ValueError: sf\[0\]: expected powers of two"),
    ],
)
def test_errors_of_weights(torch, tq, sf, size, flags, outs, text):
    kind, _, message = text.partition(": ")
    with pytest.raises({"TypeError": TypeError, "ValueError": ValueError}[kind], match="batched_transpose_weight_sf: " + message):
        tq.batched_transpose_weight_sf([torch.from_numpy(s) for s in sf], size, flags, outs, check=True)


# ------------------------------------------------------------------ jax


@pytest.fixture
def jax():
    return pytest.importorskip("jax")


@pytest.fixture
def jq():
    return pytest.importorskip("tk_jax.quant")


def test_differentiating_a_cast_in_jax_raises(jax, jq):
    x = jax.numpy.asarray(normal((8, 128), 0))
    for call in (
        lambda x: jq.per_token_cast(x, "e4m3", 32)[1].sum(),
        lambda x: jq.per_block_cast(x, "e2m1", (32, 32))[1].sum(),
        lambda x: jq.per_token_cast_and_cast_back(x, "e4m3", 32).sum(),
        lambda x: jq.per_token_cast(x, "e4m3", 32, None, True)[1].sum(),
    ):
        for transform in (jax.grad, lambda f: jax.grad(jax.jit(f)), lambda f: lambda x: jax.jvp(f, (x,), (x,))):
            with pytest.raises(NotImplementedError, match="the gradient is not implemented; fake_quant has a straight-through one"):
                transform(call)(x)
    stopped = jax.grad(lambda x: (x * jq.per_token_cast(jax.lax.stop_gradient(x), "e4m3", 32)[1].sum()).sum())(x)
    assert np.isfinite(np.asarray(stopped)).all()


def test_straight_through_in_jax(jax, jq):
    x = jax.numpy.asarray(normal((8, 128), 0))
    g = jax.numpy.asarray(normal((8, 128), 1))
    same(np.asarray(jax.vjp(lambda x: jq.fake_quant(x, "e4m3", 32), x)[1](g)[0]), np.asarray(g))
    low = jax.vjp(lambda x: jq.cast(x, jax.numpy.bfloat16), x)[1](g.astype("bfloat16"))[0]
    assert low.dtype == np.float32
    twice = jax.grad(lambda x: jax.grad(lambda x: (jq.fake_quant(x, "e4m3", 32) ** 2).sum())(x).sum())(x)
    assert (np.asarray(twice) == 2).all()
    batched = jax.vmap(jax.grad(lambda row: (jq.fake_quant(row[None], "e4m3", 32) ** 2).sum()))(x)
    same(np.asarray(batched), 2 * np.asarray(jq.fake_quant(x, "e4m3", 32)))


def test_vmap_of_jax(jax, jq):
    x = jax.numpy.asarray(normal((3, 5, 128), 0))
    for call in (
        lambda t: jq.per_token_cast(t, "e4m3", 32),
        lambda t: jq.per_token_cast(t, "e2m1", 32, None, True, True, True),
        lambda t: jq.per_token_cast(t, "e4m3", 32, stochastic_cast=True, seed=3),
        lambda t: jq.per_block_cast(t, "e4m3", (32, 32)),
        lambda t: (jq.cast_back(jq.per_token_cast(t, "e4m3", 32), "bf16", (1, 32)),),
    ):
        got = jax.jit(jax.vmap(call))(x)
        for i in range(3):
            for a, b in zip(got, call(x[i]), strict=True):
                same(np.asarray(a[i]), np.asarray(b))


def test_shard_map_and_sharded_rows(jax, jq):
    mesh = jax.make_mesh((8,), ("d",))
    spec = jax.sharding.PartitionSpec("d")
    x = jax.numpy.asarray(normal((32, 128), 0))
    want = jq.per_token_cast(x, "e4m3", 32)
    put = functools.partial(jax.device_put, device=jax.sharding.NamedSharding(mesh, spec))
    split = jax.shard_map(lambda t: jq.per_token_cast(t, "e4m3", 32), mesh=mesh, in_specs=spec, out_specs=spec)
    for a, b in zip(jax.jit(split)(put(x)), want, strict=True):
        same(np.asarray(a), np.asarray(b))
    blocks = jax.shard_map(lambda t: jq.per_block_cast(t, "e4m3", (32, 32)), mesh=mesh, in_specs=spec, out_specs=spec)
    x8 = jax.numpy.asarray(normal((256, 128), 0))
    for a, b in zip(jax.jit(blocks)(put(x8)), jq.per_block_cast(x8, "e4m3", (32, 32)), strict=True):
        same(np.asarray(a), np.asarray(b))
    placed = put(x)
    step = jax.jit(lambda t: jq.cast_back(jq.per_token_cast(t, "e4m3", 32), "bf16", (1, 32)))
    same(np.asarray(step(placed)), np.asarray(step(x)))
    assert "all-gather" not in step.lower(placed).compile().as_text()


def test_seed_is_an_operand(jax, jq):
    x = jax.numpy.asarray(normal((8, 128), 0))
    traces = []

    @jax.jit
    def step(x, seed):
        traces.append(1)
        return jq.per_token_cast(x, "e4m3", 32, stochastic_cast=True, seed=seed)[0]

    for seed in range(3):
        same(np.asarray(step(x, np.uint32(seed))), np.asarray(jq.per_token_cast(x, "e4m3", 32, stochastic_cast=True, seed=seed)[0]))
    assert len(traces) == 1


def test_a_donated_array_is_rounded_in_place(jax, jq):
    x = jax.numpy.asarray(normal((8, 128), 0))
    step = jax.jit(lambda t: jq.per_token_cast_and_cast_back(t, "e4m3", 32), donate_argnums=0)
    text = step.lower(x).compile().as_text()
    assert "input_output_alias={ {}: (0, {}" in text
    want = np.asarray(jq.fake_quant(x, "e4m3", 32))
    kept = np.asarray(x).copy()
    same(np.asarray(jq.per_token_cast_and_cast_back(x, "e4m3", 32)), want)
    same(np.asarray(x), kept)
    same(np.asarray(step(x)), want)


def test_logical_scales(jax, jq):
    x = jax.numpy.asarray(normal((5, 576), 0))
    data, sf = jq.per_token_cast(x, "e4m3", 128, None, True)
    assert sf.shape == (5, 8)
    same(np.asarray(jq.sf_logical(sf, 5)), np.asarray(jq.per_token_cast(x, "e4m3", 128)[1]))
    same(
        np.asarray(jq.cast_back((data, sf), "fp32", (1, 128), x_sf_col_major=True)),
        np.asarray(jq.cast_back((data, sf.T[:5]), "fp32", (1, 128))),
    )
    with pytest.raises(ValueError, match="sf_logical: R: expected 0 to 8, got 9"):
        jq.sf_logical(sf, 9)


def test_weights_in_jax(jax, jq):
    rng = np.random.default_rng(3)
    sf = [np.exp2(rng.integers(-20, 20, s)).astype(np.float32) for s in ((3, 5), (2, 4, 8), (1, 1))]
    got = jq.batched_transpose_weight_sf([jax.numpy.asarray(s) for s in sf], 128)
    for pair, want in zip(got, q.batched_transpose_weight_sf(sf, 128), strict=True):
        for a, b in zip(pair, want, strict=True):
            same(np.asarray(a), np.ascontiguousarray(np.swapaxes(b, -1, -2)))


# ------------------------------------------------------------------ other libraries


def test_microscaling_views(torch, tq):
    """Row-major packed scales are plain E8M0 scales, and data are elements of the MX formats."""
    x = torch.randn(16, 256)
    data, sf = tq.per_token_cast(x, "e4m3", 32, round_sf=True, use_packed_ue8m0=True)
    scales = sf.view(torch.float8_e8m0fnu)
    assert scales.shape == (16, 8)
    product = data.float().unflatten(-1, (8, 32)) * scales.float().unsqueeze(-1)
    assert torch.equal(product.flatten(-2), tq.cast_back((data, sf), "fp32", (1, 32)))


def test_dlpack_both_ways(torch, tq, jax, jq):
    x = torch.randn(16, 256)
    data, sf = tq.per_token_cast(x, "e4m3", 128)
    there = jax.dlpack.from_dlpack(data), jax.dlpack.from_dlpack(sf)
    same(np.asarray(jq.cast_back(there, "fp32", (1, 128))), tq.cast_back((data, sf), "fp32", (1, 128)).numpy())
    back = tuple(torch.from_dlpack(a) for a in jq.per_token_cast(jax.numpy.asarray(x.numpy()), "e4m3", 128))
    assert torch.equal(back[0].view(torch.uint8), data.view(torch.uint8))
    assert torch.equal(back[1], sf)
    fp4, sf4 = tq.per_token_cast(x, "e2m1", 32, round_sf=True)
    bits = jax.dlpack.from_dlpack(fp4)
    assert bits.dtype == np.int8
    same(np.asarray(jq.cast_back((bits, jax.dlpack.from_dlpack(sf4)), "fp32", (1, 32))), tq.cast_back((fp4, sf4), "fp32", (1, 32)).numpy())
    native = jq.unpack_from_e2m1fn_x2(bits).astype("float4_e2m1fn")
    packed = jax.lax.bitcast_convert_type(native.reshape(16, 128, 2), "uint8")
    same(np.asarray(packed).view(np.int8), fp4.numpy())


def test_deep_gemm_scales(torch, tq):
    """1 x 128 scales column-major with strides (1, align(M, 4)), 128 x 128 scales row-major, and weight scales by rows."""
    a, sa = tq.per_token_cast(torch.randn(13, 256), "e4m3", 128, None, True)
    assert sa.shape == (13, 2)
    assert sa.stride() == (1, 16)
    assert a.is_contiguous()
    w = torch.randn(256, 256)
    b, sb = tq.per_block_cast(w, "e4m3", (128, 128), round_sf=True)
    assert sb.shape == (2, 2)
    assert sb.is_contiguous()
    ((sf0, sf1),) = tq.batched_transpose_weight_sf([sb], 128, [False], [None])
    assert sf0.stride() == (1, 256)
    assert sf1.stride() == (1, 256)
    assert torch.equal(tq.cast_back((b, sf0), "fp32", (1, 128)), tq.cast_back((b, sb), "fp32", (128, 128)))
    turned = b.view(torch.uint8).t().contiguous().view(torch.float8_e4m3fn)
    assert torch.equal(tq.cast_back((turned, sf1), "fp32", (1, 128)), tq.cast_back((b, sb), "fp32", (128, 128)).t())


def test_public_names():
    """Every name of the area, with a docstring of all sections."""
    import inspect

    from tk_jax import quant as jax_quant
    from tk_torch import quant as torch_quant

    for module in (torch_quant, jax_quant):
        for name in module.__all__:
            if name != "QuantTensor":
                text = inspect.getdoc(getattr(module, name))
                assert all(section in (text or "") for section in ("Args:", "Returns:", "Raises:") if not name.startswith("set_")), name
    assert set(jax_quant.__all__) - set(torch_quant.__all__) == {"sf_logical"}
