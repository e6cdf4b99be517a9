"""Rules and operations on NumPy arrays: on the CUDA device where there is one, otherwise on the C target."""

import ml_dtypes
import numpy as np

from tk_core.arrays import _run_numpy

try:
    import torch
except ImportError:  # the C target takes NumPy arrays as they are
    torch = None

CUDA = torch is not None and torch.cuda.is_available()


def tensor(a):
    """A tensor of the device with the array's bits; None stays."""
    if a is None:
        return None
    dtype = getattr(torch, a.dtype.name)
    if not a.size:
        return torch.empty(a.shape, dtype=dtype).cuda()
    bits = np.ascontiguousarray(a).reshape(-1).view(np.uint8).copy()
    return torch.from_numpy(bits).cuda().view(dtype).reshape(a.shape)


def array(t):
    """An array with the tensor's bits."""
    name = str(t.dtype).removeprefix("torch.")
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    if not t.numel():
        return np.empty(tuple(t.shape), dtype)
    return t.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().view(dtype).reshape(tuple(t.shape))


def run(rule, arrays, attributes):
    """All results of a rule by name. It is planned anew for every call."""
    if not CUDA:
        return _run_numpy(rule, arrays, attributes)
    from tk_torch.launch import Runner

    outs = Runner(rule).run([tensor(a) for a in arrays], rule.attributes(attributes), frozenset(rule.outs))
    return {name: array(out) for name, out in zip(rule.outs, outs, strict=True)}


def call(op, *arrays, **attributes):
    """The public results of an operation."""
    return op.public(run(op.forward, arrays, attributes))
