"""NumPy oracles of the mHC operations in fp64: what the kernels compute, and the gradients, without any rounding.

Arrays come and go as fp64 with the shapes of the declarations; an absent cotangent is None and counts as zero.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def _sigma(z: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-z))


def _rows(a: Array, inner: int) -> Array:
    """Leading axes flattened to one."""
    return a.reshape(-1, *a.shape[a.ndim - inner :])


# ------------------------------------------------------------------ expand


def expand(hidden: Array, mhc_mult: int) -> Array:
    """Every stream is a copy."""
    return np.repeat(hidden[..., None, :], mhc_mult, axis=-2)


def expand_bwd(d_out: Array) -> Array:
    """The sum over the streams."""
    return d_out.sum(axis=-2)


# ------------------------------------------------------------------ split mixes, head mix


def _segments(n: int) -> Array:
    return np.array([0] * n + [1] * n + [2] * n * n)


def split_mixes(input_mixes: Array, mhc_scale: Array, mhc_base: Array, n: int, rho: float, eps: float) -> tuple[Array, Array, Array]:
    """pre, post, comb."""
    z = input_mixes * mhc_scale[_segments(n)] + mhc_base
    pre = _sigma(z[..., :n])[..., None] + eps
    post = rho * _sigma(z[..., n : 2 * n])[..., None]
    return pre, post, z[..., 2 * n :].reshape(*z.shape[:-1], n, n)


def split_mixes_bwd(
    d_pre: Array | None,
    d_post: Array | None,
    d_comb: Array | None,
    input_mixes: Array,
    mhc_scale: Array,
    mhc_base: Array,
    n: int,
    rho: float,
) -> tuple[Array, Array, Array]:
    """d_input_mixes, d_mhc_scale, d_mhc_base."""
    segment = _segments(n)
    s = _sigma(input_mixes * mhc_scale[segment] + mhc_base)
    dz = np.zeros_like(input_mixes)
    if d_pre is not None:
        dz[..., :n] = d_pre[..., 0] * (s * (1 - s))[..., :n]
    if d_post is not None:
        dz[..., n : 2 * n] = rho * d_post[..., 0] * (s * (1 - s))[..., n : 2 * n]
    if d_comb is not None:
        dz[..., 2 * n :] = d_comb.reshape(*dz.shape[:-1], n * n)
    columns = _rows(dz * input_mixes, 1).sum(axis=0)
    d_scale = np.array([columns[segment == k].sum() for k in range(3)])
    return dz * mhc_scale[segment], d_scale, _rows(dz, 1).sum(axis=0)


def head_mix(input_mix: Array, mhc_scale: Array, mhc_base: Array, eps: float) -> Array:
    """Weights of the streams in the input of the head."""
    return _sigma(input_mix * mhc_scale + mhc_base) + eps


def head_mix_bwd(d_out: Array, input_mix: Array, mhc_scale: Array, mhc_base: Array) -> tuple[Array, Array, Array]:
    """d_input_mix, d_mhc_scale, d_mhc_base."""
    s = _sigma(input_mix * mhc_scale + mhc_base)
    dz = d_out * s * (1 - s)
    return dz * mhc_scale, np.array([(dz * input_mix).sum()]), _rows(dz, 1).sum(axis=0)


# ------------------------------------------------------------------ Sinkhorn


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def _iterates(x: Array, repeat: int, eps: float) -> tuple[Array, list[Array]]:
    """The softmax, and Y before the first step and after every step; step k normalizes columns where k is even."""
    p = _softmax(x)
    ys = [p + eps]
    for k in range(2 * repeat - 1):
        ys.append(ys[-1] / (ys[-1].sum(axis=_axis(k), keepdims=True) + eps))
    return p, ys


def _axis(step: int) -> int:
    return -2 if step % 2 == 0 else -1


def sinkhorn(x: Array, repeat: int, eps: float) -> Array:
    """Columns normalized last."""
    return _iterates(x, repeat, eps)[1][-1]


def sinkhorn_bwd(d_out: Array, x: Array, repeat: int, eps: float) -> Array:
    """Through every step."""
    p, ys = _iterates(x, repeat, eps)
    d = d_out
    for k in reversed(range(2 * repeat - 1)):
        total = ys[k].sum(axis=_axis(k), keepdims=True) + eps
        d = (d - (d * ys[k + 1]).sum(axis=_axis(k), keepdims=True)) / total
    return p * (d - (d * p).sum(axis=-1, keepdims=True))


# ------------------------------------------------------------------ apply mix, post


def apply_mix(x: Array, mix: Array) -> Array:
    """The mix of the streams."""
    return (x * mix).sum(axis=-2)


def apply_mix_bwd(d_out: Array, x: Array, mix: Array) -> tuple[Array, Array]:
    """d_x, d_mix."""
    return mix * d_out[..., None, :], (x * d_out[..., None, :]).sum(axis=-1, keepdims=True)


def post(x: Array, residual: Array, post_layer_mix: Array, comb_res_mix: Array) -> Array:
    """The next residual streams."""
    return post_layer_mix * x[..., None, :] + np.swapaxes(comb_res_mix, -1, -2) @ residual


def post_bwd(d_out: Array, x: Array, residual: Array, post_layer_mix: Array, comb_res_mix: Array) -> tuple[Array, Array, Array, Array]:
    """d_x, d_residual, d_post_layer_mix, d_comb_res_mix."""
    d_x = (post_layer_mix * d_out).sum(axis=-2)
    d_post = (x[..., None, :] * d_out).sum(axis=-1, keepdims=True)
    return d_x, comb_res_mix @ d_out, d_post, residual @ np.swapaxes(d_out, -1, -2)
