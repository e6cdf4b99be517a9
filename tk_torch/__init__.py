"""The operations for PyTorch: `tk_torch.mhc`, `tk_torch.quant`, and modules in `tk_torch.nn`.

Operators are registered as `torch.ops.tk.*` with fakes and autograd when their module is imported.
"""

from __future__ import annotations

import importlib
from typing import Any

from tk_core.config import *  # noqa: F403
from tk_core.config import __all__ as _settings

__all__ = ["config", "mhc", "moe", "nn", "quant", *_settings]  # noqa: F405


def __getattr__(name: str) -> Any:
    if name in ("config", "mhc", "moe", "nn", "quant"):
        return importlib.import_module(f"tk_torch.{name}")
    raise AttributeError(f"module 'tk_torch' has no attribute {name!r}")
