"""What the layers of both front ends share: initial values, as NumPy arrays, and the judgement of their options."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tk_core.errors import value_error


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


class MoEAux(NamedTuple):
    """What an MoE layer gives beside its result.

    loss: f32 scalar, the load-balance loss, to be added to the loss of the task; 0 without alpha.
    load: [E] i32, rows that chose an expert.
    num_dropped: i32 scalar, assignments that found no row in a buffer of limited size.
    topk_idx: [T, K], the routed experts of every row, -1 for none; as `routing` it repeats the choice.
    """

    loss: Any
    load: Any
    num_dropped: Any
    topk_idx: Any


WEIGHTS_IN = ("reduce", "swiglu")


def moe_init(hidden: int, intermediate: int, num_experts: int, num_shared_experts: int = 0, seed: int = 0) -> dict[str, Any]:
    """Parameters of an MoE layer: normal values of variance 1 / inputs, and a ranking bias of zeros.

    Returns:
        router (H, E), w1 (E + S, H, 2 F) with the gate's columns before the others, w2 (E + S, F, H), bias (E,), all fp32.
    """
    if hidden < 64 or hidden % 64:
        raise value_error("moe", "hidden", "a positive multiple of 64", hidden)
    if intermediate < 8 or intermediate % 8:
        raise value_error("moe", "intermediate", "a positive multiple of 8", intermediate)
    rng = np.random.default_rng(seed)
    experts = num_experts + num_shared_experts

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) * np.float32(shape[-2] ** -0.5)

    return {
        "router": normal(hidden, num_experts),
        "w1": normal(experts, hidden, 2 * intermediate),
        "w2": normal(experts, intermediate, hidden),
        "bias": np.zeros(num_experts, np.float32),
    }


def identity_map(num_experts: int, num_shared_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """to_physical_map and logical_count by which every expert is the physical expert of its number.

    `top2_sum_gate` takes shared experts only with a map, whose columns say how many physical experts there are.
    """
    experts = np.arange(num_experts + num_shared_experts, dtype=np.int32)
    return np.repeat(experts[:, None], num_shared_experts + 1, 1), np.ones_like(experts)


def check_moe(hidden: int, last: int, weights_in: str) -> None:
    """The judgement of what no operation of the layer judges."""
    if last != hidden:
        raise value_error("moe", "x", f"shape (..., {hidden})", f"(..., {last})")
    if weights_in not in WEIGHTS_IN:
        raise value_error("moe", "weights_in", " or ".join(map(repr, WEIGHTS_IN)), repr(weights_in))
