"""NumPy oracles in float64, shared by every test and by the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tk_core.reference import mhc, mhc_norm_fn

Attrs = Mapping[str, Any]


class Oracle(NamedTuple):
    """forward(arrays, attrs) gives the public results; backward(arrays, cotangents, attrs) a gradient an argument.

    An absent argument is None and has the gradient None; an absent cotangent is None and counts as zero.
    """

    forward: Callable[[Sequence[Any], Attrs], tuple[Any, ...]]
    backward: Callable[[Sequence[Any], Sequence[Any], Attrs], tuple[Any, ...]]


def _wide(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """The function on float64 copies of its arrays, its result as a tuple."""

    def widened(*groups: Any) -> tuple[Any, ...]:
        *arrays, attrs = groups
        wide = [[None if a is None else np.asarray(a).astype(np.float64) for a in group] for group in arrays]
        result = function(*wide, attrs)
        return result if isinstance(result, tuple) else (result,)

    return widened


def _split_attrs(attrs: Attrs) -> tuple[int, float]:
    return attrs["mhc_mult"], attrs["mhc_post_mult_value"]


def _precision(attrs: Attrs) -> str:
    return "tf32" if attrs.get("precision") == "tf32" else ""


_ORACLES = {
    "expand_to_mhc": (
        lambda a, k: mhc.expand(*a, k["mhc_mult"]),
        lambda a, g, k: mhc.expand_bwd(*g),
    ),
    "mhc_pre_norm_fn": (
        lambda a, k: mhc_norm_fn.forward(*a, k["mhc_norm_eps"], _precision(k))[:1],
        lambda a, g, k: mhc_norm_fn.backward(*g, *a, k["mhc_norm_eps"], _precision(k)),
    ),
    "mhc_pre_split_mixes": (
        lambda a, k: mhc.split_mixes(*a, *_split_attrs(k), k["mhc_pre_eps"]),
        lambda a, g, k: mhc.split_mixes_bwd(*g, *a, *_split_attrs(k)),
    ),
    "sinkhorn_normalize": (
        lambda a, k: mhc.sinkhorn(*a, k["repeat"], k["eps"]),
        lambda a, g, k: mhc.sinkhorn_bwd(*g, *a, k["repeat"], k["eps"]),
    ),
    "mhc_pre_apply_mix": (
        lambda a, k: mhc.apply_mix(*a),
        lambda a, g, k: mhc.apply_mix_bwd(*g, *a),
    ),
    "mhc_post": (
        lambda a, k: mhc.post(*a),
        lambda a, g, k: mhc.post_bwd(*g, *a),
    ),
    "mhc_head_compute_mix": (
        lambda a, k: mhc.head_mix(*a, k["mhc_pre_eps"]),
        lambda a, g, k: mhc.head_mix_bwd(*g, *a),
    ),
}


def oracles() -> dict[str, Oracle]:
    """The oracle of every operation by name."""
    return {name: Oracle(_wide(forward), _wide(backward)) for name, (forward, backward) in _ORACLES.items()}
