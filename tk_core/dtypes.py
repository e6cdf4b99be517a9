"""Names of element types, and what DLPack and NumPy call them."""

from __future__ import annotations

from typing import Any, NamedTuple


class DType(NamedTuple):
    """A DLPack element type: type code, bits, and the storage that the C target gives it."""

    code: int
    bits: int
    c_storage: str


# The C code generator of TileLang knows integers of 8 to 64 bits, float and double; the rest is stored as bits there.
DTYPES: dict[str, DType] = {
    "float32": DType(2, 32, "float32"),
    "float64": DType(2, 64, "float64"),
    "float16": DType(2, 16, "float16"),
    "bfloat16": DType(4, 16, "uint16"),
    "float8_e4m3fn": DType(10, 8, "uint8"),
    "float8_e5m2": DType(12, 8, "uint8"),
    "float8_e8m0fnu": DType(14, 8, "uint8"),
    "int8": DType(0, 8, "int8"),
    "int16": DType(0, 16, "int16"),
    "int32": DType(0, 32, "int32"),
    "int64": DType(0, 64, "int64"),
    "uint8": DType(1, 8, "uint8"),
    "uint16": DType(1, 16, "uint16"),
    "uint32": DType(1, 32, "uint32"),
    "bool": DType(6, 8, "uint8"),
}

SHORT = {
    "f32": "float32",
    "f64": "float64",
    "f16": "float16",
    "bf16": "bfloat16",
    "e4m3": "float8_e4m3fn",
    "i8": "int8",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "u32": "uint32",
}


def numpy_dtype(name: str) -> Any:
    """The NumPy dtype of that name; ml_dtypes holds those that NumPy lacks."""
    import ml_dtypes
    import numpy as np

    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)
