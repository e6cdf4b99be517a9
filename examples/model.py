"""The demo's model and its initial weights, which both frameworks start from."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tk_core.layers import hyper_connection_init, hyper_head_init, moe_init


@dataclass(frozen=True)
class Config:
    """A decoder-only transformer on bytes; every sub-layer is wrapped in mHC."""

    layers: int = 2
    hidden: int = 128
    heads: int = 4
    streams: int = 4
    sinkhorn: int = 20
    length: int = 128
    vocabulary: int = 256
    # activations that enter a product are rounded to E4M3, 128 channels a scale
    fp8: bool = False
    # the feed-forward part of every layer is a mixture of experts with as many active parameters
    moe: bool = False
    experts: int = 8
    topk: int = 2
    # of the load-balance loss, and the step of the ranking bias
    alpha: float = 0.05
    gamma: float = 0.01

    @property
    def intermediate(self) -> int:
        """Channels of an expert: topk * 3 H F is about the 8 H^2 of the dense part."""
        return round(8 / 3 * self.hidden / self.topk / 8) * 8


class Step(NamedTuple):
    """What a training step yields; load is (layers, experts), rows that chose an expert, where there are experts."""

    loss: float
    seconds: float
    load: Any = None


def initial_weights(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """All parameters by name, fp32. Names with a dot are grouped by sub-layer: layer0.attention.qkv, layer0.attention.mhc.fn, ..."""
    rng = np.random.default_rng(seed)
    h = config.hidden

    def normal(*shape: int, std: float = 0.02) -> np.ndarray:
        return (rng.standard_normal(shape) * std).astype(np.float32)

    weights = {"embedding": normal(config.vocabulary, h), "positions": normal(config.length, h)}
    for layer in range(config.layers):
        shapes = {
            "attention": {"qkv": (h, 3 * h), "out": (h, h)},
            "ffn": {} if config.moe else {"up": (h, 4 * h), "down": (4 * h, h)},
        }
        for part, matrices in shapes.items():
            prefix = f"layer{layer}.{part}"
            weights[f"{prefix}.norm"] = np.ones(h, np.float32)
            for name, shape in matrices.items():
                weights[f"{prefix}.{name}"] = normal(*shape, std=shape[0] ** -0.5)
            mhc = hyper_connection_init(config.streams, h, seed=int(rng.integers(1 << 30)))
            weights |= {f"{prefix}.mhc.{name}": value for name, value in mhc.items()}
        if config.moe:
            moe = moe_init(h, config.intermediate, config.experts, seed=int(rng.integers(1 << 30)))
            weights |= {f"{prefix}.moe.{name}": value for name, value in moe.items()}
    head = hyper_head_init(config.streams, h, seed=int(rng.integers(1 << 30)))
    weights |= {f"head.mhc.{name}": value for name, value in head.items()}
    weights["head.norm"] = np.ones(h, np.float32)
    weights["head.out"] = normal(h, config.vocabulary, std=h**-0.5)
    return weights
