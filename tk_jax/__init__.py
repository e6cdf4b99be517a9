"""The operations for JAX: `tk_jax.mhc`; `bind` makes a JAX function of any declared operation.

Importing it loads neither torch nor tilelang, makes no file and starts no JAX backend.
"""

from __future__ import annotations

import importlib
from typing import Any

from tk_core.config import (
    get_debug,
    get_device_num_sms,
    get_num_sms,
    get_token_alignment,
    reset_runtime_config,
    set_debug,
    set_num_sms,
    set_token_alignment,
)

__all__ = [
    "bind",
    "bind_backward",
    "build_dispatcher",
    "config",
    "get_debug",
    "get_device_num_sms",
    "get_num_sms",
    "get_token_alignment",
    "load",
    "mhc",
    "nn",
    "reset_runtime_config",
    "set_debug",
    "set_num_sms",
    "set_token_alignment",
]

_HOMES = {
    "bind": "tk_jax.vjp",
    "bind_backward": "tk_jax.vjp",
    "build_dispatcher": "tk_jax.ffi",
    "load": "tk_jax.ffi",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in ("config", "mhc", "nn"):
        return importlib.import_module(f"tk_jax.{name}")
    raise AttributeError(f"module 'tk_jax' has no attribute {name!r}")
