"""`get_fused_mapping`, `fused_mapping`: where every assignment of a token to an expert has its row in an expert-major buffer.

Expert e owns a segment of ceil(count[e] / alignment) * alignment rows, one segment after the other. Its first count[e] rows are its
assignments in ascending order of the flat index t * K + k, the rest is padding. With an expert capacity all segments have that length.

Two launches. In the first one a block counts the experts of its part of the assignments, and all rows become padding. In the second one it
adds up the counts of all blocks, which says where segments begin, and of those before it, which says where its own
assignments begin in them; it counts the experts of its warps, and then every warp goes through its assignments in order. The lanes
of a warp that have the same expert find each other by comparison. Nothing depends on the order in which threads run.
"""

from collections.abc import Callable
from typing import Any

from tk_core.errors import value_error
from tk_core.op import Env, Launch, Op, declare
from tk_core.ops.mhc.common import thread
from tk_core.ops.moe.common import BATCH, EXPLICIT, I32, MAX_FLAT, THREADS, check_flat, index_of, load_batch, parts_of

MAX_EXPERTS = 1024
# Rows of counts that a thread has on their way at a time.
ROWS = 8


def count_and_clear(P, K, E, topk_idx_dtype):
    """A block counts the experts of its assignments, and clears its share of the rows."""
    T, N, parts = P.dynamic("T"), P.dynamic("N"), P.dynamic("parts")
    threads = 1 if P.cpu else THREADS
    batch = 1 if P.cpu else BATCH
    load = load_batch(P)

    @P.prim_func
    def main(
        topk_idx: P.Tensor((T, K), topk_idx_dtype),
        part: P.Tensor((parts, E), I32),
        pos_to_expert: P.Tensor((N,), I32),
        pos_to_token: P.Tensor((N,), I32),
        pos_to_token_topk: P.Tensor((N,), I32),
        share: P.int32,
    ):
        with P.Kernel(parts, threads=threads) as b:
            topk_idx = P.view(topk_idx, (T * K,), topk_idx_dtype)
            counts = P.alloc_shared((E,), I32)
            value = P.alloc_local((batch,), I32)
            end = P.min((b + 1) * share, T * K)
            for r in P.serial(-(-E // threads)):
                if r * threads + thread(P) < E:
                    counts[r * threads + thread(P)] = 0
            P.sync_threads()
            # the first assignments are on their way while rows are cleared, the next ones while others are counted
            load(value, topk_idx, b * share + thread(P), threads, end, E)
            # four rows a thread and step
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
            for r in P.serial(P.ceildiv(share, threads * batch)):
                for u in P.unroll(batch):
                    if value[u] >= 0:
                        P.atomic_add(counts[value[u]], 1)
                load(value, topk_idx, b * share + (r + 1) * batch * threads + thread(P), threads, end, E)
            P.sync_threads()
            for r in P.serial(-(-E // threads)):
                if r * threads + thread(P) < E:
                    part[b, r * threads + thread(P)] = counts[r * threads + thread(P)]

    return main


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


def place(P, K, E, topk_idx_dtype, by_capacity):
    """A block gives rows to the assignments that it counted in the first launch."""
    body = place_on_c if P.cpu else place_on_cuda
    return body(P, K, E, topk_idx_dtype, by_capacity)


def place_on_cuda(P, K, E, topk_idx_dtype, by_capacity):
    """Thread t owns the experts from t * own on; `width` columns of counts are read at a time, by as many threads or by all."""
    T, N, parts = P.dynamic("T"), P.dynamic("N"), P.dynamic("parts")
    threads = 1024 if E <= 512 else 512
    warps = threads // 32
    width = max(32, 1 << (E - 1).bit_length())
    own = max(1, width // threads)
    slices = max(1, threads // width)
    load, segment = load_batch(P), write_segment(P, by_capacity)

    @P.prim_func
    def main(
        topk_idx: P.Tensor((T, K), topk_idx_dtype),
        part: P.Tensor((parts, E), I32),
        pos_to_expert: P.Tensor((N,), I32),
        pos_to_token: P.Tensor((N,), I32),
        pos_to_token_topk: P.Tensor((N,), I32),
        token_topk_to_pos: P.Tensor((T, K), I32),
        expert_start: P.Tensor((E,), I32),
        expert_end: P.Tensor((E,), I32),
        num_tokens_per_expert: P.Tensor((E,), I32),
        num_dropped: P.Tensor((1,), I32),
        share: P.int32,
        alignment: P.int32,
        capacity: P.int32,
    ):
        with P.Kernel(parts, threads=threads) as b:
            topk_idx = P.view(topk_idx, (T * K,), topk_idx_dtype)
            token_topk_to_pos = P.view(token_topk_to_pos, (T * K,), I32)
            # counts of all blocks and of those before this one, then the next row of every warp and expert
            total, before = P.alloc_shared((slices, width), I32), P.alloc_shared((slices, width), I32)
            row = P.alloc_shared((warps, width), I32)
            sums, lost = P.alloc_shared((warps,), I32), P.alloc_shared((1,), I32)
            value = P.alloc_local((BATCH,), I32)
            some = P.alloc_local((ROWS,), I32)
            count, mine = P.alloc_local((own,), I32), P.alloc_local((own,), I32)
            size, dropped = P.alloc_local((1,), I32), P.alloc_local((1,), I32)
            next = P.alloc_local((1,), I32)
            same = P.alloc_local((1,), "uint32")
            pos = P.alloc_local((1,), I32)
            tx = thread(P)
            lane, warp = tx % 32, tx // 32
            # a warp takes whole batches of neighbouring assignments
            stretch = P.ceildiv(share, warps * 32) * 32
            first = b * share + warp * stretch
            end = P.min(P.min(first + stretch, (b + 1) * share), T * K)

            for j in P.unroll(warps * width // threads):
                row[(j * threads + tx) // width, (j * threads + tx) % width] = 0
            if tx == 0:
                lost[0] = 0
            load(value, topk_idx, first + lane, 32, end, E)
            for j in P.unroll(own):
                column, slice = (j * threads + tx) % width, tx // width
                count[0] = 0
                mine[0] = 0
                if column < E:
                    for r in P.serial(P.ceildiv(parts, slices * ROWS)):
                        for u in P.unroll(ROWS):
                            some[u] = 0
                            if (r * ROWS + u) * slices + slice < parts:
                                some[u] = part[(r * ROWS + u) * slices + slice, column]
                        for u in P.unroll(ROWS):
                            count[0] = count[0] + some[u]
                            if (r * ROWS + u) * slices + slice < b:
                                mine[0] = mine[0] + some[u]
                total[slice, column] = count[0]
                before[slice, column] = mine[0]
            P.sync_threads()

            for r in P.serial(P.ceildiv(stretch, 32 * BATCH)):
                for u in P.unroll(BATCH):
                    if value[u] >= 0:
                        P.atomic_add(row[warp, value[u]], 1)
                load(value, topk_idx, first + (r + 1) * BATCH * 32 + lane, 32, end, E)
            load(value, topk_idx, first + lane, 32, end, E)
            # where segments begin: a scan over the lanes of a warp, then over warps
            size[0] = 0
            for j in P.unroll(own):
                count[j] = 0
                mine[j] = 0
                if tx * own + j < width:
                    for s in P.unroll(slices):
                        count[j] = count[j] + total[s, tx * own + j]
                        mine[j] = mine[j] + before[s, tx * own + j]
                size[0] = size[0] + P.ceildiv(count[j], alignment) * alignment
            next[0] = size[0]
            for step in P.unroll(5):
                pos[0] = P.shfl_up(next[0], 1 << step)
                if lane >= 1 << step:
                    next[0] = next[0] + pos[0]
            if lane == 31:
                sums[warp] = next[0]
            P.sync_threads()

            next[0] = next[0] - size[0]
            for w in P.serial(warp):
                next[0] = next[0] + sums[w]
            for j in P.unroll(own):
                e = tx * own + j
                if e < E:
                    if b == 0:
                        segment(expert_start, expert_end, num_tokens_per_expert, dropped, e, next[0], count[j], alignment, capacity, N)
                        if dropped[0] > 0:
                            P.atomic_add(lost[0], dropped[0])
                    pos[0] = mine[j] + (e * capacity if by_capacity else next[0])
                    for w in P.unroll(warps):
                        size[0] = row[w, e]
                        row[w, e] = pos[0]
                        pos[0] = pos[0] + size[0]
                    next[0] = next[0] + P.ceildiv(count[j], alignment) * alignment
            P.sync_threads()
            if b == 0 and tx == 0:
                num_dropped[0] = lost[0]

            for r in P.serial(P.ceildiv(stretch, 32 * BATCH)):
                for u in P.unroll(BATCH):
                    i = first + (r * BATCH + u) * 32 + lane
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
                load(value, topk_idx, first + (r + 1) * BATCH * 32 + lane, 32, end, E)

    return main


def place_on_c(P, K, E, topk_idx_dtype, by_capacity):
    """One assignment after the other."""
    T, N, parts = P.dynamic("T"), P.dynamic("N"), P.dynamic("parts")
    segment = write_segment(P, by_capacity)

    @P.prim_func
    def main(
        topk_idx: P.Tensor((T, K), topk_idx_dtype),
        part: P.Tensor((parts, E), I32),
        pos_to_expert: P.Tensor((N,), I32),
        pos_to_token: P.Tensor((N,), I32),
        pos_to_token_topk: P.Tensor((N,), I32),
        token_topk_to_pos: P.Tensor((T, K), I32),
        expert_start: P.Tensor((E,), I32),
        expert_end: P.Tensor((E,), I32),
        num_tokens_per_expert: P.Tensor((E,), I32),
        num_dropped: P.Tensor((1,), I32),
        share: P.int32,
        alignment: P.int32,
        capacity: P.int32,
    ):
        with P.Kernel(parts, threads=1) as b:
            topk_idx = P.view(topk_idx, (T * K,), topk_idx_dtype)
            token_topk_to_pos = P.view(token_topk_to_pos, (T * K,), I32)
            total, row = P.alloc_local((E,), I32), P.alloc_local((E,), I32)
            next, dropped, lost = P.alloc_local((1,), I32), P.alloc_local((1,), I32), P.alloc_local((1,), I32)
            value, pos = P.alloc_local((1,), I32), P.alloc_local((1,), I32)
            for e in P.serial(E):
                total[e] = 0
            for r in P.serial(b):
                for e in P.serial(E):
                    total[e] = total[e] + part[r, e]
            for e in P.serial(E):
                row[e] = total[e]
            for r in P.serial(parts - b):
                for e in P.serial(E):
                    total[e] = total[e] + part[b + r, e]
            next[0] = 0
            lost[0] = 0
            for e in P.serial(E):
                if b == 0:
                    segment(expert_start, expert_end, num_tokens_per_expert, dropped, e, next[0], total[e], alignment, capacity, N)
                    lost[0] = lost[0] + dropped[0]
                row[e] = row[e] + (e * capacity if by_capacity else next[0])
                next[0] = next[0] + P.ceildiv(total[e], alignment) * alignment
            if b == 0:
                num_dropped[0] = lost[0]
            for c in P.serial(P.max(P.min(share, T * K - b * share), 0)):
                i = b * share + c
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

    return main


def max_num_expanded_tokens(num_tokens: int, num_topk: int, num_experts: int, alignment: int) -> int:
    """Rows that are always enough, whatever the routing: every assignment, and the padding of as many experts as can have any."""
    assignments = num_tokens * num_topk
    return (assignments + (alignment - 1) * min(num_experts, assignments)) // alignment * alignment


def checked(name: str) -> Callable[[Env], None]:
    """The check of a mapping by that name."""

    def expect(argument: str, what: str, good: bool, got: Any) -> None:
        if not good:
            raise value_error(name, argument, what, got)

    def run(env: Env) -> None:
        E, A, N, C = env["num_experts"], env["alignment"], env["num_expanded_tokens"], env["expert_capacity"]
        expect("num_experts", f"1 to {MAX_EXPERTS}", 1 <= E <= MAX_EXPERTS, E)
        expect("alignment", "at least 1", 1 <= A < 2**31, A)
        expect("num_expanded_tokens", f"0 to {MAX_FLAT}", 0 <= N <= MAX_FLAT, N)
        expect("expert_capacity", "not negative, in whole alignments", C >= 0 and C % A == 0, C)
        expect("expert_capacity", "0 where num_expanded_tokens is given", not (C and N), C)
        check_flat(name, "topk_idx", env)
        # positions of the unlimited layout, and those of a full buffer of capacities
        rows = max(env["T"] * env["K"] + (A - 1) * E, E * C)
        expect("alignment", f"at most {MAX_FLAT} rows in the unlimited layout", rows <= MAX_FLAT, A)
        env["E"], env["N"], env["by_capacity"] = E, E * C if C else N, C > 0

    return run


def derive(env: Env) -> Env:
    length = env["T"] * env["K"]
    parts = parts_of(length, env["E"])
    return {"parts": parts, "share": -(-length // parts)}


DOC = """Where every assignment of a token to an expert has its row in an expert-major buffer, whose segments are whole alignments.

Segments follow each other in the order of experts. The first rows of a segment are the assignments of its expert in ascending
order of t * K + k; the rest of it, and all rows behind the last segment, are padding.

Args:
    topk_idx: [T, K] i32 or i64, the experts of the tokens; what is negative or at least num_experts is no assignment.

Attributes:
    num_experts: number of experts E, 1 to 1024.
    alignment: rows of a segment are a multiple of it.
    num_expanded_tokens: rows N of the buffer. An assignment whose row would be at N or beyond is dropped, segments end at N.
    expert_capacity: where positive, every segment has that many rows, N = E * expert_capacity, and an expert's later assignments are
        dropped; a multiple of the alignment.

Returns:
    pos_to_expert [N] i32, the expert of a row, -1 on padding.
    pos_to_token [N] i32, its token t, -1 on padding.
    pos_to_token_topk [N] i32, t * K + k, -1 on padding.
    token_topk_to_pos [T, K] i32, the row of an assignment, -1 where there is none.
    expert_start, expert_end [E] i32, segments with their padding.
    num_tokens_per_expert [E] i32, their lengths.
    num_dropped [1] i32, assignments without a row.

Raises:
    TypeError: topk_idx is neither i32 nor i64.
    ValueError: an attribute is out of its range, or rows cannot be counted in 31 bits.

Numerics:
    Exact, and the same for every number of multiprocessors.

Gradient:
    None.
"""


def declare_mapping(name: str) -> Op:
    """A mapping by that name."""
    return declare(
        name,
        "moe",
        "topk_idx[T, K]:i32|i64 -> pos_to_expert[N]:i32 pos_to_token[N]:i32 pos_to_token_topk[N]:i32 token_topk_to_pos[T, K]:i32 "
        "expert_start[E]:i32 expert_end[E]:i32 num_tokens_per_expert[E]:i32 num_dropped[1]:i32",
        [
            Launch(
                count_and_clear,
                "topk_idx -> part pos_to_expert pos_to_token pos_to_token_topk; share",
                key="K E topk_idx_dtype",
                pass_configs=EXPLICIT,
            ),
            Launch(
                place,
                "topk_idx part -> pos_to_expert pos_to_token pos_to_token_topk token_topk_to_pos expert_start expert_end "
                "num_tokens_per_expert num_dropped; share alignment expert_capacity",
                key="K E topk_idx_dtype by_capacity",
                pass_configs=EXPLICIT,
            ),
        ],
        attrs={"num_experts": 1, "alignment": 1, "num_expanded_tokens": 0, "expert_capacity": 0},
        work="part[parts, E]:i32",
        check=checked(name),
        derive=derive,
        doc=DOC,
    )


get_fused_mapping = declare_mapping("get_fused_mapping")
fused_mapping = declare_mapping("fused_mapping")
