"""`mhc_pre_norm_fn` and its parts at the level of the core: plans run on torch CPU tensors, against the float64 oracle."""

import numpy as np
import pytest
import torch

from tk_core import plan
from tk_core.ops.mhc import norm_fn as ops
from tk_core.reference import mhc_norm_fn as oracle

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
NAMES = {value: key for key, value in DTYPES.items()}
EPS = 1e-6
ALL = ("d_residual", "d_mhc_fn", "d_mhc_norm_weight")


def run(rule, arrays, attrs=None, wanted=None, accumulators=None):
    """The results of a rule by name; every fresh array is filled with NaN before, accumulators are written in place."""
    accumulators = accumulators or {}
    wanted = frozenset(rule.outs if wanted is None else wanted)
    values = [arrays.get(name) for name in rule.ins] + [accumulators.get(name) for name in rule.accumulates]
    types = [None if v is None else (tuple(v.shape), NAMES[v.dtype], "cpu") for v in values]
    bound = plan.Plan(rule, "c", types, {**rule.attrs, **(attrs or {})}, wanted)
    values += [None] * (bound.num_slots - len(values))
    for slot, shape, dtype in (*bound.outs, *bound.work):
        values[slot] = torch.full(shape, torch.nan, dtype=DTYPES[dtype])
    results = {rule.slots[slot]: values[slot] for slot, _, _ in bound.outs}
    results.update({name: value for name, value in accumulators.items() if name in wanted})
    if not bound.steps:
        for slot in bound.zeros:
            values[slot].zero_()
    if bound.flat:
        values = [v if v is None or f is None else v.view(f) for v, f in zip(values, (*bound.flat, None), strict=True)]
    for step in bound.steps:
        step.kernel.run(*step.gather(values), *step.scalars)
    return results


def draw(lead, n, H, J, weighted, seed=0):
    """Arguments and a cotangent, scaled as in the specification."""
    g = torch.Generator().manual_seed(seed)
    streams = 1 + 0.01 * torch.arange(n)[:, None]
    arguments = {
        "residual": (torch.randn(*lead, n, H, generator=g) * streams).bfloat16(),
        "mhc_fn": torch.randn(J, n * H, generator=g) * 1e-4,
        "mhc_norm_weight": 1 + 0.1 * torch.randn(n * H, generator=g) if weighted else None,
    }
    return arguments, torch.randn(*lead, J, generator=g)


def expected(arguments, d_out, precision=""):
    x, fn = arguments["residual"].float().numpy(), arguments["mhc_fn"].numpy()
    weight = arguments["mhc_norm_weight"]
    weight = None if weight is None else weight.numpy()
    return oracle.forward(x, fn, weight, EPS, precision), oracle.backward(d_out.numpy(), x, fn, weight, EPS, precision)


def sqdiff(a, b):
    a = a.double().numpy()
    return np.square(a - b).sum() / (np.square(a).sum() + np.square(b).sum())


def forward(arguments, **attrs):
    return run(ops.mhc_pre_norm_fn.forward, arguments, {"mhc_norm_eps": EPS, **attrs})


def backward(arguments, d_out, saved, wanted=ALL, accumulators=None, **attrs):
    if arguments["mhc_norm_weight"] is None:
        wanted = [name for name in wanted if name != "d_mhc_norm_weight"]
    arrays = {**arguments, "d_out": d_out, "y": saved["y"], "q": saved["q"]}
    return run(ops.mhc_pre_norm_fn.backward, arrays, {"mhc_norm_eps": EPS, **attrs}, wanted, accumulators)


CASES = [((5,), 4, 128, 24, True), ((2, 35), 2, 384, 4, False), ((), 1, 128, 32, True), ((9,), 4, 7168, 24, True)]


@pytest.mark.parametrize(("lead", "n", "H", "J", "weighted"), CASES)
@pytest.mark.parametrize(("precision", "bound"), [("bf16x2", 1e-10), ("tf32", 1e-9)])
def test_forward_and_gradients(lead, n, H, J, weighted, precision, bound):
    arguments, d_out = draw(lead, n, H, J, weighted)
    (out, y, q), gradients = expected(arguments, d_out, precision)
    got = forward(arguments, precision=precision)
    assert got["out"].shape == (*lead, J)
    assert sqdiff(got["out"], out) < bound
    assert sqdiff(got["y"], y) < bound
    assert sqdiff(got["q"], q) < 1e-12
    grads = backward(arguments, d_out, got, precision=precision)
    assert sqdiff(grads["d_residual"], gradients[0]) < 3e-6
    assert sqdiff(grads["d_mhc_fn"], gradients[1]) < bound
    if weighted:
        assert sqdiff(grads["d_mhc_norm_weight"], gradients[2]) < bound


def test_oracle_agrees_with_autograd():
    arguments, d_out = draw((6,), 2, 128, 5, True)
    leaves = [arguments[name].double().requires_grad_() for name in ("residual", "mhc_fn", "mhc_norm_weight")]
    x = leaves[0].flatten(1)
    out = x @ (leaves[1] * leaves[2]).T * (x.square().mean(1, keepdim=True) + EPS).rsqrt()
    wanted = torch.autograd.grad(out, leaves, d_out.double())
    (got_out, _, _), got = expected(arguments, d_out)
    np.testing.assert_allclose(got_out, out.detach().numpy(), rtol=1e-12)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b.numpy(), rtol=1e-9, atol=1e-12)


def test_accumulators_are_added_to_and_rounded_once():
    arguments, d_out = draw((70,), 2, 384, 4, True)
    _, gradients = expected(arguments, d_out)
    saved = forward(arguments)
    before = {
        "d_residual": torch.randn(arguments["residual"].shape).bfloat16(),
        "d_mhc_fn": torch.ones_like(arguments["mhc_fn"]),
        "d_mhc_norm_weight": torch.full_like(arguments["mhc_norm_weight"], 2.0),
    }
    after = backward(arguments, d_out, saved, accumulators={name: value.clone() for name, value in before.items()})
    for name, gradient in zip(ALL, gradients, strict=True):
        want = before[name].double().numpy() + gradient
        assert sqdiff(after[name], want) < (3e-6 if name == "d_residual" else 1e-10)
    torch.testing.assert_close(
        after["d_residual"].double(), torch.from_numpy(before["d_residual"].double().numpy() + gradients[0]), rtol=2**-8, atol=1e-9
    )


@pytest.mark.parametrize("name", ALL)
def test_one_gradient_alone_has_the_same_bits(name):
    arguments, d_out = draw((70,), 2, 384, 4, True)
    saved = forward(arguments)
    assert torch.equal(backward(arguments, d_out, saved, [name])[name], backward(arguments, d_out, saved)[name])


def test_without_a_gradient_nothing_is_saved():
    arguments, _ = draw((5,), 4, 128, 24, True)
    alone = run(ops.mhc_pre_norm_fn.forward, arguments, {"mhc_norm_eps": EPS}, {"out"})
    assert list(alone) == ["out"]
    assert torch.equal(alone["out"], forward(arguments)["out"])


def test_n_splits_changes_last_bits_only():
    arguments, _ = draw((5,), 4, 1024, 24, True)
    a, b = forward(arguments, n_splits=1)["out"], forward(arguments, n_splits=16)["out"]
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


def test_no_rows():
    arguments, d_out = draw((0,), 4, 128, 24, True)
    saved = forward(arguments)
    assert saved["out"].shape == (0, 24)
    grads = backward(arguments, d_out, saved)
    assert grads["d_residual"].shape == (0, 4, 128)
    assert not grads["d_mhc_fn"].any()
    assert not grads["d_mhc_norm_weight"].any()


@pytest.mark.parametrize("K", [128, 512, 5120, 28672, 65536])
def test_slices_cover_everything_once(K):
    for rows in (1, 64, 65, 1000, 8192, 100_000):
        slices, steps = ops.row_slices(rows, K)
        assert (slices - 1) * steps * 64 < rows <= slices * steps * 64
        assert steps * 64 <= 4096
        for n_splits in (1, 16):
            S = ops.k_slices(rows, K, n_splits)
            assert K % (S * 128) == 0
            assert K // S <= 8192


def test_tf32_rounding_is_exact_in_two_terms():
    fn = torch.tensor([1.0, 1 + 2**-11, -1 - 2**-11, 1 + 2**-11 - 2**-20, 3.3333333, 1e-30, -0.0, 65504.4]).repeat(16)[None]
    arrays = {"x": torch.eye(128).bfloat16(), "fn": fn}
    got = run(ops.mhc_prenorm_gemm_fwd.forward, arrays, {"precision": "tf32"})["out_mul_splitted"]
    np.testing.assert_array_equal(got[0, :, 0, 0].numpy(), oracle.round_tf32(fn[0].numpy()))


def test_nan_stays_nan_in_tf32():
    fn = torch.ones(1, 128)
    fn[0, 5] = torch.from_numpy(np.array([0x7FFFFFFF], np.uint32).view(np.float32))[0]
    got = run(ops.mhc_prenorm_gemm_fwd.forward, {"x": torch.ones(1, 128).bfloat16(), "fn": fn}, {"precision": "tf32"})
    assert got["out_mul_splitted"].isnan().all()


def test_parts_chain_to_the_same_bits():
    arguments, d_out = draw((70,), 2, 384, 4, True)
    K = 768
    saved = forward(arguments)
    grads = backward(arguments, d_out, saved)
    fn, weight, x = arguments["mhc_fn"], arguments["mhc_norm_weight"], arguments["residual"].flatten(1)
    merged = run(ops.mhc_fn_normw_merge_fwd.forward, {"fn": fn, "normw": weight})["out_fn"]
    assert torch.equal(merged, fn * weight)
    parts = run(ops.mhc_prenorm_gemm_fwd.forward, {"x": x, "fn": merged}, {"n_splits": ops.k_slices(70, K, 16)})
    reduced = run(ops.mhc_reduce_partials_and_rmsnorm_fwd.forward, parts, {"rms_group_size": K, "rms_eps": EPS})
    assert torch.equal(reduced["out"], saved["out"])
    assert torch.equal(reduced["out_mul"][:, 0], saved["y"])
    assert torch.equal(reduced["sqrsum"][:, 0], saved["q"])
    arrays = {"out_grad": d_out, "out_mul": reduced["out_mul"], "sqrsum": reduced["sqrsum"]}
    inner = run(ops.mhc_reduce_partials_and_rmsnorm_bwd.forward, arrays, {"rms_group_size": K, "rms_eps": EPS})
    outer = run(ops.mhc_prenorm_gemm_bwd.forward, {**inner, "x": x, "fn": merged})
    assert torch.equal(outer["x_grad"], grads["d_residual"].flatten(1))
    sums = {"fn_grad": torch.zeros_like(fn), "normw_grad": torch.zeros_like(weight)}
    arrays = {"fn": fn, "normw": weight, "out_fn_grad": outer["fn_grad"]}
    run(ops.mhc_fn_normw_merge_bwd.forward, arrays, accumulators=sums)
    assert torch.equal(sums["fn_grad"], grads["d_mhc_fn"])
    assert torch.equal(sums["normw_grad"], grads["d_mhc_norm_weight"])


def test_gemm_bwd_adds_to_x_grad():
    g = torch.Generator().manual_seed(1)
    arrays = {
        "out_mul_grad": torch.randn(9, 1, 3, generator=g),
        "sqrsum_grad": torch.randn(9, 1, generator=g),
        "x": torch.randn(9, 128, generator=g).bfloat16(),
        "fn": torch.randn(3, 128, generator=g),
    }
    before = torch.randn(9, 128, generator=g).bfloat16()
    got = run(ops.mhc_prenorm_gemm_bwd.forward, arrays, accumulators={"x_grad": before.clone()})
    dy, x = arrays["out_mul_grad"][:, 0].double(), arrays["x"].double()
    want = before.double() + dy @ arrays["fn"].double() + 2 * x * arrays["sqrsum_grad"].double()
    assert sqdiff(got["x_grad"], want.numpy()) < 3e-6
    assert sqdiff(got["fn_grad"], (dy.T @ x).numpy()) < 1e-10


def test_rms_groups():
    g = torch.Generator().manual_seed(2)
    parts = {"out_mul_splitted": torch.randn(11, 6, 2, 5, generator=g), "sqrsum_splitted": torch.rand(11, 6, 2, generator=g) * 10}
    attrs = {"rms_group_size": 64, "rms_eps": EPS}
    got = run(ops.mhc_reduce_partials_and_rmsnorm_fwd.forward, parts, attrs)
    y = parts["out_mul_splitted"].double().sum(0).requires_grad_()
    q = parts["sqrsum_splitted"].double().sum(0).requires_grad_()
    out = (y * (q / 64 + EPS).rsqrt()[..., None]).sum(1)
    torch.testing.assert_close(got["out"].double(), out, rtol=1e-5, atol=1e-5)
    d_out = torch.randn(6, 5, generator=g)
    want = torch.autograd.grad(out, (y, q), d_out.double())
    arrays = {"out_grad": d_out, "out_mul": got["out_mul"], "sqrsum": got["sqrsum"]}
    grads = run(ops.mhc_reduce_partials_and_rmsnorm_bwd.forward, arrays, attrs)
    torch.testing.assert_close(grads["out_mul_grad"].double(), want[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grads["sqrsum_grad"].double(), want[1], rtol=1e-4, atol=1e-6)
    empty = {"out_mul_splitted": torch.zeros(11, 0, 2, 5), "sqrsum_splitted": torch.zeros(11, 0, 2)}
    assert run(ops.mhc_reduce_partials_and_rmsnorm_fwd.forward, empty, attrs)["out"].shape == (0, 5)


def types(**changes):
    base = {"residual": ((3, 4, 128), "bfloat16"), "mhc_fn": ((24, 512), "float32"), "mhc_norm_weight": ((512,), "float32")}
    return [(*t, "cpu") for t in {**base, **changes}.values()]


@pytest.mark.parametrize(
    ("changes", "attrs", "error", "text"),
    [
        ({"residual": ((3, 4, 128), "float32")}, {}, TypeError, "mhc_pre_norm_fn: residual: expected dtype bfloat16, got float32"),
        ({"residual": ((3, 4, 64), "bfloat16")}, {}, ValueError, "mhc_fn"),
        ({"residual": ((3, 8, 64), "bfloat16")}, {}, ValueError, "residual: expected H a positive multiple of 128, got H = 64"),
        ({"mhc_fn": ((33, 512), "float32")}, {}, ValueError, "mhc_fn: expected 1 to 32 rows, got 33 rows"),
        ({"mhc_norm_weight": ((511,), "float32")}, {}, ValueError, "mhc_norm_weight"),
        ({}, {"mhc_norm_eps": 0.0}, ValueError, "mhc_norm_eps: expected a positive number, got 0.0"),
        ({}, {"mhc_norm_eps": "a"}, TypeError, "mhc_norm_eps: expected a number, got 'a'"),
        ({}, {"n_splits": 0}, ValueError, "n_splits: expected a positive int, got 0"),
        ({}, {"n_splits": 1.5}, TypeError, "n_splits: expected an int, got 1.5"),
        ({}, {"precision": "fp8"}, ValueError, "precision: expected 'bf16x2' or 'tf32', got 'fp8'"),
    ],
)
def test_arguments_are_judged(changes, attrs, error, text):
    op = ops.mhc_pre_norm_fn
    with pytest.raises(error) as caught:
        op.forward.bind(types(**changes), {**op.attrs, **attrs})
    assert text in str(caught.value)


def test_eps_and_rows_are_in_no_key():
    op = ops.mhc_pre_norm_fn
    keys = set()
    for rows, eps in ((3, 1e-6), (5000, 1e-20)):
        env = op.forward.bind(types(residual=((rows, 4, 128), "bfloat16")), {**op.attrs, "mhc_norm_eps": eps})
        env.update(op.forward.derive(env))
        keys.add(str([plan.static_of(launch, env, set(op.forward.outs)) for launch in op.forward.launches]))
    assert len(keys) == 1
