"""vmap in every composition, scan, checkpoint, abstract evaluation, export."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax_arrays import close, mix_args, normal, same, scalar_loss, split, split_args

import tk_core
from tk_jax import ffi, mhc

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
