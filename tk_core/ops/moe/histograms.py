"""Histograms of indices and their sums: within a cluster of blocks, and over rows of counts that many programs have left."""

from tk_core.ops.mhc.common import thread
from tk_core.ops.moe.common import I32, THREADS, load_batch

# A block adds up that many columns of counts, so many rows at a time.
COLUMNS, SLICES = 32, 32
# Entries of a thread of a cluster that are on their way at a time.
ALONE_BATCH = 16


def count_in_cluster(P, G: int):
    """Macro: counts[:] of one block of a cluster, which can then be read by the others."""
    threads = 1 if P.cpu else THREADS
    batch = 1 if P.cpu else ALONE_BATCH
    load = load_batch(P)

    @P.macro
    def run(idx, counts, begin, end):
        value = P.alloc_local((batch,), I32)
        load(value, idx, begin + thread(P), threads, end, G)
        for r in P.serial(-(-G // threads)):
            if r * threads + thread(P) < G:
                counts[r * threads + thread(P)] = 0
        P.sync_threads()
        for r in P.serial(P.ceildiv(end - begin, threads * batch)):
            if r > 0:
                load(value, idx, begin + r * batch * threads + thread(P), threads, end, G)
            for u in P.unroll(batch):
                if value[u] >= 0:
                    P.atomic_add(counts[value[u]], 1)
        P.sync_cluster()

    return run


def total_of(P):
    """Macro: total[0] = the sum of a count over the blocks of a cluster."""

    @P.macro
    def run(counts, g, total):
        total[0] = 0
        for r in P.unroll(P.cluster):
            total[0] = total[0] + P.remote(counts[g], r)

    return run


def cluster_steps(P, G: int) -> int:
    """Steps in which the threads of a cluster take the groups."""
    return -(-G // (P.cluster * (1 if P.cpu else THREADS)))


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
