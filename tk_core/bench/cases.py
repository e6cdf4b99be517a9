"""One list of named real shapes and inputs for every operation: tests and benchmarks draw from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tk_core.dtypes import numpy_dtype
from tk_core.op import Rule, evaluate


@dataclass(frozen=True)
class Case:
    """How to make inputs of an operation, and the bytes that it must at least move.

    `scales` are standard deviations by argument (1 otherwise), `sizes` are dimensions that H and n do not give, and the
    byte counts are expressions of T (rows), n, H and the sizes; `accumulating` is for a backward that adds to a buffer.
    """

    op: str
    attrs: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)
    forward_bytes: str = "0"
    backward_bytes: str = "0"
    accumulating_bytes: str = ""
    absent: tuple[str, ...] = ()
    # squared relative error that fp32 results may have against the oracle
    limit: float = 1e-9
    alternatives: tuple[Mapping[str, Any], ...] = ()

    def variants(self) -> list[Case]:
        """The case itself, and the same with other attributes or absent arguments."""
        others = [
            replace(self, **{k: v for k, v in other.items() if k != "attrs"}, attrs={**self.attrs, **other.get("attrs", {})})
            for other in self.alternatives
        ]
        return [self, *others]

    def env(self, hidden: int, streams: int = 4) -> dict[str, Any]:
        """Sizes and attributes by name."""
        env: dict[str, Any] = {"H": hidden, "n": streams, **self.attrs}
        for name, expression in self.sizes.items():
            env[name] = evaluate(expression, env)
        return env

    def count(self, expression: str, rows: int, hidden: int, streams: int = 4) -> int:
        """Bytes of one of the expressions."""
        return int(evaluate(expression, {**self.env(hidden, streams), "T": rows}))


_PRE = {"M": "n * (n + 2)"}
_PARTS = {"J": "n * (n + 2)", "K": "n * H", "G": "1", "S": "2", "T": "3"}
CASES: dict[str, Case] = {
    case.op: case
    for case in (
        Case("expand_to_mhc", {"mhc_mult": 4}, forward_bytes="2*T*H*(1+n)", backward_bytes="2*T*H*(1+n)"),
        Case(
            "mhc_pre_norm_fn",
            {"mhc_norm_eps": 1e-6},
            {"J": "n * (n + 2)", "K": "n * H"},
            {"mhc_fn": 1e-2},
            "2*T*n*H + 4*J*n*H + T*(8*J+4)",
            "4*T*n*H + 8*J*n*H",
            "6*T*n*H + 8*J*n*H",
            absent=("mhc_norm_weight",),
            alternatives=({"absent": ()}, {"attrs": {"precision": "tf32"}, "limit": 1e-6}),
        ),
        Case(
            "mhc_pre_split_mixes",
            {"mhc_mult": 4, "mhc_post_mult_value": 2.0, "mhc_pre_eps": 1e-2},
            _PRE,
            forward_bytes="8*M*T",
            backward_bytes="4*T*(3*M)",
        ),
        Case(
            "sinkhorn_normalize",
            {"repeat": 20, "eps": 1e-6},
            forward_bytes="8*n*n*T",
            backward_bytes="12*n*n*T",
            alternatives=({"attrs": {"repeat": 10}},),
        ),
        Case(
            "mhc_pre_apply_mix",
            forward_bytes="T*(2*n*H + 2*H + 4*n)",
            backward_bytes="T*(2*H + 4*n*H + 8*n)",
            accumulating_bytes="T*(2*H + 6*n*H + 8*n)",
        ),
        Case("mhc_post", forward_bytes="T*((2*n+1)*2*H + 4*n + 4*n*n)", backward_bytes="T*((3*n+2)*2*H + 8*(n+n*n))"),
        Case("mhc_head_compute_mix", {"mhc_pre_eps": 1e-2}, forward_bytes="8*n*T", backward_bytes="12*n*T"),
        Case("mhc_fn_normw_merge_fwd", sizes=_PARTS),
        Case("mhc_fn_normw_merge_bwd", sizes=_PARTS),
        Case("mhc_prenorm_gemm_fwd", {"n_splits": 2}, sizes=_PARTS),
        Case("mhc_prenorm_gemm_bwd", sizes=_PARTS),
        Case("mhc_reduce_partials_and_rmsnorm_fwd", {"rms_group_size": 1024}, sizes=_PARTS),
        Case("mhc_reduce_partials_and_rmsnorm_bwd", {"rms_group_size": 1024}, sizes=_PARTS),
    )
}


def arrays(rule: Rule, env: Mapping[str, Any], lead: Sequence[int], seed: int = 0, scales: Mapping[str, float] | None = None) -> list[Any]:
    """Normal random inputs of a rule as NumPy arrays, one generator an argument."""
    made = []
    for i, arg in enumerate(rule.ins.values()):
        shape = (*(lead if arg.rows else ()), *(evaluate(d, env) for d in arg.inner))
        values = np.random.default_rng([seed, i]).standard_normal(shape, dtype=np.float32)
        made.append((values * (scales or {}).get(arg.name, 1.0)).astype(numpy_dtype(arg.dtype)))
    return made


def inputs(case: Case, rule: Rule, lead: Sequence[int], hidden: int, streams: int = 4, seed: int = 0) -> list[Any]:
    """Inputs of a case; absent arguments are None."""
    made = arrays(rule, case.env(hidden, streams), lead, seed, case.scales)
    return [None if arg.name in case.absent else a for arg, a in zip(rule.ins.values(), made, strict=True)]
