"""What the routing functions promise in JAX beside their bits: jit, traced ranks, devices, 64 bits, vmap, residuals, debug mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from moe_arrays import normal, routing
from moe_fronts import GATE, TOP2

from tk_core import config, kernels
from tk_core.reference import moe_mapping as mm
from tk_jax import moe

T, K, E, H, A = 8, 2, 8, 16, 2
IDX = routing(T, K, E).astype(np.int32)
MAPS = mm.fused_mapping(IDX, E, A)
WHERE, OWNERS, SLOTS, N = MAPS.token_topk_to_pos, MAPS.pos_to_expert, MAPS.pos_to_token_topk, MAPS.pos_to_expert.size
BIAS = normal((E,))
ON = np.arange(T) % 3 > 0

needs_eight = pytest.mark.skipif(jax.device_count() < 8, reason="jax was initialised with fewer than eight devices")


def same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture
def debug():
    config.set_debug(True)
    yield
    config.set_debug(False)


def gate(logits, **named):
    return moe.top2_sum_gate(logits, BIAS, num_topk=K, **{**TOP2, **named})


def chain(x, logits):
    """To the experts and back."""
    out = gate(logits, num_seqs=2)
    maps = moe.fused_mapping(out.topk_idx, num_experts=E, alignment=A)
    rows = moe.expand_to_fused(x, maps.token_topk_to_pos, maps.pos_to_expert)
    y = moe.reduce_fused(rows * 2, out.topk_weights, maps.token_topk_to_pos)
    counts = moe.group_count(out.unmapped_topk_idx, E, num_seqs=2)
    return y, moe.load_balance_loss(out.scores_sum, counts, T // 2, K, 0.1)


def loss(x, logits):
    y, aux = chain(x, logits)
    return (y**2).sum() + aux


def row_major(n):
    """A stack of inputs of the chain."""
    return jnp.asarray(normal((n, T, H))), jnp.asarray(normal((n, T, E)))


# ------------------------------------------------------------------ jit, vmap and others


def test_another_routing_compiles_nothing():
    traces = []

    @jax.jit
    def step(x, logits):
        traces.append(1)
        return jax.value_and_grad(loss, (0, 1))(x, logits)

    xs, logits = row_major(5)
    jax.block_until_ready(step(xs[0], logits[0]))
    kernels.reset_stats()
    for x, y in zip(xs, logits, strict=True):
        value, slopes = step(x, y)
        assert np.isfinite(value)
        assert all(np.isfinite(g).all() for g in slopes)
    assert len(traces) == 1
    assert kernels.stats()["compiles"] == kernels.stats()["loads"] == 0


def test_vmap():
    xs, logits = row_major(3)
    grad = jax.grad(loss, (0, 1))
    for f in (lambda x, y: chain(x, y)[0], grad):
        each = [f(x, y) for x, y in zip(xs, logits, strict=True)]
        same(jax.jit(jax.vmap(f))(xs, logits), jax.tree.map(lambda *rows: jnp.stack(rows), *each))
    for call in (
        lambda s: moe.topk_gate(s, K),
        moe.normalize_weight,
        lambda s: moe.scores_sum(jnp.abs(s), None, 2),
        lambda s: moe.moe_topk_gate(s, num_topk=K, **GATE, force_random=ON, num_seqs=1),
    ):
        same(jax.vmap(call)(logits), jax.tree.map(lambda *rows: jnp.stack(rows), *(call(y) for y in logits)))
    idx = jnp.asarray(np.stack([IDX, IDX[::-1]]))
    for call in (
        lambda i: moe.mask_indices_by_tp(i, E, 4, 1, 2),
        lambda i: moe.unique_group_indices(i, E),
        lambda i: moe.aux_fi(i, E, K),
        lambda i: tuple(moe.fused_mapping(i, num_experts=E, alignment=A)),
    ):
        same(jax.vmap(call)(idx), jax.tree.map(lambda *rows: jnp.stack(rows), *(call(i) for i in idx)))


def test_scan_and_checkpoint():
    xs, logits = row_major(3)
    want = jax.grad(lambda xs: sum(loss(x, y) for x, y in zip(xs, logits, strict=True)))(xs)

    def total(xs):
        return jax.lax.scan(lambda c, pair: (c + jax.checkpoint(loss)(*pair), None), 0.0, (xs, logits))[0]

    same(jax.jit(jax.grad(total))(xs), want)


def test_shapes_are_known_without_compiling():
    kernels.reset_stats()
    out = jax.eval_shape(lambda x: moe.moe_topk_gate(x, num_topk=7, **GATE, num_seqs=3), jax.ShapeDtypeStruct((9, 1777), jnp.float32))
    assert [(a.shape, a.dtype) for a in out] == [((9, 7), jnp.int32), ((9, 7), jnp.float32), ((9, 7), jnp.int32), ((3, 1777), jnp.float32)]
    maps = jax.eval_shape(lambda i: moe.fused_mapping(i, num_experts=999, alignment=16), jax.ShapeDtypeStruct((9, 7), jnp.int32))
    assert maps.pos_to_expert.shape == (moe.max_num_expanded_tokens(9, 7, 999, 16),)
    assert maps.num_dropped.shape == ()
    assert (kernels.stats()["compiles"], kernels.stats()["launches"]) == (0, {})


def test_numpy_arrays_are_taken():
    x, logits = normal((T, H)), normal((T, E))
    same(gate(logits), gate(jnp.asarray(logits)))
    same(moe.expand_to_fused(x, WHERE, OWNERS), moe.expand_to_fused(*map(jnp.asarray, (x, WHERE, OWNERS))))
    assert isinstance(moe.group_count(IDX, E), jax.Array)
    same(moe.group_count(IDX.astype(np.int64), E), moe.group_count(IDX, E))


def test_int64_under_x64():
    """Indices keep their width where they come back, positions and counts are 32 bits wide, and nothing wraps."""
    x, w = normal((T, E)), normal((T, K))
    far = IDX.astype(np.int64)
    far[0], far[1, 0] = (2**32 + 1, 2**40), -(2**40)
    near = np.where((far < 0) | (far >= E), -1, far).astype(np.int32)
    every = np.ones(T, bool)
    calls = (
        lambda i: moe.group_count(i, E),
        lambda i: moe.aux_fi(i, E, K),
        lambda i: tuple(moe.fused_mapping(i, num_experts=E, alignment=A)),
        lambda i: moe.get_fused_mapping(i, E, 20, A)[:7],
        lambda i: moe.psum_num_tokens_per_expert(i, MAPS.expert_start),
        lambda i: moe.moe_topk_gate_backward(np.abs(x), i, w, w, 1.5),
        lambda i: tuple(moe.moe_topk_gate(x, num_topk=K, **GATE, fix_routing_mask=every, fixed_topk_idx=i)[:3]),
    )
    narrow = [call(jnp.asarray(near)) for call in calls]
    with jax.enable_x64(True):
        i = jnp.asarray(far)
        assert i.dtype == jnp.int64
        for call, want in zip(calls, narrow, strict=True):
            same(call(i), want)
            same(jax.jit(call)(i), want)
        masked, unique = moe.mask_indices_by_tp(i, E, 1, 0, 1), moe.unique_group_indices(i, E)
        assert masked.dtype == unique.dtype == jnp.int64
        np.testing.assert_array_equal(masked, near)
        np.testing.assert_array_equal(unique[0], far[0])
        with pytest.raises(TypeError, match="topk_gate: scores: expected dtype float32, got float64"):
            moe.topk_gate(jnp.asarray(x, jnp.float64), K)


# ------------------------------------------------------------------ devices


@needs_eight
def test_ranks_from_the_mesh():
    """One program for all ranks, which gives what static ranks give; every slot is kept by one tensor-parallel rank."""
    mesh = jax.make_mesh((4, 2), ("ep", "tp"), axis_types=(AxisType.Auto,) * 2)
    logits, g = jnp.asarray(normal((T, E))), jnp.asarray(normal((T, K)))
    table = jnp.asarray(np.random.default_rng(0).integers(0, E + 2, (E, 3)), jnp.int32)
    named = {"to_physical_map": table, "logical_count": jnp.full(E, 3, jnp.int32), "num_ep_ranks": 4, "num_tp_ranks": 2}

    def one(ep, tp, logits):
        def local(logits):
            out = gate(logits, **named, ep_rank=ep, tp_rank=tp)
            return (out.topk_weights * g * (out.topk_idx >= 0)).sum()

        out = gate(logits, **named, ep_rank=ep, tp_rank=tp)
        masked = moe.mask_indices_by_tp(jnp.asarray(IDX), E, 4, tp, 2)
        parts = out.topk_idx, out.topk_weights, out.unmapped_topk_idx, masked, jax.grad(local)(logits)
        return tuple(part[None, None] for part in parts)

    def body(logits):
        return one(jax.lax.axis_index("ep"), jax.lax.axis_index("tp"), logits[0, 0])

    copies = jnp.broadcast_to(logits, (4, 2, T, E))
    got = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("ep", "tp"), out_specs=P("ep", "tp")))(copies)
    for ep in range(4):
        for tp in range(2):
            same([part[ep, tp] for part in got], [part[0, 0] for part in one(ep, tp, logits)])
    whole = jax.grad(lambda x: (gate(x).topk_weights * g).sum())(logits)
    for ep in range(4):
        assert ((got[0][ep] >= 0).sum(0) == 1).all()
        np.testing.assert_allclose(got[4][ep].sum(0), whole, rtol=1e-5, atol=1e-6)
    same(got[1][0, 0], got[1][3, 1])


@needs_eight
def test_tokens_spread_over_devices():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    xs, logits = row_major(8)
    flat = xs.reshape(-1, H), logits.reshape(-1, E)

    def body(x, logits):
        return (*jax.tree.map(lambda a: a[None], chain(x, logits)), *jax.grad(loss, (0, 1))(x, logits))

    got = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d")))(*flat)
    each = [body(x, y) for x, y in zip(xs, logits, strict=True)]
    same(got, jax.tree.map(lambda *rows: jnp.concatenate(rows), *each))


# ------------------------------------------------------------------ gradients


def test_expand_and_reduce_are_transposed():
    x, rows = jnp.asarray(normal((T, H))), jnp.asarray(normal((N, H)))
    (back,) = jax.vjp(lambda x: moe.expand_to_fused(x, WHERE, OWNERS), x)[1](rows)
    same(back, moe.reduce_fused(rows, None, WHERE))
    (there,) = jax.vjp(lambda rows: moe.reduce_fused(rows, None, WHERE), rows)[1](x)
    same(there, moe.expand_to_fused(x, WHERE, OWNERS))
    same(there, moe.reduce_fused_backward(x, None, None, WHERE, SLOTS, need_grad_weights=False)[0])


def test_reduce_keeps_rows_only_for_the_gradient_of_weights():
    rows, w = jnp.asarray(normal((N, H))), jnp.asarray(normal((T, K)))

    def kept(function, *primals):
        return [leaf.shape for leaf in jax.tree.leaves(jax.vjp(function, *primals)[1]) if leaf is not None]

    assert (N, H) not in kept(lambda rows: moe.reduce_fused(rows, w, WHERE), rows)
    assert (N, H) in kept(lambda w: moe.reduce_fused(rows, w, WHERE), w)
    assert (T, H) not in kept(lambda x: moe.expand_to_fused(x, WHERE, OWNERS), jnp.asarray(normal((T, H))))


def test_all_results_of_a_gate_have_a_place_for_cotangents():
    logits = jnp.asarray(normal((T, E)))
    out, pull = jax.vjp(lambda x, b: moe.moe_topk_gate(x, num_topk=K, **GATE, bias=b, num_seqs=2), logits, jnp.asarray(BIAS))
    nothing = np.zeros((T, K), jax.dtypes.float0)
    g, h = jnp.asarray(normal((T, K))), jnp.asarray(normal((2, E)))
    slope, of_bias = pull(moe.GateOutput(nothing, g, nothing, h))
    assert (of_bias == 0).all()
    assert of_bias.shape == (E,)
    scores = jax.nn.softplus(logits) ** 0.5
    want = moe.moe_topk_gate_backward(scores, out.unmapped_topk_idx, out.topk_weights, g, 1.5, "sqrtsoftplus", None, h)
    np.testing.assert_allclose(slope, want, rtol=1e-4, atol=1e-6)
    zero = jax.grad(lambda x: (moe.moe_topk_gate(x, num_topk=K, **GATE).topk_idx * 1.0).sum())(logits)
    assert (zero == 0).all()
    assert (jax.grad(lambda x: jnp.where(moe.topk_gate(x, K) > 2, 1.0, 0.0).sum())(logits) == 0).all()


def test_gradients_that_there_are_not():
    rows, w = jnp.asarray(normal((N, H))), jnp.asarray(normal((T, K)))
    factors, one = jnp.ones(N), jnp.ones(1)
    for call, what in (
        (lambda rows, w: moe.reduce_fused(rows, None, WHERE, "e4m3"), "for fp8_format"),
        (lambda rows, w: moe.reduce_fused(jax.lax.stop_gradient(rows), w, WHERE, "e4m3", one), "for fp8_format"),
        (lambda rows, w: moe.reduce_fused((rows, factors), w, WHERE), r"for the rows of a pair \(x, x_sf\)"),
    ):
        for transform in (lambda f: f, jax.jit):
            with pytest.raises(NotImplementedError, match=f"reduce_fused: the gradient is not implemented {what}"):
                jax.grad(lambda *a, call=call, t=transform: t(call)(*a).astype(jnp.float32).sum(), (0, 1))(rows, w)
    for call, name in (
        (lambda w: moe.moe_topk_gate_backward(jnp.ones((T, E)), IDX, w, w, 1.5), "moe_topk_gate_backward"),
        (lambda w: moe.reduce_fused_backward(jnp.ones((T, H)), rows, w, WHERE, SLOTS)[0], "reduce_fused_backward"),
    ):
        with pytest.raises(NotImplementedError, match=f"{name}: the gradient is not implemented"):
            jax.grad(lambda w, call=call: call(w).sum())(w)
    assert jax.grad(lambda w: moe.reduce_fused((rows, factors), w, WHERE).sum())(w).shape == w.shape


def test_nothing_can_be_differentiated_twice():
    w, logits = jnp.asarray(normal((T, K))), jnp.asarray(normal((T, E)))
    rows, x = jnp.asarray(normal((N, H))), jnp.asarray(normal((T, H)))
    wide, matrices = jnp.ones((N, 64), jnp.bfloat16), jnp.ones((E, 64, 64), jnp.bfloat16)
    for name, call, primal in (
        ("normalize_weight", lambda w: moe.normalize_weight(w)[1], w),
        ("scores_sum", moe.scores_sum, jnp.abs(logits)),
        ("top2_sum_gate", lambda y: gate(y).topk_weights, logits),
        ("moe_topk_gate", lambda y: moe.moe_topk_gate(y, num_topk=K, **GATE).topk_weights, logits),
        ("expand_to_fused", lambda x: moe.expand_to_fused(x, WHERE, OWNERS), x),
        ("expand_topk_weights", lambda w: moe.expand_topk_weights(w, WHERE, SLOTS), w),
        ("reduce_fused", lambda w: moe.reduce_fused(rows, w, WHERE), w),
        ("grouped_gemm", lambda x: moe.grouped_gemm(x, matrices, OWNERS, MAPS.expert_start, MAPS.expert_end), wide),
    ):
        once = jax.grad(lambda p, call=call: (call(p) ** 2).sum())
        assert np.isfinite(once(primal)).all()
        with pytest.raises(NotImplementedError, match=f"{name}: double backward is not implemented"):
            jax.grad(lambda p, once=once: once(p).sum())(primal)
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(call, (primal,), (primal,))


# ------------------------------------------------------------------ debug mode


def test_debug_mode(debug):
    """What would count as none is reported, at once or when a compiled program runs; rows that do not take part are not looked at."""
    far, nan = IDX.copy(), normal((T, E))
    far[3, 1], nan[0, 2] = E, np.nan
    beyond = WHERE.copy()
    beyond[0, 0] = N
    w, x, rows, good = normal((T, K)), normal((T, H)), normal((N, H)), normal((T, E))
    table, counts = np.zeros((E, 3), np.int32), np.ones(E, np.int32)
    few, many = counts.copy(), counts.copy()
    few[3], many[3] = 0, 4
    every = np.ones(T, bool)
    for call, args, text in (
        (lambda s: moe.topk_gate(s, K), (nan,), "topk_gate: scores: expected finite numbers, got 1 that are not"),
        (lambda i: moe.mask_indices_by_tp(i, E, 1, 0, 1), (far,), "mask_indices_by_tp: indices: expected experts below 8, got 8"),
        (lambda i: moe.aux_fi(i, E, 1), (far,), "aux_fi: topk_idx: expected experts below 8, got 8"),
        (
            lambda i: tuple(moe.fused_mapping(i, num_experts=E, alignment=A)),
            (far,),
            "fused_mapping: topk_idx: expected experts below 8, got 8",
        ),
        (lambda i: moe.get_fused_mapping(i, E, 9, A)[0], (far,), "get_fused_mapping: topk_idx: expected experts below 8, got 8"),
        (lambda i: moe.moe_topk_gate_backward(good, i, w, w, 1.0), (far,), "moe_topk_gate_backward: topk_idx: expected experts below 8"),
        (lambda p: moe.expand_to_fused(x, p, OWNERS), (beyond,), f"expand_to_fused: token_topk_to_pos: expected positions below {N}"),
        (lambda p: moe.expand_topk_weights(w, p, SLOTS), (beyond,), "expand_topk_weights: token_topk_to_pos: expected positions below"),
        (lambda p: moe.reduce_fused(rows, w, p), (beyond,), "reduce_fused: token_topk_to_pos: expected positions below"),
        (
            lambda p: moe.reduce_fused_backward(x, rows, w, p, SLOTS),
            (beyond,),
            "reduce_fused_backward: token_topk_to_pos: expected positions",
        ),
        (gate, (nan,), "top2_sum_gate: logits: expected finite numbers, got 1 that are not"),
        (
            lambda y: moe.moe_topk_gate(y, num_topk=K, **GATE),
            (nan * np.inf,),
            "moe_topk_gate: logits: expected finite numbers, got 8 that are not",
        ),
        (lambda i: gate(good, fix_routing_mask=every, fixed_topk_idx=i), (far,), "top2_sum_gate: fixed_topk_idx: expected experts below 8"),
        (lambda c: gate(good, to_physical_map=table, logical_count=c), (few,), "top2_sum_gate: logical_count: expected 1 to 3, got 0 to 1"),
        (
            lambda c: gate(good, to_physical_map=table, logical_count=c),
            (many,),
            "top2_sum_gate: logical_count: expected 1 to 3, got 1 to 4",
        ),
        (
            lambda m: gate(good, to_physical_map=m, logical_count=counts),
            (table + 10,),
            "to_physical_map: expected physical experts below 10",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            call(*args)
        args = [jnp.asarray(a) for a in args]
        with pytest.raises(ValueError, match=text):
            call(*args)
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            jax.block_until_ready(jax.jit(call)(*args))
            jax.effects_barrier()
    assert not ON[0]
    for run in (lambda f: f, jax.jit):
        jax.block_until_ready(run(lambda y: gate(y, mask=jnp.asarray(ON)))(jnp.asarray(nan)))
        jax.block_until_ready(run(jax.grad(loss, (0, 1)))(jnp.asarray(x), jnp.asarray(good)))
        jax.effects_barrier()
    jax.block_until_ready(moe.group_count(jnp.asarray(far), E))
