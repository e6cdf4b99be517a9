"""Layers as pure functions over a dict of arrays: usable as they are, and from flax or equinox modules.

params = init_hyper_connection(hidden=512)
residual = hyper_connection(params, residual, sublayer)

params = init_moe(hidden=512, intermediate=1024, num_experts=64)
y, aux = moe(params, x, num_topk=6, alpha=1e-3)
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from tk_core.layers import MoEAux, check_moe, hyper_connection_init, hyper_head_init, identity_map, moe_init
from tk_core.ops.moe import gemm
from tk_jax import mhc
from tk_jax import moe as routing_ops

__all__ = ["MoEAux", "grouped_product", "hyper_connection", "hyper_head", "init_hyper_connection", "init_hyper_head", "init_moe", "moe"]

Params = dict[str, jax.Array]

# ------------------------------------------------------------------ mHC


def _arrays(values: dict, norm_weight: bool) -> Params:
    return {name: jnp.asarray(value) for name, value in values.items() if name != "norm_weight" or norm_weight}


def init_hyper_connection(hidden: int, streams: int = 4, *, norm_weight: bool = True, seed: int = 0) -> Params:
    """Parameters of `hyper_connection`: fn, scale, base and, if wanted, norm_weight, fp32; close to a plain residual."""
    return _arrays(hyper_connection_init(streams, hidden, seed), norm_weight)


def hyper_connection(
    params: Params,
    residual: jax.Array,
    sublayer: Callable[[jax.Array], jax.Array],
    *,
    post_mult_value: float = 2.0,
    sinkhorn_repeat: int = 20,
    norm_eps: float = 1e-6,
    pre_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    precision: str = "bf16x2",
) -> jax.Array:
    """The next residual (..., n, H) after a sub-layer that maps (..., H) to (..., H).

    Defaults are the paper's (multiplier 2, 20 Sinkhorn iterations), unlike those of `mhc_pre`.
    """
    layer_input, mixes = mhc.mhc_pre(
        residual,
        params["fn"],
        params["scale"],
        params["base"],
        norm_weight=params.get("norm_weight"),
        norm_eps=norm_eps,
        mhc_mult=residual.shape[-2],
        post_mult_value=post_mult_value,
        pre_eps=pre_eps,
        sinkhorn_eps=sinkhorn_eps,
        sinkhorn_repeat=sinkhorn_repeat,
        precision=precision,
    )
    return mhc.mhc_post(sublayer(layer_input), residual, *mixes)


def init_hyper_head(hidden: int, streams: int = 4, *, norm_weight: bool = True, seed: int = 0) -> Params:
    """Parameters of `hyper_head`: fn, scale, base and, if wanted, norm_weight, fp32."""
    return _arrays(hyper_head_init(streams, hidden, seed), norm_weight)


def hyper_head(
    params: Params, residual: jax.Array, *, norm_eps: float = 1e-6, pre_eps: float = 1e-6, precision: str = "bf16x2"
) -> jax.Array:
    """The head's input (..., H) from the residual streams (..., n, H)."""
    return mhc.mhc_head(
        residual,
        params["fn"],
        params["scale"],
        params["base"],
        norm_weight=params.get("norm_weight"),
        norm_eps=norm_eps,
        mhc_mult=residual.shape[-2],
        pre_eps=pre_eps,
        precision=precision,
    )


# ------------------------------------------------------------------ mixture of experts


def init_moe(
    hidden: int,
    intermediate: int,
    num_experts: int,
    *,
    num_shared_experts: int = 0,
    seed: int = 0,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> Params:
    """Parameters of `moe`: router (H, E) fp32, w1 (E + S, H, 2 F) and w2 (E + S, F, H) in `dtype`, and bias (E,) fp32.

    Args:
        hidden: H, a multiple of 64.
        intermediate: F, channels between the two matrices of an expert, a multiple of 8.
        num_experts: E, routed experts.
        num_shared_experts: S, 0, 1 or 2 experts of every row, the last of w1 and w2.
        seed: of the initial values.
        dtype: of w1 and w2.
    """
    values = moe_init(hidden, intermediate, num_experts, num_shared_experts, seed)
    return {name: jnp.asarray(value, dtype if name in ("w1", "w2") else jnp.float32) for name, value in values.items()}


def grouped_product(x: jax.Array, w: jax.Array, sizes: jax.Array | None) -> jax.Array:
    """Rows of x times the matrix of their segment; the segments follow each other from row 0.

    What is in the rows behind the last segment is up to the backend, in the result and in the gradient of x: nothing but operations on
    single rows may follow until those rows are dropped. Segments of one length are one batched product. Others are `ragged_dot`, for
    which XLA computes every row with every matrix, E times as much, on the CPU and without further flags on NVIDIA GPUs.

    Args:
        x: (N, H).
        w: (E, H, F), in the dtype of x.
        sizes: (E,) int32, rows of the segments, together at most N; None where all of them have N / E.

    Returns:
        (N, F).
    """
    if sizes is not None:
        return jax.lax.ragged_dot(x, w, sizes)
    experts = w.shape[0]
    segments = x.reshape(experts, x.shape[0] // experts, x.shape[1])
    return jnp.einsum("enh,ehf->enf", segments, w).reshape(x.shape[0], w.shape[2])


def moe(
    params: Params,
    x: jax.Array,
    *,
    num_topk: int,
    mask: jax.Array | None = None,
    routing: jax.Array | None = None,
    scoring_func: str = "sqrtsoftplus",
    routed_scaling_factor: float = 1.0,
    num_groups: int = 0,
    num_topk_groups: int = 0,
    alignment: int = 128,
    weights_in: str = "reduce",
    alpha: float = 0.0,
    num_expanded_tokens: int | None = None,
    expert_capacity: int | None = None,
) -> tuple[jax.Array, MoEAux]:
    """Experts with SwiGLU behind a top-k router.

    y[t] = sum_k weight[t, k] * W2[e] (silu(gate) * up),   (gate, up) = W1[e] x[t],   e = expert k of t

    The router and the gate compute in fp32, the experts in the dtype of x; their activation is recomputed in the backward pass instead of
    being saved in fp32. Without a limit no assignment is dropped: the buffers then have T * K + (A - 1) * E rows rounded down to whole
    alignments, whatever the routing needs. Where rows are spread over devices, call it in `jax.shard_map`.

    Balance: with alpha, add `aux.loss` to the loss. Or, after the optimizer's step,
    `params["bias"] = tk_jax.moe.update_expert_bias(params["bias"], aux.load, gamma)`; the bias ranks experts, its gradient is zero.

    Args:
        params: of `init_moe`.
        x: (..., H) bf16 or fp32.
        num_topk: K, routed experts of a row.
        mask: (...) bool; rows with False take no part, their result is 0.
        routing: (T, K) int32, experts to use instead of the router's choice, as `aux.topk_idx` has them; -1 for an empty slot.
        scoring_func: "sqrtsoftplus", "sigmoid" or "softmax".
        routed_scaling_factor: of the routed weights, whose sum is 1 without it.
        num_groups: groups of experts; equal to num_topk_groups or 0 for no limit.
        num_topk_groups: groups that a row's experts come from.
        alignment: A, rows of an expert's segment are a multiple of it. With a multiple of 128, and F of 64, the products of bf16 rows are
            `grouped_gemm`, the same to the bit in both frameworks; otherwise `ragged_dot`, see `grouped_product`.
        weights_in: where the weights multiply: "reduce", the results of experts, or "swiglu", their activation. Equal in exact arithmetic;
            the second needs no results of experts in the backward pass.
        alpha: of the load-balance loss, whose sequences are the first axis of a 3-D x.
        num_expanded_tokens: rows of the buffers; assignments beyond are dropped and counted.
        expert_capacity: instead, rows of every expert, a multiple of A.

    Returns:
        y (..., H) in the dtype of x, and a `MoEAux`.
    """
    router, w1 = params["router"], params["w1"]
    hidden, experts = router.shape
    shared = w1.shape[0] - experts
    check_moe(hidden, x.shape[-1], weights_in)
    rows = x.reshape(-1, hidden)
    mask = None if mask is None else mask.reshape(-1)
    num_seqs = max(x.shape[0], 1) if x.ndim == 3 else 1

    logits = jnp.matmul(rows.astype(jnp.float32), router, precision=jax.lax.Precision.HIGHEST)
    options = {
        "num_topk": num_topk,
        "use_shared_as_routed": shared > 0,
        "num_shared_experts": shared,
        "routed_scaling_factor": routed_scaling_factor,
        "ep_rank": 0,
        "scoring_func": scoring_func,
        "mask": mask,
        "num_seqs": num_seqs,
    }
    if routing is not None:
        options |= {"fix_routing_mask": jnp.ones(rows.shape[0], bool), "fixed_topk_idx": routing}
    if num_groups == num_topk_groups:
        gate = routing_ops.moe_topk_gate(logits, bias=params["bias"], **options)
    else:
        to_physical_map, logical_count = map(jnp.asarray, identity_map(experts, shared)) if shared else (None, None)
        gate = routing_ops.top2_sum_gate(
            logits, params["bias"], num_groups=num_groups, num_topk_groups=num_topk_groups, num_ep_ranks=1, tp_rank=0, num_tp_ranks=1,
            to_physical_map=to_physical_map, logical_count=logical_count, **options,
        )  # fmt: skip

    mapping = routing_ops.fused_mapping(
        gate.topk_idx, num_experts=experts + shared, alignment=alignment,
        num_expanded_tokens=num_expanded_tokens, expert_capacity=expert_capacity,
    )  # fmt: skip

    def product(rows: jax.Array, w: jax.Array) -> jax.Array:
        """Rows of the buffer times the matrices of their experts."""
        w = w.astype(rows.dtype)
        if expert_capacity:
            return grouped_product(rows, w, None)
        if gemm.takes(rows.dtype.name, rows.shape[0], alignment, *w.shape[1:]):
            return routing_ops.grouped_gemm(rows, w, mapping.pos_to_expert, mapping.expert_start, mapping.expert_end)
        return grouped_product(rows, w, mapping.num_tokens_per_expert)

    y = _experts(rows, gate.topk_weights, mapping, product, w1, params["w2"], weights_in)

    counts = routing_ops.group_count(gate.unmapped_topk_idx, experts, num_seqs=num_seqs).reshape(num_seqs, experts)
    loss = jnp.zeros((), jnp.float32)
    if alpha:
        length = rows.shape[0] // num_seqs
        taking_part = length if mask is None else mask.reshape(num_seqs, length).sum(1)
        loss = routing_ops.load_balance_loss(gate.scores_sum, counts, taking_part, num_topk, alpha)
    return y.reshape(x.shape), MoEAux(loss, counts.sum(0), mapping.num_dropped, gate.unmapped_topk_idx)


@jax.checkpoint
def _swiglu(hidden: jax.Array, w_row: jax.Array | None) -> jax.Array:
    """silu(gate) * up * w_row of hidden = (gate, up), (N, 2 F) -> (N, F), in fp32 and rounded once."""
    gate, up = jnp.split(hidden.astype(jnp.float32), 2, -1)
    activation = jax.nn.silu(gate) * up
    return (activation if w_row is None else activation * w_row[:, None]).astype(hidden.dtype)


def _experts(
    rows: jax.Array,
    weights: jax.Array,
    mapping: routing_ops.FusedMapping,
    product: Callable[[jax.Array, jax.Array], jax.Array],
    w1: jax.Array,
    w2: jax.Array,
    weights_in: str,
) -> jax.Array:
    """The weighted sum of the experts' results, (T, H)."""
    expanded = routing_ops.expand_to_fused(rows, mapping.token_topk_to_pos, mapping.pos_to_expert)
    hidden = product(expanded, w1)
    w_row = None
    if weights_in == "swiglu":
        w_row = routing_ops.expand_topk_weights(weights, mapping.token_topk_to_pos, mapping.pos_to_token_topk)
    results = product(_swiglu(hidden, w_row), w2)
    return routing_ops.reduce_fused(results, weights if weights_in == "reduce" else None, mapping.token_topk_to_pos)
