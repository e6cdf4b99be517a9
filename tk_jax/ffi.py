"""The one XLA FFI target of this package, and the primitive whose lowering turns a rule into calls of it.

A kernel is chosen when a program is lowered, for the platform it is lowered for: tracing compiles nothing, and a CPU array
is right also in a process that has a GPU.

A program that another process exported with `jax.export` names its kernels. Hand it to `load(exported)` before it runs: its
kernels are then read from the kernel cache. Exporting needs `disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(TARGET)]`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import struct
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tk_core import cache, kernels
from tk_core.device import arch_of
from tk_core.errors import CompileError
from tk_core.ffi import import_without_torch, tvm_ffi
from tk_core.op import Arg, Env, Rule, Type
from tk_core.plan import Plan, Step
from tk_jax import compat

TARGET = "tk_kernels"

_lock = threading.Lock()


# ------------------------------------------------------------------ the dispatcher


def build_dispatcher() -> tuple[Path, bool]:
    """Put the dispatcher into the kernel cache; returns its library, and whether it was built now."""
    source = Path(__file__).with_name("dispatch.c")
    about = {
        "name": "tk_jax.dispatch",
        "target": "host",
        "machine": os.uname().machine,
        "tvm_ffi": tvm_ffi.__version__,
        "source": source.read_text(),
    }
    key = cache.key_of(about)
    about["source"] = source.name

    def make(path: Path) -> dict[str, Any]:
        compiler = os.environ.get("CC", "gcc")
        include = [f"-I{tvm_ffi.libinfo.find_include_path()}", f"-I{tvm_ffi.libinfo.find_dlpack_include_path()}"]
        command = [compiler, "-O2", "-shared", "-fPIC", "-pthread", "-Wl,-z,now", *include, str(source), "-o", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            raise CompileError(f"no C compiler {compiler!r} on PATH: the dispatcher of tk_jax cannot be compiled here") from None
        if done.returncode:
            raise CompileError(f"{compiler} failed on {source}:\n{done.stderr[-4000:]}")
        return about

    return cache.library(key, make)


@functools.cache
def _dispatcher() -> Any:
    path, _ = build_dispatcher()
    tvm_ffi.register_global_func("tk_jax.load_kernel", kernels.load_named, override=True)
    return tvm_ffi.load_module(str(path))


def register(platform: str) -> None:
    """Register the target with XLA for "cpu" or "gpu"; done by itself when a program is lowered."""
    # XLA refuses a second registration, and several threads may lower at once
    with _lock:
        _register(platform)


@functools.cache
def _register(platform: str) -> None:
    bridge = import_without_torch("jax_tvm_ffi")
    bridge.register_ffi_target(TARGET, _dispatcher()["call"], ["attrs.number", "args", "rets"], platform=platform, allow_cuda_graph=True)


def load(exported: jax.export.Exported | None = None) -> None:
    """Make this process ready to run programs that another one has exported.

    Args:
        exported: a deserialized program; without one, only the FFI target is registered.

    Raises:
        CacheError: a kernel of the program is not in the kernel cache.
    """
    register("cpu")
    if any(device.platform == "gpu" for device in jax.devices()):
        register("gpu")
    if exported is None:
        return
    for text in set(re.findall(r'text = "(tk\.[^"]*)"', exported.mlir_module())):
        define(text)
        kernels.load_named(text.partition("|")[0])


def launch_counts(reset: bool = False) -> dict[str, int]:
    """Launches by kernel name since the process began or the counters were reset."""
    if not _dispatcher.cache_info().currsize:
        return {}
    counts: dict[str, int] = {}
    for line in str(_dispatcher()["counts"](int(reset))).splitlines():
        name, launches = line.rsplit(" ", 1)
        counts[name] = counts.get(name, 0) + int(launches)
    return counts


def encode(name: str, order: Sequence[int], scalars: Sequence[Any]) -> str:
    """A call as the dispatcher reads it: kernel, the buffer of every tensor parameter, exact scalars."""
    texts = [f"f{struct.pack('>d', value).hex()}" if isinstance(value, float) else f"i{int(value)}" for value in scalars]
    return f"{name}|{','.join(map(str, order))}|{','.join(texts)}"


def define(text: str) -> int:
    """Tell the dispatcher of a call; returns the number by which programs name it, the same in every process."""
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
    _dispatcher()["define"](number, text)
    return number


# ------------------------------------------------------------------ rules as a primitive


class Call(NamedTuple):
    """One rule with everything about a call of it that is static. Its operands are the present arguments and accumulators.

    `loops` are the axes in front of the rows that are looped over, outermost first: for each, which operands have it;
    `in_place`: the first result takes the memory of the first operand.
    """

    rule: Rule
    attrs: tuple[tuple[str, Any], ...]
    present: tuple[bool, ...]
    wanted: tuple[str, ...]
    loops: tuple[tuple[bool, ...], ...] = ()
    in_place: bool = False

    @classmethod
    def of(cls, rule: Rule, attrs: Mapping[str, Any], present: Sequence[bool], wanted: Iterable[str], in_place: bool = False) -> Call:
        """A call in canonical form: equal calls are equal objects, so that jit caches find them."""
        named = frozenset(wanted)
        return cls(rule, tuple(attrs.items()), tuple(present), tuple(name for name in rule.outs if name in named), in_place=in_place)

    def __repr__(self) -> str:
        # what a printed jaxpr shows
        attrs = "".join(f", {name}={value!r}" for name, value in self.attrs)
        return f"{self.rule.name}({', '.join(self.operands)}{attrs}) -> {', '.join(self.wanted)}"

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of the operands; an accumulator has that of its result."""
        names = (*self.rule.ins, *self.rule.accumulates)
        return tuple(name for name, there in zip(names, self.present, strict=True) if there)

    def has_rows(self, name: str) -> bool:
        """Whether an operand or a result has the rows as leading axes."""
        return self._arg(name).rows

    @property
    def loop_labels(self) -> tuple[tuple[str, ...], ...]:
        """For every operand the names of its axes that are looped over."""
        return tuple(tuple(f"loop{k}" for k, has in enumerate(self.loops) if has[i]) for i in range(len(self.operands)))

    def labels(self, ndims: Sequence[int]) -> list[tuple[str, ...]]:
        """For every operand the names of its leading axes: those that are looped over, then the rows."""
        pairs = zip(self.operands, self.loop_labels, ndims, strict=True)
        return [(*looped, *self._rows(name, ndim - len(looped))) for name, looped, ndim in pairs]

    def result_labels(self, operands: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """The same of every result, from the operands'."""
        rows = max(([label for label in labels if label.startswith("row")] for labels in operands), key=len, default=[])
        looped = [f"loop{k}" for k in range(len(self.loops))]
        return [(*looped, *rows) if self.has_rows(name) else tuple(looped) for name in self.wanted]

    def types(self, arrays: Sequence[Any]) -> list[Type | None]:
        """What the core judges, with None for absent arguments."""
        left = iter(arrays)
        return [type_of(next(left)) if there else None for there in self.present]

    def bind(self, arrays: Sequence[Any]) -> Env:
        """Sizes by name; raises where an argument does not fit."""
        env = self.rule.bind(self.types(arrays), dict(self.attrs))
        if self.rule.derive is not None:
            env.update(self.rule.derive(env))
        return env

    def _arg(self, name: str) -> Arg:
        return self.rule.outs[name] if name in self.rule.outs else self.rule.ins[name]

    def _rows(self, name: str, ndim: int) -> tuple[str, ...]:
        arg = self._arg(name)
        return tuple(f"row{axis}" for axis in range(ndim - len(arg.inner))) if arg.rows else ()


def type_of(array: Any) -> Type:
    """(shape, dtype name, device) of an array or a type; where it lies is jax's business."""
    return array.shape, array.dtype.name, "jax"


_rule = compat.Primitive(TARGET)
_rule.multiple_results = True


def launch(call: Call, arrays: Sequence[Any]) -> list[Any]:
    """The wanted results of a rule, in the order of its declaration. No batching, no sharding, no gradient here."""
    if not call.loops:
        return _rule.bind(*arrays, call=call)
    has, inner = call.loops[0], call._replace(loops=call.loops[1:])

    def example(own: Sequence[Any]) -> list[Any]:
        rest = iter(own)
        return launch(inner, [next(rest) if there else array for there, array in zip(has, arrays, strict=True)])

    return jax.lax.map(example, [array for there, array in zip(has, arrays, strict=True) if there])


@_rule.def_abstract_eval
def _abstract(*types: Any, call: Call) -> list[Any]:
    env = call.bind(types)
    return [compat.abstract_result(types, shape, jnp.dtype(dtype)) for shape, dtype in call.rule.result_types(env, call.wanted)]


@functools.cache
def _compiled(call: Call) -> Any:
    return jax.jit(lambda *arrays: _rule.bind(*arrays, call=call))


@_rule.def_impl
def _run(*arrays: Any, call: Call) -> list[Any]:
    return _compiled(call)(*arrays)


def _lower_cpu(*arrays: Any, call: Call) -> list[Any]:
    register("cpu")
    return _execute(call, arrays, "c")


def _lower_cuda(*arrays: Any, call: Call) -> list[Any]:
    register("gpu")
    return _execute(call, arrays, _cuda_arch())


@functools.cache
def _cuda_arch() -> str:
    capability = str(jax.devices("gpu")[0].compute_capability)
    major, minor = capability.split(".")
    return arch_of(int(major), int(minor))


compat.mlir.register_lowering(_rule, compat.mlir.lower_fun(_lower_cpu), platform="cpu")
compat.mlir.register_lowering(_rule, compat.mlir.lower_fun(_lower_cuda), platform="cuda")


def _execute(call: Call, arrays: Sequence[Any], target: str) -> list[Any]:
    """Every launch of the rule as one FFI call; leading axes are folded here, where one device's rows are known."""
    rule = call.rule
    plan = Plan(rule, target, call.types(arrays), dict(call.attrs), frozenset(call.wanted))
    values: list[Any] = [None] * plan.num_slots
    left = iter(arrays)
    for slot, there in enumerate(call.present):
        values[slot] = next(left) if there else None
    buffers = {slot: (shape, dtype) for slot, shape, dtype in (*plan.outs, *plan.work)}
    if not plan.steps:
        for slot, (shape, dtype) in buffers.items():
            values[slot] = jnp.zeros(shape, dtype)
    moved = {rule.slots.index(call.wanted[0]): 0} if call.in_place and plan.steps else {}
    for step in plan.steps:
        _launch(_moved(step, moved), values, buffers, plan.flat)
    results = []
    for name, (shape, _) in zip(call.wanted, rule.result_types(plan.env, call.wanted), strict=True):
        slot = rule.slots.index(name)
        slot = moved.get(slot, slot)
        value = values[slot] if slot in buffers or moved else values[rule.slots.index(f"acc_{name}")]
        results.append(value.reshape(shape))
    return results


def _moved(step: Step, moved: Mapping[int, int]) -> Step:
    """The launch with some slots in place of others."""
    return step._replace(slots=tuple(moved.get(s, s) for s in step.slots), writes=tuple(moved.get(s, s) for s in step.writes))


def _launch(step: Step, values: list[Any], buffers: Mapping[int, tuple], flat: Sequence[Any] | None) -> None:
    """One FFI call: reads and writes `values` by slot. A slot that is written and holds a value already is aliased."""
    reads = list(dict.fromkeys(slot for slot in step.slots if values[slot] is not None))
    operands = [values[slot].reshape(flat[slot]) if flat and flat[slot] is not None else values[slot] for slot in reads]
    results = []
    for slot in step.writes:
        if values[slot] is None:
            shape, dtype = buffers[slot]
            results.append(jax.ShapeDtypeStruct(flat[slot] if flat and flat[slot] is not None else shape, dtype))
        else:
            operand = operands[reads.index(slot)]
            results.append(jax.ShapeDtypeStruct(operand.shape, operand.dtype))
    aliases = {reads.index(slot): i for i, slot in enumerate(step.writes) if slot in reads}
    # an aliased buffer arrives twice, as operand and as result: the kernel takes the result
    place = {slot: i for i, slot in enumerate(reads)} | {slot: len(reads) + i for i, slot in enumerate(step.writes)}
    text = encode(step.kernel.name, [place.get(slot, -1) for slot in step.slots], step.scalars)
    call = jax.ffi.ffi_call(TARGET, results, input_output_aliases=aliases)
    # the bridge reads attributes by alphabet and stops at the last one that it wants; the text is for readers, and for `load`
    written = call(*operands, number=define(text), text=text)
    for slot, value in zip(step.writes, written, strict=True):
        values[slot] = value
