"""What torch expects of the MoE module: state, compilation, autocast, a well-behaved operator."""

import numpy as np
import pytest
import torch
from frontends import Torch
from moe_dense import PARAMETERS
from moe_layers import SMALL, problem, torch_module

from tk_torch.nn import grouped_product

pytestmark = pytest.mark.anywhere


def test_state_of_the_module():
    front = Torch()
    values, x, _, _ = problem(**SMALL, shared=1)
    module = torch_module(front, values, {"num_topk": 2, "num_groups": 4, "num_topk_groups": 2})
    assert set(module.state_dict()) == {"router", "w1", "w2", "bias"}
    assert {name for name, _ in module.named_parameters()} == set(PARAMETERS)
    module.eval()
    module(front.array(x))
    assert not module.load.any()
    module.train()
    module(front.array(x))
    module(front.array(x))
    assert module.load.sum() == 2 * 40 * 2
    assert "num_topk=2" in repr(module)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [("float32", {}), ("bfloat16", {}), ("bfloat16", {"alignment": 128}), ("float32", {"expert_capacity": 32})],
    ids=str,
)
def test_compiled_without_a_graph_break(dtype, options):
    """With every way in which the products of the experts are computed."""
    front = Torch()
    values, x, d_y, _ = problem(**SMALL | {"intermediate": 64}, dtype=dtype)
    module = torch_module(front, values, {"num_topk": 2, "alpha": 0.1, "gamma": 0.1, "weights_in": "swiglu", **options})
    mask = torch.arange(40, device=front.device) % 5 > 0

    def run(layer):
        given = front.array(x).requires_grad_()
        module.load.zero_()
        module.zero_grad()
        y, aux = layer(given, mask)
        (y.mul(front.array(d_y)).sum() + aux.loss).backward()
        return [y, aux.loss, aux.load, module.load.clone(), given.grad, *(p.grad for p in module.parameters())]

    want = run(module)
    got = run(torch.compile(module, fullgraph=True, backend="aot_eager"))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a.detach().float().cpu(), b.detach().float().cpu(), 1e-5, 1e-6)


def test_autocast_leaves_the_router_alone():
    front = Torch()
    values, x, _, _ = problem(**SMALL)
    module = torch_module(front, values, {"num_topk": 2})
    with torch.autocast(front.device, torch.bfloat16):
        y, _ = module(front.array(x))
    torch.testing.assert_close(y, module(front.array(x))[0], rtol=0, atol=0)


def test_the_grouped_product_as_an_operator():
    """Also of no rows, of empty segments, and of a buffer that is not full."""
    front = Torch()
    for rows, ends in ((12, [4, 4, 10]), (12, [0, 0, 0]), (0, [0, 0, 0])):
        x = torch.randn(rows, 16, device=front.device, requires_grad=True)
        w = torch.randn(3, 16, 24, device=front.device, requires_grad=True)
        bounds = torch.tensor(ends, dtype=torch.int32, device=front.device)
        torch.library.opcheck(torch.ops.tk_nn.grouped_product.default, (x, w, bounds))
        starts = [0, *ends[:-1]]
        want = torch.cat([x[a:b] @ m for a, b, m in zip(starts, ends, w, strict=True)])
        got = grouped_product(x, w, bounds)[: ends[-1]]
        torch.testing.assert_close(got, want)
        d_out = torch.randn_like(want)
        for a, b in zip(torch.autograd.grad(got, (x, w), d_out), torch.autograd.grad(want, (x, w), d_out), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", {}), ("float32", {"expert_capacity": 32})], ids=str)
def test_a_graph_is_replayed_for_another_routing(dtype, limit):
    """Forward and backward are captured, of bf16 experts and of segments of one length: nothing waits for the device."""
    front = Torch()
    values, x, _, _ = problem(**SMALL, dtype=dtype)
    module = torch_module(front, values, {"num_topk": 2, "alpha": 0.1, "weights_in": "swiglu", **limit})
    given = front.array(x).requires_grad_()

    def step():
        y, aux = module(given)
        return [y, aux.load, *torch.autograd.grad(y.float().sum() + aux.loss, (given, *module.parameters()))]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        given.copy_(given.flip(1))
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        torch.testing.assert_close(a, b)
