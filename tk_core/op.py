"""Declarations. An operation is one `Op`: what it takes and gives, which kernels it launches, and its gradient rule.

A signature reads `"x[..., n, H]:bf16 w?[H]:f32 -> y[..., H]:bf16"`. `...` stands for the rows, any number of leading
axes; a name binds a size, an expression of bound names checks one; `?` marks an argument that may be absent, or a result
that is computed only where it is wanted. An argument may have one of several dtypes (`x[M, H]:bf16|f32`, bound as `x_dtype`, empty
where it is absent), and a result the dtype that a bound name tells (`y[M, H]:x_dtype`). Everything that can be judged without
touching the data is judged here, once, for every front end.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tk_core.dtypes import DTYPES, SHORT
from tk_core.errors import type_error, value_error

Env = dict[str, Any]
# (shape, dtype name, device) of one argument; None for an absent one.
Type = tuple[Sequence[int], str, Any]


class Arg(NamedTuple):
    """One tensor of a signature. `dtype` is a dtype, several of them with bars between, or a bound name that tells it."""

    name: str
    dims: tuple[str, ...]
    dtype: str
    optional: bool = False

    @property
    def dtypes(self) -> tuple[str, ...]:
        """What an argument may be."""
        return tuple(self.dtype.split("|"))

    @property
    def dtype_name(self) -> str:
        """The bound name that tells the dtype; empty where the declaration does."""
        return f"{self.name}_dtype" if "|" in self.dtype else "" if self.dtype in DTYPES else self.dtype

    def dtype_in(self, env: Mapping[str, Any]) -> str:
        """The dtype under these bindings; of an absent argument any that it may have."""
        return (env[self.dtype_name] if self.dtype_name else self.dtype) or self.dtypes[0]

    @property
    def kind(self) -> str:
        """What error messages say that the argument must be."""
        return f"a {' or '.join(self.dtypes)} array of shape {self}"

    @property
    def rows(self) -> bool:
        """Whether the tensor has the rows as leading axes."""
        return self.dims[:1] == ("...",)

    @property
    def inner(self) -> tuple[str, ...]:
        """The dimensions behind the rows."""
        return self.dims[1:] if self.rows else self.dims

    def __str__(self) -> str:
        return f"({', '.join(self.dims)}{',' if len(self.dims) == 1 else ''})"


def parse(text: str) -> dict[str, Arg]:
    """`"x[..., n]:bf16 w?[n]:f32"` as arguments by name."""
    found = re.findall(r"(\w+)(\??)\[(.*?)\]:([\w|]+)", text)
    args = {}
    for name, optional, dims, dtypes in found:
        dtype = "|".join(SHORT.get(dtype, dtype) for dtype in dtypes.split("|"))
        args[name] = Arg(name, tuple(d.strip() for d in dims.split(",") if d.strip()), dtype, bool(optional))
    return args


@functools.cache
def _code(expression: str) -> Any:
    return compile(expression, "<dimension>", "eval")


def evaluate(expression: str, env: Mapping[str, Any]) -> Any:
    """A dimension or a scalar: a name, a number, or an expression of bound names."""
    if expression in env:
        return env[expression]
    return eval(_code(expression), {"__builtins__": {}}, dict(env))


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel of a rule: `build(P, **static)` makes its function, `"x w -> y; eps"` orders its parameters; `when` names a condition.

    `key` names the sizes, attributes and dtypes that are compiled in; a dtype that varies must be among them. A builder with a
    parameter `has` is told which optional arguments and which results there are; a result with a plus sign there is to be added to
    what its buffer holds.
    """

    build: Callable[..., Any]
    args: str
    key: str = ""
    name: str = ""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    pass_configs: Mapping[str, Any] = field(default_factory=dict)
    when: str = ""

    @functools.cached_property
    def split(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Names read, names written, scalars."""
        tensors, _, scalars = self.args.partition(";")
        reads, _, writes = tensors.partition("->")
        return tuple(reads.split()), tuple(writes.split()), tuple(scalars.split())

    @functools.cached_property
    def takes_has(self) -> bool:
        """Whether the builder wants to know which arguments and results there are."""
        code = self.build.__code__
        return "has" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    @property
    def title(self) -> str:
        """What lists of kernels show."""
        return self.name or self.build.__name__


@dataclass(eq=False)
class Rule:
    """One direction of an operation: arguments, results, workspaces, and the launches that lead from one to the other."""

    name: str
    ins: dict[str, Arg]
    outs: dict[str, Arg]
    launches: tuple[Launch, ...]
    work: dict[str, Arg] = field(default_factory=dict)
    attrs: dict[str, Any] = field(default_factory=dict)
    check: Callable[[Env], None] | None = None
    derive: Callable[[Env], Env] | None = None
    accumulates: tuple[str, ...] = ()
    # arguments and results of two axes whose rows may lie apart, in whole vectors of 16 bytes; loose ones are read element by
    # element, with any distance of their rows and any alignment
    strided: frozenset[str] = frozenset()
    loose: frozenset[str] = frozenset()
    # attributes that only reach kernels as scalars and change from call to call
    dynamic: tuple[str, ...] = ()
    # results without rows are sums over the rows: devices that share the rows add theirs up
    partial_results: bool = False

    @property
    def slots(self) -> tuple[str, ...]:
        """Every tensor of the rule in the order in which executors hold them; accumulators follow the arguments."""
        return (*self.ins, *(f"acc_{name}" for name in self.accumulates), *self.outs, *self.work)

    @property
    def num_inputs(self) -> int:
        """Arguments and accumulators."""
        return len(self.ins) + len(self.accumulates)

    def attributes(self, attrs: Mapping[str, Any]) -> tuple:
        """Attributes in order, defaults filled in; raises for an unknown name or a value of another kind."""
        if not attrs:
            return tuple(self.attrs.values())
        values = []
        for name in attrs:
            if name not in self.attrs:
                raise type_error(self.name, name, f"one of the attributes {', '.join(self.attrs) or '(none)'}", "an unknown name")
        for name, default in self.attrs.items():
            value, kind = attrs.get(name, default), type(default)
            if kind is float and isinstance(value, int) and not isinstance(value, bool):
                value = float(value)
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise type_error(self.name, name, f"a value of type {kind.__name__}", f"{value!r} of type {type(value).__name__}")
            values.append(value)
        return tuple(values)

    def bind(self, types: Sequence[Type | None], attrs: Mapping[str, Any]) -> Env:
        """Sizes, attributes and dtypes by name; raises where an argument does not fit its declaration."""
        env: Env = dict(attrs)
        present = [(arg, t) for arg, t in zip(self.ins.values(), types, strict=False) if self._present(arg, t)]
        for arg, t in zip(self.ins.values(), types, strict=False):
            if "|" in arg.dtype:
                env[arg.dtype_name] = "" if t is None else t[1]
        named = [(arg, dtype) for arg, (_, dtype, _) in present if arg.dtype_name == arg.dtype]
        for arg, (_, dtype, _) in present:
            # a saved result or a cotangent has the dtype that an attribute or another argument tells, or is the first to tell it
            allowed = (env.setdefault(arg.dtype, dtype),) if (arg, dtype) in named else arg.dtypes
            if dtype not in allowed:
                raise type_error(self.name, arg.name, f"dtype {' or '.join(allowed)}", dtype)
        device = None
        for arg, (shape, _, where) in present:
            self._bind_shape(arg, shape, env)
            device = where if device is None else device
            if where != device:
                raise value_error(self.name, arg.name, f"device {device}, that of {present[0][0].name}", where)
        env.setdefault("lead", ())
        env["rows"] = math.prod(env["lead"])
        if self.check is not None:
            self.check(env)
        for arg, dtype in named:
            if dtype != env[arg.dtype]:
                raise type_error(self.name, arg.name, f"dtype {env[arg.dtype]}", dtype)
        for name, t in zip(self.accumulates, types[len(self.ins) :], strict=False):
            if t is not None:
                self.judge_written(name, f"acc_{name}", t, env)
        return env

    def _present(self, arg: Arg, t: Type | None) -> bool:
        if t is None and not arg.optional:
            raise type_error(self.name, arg.name, arg.kind, "None")
        return t is not None

    def _bind_shape(self, arg: Arg, shape: Sequence[int], env: Env) -> None:
        inner = arg.inner
        lead = len(shape) - len(inner)
        if lead < 0 or (lead > 0 and not arg.rows):
            raise value_error(self.name, arg.name, f"shape {arg}", tuple(shape))
        if arg.rows:
            rows = tuple(shape[:lead])
            known = env.setdefault("lead", rows)
            if len(known) != len(rows) or any(a != b for a, b in zip(known, rows, strict=True)):
                raise value_error(self.name, arg.name, f"leading axes {tuple(known)}, those of the other arguments", tuple(shape))
        for dim, got in zip(inner, shape[lead:], strict=True):
            if dim not in env and dim.isidentifier():
                env[dim] = got
            elif (want := evaluate(dim, env)) != got:
                where = dim if str(want) == dim else f"{dim} = {want}"
                raise value_error(self.name, arg.name, f"shape {arg} with {where}", tuple(shape))

    def result_types(self, env: Env, names: Iterable[str] | None = None) -> list[tuple[tuple[int, ...], str]]:
        """(shape, dtype) of results or workspaces."""
        return [self.type_of(name, env) for name in (self.outs if names is None else names)]

    def type_of(self, name: str, env: Env) -> tuple[tuple[int, ...], str]:
        """(shape, dtype) of one tensor of the rule."""
        arg = self.outs.get(name) or self.work.get(name) or self.ins[name]
        lead = env["lead"] if arg.rows else ()
        return (*lead, *(evaluate(d, env) for d in arg.inner)), arg.dtype_in(env)

    def dtypes_of(self, launch: Launch, static: Mapping[str, Any]) -> list[str]:
        """The dtypes of a launch's tensors, in order, from what is compiled in."""
        reads, writes, _ = launch.split
        known = {**self.ins, **self.outs, **self.work}
        return [known[name].dtype_in(static) for name in (*reads, *writes)]

    def judge_written(self, name: str, argument: str, t: Type, env: Env) -> None:
        """An array that the caller lets the operation write must be exactly what the operation would allocate."""
        shape, dtype = self.type_of(name, env)
        if t[1] != dtype:
            raise type_error(self.name, argument, f"dtype {dtype}", t[1])
        if tuple(t[0]) != tuple(shape):
            raise value_error(self.name, argument, f"shape {tuple(shape)}", tuple(t[0]))

    def live(self, env: Env, wanted: frozenset[str]) -> list[Launch]:
        """The launches that a set of wanted results needs."""
        needed, launches = set(wanted), []
        for launch in reversed(self.launches):
            reads, writes, _ = launch.split
            if needed.intersection(writes) and (not launch.when or env[launch.when]):
                launches.append(launch)
                needed.update(name for name in reads if name in self.work)
        return launches[::-1]


@dataclass(eq=False)
class Op:
    """One operation. `returns` are the public results; further results are kept for the gradient.

    An operation without a gradient rule is not differentiable; where `straight_through`, the gradient of its first argument is
    the cotangent of its only result in the argument's dtype.

    The gradient rule is read off the names: `d_y` is the cotangent of result `y`, `d_x` the gradient of argument `x`;
    every other name in it is an argument or a result of the forward rule, and is saved.
    """

    name: str
    area: str
    forward: Rule
    backward: Rule | None
    returns: tuple[str, ...]
    doc: str = ""
    straight_through: bool = False
    # saved arguments that only one gradient needs: where that is not asked for, they are not kept
    only_for: Mapping[str, str] = field(default_factory=dict)

    @property
    def attrs(self) -> dict[str, Any]:
        """Attributes and their defaults."""
        return self.forward.attrs

    @functools.cached_property
    def saved(self) -> tuple[str, ...]:
        """Arguments and results that the gradient rule reads."""
        if self.backward is None:
            return ()
        known = self.forward.ins | self.forward.outs
        return tuple(name for name in self.backward.ins if name in known)

    @functools.cached_property
    def cotangents(self) -> tuple[str, ...]:
        """Results whose cotangent the gradient rule takes, in its order."""
        return tuple(name[2:] for name in self.backward.ins if name not in self.saved) if self.backward else ()

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The forward rule, and the backward rule where there is one."""
        return (self.forward,) if self.backward is None else (self.forward, self.backward)

    def public(self, values: Mapping[str, Any]) -> Any:
        """What the user gets: one array, or a tuple."""
        got = tuple(values[name] for name in self.returns)
        return got[0] if len(got) == 1 else got


def declare(
    name: str,
    area: str,
    forward: str,
    launches: Sequence[Launch],
    *,
    returns: str = "",
    attrs: Mapping[str, Any] | None = None,
    work: str = "",
    check: Callable[[Env], None] | None = None,
    derive: Callable[[Env], Env] | None = None,
    backward: str = "",
    backward_launches: Sequence[Launch] = (),
    backward_work: str = "",
    backward_derive: Callable[[Env], Env] | None = None,
    accumulates: str = "",
    strided: str = "",
    loose: str = "",
    dynamic: str = "",
    straight_through: bool = False,
    only_for: Mapping[str, str] | None = None,
    doc: str = "",
) -> Op:
    """Make an `Op`. `backward` lists names only: their shapes and dtypes are those of the forward rule."""
    left, _, right = forward.partition("->")
    attrs = dict(attrs or {})
    fwd = Rule(
        name, parse(left), parse(right), tuple(launches), parse(work), attrs, check, derive,
        strided=frozenset(strided.split()), loose=frozenset(loose.split()), dynamic=tuple(dynamic.split()),
    )  # fmt: skip
    public = tuple(returns.split()) or tuple(fwd.outs)
    if not backward:
        return Op(name, area, fwd, None, public, doc, straight_through)
    known = fwd.ins | fwd.outs
    left, _, right = backward.partition("->")

    def typed(names: str, optional: Callable[[str], bool]) -> dict[str, Arg]:
        args = {}
        for key in names.split():
            like = known[key] if key in known else known[key.removeprefix("d_")]
            # a cotangent or a gradient has the dtype of what it belongs to
            dtype = like.dtype if key in known else like.dtype_name or like.dtype
            args[key] = like._replace(name=key, optional=optional(key), dtype=dtype)
        return args

    several = len(public) > 1
    spare = dict(only_for or {})
    ins = typed(left, lambda key: (known[key].optional or key in spare) if key in known else several)
    outs = typed(right, lambda key: True)
    bwd = Rule(
        f"{name}_bwd", ins, outs, tuple(backward_launches), parse(backward_work), attrs, check,
        backward_derive, tuple(accumulates.split()), partial_results=True,
    )  # fmt: skip
    return Op(name, area, fwd, bwd, public, doc, only_for=spare)
