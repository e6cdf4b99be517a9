"""Inputs of the MoE benchmark, and the comparison of results with the oracle."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from tk_core.bench.routing import random_routing
from tk_core.dtypes import numpy_dtype
from tk_torch.launch import DTYPE_NAMES

# Tokens of a mapping, and rows of padding, that are compared with the oracle.
MOVED, PADDING = 48, 16


class Source:
    """Random tensors of a device."""

    def __init__(self, seed: int, device: str) -> None:
        self.device, self._generator = device, torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Of mean 0 and variance 1."""
        return torch.randn(shape, generator=self._generator, device=self.device).to(dtype)

    def uniform(self, *shape: int) -> torch.Tensor:
        """From 0 to 1."""
        return torch.rand(shape, generator=self._generator, device=self.device)

    def routing(self, *args: Any) -> torch.Tensor:
        """Experts by `routing`, the same for every seed."""
        return torch.from_numpy(routing(*args)).to(self.device)


@functools.cache
def routing(T: int, K: int, E: int, EP: int, fixed: bool = False) -> np.ndarray:
    """Experts (T, K) as the first of EP ranks with E experts each receives them; `fixed`: tokens without an expert here stay."""
    if fixed:
        return random_routing(-(-T // EP), K, E * EP, EP, keep_empty=True)[:T]
    share = 1 - math.comb(E * EP - E, K) / math.comb(E * EP, K)
    return random_routing(math.ceil(T / EP / share * 1.03) + 8, K, E * EP, EP)[:T]


# ------------------------------------------------------------------ comparison


def array(t: torch.Tensor) -> np.ndarray:
    """With the dtypes of ml_dtypes."""
    bits = t.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return bits.view(numpy_dtype(DTYPE_NAMES[t.dtype])).reshape(t.shape)


def differs(name: str, got: Any, want: Any) -> str:
    """Whether an array is another one than it should be, to the bit."""
    got = array(got) if isinstance(got, torch.Tensor) else np.asarray(got)
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{name} is {got.dtype} {got.shape}, expected {want.dtype} {want.shape}"
    return "" if got.tobytes() == want.tobytes() else f"{name} differs from the oracle"


def far(name: str, got: torch.Tensor, want: np.ndarray, rtol: float, atol: float) -> str:
    """Whether an array is outside its tolerance."""
    return "" if np.allclose(array(got), want, rtol=rtol, atol=atol) else f"{name} is not within its tolerance"


def first(texts: Iterator[str]) -> str:
    """The first text that is not empty."""
    return next(filter(None, texts), "")


def sample(T: int, count: int) -> np.ndarray:
    """At most count of T rows, evenly, the first and the last one among them."""
    return np.unique(np.linspace(0, T - 1, min(count, T)).astype(int))


class Part:
    """Sampled tokens of a mapping with their rows and some of padding, numbered as in a small one."""

    def __init__(self, mapping: Sequence[torch.Tensor]) -> None:
        owners, _, slots, where = map(array, mapping[:4])
        self.tokens = sample(len(where), MOVED)
        where = where[self.tokens]
        padding = np.flatnonzero(owners < 0)
        self.rows = np.unique(np.concatenate([where[where >= 0], padding[sample(len(padding), PADDING)] if padding.size else padding]))
        self.where = np.where(where >= 0, np.searchsorted(self.rows, where), -1).astype(np.int32)
        self.owners, slots, K = owners[self.rows], slots[self.rows], where.shape[1]
        self.slots = np.where(slots >= 0, np.searchsorted(self.tokens, slots // K) * K + slots % K, -1).astype(np.int32)

    def of_tokens(self, t: torch.Tensor) -> np.ndarray:
        """The sampled tokens of a tensor with one row a token."""
        return array(t[self.tokens])

    def of_rows(self, t: torch.Tensor) -> np.ndarray:
        """Their rows of an expert-major tensor."""
        return array(t[self.rows])
