"""Settings of the running process. Only the smallest amax of quantization blocks changes a result's bits."""

from __future__ import annotations

import math
import os
from typing import Any

from tk_core.errors import type_error, value_error

__all__ = [
    "get_amax_clamp_for_quant",
    "get_debug",
    "get_device_num_sms",
    "get_num_sms",
    "get_token_alignment",
    "reset_runtime_config",
    "set_amax_clamp_for_quant",
    "set_debug",
    "set_num_sms",
    "set_token_alignment",
]

_DEFAULTS: dict[str, Any] = {"num_sms": 0, "token_alignment": 128, "debug": False}
_settings = dict(_DEFAULTS)

# The largest number of a format, and the smallest amax that a block is scaled by, with fp32 or UE8M0 scales and with E4M3 scales.
_QUANT_MAX = {"e4m3": 448.0, "e2m1": 6.0}
_CLAMPS = {("e4m3", False): 1e-4, ("e4m3", True): 448 * 2.0**-9, ("e2m1", False): 6 * 2.0**-126, ("e2m1", True): 6 * 2.0**-9}
_clamps = dict(_CLAMPS)


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


def _clamp_key(op: str, fmt: Any, use_e4m3_sf: Any) -> tuple[str, bool]:
    if fmt not in _QUANT_MAX:
        raise value_error(op, "fmt", "'e4m3' or 'e2m1'", repr(fmt))
    if not isinstance(use_e4m3_sf, bool):
        raise type_error(op, "use_e4m3_sf", "a bool", repr(use_e4m3_sf))
    return fmt, use_e4m3_sf


def set_amax_clamp_for_quant(fmt: str, use_e4m3_sf: bool, clamp_min_value: float) -> None:
    """Scale blocks of quantization casts as if their amax were at least this (rounded to fp32).

    Casts read it when they are called; under `jax.jit`, when a program is traced, and the program keeps it.

    Args:
        fmt: the format of the results, "e4m3" or "e2m1".
        use_e4m3_sf: whether for E4M3 scales, or for fp32 and UE8M0 scales.
        clamp_min_value: finite; at least MAX * 2**-126, or MAX * 2**-9 with E4M3 scales, MAX being 448 or 6.

    Raises:
        TypeError: an argument of another kind.
        ValueError: another format, or a value outside the range.
    """
    key = _clamp_key("set_amax_clamp_for_quant", fmt, use_e4m3_sf)
    if isinstance(clamp_min_value, bool) or not isinstance(clamp_min_value, int | float):
        raise type_error("set_amax_clamp_for_quant", "clamp_min_value", "a float", repr(clamp_min_value))
    least = _QUANT_MAX[fmt] * 2.0 ** (-9 if use_e4m3_sf else -126)
    if not (least <= clamp_min_value and math.isfinite(clamp_min_value) and clamp_min_value <= 3.4028234663852886e38):
        raise value_error("set_amax_clamp_for_quant", "clamp_min_value", f"a finite number of at least {least}", clamp_min_value)
    _clamps[key] = float(clamp_min_value)


def get_amax_clamp_for_quant(fmt: str, use_e4m3_sf: bool) -> float:
    """What `set_amax_clamp_for_quant` set, or the default.

    Args:
        fmt: "e4m3" or "e2m1".
        use_e4m3_sf: whether for E4M3 scales, or for fp32 and UE8M0 scales.

    Returns:
        The smallest amax that blocks are scaled by.

    Raises:
        TypeError: an argument of another kind.
        ValueError: another format.
    """
    return _clamps[_clamp_key("get_amax_clamp_for_quant", fmt, use_e4m3_sf)]


def amax_clamps() -> tuple[float, ...]:
    """All values of `set_amax_clamp_for_quant`, to tell whether one has changed."""
    return tuple(_clamps.values())


def reset_runtime_config() -> None:
    """Set everything back to what it was when the process started."""
    _clamps.update(_CLAMPS)
    _settings.update(_DEFAULTS)
    _settings["debug"] = os.environ.get("TK_DEBUG", "") not in ("", "0")


reset_runtime_config()
