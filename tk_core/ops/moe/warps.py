"""How the gates share a row of experts among threads: a warp takes a token, and shared memory is where its lanes meet.

In global memory and in passes over a row, lane i has vector i of every 32; in the selection it has `per` neighbouring experts, so that
the lower of two lanes has the lower experts. On the C target a block is one thread, which is its only warp and its only lane.
Barriers are written out: the kernels are compiled without those that TileLang would add, for warps go their own ways.
"""

from math import gcd

PASS_CONFIGS = {"tl.disable_thread_storage_sync": True, "tl.disable_safe_memory_legalize": True, "tl.disable_shared_memory_reuse": True}
# What a block may hold in shared memory, and the most experts, of which a warp then has three arrays.
_SHARED_BYTES = 64 * 1024
MAX_EXPERTS = 8192
# Most slots of a token: one a lane.
SLOTS = 32


class Row:
    """Shape of the work on rows of E experts; `arrays` of them a warp lie in shared memory."""

    def __init__(self, P, E: int, list_length: int = 1, arrays: int = 1):
        self.E = E
        self.lanes = 1 if P.cpu else 32
        self.V = 1 if P.cpu else gcd(E, 4)
        self.steps = -(-E // (self.lanes * self.V))
        # experts of a lane in the selection: whole vectors, and whole lists where they are many
        unit = 1 if P.cpu else 4
        self.per = -(-E // (self.lanes * unit)) * unit
        if self.per > 8 * list_length:
            self.per = -(-self.per // list_length) * list_length
        self.size = self.lanes * self.per
        most = max(1, _SHARED_BYTES // (4 * self.size * arrays))
        self.warps = 1 if P.cpu else min(8, 1 << (most.bit_length() - 1))
        self.threads = self.lanes * self.warps

    def warp(self, P):
        return 0 if P.cpu else uniform(P, P.get_thread_binding(0) // 32)

    def lane(self, P):
        return 0 if P.cpu else P.get_thread_binding(0) % 32

    def token(self, P, b, w, T):
        """The token of a warp: behind the last one that one again, for a branch around the whole kernel would cost more."""
        return P.min(b * self.warps + w, T - 1)

    def loop(self, P):
        """Steps of a pass over a row."""
        return P.unroll(self.steps) if self.steps <= 8 and not P.cpu else P.serial(self.steps)

    def slots(self, P, n: int):
        """Steps in which lanes take n slots."""
        return P.serial(n) if P.cpu else P.unroll(1)


def sync_warp(P):
    """What lanes of a warp wrote to shared memory is seen by the others."""
    return None if P.cpu else P.sync_warp()


def uniform(P, value):
    """A value that is the same in all lanes, in a form that tells the compiler so: branches on it do not diverge."""
    return value if P.cpu else P.shfl_sync(value, 0)


def flag(P, mask, t, there: bool, otherwise: int = 1):
    """mask[t] as an integer, or what holds without a mask."""
    return P.Cast("int32", mask[t]) if there else P.Cast("int32", otherwise)


def warp_sum(P):
    """Macro: value[0] <- its sum over the lanes of a warp, in every lane."""

    @P.macro
    def run(value):
        if not P.cpu:
            for step in P.unroll(5):
                value[0] = P.add(value[0], P.shfl_xor(value[0], 16 >> step))

    return run


def warp_max(P):
    """Macro: value[0] <- its largest one over the lanes of a warp, in every lane."""

    @P.macro
    def run(value):
        if not P.cpu:
            for step in P.unroll(5):
                value[0] = P.max(value[0], P.shfl_xor(value[0], 16 >> step))

    return run
