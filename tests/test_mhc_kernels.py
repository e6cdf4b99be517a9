"""mHC kernels alone, through plans: values and gradients against fp64, subsets of cotangents and gradients, accumulators."""

import itertools

import numpy as np
import pytest
import torch

from tk_core import registry
from tk_core.device import arch_of
from tk_core.plan import Plan
from tk_core.reference import mhc as oracle

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
TORCH = {name: dtype for dtype, name in NAMES.items()}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
# (relative, absolute) bounds of the specification
BF16 = (1.6e-2, 1e-5)
F32 = (1.3e-6, 1e-5)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def run(rule, tensors, attrs=None, wanted=None, accumulators=None):
    """Results of a rule by name; every fresh array holds NaN before."""
    accumulators = accumulators or {}
    arrays = [tensors.get(name) for name in rule.ins] + [accumulators.get(name) for name in rule.accumulates]
    types = [None if t is None else (tuple(t.shape), NAMES[t.dtype], str(t.device)) for t in arrays]
    where = next(t.device for t in arrays if t is not None)
    target = "c" if where.type == "cpu" else arch_of(*torch.cuda.get_device_capability())
    wanted = frozenset(wanted or rule.outs)
    plan = Plan(rule, target, types, {**rule.attrs, **(attrs or {})}, wanted)
    values = arrays + [None] * (plan.num_slots - len(arrays))
    for slot, shape, dtype in (*plan.outs, *plan.work):
        empty = 0.0 if not plan.steps and slot in plan.zeros else float("nan")
        values[slot] = torch.full(shape, empty, dtype=TORCH[dtype], device=where)
    flat = plan.flat or [None] * len(values)
    views = [v if v is None or shape is None else v.view(shape) for v, shape in zip(values, (*flat, None), strict=False)]
    views += values[len(views) :]
    for step in plan.steps:
        step.kernel.run(*step.gather(views), *step.scalars)
    at = {name: i for i, name in enumerate(rule.slots)}
    return {name: accumulators[name] if name in accumulators else values[at[name]] for name in rule.outs if name in wanted}


def normal(*shape, dtype=torch.float32, device="cpu", scale=1.0):
    return (torch.randn(*shape) * scale).to(dtype).to(device)


def f64(t):
    return None if t is None else t.double().cpu().numpy()


def close(got, want, bounds, what=""):
    got = f64(got)
    assert got.shape == want.shape
    rtol, atol = bounds
    np.testing.assert_allclose(got, want, rtol=rtol, atol=atol, err_msg=what)


def subsets(names):
    """Each alone, and all."""
    names = list(names)
    return [[name] for name in names] + ([names] if len(names) > 1 else [])


def check_gradients(op, tensors, cotangents, reference, bounds, attrs=None, accumulate=(), thorough=True):
    """Every cotangent alone and together; every gradient alone and together; accumulators where there are any.

    Every subset is another kernel, so only the usual number of streams is tested thoroughly.
    """
    for present in subsets(cotangents) if thorough else [list(cotangents)]:
        given = {f"d_{name}": cotangents[name] if name in present else None for name in cotangents}
        want = dict(zip(op.backward.outs, reference(**given), strict=True))
        for wanted in subsets(want) if thorough else [list(want)]:
            got = run(op.backward, {**tensors, **given}, attrs, wanted)
            assert set(got) == set(wanted)
            for name in wanted:
                close(got[name], want[name], bounds[name], f"{name} of {wanted} from {present}")
        for name in accumulate:
            start = normal(*want[name].shape, dtype=TORCH[op.backward.outs[name].dtype], device=str(next(iter(tensors.values())).device))
            total = f64(start) + want[name]
            for wanted in ([name], list(want)):
                buffer = start.clone()
                got = run(op.backward, {**tensors, **given}, attrs, wanted, {name: buffer})
                close(got[name], total, (1.6e-2, 1e-2), f"{name} added")


# ------------------------------------------------------------------ expand


@pytest.mark.parametrize(("n", "lead"), [(1, (37,)), (8, (2, 3)), (4, (2, 37)), (4, (1,)), (4, ())])
def test_expand(device, n, lead):
    op = registry.get("expand_to_mhc")
    for H in {(4, (1,)): (1280, 7168), (4, ()): (16384,), (8, (2, 3)): (128,)}.get((n, lead), (384,)):
        hidden = normal(*lead, H, dtype=torch.bfloat16, device=device)
        out = run(op.forward, {"hidden": hidden}, {"mhc_mult": n})["out"]
        assert torch.equal(out, hidden.unsqueeze(-2).expand(*lead, n, H))
        d_out = normal(*lead, n, H, dtype=torch.bfloat16, device=device)
        reference = lambda d_out: (oracle.expand_bwd(f64(d_out)),)  # noqa: E731
        check_gradients(op, {}, {"out": d_out}, reference, {"d_hidden": (1.6e-2, 1e-5)}, {"mhc_mult": n})


# ------------------------------------------------------------------ split mixes, head mix


@pytest.mark.parametrize(
    ("n", "rows"), [(2, (2, 37)), (3, (37,)), (5, (3, 41)), (8, (37,)), (16, (37,)), (4, (2, 37)), (4, (1,)), (4, (4099,))]
)
def test_split_mixes(device, n, rows):
    op = registry.get("mhc_pre_split_mixes")
    M = n * (n + 2)
    attrs = {"mhc_mult": n, "mhc_post_mult_value": 2.0, "mhc_pre_eps": 1e-2}
    tensors = {
        "input_mixes": normal(*rows, M, device=device),
        "mhc_scale": normal(3, device=device),
        "mhc_base": normal(M, device=device),
    }
    want = oracle.split_mixes(*map(f64, tensors.values()), n, 2.0, 1e-2)
    got = run(op.forward, tensors, attrs)
    bounds = (1e-5, 2e-5)
    for name, value in zip(op.returns, want, strict=True):
        close(got[name], value, bounds, name)
    cotangents = {name: normal(*value.shape, device=device) for name, value in got.items()}

    def reference(**given):
        return oracle.split_mixes_bwd(*map(f64, given.values()), *map(f64, tensors.values()), n, 2.0)

    check_gradients(op, tensors, cotangents, reference, dict.fromkeys(op.backward.outs, bounds), attrs, thorough=(n, rows) == (4, (2, 37)))


def test_split_mixes_without_post():
    """The gradient recomputes sigma, so a factor of zero is no special case."""
    op = registry.get("mhc_pre_split_mixes")
    tensors = {"input_mixes": normal(5, 24), "mhc_scale": normal(3), "mhc_base": normal(24), "d_post_layer_mix": normal(5, 4, 1)}
    got = run(op.backward, tensors, {"mhc_post_mult_value": 0.0})
    assert all(bool((value == 0).all()) for value in got.values())


@pytest.mark.parametrize(("n", "rows"), [(1, (37,)), (6, (3, 41)), (9, (37,)), (16, (37,)), (4, (2, 37)), (4, (1,)), (4, (17001,))])
def test_head_mix(device, n, rows):
    op = registry.get("mhc_head_compute_mix")
    tensors = {"input_mix": normal(*rows, n, device=device), "mhc_scale": normal(1, device=device), "mhc_base": normal(n, device=device)}
    got = run(op.forward, tensors, {"mhc_pre_eps": 1e-2})["out"]
    close(got, oracle.head_mix(*map(f64, tensors.values()), 1e-2), (1e-4, 1e-5))

    def reference(d_out):
        return oracle.head_mix_bwd(f64(d_out), *map(f64, tensors.values()))

    bounds = dict.fromkeys(op.backward.outs, (1e-4, 2e-5))
    check_gradients(op, tensors, {"out": normal(*got.shape, device=device)}, reference, bounds, thorough=n == 4)


# ------------------------------------------------------------------ Sinkhorn


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("repeat", [1, 2, 20])
def test_sinkhorn(device, n, repeat):
    op = registry.get("sinkhorn_normalize")
    attrs = {"repeat": repeat, "eps": 1e-6}
    for lead, scale in itertools.product(((2, 37), (1,)), (1.0, 20.0, 0.0)):
        x = normal(*lead, n, n, device=device, scale=scale)
        out = run(op.forward, {"x": x}, attrs)["out"]
        close(out, oracle.sinkhorn(f64(x), repeat, 1e-6), F32, f"logits of {scale}")
        reference = lambda d_out, x=x: (oracle.sinkhorn_bwd(f64(d_out), f64(x), repeat, 1e-6),)  # noqa: E731
        check_gradients(op, {"x": x}, {"out": normal(*x.shape, device=device)}, reference, {"d_x": F32}, attrs)


def test_sinkhorn_keeps_many_steps(device):
    op = registry.get("sinkhorn_normalize")
    attrs = {"repeat": 150, "eps": 1e-6}
    x, d_out = normal(3, 4, 4, device=device), normal(3, 4, 4, device=device)
    got = run(op.backward, {"x": x, "d_out": d_out}, attrs)["d_x"]
    close(got, oracle.sinkhorn_bwd(f64(d_out), f64(x), 150, 1e-6), F32)


# ------------------------------------------------------------------ apply mix, post


@pytest.mark.parametrize(("n", "lead"), [(1, (37,)), (8, (2, 3)), (4, (2, 37)), (4, (1,)), (4, ())])
def test_apply_mix(device, n, lead):
    op = registry.get("mhc_pre_apply_mix")
    for H in {(4, (1,)): (1280, 7168), (4, ()): (16384,), (8, (2, 3)): (128,)}.get((n, lead), (384,)):
        x = torch.sigmoid(normal(*lead, n, H)).to(torch.bfloat16).to(device)
        mix = torch.softmax(normal(*lead, n, 1), -2).to(device)
        out = run(op.forward, {"x": x, "mix": mix})["out"]
        close(out, oracle.apply_mix(f64(x), f64(mix)), (1e-2, 1e-3))
        tensors = {"x": x, "mix": mix}
        reference = lambda d_out, x=x, mix=mix: oracle.apply_mix_bwd(f64(d_out), f64(x), f64(mix))  # noqa: E731
        bounds = {"d_x": BF16, "d_mix": (1e-4, 1e-3)}
        d_out = normal(*lead, H, dtype=torch.bfloat16, device=device)
        check_gradients(op, tensors, {"out": d_out}, reference, bounds, accumulate=["d_x"], thorough=n == 4)


@pytest.mark.parametrize(("n", "lead"), [(1, (37,)), (8, (2, 3)), (4, (2, 37)), (4, (1,)), (4, ())])
def test_post(device, n, lead):
    op = registry.get("mhc_post")
    for H in {(4, (1,)): (1280, 7168), (4, ()): (16384,), (8, (2, 3)): (128,)}.get((n, lead), (384,)):
        tensors = {
            "x": normal(*lead, H, dtype=torch.bfloat16, device=device),
            "residual": normal(*lead, n, H, dtype=torch.bfloat16, device=device),
            "post_layer_mix": normal(*lead, n, 1, device=device),
            "comb_res_mix": normal(*lead, n, n, device=device),
        }
        values = [f64(t) for t in tensors.values()]
        close(run(op.forward, tensors)["out"], oracle.post(*values), BF16)
        reference = lambda d_out, values=values: oracle.post_bwd(f64(d_out), *values)  # noqa: E731
        bounds = {"d_x": BF16, "d_residual": BF16, "d_post_layer_mix": (1e-4, 1e-4), "d_comb_res_mix": (1e-4, 1e-4)}
        d_out = normal(*lead, n, H, dtype=torch.bfloat16, device=device)
        check_gradients(op, tensors, {"out": d_out}, reference, bounds, thorough=n == 4)


# ------------------------------------------------------------------ what is promised besides values


OPS = ["expand_to_mhc", "mhc_pre_split_mixes", "sinkhorn_normalize", "mhc_pre_apply_mix", "mhc_post", "mhc_head_compute_mix"]


def _arguments(rule, rows, device, sizes):
    env = {**rule.attrs, **sizes, "lead": (rows,)}
    return {name: normal(*rule.type_of(name, env)[0], dtype=TORCH[arg.dtype], device=device) for name, arg in rule.ins.items()}


@pytest.mark.parametrize("name", OPS)
def test_rows_do_not_depend_on_each_other_nor_runs(device, name):
    """Equal bits when run again; a row's results do not depend on how many rows there are."""
    op = registry.get(name)
    for rule in op.rules:
        tensors = _arguments(rule, 45, device, {"n": 4, "H": 1280})
        first, second = run(rule, tensors), run(rule, tensors)
        part = run(rule, {k: t[:7].contiguous() if rule.ins[k].rows else t for k, t in tensors.items()})
        for key, arg in rule.outs.items():
            assert torch.equal(first[key], second[key])
            if arg.rows:
                assert torch.equal(first[key][:7], part[key])


@pytest.mark.parametrize("name", OPS)
def test_no_rows(device, name):
    op = registry.get(name)
    for rule in op.rules:
        tensors = _arguments(rule, 0, device, {"n": 4, "H": 1280})
        for key, value in run(rule, tensors).items():
            assert value.numel() == 0 if rule.outs[key].rows else bool((value == 0).all())


def test_arguments_are_judged():
    x = torch.zeros(2, 4, 100, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="mhc_pre_apply_mix: x: expected H a positive multiple of 128, got H = 100"):
        run(registry.get("mhc_pre_apply_mix").forward, {"x": x, "mix": torch.zeros(2, 4, 1)})
    with pytest.raises(ValueError, match="mix: expected shape"):
        run(registry.get("mhc_pre_apply_mix").forward, {"x": torch.zeros(2, 4, 128, dtype=torch.bfloat16), "mix": torch.zeros(2, 4, 2)})
    with pytest.raises(ValueError, match="repeat: expected at least 1, got 0"):
        run(registry.get("sinkhorn_normalize").forward, {"x": torch.zeros(2, 4, 4)}, {"repeat": 0})
    with pytest.raises(ValueError, match="x: expected shape"):
        run(registry.get("sinkhorn_normalize").forward, {"x": torch.zeros(2, 4, 3)})
    with pytest.raises(ValueError, match="mhc_mult: expected mhc_mult >= 1, got 0"):
        run(registry.get("expand_to_mhc").forward, {"hidden": torch.zeros(2, 128, dtype=torch.bfloat16)}, {"mhc_mult": 0})
    with pytest.raises(TypeError, match="hidden: expected dtype bfloat16, got float32"):
        run(registry.get("expand_to_mhc").forward, {"hidden": torch.zeros(2, 128)})
