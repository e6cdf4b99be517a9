"""What the public routing functions of both front ends judge before an operation does."""

from typing import Any

from tk_core.errors import value_error


def rank(op: str, argument: str, array: Any, axes: str) -> None:
    """An array has as many axes as the text has names; what is no array is judged later."""
    got = getattr(array, "shape", None)
    if got is not None and len(got) != axes.count(",") + 1:
        raise value_error(op, argument, f"shape ({axes})", tuple(got))
