"""Compiled kernels: memo, then disk, then the compiler. Knows no framework; loads TileLang only to compile."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import inspect
import json
import os
import re
import sys
import threading
from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Any

from tk_core import cache
from tk_core.device import cpu_id
from tk_core.errors import CacheError, CompileError
from tk_core.ffi import tvm_ffi
from tk_core.op import Launch, Rule

TILELANG = "0.1.15"  # the version that the kernels are written for; what a machine without it looks for in the cache


class Kernel:
    """One compiled variant: `run` is its TVM-FFI function, also global under `name`."""

    __slots__ = ("calls", "name", "run", "title")

    def __init__(self, name: str, title: str, run: Any) -> None:
        self.name, self.title, self.run, self.calls = name, title, run, 0


_kernels: dict[tuple, Kernel] = {}
_lock = threading.Lock()
_counts = {"compiles": 0, "loads": 0, "copies": 0}


def stats() -> dict[str, Any]:
    """What this process did: kernels compiled and loaded, layout copies, and launches by kernel.

    A trace is not a launch, and what a replayed CUDA graph (or an XLA command buffer) launches is counted once, at its capture.
    """
    launches: dict[str, int] = {}
    for kernel in list(_kernels.values()):
        if kernel.calls:
            launches[kernel.title] = launches.get(kernel.title, 0) + kernel.calls
    for name, calls in _graph_calls().items():
        title = name.removeprefix("tk.").rpartition(".")[0]
        launches[title] = launches.get(title, 0) + calls
    return {**_counts, "launches": dict(sorted(launches.items()))}


def reset_stats() -> None:
    """Set every counter to zero."""
    _counts.update(dict.fromkeys(_counts, 0))
    for kernel in _kernels.values():
        kernel.calls = 0
    _graph_calls(reset=True)


def count_copy(number: int = 1) -> None:
    """A front end had to copy an argument into the layout that kernels take."""
    _counts["copies"] += number


def _graph_calls(reset: bool = False) -> dict[str, int]:
    """Launches that a compiled XLA program made, counted by the dispatcher of tk_jax where it is loaded."""
    module = sys.modules.get("tk_jax.ffi")
    return module.launch_counts(reset) if module is not None else {}


def tilelang_version() -> str:
    """Of the installed one; where there is none, the version that the kernels are written for."""
    try:
        return metadata.version("tilelang")
    except metadata.PackageNotFoundError:
        return TILELANG


def get(rule: Rule, launch: Launch, target: str, static: Mapping[str, Any]) -> Kernel:
    """The kernel of one launch, compiled if nobody has compiled it before."""
    memo = (launch, target, tuple(static.items()))
    kernel = _kernels.get(memo)
    if kernel is None:
        with _lock:
            kernel = _kernels.get(memo)
            if kernel is None:
                kernel = _kernels[memo] = _load(rule, launch, target, static)
    return kernel


def identity(rule: Rule, launch: Launch, target: str, static: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that a compiled kernel depends on: equal identities, equal libraries."""
    about = {
        "name": f"{rule.name}.{launch.title}",
        "builder": f"{launch.build.__module__}.{launch.build.__qualname__}",
        "static": dict(static),
        "fixed": dict(launch.fixed),
        "pass_configs": dict(launch.pass_configs),
        "dtypes": rule.dtypes_of(launch, static),
        "target": target,
        "tilelang": tilelang_version(),
        "source": _source_hash(launch.build.__module__),
    }
    return {**about, "cpu": cpu_id()} if target == "c" else about


@functools.cache
def _source_hash(module: str) -> str:
    """Hash of the module of a builder, of what it uses of tk_core.ops, and of the code generators."""
    seen: set[str] = set()

    def visit(name: str) -> None:
        if name in seen:
            return
        seen.add(name)
        for value in vars(sys.modules[name]).values():
            where = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
            if isinstance(where, str) and where.startswith("tk_core.ops"):
                visit(where)

    visit(module)
    here = Path(__file__).parent
    files = [Path(inspect.getfile(sys.modules[name])) for name in sorted(seen)]
    texts = [file.read_bytes() for file in (*files, here / "bits.py", here / "dialect.py", here / "compiler.py")]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:32]


def _load(rule: Rule, launch: Launch, target: str, static: Mapping[str, Any]) -> Kernel:
    about = identity(rule, launch, target, static)
    key = cache.key_of(about)
    so, built = cache.library(key, lambda path: _make(rule, launch, target, static, about, path))
    _counts["compiles" if built else "loads"] += 1
    if target != "c":
        _load_cuda_runtime()
    name = f"tk.{about['name']}.{key}"
    run = tvm_ffi.load_module(str(so))["main"]
    tvm_ffi.register_global_func(name, run, override=True)
    return Kernel(name, about["name"], run)


def load_named(name: str) -> None:
    """Load a kernel that only its name tells of, from the cache: a program of another process calls it.

    Raises:
        CacheError: it is not there.
    """
    title, _, key = name.removeprefix("tk.").rpartition(".")
    if not re.fullmatch("[0-9a-f]{32}", key):  # a key names a folder of the cache, and nothing else
        raise CacheError(f"{name!r} is not the name of a kernel")

    def missing(path: Path) -> dict[str, Any]:
        raise CacheError(
            f"kernel {title} ({key}) is not loaded in this process and not in the cache {cache.root()}: call its operation once here"
        )

    so, _ = cache.library(key, missing)
    _counts["loads"] += 1
    if _is_cuda(so):
        _load_cuda_runtime()
    tvm_ffi.register_global_func(name, tvm_ffi.load_module(str(so))["main"], override=True)


def _is_cuda(so: Path) -> bool:
    return json.loads(so.with_name("entry.json").read_text())["target"] != "c"


def compile_only(rule: Rule, launch: Launch, target: str, static: Mapping[str, Any]) -> tuple[str, bool]:
    """Put a kernel into the cache without loading it; returns its key and whether it was built now."""
    about = identity(rule, launch, target, static)
    key = cache.key_of(about)
    _, built = cache.library(key, lambda path: _make(rule, launch, target, static, about, path))
    return key, built


def function(launch: Launch, target: str, static: Mapping[str, Any]) -> Any:
    """The TileLang function of a kernel."""
    from tk_core import compiler

    with compiler.quiet():
        return launch.build(compiler.dialect(target), **launch.fixed, **_arguments(static))


def _arguments(static: Mapping[str, Any]) -> dict[str, Any]:
    return {k: frozenset(v) if k == "has" else v for k, v in static.items()}


def _make(rule: Rule, launch: Launch, target: str, static: Mapping[str, Any], about: dict[str, Any], path: Path) -> dict[str, Any]:
    try:
        from tk_core import compiler
    except ImportError as error:
        raise CompileError(
            f"kernel {about['name']} for {target} is not in the cache {cache.root()}, and there is nothing to compile it with "
            f"({error}); pip install 'tk-kernels[torch]' or 'tk-kernels[jax]', or fill the cache with `tk-kernels compile`"
        ) from error
    func = function(launch, target, static)
    text = compiler.build(func, target, about["dtypes"], path, dict(launch.pass_configs))
    path.with_name("source.txt").write_text(text)
    return about


@functools.cache
def _load_cuda_runtime() -> None:
    """The library that loads a kernel's embedded cubin; it lies in the tilelang wheel, which need not be imported."""
    spec = util.find_spec("tilelang")
    if spec is None or spec.origin is None:
        raise CompileError("CUDA kernels need the runtime library of the tilelang wheel: pip install --no-deps tilelang==" + TILELANG)
    folder = os.path.join(os.path.dirname(spec.origin), "lib")
    # the second one makes the descriptors of bulk tensor copies
    for library in ("libtvm_runtime.so", "libtilelang.so"):
        ctypes.CDLL(os.path.join(folder, library), ctypes.RTLD_GLOBAL)
