"""Modules over the operations."""

from tk_core.layers import MoEAux
from tk_torch.nn.hyper_connection import HyperConnection, HyperHead
from tk_torch.nn.moe import MoE, grouped_product

__all__ = ["HyperConnection", "HyperHead", "MoE", "MoEAux", "grouped_product"]
