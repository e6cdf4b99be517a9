"""The casts of both front ends on NumPy arrays. Column-major scales come and go as the oracle has them, as views of their storage."""

import functools

import numpy as np
from frontends import Jax, Torch

from tk_core.reference import quant_formats as qf


def is_column_major(sf):
    """Whether scales are a transposed view of their storage."""
    return sf.ndim == 2 and sf.size and sf.shape[1] != 1 and sf.strides[0] == sf.itemsize and sf.strides[1] != sf.itemsize


def stored(result, col=None):
    """A result of the oracle with scales in storage orientation."""
    if isinstance(result, tuple):
        return (result[0], *(stored(sf, col) for sf in result[1:]))
    return qf.sf_storage(result) if (is_column_major(result) if col is None else col) else result


class QuantTorch(Torch):
    """tk_torch.quant; column-major results are returned as their storage, after their strides have been looked at."""

    def quant(self, name, *args, **named):
        from tk_torch import quant

        args = [self.given(a) for a in args]
        return self.taken(getattr(quant, name)(*args, **{k: self.given(v) for k, v in named.items()}), named)

    def given(self, a):
        if isinstance(a, tuple) and a and isinstance(a[0], np.ndarray):
            return tuple(map(self.given, a))
        if isinstance(a, np.ndarray):
            if is_column_major(a):
                return self.array(qf.sf_storage(a)).t()[: a.shape[0]]
            return self.array(a)
        return a

    def taken(self, result, named):
        if isinstance(result, tuple):
            return (self.numpy(result[0]), *(self.scales(t, named) for t in result[1:]))
        return self.scales(result, named) if result is not None else None

    def scales(self, t, named):
        if not named.get("use_tma_aligned_col_major_sf"):
            assert t.is_contiguous()
            return self.numpy(t)
        R, Ra = t.shape[0], t.stride(1)
        assert t.stride(0) == 1
        assert Ra >= R
        assert Ra * t.element_size() % 16 == 0
        assert t.storage_offset() == 0
        return self.numpy(t.as_strided((t.shape[1], Ra), (Ra, 1)))

    def numpy(self, t):
        if t.element_size() == 1:
            names = {self.torch.float8_e4m3fn: "float8_e4m3fn", self.torch.int8: "int8", self.torch.uint8: "uint8"}
            return t.detach().cpu().contiguous().view(self.torch.uint8).numpy().view(np.dtype(names[t.dtype]))
        return super().numpy(t)


class QuantJax(Jax):
    """tk_jax.quant, under jit unless told otherwise."""

    jitted = True

    def quant(self, name, *args, **named):
        from tk_jax import quant

        arrays, fill = [], []

        def given(a):
            if isinstance(a, tuple) and a and isinstance(a[0], np.ndarray):
                if len(a) > 1 and is_column_major(a[1]):
                    named["x_sf_col_major"] = True
                return tuple(given(stored(part) if i else part) for i, part in enumerate(a))
            if isinstance(a, np.ndarray):
                arrays.append(a)
                return _Slot(len(arrays) - 1)
            return a

        fill = [given(a) for a in args]
        named = {k: given(v) for k, v in named.items()} | {k: v for k, v in named.items() if k == "x_sf_col_major"}

        def run(*given):
            put = functools.partial(_filled, given)
            return getattr(quant, name)(*map(put, fill), **{k: put(v) for k, v in named.items()})

        out = (self.jax.jit(run) if self.jitted else run)(*map(self.array, arrays))
        return tuple(map(self.numpy, out)) if isinstance(out, tuple) else self.numpy(out)


class _Slot(int):
    """The place of an array among the arguments."""


def _filled(arrays, a):
    if isinstance(a, _Slot):
        return arrays[a]
    return tuple(_filled(arrays, part) for part in a) if isinstance(a, tuple) else a


FRONTS = {"torch": QuantTorch, "jax": QuantJax}
