"""NumPy oracles in float64, shared by every test and by the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Oracle(NamedTuple):
    """forward(arrays, attrs) gives the public results; backward(arrays, cotangents, attrs) a gradient an argument.

    An absent argument is None and has the gradient None; an absent cotangent is None and counts as zero.
    """

    forward: Callable[[Sequence[Any], Mapping[str, Any]], tuple[Any, ...]]
    backward: Callable[[Sequence[Any], Sequence[Any], Mapping[str, Any]], tuple[Any, ...]]


def oracles() -> dict[str, Oracle]:
    """The oracle of every operation by name."""
    from tk_core.reference import mhc

    return dict(mhc.ORACLES)
