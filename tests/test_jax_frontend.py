"""The JAX front end: values, gradients, zero rows, errors."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_arrays import H, N, close, double, head, mix_args, normal, same, split, split_args, split_gradients

import tk_core
import tk_jax
from tk_core import registry
from tk_jax import mhc

# ------------------------------------------------------------------ values and gradients


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
@pytest.mark.parametrize("lead", [(), (1,), (37,), (3, 5), (2, 3, 2)])
def test_values_and_gradients(lead, wrap):
    x, mix = mix_args(*lead)
    g = normal(*lead, H, dtype=jnp.bfloat16)
    out, pull = jax.vjp(wrap(mhc.mhc_pre_apply_mix), x, mix)
    dx, dmix = wrap(pull)(g)
    close(out, (double(x) * double(mix)).sum(-2), 2e-2)
    close(dx, double(mix) * double(g)[..., None, :], 2e-2)
    close(dmix[..., 0], (double(x) * double(g)[..., None, :]).sum(-1), 1e-4)


@pytest.mark.parametrize("given", [c for c in itertools.product([True, False], repeat=3) if any(c)])
def test_absent_cotangents(given):
    args = split_args(9)
    outs = split(*args)
    cotangents = [normal(*o.shape) if there else None for o, there in zip(outs, given, strict=True)]

    def chosen(*args):
        return [o for o, there in zip(split(*args), given, strict=True) if there]

    _, pull = jax.vjp(jax.jit(chosen), *args)
    got = pull([c for c in cotangents if c is not None])
    for a, b in zip(got, split_gradients(*args, cotangents), strict=True):
        close(a, b, 1e-4)


@pytest.mark.parametrize("which", [w for r in (1, 2, 3) for w in itertools.combinations(range(3), r)])
@pytest.mark.parametrize(("f", "make"), [(split, split_args), (head, lambda *lead: (normal(*lead, N), normal(1), normal(N)))])
def test_only_the_wanted_gradients_are_computed(f, make, which):
    args = make(9)

    def loss(*args):
        return sum((o**2).sum() for o in jax.tree.leaves(f(*args)))

    every = jax.jit(jax.grad(loss, (0, 1, 2)))(*args)
    grad = jax.jit(jax.grad(loss, which))
    same(grad(*args), tuple(every[i] for i in which))
    names = [f"d_{('input_mixes', 'mhc_scale', 'mhc_base')[i]}" for i in which]
    if f is split:
        assert f"-> {', '.join(names)}\n" in str(jax.make_jaxpr(grad)(*args))


def test_no_gradient_is_computed_where_none_is_asked_for():
    x, mix = mix_args(3)
    text = str(jax.make_jaxpr(jax.grad(lambda s: (s * mhc.mhc_pre_apply_mix(x, mix)).sum().astype(jnp.float32)))(jnp.bfloat16(1)))
    assert "_bwd" not in text


def test_an_optional_argument():
    residual, fn, weight = normal(5, N, H, dtype=jnp.bfloat16), normal(24, N * H), normal(N * H)

    def reference(fn, weight):
        x = double(residual).reshape(5, -1)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) @ (fn if weight is None else fn * weight).T

    close(mhc.mhc_pre_norm_fn(residual, fn, weight, 1e-6), reference(double(fn), double(weight)), 1e-3)
    close(mhc.mhc_pre_norm_fn(residual, fn, None, 1e-6), reference(double(fn), None), 1e-3)
    without = jax.grad(lambda r, f: mhc.mhc_pre_norm_fn(r, f, None, 1e-6).sum(), (0, 1))(residual, fn)
    ones = jax.grad(lambda r, f: mhc.mhc_pre_norm_fn(r, f, jnp.ones(N * H), 1e-6).sum(), (0, 1))(residual, fn)
    for a, b in zip(without, ones, strict=True):
        close(a, b, 1e-2)


@pytest.mark.parametrize("lead", [(0,), (4, 0), (0, 3)])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_zero_rows(lead, wrap):
    m, scale, base = split_args(*lead)
    tk_core.reset_stats()
    outs, pull = jax.vjp(wrap(split), m, scale, base)
    assert [o.shape for o in outs] == [(*lead, N, 1), (*lead, N, 1), (*lead, N, N)]
    dm, dscale, dbase = pull(outs)
    assert dm.shape == m.shape
    same((dscale, dbase), (jnp.zeros(3), jnp.zeros(N * (N + 2))))
    assert tk_core.stats()["launches"] == {}


def test_numpy_arguments_and_weak_types():
    x, mix = mix_args(3)
    same(mhc.mhc_pre_apply_mix(np.asarray(x), np.asarray(mix)), mhc.mhc_pre_apply_mix(x, mix))
    weak = jnp.broadcast_to(jnp.asarray(2.0), (3, N, 1))
    assert weak.weak_type
    assert not mhc.mhc_pre_apply_mix(x, weak).weak_type
    close(mhc.mhc_pre_apply_mix(x, weak), 2 * double(x).sum(-2), 5e-2)
    same(head(normal(3, N), jnp.float32(0.0), jnp.zeros(N)), jnp.full((3, N), np.float32(0.5) + np.float32(1e-3)))


# ------------------------------------------------------------------ errors


def test_errors_are_those_of_the_core():
    x, mix = mix_args(3)
    f = mhc.mhc_pre_apply_mix
    for wrap in (lambda f: f, jax.jit, jax.eval_shape, jax.vmap):
        call = (lambda *a: jax.eval_shape(f, *a)) if wrap is jax.eval_shape else wrap(f)
        with pytest.raises(TypeError, match="mhc_pre_apply_mix: x: expected dtype bfloat16, got float32"):
            call(x.astype(jnp.float32), mix)
    with pytest.raises(ValueError, match=r"mhc_pre_apply_mix: mix: expected shape \(..., n, 1\) with n = 4, got \(3, 3, 1\)"):
        f(x, mix[:, :3])
    with pytest.raises(ValueError, match=r"leading axes \(3,\), those of the other arguments"):
        f(x, mix[:2])
    with pytest.raises(TypeError, match=r"mhc_pre_apply_mix: mix: expected a float32 array of shape \(..., n, 1\), got float"):
        f(x, 1.0)
    with pytest.raises(TypeError, match=r"mhc_pre_apply_mix: mix: expected a float32 array of shape \(..., n, 1\), got None"):
        f(x, None)
    with pytest.raises(TypeError, match="mix: expected dtype float32, got float64"):
        f(x, np.ones((3, N, 1)))
    with pytest.raises(TypeError, match="sinkhorn_normalize: repeat: expected a value of type int"):
        mhc.sinkhorn_normalize(normal(3, N, N), repeat=2.5)
    with pytest.raises(TypeError, match="unknown name"):
        tk_jax.bind(registry.get("sinkhorn_normalize"))(normal(3, N, N), epsilon=1.0)
    with pytest.raises(TypeError, match="at most 2 arrays"):
        tk_jax.bind(registry.get("mhc_pre_apply_mix"))(x, mix, x)


def test_a_traced_attribute_raises():
    with pytest.raises(TypeError, match="sinkhorn_normalize: eps: expected a value of type float"):
        jax.jit(lambda x, eps: mhc.sinkhorn_normalize(x, eps=eps))(normal(3, N, N), 1e-6)


def test_second_derivatives_and_forward_mode_raise():
    x, mix = mix_args(3)

    def loss(mix):
        return (mhc.mhc_pre_apply_mix(x, mix).astype(jnp.float32) ** 2).sum()

    def slope(mix):
        return jax.grad(loss)(mix).sum()

    for wrap in (lambda f: f, jax.jit, jax.checkpoint):
        with pytest.raises(NotImplementedError, match="mhc_pre_apply_mix: double backward is not implemented"):
            jax.grad(wrap(slope))(mix)
    with pytest.raises(NotImplementedError, match="double backward is not implemented"):
        jax.hessian(loss)(mix)
    with pytest.raises(TypeError, match="jvp"):
        jax.jvp(loss, (mix,), (mix,))
