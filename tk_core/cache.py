"""The kernel cache on disk: one folder an entry, safe for many processes, trusted only where nobody else can write.

    <root>/<key>/kernel.so   the library          <root>/<key>/entry.json  what it is, and its checksum
    <root>/locks/<key>       one lock an entry    <root>/quarantine/       entries whose checksum did not hold

`TK_CACHE_DIR` names the root (default: ~/.cache/tk-kernels). A library found there is code that will run, so the root
must belong to the current user or to root and be writable by nobody else.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tk_core.errors import CacheError

log = logging.getLogger("tk_core")

# Longer than any compile: a process that waits this long compiles for itself.
LOCK_SECONDS = 600
SLOW_SECONDS = 3.0


def root() -> Path:
    """The cache folder that the environment names; it need not exist."""
    named = os.environ.get("TK_CACHE_DIR")
    if named:
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "tk-kernels"


def trusted_root() -> Path | None:
    """The cache folder, made if it is missing; None where it cannot be made.

    Raises:
        CacheError: somebody else owns the folder or may write to it.
    """
    folder = root()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        if not folder.is_dir():
            log.warning("tk_core: kernel cache %s cannot be made (%s): kernels are compiled for this process only", folder, error)
            return None
    _check_trust(folder)
    return folder


def _check_trust(folder: Path) -> None:
    info, refuse = folder.stat(), "refusing to load code from it"
    if info.st_uid not in (os.getuid(), 0):
        owner = f"user {info.st_uid}, not to {os.getuid()} or root"
        raise CacheError(f"kernel cache {folder} belongs to {owner}: {refuse} (set TK_CACHE_DIR)")
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = f"{stat.S_IMODE(info.st_mode):o}"
        raise CacheError(f"kernel cache {folder} is writable by others (mode {mode}): {refuse} (chmod go-w, or set TK_CACHE_DIR)")


@functools.cache
def _private(pid: int) -> Path:
    """A folder of this process alone, removed at its end."""
    folder = Path(tempfile.mkdtemp(prefix="tk-kernels-"))
    atexit.register(lambda: os.getpid() == pid and shutil.rmtree(folder, ignore_errors=True))
    return folder


def key_of(what: Any) -> str:
    """The name of an entry: a hash of everything that the library depends on."""
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:32]


def library(key: str, make: Callable[[Path], dict[str, Any]]) -> tuple[Path, bool]:
    """The library of that key; `make(path)` builds a missing one and returns what to record of it.

    Returns:
        The path, and whether it was built now.
    """
    folder = trusted_root()
    if folder is None:
        return _build_private(key, make)
    if (found := _verified(folder, key)) is not None:
        return found, False
    if not os.access(folder, os.W_OK):
        return _build_private(key, make)
    from filelock import FileLock, Timeout

    locks = folder / "locks"
    locks.mkdir(mode=0o700, exist_ok=True)
    try:
        with FileLock(locks / key, timeout=LOCK_SECONDS):
            if (found := _verified(folder, key)) is not None:
                return found, False
            return _build(folder, key, make), True
    except Timeout:
        log.warning("tk_core: another process has held the lock of %s for %d s: compiling without the cache", key, LOCK_SECONDS)
        return _build_private(key, make)


def _build_private(key: str, make: Callable[[Path], dict[str, Any]]) -> tuple[Path, bool]:
    folder = _private(os.getpid())
    if (found := _verified(folder, key)) is not None:
        return found, False
    return _build(folder, key, make), True


def _build(folder: Path, key: str, make: Callable[[Path], dict[str, Any]]) -> Path:
    """Build aside, then move the whole entry in: nobody ever sees half of one."""
    aside = Path(tempfile.mkdtemp(prefix=".building-", dir=folder))
    try:
        start = time.monotonic()
        about = make(aside / "kernel.so")
        seconds = time.monotonic() - start
        if seconds > SLOW_SECONDS:
            log.info("tk_core: compiled %s (%s) in %.1f s", about.get("name", "?"), key, seconds)
        entry = {**about, "key": key, "seconds": round(seconds, 3), "sha256": _checksum(aside / "kernel.so")}
        (aside / "entry.json").write_text(json.dumps(entry, indent=1, default=str))
        target = folder / key
        try:
            os.rename(aside, target)
        except OSError:
            if _verified(folder, key) is None:  # not a race that somebody else won
                raise
        return target / "kernel.so"
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _verified(folder: Path, key: str) -> Path | None:
    """The library of an entry whose checksum holds; one that does not hold is put aside."""
    entry = folder / key
    so = entry / "kernel.so"
    try:
        about = json.loads((entry / "entry.json").read_text())
        if about["sha256"] == _checksum(so):
            return so
    except FileNotFoundError:
        if not entry.exists():
            return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.debug("tk_core: entry %s: %s", entry, error)
    log.warning("tk_core: kernel cache entry %s is damaged and is put aside", entry)
    aside = folder / "quarantine"
    try:
        aside.mkdir(mode=0o700, exist_ok=True)
        os.rename(entry, aside / f"{key}-{os.getpid()}-{time.monotonic_ns()}")
    except OSError as error:
        log.debug("tk_core: %s", error)
    return None


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def entries() -> list[dict[str, Any]]:
    """What the cache holds: the record of every entry with its size in bytes."""
    found = []
    for record in sorted(root().glob("*/entry.json")):
        try:
            about = json.loads(record.read_text())
            found.append({**about, "bytes": sum(f.stat().st_size for f in record.parent.iterdir())})
        except (OSError, ValueError):
            continue
    return found


def clear() -> int:
    """Remove every entry, and nothing else, from the cache; returns their number."""
    folder = root()
    if not folder.is_dir():
        return 0
    _check_trust(folder)
    removed = 0
    for record in folder.glob("*/entry.json"):
        shutil.rmtree(record.parent, ignore_errors=True)
        removed += 1
    for name in ("quarantine", "locks"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return removed
