"""Routing that is given, the load-balance loss, and the bias that balances the load."""

import jax
import numpy as np
import pytest
import torch
from moe_arrays import gradient
from moe_dense import aux_loss, dense, scores_of
from moe_layers import SMALL, close, problem, route, routing_functions, run_layer, same_results, torch_module, vjp

pytestmark = pytest.mark.anywhere

# ------------------------------------------------------------------ fixed routing


def test_the_natural_choice_given_as_routing(front):
    values, x, d_y, _ = problem(**SMALL)
    natural = run_layer(front, values, x, d_y, num_topk=2, alpha=0.1)
    fixed = run_layer(front, values, x, d_y, routing=natural["topk_idx"], num_topk=2, alpha=0.1)
    same_results(front, natural, fixed)


def test_another_routing(front):
    """Also with repeated experts and empty slots."""
    values, x, d_y, _ = problem(**SMALL)
    routing = np.random.default_rng(0).integers(-1, 8, (40, 2))
    got = run_layer(front, values, x, d_y, routing=routing, num_topk=2, alpha=0.1)
    np.testing.assert_array_equal(got["topk_idx"], routing)
    close(got, dense(values, x, routing, d_y, alpha=0.1))


def test_masked_rows_have_no_gradient_of_logits(front):
    logits, x = np.random.default_rng(0).standard_normal((2, 40, 8)).astype(np.float32)
    mask = np.arange(40) % 3 > 0

    def run(logits, mask):
        gate = route(front, logits, 2, mask=mask)
        return gate.topk_weights, gate.scores_sum

    _, (d_logits,) = vjp(front, run, (logits,), (x[:, :2], x[:1]), (mask,))
    assert not d_logits[~mask].any()
    assert d_logits[mask].any(1).all()


# ------------------------------------------------------------------ balance


@pytest.mark.parametrize("scoring_func", ["sigmoid", "sqrtsoftplus", "softmax"])
def test_gradient_of_the_loss_alone(front, scoring_func):
    logits = np.random.default_rng(0).standard_normal((12, 6)).astype(np.float32)
    m = routing_functions(front)

    def run(logits):
        gate = route(front, logits, 2, scoring_func=scoring_func, num_seqs=3)
        counts = m.group_count(gate.unmapped_topk_idx, 6, num_seqs=3)
        return m.load_balance_loss(gate.scores_sum, counts, 4, 2, 0.7), gate.unmapped_topk_idx

    (loss, idx), (d_logits,) = vjp(front, run, (logits,), (np.ones((), np.float32),))

    def of(logits):
        return float(aux_loss(scores_of(torch.tensor(logits), scoring_func), idx, 0.7, 3))

    np.testing.assert_allclose(loss, of(logits.astype(np.float64)), 1e-5)
    np.testing.assert_allclose(d_logits, gradient(of, logits.astype(np.float64)), 1e-4, 1e-6)


@pytest.mark.parametrize("scoring_func", ["sigmoid", "sqrtsoftplus", "softmax"])
def test_loss_where_scores_are_uniform(front, scoring_func):
    """It is alpha, and has no gradient where the load is balanced too."""
    values, x, d_y, _ = problem(**SMALL)
    values["router"][:] = 0
    d_y = np.zeros_like(d_y)
    balanced = np.arange(80).reshape(40, 2) % 8
    for routing in (balanced, np.zeros_like(balanced)):
        got = run_layer(front, values, x, d_y, routing=routing, num_topk=2, alpha=0.3, scoring_func=scoring_func)
        np.testing.assert_allclose(got["loss"], 0.3, 1e-6)
        assert np.allclose(got["router"], 0, atol=1e-8) == (routing is balanced)


def test_bias_moves_the_load_to_balance(front):
    """By a small step after every batch, as in training."""
    values, x, _, _ = problem(**{**SMALL, "rows": 400})
    values["bias"][:] = np.linspace(0, 1, 8)  # far from balance
    m = routing_functions(front)
    if front.name == "torch":
        module = torch_module(front, values, {"num_topk": 2, "gamma": 0.02})
        x = front.array(x)

        def step():
            load = module(x)[1].load
            module.update_bias()
            assert not module.load.any()
            return front.numpy(load)

    else:
        from tk_jax.nn import moe

        params = dict(values)
        layer = jax.jit(lambda params, x: moe(params, x, num_topk=2)[1].load)

        def step():
            load = layer(params, x)
            params["bias"] = m.update_expert_bias(params["bias"], load, 0.02)
            return np.asarray(load)

    loads = [step() for _ in range(60)]
    assert all(load.sum() == 800 for load in loads)
    assert loads[0].max() > 2.5 * 100
    assert max(load.max() for load in loads[-5:]) < 1.35 * 100
