"""mHC as modules: a sub-layer wrapped in a manifold-constrained hyper-connection, and the mix before the head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tk_core.layers import hyper_connection_init, hyper_head_init
from tk_torch import mhc


def _parameters(module: nn.Module, values: dict, device: torch.device | str | None, use_norm_weight: bool) -> None:
    for name, value in values.items():
        used = name != "norm_weight" or use_norm_weight
        module.register_parameter(name, nn.Parameter(torch.tensor(value, device=device)) if used else None)


class HyperConnection(nn.Module):
    """One sub-layer on n residual streams: residual -> post(sublayer(pre(residual)), residual).

    The parameters are fp32 whatever the model's dtype is; the residual is bf16. Defaults are the paper's (multiplier 2,
    20 Sinkhorn iterations), unlike those of `mhc_pre`.

    Args:
        hidden: H, a multiple of 128.
        streams: n.
        post_mult_value: multiplier of the post mix.
        sinkhorn_repeat: Sinkhorn iterations.
        norm_eps: epsilon of the RMSNorm of the flattened residual.
        pre_eps: added to the pre mix.
        sinkhorn_eps: epsilon of every Sinkhorn division.
        norm_weight: whether the RMSNorm has a weight.
        precision: of the projection, "bf16x2" or "tf32".
        seed: of the initial projection.
        device: where the parameters are made.
    """

    def __init__(
        self,
        hidden: int,
        streams: int = 4,
        *,
        post_mult_value: float = 2.0,
        sinkhorn_repeat: int = 20,
        norm_eps: float = 1e-6,
        pre_eps: float = 1e-6,
        sinkhorn_eps: float = 1e-6,
        norm_weight: bool = True,
        precision: str = "bf16x2",
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.options = {
            "mhc_mult": streams,
            "post_mult_value": post_mult_value,
            "sinkhorn_repeat": sinkhorn_repeat,
            "norm_eps": norm_eps,
            "pre_eps": pre_eps,
            "sinkhorn_eps": sinkhorn_eps,
            "precision": precision,
        }
        _parameters(self, hyper_connection_init(streams, hidden, seed), device, norm_weight)

    def pre(self, residual: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The sub-layer's input (..., H), and the mixes that `mhc_post` takes."""
        return mhc.mhc_pre(residual, self.fn, self.scale, self.base, norm_weight=self.norm_weight, **self.options)

    def forward(self, residual: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """The next residual (..., n, H) after a sub-layer that maps (..., H) to (..., H)."""
        layer_input, mixes = self.pre(residual)
        return mhc.mhc_post(sublayer(layer_input), residual, *mixes)

    def extra_repr(self) -> str:
        """The options."""
        return ", ".join(f"{k}={v}" for k, v in self.options.items())


class HyperHead(nn.Module):
    """The mix of the residual streams that the language model's head reads.

    Args:
        hidden: H, a multiple of 128.
        streams: n.
        norm_eps: epsilon of the RMSNorm of the flattened residual.
        pre_eps: added to the mix.
        norm_weight: whether the RMSNorm has a weight.
        precision: of the projection, "bf16x2" or "tf32".
        seed: of the initial projection.
        device: where the parameters are made.
    """

    def __init__(
        self,
        hidden: int,
        streams: int = 4,
        *,
        norm_eps: float = 1e-6,
        pre_eps: float = 1e-6,
        norm_weight: bool = True,
        precision: str = "bf16x2",
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.options = {"mhc_mult": streams, "norm_eps": norm_eps, "pre_eps": pre_eps, "precision": precision}
        _parameters(self, hyper_head_init(streams, hidden, seed), device, norm_weight)

    def forward(self, residual: Tensor) -> Tensor:
        """(..., n, H) -> (..., H)."""
        return mhc.mhc_head(residual, self.fn, self.scale, self.base, norm_weight=self.norm_weight, **self.options)
