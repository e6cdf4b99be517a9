"""Manifold-constrained hyper-connections for JAX: explicit functions over the declared operations."""

from __future__ import annotations

import jax

from tk_core.docs import documented
from tk_core.ops.mhc import apply_mix
from tk_jax.vjp import bind

__all__ = ["mhc_pre_apply_mix"]

_pre_apply_mix = bind(apply_mix.mhc_pre_apply_mix)


@documented(apply_mix.mhc_pre_apply_mix)
def mhc_pre_apply_mix(x: jax.Array, mix: jax.Array) -> jax.Array:
    return _pre_apply_mix(x, mix)
