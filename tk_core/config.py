"""Settings of the running process. None of them changes a result's bits."""

from __future__ import annotations

import os
from typing import Any

from tk_core.errors import type_error, value_error

__all__ = [
    "get_debug",
    "get_device_num_sms",
    "get_num_sms",
    "get_token_alignment",
    "reset_runtime_config",
    "set_debug",
    "set_num_sms",
    "set_token_alignment",
]

_DEFAULTS: dict[str, Any] = {"num_sms": 0, "token_alignment": 128, "debug": False}
_settings = dict(_DEFAULTS)


def _integer(op: str, argument: str, value: Any, low: int, expected: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise type_error(op, argument, "an int", repr(value))
    if value < low:
        raise value_error(op, argument, expected, value)
    return value


def get_device_num_sms() -> int:
    """Streaming multiprocessors of the current CUDA device; CPU cores where there is none."""
    from tk_core.device import device_num_sms

    return device_num_sms()


def set_num_sms(num_sms: int) -> None:
    """Let persistent kernels use that many multiprocessors: 1 to `get_device_num_sms()`. Results do not change."""
    limit = get_device_num_sms()
    _integer("set_num_sms", "num_sms", num_sms, 1, f"1 to {limit}")
    if num_sms > limit:
        raise value_error("set_num_sms", "num_sms", f"1 to {limit}", num_sms)
    _settings["num_sms"] = num_sms


def get_num_sms() -> int:
    """The number set by `set_num_sms`, otherwise all multiprocessors of the device."""
    return _settings["num_sms"] or get_device_num_sms()


def set_token_alignment(token_alignment: int) -> None:
    """Round the rows of every expert up to a multiple of this many tokens (a power of two)."""
    value = _integer("set_token_alignment", "token_alignment", token_alignment, 1, "a power of two")
    if value & (value - 1):
        raise value_error("set_token_alignment", "token_alignment", "a power of two", token_alignment)
    _settings["token_alignment"] = value


def get_token_alignment() -> int:
    """The number set by `set_token_alignment`; 128 at the start."""
    return _settings["token_alignment"]


def set_debug(debug: bool) -> None:
    """Check on the device what is otherwise trusted (index ranges, NaN); slow, and it synchronizes."""
    _settings["debug"] = bool(debug)


def get_debug() -> bool:
    """Whether debug checks are on: `set_debug`, or `TK_DEBUG=1` at the start."""
    return _settings["debug"]


def reset_runtime_config() -> None:
    """Set everything back to what it was when the process started."""
    _settings.update(_DEFAULTS)
    _settings["debug"] = os.environ.get("TK_DEBUG", "") not in ("", "0")


reset_runtime_config()
