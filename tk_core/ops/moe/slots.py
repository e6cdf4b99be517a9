"""Which rows of an expert-major buffer a token has, so that a kernel of a token looks at those alone."""

from tk_core.ops.mhc.common import thread
from tk_core.ops.moe.common import I32

U32 = "uint32"


class Slots:
    """Which rows a token has. On CUDA lane k of every warp looks up slot k, all at a time, and rows that are there follow each other.

    On the C target `chunks` is 1 and a step takes all slots, those without a row among them.
    """

    def __init__(self, P, K: int, rows: int):
        self.K = K
        self.chunks = 1 if P.cpu else -(-K // 32)
        self.rows = K if P.cpu else min(K, rows)

    def locate(self, P, weighted: bool, scaled: bool):
        """Macro: slots 32 c to 32 c + 31 of a token; on C all of them."""
        K = self.K

        @P.macro
        def on_cuda(where, weights, x_sf, place, factor, live, t, N, c):
            slot = c * 32 + thread(P) % 32
            place[0] = -1
            factor[0] = P.f32(1)
            if slot < K:
                place[0] = where[t, slot]
                if weighted:
                    factor[0] = weights[t, slot]
            if place[0] < 0 or place[0] >= N:
                place[0] = -1
            if scaled:
                if place[0] >= 0:
                    factor[0] = P.mul(factor[0], x_sf[place[0]])
            live[0] = P.Cast(U32, P.ballot_sync(place[0] >= 0))

        @P.macro
        def on_c(where, weights, x_sf, place, factor, live, t, N, c):
            live[0] = P.Cast(U32, 0)
            for k in P.serial(K):
                place[k] = where[t, k]
                if place[k] < 0 or place[k] >= N:
                    place[k] = -1
                factor[k] = weights[t, k] if weighted else P.f32(1)
                if scaled:
                    if place[k] >= 0:
                        factor[k] = P.mul(factor[k], x_sf[place[k]])

        return on_c if P.cpu else on_cuda

    def steps(self, P, live):
        """Steps that take all rows of a chunk."""
        return 1 if P.cpu else P.ceildiv(P.Cast(I32, P.popcount(live)), self.rows)

    def next(self, P):
        """Macro: the next rows, in the order of slots: slot[j], pos[j], -1 where there are no more, and scale[j]."""
        R = self.rows

        @P.macro
        def on_cuda(place, factor, rest, slot, pos, scale, c):
            for j in P.unroll(R):
                slot[j] = P.call_extern(I32, "__ffs", P.Cast(I32, rest[0])) - 1
                pos[j] = P.shfl_sync(place[0], P.max(slot[j], 0))
                scale[j] = P.shfl_sync(factor[0], P.max(slot[j], 0))
                if slot[j] < 0:
                    pos[j] = -1
                slot[j] = slot[j] + c * 32
                rest[0] = rest[0] & (rest[0] - P.uint32(1))

        @P.macro
        def on_c(place, factor, rest, slot, pos, scale, c):
            for j in P.serial(R):
                slot[j] = j
                pos[j] = place[j]
                scale[j] = factor[j]

        return on_c if P.cpu else on_cuda
