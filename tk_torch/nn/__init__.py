"""Modules over the operations."""

from tk_torch.nn.hyper_connection import HyperConnection, HyperHead

__all__ = ["HyperConnection", "HyperHead"]
