"""What the kernels of a mapping are made of: rows that become padding, counts of warps, where segments begin, rows for assignments.

Shapes of a block on CUDA are in `Block`. Every macro takes what it needs of them as Python numbers.
"""

from tk_core.ops.mhc.common import thread
from tk_core.ops.moe.common import I32, index_of, load_batch


class Block:
    """How a block shares work: thread t owns the experts from t * own on, a warp takes neighbouring assignments, batch by batch."""

    def __init__(self, E: int, batch: int):
        self.E, self.batch = E, batch
        self.threads = 1024 if E <= 512 else 512
        self.warps = self.threads // 32
        self.width = max(32, 1 << (E - 1).bit_length())
        self.own = max(1, self.width // self.threads)


def clear_rows(P, threads: int):
    """Macro: rows of part b of `parts` become padding; a thread takes four of them at a time."""

    @P.macro
    def run(pos_to_expert, pos_to_token, pos_to_token_topk, b, parts, N):
        for r in P.serial(P.ceildiv(N, parts * threads * 4)):
            row = ((r * parts + b) * threads + thread(P)) * 4
            if row + 4 <= N:
                for v in P.vectorized(4):
                    pos_to_expert[row + v] = -1
                for v in P.vectorized(4):
                    pos_to_token[row + v] = -1
                for v in P.vectorized(4):
                    pos_to_token_topk[row + v] = -1
            else:
                for v in P.serial(4):
                    if row + v < N:
                        pos_to_expert[row + v] = -1
                        pos_to_token[row + v] = -1
                        pos_to_token_topk[row + v] = -1

    return run


def write_segment(P, by_capacity):
    """Macro: the segment of an expert from where it begins and how many assignments it has; to dropped[0] those without a row."""

    @P.macro
    def run(expert_start, expert_end, num_tokens_per_expert, dropped, e, first, count, alignment, capacity, N):
        if by_capacity:
            expert_start[e] = e * capacity
            expert_end[e] = (e + 1) * capacity
            num_tokens_per_expert[e] = capacity
            dropped[0] = P.max(count - capacity, 0)
        else:
            end = first + P.ceildiv(count, alignment) * alignment
            expert_start[e] = P.min(first, N)
            expert_end[e] = P.min(end, N)
            num_tokens_per_expert[e] = P.min(end, N) - P.min(first, N)
            dropped[0] = P.clamp(first + count - N, 0, count)

    return run


def count_by_warp(P, by: Block):
    """Macro: row[warp, e] += assignments of every warp; those of the first batch are in `value` before and after."""
    load = load_batch(P)

    @P.macro
    def run(topk_idx, value, row, first, end, stretch):
        lane, warp = thread(P) % 32, thread(P) // 32
        steps = P.ceildiv(stretch, 32 * by.batch)
        for r in P.serial(steps):
            if r > 0:
                load(value, topk_idx, first + r * by.batch * 32 + lane, 32, end, by.E)
            for u in P.unroll(by.batch):
                if value[u] >= 0:
                    P.atomic_add(row[warp, value[u]], 1)
        if steps > 1:
            load(value, topk_idx, first + lane, 32, end, by.E)

    return run


def begin_segments(P, by: Block, by_capacity):
    """Macro: row[w, e] from the assignments of a warp to the row of its first one.

    count[j] has all assignments of expert thread * own + j, mine[j] those of the blocks before this one. Block 0 writes the segments.
    """
    segment = write_segment(P, by_capacity)

    @P.macro
    def run(count, mine, row, sums, lost, starts, ends, sizes, num_dropped, b, alignment, capacity, N):
        size, next, pos, dropped = P.alloc_local((1,), I32), P.alloc_local((1,), I32), P.alloc_local((1,), I32), P.alloc_local((1,), I32)
        tx = thread(P)
        lane, warp = tx % 32, tx // 32
        # a scan over the lanes of a warp, then over warps
        size[0] = 0
        for j in P.unroll(by.own):
            size[0] = size[0] + P.ceildiv(count[j], alignment) * alignment
        next[0] = size[0]
        for step in P.unroll(5):
            pos[0] = P.shfl_up(next[0], 1 << step)
            if lane >= 1 << step:
                next[0] = next[0] + pos[0]
        if lane == 31:
            sums[warp] = next[0]
        if tx == 0:
            lost[0] = 0
        P.sync_threads()
        next[0] = next[0] - size[0]
        for w in P.serial(warp):
            next[0] = next[0] + sums[w]
        for j in P.unroll(by.own):
            e = tx * by.own + j
            if e < by.E:
                if b == 0:
                    segment(starts, ends, sizes, dropped, e, next[0], count[j], alignment, capacity, N)
                    if dropped[0] > 0:
                        P.atomic_add(lost[0], dropped[0])
                pos[0] = mine[j] + (e * capacity if by_capacity else next[0])
                for w in P.unroll(by.warps):
                    size[0] = row[w, e]
                    row[w, e] = pos[0]
                    pos[0] = pos[0] + size[0]
                next[0] = next[0] + P.ceildiv(count[j], alignment) * alignment
        P.sync_threads()
        if b == 0 and tx == 0:
            num_dropped[0] = lost[0]

    return run


def assign(P, by: Block, K, by_capacity):
    """Macro: every warp goes through its assignments in order, the first ones from `value`; lanes with the same expert find each other."""
    load = load_batch(P)

    @P.macro
    def run(topk_idx, value, row, pos_to_expert, pos_to_token, pos_to_token_topk, token_topk_to_pos, first, end, stretch, capacity, N):
        same, pos, at = P.alloc_local((1,), "uint32"), P.alloc_local((1,), I32), P.alloc_local((1,), I32)
        lane, warp = thread(P) % 32, thread(P) // 32
        for r in P.serial(P.ceildiv(stretch, 32 * by.batch)):
            if r > 0:
                load(value, topk_idx, first + r * by.batch * 32 + lane, 32, end, by.E)
            at[0] = first + r * by.batch * 32 + lane
            for u in P.unroll(by.batch):
                i = at[0] + u * 32
                same[0] = P.match_any_sync(value[u])
                pos[0] = -1
                if value[u] >= 0:
                    pos[0] = row[warp, value[u]]
                P.sync_warp()
                # the lane's rank among those with its expert; the last of them moves on for the next step
                rank = P.Cast(I32, P.popcount(same[0] & ((P.uint32(1) << P.Cast("uint32", lane)) - P.uint32(1))))
                if value[u] >= 0:
                    pos[0] = pos[0] + rank
                    if (same[0] >> P.Cast("uint32", lane)) == P.uint32(1):
                        row[warp, value[u]] = pos[0] + 1
                    if pos[0] >= (P.min(N, (value[u] + 1) * capacity) if by_capacity else N):
                        pos[0] = -1
                P.sync_warp()
                if i < end:
                    token_topk_to_pos[i] = pos[0]
                if pos[0] >= 0:
                    pos_to_expert[pos[0]] = value[u]
                    pos_to_token[pos[0]] = i // K
                    pos_to_token_topk[pos[0]] = i

    return run


def map_in_order(P, K, E, by_capacity):
    """Macro: the whole mapping on one thread, one assignment after the other."""
    segment, clear = write_segment(P, by_capacity), clear_rows(P, 1)

    @P.macro
    def run(
        topk_idx, pos_to_expert, pos_to_token, pos_to_token_topk, token_topk_to_pos, starts, ends, sizes, num_dropped, b, length, alignment,
        capacity, N,
    ):  # fmt: skip
        total, row = P.alloc_local((E,), I32), P.alloc_local((E,), I32)
        next, dropped, lost = P.alloc_local((1,), I32), P.alloc_local((1,), I32), P.alloc_local((1,), I32)
        value, pos = P.alloc_local((1,), I32), P.alloc_local((1,), I32)
        clear(pos_to_expert, pos_to_token, pos_to_token_topk, b, 1, N)
        for e in P.serial(E):
            total[e] = 0
        for i in P.serial(length):
            value[0] = index_of(P, topk_idx[i], E)
            if value[0] >= 0:
                total[value[0]] = total[value[0]] + 1
        next[0] = 0
        lost[0] = 0
        for e in P.serial(E):
            segment(starts, ends, sizes, dropped, e, next[0], total[e], alignment, capacity, N)
            lost[0] = lost[0] + dropped[0]
            row[e] = e * capacity if by_capacity else next[0]
            next[0] = next[0] + P.ceildiv(total[e], alignment) * alignment
        num_dropped[0] = lost[0]
        for i in P.serial(length):
            value[0] = index_of(P, topk_idx[i], E)
            token_topk_to_pos[i] = -1
            if value[0] >= 0:
                pos[0] = row[value[0]]
                row[value[0]] = pos[0] + 1
                if pos[0] < (P.min(N, (value[0] + 1) * capacity) if by_capacity else N):
                    token_topk_to_pos[i] = pos[0]
                    pos_to_expert[pos[0]] = value[0]
                    pos_to_token[pos[0]] = i // K
                    pos_to_token_topk[pos[0]] = i

    return run
