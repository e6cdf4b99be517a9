"""Benchmark rows of the quantization casts: every row that the peers have, and some that they lack.

Each goes through the public function of the torch front end. A few blocks of rows of the timed call are compared with the bit-exact
oracle first.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tk_core.bench.peers import Peers
from tk_core.reference import quant as oracle

SIZES = {"bf16": 2, "fp32": 4, "e4m3": 1, "e2m1": 0.5, "e5m6": 1.5}
FLAGS = ("use_tma_aligned_col_major_sf", "round_sf", "use_packed_ue8m0")
# Rows that one comparison with the oracle takes: a multiple of every block.
CHUNK = 256


@dataclass
class Row:
    """One call: `function(x, *args, **named)` on `rows` x `hidden`.

    `source` is the dtype of x, or (format, block, flags) of a quantized one; `block` the scaling block of the scales that come out or,
    of casts back, go in.
    """

    function: str
    rows: int
    hidden: int
    source: Any
    args: tuple
    named: dict[str, Any] = field(default_factory=dict)
    block: tuple[int, int] = (1, 128)
    timer: str = "event"
    peer: dict[str, Any] | None = None
    # experts here, of how many in all, for the gather of a routing
    gather: tuple[int, int, int] | None = None

    @property
    def variant(self) -> str:
        """What distinguishes the row beside its sizes."""
        source = self.source if isinstance(self.source, str) else f"{self.source[0]} {self.source[1]}"
        flags = [short for name, short in zip(FLAGS, ("col", "round", "packed"), strict=True) if self.named.get(name)]
        others = [f"{k}={v}" for k, v in self.named.items() if k not in FLAGS and k != "pos_to_token"]
        return " ".join([source, *map(str, self.args), *flags, *others])


def scale_bytes(rows: int, hidden: int, block: tuple[int, int], packed: bool, e4m3: bool = False) -> int:
    """Of the scales of a matrix, padding not counted."""
    R, G = -(-rows // block[0]), -(-hidden // block[1])
    if packed:
        return 4 * -(-R // 4) * G if block[1] == 1 else 4 * R * -(-G // 4)
    return R * G if e4m3 else 4 * R * G


# ------------------------------------------------------------------ the peers' rows


def rows(table: Peers) -> Iterator[Row]:
    """Every row of the peers' table that is a cast of this package."""
    for peer in table.rows:
        make = _MAKERS.get(peer["op"])
        if make is not None:
            row = make(peer["args"])
            row.timer, row.peer = peer["timer"], peer
            yield row


def all_rows(table: Peers, names: list[str], row_counts: list[int] | None, hidden: list[int] | None) -> Iterator[Row]:
    """The rows of some functions (default: all): those of the peers' table and our own, or all of them at other sizes."""
    found = [*rows(table), *own_rows()]
    if row_counts or hidden:
        found = [
            dataclasses.replace(row, rows=M or row.rows, hidden=H or row.hidden, peer=None, gather=None)
            for row in own_rows()
            for M in row_counts or [0]
            for H in hidden or [0]
        ]
    return (row for row in found if not names or row.function in names or "quant" in names)


def own_rows(M: int = 8192, H: int = 7168) -> Iterator[Row]:
    """What the peers have no row for."""
    for fmt, g, named in (("e4m3", 128, {}), ("e2m1", 32, {"round_sf": True}), ("e2m1", 16, {"use_e4m3_sf": True})):
        yield Row("per_token_cast", M, H, "bf16", (fmt, g), named, (1, g))
        yield Row("per_token_cast_with_sf_only", M, H, "bf16", (fmt, g), named, (1, g))
        yield Row("fake_quant", M, H, "bf16", (fmt, g), named, (1, g))
    yield Row("per_token_cast", M, H, "bf16", ("e2m1", 32), _flags(True, True, True), (1, 32))
    yield Row("per_token_cast", M, H, "bf16", ("e4m3", 128), {"stochastic_cast": True}, (1, 128))
    yield Row("per_token_cast", M, H, ("e4m3", (1, 128), {}), ("e4m3", 128, (1, 128)), {}, (1, 128))
    yield Row("per_channel_cast", M, H, "bf16", ("e4m3", 32, True), {"use_packed_ue8m0": True}, (32, 1))
    yield Row("per_channel_cast", M, H, ("e4m3", (1, 128), {}), ("e4m3", 128, False, 128), {}, (128, 1))
    yield Row("cast", M, H, "fp32", (torch.bfloat16,), {})
    yield Row("cast", M, H, "bf16", (torch.float8_e4m3fn,), {})
    yield Row("cast", M, H, "fp32", (torch.bfloat16, True), {})


def _flags(col: bool, rounded: bool, packed: bool) -> dict[str, bool]:
    return {name: True for name, value in zip(FLAGS, (col, rounded, packed), strict=True) if value}


def _flags_of(args: dict[str, Any], prefix: str = "") -> dict[str, bool]:
    return {name: True for name in FLAGS if args.get(prefix + name)}


def _per_token_cast(a: dict[str, Any]) -> Row:
    g, block = a["num_per_channels"], a.get("x_block_size")
    source = a["in_dtype"] if block is None else (a["in_dtype"], tuple(block), {})
    args = (a["fmt"], g) if block is None else (a["fmt"], g, tuple(block))
    return Row("per_token_cast", a["num_tokens"], a["hidden"], source, args, _flags_of(a), (1, g))


def _per_token_cast_back(a: dict[str, Any]) -> Row:
    block = (1, a["num_per_channels"])
    return Row("cast_back", a["num_tokens"], a["hidden"], (a["fmt"], block, _flags_of(a)), (a["out_dtype"], block), {}, block)


def _cast_back(a: dict[str, Any]) -> Row:
    block = tuple(a.get("block_size") or (a["num_per_tokens"], a["num_per_channels"]))
    return Row("cast_back", a["num_tokens"], a["hidden"], (a["fmt"], block, _flags_of(a)), (a["out_dtype"], block), {}, block)


def _cast_back_e5m6(a: dict[str, Any]) -> Row:
    block = (1, a["hidden"])
    return Row("cast_back_e5m6", a["num_tokens"], a["hidden"], ("e5m6", block, _flags_of(a)), (a["out_dtype"], block), {}, block)


def _to_e5m6(a: dict[str, Any]) -> Row:
    return Row("per_token_cast_to_e5m6", a["num_tokens"], a["hidden"], a["in_dtype"], (a["hidden"],), _flags_of(a), (1, a["hidden"]))


def _per_block_cast(a: dict[str, Any]) -> Row:
    block = tuple(a["block_size"])
    return Row("per_block_cast", a["num_tokens"], a["hidden"], a["in_dtype"], (a["fmt"], block), _flags_of(a), block)


def _lossless(a: dict[str, Any]) -> Row:
    fine, coarse = tuple(a.get("in_sf_block") or a["x_block_size"]), tuple(a.get("out_sf_block") or a["out_block_size"])
    named = _flags_of(a, "out_") or _flags_of(a)
    source = ("e2m1", fine, _flags_of(a, "in_") or {"round_sf": True})
    return Row("per_block_cast_lossless", a["num_tokens"], a["hidden"], source, ("e4m3", fine, coarse), named, coarse)


def _per_channel_cast(a: dict[str, Any]) -> Row:
    n = a["num_per_tokens"]
    return Row("per_channel_cast", a["num_tokens"], a["hidden"], a.get("dtype") or a["in_dtype"], ("e4m3", n, a["round_sf"]), {}, (n, 1))


def _transposed(a: dict[str, Any]) -> Row:
    n = a["num_per_tokens"]
    return Row("per_channel_cast_and_transpose", a["num_tokens"], a["hidden"], "bf16", ("e4m3", n, a["round_sf"]), {}, (n, 1))


def _fused(a: dict[str, Any]) -> Row:
    quantized = a["is_fused_cast_back"]
    source = ("e4m3", (1, 128), {}) if quantized else a["dtype"]
    args = ("e4m3", 128, a["round_sf"], 128 if quantized else None)
    gather = (a["num_experts"], a["num_experts"] * a["num_ep_ranks"], a["num_topk"]) if a["num_topk"] else None
    return Row("per_channel_cast_fused", a["num_tokens"], a["hidden"], source, args, {}, (128, 1), gather=gather)


_MAKERS: dict[str, Callable[[dict[str, Any]], Row]] = {
    "per_token_cast": _per_token_cast,
    "per_token_cast_back": _per_token_cast_back,
    "cast_back": _cast_back,
    "cast_back_e5m6": _cast_back_e5m6,
    "per_token_cast_to_e5m6": _to_e5m6,
    "per_block_cast": _per_block_cast,
    "per_block_cast_lossless": _lossless,
    "per_channel_cast": _per_channel_cast,
    "per_channel_cast_and_transpose": _transposed,
    "per_channel_cast_fused": _fused,
}


# ------------------------------------------------------------------ inputs


@functools.cache
def routing(tokens: int, local: int, experts: int, topk: int, align: int = 128) -> np.ndarray:
    """Rows of a token-choice routing over ranks, as one rank sees them: the place of every row of its experts, -1 for padding.

    `tokens` is how many different tokens arrive; experts are chosen uniformly, and every expert's rows are padded to `align`.
    """
    rng = np.random.default_rng(0)
    share = 1 - math.comb(experts - local, topk) / math.comb(experts, topk)
    chosen = rng.random((round(tokens / share * 1.2), experts), np.float32).argpartition(topk, 1)[:, :topk]
    chosen = chosen[(chosen < local).any(1)][:tokens]
    places = []
    for expert in range(local):
        mine = np.flatnonzero((chosen == expert).any(1))
        places += [mine, np.full(-len(mine) % align, -1)]
    return np.concatenate(places).astype(np.int32)


def inputs(row: Row, seed: int, device: str) -> tuple[Any, dict[str, Any]]:
    """x, and the keyword arguments that are arrays."""
    from tk_torch import quant

    generator = torch.Generator(device).manual_seed(seed)
    plain = torch.randn((row.rows, row.hidden), generator=generator, device=device)
    named: dict[str, Any] = {}
    if row.gather is not None:
        named["pos_to_token"] = torch.from_numpy(routing(row.rows, *row.gather)).to(device)
    if isinstance(row.source, str):
        return (plain.bfloat16() if row.source == "bf16" else plain), named
    fmt, block, flags = row.source
    if block[1] == 1:
        padded = torch.nn.functional.pad(plain, (0, 0, 0, -row.rows % 128))
        data, sf = quant.per_channel_cast(padded.bfloat16(), fmt, block[0], flags.get("round_sf", False))
        return (data[: row.rows].contiguous(), sf[: -(-row.rows // block[0])].contiguous()), named
    if block[0] == 1:
        return quant.per_token_cast(plain.bfloat16(), fmt, block[1], **flags), named
    return quant.per_block_cast(plain.bfloat16(), fmt, block, **flags), named


def least_bytes(row: Row, named: dict[str, Any]) -> int:
    """What must at least be moved, as the specification counts it."""
    M, H, packed = row.rows, row.hidden, bool(row.named.get("use_packed_ue8m0"))
    if isinstance(row.source, str):
        into, read = SIZES[row.source], 0
    else:
        fmt, block, flags = row.source
        into, read = SIZES[fmt], scale_bytes(M, H, block, bool(flags.get("use_packed_ue8m0")))
    if row.function == "cast":
        out = 1 if row.args[0] == torch.float8_e4m3fn else 2
        return round(M * H * (into + out))
    if row.function == "fake_quant":
        return round(M * H * 2 * into)
    if row.function.startswith("cast_back"):
        return round(M * H * (into + SIZES[row.args[0]]) + read)
    fmt = "e5m6" if row.function.endswith("e5m6") else row.args[0]
    if row.function.endswith("sf_only"):
        return round(M * H * into) + scale_bytes(M, H, row.block, packed, bool(row.named.get("use_e4m3_sf")))
    if "pos_to_token" in named:
        places = named["pos_to_token"]
        full, Mo = int((places >= 0).sum()), places.numel()
        per_row = H * into + (4 * H / 128 if read else 0)
        return round(full * per_row + 4 * Mo + Mo * H + scale_bytes(Mo, H, row.block, False))
    return round(M * H * (into + SIZES[fmt])) + read + scale_bytes(M, H, row.block, packed, bool(row.named.get("use_e4m3_sf")))


def call(row: Row, x: Any, named: dict[str, Any]) -> Any:
    """The public function."""
    from tk_torch import quant

    return getattr(quant, row.function)(x, *row.args, **row.named, **named)


# ------------------------------------------------------------------ correctness


def verify(row: Row, device: str) -> str:
    """What is wrong with a few blocks of rows of the timed call; an empty text when nothing is."""
    x, named = inputs(row, 1, device)
    got = call(row, x, named)
    got = got if isinstance(got, tuple) else (got,)
    total = named["pos_to_token"].numel() if "pos_to_token" in named else row.rows
    # random draws count from the first element on: the oracle has to start there
    drawn = row.named.get("stochastic_cast") or (row.function == "cast" and len(row.args) > 1)
    for start in {0, CHUNK} if drawn else {0, total // 2 // CHUNK * CHUNK, (total - 1) // CHUNK * CHUNK}:
        stop = min(start + CHUNK, total)
        want = _expected(row, x, named, start, stop)
        want = want if isinstance(want, tuple) else (want,)
        for name, a, b in zip(("data", "sf"), got, want, strict=False):
            mine = _numpy(_rows_of(row, name, a, start, stop))
            if row.function.endswith("sf_only"):
                mine, b = _numpy(_rows_of(row, "sf", a, start, stop)), want[0]
            if mine.shape != b.shape or mine.tobytes() != np.ascontiguousarray(b).tobytes():
                return f"{name} of rows {start} to {stop} differ from the oracle"
    return ""


def _rows_of(row: Row, name: str, a: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """The part of a result that belongs to some rows."""
    if row.function.startswith(("cast", "fake")):
        return a[start:stop]
    bm, bk = row.block
    if name == "data":
        return a[:, start:stop] if row.function.endswith("transpose") else a[start:stop]
    per = bm * (4 if bk == 1 and row.named.get("use_packed_ue8m0") else 1)
    return a[start // per : -(-stop // per)]


def _expected(row: Row, x: Any, named: dict[str, Any], start: int, stop: int) -> Any:
    named = dict(row.named)
    if row.function == "per_channel_cast_fused" and row.gather is not None:
        places = routing(row.rows, *row.gather)[start:stop]
        used = np.unique(np.clip(places, 0, row.rows - 1))
        local = np.where(places < 0, -1, np.searchsorted(used, np.clip(places, 0, row.rows - 1))).astype(np.int32)
        index = torch.from_numpy(used).long()
        part = tuple(_numpy(t[index.to(t.device)]) for t in x) if isinstance(x, tuple) else _numpy(x[index.to(x.device)])
        return oracle.per_channel_cast_fused(part, *row.args, pos_to_token=local)
    if isinstance(x, tuple):
        bm = row.source[1][0]
        part = (_numpy(x[0][start:stop]), _numpy(x[1][start // bm : -(-stop // bm)]))
    else:
        part = _numpy(x[start:stop])
    if row.function == "cast":
        return _cast_of(row, x, start, stop)
    if named.get("stochastic_cast"):
        # positions count from the first row: take the rows up to here
        whole = oracle.per_token_cast(_numpy(x[:stop]), *row.args, **named)
        return whole[0][start:], whole[1][start:]
    return getattr(oracle, row.function)(part, *row.args, **named)


def _cast_of(row: Row, x: torch.Tensor, start: int, stop: int) -> np.ndarray:
    import ml_dtypes

    target = {torch.bfloat16: ml_dtypes.bfloat16, torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn}[row.args[0]]
    if len(row.args) == 1:
        return oracle.cast(_numpy(x[start:stop]), np.dtype(target))
    return oracle.cast(_numpy(x[:stop]), np.dtype(target), True)[start:]


def _numpy(t: torch.Tensor) -> np.ndarray:
    """Contiguous, with the dtypes of ml_dtypes."""
    import ml_dtypes

    names = {torch.bfloat16: ml_dtypes.bfloat16, torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn}
    t = t.contiguous().cpu()
    if t.dtype in names:
        return t.view(torch.int16 if t.element_size() == 2 else torch.uint8).numpy().view(names[t.dtype])
    return t.numpy()
