"""The operations written in eager torch, as somebody without this library would: what the CPU benchmark compares with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def expand_to_mhc(hidden: Tensor, mhc_mult: int) -> Tensor:
    """Copies of the hidden states, one a stream."""
    return hidden.unsqueeze(-2).expand(*hidden.shape[:-1], mhc_mult, hidden.shape[-1]).contiguous()


def mhc_pre_norm_fn(residual: Tensor, mhc_fn: Tensor, mhc_norm_weight: Tensor | None, mhc_norm_eps: float, **_: Any) -> Tensor:
    """RMSNorm of the flattened residual, projected."""
    x = residual.flatten(-2).float()
    weight = mhc_fn if mhc_norm_weight is None else mhc_fn * mhc_norm_weight
    return (x @ weight.T) * torch.rsqrt(x.square().mean(-1, keepdim=True) + mhc_norm_eps)


def mhc_pre_split_mixes(
    input_mixes: Tensor, mhc_scale: Tensor, mhc_base: Tensor, mhc_mult: int, mhc_post_mult_value: float, mhc_pre_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Affine map and activations of the three parts."""
    n = mhc_mult
    scale = torch.repeat_interleave(mhc_scale, torch.tensor([n, n, n * n], device=mhc_scale.device))
    z = input_mixes * scale + mhc_base
    pre = torch.sigmoid(z[..., :n]) + mhc_pre_eps
    post = torch.sigmoid(z[..., n : 2 * n]) * mhc_post_mult_value
    return pre.unsqueeze(-1), post.unsqueeze(-1), z[..., 2 * n :].unflatten(-1, (n, n))


def sinkhorn_normalize(x: Tensor, repeat: int = 10, eps: float = 1e-6) -> Tensor:
    """Alternating row and column normalization."""
    y = x.softmax(-1) + eps
    y = y / (y.sum(-2, keepdim=True) + eps)
    for _ in range(repeat - 1):
        y = y / (y.sum(-1, keepdim=True) + eps)
        y = y / (y.sum(-2, keepdim=True) + eps)
    return y


def mhc_pre_apply_mix(x: Tensor, mix: Tensor) -> Tensor:
    """Weighted sum of the streams."""
    return (x.float() * mix).sum(-2).to(x.dtype)


def mhc_post(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor) -> Tensor:
    """The next residual."""
    mixed = torch.einsum("...io,...id->...od", comb_res_mix, residual.float())
    return (post_layer_mix * x.float().unsqueeze(-2) + mixed).to(residual.dtype)


def mhc_head_compute_mix(input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor, mhc_pre_eps: float) -> Tensor:
    """Sigmoid of an affine map."""
    return torch.sigmoid(input_mix * mhc_scale + mhc_base) + mhc_pre_eps
