"""Calls of the MoE routing operations at real sizes: what is compiled ahead of time and checked for spills."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tk_core import registry
from tk_core.bench.bound import Bound, bound
from tk_core.op import Type

F32, I32, BOOL = "float32", "int32", "bool"
T = 8192
# (experts, slots)
SIZES = ((72, 6), (256, 8), (384, 8))


def _t(*shape: int, dtype: str = F32) -> Type:
    return shape, dtype, ""


def _both(name: str, types: list[Type | None], attrs: dict[str, Any], cotangents: dict[str, Type | None] | None = None) -> Iterator[Bound]:
    """The forward rule, and the backward rule for these cotangents."""
    op = registry.get(name)
    forward = bound(op, op.forward, types, attrs, op.forward.outs)
    yield forward
    if op.backward is None:
        return
    known = {**dict(zip(op.forward.ins, types, strict=False)), **{n: (*op.forward.type_of(n, forward.env), "") for n in op.forward.outs}}
    given = cotangents if cotangents is not None else {f"d_{n}": known[n] for n in op.cotangents}
    args = [given.get(n) if n.startswith("d_") else known.get(n) for n in op.backward.ins]
    wanted = [n for n in op.backward.outs if known.get(n.removeprefix("d_")) is not None]
    yield bound(op, op.backward, args, attrs, wanted)


def gates() -> Iterator[Bound]:
    """Selection and gates, as both front ends call them: indices are int64 in torch and int32 in JAX."""
    for (E, K), idx in zip(SIZES, ("int64", "int64", "int32"), strict=True):
        yield from _both("topk_gate", [_t(T, E)], {"num_topk": K, "idx": idx})
        yield from _both("normalize_weight", [_t(T, K)], {})
        for scoring in ("sqrtsoftplus", "sigmoid", "softmax"):
            attrs = {"num_topk": K, "scoring_func": scoring, "idx": idx}
            yield from _both("moe_topk_gate", [_t(T, E), _t(E)], attrs, {"d_topk_weights": _t(T, K)})
            masked = [_t(T, E), _t(E), None, None, _t(T, dtype=BOOL)]
            yield from _both("moe_topk_gate", masked, {**attrs, "num_seqs": 4})
    yield from _both("topk_sum_and_topk_group_idx", [_t(T, 8, 32)], {"num_topk_sum": 2, "num_topk_groups": 4})
    grouped = {"num_topk": 8, "num_groups": 8, "num_topk_groups": 4, "scoring_func": "sigmoid"}
    yield from _both("top2_sum_gate", [_t(T, 256), _t(256)], grouped, {"d_topk_weights": _t(T, 8)})
    yield from _both("scores_sum", [_t(T, 256), _t(T, dtype=BOOL)], {"num_seqs": 4})
    yield from _both("load_balance_loss", [_t(4, 256), _t(4, 256, dtype=I32)], {})
    yield from _both("load_balance_loss", [_t(4, 256), _t(4, 256, dtype=I32), _t(4, dtype=I32)], {})
    backward = [_t(T, 256), _t(T, 8, dtype="int64"), _t(T, 8), _t(T, 8)]
    yield from _both("moe_topk_gate_backward", backward, {})


def counts() -> Iterator[Bound]:
    """Counting, masks and the mapping of 32 local experts."""
    for idx in ("int64", "int32"):
        chosen = _t(T, 8, dtype=idx)
        yield from _both("group_count", [chosen], {"num_groups": 256})
        yield from _both("aux_fi", [chosen], {"num_experts": 256, "num_aux_topk": 8})
        yield from _both("mask_indices_by_tp", [chosen], {"n": 256, "num_ep_ranks": 8, "num_tp_ranks": 2})
        for name in ("unique_group_indices", "inplace_unique_group_indices"):
            yield from _both(name, [chosen], {"num_groups": 8})
        for name in ("get_fused_mapping", "fused_mapping"):
            yield from _both(name, [chosen], {"num_experts": 32, "alignment": 128, "num_expanded_tokens": 4 * T})
        yield from _both("psum_num_tokens_per_expert", [chosen, _t(32, dtype=I32)], {})


def moves(H: int) -> Iterator[Bound]:
    """Rows to experts and back."""
    bf16, e4m3, N, K = "bfloat16", "float8_e4m3fn", 4 * T, 8
    slots, places = _t(T, K, dtype=I32), _t(N, dtype=I32)
    op = registry.get("expand_to_fused")
    yield bound(op, op.forward, [_t(T, H, dtype=bf16), slots, places], {}, op.forward.outs)
    yield bound(op, op.backward, [_t(N, H, dtype=bf16), slots], {}, op.backward.outs)
    yield from _both("expand_to_fused_with_sf", [_t(T, H, dtype=e4m3), _t(T, H // 128), slots, places], {})
    yield from _both("expand_topk_weights", [_t(T, K), slots, places], {})
    op = registry.get("reduce_fused")
    for weights in (None, _t(T, K)):
        yield bound(op, op.forward, [_t(N, H, dtype=bf16), weights, slots], {}, op.forward.outs)
    args = [_t(T, H, dtype=bf16), _t(N, H, dtype=bf16), _t(T, K), slots, places]
    yield from _both("reduce_fused_backward", args, {})
    E = 32
    for C, F in ((H, 2048), (1024, H)):
        matrices, bounds = _t(E, C, F, dtype=bf16), [_t(E, dtype=I32)] * 2
        yield from _both("grouped_gemm", [_t(N, C, dtype=bf16), matrices, places, *bounds], {})


def calls(H: int) -> Iterator[Bound]:
    """Every call for one hidden size."""
    yield from gates()
    yield from counts()
    yield from moves(H)
