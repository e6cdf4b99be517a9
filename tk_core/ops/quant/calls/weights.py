"""Scales of weights for the rows of a product and of its transpose: `batched_transpose_weight_sf`."""

from collections.abc import Sequence
from typing import Any

from tk_core.errors import type_error, value_error
from tk_core.ops.quant import weight_sf
from tk_core.ops.quant.calls import docs
from tk_core.ops.quant.calls.common import F32, Data, one_of

NAME = "batched_transpose_weight_sf"
INEXACT = "powers of two"


def sequence(argument: str, value: Any) -> Sequence[Any]:
    """A list or a tuple."""
    if not isinstance(value, list | tuple):
        raise type_error(NAME, argument, "a list or a tuple", type(value).__name__)
    return value


def same_length(argument: str, value: Sequence[Any], count: int) -> None:
    """One entry a weight."""
    if len(value) != count:
        raise value_error(NAME, argument, f"{count} entries, one a weight", len(value))


def judge(weights: Sequence[Data], block_size: Any) -> None:
    """Scales of square blocks, of one weight or of several of the same size."""
    one_of(NAME, "block_size", block_size, (32, 128))
    for i, sf in enumerate(weights):
        if sf.dtype != F32:
            raise type_error(NAME, f"sf[{i}]", f"dtype {F32}", sf.dtype)
        if len(sf.shape) not in (2, 3) or (len(sf.shape) == 3 and sf.shape[0] < 1):
            raise value_error(NAME, f"sf[{i}]", "shape (Ns, Ks) or (B, Ns, Ks), B > 0", tuple(sf.shape))
        for size in sf.shape[-2:]:
            if size < 1 or size * block_size % 128:
                raise value_error(
                    NAME, f"sf[{i}]", f"a weight of multiples of 128, that is scales of multiples of {128 // block_size}", tuple(sf.shape)
                )


def launches(count: int) -> list[tuple[int, Any]]:
    """(first weight, operation) of every launch."""
    found, first = [], 0
    for size in weight_sf.launches(count):
        found.append((first, weight_sf.weight_sf_op(size)))
        first += size
    return found


def operations() -> list[Any]:
    """Every operation that `launches` may name."""
    return [
        weight_sf.weight_sf_op(size) for size in sorted({n for count in range(1, weight_sf.MOST + 1) for n in weight_sf.launches(count)})
    ]


DOC = docs.doc(
    "Packed scales of every row of weights, and of every row of the transposed weights, from scales of square blocks.",
    """sf: a list of fp32 powers of two, (Ns, Ks) or (B, Ns, Ks), the scales of weights (n, k) = (Ns, Ks) * block_size, multiples of 128.
    block_size: 32 or 128.
    transpose_sf1s: in PyTorch, a bool a weight: whether sf1 is the storage (ceil(Ns / 4), k) instead of its transposed view.
    outs: in PyTorch, an entry a weight: None, or an earlier (sf0, sf1) to overwrite.
    check: in PyTorch, raise ValueError where a scale is no power of two (it synchronizes); otherwise only exponents are used.""",
    """a list of (sf0, sf1), int32 of four exponents: sf0 (n, ceil(Ks / 4)) with strides (1, n), sf1 (k, ceil(Ns / 4)) with strides (1, k);
    a leading B where sf has it. In JAX in storage orientation: (ceil(Ks / 4), n) and (ceil(Ns / 4), k).""",
    numerics="exact.",
)
