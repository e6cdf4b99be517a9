"""The same test bodies for both frameworks: arrays in and out as NumPy, gradients for chosen cotangents."""

import ml_dtypes  # noqa: F401 - NumPy learns bfloat16
import numpy as np

from tk_core import registry
from tk_core.bench.cases import CASES, inputs

# Every operation with a gradient, and its variants, by a name that pytest shows.
VARIANTS = {
    f"{name}-{i}" if i else name: case
    for name, op in registry.ops().items()
    if op.backward is not None and name in CASES
    for i, case in enumerate(CASES[name].variants())
}


def sample_arrays(variant, lead=(3,), hidden=128, streams=4, seed=0):
    """The operation, NumPy inputs and attributes of a variant."""
    case = VARIANTS[variant]
    op = registry.get(case.op)
    return op, inputs(case, op.forward, lead, hidden, streams, seed), dict(case.attrs)


class Torch:
    name = "torch"

    def __init__(self):
        import torch

        self.torch = torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def array(self, a):
        if a is None:
            return None
        t = (
            self.torch.from_numpy(np.ascontiguousarray(a).view(np.uint8).reshape(-1).copy())
            if a.size
            else self.torch.empty(0, dtype=self.torch.uint8)
        )
        return t.view(getattr(self.torch, a.dtype.name)).reshape(a.shape).to(self.device)

    def numpy(self, t):
        if t is None:
            return None
        t = t.detach().cpu().contiguous()
        if t.dtype is self.torch.bfloat16:
            return t.view(self.torch.int16).numpy().view(np.dtype("bfloat16"))
        return t.numpy()

    def op(self, op):
        from tk_torch.library import bind

        return bind(op)

    def forward(self, op, arrays, **attrs):
        outs = self.op(op)(*map(self.array, arrays), **attrs)
        return [self.numpy(t) for t in (outs if isinstance(outs, tuple) else (outs,))]

    def gradients(self, op, arrays, cotangents, wrt=None, **attrs):
        """Results, and gradients of the arguments `wrt` (default: all) for cotangents, None where there is none."""
        wrt = [i for i, a in enumerate(arrays) if a is not None] if wrt is None else wrt
        tensors = [self.array(a) for a in arrays]
        for i in wrt:
            tensors[i].requires_grad_()
        outs = self.op(op)(*tensors, **attrs)
        outs = outs if isinstance(outs, tuple) else (outs,)
        chosen = [(o, self.array(g)) for o, g in zip(outs, cotangents, strict=True) if g is not None]
        grads = self.torch.autograd.grad([o for o, _ in chosen], [tensors[i] for i in wrt], [g for _, g in chosen], allow_unused=True)
        return [self.numpy(o) for o in outs], [self.numpy(g) for g in grads]


class Jax:
    name = "jax"

    def __init__(self):
        import jax

        self.jax = jax

    def array(self, a):
        return None if a is None else self.jax.numpy.asarray(a)

    def numpy(self, a):
        return None if a is None else np.asarray(a)

    def op(self, op):
        from tk_jax.vjp import bind

        return bind(op)

    def forward(self, op, arrays, **attrs):
        outs = self.jax.jit(lambda *a: self.op(op)(*a, **attrs))(*map(self.array, arrays))
        return [self.numpy(o) for o in (outs if isinstance(outs, tuple) else (outs,))]

    def gradients(self, op, arrays, cotangents, wrt=None, **attrs):
        wrt = [i for i, a in enumerate(arrays) if a is not None] if wrt is None else wrt
        fixed = [self.array(a) for a in arrays]

        def chosen(*leaves):
            args = list(fixed)
            for i, leaf in zip(wrt, leaves, strict=True):
                args[i] = leaf
            outs = self.op(op)(*args, **attrs)
            outs = outs if isinstance(outs, tuple) else (outs,)
            return [o for o, g in zip(outs, cotangents, strict=True) if g is not None], outs

        def run(leaves, given):
            _, pull, outs = self.jax.vjp(chosen, *leaves, has_aux=True)
            return outs, pull(given)

        outs, grads = self.jax.jit(run)([fixed[i] for i in wrt], [self.array(g) for g in cotangents if g is not None])
        return [self.numpy(o) for o in outs], [self.numpy(g) for g in grads]


def same_bits(a, b):
    """Equal to the bit, NaN included."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
