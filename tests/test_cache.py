"""The kernel cache: racing processes, damaged entries, folders that must not be trusted, and what a key depends on."""

import json
import os
import stat
import subprocess
import sys
import textwrap

import pytest

from tk_core import cache
from tk_core.errors import CacheError

RUN = """
import sys, numpy as np, ml_dtypes, tk_core
x = np.arange(2 * 4 * 128, dtype=np.float32).reshape(2, 4, 128).astype(ml_dtypes.bfloat16)
y = tk_core.call("mhc_pre_apply_mix", x, np.full((2, 4, 1), 0.5, np.float32))
assert np.array_equal(y.astype(np.float32), (x.astype(np.float32) * 0.5).sum(1).astype(ml_dtypes.bfloat16).astype(np.float32))
stats = tk_core.stats()
print(stats["compiles"], stats["loads"])
"""


def run(code, folder, **kwargs):
    env = {**os.environ, "TK_CACHE_DIR": str(folder), **kwargs.pop("env", {})}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
    )


def finish(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out.strip()


def entries(folder):
    return sorted(p.parent.name for p in folder.glob("*/entry.json"))


def test_eight_processes_race_on_a_cold_cache_and_one_compiles(tmp_path):
    folder = tmp_path / "cache"
    outs = [finish(p) for p in [run(RUN, folder) for _ in range(8)]]
    assert sorted(outs) == ["0 1"] * 7 + ["1 0"]
    assert len(entries(folder)) == 1
    assert not list(folder.glob(".building-*"))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_entry_does_not_depend_on_what_was_built_before(tmp_path):
    other = """
    import numpy as np, ml_dtypes, tk_core
    tk_core.call("mhc_pre_apply_mix", np.zeros((1, 2, 256), ml_dtypes.bfloat16), np.zeros((1, 2, 1), np.float32))
    """
    finish(run(RUN, tmp_path / "alone"))
    finish(run(textwrap.dedent(other) + RUN.replace('print(stats["compiles"], stats["loads"])', ""), tmp_path / "after"))
    assert set(entries(tmp_path / "alone")) < set(entries(tmp_path / "after"))
    assert len(entries(tmp_path / "after")) == 2


def test_a_killed_compiler_leaves_no_lock_and_no_half_entry(tmp_path):
    folder = tmp_path / "cache"
    code = """
    import os, signal
    from pathlib import Path
    from tk_core import cache
    def make(path):
        path.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    cache.library("k", make)
    """
    process = run(code, folder)
    process.communicate(timeout=60)
    assert process.returncode == -9
    assert entries(folder) == []
    os.environ["TK_CACHE_DIR"], before = str(folder), os.environ.get("TK_CACHE_DIR")
    try:
        path, built = cache.library("k", lambda path: path.write_bytes(b"whole") and {"name": "k"})
        assert built
        assert path.read_bytes() == b"whole"
    finally:
        os.environ.pop("TK_CACHE_DIR") if before is None else os.environ.update(TK_CACHE_DIR=before)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make(path):
    path.write_bytes(b"library")
    return {"name": "test", "target": "c"}


@pytest.mark.parametrize("damage", ["flip", "truncate", "no record", "bad record", "no library"])
def test_a_damaged_entry_is_put_aside_and_made_again(folder, damage):
    path, built = cache.library("key", make)
    assert built
    record = path.with_name("entry.json")
    if damage == "flip":
        path.write_bytes(b"evil!!!")
    elif damage == "truncate":
        path.write_bytes(b"lib")
    elif damage == "no record":
        record.unlink()
    elif damage == "bad record":
        record.write_text("{")
    else:
        path.unlink()
    path, built = cache.library("key", make)
    assert built
    assert path.read_bytes() == b"library"
    assert len(list((folder / "quarantine").iterdir())) == 1
    assert cache.library("key", make) == (path, False)


def test_a_folder_that_others_may_write_is_refused(folder):
    folder.mkdir(mode=0o700)
    for mode in (0o720, 0o702, 0o777):
        folder.chmod(mode)
        with pytest.raises(CacheError, match="writable by others"):
            cache.library("key", make)
        with pytest.raises(CacheError):
            cache.clear()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(folder):
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    with pytest.raises(CacheError, match="belongs to user 12345"):
        cache.library("key", make)


def test_a_read_only_folder_is_used_as_it_is(folder, monkeypatch):
    path, _ = cache.library("there", make)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere: say what another user would hear
    before = sorted(folder.rglob("*"))
    assert cache.library("there", make) == (path, False)
    other, built = cache.library("missing", make)
    assert built
    assert folder not in other.parents
    assert stat.S_IMODE(other.parents[1].stat().st_mode) == 0o700
    assert sorted(folder.rglob("*")) == before


def test_a_folder_that_cannot_be_made_means_this_process_only(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TK_CACHE_DIR", str(tmp_path / "file" / "cache"))
    path, built = cache.library("key", make)
    assert built
    assert tmp_path not in path.parents
    assert "cannot be made" in caplog.text


def test_the_default_is_not_a_shared_temporary_folder(monkeypatch):
    monkeypatch.delenv("TK_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert str(cache.root()).startswith(os.path.expanduser("~/.cache"))


def test_listing_and_clearing_touch_nothing_else(folder):
    cache.library("a", make)
    cache.library("b", make)
    (folder / "mine.txt").write_text("keep")
    assert [e["key"] for e in cache.entries()] == ["a", "b"]
    assert all(e["sha256"] and e["bytes"] > 0 for e in cache.entries())
    assert cache.clear() == 2
    assert (folder / "mine.txt").read_text() == "keep"
    assert cache.entries() == []


def test_a_slow_compile_says_so_in_one_line(folder, caplog, monkeypatch):
    monkeypatch.setattr(cache, "SLOW_SECONDS", -1)
    with caplog.at_level("INFO", logger="tk_core"):
        cache.library("key", make)
    lines = [r.message for r in caplog.records if r.levelname == "INFO" and r.name == "tk_core"]
    assert len(lines) == 1
    assert "test" in lines[0]
    assert "key" in lines[0]


def test_a_missing_compiler_is_named(tmp_path):
    code = RUN.replace('print(stats["compiles"], stats["loads"])', "")
    process = run(code, tmp_path / "cache", env={"CXX": "no-such-compiler"})
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "no C++ compiler 'no-such-compiler' on PATH" in err


def test_keys_name_everything_that_a_kernel_depends_on():
    from tk_core import kernels, registry

    rule = registry.get("mhc_pre_apply_mix").forward
    about = kernels.identity(rule, rule.launches[0], "c", {"n": 4, "H": 128})
    assert json.dumps(about)
    assert {"builder", "static", "target", "tilelang", "source", "cpu", "dtypes"} <= set(about)
    changed = kernels.identity(rule, rule.launches[0], "sm_90a", {"n": 4, "H": 128})
    assert cache.key_of(about) != cache.key_of(changed)
    assert "cpu" not in changed
