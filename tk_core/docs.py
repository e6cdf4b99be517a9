"""One docstring an operation: it lies in the declaration, and every front end's function carries it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tk_core.op import Op

F = TypeVar("F", bound=Callable)


def documented(op: Op, note: str = "") -> Callable[[F], F]:
    """Give a public function the docstring of its operation, followed by what is particular to the front end."""

    def decorate(function: F) -> F:
        function.__doc__ = op.doc if not note else f"{op.doc.rstrip()}\n\n    {note}\n"
        return function

    return decorate


def with_doc(text: str, note: str = "") -> Callable[[F], F]:
    """Give a public function a docstring, followed by what is particular to the front end."""

    def decorate(function: F) -> F:
        function.__doc__ = text if not note else f"{text.rstrip()}\n\nNote:\n    {note}\n"
        return function

    return decorate
