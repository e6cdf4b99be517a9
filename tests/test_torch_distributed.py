"""DTensor on two processes: rows stay sharded, parameter gradients are partial sums, values equal the plain ones."""

import pytest
import torch
import torch.multiprocessing as mp
from frontends import VARIANTS, Torch, sample_arrays


def worker(rank, size, path, variants):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    from tk_torch.library import bind

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    front = Torch()
    for variant in variants:
        for lead, axis in (((4,), 0), ((3, 4), 1)):
            op, arrays, attrs = sample_arrays(variant, lead)
            bound = bind(op)
            plain = [front.array(a) for a in arrays]
            plain = [t if t is None else t.requires_grad_() for t in plain]
            rows = [arg.rows for arg in op.forward.ins.values()]
            spread = [
                None if t is None else distribute_tensor(t.detach(), mesh, [Shard(axis) if r else Replicate()]).requires_grad_()
                for t, r in zip(plain, rows, strict=True)
            ]
            outs, wants = bound(*spread, **attrs), bound(*plain, **attrs)
            outs, wants = (o if isinstance(o, tuple) else (o,) for o in (outs, wants))
            for out, want in zip(outs, wants, strict=True):
                assert out.placements == (Shard(axis),), (variant, out.placements)
                assert torch.equal(out.full_tensor(), want), variant
            sum(o.float().square().sum() for o in outs).full_tensor().backward()
            sum(o.float().square().sum() for o in wants).backward()
            for t, p, r in zip(spread, plain, rows, strict=True):
                if t is None:
                    continue
                assert t.grad.placements == ((Shard(axis),) if r else (Partial(),)), (variant, t.grad.placements)
                torch.testing.assert_close(t.grad.full_tensor(), p.grad, rtol=1e-4, atol=1e-4)
    op, arrays, attrs = sample_arrays("mhc_pre_apply_mix", (4,))
    x, mix = map(front.array, arrays)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        bind(op)(distribute_tensor(x, mesh, [Shard(0)]), mix)
    casts(mesh)
    dist.destroy_process_group()


def casts(mesh):
    """Casts by rows keep sharded rows where they are; scales in columns need all rows, which are gathered for them."""
    from torch.distributed.tensor import Shard, distribute_tensor

    from tk_torch import quant

    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    spread = distribute_tensor(x, mesh, [Shard(0)])
    for out, want in zip(quant.per_token_cast(spread, "e4m3", 32), quant.per_token_cast(x, "e4m3", 32), strict=True):
        assert out.placements == (Shard(0),)
        # gloo cannot gather FP8
        assert torch.equal(out.to_local().float(), want.chunk(mesh.size())[mesh.get_rank()].float())
    leaf = spread.detach().requires_grad_()
    y = quant.fake_quant(leaf, "e4m3", 32)
    assert y.placements == (Shard(0),)
    assert torch.equal(y.full_tensor(), quant.fake_quant(x, "e4m3", 32))
    y.sum().backward()
    assert torch.equal(leaf.grad.full_tensor(), torch.ones_like(x))
    whole = quant.per_token_cast(spread, "e4m3", 32, None, True), quant.per_token_cast(x, "e4m3", 32, None, True)
    for out, want in zip(*whole, strict=True):
        assert torch.equal(out.to_local().float(), want.float())


@pytest.mark.slow
def test_row_sharded_operations(tmp_path):
    variants = [name for name, case in VARIANTS.items() if name == case.op and "norm_fn" not in name]
    mp.spawn(worker, (2, tmp_path / "store", variants), nprocs=2)
