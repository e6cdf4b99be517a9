"""Initial values of layers, as NumPy arrays: both front ends start from the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np


def hyper_connection_init(streams: int, hidden: int, seed: int = 0, fn_std: float = 1e-3, diagonal: float = 6.0) -> dict[str, Any]:
    """Parameters of a hyper-connection that starts close to an ordinary residual connection.

    pre = sigmoid(logit(1 / n)) = 1 / n (the layer sees the mean of the streams), post = 2 * sigmoid(0) = 1 (every stream
    gets the layer's output), comb close to the identity (a large diagonal before the softmax); the input-dependent parts
    start small: scale 0.01 on a projection of standard deviation `fn_std`.

    Returns:
        fn (n * (n + 2), n * H), scale (3,), base (n * (n + 2),), norm_weight (n * H,), all fp32.
    """
    n = streams
    rng = np.random.default_rng(seed)
    pre = np.full(n, -np.log(n - 1.0) if n > 1 else 20.0)
    comb = np.eye(n) * diagonal
    return {
        "fn": (rng.standard_normal((n * (n + 2), n * hidden)) * fn_std).astype(np.float32),
        "scale": np.full(3, 0.01, np.float32),
        "base": np.concatenate([pre, np.zeros(n), comb.reshape(-1)]).astype(np.float32),
        "norm_weight": np.ones(n * hidden, np.float32),
    }


def hyper_head_init(streams: int, hidden: int, seed: int = 0, fn_std: float = 1e-3) -> dict[str, Any]:
    """Parameters of the head's mix, starting as the mean of the streams.

    Returns:
        fn (n, n * H), scale (1,), base (n,), norm_weight (n * H,), all fp32.
    """
    n = streams
    rng = np.random.default_rng(seed)
    return {
        "fn": (rng.standard_normal((n, n * hidden)) * fn_std).astype(np.float32),
        "scale": np.full(1, 0.01, np.float32),
        "base": np.full(n, -np.log(n - 1.0) if n > 1 else 20.0, np.float32),
        "norm_weight": np.ones(n * hidden, np.float32),
    }
