"""The framework-agnostic core: declarations of operations, their kernels, compiler, cache and oracles.

Importing it loads neither torch, jax nor tilelang, makes no file and no CUDA context.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

__all__ = ["Op", "__version__", "call", "reset_stats", "stats"]

_HOMES = {"stats": "tk_core.kernels", "reset_stats": "tk_core.kernels", "call": "tk_core.arrays", "Op": "tk_core.op"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tk_core' has no attribute {name!r}")
