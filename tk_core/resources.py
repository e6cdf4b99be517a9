"""What a generated CUDA kernel takes: registers, stack, spills and shared memory, as ptxas reports them."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from tk_core import compiler, kernels
from tk_core.aot import Job
from tk_core.errors import CompileError


class Resources(NamedTuple):
    """Registers a thread; bytes of stack, spill stores and loads a thread; bytes of shared memory a block."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int

    def __str__(self) -> str:
        return (
            f"{self.registers} registers, {self.stack} B stack, {self.spill_stores} B spill stores, "
            f"{self.spill_loads} B spill loads, {self.shared} B shared memory"
        )


def source_of(job: Job, target: str) -> tuple[str, int]:
    """The generated source of one kernel, and the bytes of shared memory that its launch asks for."""
    function = kernels.function(job.launch, target, job.static)
    return compiler.source(function, target, dict(job.launch.pass_configs))


def of_source(text: str, dynamic_shared: int, arch: str) -> Resources:
    """Compile CUDA source and read what ptxas says of it."""
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise CompileError("no nvcc on PATH")
    number = arch.removeprefix("sm_")
    with tempfile.TemporaryDirectory() as folder:
        unit = Path(folder, "kernel.cu")
        unit.write_text(text)
        command = [nvcc, "-std=c++20", "-cubin", "-gencode", f"arch=compute_{number},code=sm_{number}", "-Xptxas", "-v", "-w"]
        command += [f"-I{TILELANG_TEMPLATE_PATH}", f"-I{CUTLASS_INCLUDE_DIR}", "-o", str(Path(folder, "kernel.cubin")), str(unit)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CompileError(f"nvcc failed:\n{done.stderr[-4000:]}")
    found = parse(done.stderr)
    return found._replace(shared=found.shared + dynamic_shared)


def parse(report: str) -> Resources:
    """The last entry function of a ptxas report."""

    def last(pattern: str) -> int:
        found = re.findall(pattern, report)
        return int(found[-1]) if found else 0

    return Resources(
        last(r"Used (\d+) registers"),
        last(r"(\d+) bytes stack frame"),
        last(r"(\d+) bytes spill stores"),
        last(r"(\d+) bytes spill loads"),
        last(r"(\d+) bytes smem"),
    )
