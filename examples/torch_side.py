"""The demo in PyTorch: mHC, experts and FP8 rounding from tk_torch, everything else from torch."""

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from model import Config, Step
from torch import Tensor

from tk_torch import mhc, nn, quant


class Model(torch.nn.Module):
    """Parameters by the names of `initial_weights`, with dots as underscores; experts are modules, one a layer."""

    def __init__(self, config: Config, weights: dict[str, np.ndarray], device: str):
        super().__init__()
        self.config = config
        for name, value in weights.items():
            if ".moe." not in name:
                self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(torch.tensor(value, device=device)))
        self.experts = torch.nn.ModuleDict()
        for layer in range(config.layers if config.moe else 0):
            prefix = f"layer{layer}.ffn.moe."
            state = {name.removeprefix(prefix): torch.tensor(value) for name, value in weights.items() if name.startswith(prefix)}
            moe = nn.MoE(
                config.hidden, config.intermediate, config.experts, config.topk, alpha=config.alpha, gamma=config.gamma, device=device
            )
            moe.load_state_dict(state)
            self.experts[f"layer{layer}_ffn"] = moe

    def part(self, prefix: str, name: str) -> Tensor:
        return getattr(self, f"{prefix}.{name}".replace(".", "_"))

    def connect(self, prefix: str, residual: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """residual -> post(sublayer(pre(residual)), residual)."""
        fn, scale, base, weight = (self.part(f"{prefix}.mhc", name) for name in ("fn", "scale", "base", "norm_weight"))
        layer_input, mixes = mhc.mhc_pre(
            residual, fn, scale, base, norm_weight=weight, mhc_mult=self.config.streams,
            post_mult_value=2.0, sinkhorn_repeat=self.config.sinkhorn,
        )  # fmt: skip
        return mhc.mhc_post(sublayer(layer_input), residual, *mixes)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x @ weight; the gradient goes straight through the rounding of x."""
        return (quant.fake_quant(x, "e4m3", 128) if self.config.fp8 else x) @ weight

    def attention(self, prefix: str, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        x = F.rms_norm(x.float(), (hidden,), self.part(prefix, "norm"), 1e-6)
        q, k, v = self.product(x, self.part(prefix, "qkv")).view(batch, length, 3, self.config.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * (hidden // self.config.heads) ** -0.5
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1), -1e9)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, hidden)
        return self.product(mixed, self.part(prefix, "out")).bfloat16()

    def ffn(self, prefix: str, x: Tensor) -> Tensor:
        x = F.rms_norm(x.float(), x.shape[-1:], self.part(prefix, "norm"), 1e-6)
        return self.product(F.silu(self.product(x, self.part(prefix, "up"))), self.part(prefix, "down")).bfloat16()

    def moe(self, prefix: str, x: Tensor) -> Tensor:
        x = F.rms_norm(x.float(), x.shape[-1:], self.part(prefix, "norm"), 1e-6)
        y, aux = self.experts[prefix.replace(".", "_")](x)
        self.aux.append(aux)
        return y.bfloat16()

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of the next byte; what the experts' routing was is left in `aux`."""
        config, inputs = self.config, tokens[:, :-1]
        self.aux = []
        parts = {"attention": self.attention, "ffn": self.moe if config.moe else self.ffn}
        x = (self.embedding[inputs] + self.positions).bfloat16()
        residual = mhc.expand_from_embedding(x, config.streams)
        for layer in range(config.layers):
            for part, function in parts.items():
                prefix = f"layer{layer}.{part}"
                residual = self.connect(prefix, residual, lambda h, p=prefix, f=function: f(p, h))
        fn, scale, base, weight = (self.part("head.mhc", name) for name in ("fn", "scale", "base", "norm_weight"))
        x = mhc.mhc_head(residual, fn, scale, base, norm_weight=weight, mhc_mult=config.streams)
        x = F.rms_norm(x.float(), x.shape[-1:], self.head_norm, 1e-6)
        return F.cross_entropy((x @ self.head_out).flatten(0, 1), tokens[:, 1:].flatten())


def train(config: Config, weights: dict[str, np.ndarray], data: np.ndarray, rates: np.ndarray, device: str) -> Iterator[Step]:
    """Yields the loss, the time and the experts' load of every step."""
    model = Model(config, weights, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.99), eps=1e-8)
    for tokens, rate in zip(data, rates, strict=True):
        start = time.perf_counter()
        optimizer.param_groups[0]["lr"] = float(rate)
        loss = model(torch.tensor(tokens, dtype=torch.long, device=device))
        optimizer.zero_grad()
        (loss + sum(aux.loss for aux in model.aux)).backward()
        optimizer.step()
        for moe in model.experts.values():
            moe.update_bias()
        load = np.stack([aux.load.cpu().numpy() for aux in model.aux]) if config.moe else None
        yield Step(loss.item(), time.perf_counter() - start, load)
