"""What only a CUDA device can show: streams, graphs, two devices, large offsets, and both frameworks in one process."""

import pytest
import torch
from frontends import VARIANTS, Torch, sample_arrays

pytestmark = pytest.mark.gpu


def bound(variant, lead, hidden=1280):
    from tk_torch.library import bind

    op, arrays, attrs = sample_arrays(variant, lead, hidden)
    return bind(op), [Torch().array(a) for a in arrays], attrs


def outputs(result):
    return result if isinstance(result, tuple) else (result,)


def assert_same(a, b):
    for x, y in zip(outputs(a), outputs(b), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_side_stream_is_respected(variant):
    call, tensors, attrs = bound(variant, (64,))
    want = call(*tensors, **attrs)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    late = [t if t is None else torch.zeros_like(t) for t in tensors]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for t, source in zip(late, tensors, strict=True):
            if t is not None:
                t.copy_(source)
        got = call(*late, **attrs)
    stream.synchronize()
    assert_same(got, want)


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_and_backward_are_captured_and_replayed_with_new_inputs(variant):
    call, tensors, attrs = bound(variant, (64,))
    tensors = [t if t is None else t.requires_grad_() for t in tensors]
    leaves = [t for t in tensors if t is not None]

    def step():
        outs = outputs(call(*tensors, **attrs))
        return outs, torch.autograd.grad(outs, leaves, [torch.ones_like(o) for o in outs], allow_unused=True)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outs, grads = step()
    with torch.no_grad():
        for t in leaves:
            t.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    want_outs, want_grads = step()
    assert_same(tuple(outs), tuple(want_outs))
    assert_same(tuple(grads), tuple(want_grads))


def test_offsets_beyond_two_to_the_31_elements():
    from tk_torch import mhc

    rows, n, hidden = 150_000, 4, 4096  # 2.46e9 elements of residual
    if torch.cuda.mem_get_info()[0] < 30 << 30:
        pytest.skip("needs 30 GB")
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    residual = mhc.expand_to_mhc(x, n)
    picks = torch.tensor([0, 1, (1 << 31) // (n * hidden), (1 << 31) // (n * hidden) + 1, rows - 1], device="cuda")
    assert torch.equal(residual[picks], mhc.expand_to_mhc(x[picks], n))
    post = torch.randn(rows, n, 1, device="cuda")
    comb = torch.randn(rows, n, n, device="cuda")
    out = mhc.mhc_post(x, residual, post, comb)
    assert torch.equal(out[picks], mhc.mhc_post(x[picks], residual[picks], post[picks], comb[picks]))
    mixed = mhc.mhc_pre_apply_mix(out, post)
    assert torch.equal(mixed[picks], mhc.mhc_pre_apply_mix(out[picks], post[picks]))
    del mixed, residual
    from tk_torch.mhc_low import mhc_post_bwd

    dx, dres, dpost, dcomb = mhc_post_bwd(x, out, post, comb, out, False)
    some = mhc_post_bwd(x[picks], out[picks], post[picks], comb[picks], out[picks], False)
    assert_same((dx[picks], dres[picks], dpost[picks], dcomb[picks]), some)
    del dx, dres
    fn = torch.randn(24, n * hidden, device="cuda") * 0.01
    mixes = mhc.mhc_pre_norm_fn(out, fn, None, 1e-6)
    want = mhc.mhc_pre_norm_fn(out[picks], fn, None, 1e-6)
    torch.testing.assert_close(mixes[picks], want, rtol=1e-4, atol=1e-4)


def test_torch_and_jax_in_one_process_on_one_device():
    import jax
    import numpy as np

    from tk_jax import mhc as jax_mhc
    from tk_torch import mhc as torch_mhc

    x = torch.randn(512, 4, 1280, device="cuda", dtype=torch.bfloat16)
    mix = torch.rand(512, 4, 1, device="cuda")
    for _ in range(3):
        a = torch_mhc.mhc_pre_apply_mix(x, mix)
        torch.cuda.synchronize()
        b = jax_mhc.mhc_pre_apply_mix(jax.dlpack.from_dlpack(x), jax.dlpack.from_dlpack(mix))
        c = torch_mhc.mhc_pre_apply_mix(x, mix)
        assert torch.equal(a, c)
        assert a.cpu().view(torch.int16).numpy().tobytes() == np.asarray(b).tobytes()
    assert b.devices().pop().platform == "gpu"


def test_cupy_arrays():
    cp = pytest.importorskip("cupy")
    import tk_core

    mixes = torch.randn(5, 24, device="cuda")
    scale, base = torch.ones(3, device="cuda"), torch.zeros(24, device="cuda")
    attrs = {"mhc_mult": 4, "mhc_post_mult_value": 2.0, "mhc_pre_eps": 0.25}
    want = tk_core.call("mhc_pre_split_mixes", mixes, scale, base, **attrs)
    torch.cuda.synchronize()
    got = tk_core.call("mhc_pre_split_mixes", *(cp.from_dlpack(t) for t in (mixes, scale, base)), **attrs)
    assert all(isinstance(g, cp.ndarray) for g in got)
    for g, w in zip(got, want, strict=True):
        assert torch.equal(torch.from_dlpack(g), w)


def test_results_do_not_depend_on_the_number_of_multiprocessors():
    from tk_core import config

    for variant in VARIANTS:
        call, tensors, attrs = bound(variant, (777,))
        tensors = [t if t is None else t.requires_grad_() for t in tensors]
        leaves = [t for t in tensors if t is not None]
        results = []
        for sms in (config.get_device_num_sms(), 20):
            config.set_num_sms(sms)
            outs = outputs(call(*tensors, **attrs))
            results.append((*outs, *torch.autograd.grad(outs, leaves, [torch.ones_like(o) for o in outs], allow_unused=True)))
        config.reset_runtime_config()
        assert_same(*results)


def test_two_devices_and_the_current_one_is_restored():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    from tk_torch import mhc

    torch.cuda.set_device(0)
    x = torch.randn(64, 4, 1280, device="cuda:1", dtype=torch.bfloat16, requires_grad=True)
    mix = torch.rand(64, 4, 1, device="cuda:1", requires_grad=True)
    out = mhc.mhc_pre_apply_mix(x, mix)
    assert torch.cuda.current_device() == 0
    assert out.device.index == 1
    out.float().sum().backward()
    assert torch.cuda.current_device() == 0
    same = mhc.mhc_pre_apply_mix(x.detach().to("cuda:0"), mix.detach().to("cuda:0"))
    assert torch.equal(same.cpu(), out.detach().cpu())
    with pytest.raises(ValueError, match="mhc_pre_apply_mix: mix: expected device cuda:1, that of x, got cuda:0"):
        mhc.mhc_pre_apply_mix(x, mix.detach().to("cuda:0"))
