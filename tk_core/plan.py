"""A plan: one rule bound to the types of one call. Shapes, workspaces, kernels and their argument slots, ready to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from tk_core import kernels
from tk_core.op import Env, Launch, Rule, Type, evaluate


class Step(NamedTuple):
    """One launch: `kernel.run(*gather(values), *scalars)`; `names` are those of the scalars."""

    kernel: kernels.Kernel
    slots: tuple[int, ...]
    scalars: tuple[Any, ...]
    names: tuple[str, ...]
    writes: tuple[int, ...]
    gather: Any


class Plan:
    """What a call of a rule does.

    Executors hold one list of arrays: arguments, accumulators, results, workspaces, and a last None. `outs` and `work`
    give (slot, shape, dtype) of what must be allocated; `zeros` are the result slots that are defined to be zero when
    there are no rows; `flat` is the shape in which a kernel takes each slot, or None where all are that shape already.
    """

    __slots__ = ("env", "flat", "num_inputs", "num_slots", "outs", "rule", "steps", "work", "zeros")

    def __init__(self, rule: Rule, target: str, types: Sequence[Type | None], attrs: Mapping[str, Any], wanted: frozenset[str]) -> None:
        env = rule.bind(types, attrs)
        slots = rule.slots
        at = {name: i for i, name in enumerate(slots)}
        accumulated = [name for name, t in zip(rule.accumulates, types[len(rule.ins) :], strict=False) if t is not None]
        present = {name for name, t in zip(rule.ins, types, strict=False) if t is not None}
        has = present | wanted | {f"+{name}" for name in accumulated}
        if rule.derive is not None:
            env.update(rule.derive(env))
        launches = rule.live(env, wanted)
        work = [name for name in rule.work if any(name in launch.split[1] for launch in launches)]
        self.rule, self.env = rule, env
        self.num_inputs, self.num_slots = rule.num_inputs, len(slots) + 1
        self.outs = tuple((at[name], *rule.type_of(name, env)) for name in rule.outs if name in wanted and name not in accumulated)
        self.zeros = tuple(at[name] for name, arg in rule.outs.items() if name in wanted and not arg.rows and name not in accumulated)
        self.work: tuple = ()
        self.steps: tuple[Step, ...] = ()
        self.flat: tuple | None = None
        if env["rows"] == 0 or (self.outs and all(0 in shape for _, shape, _ in self.outs)):
            return
        self.work = tuple((at[name], *rule.type_of(name, env)) for name in work)
        slot_of = {name: at[f"acc_{name}"] if name in accumulated else at[name] for name in (*rule.ins, *wanted, *work) if name in at}
        self.steps = tuple(_step(rule, launch, target, env, has | set(work), slot_of, len(slots)) for launch in launches)
        if len(env["lead"]) != 1:
            flat = tuple(self._flat(name, env) for name in slots)
            self.flat = flat if any(shape is not None for shape in flat) else None

    def _flat(self, name: str, env: Env) -> tuple[int, ...] | None:
        known = {**self.rule.ins, **self.rule.outs, **self.rule.work}
        arg = known[name.removeprefix("acc_") if name not in known else name]
        if not arg.rows or any(dim not in env and dim.isidentifier() for dim in arg.inner):
            return None
        return (env["rows"], *(evaluate(dim, env) for dim in arg.inner))


def static_of(launch: Launch, env: Env, has: set[str] | frozenset[str]) -> dict[str, Any]:
    """What is compiled in: the key of a launch under these sizes, attributes and present arguments."""
    static = {name: env[name] for name in launch.key.split()}
    if launch.takes_has:
        reads, writes, _ = launch.split
        names = {*reads, *writes, *(f"+{name}" for name in writes)}
        static["has"] = tuple(sorted(names & set(has)))
    return static


def _step(rule: Rule, launch: Launch, target: str, env: Env, has: set[str], slot_of: Mapping[str, int], none: int) -> Step:
    reads, writes, scalars = launch.split
    slots = tuple(slot_of[name] if name in has else none for name in (*reads, *writes))
    kernel = kernels.get(rule, launch, target, static_of(launch, env, has))
    values = tuple(evaluate(name, env) for name in scalars)
    written = tuple(slot_of[name] for name in writes if name in has)
    gather = itemgetter(*slots) if len(slots) > 1 else lambda v, i=slots[0]: (v[i],)
    return Step(kernel, slots, values, scalars, written, gather)
