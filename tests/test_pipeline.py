"""The pipeline of a sub-layer, the modules, and the channels for gradients, in both front ends."""

import numpy as np
import pytest
import torch
from frontends import Jax, Torch, same_bits

from tk_core.bench import eager
from tk_core.layers import hyper_connection_init, hyper_head_init
from tk_torch import mhc, nn

pytestmark = pytest.mark.anywhere
N, H = 4, 128
DEVICE = Torch().device


def parameters(seed=0, head=False, weight=True):
    """Larger than a fresh model's, so that every gradient matters."""
    values = (hyper_head_init if head else hyper_connection_init)(N, H, seed, fn_std=0.05, **({} if head else {"diagonal": 1.0}))
    rng = np.random.default_rng(seed)
    values["scale"] = values["scale"] * 0 + 0.7
    values["norm_weight"] = (1 + 0.1 * rng.standard_normal(N * H)).astype(np.float32)
    if not weight:
        values["norm_weight"] = None
    return values


def tensor(a, grad=False):
    t = Torch().array(np.asarray(a)) if a is not None else None
    return t.requires_grad_() if grad and t is not None else t


def bf16(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("bfloat16")


def pre_fp64(residual, fn, scale, base, weight, rho=2.0, repeat=20):
    mixes = eager.mhc_pre_norm_fn(residual, fn, weight, 1e-6)
    pre, post, comb = eager.mhc_pre_split_mixes(mixes, scale, base, N, rho, 1e-6)
    return eager.mhc_pre_apply_mix(residual, pre), post, eager.sinkhorn_normalize(comb, repeat, 1e-6)


@pytest.fixture
def fp64(monkeypatch):
    """The eager formulas without their casts to fp32."""
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self)


@pytest.mark.parametrize("weight", [True, False])
def test_forward_is_the_same_with_and_without_gradients_and_in_both_frameworks(weight):
    from tk_jax import mhc as jax_mhc

    values, residual = parameters(weight=weight), bf16(2, 9, N, H)
    options = {"post_mult_value": 2.0, "sinkhorn_repeat": 20}
    args = [values[k] for k in ("fn", "scale", "base")]
    plain = mhc.mhc_pre(tensor(residual), *map(tensor, args), norm_weight=tensor(values["norm_weight"]), **options)
    graph = mhc.mhc_pre(
        tensor(residual, True), *(tensor(a, True) for a in args), norm_weight=tensor(values["norm_weight"], True), **options
    )
    jax_front = Jax()
    other = jax_front.jax.jit(lambda r, a, w: jax_mhc.mhc_pre(r, *a, norm_weight=w, **options))(residual, args, values["norm_weight"])
    for a, b, c in zip((plain[0], *plain[1]), (graph[0], *graph[1]), (other[0], *other[1]), strict=True):
        assert torch.equal(a, b.detach())
        assert same_bits(Torch().numpy(a), np.asarray(c))
    head = parameters(1, head=True, weight=weight)
    args = [head[k] for k in ("fn", "scale", "base")]
    ours = mhc.mhc_head(tensor(residual), *map(tensor, args), norm_weight=tensor(head["norm_weight"]))
    theirs = jax_mhc.mhc_head(residual, *args, norm_weight=head["norm_weight"])
    assert same_bits(Torch().numpy(ours), np.asarray(theirs))
    padded = np.concatenate([args[0], np.ones((20, N * H), np.float32)])
    assert torch.equal(
        mhc.mhc_head(tensor(residual), tensor(padded), *map(tensor, args[1:]), norm_weight=tensor(head["norm_weight"])), ours
    )


def chain(F, residual, layers, head, options, sublayer):
    for layer in layers:
        layer_input, mixes = F.mhc_pre(residual, layer["fn"], layer["scale"], layer["base"], norm_weight=layer["norm_weight"], **options)
        residual = F.mhc_post(sublayer(layer_input), residual, *mixes)
    return F.mhc_head(residual, head["fn"], head["scale"], head["base"], norm_weight=head["norm_weight"])


class Reference:
    """The chain in fp64 from the eager formulas."""

    @staticmethod
    def mhc_pre(residual, fn, scale, base, norm_weight, **_):
        layer_input, post, comb = pre_fp64(residual, fn, scale, base, norm_weight)
        return layer_input, (post, comb)

    @staticmethod
    def mhc_post(x, residual, post, comb):
        return post * x.unsqueeze(-2) + torch.einsum("...io,...id->...od", comb, residual)

    @staticmethod
    def mhc_head(residual, fn, scale, base, norm_weight):
        mixes = eager.mhc_pre_norm_fn(residual, fn, norm_weight, 1e-6)
        return eager.mhc_pre_apply_mix(residual, eager.mhc_head_compute_mix(mixes, scale, base, 1e-6).unsqueeze(-1))


def test_gradients_of_three_layers_and_the_head_against_fp64_in_both_frameworks(fp64):
    from tk_jax import mhc as jax_mhc

    residual = bf16(24, N, H)
    layers, head = [parameters(i) for i in range(3)], parameters(9, head=True)
    g = bf16(24, H, seed=5)
    options = {"post_mult_value": 2.0, "sinkhorn_repeat": 20}

    def leaves_of(make):
        return make(residual), [{k: make(v) for k, v in layer.items()} for layer in layers], {k: make(v) for k, v in head.items()}

    r, ls, h = leaves_of(lambda a: tensor(a, True))
    chain(mhc, r, ls, h, options, lambda x: x * 0.5).backward(tensor(g))
    r64, ls64, h64 = leaves_of(lambda a: torch.tensor(np.asarray(a, np.float64), requires_grad=True))
    chain(Reference, r64, ls64, h64, options, lambda x: x * 0.5).backward(torch.tensor(np.asarray(g, np.float64)))

    jax = Jax().jax

    def loss(leaves):
        out = chain(jax_mhc, *leaves, options, lambda x: x * 0.5)
        return (out.astype("float32") * g.astype(np.float32)).sum()

    jr, jls, jh = jax.grad(loss)(leaves_of(jax.numpy.asarray))
    pairs = [("residual", r.grad, r64.grad, jr)]
    for i, (a, b, c) in enumerate(zip((*ls, h), (*ls64, h64), (*jls, jh), strict=True)):
        pairs += [(f"{i}.{k}", a[k].grad, b[k].grad, c[k]) for k in a]
    for name, ours, want, other in pairs:
        want = want.cpu().numpy()
        for value in (Torch().numpy(ours).astype(np.float64), np.asarray(other).astype(np.float64)):
            error = np.square(value - want).sum() / np.square(want).sum()
            # the residual and its gradients pass through bf16 between the operations; a scale is a sum of terms that cancel
            assert error < (5e-3 if name.endswith("scale") else 2e-4), (name, error)


def test_a_second_consumer_of_the_residual_gets_its_gradient():
    values, residual = parameters(), tensor(bf16(6, N, H), True)
    args = [tensor(values[k]) for k in ("fn", "scale", "base")]
    weight = tensor(values["norm_weight"])

    def run(extra):
        layer_input, mixes = mhc.mhc_pre(residual, *args, norm_weight=weight)
        out = mhc.mhc_post(layer_input, residual, *mixes)
        loss = out.float().square().sum()
        return torch.autograd.grad(loss + (residual.float() * 3).sum() if extra else loss, residual)[0]

    torch.testing.assert_close(run(True).float(), run(False).float() + 3, rtol=2**-6, atol=2**-4)
    assert not hasattr(residual.untyped_storage(), "grad_from_mhc_post")


def test_a_buffer_on_the_storage_takes_the_residual_gradient():
    values, residual = parameters(), tensor(bf16(6, N, H), True)
    fn, weight = tensor(values["fn"]), tensor(values["norm_weight"])
    mix = tensor(np.full((6, N, 1), 0.25, np.float32))
    g = tensor(bf16(6, H, seed=3))
    (want,) = torch.autograd.grad(mhc.mhc_pre_apply_mix(residual, mix), residual, g)
    buffer = torch.ones_like(residual)
    out = mhc.mhc_pre_apply_mix(residual, mix)
    residual.untyped_storage().grad_from_mhc_post = buffer
    assert torch.autograd.grad(out, residual, g, allow_unused=True) == (None,)
    torch.testing.assert_close(buffer.float(), 1 + want.float(), rtol=2**-7, atol=2**-7)
    assert hasattr(residual.untyped_storage(), "grad_from_mhc_post")
    before = buffer.clone()
    out = mhc.mhc_pre_norm_fn(residual, fn, weight, 1e-6)
    gm = torch.randn_like(out)
    assert torch.autograd.grad(out, residual, gm, allow_unused=True, retain_graph=True) == (None,)
    assert not hasattr(residual.untyped_storage(), "grad_from_mhc_post")
    (want,) = torch.autograd.grad(out, residual, gm)
    torch.testing.assert_close(buffer.float(), before.float() + want.float(), rtol=2**-7, atol=2**-6)
    residual.untyped_storage().grad_from_mhc_post = buffer
    out = mhc.mhc_pre_norm_fn(residual, fn, weight, 1e-6, fuse_grad_acc=False)
    assert torch.equal(torch.autograd.grad(out, residual, gm)[0], want)
    del residual.untyped_storage().grad_from_mhc_post


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("which", [("mhc_fn",), ("mhc_norm_weight",), ("mhc_fn", "mhc_norm_weight")])
def test_main_grad_is_accumulated_in_place(which, compiled):
    values, residual = parameters(), tensor(bf16(6, N, H), True)
    fn, weight = torch.nn.Parameter(tensor(values["fn"])), torch.nn.Parameter(tensor(values["norm_weight"]))
    by_name = {"mhc_fn": fn, "mhc_norm_weight": weight}
    g = tensor(np.random.default_rng(0).standard_normal((6, 24)).astype(np.float32))

    def run(r):
        return mhc.mhc_pre_norm_fn(r, fn, weight, 1e-6)

    want = dict(zip(by_name, torch.autograd.grad(run(residual), [fn, weight], g), strict=True))
    for name in which:
        by_name[name].main_grad = torch.full_like(by_name[name], 2.0)
    if compiled:
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    run(residual).backward(g)
    for name, p in by_name.items():
        if name in which:
            assert p.grad is None
            torch.testing.assert_close(p.main_grad, want[name] + 2, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(p.grad, want[name])
    assert residual.grad is not None
    if not compiled:
        fn.main_grad = torch.zeros(3, device=DEVICE)
        with pytest.raises(ValueError, match="acc_d_mhc_fn: expected shape"):
            run(residual).backward(g)


def test_out_arguments():
    x, residual = tensor(bf16(5, H)), tensor(bf16(5, N, H, seed=1))
    post, comb = (torch.randn(5, N, k, device=DEVICE) for k in (1, N))
    want = mhc.mhc_post(x, residual, post, comb)
    target = torch.empty_like(residual)
    assert mhc.mhc_post(x, residual, post, comb, out=target) is target
    assert torch.equal(target, want)
    same = residual.clone()
    with torch.no_grad():
        assert mhc.mhc_post(x, same, post, comb, out=same) is same
    assert torch.equal(same, want)
    grad = residual.clone().requires_grad_()
    with pytest.raises(ValueError, match="mhc_post: out: expected memory apart from residual"):
        mhc.mhc_post(x, grad, post, comb, out=grad.detach())
    target = torch.empty_like(residual)
    out = mhc.mhc_post(x, grad, post, comb, out=target)
    assert out.data_ptr() == target.data_ptr()
    out.float().sum().backward()
    ordinary = residual.clone().requires_grad_()
    mhc.mhc_post(x, ordinary, post, comb).float().sum().backward()
    assert torch.equal(grad.grad, ordinary.grad)
    for bad, kind, text in (
        (torch.empty(5, N, H, device=DEVICE), TypeError, "out: expected dtype bfloat16, got float32"),
        (torch.empty_like(residual[:4]), ValueError, "out: expected shape"),
        (torch.empty(5, N, 2 * H, device=DEVICE).bfloat16()[..., :H], ValueError, "out: expected a contiguous array"),
        (3, TypeError, "out: expected an array to write to, got int"),
    ):
        with pytest.raises(kind, match=text):
            mhc.mhc_post(x, residual, post, comb, out=bad)
    mix = torch.randn(5, N, 1, device=DEVICE)
    target = torch.empty_like(x)
    f = torch.compile(lambda a, b, o: mhc.mhc_pre_apply_mix(a, b, out=o), fullgraph=True, backend="aot_eager")
    f(residual, mix, target)
    assert torch.equal(target, mhc.mhc_pre_apply_mix(residual, mix))


def test_low_level_forms_write_what_the_operations_give():
    T = 7
    x, residual, g = tensor(bf16(T, H), True), tensor(bf16(T, N, H, seed=1), True), tensor(bf16(T, N, H, seed=2))
    mixes = torch.randn(T, 24, device=DEVICE, requires_grad=True)
    scale, base = (torch.randn(k, device=DEVICE, requires_grad=True) for k in (3, 24))
    pre, post, comb = mhc.mhc_pre_split_mixes(mixes, scale, base, N, 2.0, 0.01)
    flat = [torch.empty(T, k, device=DEVICE) for k in (N, N, N * N)]
    mhc.mhc_pre_split_mixes_fwd(mixes.detach(), scale.detach(), base.detach(), *flat, 2.0, 0.01)
    for a, b in zip(flat, (pre, post, comb), strict=True):
        assert torch.equal(a, b.detach().reshape(a.shape))
    cotangents = [torch.randn_like(t) for t in (pre, post, comb)]
    want = torch.autograd.grad((pre, post, comb), (mixes, scale, base), cotangents)
    got = [torch.empty_like(t) for t in (mixes, scale, base)]
    flat_g = [c.reshape(T, -1) for c in cotangents]
    mhc.mhc_pre_split_mixes_bwd(*flat_g, mixes.detach(), flat[1], scale.detach(), base.detach(), *got, 2.0)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

    square = torch.randn(T, N, N, device=DEVICE, requires_grad=True)
    normal, out = mhc.sinkhorn_normalize(square, 20), torch.empty(T, N, N, device=DEVICE)
    mhc.mhc_sinkhorn_fwd(square.detach(), out, 20, 1e-6)
    assert torch.equal(out, normal.detach())
    gs = torch.randn_like(out)
    mhc.mhc_sinkhorn_bwd(gs, square.detach(), out, 20, 1e-6)
    assert torch.equal(out, torch.autograd.grad(normal, square, gs)[0])

    mix = torch.randn(T, N, device=DEVICE, requires_grad=True)
    o = torch.empty(T, H, device=DEVICE).bfloat16()
    mhc.mhc_pre_apply_mix_fwd(residual.detach(), mix.detach(), o)
    applied = mhc.mhc_pre_apply_mix(residual, mix.unsqueeze(-1))
    assert torch.equal(o, applied.detach())
    want = torch.autograd.grad(applied, (residual, mix), g[:, 0])
    grad = torch.zeros_like(residual)
    assert torch.equal(mhc.mhc_pre_apply_mix_bwd(g[:, 0], residual.detach(), mix.detach(), grad), want[1])
    assert torch.equal(grad, want[0])

    next_residual = mhc.mhc_post(x, residual, post.detach(), comb.detach())
    assert torch.equal(mhc.mhc_post_fwd(x.detach(), residual.detach(), flat[1], flat[2]), next_residual.detach())
    got = mhc.mhc_post_bwd(x.detach(), residual.detach(), flat[1], flat[2], g)
    want = torch.autograd.grad(next_residual, (x, residual), g)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert got[2].shape == flat[1].shape
    assert residual.untyped_storage().grad_from_mhc_post is got[1]
    del residual.untyped_storage().grad_from_mhc_post

    wide, narrow = torch.empty(T, N, H, device=DEVICE).bfloat16(), torch.empty(T, H, device=DEVICE).bfloat16()
    mhc.expand_to_mhc_fwd(x.detach(), wide)
    assert torch.equal(wide, mhc.expand_to_mhc(x.detach(), N))
    mhc.expand_to_mhc_bwd(g, narrow)
    assert torch.equal(narrow, torch.autograd.grad(mhc.expand_to_mhc(x, N), x, g)[0])

    head, hs, hb = (torch.randn(k, device=DEVICE, requires_grad=True) for k in ((T, N), (1,), (N,)))
    weights, out = mhc.mhc_head_compute_mix(head, hs, hb, 0.01), torch.empty(T, N, device=DEVICE)
    mhc.mhc_head_compute_mix_fwd(head.detach(), hs.detach(), hb.detach(), out, 0.01)
    assert torch.equal(out, weights.detach())
    gh = torch.randn_like(out)
    want = torch.autograd.grad(weights, (head, hs, hb), gh)
    partials = [torch.full((5, k), float("nan"), device=DEVICE) for k in (1, N)]
    mhc.mhc_head_compute_mix_bwd(gh, head.detach(), hs.detach(), hb.detach(), out, *partials, 5)
    for a, b in zip((out, partials[0].sum(0), partials[1].sum(0)), want, strict=True):
        assert torch.equal(a, b)


def test_the_low_level_parts_of_norm_fn_add_up_to_it():
    T, K, eps = 9, N * H, 1e-6
    residual, values = tensor(bf16(T, N, H), True), parameters()
    fn, weight = (tensor(values[k], True) for k in ("fn", "norm_weight"))
    x = residual.detach().view(T, K)
    merged = torch.empty_like(fn)
    mhc.mhc_fn_normw_merge_fwd(fn.detach(), weight.detach(), merged)
    S = 2
    part, square = torch.empty(S, T, 1, 24, device=DEVICE), torch.empty(S, T, 1, device=DEVICE)
    mhc.mhc_prenorm_gemm_fwd(x, merged, part, square)
    y, q, out = torch.empty(T, 1, 24, device=DEVICE), torch.empty(T, 1, device=DEVICE), torch.empty(T, 24, device=DEVICE)
    mhc.mhc_reduce_partials_and_rmsnorm_fwd(part, square, y, q, out, K, eps, S)
    want = mhc.mhc_pre_norm_fn(residual, fn, weight, eps)
    torch.testing.assert_close(out, want.detach(), rtol=1e-5, atol=1e-6)
    g = torch.randn_like(out)
    wants = torch.autograd.grad(want, (residual, fn, weight), g)
    dy, dq = torch.empty_like(y), torch.empty_like(q)
    mhc.mhc_reduce_partials_and_rmsnorm_bwd(g, y, q, dy, dq, K, eps)
    dx, dF = torch.ones_like(x), torch.empty_like(fn)
    mhc.mhc_prenorm_gemm_bwd(dy, dq, x, merged, dx, dF)
    dfn, dw = torch.ones_like(fn), torch.ones_like(weight)
    mhc.mhc_fn_normw_merge_bwd(fn.detach(), weight.detach(), dF, dfn, dw)
    torch.testing.assert_close(dx.float(), 1 + wants[0].view(T, K).float(), rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(dfn, 1 + wants[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dw, 1 + wants[2], rtol=1e-4, atol=1e-4)


def test_the_head_takes_a_slice_of_the_mixes_and_a_scale_without_axes():
    mixes = torch.randn(6, 24, device=DEVICE)
    scale, base = torch.tensor(0.5, device=DEVICE, requires_grad=True), torch.randn(N, device=DEVICE)
    out = mhc.mhc_head_compute_mix(mixes[:, :N], scale, base, 1e-6)
    torch.testing.assert_close(out, torch.sigmoid(mixes[:, :N] * 0.5 + base) + 1e-6)
    out.sum().backward()
    assert scale.grad.shape == ()


def test_modules_equal_the_functions_and_train():
    layer, head = nn.HyperConnection(H, N, device=DEVICE), nn.HyperHead(H, N, device=DEVICE)
    assert {n for n, _ in layer.named_parameters()} == {"fn", "scale", "base", "norm_weight"}
    assert nn.HyperConnection(H, N, norm_weight=False).norm_weight is None
    x = tensor(bf16(2, 5, H))
    residual = mhc.expand_from_embedding(x, N)
    out = head(layer(residual, lambda h: h * 2))
    # close to an ordinary residual connection at the start: every stream is x + 2 x, and so is their mean
    torch.testing.assert_close(out.float(), x.float() * 3, rtol=0.05, atol=0.05)
    out.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in (*layer.parameters(), *head.parameters()))

    import jax

    from tk_jax import nn as jax_nn

    params, head_params = jax_nn.init_hyper_connection(H, N), jax_nn.init_hyper_head(H, N)
    other = jax_nn.hyper_head(head_params, jax_nn.hyper_connection(params, np.asarray(Torch().numpy(residual)), lambda h: h * 2))
    assert same_bits(Torch().numpy(out), np.asarray(other))
    grads = jax.grad(lambda p: jax_nn.hyper_connection(p, Torch().numpy(residual), lambda h: h).astype("float32").sum())(params)
    assert set(grads) == set(params)


@pytest.mark.parametrize("bad", ["streams", "hidden", "repeat", "fn"])
def test_errors_name_operation_argument_expectation_and_value(bad):
    values, residual = parameters(), bf16(3, N, H)
    args = {k: values[k] for k in ("fn", "scale", "base")}
    options = {"sinkhorn_repeat": 10}
    if bad == "streams":
        residual, text = bf16(3, 3, H), r"mhc_pre: residual: expected shape \(..., 4, H\), mhc_mult = 4 streams, got \(3, 3, 128\)"
    elif bad == "hidden":
        residual, text = bf16(3, N, 96), "mhc_pre_norm_fn: residual: expected H a positive multiple of 128"
        args["fn"] = np.zeros((24, N * 96), np.float32)
        values["norm_weight"] = np.ones(N * 96, np.float32)
    elif bad == "repeat":
        options, text = {"sinkhorn_repeat": 0}, "sinkhorn_normalize: repeat: expected"
    else:
        args["fn"], text = np.zeros((33, N * H), np.float32), "mhc_pre_norm_fn: mhc_fn: expected"
    from tk_jax import mhc as jax_mhc

    texts = []
    for module, make in ((mhc, tensor), (jax_mhc, lambda a: a)):
        with pytest.raises(ValueError, match=text) as error:
            module.mhc_pre(make(residual), *(make(a) for a in args.values()), norm_weight=make(values["norm_weight"]), **options)
        texts.append(str(error.value))
    assert texts[0] == texts[1]


def test_a_sub_layer_compiles_with_the_default_backend_for_any_row_count():
    layer = nn.HyperConnection(H, N, device=DEVICE)
    torch._dynamo.utils.counters.clear()
    step = torch.compile(lambda r: layer(r, lambda h: h * 0.5), fullgraph=True, dynamic=True)
    for rows in (5, 9, 2):
        residual = tensor(bf16(rows, N, H, seed=rows), True)
        got = step(residual)
        want = layer(residual, lambda h: h * 0.5)
        assert torch.equal(got, want)
        g = tensor(bf16(rows, N, H, seed=7))
        leaves = [residual, *layer.parameters()]
        for a, b in zip(torch.autograd.grad(got, leaves, g), torch.autograd.grad(want, leaves, g), strict=True):
            # the compiler adds the residual's three gradients in one rounding, eager torch in two
            torch.testing.assert_close(a.float(), b.float(), rtol=2**-6, atol=2**-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
