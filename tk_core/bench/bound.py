"""A rule bound to the types of a call, without arrays: from which the kernels that the call needs can be told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tk_core.op import Env, Op, Rule, Type


class Bound(NamedTuple):
    """What a call of one direction of an operation is: sizes by name, wanted results, and the arguments that are there."""

    op: Op
    rule: Rule
    env: Env
    wanted: frozenset[str]
    present: frozenset[str]


def bound(op: Op, rule: Rule, types: Sequence[Type | None], attrs: Mapping[str, Any], wanted: Iterable[str]) -> Bound:
    """Bind a rule; trailing arguments that are absent may be left out."""
    full = [*types, *[None] * (len(rule.ins) - len(types))]
    env = rule.bind(full, dict(zip(rule.attrs, rule.attributes(attrs), strict=True)))
    present = frozenset(name for name, t in zip(rule.ins, full, strict=True) if t is not None)
    return Bound(op, rule, env, frozenset(wanted), present)
