"""Accumulation in place, donation, and the dispatcher that calls kernels from compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_arrays import H, N, close, double, mix_args, normal, same, scalar_loss

import tk_core
import tk_jax
from tk_core import registry
from tk_jax import ffi, mhc

# ------------------------------------------------------------------ gradients that are accumulated in place


def test_accumulators():
    op = registry.get("mhc_pre_apply_mix")
    backward = tk_jax.bind_backward(op)
    x, mix = mix_args(5)
    g, held = normal(5, H, dtype=jnp.bfloat16), normal(5, N, H, dtype=jnp.bfloat16)
    plain = backward(g, x, mix)
    added = backward(g, x, mix, acc={"d_x": held})
    close(added["d_x"], double(held) + double(mix) * double(g)[:, None], 2e-2)
    same(added["d_mix"], plain["d_mix"])
    only = backward(g, x, mix, wanted=["d_x"])
    assert list(only) == ["d_x"]
    same(only["d_x"], plain["d_x"])
    with pytest.raises(ValueError, match="mhc_pre_apply_mix_bwd: acc_d_x: expected shape"):
        backward(g, x, mix, acc={"d_x": held[:2]})
    none = jax.jit(lambda *a: backward(*a, wanted=["d_x"], acc={"d_x": held[:0]}))(g[:0], x[:0], mix[:0])
    same(none["d_x"], held[:0])


def test_parameter_accumulators_keep_their_value_where_there_are_no_rows():
    backward = tk_jax.bind_backward(registry.get("mhc_pre_norm_fn"))
    held, fn = normal(24, N * H), normal(24, N * H)
    empty = normal(0, 24), normal(0, N, H, dtype=jnp.bfloat16), fn, None, normal(0, 24), normal(0)
    same(backward(*empty, wanted=["d_mhc_fn"], acc={"d_mhc_fn": held})["d_mhc_fn"], held)
    same(backward(*empty, wanted=["d_mhc_fn"])["d_mhc_fn"], jnp.zeros_like(held))


def test_an_operation_without_a_gradient():
    from tk_core.op import Launch, declare

    def build(P):
        raise AssertionError("no kernel is needed to trace")

    floats = tk_jax.bind(declare("tk_test_floats", "test", "x[..., H]:f32 -> y[..., H]:f32", [Launch(build, "x -> y")]))
    indices = tk_jax.bind(declare("tk_test_indices", "test", "x[..., H]:f32 -> y[..., H]:i32", [Launch(build, "x -> y")]))
    with pytest.raises(NotImplementedError, match="tk_test_floats: the gradient is not implemented"):
        jax.eval_shape(jax.grad(lambda x: floats(x).sum()), normal(3, 8))
    jax.eval_shape(jax.grad(lambda x: (x * indices(x)).sum()), normal(3, 8))


def test_a_donated_accumulator_is_not_copied():
    op = registry.get("mhc_pre_apply_mix")
    x, mix = mix_args(5)
    g, held = normal(5, H, dtype=jnp.bfloat16), normal(5, N, H, dtype=jnp.bfloat16)
    want = tk_jax.bind_backward(op)(g, x, mix, acc={"d_x": held})["d_x"]

    def step(held, g, x, mix):
        return tk_jax.bind_backward(op)(g, x, mix, wanted=["d_x"], acc={"d_x": held})["d_x"]

    kept = jax.jit(step).lower(held, g, x, mix).compile()
    donated = jax.jit(step, donate_argnums=0).lower(held, g, x, mix).compile()
    assert " copy(" in kept.as_text()
    assert " copy(" not in donated.as_text()
    fresh = jnp.array(held, copy=True)
    same(kept(fresh, g, x, mix), want)
    same(fresh, held)
    # one that NumPy has not looked at, which would keep its memory
    fresh = jnp.array(held, copy=True)
    place = fresh.unsafe_buffer_pointer()
    out = donated(fresh, g, x, mix)
    assert out.unsafe_buffer_pointer() == place
    assert fresh.is_deleted()
    same(out, want)


# ------------------------------------------------------------------ the dispatcher


def dispatch(text, *arrays):
    ffi.register("cpu")
    call = jax.ffi.ffi_call(ffi.TARGET, [jax.ShapeDtypeStruct((1,), jnp.float32)])
    return jax.block_until_ready(jax.jit(lambda *a: call(*a, number=ffi.define(text), text=text))(*arrays))


def test_the_dispatcher_passes_every_scalar_exactly_and_none_for_absent_tensors():
    from tk_core.ffi import tvm_ffi

    seen = []

    def record(first, absent, second, *scalars):
        seen.append((tuple(first.shape), absent, tuple(second.shape), *scalars))

    tvm_ffi.register_global_func("tk.test.record", record, override=True)
    floats = [1e-6, 0.1, float(np.float32(0.1)), -0.0, 3.4028234663852886e38, 1e-45, float("inf"), 1 / 3]
    ints = [0, 1, -1, 2**31, 2**31 - 1, -(2**31), 2**53 + 1]
    dispatch(ffi.encode("tk.test.record", [1, -1, 0], [*floats, *ints, True]), jnp.ones(3), jnp.ones(5))
    ((first, absent, second, *scalars),) = seen
    assert absent is None
    assert (first, second) == ((5,), (3,))
    assert [float(s).hex() for s in scalars[: len(floats)]] == [f.hex() for f in floats]
    assert all(type(s) is float for s in scalars[: len(floats)])
    assert scalars[len(floats) :] == [*ints, 1]


def test_what_is_not_loaded_raises():
    key = "0123456789abcdef" * 2
    with pytest.raises(Exception, match=rf"kernel nobody \({key}\) is not loaded in this process and not in the cache"):
        dispatch(f"tk.nobody.{key}|0,1|", jnp.ones(3))
    with pytest.raises(Exception, match="too few buffers"):
        from tk_core.ffi import tvm_ffi

        tvm_ffi.register_global_func("tk.test.record", lambda *args: None, override=True)
        dispatch("tk.test.record|0,7|", jnp.ones(3))
    with pytest.raises(Exception, match=r"call tk_jax\.load"):
        call = jax.ffi.ffi_call(ffi.TARGET, [jax.ShapeDtypeStruct((1,), jnp.float32)])
        jax.block_until_ready(jax.jit(lambda a: call(a, number=12345, text="?"))(jnp.ones(3)))
    with pytest.raises(ValueError, match="not of the form"):
        ffi.define("no bars here")


def test_launches_are_counted_by_kernel():
    x, mix = mix_args(3)
    f = jax.jit(jax.grad(scalar_loss(mhc.mhc_pre_apply_mix), (0, 1)))
    jax.block_until_ready(f(x, mix))
    tk_core.reset_stats()
    for _ in range(3):
        jax.block_until_ready(f(x, mix))
    assert tk_core.stats()["launches"] == {"mhc_pre_apply_mix.apply_mix": 3, "mhc_pre_apply_mix_bwd.apply_mix_bwd": 3}
    tk_core.reset_stats()
    assert tk_core.stats()["launches"] == {}
