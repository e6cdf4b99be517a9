"""Histograms of indices and their sums: within a cluster of blocks, and over rows of counts that many programs have left."""

from tk_core.ops.mhc.common import thread
from tk_core.ops.moe.common import I32, THREADS, index_of

# A block adds up that many columns of counts, so many rows at a time.
COLUMNS, SLICES = 32, 32
# Entries that a thread of a cluster has on their way at a time: so many parts of so many, of which none is tried behind the end.
CHUNKS, CHUNK = 4, 4


class ClusterCounts:
    """Counts of a cluster. Every block counts its entries, and sends the counts of group g to block g % P.cluster, which adds them up.

    A kernel calls count, then for every step the sum of group(step, b) where that is below G.
    """

    def __init__(self, P, G: int):
        self.P, self.G = P, G
        self.threads = 1 if P.cpu else THREADS
        # groups of a block, and steps in which its threads take them
        self.own = -(-G // P.cluster)
        self.steps = -(-self.own // self.threads)

    def group(self, step, b):
        """The group of a thread."""
        return (step * self.threads + thread(self.P)) * self.P.cluster + b

    def count(self):
        """Macro: slot[r, j] = entries of block r of the cluster that equal group j * P.cluster + b."""
        P, G, threads = self.P, self.G, self.threads
        C, chunks, chunk = P.cluster, 1 if P.cpu else CHUNKS, 1 if P.cpu else CHUNK

        @P.macro
        def run(idx, slot, b, begin, end):
            counts = P.alloc_shared((G,), I32)
            mail = P.alloc_shared((1,), "int64")
            raw = P.alloc_local((chunks * chunk,), idx.dtype)
            value, at, left = P.alloc_local((1,), I32), P.alloc_local((1,), I32), P.alloc_local((1,), I32)
            P.expect_mail(mail, (G - b + C - 1) // C * C * 4)
            for r in P.serial(-(-G // threads)):
                if r * threads + thread(P) < G:
                    counts[r * threads + thread(P)] = 0
            for step in P.serial(P.max(1, P.ceildiv(end - begin, threads * chunks * chunk))):
                at[0] = begin + step * (threads * chunks * chunk) + thread(P)
                left[0] = end - at[0]
                for c in P.unroll(chunks):
                    if c * chunk * threads < left[0] + thread(P):
                        for u in P.unroll(chunk):
                            far = (c * chunk + u) * threads
                            raw[c * chunk + u] = P.if_then_else(far < left[0], idx[at[0] + far], P.Cast(idx.dtype, -1))
                if step == 0:
                    P.sync_threads()
                for c in P.unroll(chunks):
                    if c * chunk * threads < left[0] + thread(P):
                        for u in P.unroll(chunk):
                            value[0] = index_of(P, raw[c * chunk + u], G)
                            if value[0] >= 0:
                                P.atomic_add(counts[value[0]], 1)
            P.open_mail()
            for r in P.serial(-(-G // threads)):
                g = r * threads + thread(P)
                if g < G:
                    P.send(slot[b, g // C], g % C, counts[g], mail)
            P.await_mail(mail)

        return run

    def sum(self):
        """Macro: total[0] = the count of a group of this block."""
        P = self.P

        @P.macro
        def run(slot, g, total):
            total[0] = 0
            for r in P.unroll(P.cluster):
                total[0] = total[0] + slot[r, g // P.cluster]

        return run


def sum_column(P):
    """Macro: the sum of a column to total[0]. The threads of a block share COLUMNS of them; the first COLUMNS threads get the sums."""

    @P.macro
    def run(part, parts, column, columns, shared, total):
        slices = 1 if P.cpu else SLICES
        total[0] = 0
        if column < columns:
            for r in P.serial(P.ceildiv(parts - thread(P) // COLUMNS, slices)):
                total[0] = total[0] + part[thread(P) // COLUMNS + r * slices, column]
        if not P.cpu:
            shared[thread(P) // COLUMNS, thread(P) % COLUMNS] = total[0]
            P.sync_threads()
            total[0] = 0
            for r in P.unroll(SLICES):
                total[0] = total[0] + shared[r, thread(P) % COLUMNS]

    return run
