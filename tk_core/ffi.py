"""TVM-FFI, imported so that it does not pull torch in."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType


def import_without_torch(name: str) -> ModuleType:
    """Import a module that imports torch wherever it is installed and works as well without it."""
    if "torch" in sys.modules:
        return importlib.import_module(name)
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        return importlib.import_module(name)
    finally:
        del sys.modules["torch"]


tvm_ffi = import_without_torch("tvm_ffi")
