"""What torch may do to an operation: dispatcher, compile, export, functional transforms, modes, odd inputs."""

import pytest
import torch
from frontends import VARIANTS, Torch, sample_arrays

from tk_core import kernels
from tk_torch.library import bind

OPS = list(VARIANTS)
FRONT = Torch()


def sample(name, lead=(3,), hidden=128, grad=False, seed=0):
    """The operation, its tensors and attributes."""
    op, arrays, attrs = sample_arrays(name, lead, hidden, seed=seed)
    tensors = [FRONT.array(a) for a in arrays]
    if grad:
        tensors = [t if t is None else t.requires_grad_() for t in tensors]
    return op, tensors, attrs


def outputs(result):
    return result if isinstance(result, tuple) else (result,)


def total(result):
    return sum((t.float() * (i + 1)).square().sum() for i, t in enumerate(outputs(result)))


def gradients(f, tensors):
    return torch.autograd.grad(total(f(*tensors)), [t for t in tensors if t is not None])


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        assert (x is None) == (y is None)
        assert x is None or torch.equal(x, y)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("lead", [(3,), (2, 5)])
def test_opcheck(name, lead):
    op, tensors, attrs = sample(name, lead, grad=True)
    bound, values = bind(op), op.forward.attributes(attrs)
    torch.library.opcheck(getattr(torch.ops.tk, op.name).default, (*tensors, *values))
    plain = [t if t is None else t.detach() for t in tensors]
    outs = bound.forward.run(plain, values, bound.forward.all)
    known = dict(zip((*op.forward.ins, *op.forward.outs), (*plain, *outs), strict=True))
    known |= {f"d_{k}": torch.randn_like(v) for k, v in zip(op.forward.outs, outs, strict=True)}
    args = [known[k] for k in op.backward.ins]
    torch.library.opcheck(getattr(torch.ops.tk, f"{op.name}_bwd").default, (*args, *values, bound.backward.all))


@pytest.mark.parametrize("name", OPS)
def test_compiled_graph_holds_exactly_our_operators_and_one_compile_serves_all_row_counts(name):
    op, tensors, attrs = sample(name, (13,))
    bound, graphs = bind(op), []

    def backend(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    f = torch.compile(lambda *a: bound(*a, **attrs), fullgraph=True, dynamic=True, backend=backend)
    for rows in (13, 2, 9):
        _, tensors, _ = sample(name, (rows,))
        assert_same(outputs(f(*tensors)), outputs(bound(*tensors, **attrs)))
    assert len(graphs) == 1
    assert [t for t in graphs[0] if "getitem" not in t and "sym" not in t] == [f"tk.{op.name}.default"]


@pytest.mark.parametrize("name", OPS)
def test_compiled_gradients_equal_eager_ones(name):
    op, tensors, attrs = sample(name, (5,), grad=True)
    bound = bind(op)
    f = torch.compile(lambda *a: bound(*a, **attrs), fullgraph=True, dynamic=True, backend="aot_eager")
    assert_same(gradients(f, tensors), gradients(lambda *a: bound(*a, **attrs), tensors))


@pytest.mark.parametrize("name", OPS)
def test_functional_grad_vmap_and_their_compositions(name):
    op, tensors, attrs = sample(name, (3,))
    bound = bind(op)
    present = [i for i, t in enumerate(tensors) if t is not None]

    def loss(*some):
        args = list(tensors)
        for i, t in zip(present, some, strict=True):
            args[i] = t
        return total(bound(*args, **attrs))

    leaves = [tensors[i] for i in present]
    argnums = tuple(range(len(leaves)))
    plain = [t.detach().clone().requires_grad_() for t in leaves]
    want = torch.autograd.grad(loss(*plain), plain)
    assert_same(torch.func.grad(loss, argnums)(*leaves), want)
    batches = [torch.stack([t, t.flip(0) if t.ndim else t]) for t in leaves]
    for k in range(len(leaves)):  # each argument batched alone, the others shared
        dims = tuple(0 if i == k else None for i in range(len(leaves)))
        args = [batches[i] if i == k else t for i, t in enumerate(leaves)]
        got = torch.func.vmap(torch.func.grad(loss, argnums), dims)(*args)
        loop = [torch.func.grad(loss, argnums)(*(a[j] if i == k else a for i, a in enumerate(args))) for j in range(2)]
        assert_same(got, [torch.stack(column) for column in zip(*loop, strict=True)])
    got = torch.func.vmap(torch.func.grad(loss, argnums))(*batches)
    loop = [torch.func.grad(loss, argnums)(*(b[j] for b in batches)) for j in range(2)]
    assert_same(got, [torch.stack(column) for column in zip(*loop, strict=True)])
    moved = [b.movedim(0, 1) if b.ndim > 1 else b for b in batches]
    got = torch.func.vmap(loss, tuple(1 if b.ndim > 1 else 0 for b in batches))(*moved)
    assert torch.equal(got, torch.stack([loss(*(b[j] for b in batches)) for j in range(2)]))
    each = [b.clone().requires_grad_() for b in batches]
    outer = torch.autograd.grad(torch.func.vmap(loss)(*each).sum(), each)
    assert_same(outer, [torch.stack(column) for column in zip(*loop, strict=True)])


@pytest.mark.parametrize("name", OPS)
def test_double_backward_and_forward_mode_raise(name):
    op, tensors, attrs = sample(name, (2,), grad=True)
    bound = bind(op)
    leaves = [t for t in tensors if t is not None]
    first = torch.autograd.grad(total(bound(*tensors, **attrs)), leaves, create_graph=True, allow_unused=True)
    with pytest.raises(RuntimeError, match=f"{op.name}: double backward is not implemented"):
        sum(g.float().sum() for g in first if g is not None and g.requires_grad).backward()
    plain = tuple(t.detach() for t in leaves)
    others = [t if t is None else t.detach() for t in tensors]

    def forward(*some):
        it = iter(some)
        return bound(*(None if t is None else next(it) for t in others), **attrs)

    with pytest.raises(RuntimeError, match=f"{op.name}: forward mode is not implemented"):
        torch.func.jvp(forward, plain, plain)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match=f"{op.name}: forward mode is not implemented"):
        forward(*(torch.autograd.forward_ad.make_dual(t, t) for t in plain))


@pytest.mark.parametrize("name", OPS)
def test_strided_offset_and_expanded_inputs_equal_contiguous_ones_and_copies_are_counted(name):
    op, tensors, attrs = sample(name, (6,), grad=True)
    bound = bind(op)
    want = [*outputs(bound(*tensors, **attrs)), *gradients(lambda *a: bound(*a, **attrs), tensors)]

    def padded(t):
        big = torch.zeros(*t.shape[:-1], t.shape[-1] + 8, dtype=t.dtype)
        return big[..., : t.shape[-1]].copy_(t)

    def odd(t):
        return torch.zeros(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape).copy_(t)

    def transposed(t):
        return t.movedim(0, -1).contiguous().movedim(-1, 0)

    def every_other(t):
        return torch.zeros(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype)[..., ::2].copy_(t)

    for change in (padded, odd, transposed, every_other):
        changed = [t if t is None else change(t.detach()).requires_grad_() for t in tensors]
        kernels.reset_stats()
        got = outputs(bound(*changed, **attrs))
        strided = sum(t is not None and not (t.is_contiguous() and t.data_ptr() % 16 == 0) for t in changed)
        assert kernels.stats()["copies"] == strided
        assert_same([*got, *gradients(lambda *a: bound(*a, **attrs), changed)], want)


@pytest.mark.parametrize("name", OPS)
def test_expanded_and_strided_cotangents(name):
    op, tensors, attrs = sample(name, (4,), grad=True)
    bound, leaves = bind(op), [t for t in sample(name, (4,), grad=True)[1] if t is not None]
    tensors = leaves if len(leaves) == len(tensors) else tensors
    leaves = [t for t in tensors if t is not None]
    outs = outputs(bound(*tensors, **attrs))
    for make in (
        lambda o: torch.ones((), dtype=o.dtype).expand(o.shape),
        lambda o: torch.randn(*o.shape[:-1], 2 * o.shape[-1]).to(o.dtype)[..., ::2],
        lambda o: torch.randn(*o.shape[1:], o.shape[0]).to(o.dtype).movedim(-1, 0),
    ):
        given = [make(o) for o in outs]
        got = torch.autograd.grad(outs, leaves, given, retain_graph=True, allow_unused=True)
        want = torch.autograd.grad(outs, leaves, [g.contiguous() for g in given], retain_graph=True, allow_unused=True)
        assert_same(got, want)


@pytest.mark.parametrize("name", OPS)
def test_nothing_that_was_given_is_written_and_backward_may_run_twice(name):
    op, tensors, attrs = sample(name, (4,), grad=True)
    bound, leaves = bind(op), [t for t in tensors if t is not None]
    outs = outputs(bound(*tensors, **attrs))
    given = [torch.randn_like(o) for o in outs]
    before = [t.detach().clone() for t in (*leaves, *given, *outs)]
    first = torch.autograd.grad(outs, leaves, given, retain_graph=True, allow_unused=True)
    second = torch.autograd.grad(outs, leaves, given, allow_unused=True)
    assert_same(first, second)
    assert_same(before, [t.detach() for t in (*leaves, *given, *outs)])


@pytest.mark.parametrize("name", OPS)
def test_forward_has_the_same_bits_with_and_without_gradients(name):
    op, tensors, attrs = sample(name, (7,), grad=True)
    bound = bind(op)
    want = [t.detach() for t in outputs(bound(*tensors, **attrs))]
    with torch.no_grad():
        assert_same(outputs(bound(*tensors, **attrs)), want)
    with torch.inference_mode():
        assert_same(outputs(bound(*(t if t is None else t.detach() for t in tensors), **attrs)), want)
    assert_same(outputs(bound(*(t if t is None else t.detach() for t in tensors), **attrs)), want)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("lead", [(0,), (4, 0)])
def test_zero_rows(name, lead):
    op, tensors, attrs = sample(name, lead, grad=True)
    bound, leaves = bind(op), [t for t in tensors if t is not None]
    outs = outputs(bound(*tensors, **attrs))
    assert all(o.shape[: len(lead)] == torch.Size(lead) for o in outs)
    for leaf, g in zip(leaves, torch.autograd.grad(outs, leaves, [torch.zeros_like(o) for o in outs], allow_unused=True), strict=True):
        assert g.shape == leaf.shape
        assert not g.any()
    if len(lead) == 1:
        f = torch.compile(lambda *a: bound(*a, **attrs), fullgraph=True, backend="aot_eager")
        assert_same(outputs(f(*tensors)), outs)


@pytest.mark.parametrize("name", OPS)
def test_two_hundred_row_counts_compile_nothing(name):
    op, tensors, attrs = sample(name, (5,))
    bound = bind(op)
    bound(*tensors, **attrs)
    kernels.reset_stats()
    for rows in range(1, 201):
        bound(*sample(name, (rows,))[1], **attrs)
    stats = kernels.stats()
    assert (stats["compiles"], stats["loads"]) == (0, 0)


@pytest.mark.parametrize("name", OPS)
def test_export_and_checkpoint(name):
    op, tensors, attrs = sample(name, (6,), grad=True)
    bound = bind(op)
    want = gradients(lambda *a: bound(*a, **attrs), tensors)
    assert_same(
        gradients(lambda *a: torch.utils.checkpoint.checkpoint(lambda *b: bound(*b, **attrs), *a, use_reentrant=False), tensors), want
    )

    class Module(torch.nn.Module):
        def forward(self, *some):
            return bound(*some, **attrs)

    plain = tuple(t.detach() for t in tensors if t is not None)
    if len(plain) == len(tensors):
        program = torch.export.export(Module(), plain)
        assert_same(outputs(program.module()(*plain)), outputs(bound(*plain, **attrs)))


@pytest.mark.parametrize("name", OPS)
def test_bad_arguments_raise_the_same_in_eager_and_in_fake_tensors(name):
    op, tensors, attrs = sample(name, (3,))
    bound = bind(op)
    for i, t in enumerate(tensors):
        if t is None:
            continue
        wrong = {
            "dtype": t.to(torch.float64),
            "axes": t[..., None].expand(*t.shape, 3).contiguous().sum(0) if t.ndim > 1 else t[None],
            "kind": 3.5,
        }
        args_by_rows = [arg.rows for arg in op.forward.ins.values()]
        if not args_by_rows[i]:
            wrong["size"] = torch.cat([t, t], -1)
        elif sum(args_by_rows) > 1:
            wrong["rows"] = t[:2]
        for what, value in wrong.items():
            args = [value if j == i else a for j, a in enumerate(tensors)]
            texts = []
            kind = TypeError if what in ("dtype", "kind") else (TypeError, ValueError)
            with pytest.raises(kind) as error:
                bound(*args, **attrs)
            texts.append(str(error.value))
            assert texts[0].startswith(f"{op.name}: ")
            if what == "kind":
                continue
            from torch._subclasses.fake_tensor import FakeTensorMode

            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fakes = [a if a is None else mode.from_tensor(a) for a in args]
                with pytest.raises(kind) as error:
                    bound(*fakes, **attrs)
            assert str(error.value) == texts[0]
    with pytest.raises(TypeError, match=f"{op.name}: nonsense: expected one of the attributes"):
        bound(*tensors, **attrs, nonsense=1)


def test_autocast_leaves_the_documented_dtypes_alone():
    op, (x, mix), _ = sample("mhc_pre_apply_mix", (3,), grad=True)
    bound = bind(op)
    want = bound(x, mix)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(bound(x, mix), want)
        low = torch.ones(4, 4).bfloat16() @ torch.ones(4, 4)  # what autocast makes of a product is bf16
        with pytest.raises(TypeError, match="mhc_pre_apply_mix: mix: expected dtype float32, got bfloat16"):
            bound(x.detach(), low[:3, :, None])


def test_wrong_number_of_arguments():
    op, (x, _), _ = sample("mhc_pre_apply_mix", (3,))
    with pytest.raises(TypeError, match=r"mhc_pre_apply_mix: arguments: expected 2 arrays \(x, mix\), got 1"):
        bind(op)(x)
