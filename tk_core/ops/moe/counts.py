"""How often indices occur: `group_count`, `aux_fi`, `psum_num_tokens_per_expert`.

count[g] = number of entries of the index tensor that equal g        f[e] = fl(fl(count[e] * E) / (T * num_aux_topk))
psum[e] = min(expert_start[e] + count[e], expert_end[e])

Where one cluster of blocks can take a sequence, its blocks send each other their counts: one launch. Otherwise two: rows of counts of up to
128 programs, then their sums with what follows from them.
"""

from tk_core.bits import select
from tk_core.errors import value_error
from tk_core.op import Env, Launch, declare
from tk_core.ops.mhc.common import thread
from tk_core.ops.moe.common import BATCH, EXPLICIT, F32, I32, MAX_FLAT, SHARED_GROUPS, THREADS, check_flat, load_batch, parts_of
from tk_core.ops.moe.histograms import COLUMNS, SLICES, ClusterCounts, sum_column
from tk_core.ops.quant.bits import divide

# Entries of a sequence that one cluster takes alone, and the most sequences that do.
# On an H200 that takes 2.1, 3.1 and 4.5 us for 16,000, 112,000 and 260,000 entries, and two launches 2.9, 3.4 and 3.5 us with gaps that
# are 3 us longer.
ALONE = 1 << 18
ALONE_SEQS = 64

# ------------------------------------------------------------------ one launch


def count_groups_alone(P, K, G, group_idx_dtype):
    """A cluster takes a sequence."""
    T, S = P.dynamic("T"), P.dynamic("S")
    C, by = P.cluster, ClusterCounts(P, G)
    count_up, sum_up = by.count(), by.sum()

    @P.prim_func
    def main(group_idx: P.Tensor((T, K), group_idx_dtype), counts: P.Tensor((S, G), I32), length: P.int32):
        with P.ClusterKernel(C, S, threads=by.threads) as (b, s):
            group_idx = P.view(group_idx, (T * K,), group_idx_dtype)
            slot = P.alloc_shared((C, by.own), I32)
            total = P.alloc_local((1,), I32)
            share = P.ceildiv(length, C)
            begin = P.alloc_var(I32, init=s * length + b * share)
            end = P.alloc_var(I32, init=s * length + P.min((b + 1) * share, length))
            count_up(group_idx, slot, b, begin, end)
            for step in P.serial(by.steps):
                g = by.group(step, b)
                if g < G:
                    sum_up(slot, g, total)
                    counts[s, g] = total[0]

    return main


def fractions_alone(P, K, G, topk_idx_dtype):
    """A cluster takes all entries."""
    T = P.dynamic("T")
    C, by = P.cluster, ClusterCounts(P, G)
    count_up, sum_up = by.count(), by.sum()

    @P.prim_func
    def main(topk_idx: P.Tensor((T, K), topk_idx_dtype), f: P.Tensor((G,), F32), length: P.int32, divisor: P.int64):
        with P.ClusterKernel(C, threads=by.threads) as b:
            topk_idx = P.view(topk_idx, (T * K,), topk_idx_dtype)
            slot = P.alloc_shared((C, by.own), I32)
            total = P.alloc_local((1,), I32)
            share = P.ceildiv(length, C)
            begin = P.alloc_var(I32, init=b * share)
            end = P.alloc_var(I32, init=P.min((b + 1) * share, length))
            count_up(topk_idx, slot, b, begin, end)
            for step in P.serial(by.steps):
                e = by.group(step, b)
                if e < G:
                    sum_up(slot, e, total)
                    f[e] = fraction(P, total[0], G, divisor)

    return main


def ends_alone(P, K, G, topk_idx_dtype, has):
    """A cluster takes all entries."""
    T = P.dynamic("T")
    C, by = P.cluster, ClusterCounts(P, G)
    count_up, sum_up = by.count(), by.sum()
    bounded = "expert_end" in has

    @P.prim_func
    def main(
        topk_idx: P.Tensor((T, K), topk_idx_dtype),
        expert_start: P.Tensor((G,), I32),
        expert_end: P.Tensor((G,), I32),
        psum: P.Tensor((G,), I32),
        length: P.int32,
    ):
        with P.ClusterKernel(C, threads=by.threads) as b:
            topk_idx = P.view(topk_idx, (T * K,), topk_idx_dtype)
            slot = P.alloc_shared((C, by.own), I32)
            total = P.alloc_local((1,), I32)
            share = P.ceildiv(length, C)
            begin = P.alloc_var(I32, init=b * share)
            end = P.alloc_var(I32, init=P.min((b + 1) * share, length))
            count_up(topk_idx, slot, b, begin, end)
            for step in P.serial(by.steps):
                e = by.group(step, b)
                if e < G:
                    sum_up(slot, e, total)
                    psum[e] = P.min(expert_start[e] + total[0], expert_end[e]) if bounded else expert_start[e] + total[0]

    return main


def fraction(P, count, G: int, divisor):
    """count * G / divisor, rounded as fp32 rounds each of them; zero where there is no row."""
    return select(divisor > 0, divide(P, P.mul(P.Cast(F32, count), P.f32(G)), P.Cast(F32, P.max(divisor, P.int64(1)))), P.f32(0))


# ------------------------------------------------------------------ two launches


def count(P, K, G, topk_idx_dtype):
    """A block counts the groups of a part of one sequence; where they are too many for its memory, some of them."""
    T, S, parts = P.dynamic("T"), P.dynamic("S"), P.dynamic("parts")
    threads = 1 if P.cpu else THREADS
    width = min(G, SHARED_GROUPS)
    batch = 1 if P.cpu else BATCH
    load = load_batch(P)

    @P.prim_func
    def main(topk_idx: P.Tensor((T, K), topk_idx_dtype), part: P.Tensor((parts, S, G), I32), length: P.int32, share: P.int32):
        with P.Kernel(S, parts, P.ceildiv(G, width), threads=threads) as (s, p, w):
            topk_idx = P.view(topk_idx, (T * K,), topk_idx_dtype)
            counts = P.alloc_shared((width,), I32)
            value = P.alloc_local((batch,), I32)
            end = s * length + P.min((p + 1) * share, length)
            for r in P.serial(-(-width // threads)):
                if r * threads + thread(P) < width:
                    counts[r * threads + thread(P)] = 0
            P.sync_threads()
            for r in P.serial(P.ceildiv(share, threads * batch)):
                load(value, topk_idx, s * length + p * share + r * batch * threads + thread(P), threads, end, G)
                for u in P.unroll(batch):
                    if value[u] >= w * width and value[u] < (w + 1) * width:
                        P.atomic_add(counts[value[u] - w * width], 1)
            P.sync_threads()
            for r in P.serial(-(-width // threads)):
                at = r * threads + thread(P)
                if at < width and w * width + at < G:
                    part[p, s, w * width + at] = counts[at]

    return main


def count_groups(P, K, G, group_idx_dtype):
    """The same, of groups."""
    return count(P, K, G, group_idx_dtype)


def add_counts(P, G):
    """counts = the sum of the rows."""
    S, parts = P.dynamic("S"), P.dynamic("parts")
    sum_of = sum_column(P)

    @P.prim_func
    def main(part: P.Tensor((parts, S, G), I32), counts: P.Tensor((S, G), I32)):
        with P.Kernel(P.ceildiv(S * G, COLUMNS), threads=COLUMNS * SLICES) as b:
            part = P.view(part, (parts, S * G), I32)
            counts = P.view(counts, (S * G,), I32)
            shared = P.alloc_shared((SLICES, COLUMNS), I32)
            total = P.alloc_local((1,), I32)
            for c in P.serial(COLUMNS if P.cpu else 1):
                g = b * COLUMNS + c + thread(P) % COLUMNS
                sum_of(part, parts, g, S * G, shared, total)
                if thread(P) < COLUMNS and g < S * G:
                    counts[g] = total[0]

    return main


def add_fractions(P, G):
    """f = count * E / divisor; zeros where there is no row."""
    parts = P.dynamic("parts")
    sum_of = sum_column(P)

    @P.prim_func
    def main(part: P.Tensor((parts, 1, G), I32), f: P.Tensor((G,), F32), divisor: P.int64):
        with P.Kernel(P.ceildiv(G, COLUMNS), threads=COLUMNS * SLICES) as b:
            part = P.view(part, (parts, G), I32)
            shared = P.alloc_shared((SLICES, COLUMNS), I32)
            total = P.alloc_local((1,), I32)
            for c in P.serial(COLUMNS if P.cpu else 1):
                e = b * COLUMNS + c + thread(P) % COLUMNS
                sum_of(part, parts, e, G, shared, total)
                if thread(P) < COLUMNS and e < G:
                    f[e] = fraction(P, total[0], G, divisor)

    return main


def add_ends(P, G, has):
    """psum = start + count, within the segment."""
    parts = P.dynamic("parts")
    sum_of = sum_column(P)
    bounded = "expert_end" in has

    @P.prim_func
    def main(
        part: P.Tensor((parts, 1, G), I32),
        expert_start: P.Tensor((G,), I32),
        expert_end: P.Tensor((G,), I32),
        psum: P.Tensor((G,), I32),
    ):
        with P.Kernel(P.ceildiv(G, COLUMNS), threads=COLUMNS * SLICES) as b:
            part = P.view(part, (parts, G), I32)
            shared = P.alloc_shared((SLICES, COLUMNS), I32)
            total = P.alloc_local((1,), I32)
            for c in P.serial(COLUMNS if P.cpu else 1):
                e = b * COLUMNS + c + thread(P) % COLUMNS
                sum_of(part, parts, e, G, shared, total)
                if thread(P) < COLUMNS and e < G:
                    psum[e] = P.min(expert_start[e] + total[0], expert_end[e]) if bounded else expert_start[e] + total[0]

    return main


def check(op: str, groups: str, argument: str = "topk_idx"):
    """The number of groups by that name is the size of a histogram."""

    def run(env: Env) -> None:
        if env[groups] < 1:
            raise value_error(op, groups, "at least 1", env[groups])
        if env.get("num_aux_topk", 1) < 1:
            raise value_error(op, "num_aux_topk", "at least 1", env["num_aux_topk"])
        S = env.setdefault("num_seqs", 1)
        if S < 1 or env["T"] % S:
            raise value_error(op, "num_seqs", f"a positive number that divides {env['T']} rows", S)
        check_flat(op, argument, env)
        if env[groups] * S > MAX_FLAT:
            raise value_error(op, groups, f"at most {MAX_FLAT} counts", f"{S} x {env[groups]}")
        env["G"] = env[groups]

    return run


def derive(env: Env) -> Env:
    length = env["T"] // env["num_seqs"] * env["K"]
    parts = parts_of(length, env["num_seqs"] * env["G"])
    alone = length <= ALONE and env["G"] <= SHARED_GROUPS and env["num_seqs"] <= ALONE_SEQS
    return {"length": length, "parts": parts, "share": -(-length // parts), "alone": alone, "parted": not alone}


ALONE_LAUNCH = {"pass_configs": EXPLICIT, "when": "alone"}
COUNT = {"args": "topk_idx -> part; length share", "key": "K G topk_idx_dtype", "pass_configs": EXPLICIT, "when": "parted"}
COUNT_GROUPS = {"args": "group_idx -> part; length share", "key": "K G group_idx_dtype", "pass_configs": EXPLICIT, "when": "parted"}
ADD = {"key": "G", "pass_configs": EXPLICIT, "when": "parted"}
WORK = "part[parts, num_seqs, G]:i32"

COUNT_DOC = """Count how often every group occurs.

counts[b, g] = number of entries of sequence b that equal g

Args:
    group_idx: [T, K] i32 or i64; what is negative or at least num_groups does not count.

Attributes:
    num_groups: number of groups, at least 1.
    num_seqs: number of sequences; it divides T, and each has T / num_seqs neighbouring rows.

Returns:
    [num_seqs, num_groups] i32.

Raises:
    TypeError: group_idx is neither i32 nor i64.
    ValueError: num_groups < 1, num_seqs does not divide T, or there are too many entries.

Numerics:
    Exact.

Gradient:
    None.
"""

group_count = declare(
    "group_count",
    "moe",
    "group_idx[T, K]:i32|i64 -> counts[num_seqs, num_groups]:i32",
    [
        Launch(count_groups_alone, "group_idx -> counts; length", key="K G group_idx_dtype", **ALONE_LAUNCH),
        Launch(count_groups, **COUNT_GROUPS),
        Launch(add_counts, "part -> counts", **ADD),
    ],
    attrs={"num_groups": 1, "num_seqs": 1},
    work=WORK,
    check=check("group_count", "num_groups", "group_idx"),
    derive=derive,
    doc=COUNT_DOC,
)

FI_DOC = """The fraction of the load that every expert has, 1 where all have the same: a factor of the load-balance loss.

f[e] = count[e] * num_experts / (T * num_aux_topk)

Args:
    topk_idx: [T, K] i32 or i64; T counts all rows, also those without an expert.

Attributes:
    num_experts: number of experts, at least 1.
    num_aux_topk: experts of a token; a divisor, it need not be K.

Returns:
    [num_experts] f32; zeros where T = 0.

Raises:
    TypeError: topk_idx is neither i32 nor i64.
    ValueError: num_experts < 1 or num_aux_topk < 1.

Numerics:
    Bit-exact: fl(fl(count * num_experts) / fl(T * num_aux_topk)), with a true division.

Gradient:
    None: f is a constant of the loss.

Source:
    Switch Transformers, 2021; DeepSeek-V2, 2024.
"""

aux_fi = declare(
    "aux_fi",
    "moe",
    "topk_idx[T, K]:i32|i64 -> f[num_experts]:f32",
    [
        Launch(fractions_alone, "topk_idx -> f; length T*num_aux_topk", key="K G topk_idx_dtype", **ALONE_LAUNCH),
        Launch(count, **COUNT),
        Launch(add_fractions, "part -> f; T*num_aux_topk", **ADD),
    ],
    attrs={"num_experts": 1, "num_aux_topk": 1},
    work=WORK,
    check=check("aux_fi", "num_experts"),
    derive=derive,
    doc=FI_DOC,
)

PSUM_DOC = """Where the valid rows of every expert's segment end: the layout that a prefix sum of the counts describes.

psum[e] = expert_start[e] + number of entries that equal e, at most expert_end[e]

Args:
    topk_idx: [T, K] i32 or i64, what the mapping was made of.
    expert_start: [E] i32, where segments begin.
    expert_end: [E] i32, where they end; they matter where assignments were dropped.

Returns:
    [E] i32.

Raises:
    TypeError: a dtype is another one.
    ValueError: a shape does not fit.

Numerics:
    Exact.

Gradient:
    None.
"""

psum_num_tokens_per_expert = declare(
    "psum_num_tokens_per_expert",
    "moe",
    "topk_idx[T, K]:i32|i64 expert_start[E]:i32 expert_end?[E]:i32 -> psum[E]:i32",
    [
        Launch(ends_alone, "topk_idx expert_start expert_end -> psum; length", key="K G topk_idx_dtype", **ALONE_LAUNCH),
        Launch(count, **COUNT),
        Launch(add_ends, "part expert_start expert_end -> psum", **ADD),
    ],
    work=WORK,
    check=check("psum_num_tokens_per_expert", "E"),
    derive=derive,
    doc=PSUM_DOC,
)
