"""mHC as pure functions over a dict of arrays: usable as they are, and from flax or equinox modules.

params = init_hyper_connection(hidden=512)
residual = hyper_connection(params, residual, sublayer)
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from tk_core.layers import hyper_connection_init, hyper_head_init
from tk_jax import mhc

__all__ = ["hyper_connection", "hyper_head", "init_hyper_connection", "init_hyper_head"]

Params = dict[str, jax.Array]


def _arrays(values: dict, norm_weight: bool) -> Params:
    return {name: jnp.asarray(value) for name, value in values.items() if name != "norm_weight" or norm_weight}


def init_hyper_connection(hidden: int, streams: int = 4, *, norm_weight: bool = True, seed: int = 0) -> Params:
    """Parameters of `hyper_connection`: fn, scale, base and, if wanted, norm_weight, fp32; close to a plain residual."""
    return _arrays(hyper_connection_init(streams, hidden, seed), norm_weight)


def hyper_connection(
    params: Params,
    residual: jax.Array,
    sublayer: Callable[[jax.Array], jax.Array],
    *,
    post_mult_value: float = 2.0,
    sinkhorn_repeat: int = 20,
    norm_eps: float = 1e-6,
    pre_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    precision: str = "bf16x2",
) -> jax.Array:
    """The next residual (..., n, H) after a sub-layer that maps (..., H) to (..., H).

    Defaults are the paper's (multiplier 2, 20 Sinkhorn iterations), unlike those of `mhc_pre`.
    """
    layer_input, mixes = mhc.mhc_pre(
        residual,
        params["fn"],
        params["scale"],
        params["base"],
        norm_weight=params.get("norm_weight"),
        norm_eps=norm_eps,
        mhc_mult=residual.shape[-2],
        post_mult_value=post_mult_value,
        pre_eps=pre_eps,
        sinkhorn_eps=sinkhorn_eps,
        sinkhorn_repeat=sinkhorn_repeat,
        precision=precision,
    )
    return mhc.mhc_post(sublayer(layer_input), residual, *mixes)


def init_hyper_head(hidden: int, streams: int = 4, *, norm_weight: bool = True, seed: int = 0) -> Params:
    """Parameters of `hyper_head`: fn, scale, base and, if wanted, norm_weight, fp32."""
    return _arrays(hyper_head_init(streams, hidden, seed), norm_weight)


def hyper_head(
    params: Params, residual: jax.Array, *, norm_eps: float = 1e-6, pre_eps: float = 1e-6, precision: str = "bf16x2"
) -> jax.Array:
    """The head's input (..., H) from the residual streams (..., n, H)."""
    return mhc.mhc_head(
        residual,
        params["fn"],
        params["scale"],
        params["base"],
        norm_weight=params.get("norm_weight"),
        norm_eps=norm_eps,
        mhc_mult=residual.shape[-2],
        pre_eps=pre_eps,
        precision=precision,
    )
