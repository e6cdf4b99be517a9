"""Timers. All of them return microseconds of one call, the median of many, with caches cold and inputs rotating."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

# Larger than the L2 cache of any GPU that kernels are built for.
FLUSH_BYTES = 256 * 1024 * 1024
# Some 150 microseconds of a device that does nothing.
PAUSE_CYCLES = 300_000
Calls = Sequence[Callable[[], Any]]


def event_us(calls: Calls, repeats: int = 50) -> float:
    """Device events around a call, the L2 cache flushed before it. Includes launch gaps between its kernels.

    The flush is queued first, and after it a pause that is longer than the host needs to queue the call: host time is not counted.
    """
    import torch

    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    for call in calls:
        call()
    pairs = []
    for i in range(repeats):
        flush.zero_()
        torch.cuda._sleep(PAUSE_CYCLES)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        calls[i % len(calls)]()
        end.record()
        pairs.append((start, end))
        if i % 8 == 7:  # a bounded queue: the flush must stay ahead of the host
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs) * 1e3


def kernel_us(calls: Calls, repeats: int = 20) -> float:
    """Sum of the device times of a call's kernels by the CUDA profiling interface, without launch gaps; cold L2."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    for call in calls:
        call()
    torch.cuda.synchronize()
    times = []
    for i in range(repeats):
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            calls[i % len(calls)]()
            torch.cuda.synchronize()
        times.append(sum(e.device_time_total for e in profiler.key_averages() if "Memset" not in e.key))
        flush.zero_()
        torch.cuda.synchronize()
    return statistics.median(times)


def wall_us(calls: Calls, repeats: int = 15) -> float:
    """Wall-clock time of a call on the CPU."""
    for call in calls:
        call()
    times = []
    for i in range(repeats):
        start = time.perf_counter()
        calls[i % len(calls)]()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def host_us(call: Callable[[], Any], synchronize: Callable[[], Any] = lambda: None, number: int = 1000, repeats: int = 7) -> float:
    """Host time of a call that the device need not keep up with: best of several loops, synchronized between them."""
    for _ in range(50):
        call()
    best = float("inf")
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        for _ in range(number):
            call()
        best = min(best, time.perf_counter() - start)
        synchronize()
    return best / number * 1e6
