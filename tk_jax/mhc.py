"""Manifold-constrained hyper-connections for JAX: differentiable operations and the pipeline of a sub-layer.

Arrays may be NumPy or JAX arrays; everything that is not an array is static under `jax.jit`. Rows are any number of leading
axes: sharded rows stay where they are, sharded inner axes are gathered.
"""

from __future__ import annotations

import sys
from typing import Any

from jax import Array

from tk_core.docs import documented
from tk_core.ops.mhc import apply_mix, expand, head_mix, norm_fn, pipeline, post, sinkhorn, split_mixes
from tk_jax.vjp import bind

__all__ = [
    "expand_from_embedding",
    "expand_to_mhc",
    "mhc_head",
    "mhc_head_compute_mix",
    "mhc_post",
    "mhc_pre",
    "mhc_pre_apply_mix",
    "mhc_pre_norm_fn",
    "mhc_pre_split_mixes",
    "sinkhorn_normalize",
]

_expand = bind(expand.expand_to_mhc)
_norm_fn = bind(norm_fn.mhc_pre_norm_fn)
_split_mixes = bind(split_mixes.mhc_pre_split_mixes)
_sinkhorn = bind(sinkhorn.sinkhorn_normalize)
_apply_mix = bind(apply_mix.mhc_pre_apply_mix)
_post = bind(post.mhc_post)
_head_mix = bind(head_mix.mhc_head_compute_mix)


@documented(expand.expand_to_mhc)
def expand_to_mhc(hidden: Array, mhc_mult: int) -> Array:
    return _expand(hidden, mhc_mult=mhc_mult)


@documented(norm_fn.mhc_pre_norm_fn)
def mhc_pre_norm_fn(
    residual: Array,
    mhc_fn: Array,
    mhc_norm_weight: Array | None,
    mhc_norm_eps: float,
    *,
    n_splits: int = 16,
    precision: str = "bf16x2",
) -> Array:
    return _norm_fn(residual, mhc_fn, mhc_norm_weight, mhc_norm_eps=mhc_norm_eps, n_splits=n_splits, precision=precision)


@documented(split_mixes.mhc_pre_split_mixes)
def mhc_pre_split_mixes(
    input_mixes: Array, mhc_scale: Array, mhc_base: Array, mhc_mult: int, mhc_post_mult_value: float, mhc_pre_eps: float
) -> tuple[Array, Array, Array]:
    return _split_mixes(
        input_mixes, mhc_scale, mhc_base, mhc_mult=mhc_mult, mhc_post_mult_value=mhc_post_mult_value, mhc_pre_eps=mhc_pre_eps
    )


@documented(sinkhorn.sinkhorn_normalize)
def sinkhorn_normalize(x: Array, repeat: int = 10, eps: float = 1e-6) -> Array:
    return _sinkhorn(x, repeat=repeat, eps=eps)


@documented(apply_mix.mhc_pre_apply_mix)
def mhc_pre_apply_mix(x: Array, mix: Array) -> Array:
    return _apply_mix(x, mix)


@documented(post.mhc_post)
def mhc_post(x: Array, residual: Array, post_layer_mix: Array, comb_res_mix: Array) -> Array:
    return _post(x, residual, post_layer_mix, comb_res_mix)


@documented(head_mix.mhc_head_compute_mix)
def mhc_head_compute_mix(input_mix: Array, mhc_scale: Array, mhc_base: Array, mhc_pre_eps: float) -> Array:
    scale = mhc_scale.reshape(1) if getattr(mhc_scale, "ndim", None) == 0 else mhc_scale
    return _head_mix(input_mix, scale, mhc_base, mhc_pre_eps=mhc_pre_eps)


def expand_from_embedding(x: Array, mhc_mult: int = 4) -> Array:
    return expand_to_mhc(x, mhc_mult)


def mhc_pre(
    residual: Array,
    fn: Array,
    scale: Array,
    base: Array,
    *,
    norm_weight: Array | None = None,
    norm_eps: float = 1e-6,
    mhc_mult: int = 4,
    post_mult_value: float = 1.0,
    pre_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    sinkhorn_repeat: int = 10,
    n_splits: int = 16,
    precision: str = "bf16x2",
) -> tuple[Array, tuple[Array, Array]]:
    options: dict[str, Any] = {"n_splits": n_splits, "precision": precision}
    sizes = (norm_eps, mhc_mult, post_mult_value, pre_eps, sinkhorn_eps, sinkhorn_repeat)
    return pipeline.mhc_pre(sys.modules[__name__], residual, fn, scale, base, norm_weight, *sizes, **options)


def mhc_head(
    residual: Array,
    fn: Array,
    scale: Array,
    base: Array,
    *,
    norm_weight: Array | None = None,
    norm_eps: float = 1e-6,
    mhc_mult: int = 4,
    pre_eps: float = 1e-6,
    n_splits: int = 16,
    precision: str = "bf16x2",
) -> Array:
    options: dict[str, Any] = {"n_splits": n_splits, "precision": precision}
    return pipeline.mhc_head(sys.modules[__name__], residual, fn, scale, base, norm_weight, norm_eps, mhc_mult, pre_eps, **options)


expand_from_embedding.__doc__ = pipeline.EMBEDDING_DOC
mhc_pre.__doc__ = pipeline.PRE_DOC
mhc_head.__doc__ = pipeline.HEAD_DOC
