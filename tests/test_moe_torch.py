"""What the routing functions promise in PyTorch beside their bits: operators, layouts, buffers, transforms, compilation, debug mode."""

import numpy as np
import pytest
import torch
from moe_fronts import GATE, TOP2, MoeTorch
from torch._dynamo.testing import CompileCounterWithBackend

from tk_core import config, kernels, registry
from tk_core.reference import moe_mapping as mm
from tk_torch import moe
from tk_torch.library import bind

MOE = {name: op for name, op in registry.ops().items() if op.area == "moe"}
T, K, E, H, A = 6, 2, 8, 16, 2


IDX = torch.from_numpy(np.random.default_rng(0).integers(-1, E, (T, K)))
MAPS = moe.FusedMapping(*map(torch.from_numpy, mm.fused_mapping(IDX.numpy(), E, A)[:7]), None)
WHERE, OWNERS, SLOTS, N = MAPS.token_topk_to_pos, MAPS.pos_to_expert, MAPS.pos_to_token_topk, len(MAPS.pos_to_expert)
ON = torch.tensor([True, False, True, True, True, True])


def normal(*shape, grad=False):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_(grad)


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        assert (x is None) == (y is None)
        assert x is None or torch.equal(x, y)


@pytest.fixture
def debug():
    config.set_debug(True)
    yield
    config.set_debug(False)


# ------------------------------------------------------------------ operators


def samples():
    """(operation, arguments, attributes): one of everything."""
    scores = normal(T, E).abs()
    gate = {"num_topk": K, "routed_scaling_factor": 1.5, "num_seqs": 2}
    maps = torch.arange(E + 1, dtype=torch.int32)[:, None].repeat(1, 3), torch.ones(E + 1, dtype=torch.int32)
    chosen = normal(T, E), normal(E), normal(E), ON, ON, ~ON, ON, IDX, *maps, torch.ones(1, dtype=torch.int32), None
    codes = torch.zeros(T, 128, dtype=torch.int8), torch.ones(T, 2)
    found = {
        "topk_gate": ((scores,), {"num_topk": K}),
        "topk_sum_and_topk_group_idx": ((scores.view(T, 2, E // 2),), {"num_topk_sum": 2}),
        "normalize_weight": ((normal(T, K),), {}),
        "mask_indices_by_tp": ((IDX, None), {"n": E, "num_ep_ranks": 4, "num_tp_ranks": 2, "tp_rank_value": 1}),
        "group_count": ((IDX,), {"num_groups": E, "num_seqs": 2}),
        "aux_fi": ((IDX,), {"num_experts": E}),
        "unique_group_indices": ((IDX,), {"num_groups": E}),
        "inplace_unique_group_indices": ((IDX,), {"num_groups": E}),
        "get_fused_mapping": ((IDX,), {"num_experts": E, "alignment": A, "num_expanded_tokens": N}),
        "fused_mapping": ((IDX,), {"num_experts": E, "alignment": A, "expert_capacity": 2 * A}),
        "psum_num_tokens_per_expert": ((IDX, MAPS.expert_start, MAPS.expert_end), {}),
        "expand_to_fused": ((normal(T, H), WHERE, OWNERS), {}),
        "expand_to_fused_with_sf": ((*codes, WHERE, OWNERS), {"num_per_channels": 128, "col": True}),
        "expand_topk_weights": ((normal(T, K), WHERE, SLOTS), {}),
        "grouped_gemm": ((normal(N, 64).bfloat16(), normal(E, 64, 64).bfloat16(), OWNERS, MAPS.expert_start, MAPS.expert_end), {}),
        "reduce_fused": ((normal(N, H), normal(T, K), WHERE, None, None), {"num_rows": N}),
        "reduce_fused_backward": ((normal(T, H), normal(N, H), normal(T, K), WHERE, SLOTS, normal(N)), {}),
        "scores_sum": ((scores, ON), {"num_seqs": 2}),
        "load_balance_loss": ((normal(2, E), torch.ones(2, E, dtype=torch.int32), torch.ones(2, dtype=torch.int32)), {"num_aux_topk": K}),
        "moe_topk_gate_backward": ((scores, IDX, normal(T, K), normal(T, K), ON, normal(2, E)), {"scoring_func": "softmax"}),
        "top2_sum_gate": ((normal(T, E), normal(E), *[None] * 10), {**gate, "num_groups": 4, "num_topk_groups": 2}),
        "moe_topk_gate": (chosen, {**gate, "num_shared_experts": 1}),
    }
    return {name: (op, *found[name]) for name, op in MOE.items()}


SAMPLES = samples()


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name):
    op, tensors, attrs = SAMPLES[name]
    values, forward = op.forward.attributes(attrs), bind(op).forward
    leaves = [t.clone().requires_grad_() if t is not None and t.is_floating_point() and op.backward else t for t in tensors]
    # its dynamic test cannot add up results of which the first one is an integer and a later one is not
    mixed = name in ("top2_sum_gate", "moe_topk_gate")
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", *(() if mixed else ("test_aot_dispatch_dynamic",)))
    torch.library.opcheck(forward.operator, forward._pack(leaves, values, forward.all), test_utils=tests)
    if op.backward is None:
        return
    outs = forward.run(tensors, values, forward.all)
    known = dict(zip((*op.forward.ins, *op.forward.outs), (*tensors, *outs), strict=True))
    known |= {f"d_{k}": torch.randn_like(v) for k, v in zip(op.forward.outs, outs, strict=True) if v.is_floating_point()}
    backward = bind(op).backward
    torch.library.opcheck(backward.operator, backward._pack([known[k] for k in op.backward.ins], values, backward.all))


@pytest.mark.parametrize("name", [name for name, op in MOE.items() if op.backward])
def test_double_backward_and_forward_mode_raise(name):
    op, tensors, attrs = SAMPLES[name]
    gradients = {i for i, arg in enumerate(op.forward.ins) if f"d_{arg}" in op.backward.outs}
    leaves = [t.clone().requires_grad_() if i in gradients else t for i, t in enumerate(tensors)]
    outs = bind(op)(*leaves, **attrs)
    outs = [out for out in (outs if isinstance(outs, tuple) else (outs,)) if out.requires_grad]
    assert all(out.is_floating_point() for out in outs)
    wrt = [leaves[i] for i in gradients]
    first = torch.autograd.grad(sum(out.square().sum() for out in outs), wrt, create_graph=True)
    with pytest.raises(RuntimeError, match=f"{name}: double backward is not implemented"):
        sum(g.sum() for g in first).backward()
    with pytest.raises(RuntimeError, match=f"{name}: forward mode is not implemented"):
        torch.func.jvp(lambda t: bind(op)(t, *tensors[1:], **attrs), (tensors[0],), (tensors[0],))


# ------------------------------------------------------------------ gradients


def test_indices_and_biases_have_no_gradient():
    logits, bias, image = normal(T, E, grad=True), normal(E, grad=True), normal(E).requires_grad_()
    out = moe.moe_topk_gate(logits, K, **GATE, bias=bias, image_bias=image, image_token_mask=ON, num_seqs=2)
    assert not out.topk_idx.requires_grad
    assert not out.unmapped_topk_idx.requires_grad
    (out.topk_weights.square().sum() + out.scores_sum.square().sum()).backward()
    assert logits.grad.abs().sum() > 0
    assert bias.grad is None
    assert image.grad is None
    weights = moe.moe_topk_gate(logits.detach(), K, **GATE, bias=bias)[1]
    if weights.requires_grad:
        assert torch.autograd.grad(weights.sum(), bias, allow_unused=True) == (None,)
    assert not moe.topk_gate(logits, K).requires_grad
    assert not moe.topk_sum_and_topk_group_idx(logits.view(T, 2, E // 2), 1, 1).requires_grad


def test_reduce_keeps_x_only_for_the_gradient_of_weights():
    x, w = normal(N, H), normal(T, K)
    for args, kept in (([x.clone().requires_grad_(), w], False), ([x, w.clone().requires_grad_()], True)):
        saved = moe.reduce_fused(*args, WHERE).grad_fn.saved_tensors
        assert any(t is not None and t.shape == x.shape for t in saved) == kept
    assert moe.expand_to_fused(normal(T, H, grad=True), WHERE, OWNERS).grad_fn.saved_tensors[0].shape == WHERE.shape


def test_no_gradient_where_there_is_none():
    x, w = normal(N, H, grad=True), normal(T, K, grad=True)
    for call, what in (
        (lambda: moe.reduce_fused(x, None, WHERE, "e4m3"), "fp8_format"),
        (lambda: moe.reduce_fused(x.detach(), w, WHERE, "e4m3"), "fp8_format"),
        (lambda: moe.reduce_fused(x, None, WHERE, out=torch.empty(T, H)), "out="),
        (lambda: moe.reduce_fused((x, torch.ones(N)), None, WHERE), r"the rows of a pair \(x, x_sf\)"),
    ):
        with pytest.raises(RuntimeError, match=f"reduce_fused: the gradient is not implemented for {what}"):
            call()
        with torch.no_grad():
            call()
    logits = normal(T, E, grad=True)
    out = torch.empty(T, K, dtype=torch.int64), torch.empty(T, K)
    with pytest.raises(RuntimeError, match="moe_topk_gate: the gradient is not implemented with out="):
        moe.moe_topk_gate(logits, K, **GATE, out=out)


# ------------------------------------------------------------------ buffers


@pytest.mark.parametrize("name", ["top2_sum_gate", "moe_topk_gate"])
def test_buffers_of_a_gate(name):
    """unmapped_topk_idx with any distance of its rows is read and written, scores are written, gradients are those without buffers."""
    attrs = {"num_topk": K, "bias": normal(E), **(TOP2 if name == "top2_sum_gate" else GATE)}
    function, logits = getattr(moe, name), normal(T, E, grad=True)
    want = function(logits, **attrs, num_seqs=2)
    (slope,) = torch.autograd.grad(want.topk_weights.square().sum(), logits)
    wide = torch.full((T, 7), -9)
    for unmapped in (torch.full((T, K), -9), wide[:, 3 : 3 + K], torch.full((T * K + 1,), -9)[1:].view(T, K), wide[:, :K]):
        scores = torch.full((T, E), float("nan"))
        got = function(logits, **attrs, unmapped_topk_idx=unmapped, scores=scores, num_seqs=2)
        assert got.unmapped_topk_idx is unmapped
        assert_same(got, want)
        assert not scores.requires_grad  # what is computed from them has no gradient
        assert torch.equal(torch.autograd.grad(got.topk_weights.square().sum(), logits)[0], slope)
        assert torch.equal(scores.gather(1, unmapped) / scores.gather(1, unmapped).sum(1, keepdim=True) * 1.5, got.topk_weights)
        pair = function(logits, **attrs, unmapped_topk_idx=unmapped, scores=scores)
        assert_same(pair, want[:2])
        unmapped.copy_(unmapped.flip(1))
        fixed = function(logits, **attrs, unmapped_topk_idx=unmapped, fix_routing_mask=ON)
        assert torch.equal(fixed[0][ON], want.topk_idx.flip(1)[ON])
        assert torch.equal(unmapped[~ON], want.unmapped_topk_idx[~ON])
    assert (wide[:, K:3] == -9).all()
    assert (wide[:, 3 + K :] == -9).all()


def test_results_that_the_caller_provides():
    logits = normal(T, E)
    want = moe.moe_topk_gate(logits, K, **GATE)
    out = torch.empty(T, K, dtype=torch.int64), torch.empty(T, K)
    assert all(a is b for a, b in zip(moe.moe_topk_gate(logits, K, **GATE, out=out), out, strict=True))
    assert_same(out, want)
    x, w = normal(N, H), normal(T, K)
    mine = torch.empty(T, H)
    assert moe.reduce_fused(x, w, WHERE, out=mine) is mine
    assert torch.equal(mine, moe.reduce_fused(x, w, WHERE))
    args = normal(T, E).abs(), IDX, w, normal(T, K), 1.5
    mine = torch.empty(T, E)
    assert moe.moe_topk_gate_backward(*args, out=mine) is mine
    assert torch.equal(mine, moe.moe_topk_gate_backward(*args))
    assert moe.moe_topk_gate_forward is moe.moe_topk_gate


def test_a_buffer_that_the_gradient_needs_is_not_changed():
    logits = normal(T, E, grad=True)
    for change in (lambda unmapped: unmapped.add_(0), lambda unmapped: moe.inplace_unique_group_indices(unmapped, E)):
        unmapped = torch.empty(T, K, dtype=torch.int64)
        _, weights = moe.moe_topk_gate(logits, K, **GATE, unmapped_topk_idx=unmapped)
        change(unmapped)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            weights.sum().backward()


# ------------------------------------------------------------------ layouts


def test_inputs_of_any_layout_are_copied_once():
    """But weights and their cotangents, whose rows may lie apart."""

    def apart(t):
        return torch.zeros(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype)[..., ::2].copy_(t) if isinstance(t, torch.Tensor) else t

    w, x = normal(T, K), normal(N, H)
    for call, args in (
        (lambda s: moe.topk_gate(s, K), (normal(T, E),)),
        (lambda i: moe.group_count(i, E), (IDX,)),
        (lambda i: moe.unique_group_indices(i, E), (IDX,)),
        (lambda i: moe.fused_mapping(i, num_experts=E, alignment=A), (IDX,)),
        (moe.expand_to_fused, (normal(T, H), WHERE, OWNERS)),
        (moe.expand_topk_weights, (w, WHERE, SLOTS)),
        (moe.reduce_fused, (x, w, WHERE)),
        (moe.scores_sum, (normal(T, E).abs(), ON)),
        (lambda x, b, m: moe.moe_topk_gate(x, K, **GATE, bias=b, mask=m), (normal(T, E), normal(E), ON)),
    ):
        want, changed = call(*args), [apart(a) for a in args]
        kernels.reset_stats()
        got = call(*changed)
        assert kernels.stats()["copies"] == len(args)
        assert_same(got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,))
    args = normal(T, E).abs(), IDX, w, normal(T, K)
    wide = [normal(T, 5)[:, 2 : 2 + K].copy_(t) for t in args[2:]]
    kernels.reset_stats()
    assert torch.equal(moe.moe_topk_gate_backward(*args[:2], *wide, 1.5), moe.moe_topk_gate_backward(*args, 1.5))
    assert kernels.stats()["copies"] == 0


def test_indices_beyond_32_bits_name_nothing():
    far = torch.tensor([[2**32 + 1, 1], [-(2**63), 2**63 - 1], [2**40, -(2**32)]])
    near = torch.where(far == 1, 1, -1)
    assert torch.equal(moe.group_count(far, E), moe.group_count(near, E))
    assert_same(moe.fused_mapping(far, num_experts=E, alignment=A), moe.fused_mapping(near, num_experts=E, alignment=A))
    assert torch.equal(moe.mask_indices_by_tp(far, E, 1, 0, 1), near)
    assert torch.equal(moe.unique_group_indices(far, E), far)
    x = normal(3, E)
    for unmapped in (far.clone(), near.clone()):
        moe.moe_topk_gate(x, K, **GATE, fix_routing_mask=ON[:1].repeat(3), unmapped_topk_idx=unmapped)
        assert torch.equal(unmapped, near)


# ------------------------------------------------------------------ transforms, compilation, modes


def chain(x, logits, bias):
    """To the experts and back."""
    out = moe.top2_sum_gate(logits, bias, K, **TOP2, num_seqs=2)
    maps = moe.fused_mapping(out.topk_idx, num_experts=E, alignment=A)
    rows = moe.expand_to_fused(x, maps.token_topk_to_pos, maps.pos_to_expert)
    y = moe.reduce_fused(rows * 2, out.topk_weights, maps.token_topk_to_pos)
    counts = moe.group_count(out.unmapped_topk_idx, E, num_seqs=2)
    return y, moe.load_balance_loss(out.scores_sum, counts, T // 2, K, 0.1)


def slopes(function, x, logits, bias):
    x, logits = x.clone().requires_grad_(), logits.clone().requires_grad_()
    y, loss = function(x, logits, bias)
    return y.detach(), loss.detach(), *torch.autograd.grad(y.square().sum() + loss, (x, logits))


def test_compiles_without_a_break_and_not_again_for_another_routing():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(chain, fullgraph=True, backend=counter)
    for seed in range(3):
        args = normal(T, H) + seed, normal(T, E).roll(seed, 1), normal(E)
        assert_same(slopes(compiled, *args), slopes(chain, *args))
    assert counter.frame_count == 1


def test_buffers_are_written_under_compile():
    def call(x, unmapped, scores):
        return moe.moe_topk_gate(x, K, **GATE, unmapped_topk_idx=unmapped, scores=scores)

    one, two = ((torch.full((T, 5), -9)[:, :K], torch.zeros(T, E)) for _ in range(2))
    with torch.no_grad():
        assert_same(torch.compile(call, fullgraph=True, backend="aot_eager")(normal(T, E), *one), call(normal(T, E), *two))
    assert_same(one, two)


def test_vmap_and_grad_of_torch_func():
    x, logits, bias = normal(3, T, H), normal(3, T, E), normal(E)
    got = torch.vmap(chain, (0, 0, None))(x, logits, bias)
    assert_same(got, [torch.stack(part) for part in zip(*(chain(x[i], logits[i], bias) for i in range(3)), strict=True)])

    def loss(x, logits):
        y, aux = chain(x, logits, bias)
        return y.square().sum() + aux

    got = torch.func.vmap(torch.func.grad(loss, (0, 1)))(x, logits)
    each = [slopes(chain, x[i], logits[i], bias)[2:] for i in range(3)]
    assert_same(got, [torch.stack(part) for part in zip(*each, strict=True)])
    for call in (lambda t: moe.topk_gate(t, K), lambda t: moe.normalize_weight(t)[1], lambda t: moe.scores_sum(t.abs())):
        assert torch.equal(torch.vmap(call)(logits), torch.stack([call(t) for t in logits]))


def test_inference_mode():
    args = normal(T, H), normal(T, E), normal(E)
    with torch.inference_mode():
        assert_same(chain(*args), chain(*args))
        unmapped = torch.zeros(T, K, dtype=torch.int64)
        moe.inplace_unique_group_indices(unmapped, 4)
        assert (unmapped[:, 1:] == -1).all()
    assert_same(chain(*args), slopes(chain, *args)[:2])


def test_no_routing_compiles_anything():
    for seed in range(20):
        if seed == 1:
            kernels.reset_stats()
        slopes(chain, normal(T, H), normal(T, E).roll(seed, 0), normal(E))
    assert kernels.stats()["compiles"] == kernels.stats()["loads"] == 0


def test_debug_mode(debug):
    """What would count as none is reported; rows that do not take part are not looked at."""
    far, nan = IDX.clone(), normal(T, E)
    far[3, 1], nan[1, 2] = E, float("nan")
    beyond = WHERE.clone()
    beyond[0, 0] = N
    table, ones = torch.zeros(E, 3, dtype=torch.int32), torch.ones(E, dtype=torch.int32)
    few, many = (torch.where(torch.arange(E) == 3, c, 1).int() for c in (0, 4))
    w, x, rows, logits = normal(T, K), normal(T, H), normal(N, H), normal(T, E)
    fixed = {"fix_routing_mask": torch.ones(T, dtype=torch.bool), "unmapped_topk_idx": far.clone()}
    positions = f"token_topk_to_pos: expected positions below {N}, got {N}"
    for name, args, named, text in (
        ("topk_gate", (nan, K), {}, "scores: expected finite numbers, got 1 that are not"),
        ("mask_indices_by_tp", (far, E, 1, 0, 1), {}, "indices: expected experts below 8, got 8"),
        ("aux_fi", (far, E, 1), {}, "topk_idx: expected experts below 8, got 8"),
        ("fused_mapping", (far,), {"num_experts": E, "alignment": A}, "topk_idx: expected experts below 8, got 8"),
        ("get_fused_mapping", (far, E, 0, A), {}, "topk_idx: expected experts below 8, got 8"),
        ("moe_topk_gate_backward", (logits, far, w, w, 1.0), {}, "topk_idx: expected experts below 8, got 8"),
        ("expand_to_fused", (x, beyond, OWNERS), {}, positions),
        ("expand_topk_weights", (w, beyond, SLOTS), {}, positions),
        ("reduce_fused", (rows, w, beyond), {}, positions),
        ("reduce_fused_backward", (x, rows, w, beyond, SLOTS), {}, positions),
        ("moe_topk_gate", (nan, K), GATE, "logits: expected finite numbers, got 1 that are not"),
        ("top2_sum_gate", (nan / 0, normal(E), K), TOP2, "logits: expected finite numbers, got 6 that are not"),
        ("moe_topk_gate", (logits, K), {**GATE, **fixed}, "unmapped_topk_idx: expected experts below 8, got 8"),
        ("moe_topk_gate", (logits, K), {**GATE, "to_physical_map": table, "logical_count": few}, "logical_count: expected 1 to 3, got 0"),
        ("moe_topk_gate", (logits, K), {**GATE, "to_physical_map": table, "logical_count": many}, "logical_count: expected 1 to 3, got 1"),
        (
            "moe_topk_gate",
            (logits, K),
            {**GATE, "to_physical_map": table + 10, "logical_count": ones},
            "to_physical_map: expected physical",
        ),
    ):
        with pytest.raises(ValueError, match=f"{name}: {text}"):
            getattr(moe, name)(*args, **named)
    moe.moe_topk_gate(nan, K, **GATE, mask=ON)
    moe.group_count(far, E)
    assert torch.isfinite(torch.stack(slopes(chain, normal(T, H), normal(T, E), normal(E))[1:2])).all()


# ------------------------------------------------------------------ a CUDA device


@pytest.mark.gpu
def test_a_graph_of_the_whole_way_and_a_side_stream():
    front = MoeTorch()
    x, logits, bias = (t.to(front.device) for t in (normal(T, H), normal(T, E), normal(E)))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            slopes(chain, x, logits, bias)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = slopes(chain, x, logits, bias)
    for seed in range(3):
        logits.copy_(logits.roll(seed, 1))
        graph.replay()
        torch.cuda.synchronize()
        assert_same(got, slopes(chain, x, logits, bias))
    want, late = slopes(chain, x, logits, bias), torch.zeros_like(logits)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(logits)
        got = slopes(chain, x, late, bias)
    stream.synchronize()
    assert_same(got, want)
