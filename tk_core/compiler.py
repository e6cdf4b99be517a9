"""TileLang function -> shared library with a TVM-FFI entry `main`. The only file that touches TileLang's internals.

CUDA: TileLang's own host stub, which checks type, shape, stride and device. C: the generated C++ source, one g++ call,
and the entry written here, which makes the same checks. `None` is taken for a tensor that the kernel does not use.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import tilelang
from tilelang import tvm

from tk_core.dialect import Dialect
from tk_core.dtypes import DTYPES
from tk_core.errors import CompileError
from tk_core.ffi import tvm_ffi

# -mtune=generic: full-width vectors where there are any. No fast math and no contraction: results are fixed bit by bit.
# -fno-strict-aliasing: the generated code reinterprets through pointer casts.
C_FLAGS = [
    *("-std=c++17", "-O3", "-march=native", "-mtune=generic", "-shared", "-fPIC", "-Wl,-z,now", "-w"),
    *("-ffp-contract=off", "-fno-strict-aliasing", "-fno-math-errno", "-fno-trapping-math"),
]

# Kernels without half-precision buffers need nothing of TileLang's large half header.
_HALF_STUB = """#define HALF_HALF_HPP
#include <stdint.h>
#include <utility>
namespace half_float {
struct half { unsigned short v; half() = default; half(float) {} operator float() const { return 0; } };
}
"""


def build(function: Any, target: str, dtypes: list[str], path: Path, pass_configs: dict[str, Any]) -> str:
    """Compile a TileLang function to the library `path`; `dtypes` are the logical ones of its tensors in order.

    Returns:
        The generated kernel source.
    """
    if target == "c":
        return _build_c(function, dtypes, path)
    with quiet():
        kernel = _jit_kernel(function, target, pass_configs)
        kernel.artifact.rt_mod.export_library(str(path))
    return kernel.get_kernel_source()


def source(function: Any, target: str, pass_configs: dict[str, Any]) -> tuple[str, int]:
    """The generated source of a kernel, not compiled: C++, CUDA or HIP; and the bytes of shared memory asked for at launch."""
    if target == "c":
        return _c_source(function), 0
    spec = {"kind": "hip", "mcpu": target} if target.startswith("gfx") else {"kind": "cuda", "arch": target}
    with quiet(), tvm.target.Target(spec), tvm.transform.PassContext(opt_level=3, config=pass_configs):
        artifact = tilelang.lower(function, target=spec)
    attrs = [f.attrs for f in artifact.device_mod.functions.values()]
    return artifact.kernel_source, sum(int(a["dyn_shared_memory_buf"]) for a in attrs if "dyn_shared_memory_buf" in a)


def _jit_kernel(function: Any, target: str, pass_configs: dict[str, Any]) -> Any:
    # JITKernel itself, not tilelang.compile: no second cache, no setting of the user's process is changed
    from tilelang.jit.kernel import JITKernel

    if shutil.which("nvcc") is None and not os.environ.get("CUDA_HOME"):
        raise CompileError(f"no nvcc on PATH and no CUDA_HOME: kernels for {target} cannot be compiled here")
    spec = {"kind": "cuda", "arch": target}
    return JITKernel(function, execution_backend="tvm_ffi", target=spec, pass_configs=pass_configs)


@contextlib.contextmanager
def quiet() -> Any:
    """TileLang's log of a compilation is for its own developers: errors are raised, the rest is noise to a user."""
    logger = logging.getLogger("tilelang")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


# ------------------------------------------------------------------ the C target


def _c_source(function: Any) -> str:
    # scalar loops: g++ vectorizes them, and the code generator's own vector types are slow structs
    config = {"tirx.disable_vectorize": True}
    with quiet(), tvm.target.Target("c"), tvm.transform.PassContext(opt_level=3, config=config):
        return tilelang.lower(function, target="c").kernel_source


def _build_c(function: Any, dtypes: list[str], path: Path) -> str:
    text = _c_source(function)
    half = re.search(r"\bhalf\b", text)
    include = [
        f"-I{Path(tilelang.__file__).parent / 'src'}",
        f"-I{tvm_ffi.libinfo.find_include_path()}",
        f"-I{tvm_ffi.libinfo.find_dlpack_include_path()}",
    ]
    compiler = os.environ.get("CXX", "g++")
    with tempfile.TemporaryDirectory() as folder:
        unit = Path(folder, "kernel.cc")
        unit.write_text(("" if half else _HALF_STUB) + text + _entry(function, dtypes, text))
        try:
            done = subprocess.run([compiler, *C_FLAGS, *include, "-o", str(path), str(unit)], capture_output=True, text=True)
        except FileNotFoundError:
            raise CompileError(f"no C++ compiler {compiler!r} on PATH: kernels for the CPU cannot be compiled here") from None
        if done.returncode:
            raise CompileError(f"{compiler} failed on a generated kernel:\n{done.stderr[-4000:]}")
    return text


_ENTRY = """
#include <tvm/ffi/c_api.h>
#ifdef __SSE__
#include <xmmintrin.h>
#endif
// subnormal numbers count, whatever the calling thread has set: XLA's own threads flush them
struct TkSubnormals {{
#ifdef __SSE__
  unsigned saved = _mm_getcsr();
  TkSubnormals() {{ if (saved & 0x8040) _mm_setcsr(saved & ~0x8040u); }}
  ~TkSubnormals() {{ if (saved & 0x8040) _mm_setcsr(saved); }}
#elif defined(__aarch64__)
  uint64_t saved;
  TkSubnormals() {{ asm volatile("mrs %0, fpcr" : "=r"(saved)); asm volatile("msr fpcr, %0" :: "r"(saved & ~(1ull << 24))); }}
  ~TkSubnormals() {{ asm volatile("msr fpcr, %0" :: "r"(saved)); }}
#endif
}};
static inline DLTensor* tk_tensor(const TVMFFIAny* a) {{
  if (a->type_index == kTVMFFITensor) return (DLTensor*)((char*)a->v_obj + sizeof(TVMFFIObject));
  return a->type_index == kTVMFFIDLTensorPtr ? (DLTensor*)a->v_ptr : nullptr;
}}
static int tk_fail(const char* message) {{ TVMFFIErrorSetRaisedFromCStr("ValueError", message); return -1; }}
extern "C" __attribute__((visibility("default")))
int __tvm_ffi_main(void* self, const TVMFFIAny* args, int32_t tk_count, TVMFFIAny* ret) {{
{body}
  ret->type_index = kTVMFFINone; ret->zero_padding = 0; ret->v_int64 = 0;
  TkSubnormals guard;
  return main_kernel({call});
}}
"""


def _entry(function: Any, dtypes: list[str], text: str) -> str:
    """The TVM-FFI entry of a C kernel: checks every tensor against the declaration, then calls the kernel."""
    # the kernel's parameters are sorted by name and hold only what it uses
    signature = re.findall(r"int32_t main_kernel\((.*?)\) \{", text)[-1]
    params = [(" ".join(p.split()[:-1]), p.split()[-1]) for p in signature.split(", ") if p]
    used = {name for _, name in params}
    lines: list[str] = []
    bound: set[str] = set()
    tensors: dict[str, int] = {}
    late: list[str] = []
    unread: list[tuple[int, Any]] = []

    def fail(condition: str, message: str) -> str:
        return f'  if ({condition}) return tk_fail("{message}");'

    lines.append(fail(f"tk_count != {len(function.params)}", f"expected {len(function.params)} arguments"))
    sizes = {s.name for _, buffer in function.buffer_map.items() for s in buffer.shape if isinstance(s, tvm.tirx.Var)}
    logical = iter(dtypes)
    for i, var in enumerate(function.params):
        if var not in function.buffer_map:
            lines.append(_scalar(i, var.name, str(var.dtype)))
            bound.add(var.name)
            continue
        buffer, dtype = function.buffer_map[var], DTYPES[next(logical)]
        name = buffer.name
        tensors[name] = i
        lines.append(f"  DLTensor* t{i} = tk_tensor(args + {i});")
        if name not in used:
            unread.append((i, buffer))
            continue
        kind = f"t{i}->dtype.code != {dtype.code} || t{i}->dtype.bits != {dtype.bits} || t{i}->dtype.lanes != 1"
        lines += [
            fail(f"!t{i}", f"{name} must be a tensor"),
            fail(f"t{i}->device.device_type != kDLCPU", f"{name} must be on the CPU"),
            fail(f"t{i}->ndim != {len(buffer.shape)}", f"{name} must have {len(buffer.shape)} dimensions"),
            fail(kind, f"{name} has the wrong element type"),
            fail(f"((uintptr_t)t{i}->data + t{i}->byte_offset) % {max(dtype.bits // 8, 1)}", f"{name} is misaligned"),
        ]
        extents = [(f"t{i}->shape[{k}]", s, f"dimension {k} of {name} has the wrong size") for k, s in enumerate(buffer.shape)]
        for got, want, message in extents:
            if isinstance(want, tvm.tirx.Var) and want.name not in bound:
                bound.add(want.name)
                lines.append(f"  const int64_t {want.name} = {got};")
            else:
                late.append(fail(f"{got} != ({_c(want)})", message))
        step = "1"
        # rows that lie apart: a stride that is no size
        apart = len(buffer.strides) > 0 and isinstance(buffer.strides[0], tvm.tirx.Var) and buffer.strides[0].name not in sizes
        if apart:
            row = buffer.strides[0].name
            lines.append(f"  const int64_t {row} = t{i}->strides ? t{i}->strides[0] : t{i}->shape[1];")
        for k in reversed(range(int(apart), len(buffer.shape))):
            strided = f"t{i}->strides && t{i}->shape[{k}] > 1 && t{i}->strides[{k}] != {step}"
            late.append(fail(strided, f"{name} must be contiguous"))
            step = f"{step} * t{i}->shape[{k}]"
    # what this variant does not read may be absent, unless a size is known from it alone
    for i, buffer in unread:
        for k, extent in enumerate(buffer.shape):
            if isinstance(extent, tvm.tirx.Var) and extent.name in used and extent.name not in bound:
                bound.add(extent.name)
                lines.append(fail(f"!t{i}", f"{buffer.name} must be a tensor: size {extent.name} is known from it alone"))
                lines.append(f"  const int64_t {extent.name} = t{i}->shape[{k}];")
    pointers = {name: f"(char*)t{i}->data + t{i}->byte_offset" for name, i in tensors.items()}
    call = ", ".join(f"({kind})({pointers.get(name, name)})" for kind, name in params)
    return _ENTRY.format(body="\n".join(lines + late), call=call)


def _scalar(i: int, name: str, dtype: str) -> str:
    if dtype.startswith("float"):
        value = f"args[{i}].type_index == kTVMFFIFloat ? args[{i}].v_float64 : (double)args[{i}].v_int64"
        return f"  const double {name} = {value};"
    return f"  const int64_t {name} = args[{i}].v_int64;"


def _c(expression: Any) -> str:
    return expression.name if isinstance(expression, tvm.tirx.Var) else str(expression).replace("//", "/")


def dialect(target: str) -> Dialect:
    """The dialect in which a kernel for that target is built."""
    return Dialect(target)
