"""`get_fused_mapping`, `fused_mapping`: where every assignment of a token to an expert has its row in an expert-major buffer.

Expert e owns a segment of ceil(count[e] / alignment) * alignment rows, one segment after the other. Its first count[e] rows are its
assignments in ascending order of the flat index t * K + k, the rest is padding. With an expert capacity all segments have that length.

A block counts the experts of its part of the assignments, and all rows become padding. The counts of all blocks say where segments begin,
those of the blocks before it where its own assignments begin in them; then every warp goes through its assignments in order. Blocks
see each other's counts in shared memory where one cluster takes all assignments, otherwise in memory, by two launches. Nothing depends
on the order in which threads run. The C target is one thread, which does it all at once, whatever the size.
"""

from collections.abc import Callable
from typing import Any

from tk_core.errors import value_error
from tk_core.op import Env, Launch, Op, declare
from tk_core.ops.mhc.common import thread
from tk_core.ops.moe.common import BATCH, EXPLICIT, I32, MAX_FLAT, THREADS, check_flat, load_batch, parts_of
from tk_core.ops.moe.segments import Block, assign, begin_segments, clear_rows, count_by_warp, map_in_order

MAX_EXPERTS = 1024
# Rows of counts that a thread has on their way at a time.
ROWS = 8
# Assignments that one cluster of blocks takes alone, rows of the buffer then, and assignments of a thread that are on their way at a time.
# On an H200 two launches take 6.1 to 6.9 us for 15,000 to 250,000 assignments and 4.5 us of gaps; a cluster takes 6.1 us for 15,000
# and 12 us for 100,000.
ALONE, ALONE_ROWS = 1 << 15, 1 << 17
ALONE_BATCH = 8

# ------------------------------------------------------------------ one launch


def map_alone(P, K, E, topk_idx_dtype, by_capacity):
    """One cluster does it all: its blocks read each other's counts."""
    return map_on_c(P, K, E, topk_idx_dtype, by_capacity) if P.cpu else map_by_cluster(P, K, E, topk_idx_dtype, by_capacity)


def map_by_cluster(P, K, E, topk_idx_dtype, by_capacity):
    T, N = P.dynamic("T"), P.dynamic("N")
    by, C = Block(E, ALONE_BATCH), P.cluster
    load, clear, count_up = load_batch(P), clear_rows(P, by.threads), count_by_warp(P, by)
    begin, place = begin_segments(P, by, by_capacity), assign(P, by, K, by_capacity)

    @P.prim_func
    def main(
        topk_idx: P.Tensor((T, K), topk_idx_dtype),
        pos_to_expert: P.Tensor((N,), I32),
        pos_to_token: P.Tensor((N,), I32),
        pos_to_token_topk: P.Tensor((N,), I32),
        token_topk_to_pos: P.Tensor((T, K), I32),
        expert_start: P.Tensor((E,), I32),
        expert_end: P.Tensor((E,), I32),
        num_tokens_per_expert: P.Tensor((E,), I32),
        num_dropped: P.Tensor((1,), I32),
        alignment: P.int32,
        capacity: P.int32,
    ):
        with P.ClusterKernel(C, threads=by.threads) as b:
            topk_idx = P.view(topk_idx, (T * K,), topk_idx_dtype)
            token_topk_to_pos = P.view(token_topk_to_pos, (T * K,), I32)
            row = P.alloc_shared((by.warps, by.width), I32)
            block = P.alloc_shared((by.width,), I32)
            sums, lost = P.alloc_shared((by.warps,), I32), P.alloc_shared((1,), I32)
            value = P.alloc_local((by.batch,), I32)
            count, mine = P.alloc_local((by.own,), I32), P.alloc_local((by.own,), I32)
            some = P.alloc_local((1,), I32)
            tx = thread(P)
            lane, warp = tx % 32, tx // 32
            share = P.alloc_var(I32, init=P.ceildiv(T * K, C))
            stretch = P.alloc_var(I32, init=P.ceildiv(share, by.warps * 32) * 32)
            first = P.alloc_var(I32, init=b * share + warp * stretch)
            end = P.alloc_var(I32, init=P.min(P.min(first + stretch, (b + 1) * share), T * K))

            load(value, topk_idx, first + lane, 32, end, E)
            for j in P.unroll(by.warps * by.width // by.threads):
                row[(j * by.threads + tx) // by.width, (j * by.threads + tx) % by.width] = 0
            clear(pos_to_expert, pos_to_token, pos_to_token_topk, b, C, N)
            P.sync_threads()
            count_up(topk_idx, value, row, first, end, stretch)
            P.sync_threads()
            for j in P.unroll(by.own):
                if tx * by.own + j < by.width:
                    some[0] = 0
                    for w in P.unroll(by.warps):
                        some[0] = some[0] + row[w, tx * by.own + j]
                    block[tx * by.own + j] = some[0]
            # counts of the other blocks can be read now, and cleared rows can be written
            P.sync_cluster()
            for j in P.unroll(by.own):
                count[j] = 0
                mine[j] = 0
                if tx * by.own + j < E:
                    for r in P.unroll(C):
                        some[0] = P.remote(block[tx * by.own + j], r)
                        count[j] = count[j] + some[0]
                        if r < b:
                            mine[j] = mine[j] + some[0]
            begin(
                count, mine, row, sums, lost, expert_start, expert_end, num_tokens_per_expert, num_dropped, b, alignment, capacity, N
            )  # fmt: skip
            place(
                topk_idx, value, row, pos_to_expert, pos_to_token, pos_to_token_topk, token_topk_to_pos, first, end, stretch, capacity, N
            )  # fmt: skip
            P.leave_cluster()

    return main


def map_on_c(P, K, E, topk_idx_dtype, by_capacity):
    T, N = P.dynamic("T"), P.dynamic("N")
    run = map_in_order(P, K, E, by_capacity)

    @P.prim_func
    def main(
        topk_idx: P.Tensor((T, K), topk_idx_dtype),
        pos_to_expert: P.Tensor((N,), I32),
        pos_to_token: P.Tensor((N,), I32),
        pos_to_token_topk: P.Tensor((N,), I32),
        token_topk_to_pos: P.Tensor((T, K), I32),
        expert_start: P.Tensor((E,), I32),
        expert_end: P.Tensor((E,), I32),
        num_tokens_per_expert: P.Tensor((E,), I32),
        num_dropped: P.Tensor((1,), I32),
        alignment: P.int32,
        capacity: P.int32,
    ):
        with P.Kernel(1, threads=1) as b:
            topk_idx = P.view(topk_idx, (T * K,), topk_idx_dtype)
            token_topk_to_pos = P.view(token_topk_to_pos, (T * K,), I32)
            run(
                topk_idx, pos_to_expert, pos_to_token, pos_to_token_topk, token_topk_to_pos, expert_start, expert_end,
                num_tokens_per_expert, num_dropped, b, T * K, alignment, capacity, N,
            )  # fmt: skip

    return main


# ------------------------------------------------------------------ two launches


def count_and_clear(P, K, E, topk_idx_dtype):
    """A block counts the experts of its assignments, and clears its share of the rows."""
    T, N, parts = P.dynamic("T"), P.dynamic("N"), P.dynamic("parts")
    threads = 1 if P.cpu else THREADS
    batch = 1 if P.cpu else BATCH
    load, clear = load_batch(P), clear_rows(P, threads)

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
            clear(pos_to_expert, pos_to_token, pos_to_token_topk, b, parts, N)
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


def place(P, K, E, topk_idx_dtype, by_capacity):
    """A block gives rows to the assignments that it counted in the first launch; on the C target one block to all of them."""
    return place_on_c(P, K, E, topk_idx_dtype, by_capacity) if P.cpu else place_by_parts(P, K, E, topk_idx_dtype, by_capacity)


def place_on_c(P, K, E, topk_idx_dtype, by_capacity):
    T, N, parts = P.dynamic("T"), P.dynamic("N"), P.dynamic("parts")
    run = map_in_order(P, K, E, by_capacity)

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
        with P.Kernel(1, threads=1) as b:
            topk_idx = P.view(topk_idx, (T * K,), topk_idx_dtype)
            token_topk_to_pos = P.view(token_topk_to_pos, (T * K,), I32)
            run(
                topk_idx, pos_to_expert, pos_to_token, pos_to_token_topk, token_topk_to_pos, expert_start, expert_end,
                num_tokens_per_expert, num_dropped, b, T * K, alignment, capacity, N,
            )  # fmt: skip

    return main


def place_by_parts(P, K, E, topk_idx_dtype, by_capacity):
    T, N, parts = P.dynamic("T"), P.dynamic("N"), P.dynamic("parts")
    by = Block(E, BATCH)
    # columns of counts are read by as many threads, or by all
    slices = max(1, by.threads // by.width)
    load, count_up = load_batch(P), count_by_warp(P, by)
    begin, give = begin_segments(P, by, by_capacity), assign(P, by, K, by_capacity)

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
        with P.Kernel(parts, threads=by.threads) as b:
            topk_idx = P.view(topk_idx, (T * K,), topk_idx_dtype)
            token_topk_to_pos = P.view(token_topk_to_pos, (T * K,), I32)
            # counts of all blocks and of those before this one, then the next row of every warp and expert
            total, before = P.alloc_shared((slices, by.width), I32), P.alloc_shared((slices, by.width), I32)
            row = P.alloc_shared((by.warps, by.width), I32)
            sums, lost = P.alloc_shared((by.warps,), I32), P.alloc_shared((1,), I32)
            value = P.alloc_local((by.batch,), I32)
            some = P.alloc_local((ROWS,), I32)
            count, mine = P.alloc_local((by.own,), I32), P.alloc_local((by.own,), I32)
            tx = thread(P)
            lane, warp = tx % 32, tx // 32
            stretch = P.alloc_var(I32, init=P.ceildiv(share, by.warps * 32) * 32)
            first = P.alloc_var(I32, init=b * share + warp * stretch)
            end = P.alloc_var(I32, init=P.min(P.min(first + stretch, (b + 1) * share), T * K))

            for j in P.unroll(by.warps * by.width // by.threads):
                row[(j * by.threads + tx) // by.width, (j * by.threads + tx) % by.width] = 0
            load(value, topk_idx, first + lane, 32, end, E)
            for j in P.unroll(by.own):
                column, slice = (j * by.threads + tx) % by.width, tx // by.width
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
            count_up(topk_idx, value, row, first, end, stretch)
            for j in P.unroll(by.own):
                count[j] = 0
                mine[j] = 0
                if tx * by.own + j < by.width:
                    for s in P.unroll(slices):
                        count[j] = count[j] + total[s, tx * by.own + j]
                        mine[j] = mine[j] + before[s, tx * by.own + j]
            begin(
                count, mine, row, sums, lost, expert_start, expert_end, num_tokens_per_expert, num_dropped, b, alignment, capacity, N
            )  # fmt: skip
            give(
                topk_idx, value, row, pos_to_expert, pos_to_token, pos_to_token_topk, token_topk_to_pos, first, end, stretch, capacity, N
            )  # fmt: skip

    return main


# ------------------------------------------------------------------ declaration


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
    alone = length <= ALONE and env["N"] <= ALONE_ROWS
    return {"parts": parts, "share": -(-length // parts), "alone": alone, "parted": not alone}


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


RESULTS = (
    "pos_to_expert pos_to_token pos_to_token_topk token_topk_to_pos expert_start expert_end num_tokens_per_expert num_dropped"
)  # fmt: skip


def declare_mapping(name: str) -> Op:
    """A mapping by that name."""
    return declare(
        name,
        "moe",
        "topk_idx[T, K]:i32|i64 -> pos_to_expert[N]:i32 pos_to_token[N]:i32 pos_to_token_topk[N]:i32 token_topk_to_pos[T, K]:i32 "
        "expert_start[E]:i32 expert_end[E]:i32 num_tokens_per_expert[E]:i32 num_dropped[1]:i32",
        [
            Launch(
                map_alone,
                f"topk_idx -> {RESULTS}; alignment expert_capacity",
                key="K E topk_idx_dtype by_capacity",
                pass_configs=EXPLICIT,
                when="alone",
            ),
            Launch(
                count_and_clear,
                "topk_idx -> part pos_to_expert pos_to_token pos_to_token_topk; share",
                key="K E topk_idx_dtype",
                pass_configs=EXPLICIT,
                when="parted",
            ),
            Launch(
                place,
                f"topk_idx part -> {RESULTS}; share alignment expert_capacity",
                key="K E topk_idx_dtype by_capacity",
                pass_configs=EXPLICIT,
                when="parted",
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
