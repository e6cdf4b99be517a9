"""Targets: "c" for the CPU, an sm_xx architecture for CUDA. No context is made and no framework is imported here."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform

# Architectures that kernels can be compiled for ahead of time; gfx942 gives HIP source.
ARCHS = ("c", "sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a", "gfx942")

# From Hopper on, the "a" targets hold the instructions of exactly that generation.
_ACCELERATED = {(9, 0), (10, 0), (10, 3), (12, 0), (12, 1)}


def arch_of(major: int, minor: int) -> str:
    """The compilation target of a CUDA compute capability."""
    return f"sm_{major}{minor}{'a' if (major, minor) in _ACCELERATED else ''}"


@functools.cache
def cpu_id() -> str:
    """What kernels for this CPU depend on: machine and instruction sets, as a short hash."""
    flags = ""
    try:
        with open("/proc/cpuinfo") as lines:
            flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        pass
    return hashlib.sha256((platform.machine() + flags).encode()).hexdigest()[:12]


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if driver.cuInit(0) == 0 else None


def device_num_sms(index: int = 0) -> int:
    """Multiprocessors of a CUDA device, asked from the driver without making a context; CPU cores without one."""
    driver = _driver()
    if driver is None:
        return os.cpu_count() or 1
    device, count = ctypes.c_int(), ctypes.c_int()
    multiprocessor_count = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    if driver.cuDeviceGet(ctypes.byref(device), index):
        return os.cpu_count() or 1
    driver.cuDeviceGetAttribute(ctypes.byref(count), multiprocessor_count, device)
    return count.value
