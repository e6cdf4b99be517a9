"""Benchmark rows of the MoE routing operations: every row that the peers have, and what they lack.

Each goes through the public function of the torch front end where there is one. The results of a timed call are compared with the oracle
first: mappings and counts in full, gates and moved rows by sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tk_core.bench import moe_calls as calls
from tk_core.bench.peers import Peers
from tk_core.bench.routing import FIXED


@dataclass
class Row:
    """One call of a function. `args` are those of the function of moe_calls that makes it, T tokens and H columns among them."""

    function: str
    make: Callable[..., calls.Call]
    args: dict[str, Any]
    timer: str = "event"
    peer: dict[str, Any] | None = None
    direction: str = "fwd"

    @property
    def variant(self) -> str:
        """What distinguishes the row beside its number of tokens."""
        sizes = [(k, v) for k, v in self.args.items() if k != "T" and v is not False]
        return " ".join(k if v is True else v if isinstance(v, str) else f"{k}={v}" for k, v in sizes)


# ------------------------------------------------------------------ the peers' rows


def _routed(a: dict[str, Any]) -> dict[str, Any]:
    return {"T": a["num_tokens"], "K": a["num_topk"], "E": a["num_experts"], "EP": a["num_ep_ranks"]}


def _gated(a: dict[str, Any]) -> dict[str, Any]:
    sizes = {"T": 36, "E": a["num_routed_experts"], "K": a["num_topk"], "G": a["num_groups"], "Gk": a["num_topk_groups"]}
    return {**sizes, "scoring": a["scoring_func"], "S": a["num_shared_experts"], "EP": 4, "masked": 4}


_PEERS: dict[str, tuple[Callable[..., calls.Call], Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "topk_gate": (calls.topk_gate, lambda a: {"T": a["num_tokens"], "E": a["num_experts"], "K": a["num_topk"]}),
    "topk_sum_and_topk_group_idx": (
        calls.topk_groups,
        lambda a: {"T": a["num_tokens"], "E": a["num_experts"], "G": a["num_groups"]} | _some(a, "num_topk_sum", "num_topk_groups"),
    ),
    "top2_sum_gate": (calls.top2_sum_gate, _gated),
    "normalize_weight": (calls.normalize_weight, lambda a: {"T": a["num_tokens"], "K": a["num_topk"]}),
    "group_count": (calls.group_count, _routed),
    "aux_fi": (calls.aux_fi, lambda a: _routed(a) | _some(a, "num_aux_topk")),
    "mask_indices_by_tp": (calls.mask_by_tp, lambda a: _routed(a) | {"TP": a["num_tp_ranks"], "tp_rank": a["tp_rank"]}),
    "inplace_unique_group_indices": (calls.unique_in_place, lambda a: _routed(a) | {"G": a["num_groups"]}),
    "get_fused_mapping": (calls.get_fused_mapping, lambda a: _routed(a) | {"A": a["alignment"]}),
    "expand_to_fused": (calls.expand, lambda a: _routed(a) | {"H": a["hidden"], "A": a["alignment"], "dtype": a["dtype"]}),
    "expand_to_fused_with_sf": (
        calls.expand_with_sf,
        lambda a: _routed(a) | {"H": a["hidden"], "A": a["alignment"], "block": a["num_per_channels"]},
    ),
    "reduce_fused": (
        calls.reduce,
        lambda a: _routed(a) | {"H": a["hidden"], "A": a["alignment"], "dtype": a["in_dtype"]} | _some(a, "with_sf") | {"long": True},
    ),
}


def _some(a: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: a[name] for name in names}


def rows(table: Peers) -> Iterator[Row]:
    """Every row of the peers' table that is a routing operation."""
    for peer in table.rows:
        if peer["op"] in _PEERS:
            make, sizes = _PEERS[peer["op"]]
            yield Row(peer["op"], make, sizes(peer["args"]), peer["timer"], peer)


# ------------------------------------------------------------------ our own rows


def own_rows() -> Iterator[Row]:
    """What the peers have no row for."""
    for T, E, K in ((8192, 256, 8), (512, 256, 8), (65536, 256, 8), (8192, 72, 6), (8192, 384, 8)):
        yield Row("moe_topk_gate", calls.moe_topk_gate, {"T": T, "E": E, "K": K})
    sizes = {"T": 8192, "E": 256, "K": 8}
    yield Row("moe_topk_gate", calls.moe_topk_gate, sizes | {"training": True})
    yield Row("moe_topk_gate_backward", calls.gate_backward, sizes, direction="bwd")
    yield Row("moe_topk_gate_backward", calls.gate_backward, sizes | {"sums": True}, direction="bwd")
    yield Row("top2_sum_gate", calls.top2_sum_gate, sizes | {"G": 8, "Gk": 4, "scoring": "sigmoid"})
    yield Row("normalize_weight", calls.normalize_weight, {"T": 8192, "K": 8})
    yield Row("topk_gate", calls.topk_gate, {"T": 65536, "E": 256, "K": 8})
    yield Row("topk_sum_and_topk_group_idx", calls.topk_groups, {"T": 8192, "E": 256, "G": 8, "num_topk_sum": 2, "num_topk_groups": 4})
    sizes = {"T": 8192, "K": 8, "E": 32, "EP": 8}
    yield Row("mask_indices_by_tp", calls.mask_by_tp, sizes | {"TP": 2, "tp_rank": 1})
    yield Row("inplace_unique_group_indices", calls.unique_in_place, sizes | {"G": 8})
    yield Row("group_count", calls.group_count, sizes)
    yield Row("aux_fi", calls.aux_fi, sizes | {"num_aux_topk": 8})
    yield Row("get_fused_mapping", calls.get_fused_mapping, sizes | {"A": 128})
    for fixed, H, A in FIXED:
        sizes = {"T": fixed.tokens * fixed.ranks, "K": fixed.topk, "E": fixed.local_experts, "EP": fixed.ranks}
        moved = sizes | {"H": H, "A": A, "fixed": True}
        yield Row("fused_mapping", calls.fused_mapping, sizes | {"A": A})
        yield Row("fused_mapping", calls.fused_mapping, sizes | {"A": A, "dropless": True})
        yield Row("expand_to_fused", calls.expand, moved | {"dtype": "bf16"})
        yield Row("expand_to_fused", calls.expand_backward, moved | {"dtype": "bf16"}, direction="bwd")
        yield Row("expand_to_fused_with_sf", calls.expand_with_sf, moved | {"block": 128})
        yield Row("reduce_fused", calls.reduce, moved | {"dtype": "bf16"})
        yield Row("reduce_fused_backward", calls.reduce_backward, moved | {"dtype": "bf16"}, direction="bwd")
        yield Row("reduce_fused_backward", calls.reduce_backward, moved | {"dtype": "bf16", "rows_only": True}, direction="bwd")
        for result in ("out", "d_x", "d_w"):
            sizes = moved | {"F": 1024, "result": result}
            yield Row("grouped_gemm", calls.grouped_gemm, sizes, direction="fwd" if result == "out" else "bwd")
    yield Row("routing_chain", calls.routing_chain, {"T": 8192, "K": 6, "E": 64, "H": 4096, "A": 128})


def all_rows(table: Peers, names: list[str], row_counts: list[int] | None, hidden: list[int] | None) -> Iterator[Row]:
    """The rows of some functions (default: all): those of the peers' table and our own, or our own at other sizes."""
    found = [*rows(table), *own_rows()]
    if row_counts or hidden:
        found = []
        for row in own_rows():
            for T in row_counts or [row.args["T"]]:
                for H in (hidden or [row.args["H"]]) if "H" in row.args else [None]:
                    other = Row(row.function, row.make, row.args | {"T": T} | ({} if H is None else {"H": H}), direction=row.direction)
                    if other not in found:
                        found.append(other)
    return (row for row in found if not names or row.function in names or "moe" in names)
