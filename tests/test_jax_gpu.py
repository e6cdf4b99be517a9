"""JAX on CUDA devices, in processes of their own: which device the others use is settled when jax starts."""

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.gpu

COMMON = """
    import jax
    import jax.numpy as jnp
    import numpy as np
    import tk_core
    from tk_jax import mhc
    rng = np.random.default_rng(0)
    m, scale, base = (rng.standard_normal(s).astype(np.float32) for s in ((64, 8, 24), (3,), (24,)))
    def loss(m, scale, base):
        return sum((o ** 2).sum() for o in mhc.mhc_pre_split_mixes(m, scale, base, 4, 2.0, 1e-3))
    def run(device):
        args = jax.device_put((m, scale, base), device)
        out = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*args)
        assert all(a.devices() == {device} for a in jax.tree.leaves(out))
        return jax.tree.map(np.asarray, out)
    def close(a, b):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), a, b)
"""


def run(code):
    script = textwrap.dedent(COMMON) + textwrap.dedent(code)
    env = {**os.environ, "JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_platform_of_the_arrays_decides_not_the_default_backend():
    run("""
        gpu, cpu = run(jax.devices("gpu")[0]), run(jax.devices("cpu")[0])
        close(gpu, cpu)
        again = run(jax.devices("gpu")[0])
        jax.tree.map(np.testing.assert_array_equal, gpu, again)
    """)


def test_loops_and_vmap():
    run("""
        grad = jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2)), (0, None, None)))
        got = grad(m, scale, base)
        want = [jax.grad(loss, (0, 1, 2))(m[i], scale, base) for i in range(len(m))]
        close(got, jax.tree.map(lambda *a: np.stack(a), *want))
        step = jax.jit(lambda b: jax.lax.fori_loop(0, 50, lambda i, b: b - 1e-4 * jax.grad(loss, 2)(m, scale, b), b))
        b = base
        for _ in range(50):
            b = b - 1e-4 * jax.grad(loss, 2)(m, scale, b)
        close(step(base), b)
    """)


def test_rows_over_two_devices():
    run("""
        import sys
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        if jax.device_count("gpu") < 2:
            sys.exit()
        one = run(jax.devices("gpu")[1])
        for types in (AxisType.Auto, AxisType.Explicit):
            mesh = jax.make_mesh((2,), ("d",), axis_types=(types,), devices=jax.devices("gpu")[:2])
            args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((m, scale, base), (P("d"), P(), P()))]
            compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*args).compile()
            assert "all-gather" not in compiled.as_text()
            close(jax.tree.map(np.asarray, compiled(*args)), one[1])
    """)
