"""Declarations, argument judgement, settings, NumPy and DLPack calls, and what importing costs."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import tk_core
from tk_core import config, kernels, op, registry
from tk_core.device import arch_of

BF16 = np.dtype(ml_dtypes.bfloat16)


def test_importing_loads_no_framework_and_is_quick():
    code = """
import sys, time
start = time.perf_counter()
import tk_core
seconds = time.perf_counter() - start
print({"torch", "jax", "tilelang", "numpy", "tvm_ffi"} & {*sys.modules}, seconds < 0.3)
import tk_core.registry
tk_core.registry.ops()
print({"torch", "jax", "tilelang"} & {*sys.modules})
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split("\n")[:2] == ["set() True", "set()"]
    assert out.stderr == ""


def test_signatures():
    args = op.parse("x[..., n, H]:bf16 w?[n * H]:f32 s[]:f32")
    assert args["x"] == op.Arg("x", ("...", "n", "H"), "bfloat16", False)
    assert args["x"].rows
    assert args["w"].optional
    assert not args["w"].rows
    assert args["s"].dims == ()


def test_every_operation_is_declared_in_full():
    found = registry.ops()
    assert len(found) >= 7
    for name, o in found.items():
        assert o.name == name
        assert o.area
        if o.backward is None:
            continue
        for part in ("Args:", "Returns:", "Raises:", "Numerics:", "Gradient:", "Source:"):
            assert part in o.doc, (name, part)
        assert set(o.returns) <= set(o.forward.outs)
        assert {n.removeprefix("d_") for n in o.backward.outs} <= set(o.forward.ins)
        for rule in o.rules:
            known = {*rule.ins, *rule.outs, *rule.work}
            for launch in rule.launches:
                reads, writes, _ = launch.split
                assert {*reads, *writes} <= known, (name, launch.args)
    with pytest.raises(KeyError, match="no operation 'nothing'; there are"):
        registry.get("nothing")


def test_rows_are_in_no_key():
    from tk_core.aot import jobs

    for job in jobs(hidden=[1280]):
        assert not {"rows", "lead", "T", "M_rows"} & set(job.static), job.title()


def test_numpy_arrays_go_through_the_kernels():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 4, 256)).astype(BF16)
    mix = rng.standard_normal((3, 4, 1)).astype(np.float32)
    y = tk_core.call("mhc_pre_apply_mix", x, mix)
    assert y.dtype == BF16
    np.testing.assert_allclose(y.astype(np.float64), (x.astype(np.float64) * mix).sum(1), rtol=2**-8, atol=1e-6)
    kernels.reset_stats()
    assert np.array_equal(tk_core.call("mhc_pre_apply_mix", x[::2], mix[::2]), y[::2])
    assert kernels.stats()["copies"] == 2
    assert np.array_equal(tk_core.call(registry.get("mhc_pre_apply_mix"), x[None], mix[None])[0], y)
    assert tk_core.call("mhc_pre_apply_mix", x[:0], mix[:0]).shape == (0, 256)
    with pytest.raises(TypeError, match="mhc_pre_apply_mix: x: expected dtype bfloat16, got float32"):
        tk_core.call("mhc_pre_apply_mix", x.astype(np.float32), mix)
    with pytest.raises(ValueError, match="arguments: expected 2 arrays"):
        tk_core.call("mhc_pre_apply_mix", x)
    with pytest.raises(TypeError, match="expected a NumPy array or a DLPack object, got list"):
        tk_core.call("mhc_pre_apply_mix", [1], mix)


def test_several_results_come_back_as_a_tuple():
    mixes = np.zeros((5, 24), np.float32)
    scale, base = np.ones(3, np.float32), np.zeros(24, np.float32)
    pre, post, comb = tk_core.call("mhc_pre_split_mixes", mixes, scale, base, mhc_mult=4, mhc_post_mult_value=2.0, mhc_pre_eps=0.25)
    assert pre.shape == post.shape == (5, 4, 1)
    assert comb.shape == (5, 4, 4)
    assert (pre == 0.75).all()
    assert (post == 1.0).all()
    assert not comb.any()


def test_one_tensor_passes_through_both_frameworks_without_a_copy():
    import jax
    import torch

    from tk_jax import mhc as jax_mhc
    from tk_torch import mhc as torch_mhc

    def aligned(*shape):
        raw = torch.empty(4 * int(np.prod(shape)) + 64, dtype=torch.uint8)
        start = -raw.data_ptr() % 64
        return raw[start : start + 2 * int(np.prod(shape))].view(torch.bfloat16).view(shape)

    first = aligned(4, 128).copy_(torch.randn(4, 128))
    residual = torch_mhc.expand_to_mhc(first, 4, out=aligned(4, 4, 128))
    taken = jax.dlpack.from_dlpack(residual)
    assert taken.unsafe_buffer_pointer() == residual.data_ptr()
    mixed = jax_mhc.mhc_pre_apply_mix(taken, jax.numpy.full((4, 4, 1), 0.25))
    back = torch.from_dlpack(mixed)
    assert back.data_ptr() == mixed.unsafe_buffer_pointer()
    assert torch.equal(back, first)
    again = tk_core.call("mhc_pre_apply_mix", residual, jax.numpy.full((4, 4, 1), 0.25))
    assert isinstance(again, torch.Tensor)
    assert torch.equal(again, first)
    assert isinstance(tk_core.call("mhc_pre_apply_mix", taken, torch.full((4, 4, 1), 0.25)), jax.Array)


def test_settings():
    config.reset_runtime_config()
    assert config.get_num_sms() == config.get_device_num_sms() >= 1
    config.set_num_sms(1)
    assert config.get_num_sms() == 1
    config.set_token_alignment(64)
    assert config.get_token_alignment() == 64
    config.set_debug(True)
    assert config.get_debug()
    with pytest.raises(ValueError, match="set_token_alignment: token_alignment: expected a power of two, got 48"):
        config.set_token_alignment(48)
    with pytest.raises(TypeError, match="set_num_sms: num_sms: expected an int"):
        config.set_num_sms(1.5)
    with pytest.raises(ValueError, match="set_num_sms: num_sms: expected 1 to"):
        config.set_num_sms(1 << 20)
    config.reset_runtime_config()
    assert config.get_token_alignment() == 128
    assert not config.get_debug()
    import tk_jax
    import tk_torch

    for module in (tk_torch, tk_jax, tk_torch.config, tk_jax.config):
        assert module.get_token_alignment is config.get_token_alignment
        assert module.reset_runtime_config is config.reset_runtime_config


def test_architectures():
    assert arch_of(9, 0) == "sm_90a"
    assert arch_of(8, 0) == "sm_80"
    assert arch_of(10, 0) == "sm_100a"
    assert arch_of(12, 0) == "sm_120a"


def test_a_compiled_kernel_checks_what_it_is_given():
    import torch

    rule = registry.get("mhc_pre_apply_mix").forward
    run = kernels.get(rule, rule.launches[0], "c", {"n": 4, "H": 128}).run
    x, mix, out = torch.zeros(2, 4, 128).bfloat16(), torch.zeros(2, 4, 1), torch.zeros(2, 128).bfloat16()
    run(x, mix, out)
    for bad in (
        (x.half(), mix, out),
        (x.view(torch.int16), mix, out),
        (x[:1], mix, out),
        (x.reshape(2, 512), mix, out),
        (x, mix.int(), out),
        (x, mix, torch.zeros(2, 256).bfloat16()[:, ::2]),
        (x, None, out),
        (x, mix),
    ):
        with pytest.raises((ValueError, TypeError)):
            run(*bad)


@pytest.mark.parametrize("name", ["tk.mhc_post.post.../../../evil", "tk.mhc_post.post./etc", "tk.mhc_post.post." + "0" * 31, "nothing"])
def test_a_kernel_name_cannot_lead_out_of_the_cache(name):
    from tk_core.errors import CacheError

    with pytest.raises(CacheError, match="is not the name of a kernel"):
        kernels.load_named(name)
