"""Text that every machine has: the sources of Python's standard library, as bytes."""

import sysconfig
from pathlib import Path

import numpy as np


def load(limit: int = 4_000_000) -> np.ndarray:
    """The top-level modules of the standard library in alphabetical order, uint8, at most `limit` bytes."""
    parts, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        data = path.read_bytes()[: limit - size]
        parts.append(np.frombuffer(data, np.uint8))
        size += len(data)
        if size >= limit:
            break
    return np.concatenate(parts)


def unigram_entropy(text: np.ndarray) -> float:
    """Nats a byte of a model that knows only how frequent each byte is."""
    p = np.bincount(text, minlength=256) / len(text)
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())


def batches(text: np.ndarray, steps: int, batch: int, length: int, seed: int) -> np.ndarray:
    """(steps, batch, length + 1) int32 windows at random places."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, len(text) - length - 1, (steps, batch))
    return text[starts[..., None] + np.arange(length + 1)].astype(np.int32)
