"""What the routing operations share: indices, sizes that positions can count, and histograms of many blocks.

Blocks count their share of the indices in shared memory and leave one row of counts each; a second launch adds the rows up.
Integers add up to the same in any order, so only the memory of a block sees atomics, and no result does.
"""

from math import gcd

from tk_core.bits import select
from tk_core.errors import value_error
from tk_core.op import Env
from tk_core.ops.mhc.common import thread
from tk_core.ops.quant.pieces import loop

I32 = "int32"
F32 = "float32"

# Programs that share the indices, and what one of them has at least to do.
MAX_PARTS = 128
PART = 1024
# Counts of all programs together, and those that fit into the shared memory of one.
MAX_COUNTS = 1 << 20
SHARED_GROUPS = 8192
THREADS = 1024
# What 32 bits can count, with room for the threads behind the end.
MAX_FLAT = 2**31 - 2**20
# Indices of a thread that are on their way at a time.
BATCH = 4

# Every access is guarded, and every barrier that is needed is there: TileLang would add some inside of loops of a warp.
EXPLICIT = {"tl.disable_safe_memory_legalize": True, "tl.disable_thread_storage_sync": True, "tl.disable_shared_memory_reuse": True}


def check_flat(op: str, argument: str, env: Env, rows: str = "T") -> None:
    """Flat indices t * K + k are 32 bits wide."""
    if env[rows] * env["K"] > MAX_FLAT:
        raise value_error(op, argument, f"at most {MAX_FLAT} entries", f"{env[rows]} x {env['K']}")


def parts_of(length: int, groups: int) -> int:
    """Programs that share `length` indices, each with counts of its own."""
    return max(1, min(MAX_PARTS, -(-length // PART), MAX_COUNTS // groups))


def index_of(P, value, n: int):
    """An index from 0 to n - 1 as 32 bits; -1 for any other value."""
    unsigned = "u" + str(value.dtype)
    return select(P.Cast(unsigned, value) < getattr(P, unsigned)(n), P.Cast(I32, value), P.int32(-1))


def load_batch(P):
    """Macro: the indices at, at + stride, at + 2 * stride, ... below `end` to value[:], others -1: all on their way before one is used."""

    @P.macro
    def run(value, idx, at, stride, end, n):
        raw = P.alloc_local((len_of(value),), idx.dtype)
        # in registers, so that every load is one instruction with a constant offset
        begin, left = P.alloc_local((1,), I32), P.alloc_local((1,), I32)
        begin[0] = at
        left[0] = end - begin[0]
        for u in P.unroll(len_of(value)):
            raw[u] = P.if_then_else(u * stride < left[0], idx[begin[0] + u * stride], P.Cast(idx.dtype, -1))
        for u in P.unroll(len_of(value)):
            value[u] = index_of(P, raw[u], n)

    return run


def len_of(buffer) -> int:
    """The extent of a buffer of one axis."""
    return int(buffer.shape[0])


# ------------------------------------------------------------------ rows that move


# Rows of a buffer that a block of a token looks at, to fill those that nobody owns: padding.
CLEARED = 8
BYTES = {"int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "float8_e4m3fn": 1, "int8": 1, "uint8": 1}
# Vectors of a thread: all of them are on their way before the first one is used.
EACH = 2


def blocks_of(P, T, N):
    """A block for every token, more where the buffer has more than CLEARED rows for each."""
    return P.max(T, P.ceildiv(N, CLEARED))


class Threads:
    """Who takes which vectors of a row of `length` elements: vector (step * each + i) * threads + thread, if it is below `units`.

    A block has a whole row. On the C target its only thread takes one vector after the other, wide ones that the compiler splits.
    """

    def __init__(self, P, length: int, vector: int, most: int = THREADS):
        self.vector = gcd(length, 128 if P.cpu else vector)
        self.units = length // self.vector
        self.each = 1 if P.cpu else min(EACH, -(-self.units // 32))
        self.threads = 1 if P.cpu else min(most, -(-self.units // (32 * self.each)) * 32)
        self.steps = -(-self.units // (self.threads * self.each))

    def unit(self, P, step, i):
        """The number of a vector; the last ones of the last step may lie behind the row."""
        return (step * self.each + i) * self.threads + thread(P)


def read_owners(P):
    """Macro: owner[z] = the owner of row b + z * blocks, zero behind the last row. Read early, looked at late: nobody waits for it."""

    @P.macro
    def run(owner, owners, b, blocks, N):
        for z in loop(P, CLEARED):
            owner[z] = 0
            if b + z * blocks < N:
                owner[z] = owners[b + z * blocks]

    return run


def clear_rows(P, by: Threads, count=MAX_FLAT):
    """Macro: zeros to the rows b + z * blocks that nobody owns, or an owner that is none of `count`."""

    @P.macro
    def run(out, owner, b, blocks):
        for z in loop(P, CLEARED):
            if owner[z] < 0 or owner[z] >= count:
                for step in P.serial(by.steps):
                    for i in loop(P, by.each):
                        if by.unit(P, step, i) < by.units:
                            for v in P.vectorized(by.vector):
                                out[b + z * blocks, by.unit(P, step, i) * by.vector + v] = zero(P, out.dtype)

    return run


def zero(P, dtype: str):
    """Zero of a storage dtype."""
    return P.Cast(str(dtype), P.int32(0))


def load_rows_of_token(P, K: int):
    """Macro: pos[:] = the rows of a token, -1 for what names none of the N rows."""
    V = gcd(K, 4)

    @P.macro
    def run(pos, where, t, N):
        for c in loop(P, K // V):
            for v in P.vectorized(V):
                pos[c * V + v] = where[t, c * V + v]
        for k in loop(P, K):
            if pos[k] < 0 or pos[k] >= N:
                pos[k] = -1

    return run
