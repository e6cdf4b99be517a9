"""The texts of argument errors: operation, argument, expectation, value. One place, so that every front end says the same."""

from __future__ import annotations

from typing import Any


def type_error(op: str, argument: str, expected: str, got: Any) -> TypeError:
    """A dtype or a kind of object that the operation does not take."""
    return TypeError(f"{op}: {argument}: expected {expected}, got {got}")


def value_error(op: str, argument: str, expected: str, got: Any) -> ValueError:
    """A shape, stride, device or range that the operation does not take."""
    return ValueError(f"{op}: {argument}: expected {expected}, got {got}")


class CacheError(RuntimeError):
    """The kernel cache cannot be trusted or used."""


class CompileError(RuntimeError):
    """A kernel does not compile, or nothing is there to compile it with."""
