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
    dist.destroy_process_group()


@pytest.mark.slow
def test_row_sharded_operations(tmp_path):
    variants = [name for name, case in VARIANTS.items() if name == case.op and "norm_fn" not in name]
    mp.spawn(worker, (2, tmp_path / "store", variants), nprocs=2)
