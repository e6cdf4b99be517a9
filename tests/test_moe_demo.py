"""The demo with experts: both sides train, and its exit status says whether they stay together, learn and are balanced."""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
MODULES = ("corpus", "jax_side", "model", "torch_side", "train_mhc")


@pytest.fixture
def demo(monkeypatch):
    """The modules of the demo, by names that mean nothing elsewhere."""
    monkeypatch.syspath_prepend(EXAMPLES)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    import train_mhc

    yield train_mhc
    for name in MODULES:
        sys.modules.pop(name, None)


def test_both_sides_train_experts(demo):
    import jax_side
    import torch_side
    from model import Config, initial_weights

    config = Config(layers=1, length=32, moe=True)
    weights = initial_weights(config)
    assert weights["layer0.ffn.moe.w1"].shape == (8, 128, 2 * 168)
    assert "layer0.ffn.up" not in weights
    steps = 12
    data = demo.corpus.batches(demo.corpus.load(100_000), steps, 4, config.length, 0)
    rates = np.full(steps, 2e-3)
    runs = [list(torch_side.train(config, weights, data, rates, "cpu")), list(jax_side.train(config, weights, data, rates))]
    losses = np.array([[step.loss for step in run] for run in runs])
    loads = np.array([[step.load for step in run] for run in runs])
    assert (losses[:, 0] - losses[:, -1] > 1).all()
    assert np.abs(losses[0] - losses[1]).max() < 0.03
    assert loads.shape == (2, steps, 1, 8)
    assert (loads.sum(-1) == 4 * 32 * 2).all()
    np.testing.assert_array_equal(loads[0, 0], loads[1, 0])


@pytest.mark.parametrize(
    ("apart", "level", "load", "text"),
    [
        (0.01, 2.5, [12, 10, 9, 9], ""),
        (0.10, 2.5, [12, 10, 9, 9], "do not stay together"),
        (0.01, 3.0, [12, 10, 9, 9], "not clearly below the unigram entropy"),
        (0.01, 2.5, [19, 7, 7, 7], "not balanced: 1.90 times the mean load"),
    ],
    ids=["good", "apart", "high", "unbalanced"],
)
def test_what_the_exit_status_says(demo, tmp_path, capfd, apart, level, load, text):
    steps = 20
    losses = np.linspace(5, level, steps)
    loads = [[[40, 0, 0, 0]]] * 10 + [[load]] * 10
    runs = {name: {"loss": losses.tolist()} for name in ("torch", "jax")}
    runs |= {"torch, moe": {"loss": losses.tolist(), "load": loads}, "jax, moe": {"loss": (losses - apart).tolist(), "load": loads}}
    status = demo.report_moe(argparse.Namespace(steps=steps, out=tmp_path), 3.2, runs)
    out, err = capfd.readouterr()
    assert status == (1 if text else 0)
    assert text in err
    assert "PyTorch, MoE" in out
    assert "█" in out
    numbers = json.loads((tmp_path / "demo_moe.json").read_text())
    np.testing.assert_allclose(numbers["largest_difference"], apart)
    assert numbers["imbalance"]["JAX"][0] == [4]
    np.testing.assert_allclose(numbers["share"]["PyTorch"], [np.divide(load, 40)])
