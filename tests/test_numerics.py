"""Values and gradients against the fp64 oracles, and torch = JAX to the bit."""

import numpy as np
import pytest
from frontends import VARIANTS, Jax, Torch, same_bits, sample_arrays

from tk_core.reference import oracles

pytestmark = pytest.mark.anywhere
ORACLES = oracles()
# fp32 results: a few roundings of values of order one, and sums of a few thousand terms
RTOL, ATOL = 1e-5, 2e-5
# gradients of norm_fn are products of an fp32 gradient with bf16 operands in two terms; tf32 has ten bits of mantissa
LOOSE = {"mhc_pre_norm_fn": (1e-4, 1e-3), "mhc_pre_norm_fn-1": (1e-4, 1e-3), "mhc_pre_norm_fn-2": (2e-3, 2e-2)}


def close(got, want, variant, what):
    """bf16: one rounding of a nearly exact value; fp32: as above."""
    want = np.asarray(want, np.float64).reshape(got.shape)
    value = got.astype(np.float64)
    rtol, atol = LOOSE.get(variant, (RTOL, ATOL))
    if got.dtype.name == "bfloat16":
        rtol, atol = rtol + 2.0**-8, atol
    error = np.abs(value - want) - rtol * np.abs(want) - atol * max(1.0, np.abs(want).max() if want.size else 1.0)
    assert not np.isnan(value).any(), (variant, what)
    assert (error <= 0).all(), (variant, what, np.abs(value - want).max())


def cotangents_of(outs, seed=7):
    return [np.random.default_rng([seed, i]).standard_normal(o.shape).astype(o.dtype) for i, o in enumerate(outs)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("lead", "hidden"), [((5,), 128), ((1,), 256), ((2, 19), 384), ((), 128)])
def test_both_front_ends_agree_with_the_oracle_and_with_each_other_to_the_bit(variant, lead, hidden):
    op, arrays, attrs = sample_arrays(variant, lead, hidden)
    oracle = ORACLES[op.name]
    fronts = [Torch(), Jax()]
    outs = [front.forward(op, arrays, **attrs) for front in fronts]
    for i, (a, b, want) in enumerate(zip(*outs, oracle.forward(arrays, attrs), strict=True)):
        close(a, want, variant, op.returns[i])
        assert same_bits(a, b), (variant, op.returns[i])
    full = cotangents_of(outs[0])
    alone = [[g if i == k else None for i, g in enumerate(full)] for k in range(len(full))] if len(full) > 1 else []
    for given in (full, *alone):
        wants = oracle.backward(arrays, given, attrs)
        results = [front.gradients(op, arrays, given, **attrs) for front in fronts]
        wants = [w for w, a in zip(wants, arrays, strict=True) if a is not None]
        names = [n for n, a in zip(op.forward.ins, arrays, strict=True) if a is not None]
        for name, a, b, want in zip(names, results[0][1], results[1][1], wants, strict=True):
            if a is None:  # torch: this cotangent does not reach the argument; JAX gives zeros
                assert not np.any(b), (variant, name)
                continue
            close(a, want, variant, f"d_{name}")
            assert same_bits(a, b), (variant, f"d_{name}")


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_the_gradients_that_are_needed_and_the_same_bits_as_all_of_them(variant, front):
    op, arrays, attrs = sample_arrays(variant, (6,))
    full = cotangents_of(front.forward(op, arrays, **attrs))
    present = [i for i, a in enumerate(arrays) if a is not None]
    _, everything = front.gradients(op, arrays, full, **attrs)
    for k, i in enumerate(present):
        _, (alone,) = front.gradients(op, arrays, full, wrt=[i], **attrs)
        assert same_bits(alone, everything[k]), list(op.forward.ins)[i]


@pytest.mark.parametrize("variant", ["expand_to_mhc", "mhc_pre_norm_fn", "mhc_pre_apply_mix", "mhc_post"])
def test_rows_of_a_7168_wide_model(variant):
    op, arrays, attrs = sample_arrays(variant, (3,), 7168)
    oracle, torch_front, jax_front = ORACLES[op.name], Torch(), Jax()
    outs = torch_front.forward(op, arrays, **attrs)
    for out, want in zip(outs, oracle.forward(arrays, attrs), strict=True):
        close(out, want, variant, "forward")
    full = cotangents_of(outs)
    _, grads = torch_front.gradients(op, arrays, full, **attrs)
    _, others = jax_front.gradients(op, arrays, full, **attrs)
    wants = [w for w, a in zip(oracle.backward(arrays, full, attrs), arrays, strict=True) if a is not None]
    for grad, other, want in zip(grads, others, wants, strict=True):
        close(grad, want, variant, "gradient")
        assert same_bits(grad, other)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_call_gives_the_same_bits_twenty_times(variant):
    op, arrays, attrs = sample_arrays(variant, (37,))
    front = Torch()
    full = cotangents_of(front.forward(op, arrays, **attrs))
    first = front.gradients(op, arrays, full, **attrs)
    for _ in range(19):
        again = front.gradients(op, arrays, full, **attrs)
        for a, b in zip((*first[0], *first[1]), (*again[0], *again[1]), strict=True):
            assert same_bits(a, b)


@pytest.mark.parametrize("streams", [2, 8])
@pytest.mark.parametrize("name", ["expand_to_mhc", "mhc_pre_apply_mix", "mhc_post", "sinkhorn_normalize", "mhc_head_compute_mix"])
def test_other_numbers_of_streams(name, streams):
    from tk_core import registry
    from tk_core.bench.cases import CASES, inputs

    op, case = registry.get(name), CASES[name]
    attrs = {k: streams if k == "mhc_mult" else v for k, v in case.attrs.items()}
    arrays = inputs(case, op.forward, (5,), 128, streams)
    front, oracle = Torch(), ORACLES[name]
    outs = front.forward(op, arrays, **attrs)
    for out, want in zip(outs, oracle.forward(arrays, attrs), strict=True):
        close(out, want, name, "forward")
    full = cotangents_of(outs)
    _, grads = front.gradients(op, arrays, full, **attrs)
    for grad, want in zip(grads, oracle.backward(arrays, full, attrs), strict=True):
        close(grad, want, name, "gradient")


@pytest.mark.parametrize("variant", ["mhc_pre_apply_mix", "mhc_post", "sinkhorn_normalize"])
def test_errors_lean_neither_way(variant):
    """Over many elements, a result is above the oracle as often as below: no systematic truncation."""
    op, arrays, attrs = sample_arrays(variant, (4000,) if variant == "sinkhorn_normalize" else (256,), 1024)
    (out,) = Torch().forward(op, arrays, **attrs)
    (want,) = ORACLES[op.name].forward(arrays, attrs)
    difference = out.astype(np.float64) - want.reshape(out.shape)
    above, below = (difference > 0).sum(), (difference < 0).sum()
    # five standard deviations of a fair coin; Sinkhorn divides one matrix many times, so its errors are not independent
    allowed = 5 * np.sqrt(above + below) if variant != "sinkhorn_normalize" else 0.2 * (above + below)
    assert abs(above - below) < allowed, (above, below)


@pytest.mark.parametrize("repeat", [1, 2, 20])
@pytest.mark.parametrize("scale", [0.0, 1.0, 20.0])
def test_sinkhorn_at_its_edges(repeat, scale):
    op, (x,), _ = sample_arrays("sinkhorn_normalize", (33,))
    x = (x * scale).astype(np.float32)
    attrs = {"repeat": repeat, "eps": 1e-6}
    front, oracle = Torch(), ORACLES[op.name]
    (out,) = front.forward(op, [x], **attrs)
    close(out, oracle.forward([x], attrs)[0], "sinkhorn", "forward")
    if scale <= 1:  # a column of nearly nothing is divided by eps, not by its sum
        np.testing.assert_allclose(out.sum(-2), 1, atol=1e-5)
    g = cotangents_of([out])
    _, (grad,) = front.gradients(op, [x], g, **attrs)
    close(grad, oracle.backward([x], g, attrs)[0], "sinkhorn", "gradient")
    if scale == 0:
        np.testing.assert_allclose(out, 0.25, rtol=1e-5)
