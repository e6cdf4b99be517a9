"""What the casts promise in JAX beside their bits: gradients, transforms, meshes, donation."""

import functools

import numpy as np
import pytest
from quant_arrays import normal, same
from quant_fixtures import jax, jq  # noqa: F401 - fixtures

from tk_core.reference import quant as q


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
