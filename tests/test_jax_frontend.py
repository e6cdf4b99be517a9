"""The JAX front end: values, gradients, vmap, the other transformations, errors."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tk_core
import tk_jax
from tk_core import registry
from tk_jax import ffi, mhc

N, H = 4, 256
RNG = np.random.default_rng(0)


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def mix_args(*lead):
    return normal(*lead, N, H, dtype=jnp.bfloat16), normal(*lead, N, 1)


def split_args(*lead):
    return normal(*lead, N * (N + 2)), normal(3), normal(N * (N + 2))


def split(m, scale, base):
    return mhc.mhc_pre_split_mixes(m, scale, base, N, 2.0, 1e-3)


def head(m, scale, base):
    return mhc.mhc_head_compute_mix(m, scale, base, 1e-3)


def double(a):
    return np.asarray(a, np.float64)


def close(a, b, tol):
    np.testing.assert_allclose(double(a), double(b), rtol=tol, atol=tol)


def same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(double(x), double(y))


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def split_gradients(m, scale, base, cotangents):
    """Gradients of split_mixes in fp64; a cotangent may be None."""
    m, scale, base = double(m).reshape(-1, N * (N + 2)), double(scale), double(base)
    z = m * np.repeat(scale, [N, N, N * N]) + base
    s = sigmoid(z)
    factor = np.concatenate([s[:, :N] * (1 - s[:, :N]), 2 * s[:, N : 2 * N] * (1 - s[:, N : 2 * N]), np.ones_like(z[:, 2 * N :])], 1)
    widths = (N, N, N * N)
    given = [np.zeros((len(m), w)) if c is None else double(c).reshape(-1, w) for c, w in zip(cotangents, widths, strict=True)]
    g = np.concatenate(given, 1)
    dz = g * factor
    parts = np.split(dz * m, [N, 2 * N], axis=1)
    return dz * np.repeat(scale, [N, N, N * N]), np.array([p.sum() for p in parts]), dz.sum(0)


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


# ------------------------------------------------------------------ vmap


def loop(f, axes, args):
    """What vmap must give, by indexing."""
    size = next(jax.tree.leaves(a)[0].shape[axis] for a, axis in zip(args, axes, strict=True) if axis is not None)
    rows = [f(*(a if axis is None else jnp.take(a, i, axis) for a, axis in zip(args, axes, strict=True))) for i in range(size)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)


def batch(arrays, axes, size=3):
    """A batch along the given axis of every array that has one."""

    def copies(array, axis):
        return jnp.stack([array * (1 + i / 4) for i in range(size)], axis).astype(array.dtype)

    return [a if axis is None else copies(a, axis) for a, axis in zip(arrays, axes, strict=True)]


def at(arrays, *index):
    return jax.tree.map(lambda a: a[index], arrays)


def scalar_loss(f):
    return lambda *args: sum((o.astype(jnp.float32) ** 2).sum() for o in jax.tree.leaves(f(*args)))


AXES = [(0, 0, 0), (1, None, None), (None, 0, None), (None, None, 1), (None, 0, 0), (1, 0, None), (0, None, 1)]


@pytest.mark.parametrize("axes", AXES)
def test_vmap_with_parameters(axes):
    args = batch(split_args(5), axes)
    same(jax.vmap(split, axes)(*args), loop(split, axes, args))
    grad = jax.grad(scalar_loss(split), (0, 1, 2))
    same(jax.jit(jax.vmap(grad, axes))(*args), loop(grad, axes, args))


@pytest.mark.parametrize("axes", [(0, 0), (1, 0), (0, None), (None, 1), (2, None), (None, 2)])
def test_vmap_of_rows(axes):
    args = batch(mix_args(5), axes)
    f = mhc.mhc_pre_apply_mix
    same(jax.vmap(f, axes)(*args), loop(f, axes, args))
    for which in ((0,), (1,), (0, 1)):
        grad = jax.grad(scalar_loss(f), which)
        same(jax.vmap(grad, axes)(*args), loop(grad, axes, args))


def test_a_batch_of_rows_is_one_launch():
    x, mix = mix_args(3, 5)
    tk_core.reset_stats()
    jax.block_until_ready(jax.jit(jax.vmap(mhc.mhc_pre_apply_mix))(x, mix))
    assert tk_core.stats()["launches"] == {"mhc_pre_apply_mix.apply_mix": 1}


def test_a_batch_of_rows_over_a_batch_of_parameters():
    m, scale, base = normal(2, 3, 5, 24), normal(3, 3), normal(24)
    heads = jax.vmap(split, (0, 0, None))
    got = jax.jit(jax.vmap(heads, (0, None, None)))(m, scale, base)
    tk_core.reset_stats()
    same(got, jax.jit(jax.vmap(heads, (0, None, None)))(m, scale, base))
    assert tk_core.stats()["launches"] == {"mhc_pre_split_mixes.split_mixes": 3}
    for i, j in itertools.product(range(2), range(3)):
        same(at(got, i, j), split(m[i, j], scale[j], base))
    one = jax.vmap(jax.vmap(split, (None, 0, None)), (0, None, None))(m[:, 0], scale, base)
    for i, j in itertools.product(range(2), range(3)):
        same(at(one, i, j), split(m[i, 0], scale[j], base))


def test_nested_vmap_and_the_gradient_of_vmap():
    m, scale, base = normal(2, 3, 5, 24), normal(2, 3), normal(3, 24)
    twice = jax.vmap(jax.vmap(split, (0, None, 0)), (0, 0, None))
    grad = jax.grad(scalar_loss(split), (0, 1, 2))
    got = jax.jit(jax.vmap(jax.vmap(grad, (0, None, 0)), (0, 0, None)))(m, scale, base)
    for i, j in itertools.product(range(2), range(3)):
        same(at(twice(m, scale, base), i, j), split(m[i, j], scale[i], base[j]))
        same(at(got, i, j), grad(m[i, j], scale[i], base[j]))
    outer = jax.grad(scalar_loss(twice), (0, 1, 2))(m, scale, base)
    close(outer[1], got[1].sum(1), 1e-4)
    close(outer[2], got[2].sum(0), 1e-4)
    same(outer[0], got[0])


def test_an_empty_batch():
    m, scale, base = normal(0, 5, 24), normal(3), normal(24)
    grads = jax.vmap(jax.grad(scalar_loss(split), (0, 1)), (0, None, None))(m, scale, base)
    assert [g.shape for g in grads] == [(0, 5, 24), (0, 3)]


# ------------------------------------------------------------------ other transformations


def test_scan_checkpoint_and_jit():
    x, mix = mix_args(6)

    def layer(x, mix):
        return x + mhc.mhc_pre_apply_mix(x, mix)[:, None, :], None

    def stack(x, mixes, wrap):
        return (jax.lax.scan(wrap(layer), x, mixes)[0].astype(jnp.float32) ** 2).sum()

    mixes = jnp.stack([mix * 0.1, mix * 0.2, mix * 0.3])

    def unrolled(x, mixes):
        for mix in mixes:
            x, _ = layer(x, mix)
        return (x.astype(jnp.float32) ** 2).sum()

    want = jax.jit(jax.value_and_grad(unrolled, (0, 1)))(x, mixes)
    for wrap in (lambda f: f, jax.checkpoint, jax.jit):
        same(jax.jit(jax.value_and_grad(lambda a, b, w=wrap: stack(a, b, w), (0, 1)))(x, mixes)[1], want[1])


def test_abstract_evaluation_compiles_and_launches_nothing():
    tk_core.reset_stats()
    x = jax.ShapeDtypeStruct((7, 4, 12345 * 128), jnp.bfloat16)
    mix = jax.ShapeDtypeStruct((7, 4, 1), jnp.float32)
    out = jax.eval_shape(mhc.mhc_pre_apply_mix, x, mix)
    assert (out.shape, out.dtype) == ((7, 12345 * 128), jnp.bfloat16)
    assert "mhc_pre_apply_mix(x, mix) -> out" in str(jax.make_jaxpr(mhc.mhc_pre_apply_mix)(x, mix))
    stats = tk_core.stats()
    assert (stats["compiles"], stats["loads"], stats["launches"]) == (0, 0, {})


def test_row_counts_compile_no_kernel():
    f = jax.jit(jax.grad(scalar_loss(mhc.mhc_pre_apply_mix), (0, 1)))
    jax.block_until_ready(f(*mix_args(2)))
    tk_core.reset_stats()
    for rows in (1, 3, 17, 64, 65):
        jax.block_until_ready(f(*mix_args(rows)))
    stats = tk_core.stats()
    assert (stats["compiles"], stats["loads"]) == (0, 0)
    assert stats["launches"]["mhc_pre_apply_mix.apply_mix"] == 5


def test_ahead_of_time_compilation():
    x, mix = mix_args(3)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, mix)]
    compiled = jax.jit(mhc.mhc_pre_apply_mix).lower(*shapes).compile()
    same(compiled(x, mix), mhc.mhc_pre_apply_mix(x, mix))


def test_export_and_back():
    pytest.importorskip("flatbuffers")
    args = split_args(3)
    checks = [jax.export.DisabledSafetyCheck.custom_call(ffi.TARGET)]
    exported = jax.export.export(jax.jit(split), disabled_checks=checks)(*args)
    again = jax.export.deserialize(exported.serialize())
    same(again.call(*args), split(*args))


# ------------------------------------------------------------------ gradients that are accumulated in place


def test_accumulators():
    op = registry.get("mhc_pre_apply_mix")
    backward = tk_jax.bind_backward(op)
    x, mix = mix_args(5)
    g, held = normal(5, H, dtype=jnp.bfloat16), normal(5, N, H, dtype=jnp.bfloat16)
    plain = backward(g, x, mix)
    added = backward(g, x, mix, acc={"d_x": held})
    close(added["d_x"], double(held) + double(mix) * double(g)[:, None], 2e-2)
    same(added["d_mix"], plain["d_mix"])
    only = backward(g, x, mix, wanted=["d_x"])
    assert list(only) == ["d_x"]
    same(only["d_x"], plain["d_x"])
    with pytest.raises(ValueError, match="mhc_pre_apply_mix_bwd: acc_d_x: expected shape"):
        backward(g, x, mix, acc={"d_x": held[:2]})
    none = jax.jit(lambda *a: backward(*a, wanted=["d_x"], acc={"d_x": held[:0]}))(g[:0], x[:0], mix[:0])
    same(none["d_x"], held[:0])


def test_parameter_accumulators_keep_their_value_where_there_are_no_rows():
    backward = tk_jax.bind_backward(registry.get("mhc_pre_norm_fn"))
    held, fn = normal(24, N * H), normal(24, N * H)
    empty = normal(0, 24), normal(0, N, H, dtype=jnp.bfloat16), fn, None, normal(0, 24), normal(0)
    same(backward(*empty, wanted=["d_mhc_fn"], acc={"d_mhc_fn": held})["d_mhc_fn"], held)
    same(backward(*empty, wanted=["d_mhc_fn"])["d_mhc_fn"], jnp.zeros_like(held))


def test_an_operation_without_a_gradient():
    from tk_core.op import Launch, declare

    def build(P):
        raise AssertionError("no kernel is needed to trace")

    floats = tk_jax.bind(declare("tk_test_floats", "test", "x[..., H]:f32 -> y[..., H]:f32", [Launch(build, "x -> y")]))
    indices = tk_jax.bind(declare("tk_test_indices", "test", "x[..., H]:f32 -> y[..., H]:i32", [Launch(build, "x -> y")]))
    with pytest.raises(NotImplementedError, match="tk_test_floats: the gradient is not implemented"):
        jax.eval_shape(jax.grad(lambda x: floats(x).sum()), normal(3, 8))
    jax.eval_shape(jax.grad(lambda x: (x * indices(x)).sum()), normal(3, 8))


def test_a_donated_accumulator_is_not_copied():
    op = registry.get("mhc_pre_apply_mix")
    x, mix = mix_args(5)
    g, held = normal(5, H, dtype=jnp.bfloat16), normal(5, N, H, dtype=jnp.bfloat16)
    want = tk_jax.bind_backward(op)(g, x, mix, acc={"d_x": held})["d_x"]

    def step(held, g, x, mix):
        return tk_jax.bind_backward(op)(g, x, mix, wanted=["d_x"], acc={"d_x": held})["d_x"]

    kept = jax.jit(step).lower(held, g, x, mix).compile()
    donated = jax.jit(step, donate_argnums=0).lower(held, g, x, mix).compile()
    assert " copy(" in kept.as_text()
    assert " copy(" not in donated.as_text()
    fresh = jnp.array(held, copy=True)
    same(kept(fresh, g, x, mix), want)
    same(fresh, held)
    # one that NumPy has not looked at, which would keep its memory
    fresh = jnp.array(held, copy=True)
    place = fresh.unsafe_buffer_pointer()
    out = donated(fresh, g, x, mix)
    assert out.unsafe_buffer_pointer() == place
    assert fresh.is_deleted()
    same(out, want)


# ------------------------------------------------------------------ the dispatcher


def dispatch(text, *arrays):
    ffi.register("cpu")
    call = jax.ffi.ffi_call(ffi.TARGET, [jax.ShapeDtypeStruct((1,), jnp.float32)])
    return jax.block_until_ready(jax.jit(lambda *a: call(*a, number=ffi.define(text), text=text))(*arrays))


def test_the_dispatcher_passes_every_scalar_exactly_and_none_for_absent_tensors():
    from tk_core.ffi import tvm_ffi

    seen = []

    def record(first, absent, second, *scalars):
        seen.append((tuple(first.shape), absent, tuple(second.shape), *scalars))

    tvm_ffi.register_global_func("tk.test.record", record, override=True)
    floats = [1e-6, 0.1, float(np.float32(0.1)), -0.0, 3.4028234663852886e38, 1e-45, float("inf"), 1 / 3]
    ints = [0, 1, -1, 2**31, 2**31 - 1, -(2**31), 2**53 + 1]
    dispatch(ffi.encode("tk.test.record", [1, -1, 0], [*floats, *ints, True]), jnp.ones(3), jnp.ones(5))
    ((first, absent, second, *scalars),) = seen
    assert absent is None
    assert (first, second) == ((5,), (3,))
    assert [float(s).hex() for s in scalars[: len(floats)]] == [f.hex() for f in floats]
    assert all(type(s) is float for s in scalars[: len(floats)])
    assert scalars[len(floats) :] == [*ints, 1]


def test_what_is_not_loaded_raises():
    with pytest.raises(Exception, match=r"kernel nobody \(0123\) is not loaded in this process and not in the cache"):
        dispatch("tk.nobody.0123|0,1|", jnp.ones(3))
    with pytest.raises(Exception, match="too few buffers"):
        from tk_core.ffi import tvm_ffi

        tvm_ffi.register_global_func("tk.test.record", lambda *args: None, override=True)
        dispatch("tk.test.record|0,7|", jnp.ones(3))
    with pytest.raises(Exception, match=r"call tk_jax\.load"):
        call = jax.ffi.ffi_call(ffi.TARGET, [jax.ShapeDtypeStruct((1,), jnp.float32)])
        jax.block_until_ready(jax.jit(lambda a: call(a, number=12345, text="?"))(jnp.ones(3)))
    with pytest.raises(ValueError, match="not of the form"):
        ffi.define("no bars here")


def test_launches_are_counted_by_kernel():
    x, mix = mix_args(3)
    f = jax.jit(jax.grad(scalar_loss(mhc.mhc_pre_apply_mix), (0, 1)))
    jax.block_until_ready(f(x, mix))
    tk_core.reset_stats()
    for _ in range(3):
        jax.block_until_ready(f(x, mix))
    assert tk_core.stats()["launches"] == {"mhc_pre_apply_mix.apply_mix": 3, "mhc_pre_apply_mix_bwd.apply_mix_bwd": 3}
    tk_core.reset_stats()
    assert tk_core.stats()["launches"] == {}
