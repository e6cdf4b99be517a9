"""The operations for PyTorch: `tk_torch.mhc`, and modules in `tk_torch.nn`.

Operators are registered as `torch.ops.tk.*` with fakes and autograd when their module is imported.
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
    "config",
    "get_debug",
    "get_device_num_sms",
    "get_num_sms",
    "get_token_alignment",
    "mhc",
    "nn",
    "reset_runtime_config",
    "set_debug",
    "set_num_sms",
    "set_token_alignment",
]


def __getattr__(name: str) -> Any:
    if name in ("config", "mhc", "nn"):
        return importlib.import_module(f"tk_torch.{name}")
    raise AttributeError(f"module 'tk_torch' has no attribute {name!r}")
