"""Kernels that may use local memory, each with the reason. Continuous integration fails on any other that does."""

ALLOWED: dict[str, str] = {}
