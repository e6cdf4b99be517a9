"""Random routing as one rank of an expert-parallel group receives it: inputs of the MoE tests and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

# Scores that are drawn at a time.
CHUNK = 1 << 24


class Routing(NamedTuple):
    """Tokens that every rank sends, experts of a token, experts of all ranks, ranks."""

    tokens: int
    topk: int
    experts: int
    ranks: int

    @property
    def local_experts(self) -> int:
        """Experts of one rank."""
        return self.experts // self.ranks


def random_routing(
    tokens: int, topk: int, experts: int, ranks: int = 1, seed: int = 0, *, keep_empty: bool = False, dtype: Any = np.int64
) -> np.ndarray:
    """Experts (T, topk) of rank 0 for the tokens of all ranks, -1 where an expert is elsewhere.

    Every token takes topk of all experts uniformly, in random order. Tokens without an expert here are left out unless keep_empty, which
    makes T = tokens * ranks.
    """
    rng = np.random.default_rng([seed, tokens, topk, experts, ranks])
    rows, step = tokens * ranks, max(CHUNK // experts, 1)
    parts = [np.empty((0, topk), dtype)]
    for first in range(0, rows, step):
        scores = rng.random((min(step, rows - first), experts), np.float32)
        best = np.argpartition(-scores, topk - 1, axis=1)[:, :topk]
        order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1)
        idx = np.take_along_axis(best, order, axis=1)
        idx[idx >= experts // ranks] = -1
        parts.append((idx if keep_empty else idx[(idx >= 0).any(axis=1)]).astype(dtype))
    return np.concatenate(parts)


def moe_list(full: bool = False) -> Iterator[Routing]:
    """The routings that every operation is tested and timed on."""
    for experts in (72, 256, 288, 384) if full else (72, 256):
        for ranks in (1, 8, 64, 72, 256) if full else (8, 64):
            if experts % ranks == 0:
                for topk in (1, 2, 6, 7, 8, 9) if full else (2, 6, 8, 9):
                    yield Routing(4001, topk, experts, ranks)
    if full:
        yield Routing(0, 1, 1, 1)
        yield Routing(1, 8, 2048, 8)


# Routings of a fixed shape, with their hidden size and alignment; rows without an expert stay.
FIXED = ((Routing(2048, 8, 256, 8), 7168, 128), (Routing(8192, 6, 64, 1), 4096, 128))
