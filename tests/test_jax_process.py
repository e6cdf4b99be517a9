"""What a process loads, and what it makes of another one's programs."""

import os
import subprocess
import sys
import textwrap

import pytest


def run(code, **env):
    """The output of a fresh interpreter; a failure shows its error."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu", **env}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


WORK = """
    import sys
    import numpy as np
    import ml_dtypes
    def arrays():
        rng = np.random.default_rng(0)
        x = rng.standard_normal((5, 4, 256)).astype(ml_dtypes.bfloat16)
        mix = rng.standard_normal((5, 4, 1)).astype(np.float32)
        g = rng.standard_normal((5, 256)).astype(ml_dtypes.bfloat16)
        return x, mix, g
    def with_jax():
        import jax, tk_jax
        from tk_jax import mhc
        x, mix, g = arrays()
        out, pull = jax.vjp(jax.jit(mhc.mhc_pre_apply_mix), x, mix)
        return b"".join(np.asarray(a).tobytes() for a in (out, *pull(jax.numpy.asarray(g))))
    def with_torch():
        import torch
        from tk_torch import mhc
        def tensor(a):
            return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) if a.dtype != np.float32 else torch.from_numpy(a)
        x, mix, g = map(tensor, arrays())
        x.requires_grad_()
        mix.requires_grad_()
        out = mhc.mhc_pre_apply_mix(x, mix)
        grads = torch.autograd.grad(out, (x, mix), g)
        return b"".join(t.detach().contiguous().view(torch.uint8).numpy().tobytes() for t in (out, *grads))
"""


def work(code):
    return textwrap.dedent(WORK) + textwrap.dedent(code)


def test_a_warm_process_loads_neither_torch_nor_tilelang():
    code = work("with_jax(); print({'torch', 'tilelang', 'tvm'} & {*sys.modules})")
    run(code)
    assert run(code) == "set()"


def test_import_is_inert(tmp_path):
    code = """
        import sys
        import tk_jax
        from tk_jax import mhc
        import jax
        from jax._src import xla_bridge
        print({"torch", "tilelang", "jax_tvm_ffi"} & {*sys.modules}, xla_bridge.backends_are_initialized())
    """
    assert run(code, TK_CACHE_DIR=str(tmp_path / "cache"), HOME=str(tmp_path)) == "set() False"
    assert list(tmp_path.iterdir()) == []


def test_both_import_orders_give_the_same_bits():
    pytest.importorskip("torch")
    first = run(work("a = with_jax(); b = with_torch(); print(a == b, a.hex())"))
    second = run(work("b = with_torch(); a = with_jax(); print(a == b, a.hex())"))
    assert first == second
    assert first.startswith("True ")


def test_a_program_of_another_process(tmp_path):
    pytest.importorskip("flatbuffers")
    file = tmp_path / "program"
    made = run(
        work(f"""
        import jax
        from tk_jax import ffi, mhc
        x, mix, g = arrays()
        checks = [jax.export.DisabledSafetyCheck.custom_call(ffi.TARGET)]
        exported = jax.export.export(jax.jit(mhc.mhc_pre_apply_mix), disabled_checks=checks)(x, mix)
        open({str(file)!r}, "wb").write(exported.serialize())
        print(np.asarray(jax.jit(mhc.mhc_pre_apply_mix)(x, mix)).tobytes().hex())
        """)
    )
    call = f"""
        import jax, tk_jax
        exported = jax.export.deserialize(bytearray(open({str(file)!r}, "rb").read()))
        x, mix, g = arrays()
        LOAD
        print(np.asarray(exported.call(x, mix)).tobytes().hex(), {{"torch", "tilelang"}} & {{*sys.modules}})
    """
    assert run(work(call.replace("LOAD", "tk_jax.load(exported)"))) == f"{made} set()"
    unready = work(call.replace("LOAD", "tk_jax.load()"))
    with pytest.raises(AssertionError, match=r"call tk_jax.load\(exported\) before it runs"):
        run(unready)
    with pytest.raises(AssertionError, match="not loaded in this process and not in the cache"):
        run(work(call.replace("LOAD", "tk_jax.load(exported)")), TK_CACHE_DIR=str(tmp_path / "empty"))


def test_the_dispatcher_is_built_once_and_found_again(tmp_path):
    code = "import tk_jax; print(tk_jax.build_dispatcher()[1])"
    assert run(code, TK_CACHE_DIR=str(tmp_path)) == "True"
    assert run(code, TK_CACHE_DIR=str(tmp_path)) == "False"
