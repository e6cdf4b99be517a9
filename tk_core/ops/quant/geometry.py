"""The shape of a thread's work in the quantization casts.

A piece is V neighbouring elements of a row, one or two loads of 16 bytes. A thread has Q pieces in each of K neighbouring rows, and
`lanes` neighbouring threads take a row of a scaling block between them, their pieces interleaved, so that every access of a
warp is contiguous:

    column of piece q = j * block_k + (q * lanes + lane) * V        j: the scaling block, lane: the thread in its row

Threads of a block stand `across` a row and `down` the rows, those of a warp `side` by side and `deep` down the rows: what they store at
a time in a column of scales is contiguous as well. A scaling block is one row of its threads or, where it is `tall`, all their
rows, and it lies within a warp or belongs to a whole block of threads. Its largest magnitude is a maximum over the pieces of a thread,
then over lanes (`shuffles`), then over `warps`; on the C target one thread owns a scaling block, and the last two are nothing.
"""

from dataclasses import dataclass
from math import gcd

from tk_core.ops.mhc.common import thread
from tk_core.ops.quant.layouts import PACK


def align(a: int, b: int) -> int:
    """a up to a multiple of b."""
    return -(-a // b) * b


@dataclass(frozen=True)
class Geometry:
    """Who makes what, from `geometry`."""

    H: int
    block_m: int
    block_k: int
    vector: int
    pieces: int
    rows: int
    lanes: int
    across: int
    down: int
    # threads of a warp below each other
    deep: int = 1
    # blocks that a multiprocessor must be able to hold: registers are cut to that; 0 leaves them to the compiler
    resident: int = 0

    @property
    def blocks(self) -> int:
        """Scaling blocks across the matrix."""
        return -(-self.H // self.block_k)

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.across * self.down

    @property
    def side(self) -> int:
        """Threads that stand side by side before the next one is below the first."""
        return self.across if self.deep == 1 else 32 // self.deep

    @property
    def parts(self) -> int:
        """Blocks of threads that share a row."""
        return -(-self.blocks * self.lanes // self.across)

    @property
    def tall(self) -> bool:
        """Whether the rows of a thread share a scale."""
        return self.block_m > 1

    @property
    def scales(self) -> int:
        """Scales of a thread."""
        return 1 if self.tall else self.rows

    @property
    def shuffles(self) -> list[int]:
        """Distances in a warp over which a maximum is taken: along the row, then down the rows."""
        powers = [1, 2, 4, 8, 16] if self.threads > 1 else []
        return [s for s in powers if s < self.lanes or (self.tall and s >= self.across)]

    @property
    def warps(self) -> int:
        """Warps that share a scaling block: one, or all of a block."""
        return self.threads // 32 if self.lanes > 32 or (self.tall and self.threads > 32) else 1

    @property
    def groups(self) -> int:
        """Scaling blocks of a warp, if warps share them."""
        return max(1, min(self.across, 32) // self.lanes)

    @property
    def whole(self) -> bool:
        """Whether no piece lies behind the end of its row or of the last scaling block."""
        return self.blocks * self.lanes % self.across == 0 and self.H % (self.lanes * self.vector * self.pieces) == 0

    def grid(self, P, M):
        """Blocks of threads; those that share a row are neighbours."""
        return P.ceildiv(M, self.rows * self.down) * self.parts

    def place(self, P, b):
        """(first row, scaling block in the row, place in it) of a thread."""
        t, side, deep = thread(P), self.side, self.deep
        unit = b % self.parts * self.across + t // (side * deep) % (self.across // side) * side + t % side
        band = b // self.parts * self.down + t // (self.across * deep) * deep + t // side % deep
        return band * self.rows, unit // self.lanes, unit % self.lanes


def geometry(P, H: int, block_m: int, block_k: int, vector: int, bits: int, rows=0, threads=0, pieces=0, deep=0, resident=0) -> Geometry:
    """The shape for rows of H elements of so many bits. A piece has `vector` elements or less; 0 stands for what is best on an H200."""
    shape = {"H": H, "block_m": block_m, "block_k": block_k, "vector": gcd(vector, block_k)}
    V = shape["vector"]
    if P.cpu:
        return Geometry(**shape, pieces=block_k // V, rows=block_m, lanes=1, across=1, down=1)
    units, blocks = -(-block_k // V), -(-H // block_k)
    if block_k > 128 or units & (units - 1):
        # a warp or, of longer rows, a block of threads has a row; a small block, as long as its registers hold the row
        Q = pieces or max(min(-(-units // 32), max(32 // V, -(-units // 128)), 56 * 32 // (V * bits)), -(-units // 1024))
        lanes = align(-(-units // Q), 32)
        return Geometry(**shape, pieces=-(-units // lanes), rows=rows or 1, lanes=lanes, across=lanes, down=1 if lanes > 32 else 8)
    Q = pieces or max(1, units // 8)
    lanes = units // Q
    if block_m > 1:
        # at most a warp stands side by side
        K = min(rows or min(8, 64 // V), block_m)
        across = min(32, lanes << (blocks - 1).bit_length(), max(lanes, (threads or 128) * K // block_m))
        return Geometry(**shape, pieces=Q, rows=K, lanes=lanes, across=across, down=block_m // K)
    # packed exponents: four neighbouring scaling blocks in a warp
    deep = min(deep or 1, 32 // lanes)
    unit = max(PACK * lanes, 32 // deep if deep > 1 else 1)
    total = align(blocks * lanes, unit)
    across = align(-(-total // -(-total // ((threads or 256) // deep))), unit)
    # whole warps
    down = align(128 // across or 1, max(deep, 32 // gcd(across, 32)))
    return Geometry(
        **shape, pieces=Q, rows=rows or max(2, 32 // (V * Q)), lanes=lanes, across=across, down=down, deep=deep, resident=resident
    )
