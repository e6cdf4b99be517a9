"""Constants and selections of generated code. TileLang is imported when a kernel is built, not before."""

import struct
from typing import Any


def f32_bits(value: float) -> int:
    """The bit pattern of an fp32 number."""
    return struct.unpack("<I", struct.pack("<f", value))[0]


def u32(value: int) -> Any:
    """A uint32 constant."""
    from tilelang import tvm

    return tvm.tirx.const(value, "uint32")


def select(condition: Any, a: Any, b: Any) -> Any:
    """Both sides are evaluated: a load that must be guarded needs an `if`."""
    from tilelang import tvm

    return tvm.tirx.Select(condition, a, b)
