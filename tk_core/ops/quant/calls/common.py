"""What the public casts share: how arguments are judged, and what a front end is to run.

A front end describes its arrays (`Data`, `Scale`), one function here per public function judges the call and answers with a `Request`,
and the front end runs it. So both front ends accept the same calls, refuse the others in the same words, and launch the same kernels.
"""

from typing import Any, NamedTuple

from tk_core import config
from tk_core.dtypes import SHORT
from tk_core.errors import type_error, value_error
from tk_core.op import Op
from tk_core.ops.quant.formats import FORMATS
from tk_core.ops.quant.layouts import PACK

FLOATS = (SHORT["bf16"], SHORT["f32"])
E4M3, INT8, UINT8, INT32 = SHORT["e4m3"], SHORT["i8"], SHORT["u8"], SHORT["i32"]
F32 = SHORT["f32"]


class Data(NamedTuple):
    """An array of values or codes."""

    shape: tuple[int, ...]
    dtype: str


class Scale(NamedTuple):
    """Scales in storage orientation; `col`: column-major, so the shape is (G, rows up to a multiple of 16 bytes or exactly)."""

    shape: tuple[int, ...]
    dtype: str
    col: bool


class Request(NamedTuple):
    """What to run for the public function `name`: an operation, its attributes, the results to compute; and how the scales come out.

    `rows` is the number of rows of the logical scales where they are column-major, otherwise 0.
    """

    name: str
    op: Op
    attrs: dict[str, Any]
    wanted: tuple[str, ...]
    rows: int = 0


# ------------------------------------------------------------------ single arguments


def flag(op: str, argument: str, value: Any) -> bool:
    """A bool."""
    if not isinstance(value, bool):
        raise type_error(op, argument, "a bool", f"{value!r} of type {type(value).__name__}")
    return value


def integer(op: str, argument: str, value: Any) -> int:
    """An int that is no bool."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise type_error(op, argument, "an int", f"{value!r} of type {type(value).__name__}")
    return value


def one_of(op: str, argument: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    """One of a few values."""
    kinds = {type(a) for a in allowed}
    if type(value) not in kinds:
        raise type_error(op, argument, f"a value of type {' or '.join(sorted(k.__name__ for k in kinds))}", f"{value!r}")
    if value not in allowed:
        raise value_error(op, argument, " or ".join(map(repr, allowed)), repr(value))
    return value


def pair(op: str, argument: str, value: Any) -> tuple[int, int]:
    """Two ints."""
    if not isinstance(value, tuple | list):
        raise type_error(op, argument, "a pair of ints (tokens, channels)", f"{value!r}")
    if len(value) != 2:
        raise value_error(op, argument, "a pair of ints (tokens, channels)", f"{value!r}")
    return integer(op, argument, value[0]), integer(op, argument, value[1])


def matrix(op: str, argument: str, data: Data, dtypes: tuple[str, ...], what: str = "(M, H)") -> tuple[int, int]:
    """The two sizes of an array of one of some dtypes."""
    if data.dtype not in dtypes:
        raise type_error(op, argument, f"dtype {' or '.join(dtypes)}", data.dtype)
    if len(data.shape) != 2:
        raise value_error(op, argument, f"shape {what}", tuple(data.shape))
    return data.shape[0], data.shape[1]


def multiple(op: str, argument: str, name: str, size: int, of: int) -> None:
    """A size is a positive multiple of something."""
    if size % of or size == 0:
        raise value_error(op, argument, f"{name} a positive multiple of {of}", f"{name} = {size}")


def rows_multiple(op: str, argument: str, name: str, size: int, of: int) -> None:
    """A number of rows is a multiple of something; there may be none."""
    if size % of:
        raise value_error(op, argument, f"{name} a multiple of {of}", f"{name} = {size}")


# ------------------------------------------------------------------ scales


def sf_kind(op: str, round_sf: Any, packed: Any = False, e4m3_sf: Any = False) -> str:
    """The kind of scales (`layouts.KINDS`) that some flags name."""
    flag(op, "round_sf", round_sf)
    flag(op, "use_packed_ue8m0", packed)
    flag(op, "use_e4m3_sf", e4m3_sf)
    if packed and not round_sf:
        raise value_error(op, "use_packed_ue8m0", "round_sf=True with it", "round_sf=False")
    if e4m3_sf and (round_sf or packed):
        raise value_error(op, "use_e4m3_sf", "neither round_sf nor use_packed_ue8m0 with it", f"{round_sf=}, use_packed_ue8m0={packed}")
    return "e4m3" if e4m3_sf else "packed" if packed else "round" if round_sf else "plain"


def clamp(fmt: str, kind: str) -> float:
    """The smallest amax that a block is scaled by, as the process has it now."""
    return FORMATS[fmt].clamp if fmt == "e5m6" else config.get_amax_clamp_for_quant(fmt, kind == "e4m3")


def source(op: str, data: Data, sf: Scale | None, block: Any, argument: str, floats: tuple[str, ...], codes: tuple[str, ...]) -> tuple:
    """Rows, channels and input block of an argument that is plain or quantized.

    `argument` names the block size, which comes with quantized data and only with them.
    """
    if sf is None:
        if block is not None:
            raise value_error(op, argument, "None with a tensor that is not quantized", f"{block!r}")
        return *matrix(op, "x", data, floats), None
    if block is None:
        raise value_error(op, argument, "the block size of the quantized tensor", "None")
    rows, columns = matrix(op, "x[0]", data, codes, "(M, physical H)")
    return rows, columns * 2 if data.dtype == INT8 else columns, block


def judge_scale(op: str, argument: str, sf: Scale, R: int, G: int, dtypes: tuple[str, ...], tokens: bool = False) -> None:
    """The scales of R x G blocks; `tokens`: packed exponents lie along the tokens."""
    if sf.dtype not in dtypes:
        raise type_error(op, argument, f"dtype {' or '.join(dtypes)}", sf.dtype)
    if len(sf.shape) != 2:
        raise value_error(op, argument, "two axes", tuple(sf.shape))
    packed = sf.dtype == INT32
    if tokens and sf.col:
        raise value_error(op, argument, "row-major scales, one a channel", "column-major ones")
    if packed and tokens:
        want: tuple[int, int] = (-(-R // PACK), G)
    else:
        want = (R, -(-G // PACK) if packed else G)
    if not sf.col:
        if tuple(sf.shape) != want:
            raise value_error(op, argument, f"shape {want}", tuple(sf.shape))
    elif sf.shape[0] != want[1] or sf.shape[1] < want[0]:
        raise value_error(op, argument, f"column-major scales of shape {want}, stored as ({want[1]}, {want[0]} or more)", tuple(sf.shape))


def judge_out(op: str, argument: str, out: Data | None, shape: tuple[int, int], dtype: str) -> None:
    """A result that the caller provides."""
    if out is None:
        return
    if out.dtype != dtype:
        raise type_error(op, argument, f"dtype {dtype}", out.dtype)
    if tuple(out.shape) != tuple(shape):
        raise value_error(op, argument, f"shape {tuple(shape)}", tuple(out.shape))


def physical(fmt: str, H: int) -> tuple[int, str]:
    """Length and dtype of a row of codes."""
    return {"e4m3": (H, E4M3), "e2m1": (H // 2, INT8), "e5m6": (H // 2 * 3, UINT8)}[fmt]


def logical_rows(kind: str, col: bool, R: int) -> int:
    """`Request.rows`."""
    return R if col else 0
