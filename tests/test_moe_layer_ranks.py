"""Experts and rows that are spread over ranks give what one rank gives."""

import jax
import numpy as np
import pytest
from frontends import Jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from moe_layers import SMALL, exact_products, expert_sum, problem, route, vjp

pytestmark = pytest.mark.anywhere


def test_experts_spread_over_ranks_add_up(front):
    """Every rank sees all tokens, experts of others are -1, some rows have none: their sum is the layer."""
    values, x, d_y, idx = problem(**SMALL)
    weights = np.random.default_rng(1).random(idx.shape).astype(np.float32)

    def run(x, w1, w2, idx, weights):
        return (expert_sum(front, x, idx, weights, w1, w2),)

    dtype = np.int64 if front.name == "torch" else np.int32
    whole, gradients = vjp(front, run, (x, values["w1"], values["w2"]), (d_y,), (idx.astype(dtype), weights))
    parts = []
    for rank in range(4):
        local = np.where(idx // 2 == rank, idx % 2, -1).astype(dtype)
        assert (local < 0).all(1).any()
        w1, w2 = values["w1"][rank * 2 : rank * 2 + 2], values["w2"][rank * 2 : rank * 2 + 2]
        parts.append(vjp(front, run, (x, w1, w2), (d_y,), (local, weights)))
    np.testing.assert_allclose(sum(part[0][0] for part in parts), whole[0], 1e-5, 1e-6)
    np.testing.assert_allclose(sum(part[1][0] for part in parts), gradients[0], 1e-5, 1e-6)
    for i in (1, 2):
        np.testing.assert_allclose(np.concatenate([part[1][i] for part in parts]), gradients[i], 1e-5, 5e-6)


LIMITED = {"num_groups": 0, "num_topk_groups": 0, "num_ep_ranks": 2, "num_tp_ranks": 2}


def of_tp_rank(front, w1, w2, rank, x, logits):
    """What a TP rank adds: the gate leaves -1 for the experts of the other one. The bias is that of the layer."""
    gate = route(front, logits, 2, {**LIMITED, "bias": logits[0] * 0, "tp_rank": rank})
    return expert_sum(front, x, gate.topk_idx, gate.topk_weights, w1, w2)


def test_gradients_of_logits_add_up_over_tp_ranks(front):
    values, x, d_y, _ = problem(**SMALL)
    logits = (x @ values["router"]).astype(np.float32)

    def whole(logits):
        gate = route(front, logits, 2)
        return (expert_sum(front, front.array(x), gate.topk_idx, gate.topk_weights, *(front.array(values[n]) for n in ("w1", "w2"))),)

    def part(rank):
        w1, w2 = (front.array(values[name][rank * 4 : rank * 4 + 4]) for name in ("w1", "w2"))
        return lambda logits: (of_tp_rank(front, w1, w2, rank, front.array(x), logits),)

    want = vjp(front, whole, (logits,), (d_y,))
    got = [vjp(front, part(rank), (logits,), (d_y,)) for rank in range(2)]
    for i in range(2):
        np.testing.assert_allclose(got[0][i][0] + got[1][i][0], want[i][0], 1e-5, 2e-6)


def test_tp_ranks_under_shard_map():
    """One program for all ranks: the rank is the index of the mesh's axis, matrices and results are those of a device."""
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    front = Jax()
    values, x, d_y, _ = problem(**SMALL)
    logits = (x @ values["router"]).astype(np.float32)
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def part(logits, x, w1, w2):
        return jax.lax.psum(of_tp_rank(front, w1, w2, jax.lax.axis_index("tp"), x, logits), "tp")

    split = jax.shard_map(part, mesh=mesh, in_specs=(P(), P(), P("tp"), P("tp")), out_specs=P())

    def whole(logits, x, w1, w2):
        gate = route(front, logits, 2)
        return expert_sum(front, x, gate.topk_idx, gate.topk_weights, w1, w2)

    arrays = (logits, x, values["w1"], values["w2"])
    got, want = (vjp(front, lambda *a, f=f: (f(*a),), arrays, (d_y,)) for f in (split, whole))
    for found in zip(got, want, strict=True):
        for a, b in zip(*found, strict=True):
            np.testing.assert_allclose(a, b, 1e-5, 1e-5)


def test_rows_spread_over_devices():
    """The layer under shard_map: rows of a device, parameters on all of them, gradients of parameters added up."""
    from tk_jax.nn import moe

    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    values, x, d_y, _ = problem(**SMALL, lead=(4, 10))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def layer(params, x):
        y, aux = moe(params, x, num_topk=2, alpha=0.1, weights_in="swiglu")
        return y, aux.loss, aux.load

    def spread(params, x):
        y, loss, load = layer(params, x)
        return y, jax.lax.pmean(loss, "data"), jax.lax.psum(load, "data")

    specs = {"in_specs": (P(), P("data")), "out_specs": (P("data"), P(), P())}

    def gradients(run):
        def total(params, x):
            y, loss, load = run(params, x)
            return (y * d_y).sum() + loss, (y, load)

        with exact_products(jax):
            return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(values, x)

    got, want = (jax.tree.leaves(gradients(run)) for run in (jax.shard_map(spread, mesh=mesh, **specs), layer))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-5)
