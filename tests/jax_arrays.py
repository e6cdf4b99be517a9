"""Inputs, operations in short form, and comparisons that the JAX tests share."""

import jax
import jax.numpy as jnp
import numpy as np

from tk_jax import mhc

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


def scalar_loss(f):
    return lambda *args: sum((o.astype(jnp.float32) ** 2).sum() for o in jax.tree.leaves(f(*args)))
