"""Inputs and comparisons that the tests of the quantization casts share."""

import ml_dtypes
import numpy as np

from tk_core.reference import quant_formats as qf

BF16 = np.dtype(ml_dtypes.bfloat16)
F8 = np.dtype(ml_dtypes.float8_e4m3fn)
NAMES = list(qf.FORMATS)
FLT_MAX = np.finfo(np.float32).max
ALL_BF16 = np.arange(1 << 16, dtype=np.uint16).view(BF16).astype(np.float32)
# (column-major, rounded, packed)
FLAG_SETS = [
    (False, False, False),
    (True, False, False),
    (False, True, False),
    (True, True, False),
    (False, True, True),
    (True, True, True),
]
PUBLIC_FLAGS = ("use_tma_aligned_col_major_sf", "round_sf", "use_packed_ue8m0")
SIZES = [(1, 64), (5, 576), (33, 128), (130, 192), (257, 320)]


def f32(values):
    """Golden inputs: words of eight digits, or numbers."""
    return np.array([qf.from_bits(np.array(int(v, 16))) if isinstance(v, str) else v for v in values], np.float32)


def normal(shape, seed=0, scale=1.0):
    return (np.random.default_rng([seed, *shape]).standard_normal(shape) * scale).astype(np.float32)


def same(a, b):
    """Same dtype, shape and bytes."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def same_pair(a, b):
    same(a[0], b[0])
    same(a[1], b[1])


def codes_of(data, fmt):
    return qf.FORMATS[fmt].load(data)


def difference(x, y):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return ((x - y) ** 2).sum() / (x**2 + y**2).sum()
