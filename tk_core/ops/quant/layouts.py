"""Scale layouts of the quantization casts: what is stored, in which shape, and how a kernel reads it.

Kernels know scales in storage orientation only. The scales of R x G blocks are (R, G); column-major ones are (G, Ra) with Ra
rows up to a multiple of 16 bytes, the padding zero. Packed exponents take four neighbouring blocks a word, the first one low,
the rest of the last word zero: along the channels, or along the tokens where every channel has its own scale.
"""

from tk_core.bits import u32
from tk_core.ops.quant.bits import U32
from tk_core.ops.quant.scales import SCALES

# What the attribute `sf` of an operation names: fp32, fp32 that holds powers of two, four of their exponents a word, E4M3.
KINDS = {"plain": SCALES["fp32"], "round": SCALES["ue8m0"], "packed": SCALES["ue8m0"], "e4m3": SCALES["e4m3"]}

E4M3_DTYPE = "float8_e4m3fn"
# Blocks that share a word of packed exponents.
PACK = 4


def sf_dtype(kind: str) -> str:
    """The dtype of stored scales."""
    return {"packed": "int32", "e4m3": E4M3_DTYPE}.get(kind, "float32")


def aligned_rows(kind: str, R: int) -> int:
    """R up to the next multiple of 16 bytes of scales."""
    unit = 16 if kind == "e4m3" else 4
    return (R + unit - 1) // unit * unit


def sf_shape(kind: str, col: bool, R: int, G: int) -> tuple[int, int]:
    """Of the storage of R x G scales."""
    words = -(-G // PACK) if kind == "packed" else G
    return (words, aligned_rows(kind, R)) if col else (R, words)


def read_scale(P, sf, dtype: str, col: bool, i, j, tokens: bool = False):
    """The fp32 scale of block (i, j) of an argument in storage orientation; `tokens`: packed along the token blocks."""
    if dtype != "int32":
        stored = sf[j, i] if col else sf[i, j]
        return SCALES["e4m3"].value(P, P.Cast(U32, P.reinterpret(stored, "uint8"))) if dtype == E4M3_DTYPE else stored
    if tokens:
        word, at = sf[i // PACK, j], i % PACK
    else:
        word, at = (sf[j // PACK, i] if col else sf[i, j // PACK]), j % PACK
    exponent = (P.reinterpret(word, U32) >> P.Cast(U32, at * 8)) & u32(0xFF)
    return SCALES["ue8m0"].value(P, exponent)
