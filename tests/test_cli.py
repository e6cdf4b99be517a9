"""The command line: every command runs, its JSON is JSON, and its errors are one line."""

import json
import os
import subprocess
import sys

import pytest


def cli(*args, **env):
    return subprocess.run([sys.executable, "-m", "tk_core", *args], capture_output=True, text=True, env={**os.environ, **env})


def test_info_reports_packages_and_cache():
    done = cli("info", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    names = {row["name"]: row for row in found["packages"]}
    assert names["tilelang"]["wanted"] == "==0.1.15"
    assert all(row["fits"] is not False for row in found["packages"])
    assert found["cache"]["state"] == "ok"
    text = cli("info").stdout
    assert "tilelang" in text
    assert "cache" in text


def test_info_runs_without_its_dependencies_and_names_the_pin(tmp_path):
    """A broken tilelang that ends the process at import, no torch and no jax: the report still comes."""
    (tmp_path / "tilelang").mkdir()
    (tmp_path / "tilelang" / "__init__.py").write_text("import sys\nsys.exit('bad pin')\n")
    (tmp_path / "tilelang-0.1.0.dist-info").mkdir()
    (tmp_path / "tilelang-0.1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: tilelang\nVersion: 0.1.0\n")
    for name in ("torch", "jax", "numpy"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('no {name}', name={name!r})\n")
    done = cli("info", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "DOES NOT FIT" in done.stdout
    assert "pip install 'tilelang==0.1.15'" in done.stdout
    assert "SystemExit: bad pin" in done.stdout
    assert "not installed" in done.stdout


def test_ops_lists_every_operation():
    found = json.loads(cli("ops", "--json").stdout)
    from tk_core import registry

    assert [row["name"] for row in found] == list(registry.ops())
    assert all(row["keys"] for row in found)
    assert "mhc.mhc_post" in cli("ops").stdout


def test_compile_ahead_of_time_for_cpu_and_gpu_then_list_show_and_clear(tmp_path):
    env = {"TK_CACHE_DIR": str(tmp_path / "cache")}
    done = cli("compile", "expand_to_mhc", "--hidden", "256", "--arch", "c", "--jobs", "2", **env)
    assert done.returncode == 0, done.stderr
    assert "2 kernels for c: 2 compiled, 0 there already, 0 failed" in done.stdout
    assert "2 kernels for c: 0 compiled, 2 there already" in cli("compile", "expand_to_mhc", "--hidden", "256", **env).stdout
    code = "import torch, tk_core; from tk_torch import mhc; mhc.expand_to_mhc(torch.zeros(3, 256).bfloat16(), 4)"
    code += "; print(tk_core.stats()['compiles'])"
    warm = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}, check=True)
    assert warm.stdout.strip() == "0"
    listing = cli("cache", "list", **env).stdout
    assert "expand_to_mhc.expand" in listing
    assert len([e for e in json.loads(cli("cache", "--json", **env).stdout)["entries"] if "expand" in e["name"]]) == 2
    assert "removed" in cli("cache", "clear", **env).stdout
    assert "0 kernels" in cli("cache", **env).stdout


def test_unknown_operation_is_one_line():
    done = cli("compile", "nothing")
    assert done.returncode == 2
    assert done.stderr.strip().startswith("no operation 'nothing'; there are")
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(subprocess.run(["sh", "-c", "command -v nvcc"], capture_output=True).returncode != 0, reason="no nvcc")
def test_show_prints_source_and_resources():
    done = cli("show", "mhc_pre_apply_mix", "--hidden", "1280", "--source", "--arch", "sm_90a")
    assert done.returncode == 0, done.stderr
    assert "__global__" in done.stdout
    assert " registers, 0 B stack, 0 B spill stores" in done.stdout


def test_hip_sources_are_written(tmp_path):
    done = cli("compile", "expand_to_mhc", "--hidden", "1280", "--arch", "gfx942", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "2 sources in" in done.stdout
    assert any("__global__" in p.read_text() for p in tmp_path.glob("*.hip"))


ROUTED = ("topk_gate", "get_fused_mapping", "reduce_fused_backward", "routing_chain")


def test_bench_of_routing_writes_what_it_timed(tmp_path):
    sizes = ("--rows", "40", "--hidden", "128", "--device", "cpu", "--no-host")
    done = cli("bench", *ROUTED, *sizes, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 cases wrong" in done.stdout
    about, *rows = map(json.loads, (tmp_path / "bench.jsonl").read_text().splitlines())
    assert about["meta"]
    assert {row["op"] for row in rows} == set(ROUTED)
    assert all(row["rows"] == 40 and row["us"] > 0 and row["bytes"] > 0 for row in rows)
    (chain,) = (row for row in rows if row["op"] == "routing_chain")
    assert (chain["valid"], chain["launches"]) == (240, 3)
    assert len((tmp_path / "bench.csv").read_text().splitlines()) == len(rows) + 1
    table = (tmp_path / "bench.md").read_text()
    assert "| operation |  | T | V | N | launches |" in table
    assert table.count("`get_fused_mapping`") == 1


def test_bench_does_not_time_what_is_wrong(tmp_path, monkeypatch, capsys):
    from tk_core.__main__ import main
    from tk_core.bench import moe_calls

    topk_gate = moe_calls.oracle.topk_gate
    monkeypatch.setattr(moe_calls.oracle, "topk_gate", lambda scores, k: topk_gate(-scores, k))
    sizes = ("--rows", "40", "--device", "cpu", "--no-host")
    assert main(["bench", "topk_gate", "normalize_weight", *sizes, "--out", str(tmp_path)]) == 1
    assert "WRONG, not timed: topk_idx differs from the oracle" in capsys.readouterr().out
    assert [json.loads(line).get("op") for line in (tmp_path / "bench.jsonl").read_text().splitlines()] == [None, "normalize_weight"]


def test_bench_has_every_row_of_the_peers_that_is_a_routing_operation():
    from tk_core.bench import moe, peers
    from tk_torch import moe as public

    table = peers.load()
    wanted = [row for row in table.rows if row["op"] in public.__all__]
    assert len(wanted) == 39
    assert [row.peer for row in moe.rows(table)] == wanted
    assert not {row.function for row in moe.own_rows()} - {*public.__all__, "routing_chain"}
