"""MoE routing on a CUDA device: the whole routing list, every width, long offsets, streams, number of multiprocessors."""

import numpy as np
import pytest
from moe_fronts import FRONTS, agree

from tk_core import config
from tk_core.bench.routing import moe_list, random_routing
from tk_core.reference import moe as oracle
from tk_core.reference import moe_mapping as mm

torch = pytest.importorskip("torch")

from tk_torch import moe

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
WIDTHS = (576, 2048, 2560, 3072, 4096, 6144, 7168)
ROUTINGS = {f"{r.experts}-{r.ranks}-{r.topk}-{r.tokens}": r for r in moe_list(full=True)}


def on_device(a):
    return torch.from_numpy(np.ascontiguousarray(a)).to(DEVICE)


@pytest.mark.parametrize("name", ROUTINGS)
def test_whole_routing_list(name):
    r = ROUTINGS[name]
    idx = random_routing(r.tokens, r.topk, r.experts, r.ranks)
    given, E = on_device(idx), r.local_experts
    for A in (1, 16, 64, 128):
        got = moe.get_fused_mapping(given, E, 0, A)
        for part, want in zip(got[:7], mm.get_fused_mapping(idx, E, 0, A)[:7], strict=True):
            np.testing.assert_array_equal(part.cpu().numpy(), want)
        assert got[7] == got[6].tolist()
    np.testing.assert_array_equal(moe.group_count(given, E).cpu().numpy(), oracle.group_count(idx, E))
    np.testing.assert_array_equal(moe.aux_fi(given, E, r.topk).cpu().numpy(), oracle.aux_fi(idx, E, r.topk))


@pytest.mark.parametrize("H", WIDTHS)
def test_every_width(H):
    """Rows of every width through both front ends, and their gradients, to the bit."""
    idx = random_routing(97, 6, 72, 8)
    m = mm.fused_mapping(idx, 9, 16, None)
    rng = np.random.default_rng(H)
    x, w = rng.standard_normal((idx.shape[0], H)).astype(np.float32), rng.random(idx.shape, np.float32)
    rows = rng.standard_normal((m.pos_to_expert.size, H)).astype(np.float32)
    fronts = [make() for make in FRONTS.values()]
    for front in fronts:
        agree(
            front.moe("expand_to_fused", x, m.token_topk_to_pos, m.pos_to_expert),
            mm.expand_to_fused(x, m.token_topk_to_pos, m.pos_to_expert),
        )
        agree(front.moe("reduce_fused", rows, w, m.token_topk_to_pos), mm.reduce_fused(rows, w, m.token_topk_to_pos))
    args = (x, rows, w, m.token_topk_to_pos, m.pos_to_token_topk)
    agree(*(front.moe("reduce_fused_backward", *args) for front in fronts))


def test_offsets_beyond_31_bits():
    """The last rows of a buffer of 2.1 billion elements."""
    T, K, H, N = 300_032, 1, 7168, 300_032
    idx = torch.zeros(T, K, dtype=torch.int64, device=DEVICE)
    maps = moe.fused_mapping(idx, num_experts=1, alignment=1, num_expanded_tokens=N)
    x = torch.zeros(T, H, dtype=torch.bfloat16, device=DEVICE)
    x[:64], x[-64:] = torch.randn(64, H, device=DEVICE), torch.randn(64, H, device=DEVICE)
    expanded = moe.expand_to_fused(x, maps.token_topk_to_pos, maps.pos_to_expert)
    assert torch.equal(expanded[-64:], x[-64:])
    assert torch.equal(expanded[:64], x[:64])
    assert torch.equal(expanded[150_000:150_064], x[150_000:150_064])
    w = torch.full((T, K), 2.0, device=DEVICE)
    y = moe.reduce_fused(expanded, w, maps.token_topk_to_pos)
    assert torch.equal(y[-64:], x[-64:] * 2)
    del y
    d_x, d_w = moe.reduce_fused_backward(x, expanded, w, maps.token_topk_to_pos, maps.pos_to_token_topk)
    assert torch.equal(d_x[-64:], x[-64:] * 2)
    want = x[-64:].double().square().sum(1)
    torch.testing.assert_close(d_w[-64:, 0].double(), want, rtol=2e-5, atol=0)


def test_number_of_multiprocessors_changes_nothing():
    idx = on_device(random_routing(4001, 6, 256, 8))
    results = []
    try:
        for sms in (config.get_device_num_sms(), max(config.get_device_num_sms() - 20, 1), 1):
            config.set_num_sms(sms)
            results.append([*moe.fused_mapping(idx, num_experts=32, alignment=128), moe.group_count(idx, 32), moe.aux_fi(idx, 32, 6)])
    finally:
        config.reset_runtime_config()
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_streams_do_not_disturb_each_other():
    """Mappings and counts of several streams at a time: clusters and workspaces are each call's own."""
    given = [on_device(random_routing(tokens, 6, 256, 8, seed=tokens)) for tokens in (500, 1000, 2000, 4001)]
    want = [[*moe.fused_mapping(idx, num_experts=32, alignment=128), moe.group_count(idx, 32)] for idx in given]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in given]
    for _ in range(20):
        got = []
        for stream, idx in zip(streams, given, strict=True):
            with torch.cuda.stream(stream):
                got.append([*moe.fused_mapping(idx, num_experts=32, alignment=128), moe.group_count(idx, 32)])
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for one, other in zip(want, got, strict=True) for a, b in zip(one, other, strict=True))
