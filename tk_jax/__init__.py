"""The operations for JAX: `tk_jax.mhc`, `tk_jax.quant`; `bind` makes a JAX function of any declared operation.

Importing it loads neither torch nor tilelang, makes no file and starts no JAX backend.
"""

from __future__ import annotations

import importlib
from typing import Any

from tk_core.config import *  # noqa: F403
from tk_core.config import __all__ as _settings

__all__ = ["bind", "bind_backward", "build_dispatcher", "config", "load", "mhc", "moe", "nn", "quant", *_settings]  # noqa: F405

_HOMES = {
    "bind": "tk_jax.vjp",
    "bind_backward": "tk_jax.vjp",
    "build_dispatcher": "tk_jax.ffi",
    "load": "tk_jax.ffi",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in ("config", "mhc", "moe", "nn", "quant"):
        return importlib.import_module(f"tk_jax.{name}")
    raise AttributeError(f"module 'tk_jax' has no attribute {name!r}")
