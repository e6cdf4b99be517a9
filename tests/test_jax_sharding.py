"""Rows spread over eight devices: right values, and the collectives that the compiled program holds, counted."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tk_jax
from tk_core import registry
from tk_jax import mhc

N, H = 4, 256
RNG = np.random.default_rng(1)

needs_eight = pytest.mark.skipif(jax.device_count() < 8, reason="jax was initialised with fewer than eight devices")
pytestmark = needs_eight


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def head(m, scale, base):
    return mhc.mhc_head_compute_mix(m, scale, base, 1e-3)


def norm_fn(residual, fn, weight):
    return mhc.mhc_pre_norm_fn(residual, fn, weight, 1e-6)


def split(m, scale, base):
    return mhc.mhc_pre_split_mixes(m, scale, base, N, 2.0, 1e-3)


def arguments(name, lead):
    """The function, its arguments, and which of them have rows."""
    if name == "mix":
        return mhc.mhc_pre_apply_mix, (normal(*lead, N, H, dtype=jnp.bfloat16), normal(*lead, N, 1)), (True, True)
    if name == "head":
        return head, (normal(*lead, N), normal(1), normal(N)), (True, False, False)
    if name == "norm_fn":
        return norm_fn, (normal(*lead, N, H, dtype=jnp.bfloat16), normal(24, N * H), normal(N * H)), (True, False, False)
    return split, (normal(*lead, 24), normal(3), normal(24)), (True, False, False)


def collectives(compiled):
    kinds = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    text = compiled.as_text()
    return {kind: count for kind in kinds if (count := len(re.findall(rf" {kind}(?:-start)?\(", text)))}


def mesh_of(types):
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(types,) * 2)


def place(mesh, array, spec):
    return jax.device_put(array, NamedSharding(mesh, spec))


def agree(got, want, rows):
    """Gradients of rows to the bit; sums over devices to rounding."""
    for a, b, exact in zip(got, want, rows, strict=True):
        assert a.dtype == b.dtype
        tol = 0 if exact else 2e-5
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tol, atol=tol * 10)


def pullback(f):
    def gradients(cotangents, *args):
        _, pull = jax.vjp(f, *args)
        return pull(cotangents)

    return gradients


def cotangents_of(f, args):
    return jax.tree.map(lambda o: normal(*o.shape, dtype=o.dtype), jax.eval_shape(f, *args))


EXPECTED = {"mix": {}, "head": {"all-reduce": 1}, "split": {"all-reduce": 1}, "norm_fn": {"all-reduce": 1}}
SPECS = [P("a", "b"), P(("a", "b")), P("a"), P(None, "b"), P("b", "a")]
CASES = [("mix", spec) for spec in SPECS] + [("head", P("a")), ("head", P("a", "b")), ("norm_fn", P("a", "b")), ("split", P("b", "a"))]


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(("name", "spec"), CASES, ids=str)
def test_sharded_rows_stay_where_they_are(name, types, spec):
    f, args, rows = arguments(name, (8, 4))
    cotangents = cotangents_of(f, args)
    want = jax.jit(pullback(f))(cotangents, *args)
    mesh = mesh_of(types)
    placed = [place(mesh, a, spec if r else P()) for a, r in zip(args, rows, strict=True)]
    forward = jax.jit(f).lower(*placed).compile()
    assert collectives(forward) == {}
    for out, plain in zip(jax.tree.leaves(forward(*placed)), jax.tree.leaves(f(*args)), strict=True):
        assert tuple(out.sharding.spec)[: len(spec)] == tuple(spec)
        np.testing.assert_array_equal(np.asarray(out), np.asarray(plain))
    given = jax.tree.map(lambda c: place(mesh, c, spec), cotangents)
    backward = jax.jit(pullback(f)).lower(given, *placed).compile()
    assert collectives(backward) == EXPECTED[name]
    got = backward(given, *placed)
    agree(got, want, rows)
    for gradient, r in zip(got, rows, strict=True):
        assert tuple(gradient.sharding.spec)[: len(spec)] == tuple(spec) if r else gradient.sharding.is_fully_replicated


@pytest.mark.parametrize("name", ["mix", "head", "split"])
def test_shard_map(name):
    f, args, rows = arguments(name, (8, 4))
    cotangents = cotangents_of(f, args)
    want = jax.jit(pullback(f))(cotangents, *args)
    specs = tuple(P("a", "b") if r else P() for r in rows)
    mesh = mesh_of(AxisType.Auto)
    outside = jax.jit(pullback(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("a", "b"))))
    inside = jax.jit(jax.shard_map(pullback(f), mesh=mesh, in_specs=(P("a", "b"), *specs), out_specs=specs))
    for run in (outside, inside):
        compiled = run.lower(cotangents, *args).compile()
        assert collectives(compiled) == EXPECTED[name]
        agree(compiled(cotangents, *args), want, rows)


def test_shard_map_with_unvarying_rows():
    f, args, rows = arguments("head", (8, 4))
    cotangents = cotangents_of(f, args)
    want = jax.jit(pullback(f))(cotangents, *args)
    mesh = mesh_of(AxisType.Auto)
    specs = (P("a"), P(), P())
    split_over_one = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("a"))
    agree(jax.jit(pullback(split_over_one))(cotangents, *args), want, rows)
    replicated = jax.shard_map(f, mesh=mesh, in_specs=(P(),) * 3, out_specs=P())
    agree(jax.jit(pullback(replicated))(cotangents, *args), want, rows)


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_sharded_inner_axis_is_gathered(types):
    f, args, rows = arguments("mix", (8, 4))
    mesh = mesh_of(types)
    placed = [place(mesh, args[0], P("a", None, None, "b")), place(mesh, args[1], P("a"))]
    compiled = jax.jit(f).lower(*placed).compile()
    assert set(collectives(compiled)) <= {"all-gather", "collective-permute", "all-to-all"}
    np.testing.assert_array_equal(np.asarray(compiled(*placed)), np.asarray(f(*args)))
    cotangents = cotangents_of(f, args)
    agree(jax.jit(pullback(f))(place(mesh, cotangents, P("a")), *placed), jax.jit(pullback(f))(cotangents, *args), rows)


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_arguments_that_are_sharded_differently(types):
    f, args, rows = arguments("mix", (8, 4))
    mesh = mesh_of(types)
    cotangents = cotangents_of(f, args)
    want = jax.jit(pullback(f))(cotangents, *args)
    for first, second in ((P("a"), P()), (P(), P("a", "b")), (P("a"), P("b")), (P("a"), P(None, "b"))):
        placed = [place(mesh, args[0], first), place(mesh, args[1], second)]
        np.testing.assert_array_equal(np.asarray(jax.jit(f)(*placed)), np.asarray(f(*args)))
        given = jax.typeof(jax.jit(f)(*placed)).sharding.spec if types is AxisType.Explicit else P("a")
        agree(jax.jit(pullback(f))(place(mesh, cotangents, given), *placed), want, rows)


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="jax 0.9 refuses such a sharding itself")
def test_rows_that_do_not_divide_are_not_padded_into_the_parameter_gradient():
    f, args, rows = arguments("head", (6, 3))
    mesh = mesh_of(AxisType.Auto)
    cotangents = cotangents_of(f, args)
    want = jax.jit(pullback(f))(cotangents, *args)

    def constrained(cotangents, m, scale, base):
        m = jax.lax.with_sharding_constraint(m * 1, NamedSharding(mesh, P("a", "b")))
        return pullback(f)(cotangents, m, scale, base)

    agree(jax.jit(constrained)(cotangents, *args), want, rows)


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_vmap_over_a_sharded_batch(types):
    f, args, _ = arguments("mix", (8, 4))
    mesh = mesh_of(types)
    placed = [place(mesh, a, P("a", "b")) for a in args]
    compiled = jax.jit(jax.vmap(f)).lower(*placed).compile()
    assert collectives(compiled) == {}
    np.testing.assert_array_equal(np.asarray(compiled(*placed)), np.asarray(f(*args)))


@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P("a", "b")], ids=str)
@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_vmap_of_gradients_over_a_sharded_batch(types, spec):
    f, args, rows = arguments("head", (4, 8))
    mesh = mesh_of(types)
    placed = [place(mesh, a, spec if r else P()) for a, r in zip(args, rows, strict=True)]
    grad = jax.jit(jax.vmap(jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2)), (0, None, None)))
    compiled = grad.lower(*placed).compile()
    # every example has its own parameter gradient: only the rows of one example are summed over devices
    assert collectives(compiled) == ({} if spec == P("a") else {"all-reduce": 1})
    agree(compiled(*placed), grad(*args), rows)


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_scan_and_checkpoint_under_a_mesh(types):
    _, (x, mix), _ = arguments("mix", (8, 4))
    mesh = mesh_of(types)

    def layer(x, mix):
        return x + mhc.mhc_pre_apply_mix(x, mix)[..., None, :], None

    def loss(x, mixes):
        return (jax.lax.scan(jax.checkpoint(layer), x, mixes)[0].astype(jnp.float32) ** 2).mean()

    mixes = jnp.stack([mix * 0.1, mix * 0.2])
    want = jax.jit(jax.grad(loss, (0, 1)))(x, mixes)
    placed = place(mesh, x, P("a", "b")), place(mesh, mixes, P(None, "a", "b"))
    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*placed).compile()
    assert collectives(compiled) == {}
    agree(compiled(*placed), want, (True, True))


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_accumulators_of_parameter_gradients_are_added_once(types):
    op = registry.get("mhc_pre_norm_fn")
    backward = tk_jax.bind_backward(op)
    _, (residual, fn, weight), _ = arguments("norm_fn", (8, 4))
    y, q = normal(8, 4, 24), jnp.abs(normal(8, 4)) + N * H
    g, held = normal(8, 4, 24), normal(24, N * H)

    def step(held, g, residual, fn, weight, y, q):
        return backward(g, residual, fn, weight, y, q, wanted=["d_mhc_fn"], acc={"d_mhc_fn": held})["d_mhc_fn"]

    args = (held, g, residual, fn, weight, y, q)
    want = jax.jit(step)(*args)
    mesh = mesh_of(types)
    rows = (False, True, True, False, False, True, True)
    placed = [place(mesh, a, P("a", "b") if r else P()) for a, r in zip(args, rows, strict=True)]
    np.testing.assert_allclose(jax.jit(step)(*placed), want, rtol=1e-4, atol=1e-4)


def test_a_mesh_in_context():
    f, args, rows = arguments("split", (8, 4))
    cotangents = cotangents_of(f, args)
    want = jax.jit(pullback(f))(cotangents, *args)
    for types in (AxisType.Auto, AxisType.Explicit):
        with jax.set_mesh(mesh_of(types)):
            placed = [jax.device_put(a, P("a", "b") if r else P()) for a, r in zip(args, rows, strict=True)]
            given = jax.tree.map(lambda c: jax.device_put(c, P("a", "b")), cotangents)
            agree(jax.jit(pullback(f))(given, *placed), want, rows)
            # arrays that nobody has placed, and no jit
            agree(pullback(f)(cotangents, *args), want, rows)
