"""NumPy oracle of `mhc_pre_norm_fn` in float64: forward, gradients, and the operand rounding of its precisions."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def round_tf32(x: Array) -> Array:
    """fp32 rounded to a 10-bit mantissa, ties away from zero."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isnan(x), x, rounded).astype(np.float32)


def merge(fn: Array, weight: Array | None, precision: str = "") -> Array:
    """F = fn * w; "tf32" rounds it as the kernels do."""
    merged = fn.astype(np.float64) if weight is None else fn.astype(np.float64) * weight.astype(np.float64)
    return round_tf32(merged.astype(np.float32)).astype(np.float64) if precision == "tf32" else merged


def forward(residual: Array, fn: Array, weight: Array | None, eps: float, precision: str = "") -> tuple[Array, Array, Array]:
    """(out, y, q) for a residual [..., n, H]."""
    x = residual.astype(np.float64).reshape(*residual.shape[:-2], -1)
    y = x @ merge(fn, weight, precision).T
    q = np.square(x).sum(-1)
    r = 1 / np.sqrt(q / x.shape[-1] + eps)
    return y * r[..., None], y, q


def backward(
    d_out: Array, residual: Array, fn: Array, weight: Array | None, eps: float, precision: str = ""
) -> tuple[Array, Array, Array | None]:
    """(d_residual, d_fn, d_weight)."""
    K = fn.shape[1]
    x = residual.astype(np.float64).reshape(-1, K)
    g = d_out.astype(np.float64).reshape(-1, fn.shape[0])
    F = merge(fn, weight, precision)
    y = x @ F.T
    q = np.square(x).sum(-1)
    r = 1 / np.sqrt(q / K + eps)
    dy = g * r[:, None]
    if precision == "tf32":
        dy = round_tf32(dy.astype(np.float32)).astype(np.float64)
    dq = -0.5 * (g * y).sum(-1) * r / (q + eps * K)
    d_x = dy @ F + 2 * x * dq[:, None]
    d_F = dy.T @ x
    if weight is None:
        return d_x.reshape(residual.shape), d_F, None
    return d_x.reshape(residual.shape), d_F * weight, (d_F * fn).sum(0)
