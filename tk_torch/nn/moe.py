"""A mixture of experts as a module: router, gate, mapping, expansion, grouped SwiGLU experts, reduction."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tk_core.layers import MoEAux, check_moe, identity_map, moe_init
from tk_core.ops.moe import gemm
from tk_torch import moe
from tk_torch.launch import DTYPE_NAMES

# ------------------------------------------------------------------ grouped product


@torch.library.custom_op("tk_nn::grouped_product", mutates_args=())
def _grouped_product(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """One product a segment; the bounds are read on the host."""
    out = x.new_zeros(x.shape[0], w.shape[2])
    start = 0
    for e, end in enumerate(ends.tolist()):
        torch.mm(x[start:end], w[e], out=out[start:end])
        start = end
    return out


@_grouped_product.register_fake
def _(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[2])


@torch.library.custom_op("tk_nn::grouped_product_weights", mutates_args=())
def _grouped_product_weights(x: Tensor, d_out: Tensor, ends: Tensor) -> Tensor:
    """The gradient of the matrices."""
    out = x.new_zeros(ends.shape[0], x.shape[1], d_out.shape[1])
    start = 0
    for e, end in enumerate(ends.tolist()):
        torch.mm(x[start:end].t(), d_out[start:end], out=out[e])
        start = end
    return out


@_grouped_product_weights.register_fake
def _(x: Tensor, d_out: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], d_out.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, w, ends = ctx.saved_tensors
    d_x = _grouped_product(d_out, w.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
    d_w = _grouped_product_weights(x, d_out, ends) if ctx.needs_input_grad[1] else None
    return d_x, d_w, None


_grouped_product.register_autograd(_gradients, setup_context=_save)


def grouped_product(x: Tensor, w: Tensor, ends: Tensor | None) -> Tensor:
    """out[start_e : end_e] = x[start_e : end_e] @ w[e] for all segments, which follow each other from row 0.

    Segments of one length are one `bmm`. Of others, bf16 on CUDA is one `grouped_mm`, which leaves the rows behind the last segment
    unwritten, in the result and in the gradient of x: nothing but operations on single rows may follow until those rows are dropped.
    Everything else is a loop over the segments, which on CUDA waits for their bounds.

    Args:
        x: (N, H).
        w: (E, H, F), in the dtype of x.
        ends: (E,) int32, ascending, at most N; None where all segments have N / E rows.

    Returns:
        (N, F).
    """
    if ends is None:
        experts, hidden, features = w.shape
        return torch.bmm(x.view(experts, x.shape[0] // experts, hidden), w).view(x.shape[0], features)
    if x.is_cuda and x.dtype is torch.bfloat16 and x.shape[0] > 0:
        return F.grouped_mm(x, w, offs=ends)
    return _grouped_product(x, w, ends)


# ------------------------------------------------------------------ layer


def swiglu(hidden: Tensor, w_row: Tensor | None) -> Tensor:
    """silu(gate) * up * w_row of hidden = (gate, up), (N, 2 F) -> (N, F), in fp32 and rounded once."""
    gate, up = hidden.float().chunk(2, -1)
    activation = F.silu(gate) * up
    return (activation if w_row is None else activation * w_row[:, None]).to(hidden.dtype)


class MoE(nn.Module):
    """Experts with SwiGLU behind a top-k router.

    y[t] = sum_k weight[t, k] * W2[e] (silu(gate) * up),   (gate, up) = W1[e] x[t],   e = expert k of t

    The router and the gate compute in fp32 (keep `router` and `bias` fp32), the experts in the dtype of x; their activation is recomputed
    in the backward pass instead of being saved in fp32. Sizes are static, and nothing waits for the device but the loop of
    `grouped_product`, which only fp32 products without a capacity need. Without a limit no assignment is dropped: the buffers then have
    T * K + (A - 1) * E rows rounded down to whole alignments, whatever the routing needs.

    Balance: with alpha, add `aux.loss` to the loss. With gamma, call `update_bias()` after the optimizer's step; the bias is a buffer
    that ranks experts, has no gradient, and is saved with the module.

    Args:
        hidden: H, a multiple of 64.
        intermediate: F, channels between the two matrices of an expert, a multiple of 8.
        num_experts: E, routed experts.
        num_topk: K, routed experts of a row.
        num_shared_experts: 0, 1 or 2 experts of every row with weight 1. They are slots K, K + 1 and experts E, E + 1 of w1 and w2.
        scoring_func: "sqrtsoftplus", "sigmoid" or "softmax".
        routed_scaling_factor: of the routed weights, whose sum is 1 without it.
        num_groups: groups of experts; equal to num_topk_groups or 0 for no limit.
        num_topk_groups: groups that a row's experts come from.
        alignment: A, rows of an expert's segment are a multiple of it. With a multiple of 128, and F of 64, the products of bf16 rows are
            `grouped_gemm`, the same to the bit in both frameworks and as fast as `grouped_mm` on Hopper. A smaller one, 16, means
            `grouped_mm`, which is what to take on newer GPUs.
        weights_in: where the weights multiply: "reduce", the results of experts, or "swiglu", their activation. Equal in exact arithmetic;
            the second needs no results of experts in the backward pass.
        alpha: of the load-balance loss, whose sequences are the first axis of a 3-D x.
        gamma: step of `update_bias`.
        num_expanded_tokens: rows of the buffers; assignments beyond are dropped and counted.
        expert_capacity: instead, rows of every expert, a multiple of A.
        seed: of the initial values.
        dtype: of w1 and w2.
        device: where the parameters are made.
    """

    bias: Tensor
    load: Tensor
    to_physical_map: Tensor | None
    logical_count: Tensor | None

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        num_topk: int,
        *,
        num_shared_experts: int = 0,
        scoring_func: str = "sqrtsoftplus",
        routed_scaling_factor: float = 1.0,
        num_groups: int = 0,
        num_topk_groups: int = 0,
        alignment: int = 128,
        weights_in: str = "reduce",
        alpha: float = 0.0,
        gamma: float = 0.0,
        num_expanded_tokens: int | None = None,
        expert_capacity: int | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_moe(hidden, hidden, weights_in)
        self.num_experts = num_experts
        self.num_topk = num_topk
        self.num_shared_experts = num_shared_experts
        self.scoring_func = scoring_func
        self.routed_scaling_factor = routed_scaling_factor
        self.num_groups = num_groups
        self.num_topk_groups = num_topk_groups
        self.alignment = alignment
        self.weights_in = weights_in
        self.alpha = alpha
        self.gamma = gamma
        self.num_expanded_tokens = num_expanded_tokens
        self.expert_capacity = expert_capacity
        values = moe_init(hidden, intermediate, num_experts, num_shared_experts, seed)
        self.router = nn.Parameter(torch.tensor(values["router"], device=device))
        self.w1 = nn.Parameter(torch.tensor(values["w1"], dtype=dtype, device=device))
        self.w2 = nn.Parameter(torch.tensor(values["w2"], dtype=dtype, device=device))
        self.register_buffer("bias", torch.tensor(values["bias"], device=device))
        # rows of every expert since the last `update_bias`
        self.register_buffer("load", torch.zeros(num_experts, dtype=torch.int32, device=device), persistent=False)
        maps = identity_map(num_experts, num_shared_experts) if num_groups != num_topk_groups and num_shared_experts else (None, None)
        for name, value in zip(("to_physical_map", "logical_count"), maps, strict=True):
            self.register_buffer(name, None if value is None else torch.tensor(value, device=device), persistent=False)

    def forward(self, x: Tensor, mask: Tensor | None = None, routing: Tensor | None = None) -> tuple[Tensor, MoEAux]:
        """The experts' results for every row, and what there is to know about the routing.

        Args:
            x: (..., H) bf16 or fp32.
            mask: (...) bool; rows with False take no part, their result is 0.
            routing: (T, K) int64, experts to use instead of the router's choice, as `aux.topk_idx` has them; -1 for an empty slot.

        Returns:
            y (..., H) in the dtype of x, and a `MoEAux`. In training, rows of every expert are also added to `load`.
        """
        check_moe(self.router.shape[0], x.shape[-1], self.weights_in)
        rows = x.reshape(-1, x.shape[-1])
        mask = None if mask is None else mask.reshape(-1)
        num_seqs = max(x.shape[0], 1) if x.dim() == 3 else 1
        with torch.autocast(x.device.type, enabled=False):
            logits = rows.float() @ self.router
            topk_idx, weights, routed, scores_sum = self._gate(logits, mask, routing, num_seqs)
            y, num_dropped = self._experts(rows, topk_idx, weights)
            counts = moe.group_count(routed, self.num_experts, num_seqs=num_seqs).view(num_seqs, self.num_experts)
            load = counts.sum(0, dtype=torch.int32)
            if self.training:
                self.load += load
            loss = logits.new_zeros(())
            if self.alpha:
                length = rows.shape[0] // num_seqs
                taking_part = length if mask is None else mask.view(num_seqs, length).sum(1)
                loss = moe.load_balance_loss(scores_sum, counts, taking_part, self.num_topk, self.alpha)
        return y.view(x.shape), MoEAux(loss, load, num_dropped, routed)

    def _gate(self, logits: Tensor, mask: Tensor | None, routing: Tensor | None, num_seqs: int) -> moe.GateOutput:
        options = {
            "num_topk": self.num_topk,
            "use_shared_as_routed": self.num_shared_experts > 0,
            "num_shared_experts": self.num_shared_experts,
            "routed_scaling_factor": self.routed_scaling_factor,
            "scoring_func": self.scoring_func,
            "ep_rank": 0,
            "bias": self.bias,
            "mask": mask,
            "num_seqs": num_seqs,
        }
        if routing is not None:
            options["fix_routing_mask"] = torch.ones_like(logits[:, 0], dtype=torch.bool)
            options["unmapped_topk_idx"] = routing.clone()
        if self.num_groups == self.num_topk_groups:
            return moe.moe_topk_gate(logits, **options)
        return moe.top2_sum_gate(
            logits, num_groups=self.num_groups, num_topk_groups=self.num_topk_groups, num_ep_ranks=1, tp_rank=0, num_tp_ranks=1,
            to_physical_map=self.to_physical_map, logical_count=self.logical_count, **options,
        )  # fmt: skip

    def _experts(self, rows: Tensor, topk_idx: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        mapping = moe.fused_mapping(
            topk_idx, num_experts=self.w1.shape[0], alignment=self.alignment,
            num_expanded_tokens=self.num_expanded_tokens, expert_capacity=self.expert_capacity,
        )  # fmt: skip
        expanded = moe.expand_to_fused(rows, mapping.token_topk_to_pos, mapping.pos_to_expert)
        hidden = self._product(expanded, self.w1, mapping)
        w_row = None
        if self.weights_in == "swiglu":
            w_row = moe.expand_topk_weights(weights, mapping.token_topk_to_pos, mapping.pos_to_token_topk)
        activation = checkpoint(swiglu, hidden, w_row, use_reentrant=False, preserve_rng_state=False)
        results = self._product(activation, self.w2, mapping)
        y = moe.reduce_fused(results, weights if self.weights_in == "reduce" else None, mapping.token_topk_to_pos)
        return y, mapping.num_dropped

    def _product(self, x: Tensor, w: Tensor, mapping: moe.FusedMapping) -> Tensor:
        """Rows of the buffer times the matrices of their experts."""
        w = w.to(x.dtype)
        if self.expert_capacity:
            return grouped_product(x, w, None)
        if gemm.takes(DTYPE_NAMES[x.dtype], x.shape[0], self.alignment, *w.shape[1:]):
            return moe.grouped_gemm(x, w, mapping.pos_to_expert, mapping.expert_start, mapping.expert_end)
        return grouped_product(x, w, mapping.expert_end)

    @torch.no_grad()
    def update_bias(self) -> None:
        """Add gamma * sign(mean load - load) to the bias, of the load since the last call, which is then cleared.

        Call it once a step, after the optimizer. Where ranks share the experts' balance, all-reduce `load` before it.
        """
        self.bias.copy_(moe.update_expert_bias(self.bias, self.load, self.gamma))
        self.load.zero_()

    def extra_repr(self) -> str:
        """The options."""
        hidden, experts, intermediate = self.router.shape[0], self.num_experts, self.w2.shape[1]
        text = f"hidden={hidden}, intermediate={intermediate}, num_experts={experts}, num_topk={self.num_topk}"
        names = ("num_shared_experts", "scoring_func", "num_groups", "num_topk_groups", "alignment", "weights_in", "alpha", "gamma")
        return text + "".join(f", {name}={getattr(self, name)}" for name in names)
