"""The demo in JAX: mHC, experts and FP8 rounding from tk_jax, everything else from jax.numpy."""

import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from model import Config, Step

from tk_jax import mhc, nn, quant
from tk_jax.moe import update_expert_bias

Weights = dict[str, Array]


def rms_norm(x: Array, weight: Array) -> Array:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def connect(config: Config, w: Weights, prefix: str, residual: Array, sublayer: Callable[[Array], Array]) -> Array:
    """residual -> post(sublayer(pre(residual)), residual)."""
    fn, scale, base, weight = (w[f"{prefix}.mhc.{name}"] for name in ("fn", "scale", "base", "norm_weight"))
    layer_input, mixes = mhc.mhc_pre(
        residual, fn, scale, base, norm_weight=weight, mhc_mult=config.streams,
        post_mult_value=2.0, sinkhorn_repeat=config.sinkhorn,
    )  # fmt: skip
    return mhc.mhc_post(sublayer(layer_input), residual, *mixes)


def product(config: Config, x: Array, weight: Array) -> Array:
    """x @ weight; the gradient goes straight through the rounding of x."""
    return (quant.fake_quant(x, "e4m3", 128) if config.fp8 else x) @ weight


def attention(config: Config, w: Weights, prefix: str, x: Array) -> Array:
    batch, length, hidden = x.shape
    x = rms_norm(x, w[f"{prefix}.norm"])
    q, k, v = product(config, x, w[f"{prefix}.qkv"]).reshape(batch, length, 3, config.heads, -1).transpose(2, 0, 3, 1, 4)
    scores = q @ k.swapaxes(-1, -2) * (hidden // config.heads) ** -0.5
    scores = jnp.where(jnp.triu(jnp.ones((length, length), bool), 1), -1e9, scores)
    mixed = (jax.nn.softmax(scores) @ v).swapaxes(1, 2).reshape(batch, length, hidden)
    return product(config, mixed, w[f"{prefix}.out"]).astype(jnp.bfloat16)


def ffn(config: Config, w: Weights, prefix: str, x: Array) -> Array:
    x = rms_norm(x, w[f"{prefix}.norm"])
    return product(config, jax.nn.silu(product(config, x, w[f"{prefix}.up"])), w[f"{prefix}.down"]).astype(jnp.bfloat16)


def moe(config: Config, w: Weights, prefix: str, x: Array) -> tuple[Array, nn.MoEAux]:
    x = rms_norm(x, w[f"{prefix}.norm"])
    params = {name: w[f"{prefix}.moe.{name}"] for name in ("router", "w1", "w2", "bias")}
    y, aux = nn.moe(params, x, num_topk=config.topk, alpha=config.alpha)
    return y.astype(jnp.bfloat16), aux


def loss_of(config: Config, w: Weights, tokens: Array) -> tuple[Array, tuple[Array, list[Array]]]:
    """Mean cross-entropy of the next byte, with the balance losses of experts; and without them, and the load of every layer's experts."""
    routing = []

    def experts(config: Config, w: Weights, prefix: str, x: Array) -> Array:
        y, aux = moe(config, w, prefix, x)
        routing.append(aux)
        return y

    parts = {"attention": attention, "ffn": experts if config.moe else ffn}
    x = (w["embedding"][tokens[:, :-1]] + w["positions"]).astype(jnp.bfloat16)
    residual = mhc.expand_from_embedding(x, config.streams)
    for layer in range(config.layers):
        for part, function in parts.items():
            prefix = f"layer{layer}.{part}"
            residual = connect(config, w, prefix, residual, lambda h, p=prefix, f=function: f(config, w, p, h))
    fn, scale, base, weight = (w[f"head.mhc.{name}"] for name in ("fn", "scale", "base", "norm_weight"))
    x = mhc.mhc_head(residual, fn, scale, base, norm_weight=weight, mhc_mult=config.streams)
    log_p = jax.nn.log_softmax(rms_norm(x, w["head.norm"]) @ w["head.out"])
    loss = -jnp.take_along_axis(log_p, tokens[:, 1:, None], -1).mean()
    return loss + sum(aux.loss for aux in routing), (loss, [aux.load for aux in routing])


def adam(w: Weights, g: Weights, m: Weights, v: Weights, step: Array, rate: Array) -> tuple[Weights, Weights, Weights]:
    """One step of Adam, written as torch.optim.Adam computes it."""
    m = jax.tree.map(lambda a, b: a + (b - a) * (1 - 0.9), m, g)
    v = jax.tree.map(lambda a, b: a * 0.99 + b * b * (1 - 0.99), v, g)
    w = jax.tree.map(lambda p, a, b: p - rate / (1 - 0.9**step) * a / (jnp.sqrt(b) / jnp.sqrt(1 - 0.99**step) + 1e-8), w, m, v)
    return w, m, v


def train(config: Config, weights: dict[str, np.ndarray], data: np.ndarray, rates: np.ndarray) -> Iterator[Step]:
    """Yields the loss, the time and the experts' load of every step."""

    @jax.jit
    def update(w: Weights, m: Weights, v: Weights, tokens: Array, step: Array, rate: Array) -> tuple:
        (_, (loss, loads)), g = jax.value_and_grad(lambda p: loss_of(config, p, tokens), has_aux=True)(w)
        w, m, v = adam(w, g, m, v, step, rate)
        for layer, load in enumerate(loads):
            name = f"layer{layer}.ffn.moe.bias"
            w = w | {name: update_expert_bias(w[name], load, config.gamma)}
        return loss, loads, w, m, v

    w = jax.tree.map(jnp.asarray, weights)
    m, v = (jax.tree.map(jnp.zeros_like, w) for _ in range(2))
    for step, (tokens, rate) in enumerate(zip(data, rates, strict=True), 1):
        start = time.perf_counter()
        loss, loads, w, m, v = update(w, m, v, jnp.asarray(tokens), jnp.float32(step), jnp.float32(rate))
        yield Step(float(loss), time.perf_counter() - start, np.stack(loads) if config.moe else None)
