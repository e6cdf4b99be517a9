"""What the public routing functions of both front ends judge before an operation does."""

from enum import IntEnum
from typing import Any

from tk_core.errors import type_error, value_error


class ScoringFunc(IntEnum):
    """How a gate makes scores of logits. `IDENTITY` is a name only: gates refuse it."""

    SIGMOID = 0
    SQRTSOFTPLUS = 1
    SOFTMAX = 2
    IDENTITY = 3

    def __str__(self) -> str:
        return self.name.lower()

    @classmethod
    def from_str(cls, label: str) -> "ScoringFunc":
        """The function of that name in any case.

        Args:
            label: "sigmoid", "sqrtsoftplus", "softmax" or "identity".

        Returns:
            The member.

        Raises:
            TypeError: label is no str.
            ValueError: there is no such function.
        """
        if not isinstance(label, str):
            raise type_error("ScoringFunc", "label", "a str", f"{label!r} of type {type(label).__name__}")
        if label.upper() not in cls.__members__:
            raise value_error("ScoringFunc", "label", " or ".join(repr(str(member)) for member in cls), repr(label))
        return cls[label.upper()]


def rank(op: str, argument: str, array: Any, axes: str) -> None:
    """An array has as many axes as the text has names; what is no array is judged later."""
    got = getattr(array, "shape", None)
    if got is not None and len(got) != axes.count(",") + 1:
        raise value_error(op, argument, f"shape ({axes})", tuple(got))
