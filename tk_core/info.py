"""The environment report of `tk-kernels info`. It runs when nothing else does: every import in here may fail."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from typing import Any


def pins() -> dict[str, str]:
    """Requirement by distribution name, from this distribution's own metadata."""
    try:
        requires = metadata.requires("tk-kernels") or []
    except metadata.PackageNotFoundError:
        return {}
    found = {}
    for line in requires:
        name = re.match(r"[A-Za-z0-9._-]+", line).group()
        found.setdefault(name, line.partition(";")[0].removeprefix(name).strip())
    return found


def _fits(version: str, specifier: str) -> bool | None:
    """Whether a version meets a requirement; None where nothing is there to judge by."""
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:
        return None
    return SpecifierSet(specifier).contains(version, prereleases=True)


def packages() -> list[dict[str, Any]]:
    """What is installed of what this distribution names, and the pip line that mends what does not fit."""
    rows = []
    for name, specifier in pins().items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = None
        fits = None if version is None else _fits(version, specifier)
        row = {"name": name, "wanted": specifier, "installed": version, "fits": fits}
        if fits is False:
            row["mend"] = f"pip install '{name}{specifier}'"
        rows.append(row)
    return rows


def imports() -> dict[str, str]:
    """Whether each part can be imported: "ok", "not installed", or the error."""
    found = {}
    for name in ("tvm_ffi", "tilelang", "torch", "jax", "jax_tvm_ffi", "tk_core.kernels", "tk_torch.mhc", "tk_jax.mhc"):
        try:
            importlib.import_module(name)
            found[name] = "ok"
        except ModuleNotFoundError as error:
            found[name] = "not installed" if error.name == name else f"ModuleNotFoundError: {error}"
        except (Exception, SystemExit) as error:  # a wrong pin may even end the process; the report says so and goes on
            found[name] = f"{type(error).__name__}: {error}"
    return found


def _version(*words: str) -> str | None:
    """The line of a compiler's report that holds its version."""
    if shutil.which(words[0]) is None:
        return None
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    lines = (done.stdout or done.stderr).strip().splitlines()
    return next((line for line in lines if re.search(r"\d+\.\d+", line)), None)


def devices() -> list[str]:
    """CUDA devices as the driver's tool names them."""
    query = "--query-gpu=name,driver_version,memory.total,compute_cap"
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        done = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def cache_report() -> dict[str, Any]:
    """Where the kernel cache is, what it holds, and whether it may be used."""
    from tk_core import cache

    report: dict[str, Any] = {"path": str(cache.root())}
    try:
        entries = cache.entries()
        report |= {"entries": len(entries), "bytes": sum(e["bytes"] for e in entries)}
        if cache.root().exists():
            cache.trusted_root()
        report["state"] = "ok"
    except (OSError, RuntimeError) as error:
        report["state"] = f"{type(error).__name__}: {error}"
    return report


def report() -> dict[str, Any]:
    """Everything as one dictionary."""
    from tk_core import __version__

    return {
        "tk-kernels": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "compilers": {name: _version(name, "--version") for name in ("g++", "gcc", "nvcc", "hipcc")},
        "devices": devices(),
        "packages": packages(),
        "imports": imports(),
        "cache": cache_report(),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("TK_", "TILELANG_", "XLA_", "JAX_", "CUDA_"))},
    }


def text(found: dict[str, Any]) -> str:
    """The report as people read it."""
    lines = [f"tk-kernels {found['tk-kernels']}, Python {found['python']}, {found['platform']}, {found['cpus']} CPUs"]
    lines += [f"  {name:10} {version or 'not found'}" for name, version in found["compilers"].items()]
    lines += [f"  device     {line}" for line in found["devices"]] or ["  device     no CUDA device"]
    lines.append("packages")
    for row in found["packages"]:
        state = {True: "ok", False: "DOES NOT FIT", None: ""}[row["fits"]]
        lines.append(f"  {row['name']:20} {row['installed'] or '-':16} wanted {row['wanted'] or 'any':18} {state}")
        if "mend" in row:
            lines.append(f"  {'':20} mend with: {row['mend']}")
    lines.append("imports")
    lines += [f"  {name:20} {state}" for name, state in found["imports"].items()]
    cache = found["cache"]
    lines.append(f"cache  {cache['path']}: {cache.get('entries', 0)} kernels, {cache.get('bytes', 0):,} bytes, {cache['state']}")
    lines += [f"  {name}={value}" for name, value in found["environment"].items()]
    return "\n".join(lines)
