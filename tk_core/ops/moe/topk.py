"""`topk_gate` and `topk_sum_and_topk_group_idx`: the largest of a row, descending, the lower index first among equal ones.

On CUDA a warp takes a row. A lane sorts the keys of its experts by value alone, in pieces that it merges into a list of as many as may be
chosen. Then in every round the warp finds the largest head of all lists, by one reduction in hardware; the lowest lane that has it gives
it away and notes how many it gave before. What is left to find is at which index: slot k is looked up by lane k, all at the same time,
in shared memory: the keys there that are larger than its own tell which of equal ones it is.
"""

from tk_core.bits import select, u32
from tk_core.errors import value_error
from tk_core.op import Env, Launch, declare
from tk_core.ops.moe.scoring import F32, I32, NONE, U32, key_of, number_of
from tk_core.ops.moe.warps import MAX_EXPERTS, PASS_CONFIGS, SLOTS, Row, sync_warp

INDEX_DTYPES = ("int64", "int32")

# ------------------------------------------------------------------ selection of K experts


def list_length(E: int, K: int) -> int:
    """Keys that a lane keeps: a power of two, at least as many as can be chosen of its experts, whole vectors of four."""
    most = min(K, -(-E // (SLOTS * 4)) * 4)
    return 1 << (most - 1).bit_length()


def row_of(P, E: int, K: int, arrays: int = 1) -> Row:
    return Row(P, E, list_length(E, K), arrays)


def sorting(n: int) -> list[tuple[int, int]]:
    """Batcher's odd-even merge sort of n keys as pairs of places to put in order."""
    pairs, p = [], 1
    while p < n:
        k = p
        while k:
            for j in range(k % p, n - k, 2 * k):
                pairs += [(i + j, i + j + k) for i in range(min(k, n - j - k)) if (i + j) // (2 * p) == (i + j + k) // (2 * p)]
            k //= 2
        p *= 2
    return pairs


def bitonic(n: int) -> list[tuple[int, int]]:
    """The same for n keys, a power of two, that rise and fall."""
    halves = [n >> (i + 1) for i in range(n.bit_length() - 1)]
    return [(i, i + k) for k in halves for i in range(n) if not i & k]


def select_experts(P, row: Row, K: int):
    """Macro: the K largest of keys[w, :] to chosen[w, :], in order, with a barrier of the warp behind them.

    keys[w, row.E:row.size] must be NONE. On C the keys are spent.
    """
    R, L = row.per, list_length(row.E, K)
    sizes = [min(L, R - at) for at in range(0, R, L)]
    serial = len(sizes) > 8
    # round k: keys that move up in a list, of which the first K - k can still be given
    rounds = [(k, list(range(min(L, K - k) - 1)), L < K - k) for k in range(K)]

    @P.macro
    def order(top, pairs):
        spare = P.alloc_var(I32, init=NONE)
        for i, j in pairs:
            spare = P.max(top[i], top[j])
            top[j] = P.min(top[i], top[j])
            top[i] = spare

    @P.macro
    def read(keys, w, first, piece, size):
        for q in P.unroll(-(-size // 4)):
            for j in P.vectorized(min(size, 4)):
                piece[4 * q + j] = keys[w, first + 4 * q + j]

    @P.macro
    def merge(top, piece, size):
        """The L largest of both: of the largest of one and the smallest of the other, and so on, the larger one each."""
        order(piece, sorting(size))
        for i in P.unroll(size):
            top[L - size + i] = P.max(top[L - size + i], piece[size - 1 - i])
        order(top, bitonic(L))

    @P.macro
    def on_cuda(keys, chosen, w):
        lane = row.lane(P)
        top = P.alloc_local((L,), I32)
        piece = P.alloc_local((L,), I32)
        read(keys, w, lane * R, top, sizes[0])
        order(top, sorting(sizes[0]))
        for i in P.unroll(L - sizes[0]):
            top[sizes[0] + i] = NONE
        if serial:
            for c in P.serial(len(sizes) - 1):
                read(keys, w, lane * R + (c + 1) * L, piece, L)
                merge(top, piece, L)
        else:
            for c, size in enumerate(sizes[1:]):
                read(keys, w, lane * R + (c + 1) * L, piece, size)
                merge(top, piece, size)
        # what slot `lane` got: the key, the lane that gave it, how many it gave before
        given = P.alloc_var(I32, init=0)
        best = P.alloc_var(I32, init=NONE)
        key = P.alloc_var(I32, init=NONE)
        gives = P.alloc_var(I32, init=0)
        lower = P.alloc_var(U32, init=(u32(1) << P.Cast(U32, lane)) - u32(1))
        tied = P.alloc_var(U32, init=u32(0))
        for k, moves, empty in rounds:
            best = P.call_pure_extern(I32, "__reduce_max_sync", u32(0xFFFFFFFF), top[0])
            key = select(lane == k, best, key)
            tied = P.call_pure_extern(U32, "__ballot_sync", u32(0xFFFFFFFF), top[0] == best)
            gives = P.Cast(I32, top[0] == best and (tied & lower) == u32(0))
            if gives > 0:
                chosen[w, k] = lane << 16 | given
            # selections, for a branch would cost more
            given += gives
            for i in moves:
                top[i] = select(gives > 0, top[i + 1], top[i])
            if empty:
                top[L - 1] = select(gives > 0, NONE, top[L - 1])
        sync_warp(P)
        if lane < K:
            source = P.alloc_var(I32, init=chosen[w, lane] >> 16)
            before = P.alloc_var(I32, init=chosen[w, lane] & 0xFFFF)
            place = P.alloc_var(I32, init=0)
            four = P.alloc_local((4,), I32)
            # keys that are larger come before, the others before it are equal ones
            for q in P.serial(R // 4) if R > 32 else P.unroll(R // 4):
                for j in P.vectorized(4):
                    four[j] = keys[w, source * R + 4 * q + j]
                for j in P.unroll(4):
                    before -= P.Cast(I32, four[j] > key)
            for q in P.serial(R // 4) if R > 32 else P.unroll(R // 4):
                for j in P.vectorized(4):
                    four[j] = keys[w, source * R + 4 * q + j]
                for j in P.unroll(4):
                    if four[j] == key:
                        if before == 0:
                            place = 4 * q + j
                        before -= 1
            chosen[w, lane] = source * R + place
        sync_warp(P)

    @P.macro
    def on_c(keys, chosen, w):
        for k in P.serial(K):
            best = P.alloc_var(I32, init=NONE)
            place = P.alloc_var(I32, init=row.E)
            for e in P.serial(row.E):
                best = P.max(best, keys[w, e])
            for e in P.serial(row.E):
                place = P.min(place, select(keys[w, e] == best, e, row.E))
            chosen[w, k] = place
            keys[w, place] = NONE

    return on_c if P.cpu else on_cuda


def fill_rest(P, row: Row):
    """Macro: no experts behind the last one."""

    @P.macro
    def run(keys, w):
        rest = row.size - row.E
        for i in P.unroll(-(-rest // row.lanes)):
            if i * row.lanes + row.lane(P) < rest:
                keys[w, row.E + i * row.lanes + row.lane(P)] = NONE

    return run


def topk(P, E, K, idx):
    """A warp takes a row."""
    T = P.dynamic("T")
    row = row_of(P, E, K)
    V = row.V
    choose, fill = select_experts(P, row, K), fill_rest(P, row)

    @P.prim_func
    def main(scores: P.Tensor((T, E), F32), topk_idx: P.Tensor((T, K), idx)):
        with P.Kernel(P.ceildiv(T, row.warps), threads=row.threads) as b:
            keys = P.alloc_shared((row.warps, row.size), I32)
            chosen = P.alloc_shared((row.warps, SLOTS), I32)
            x = P.alloc_local((V,), F32)
            key = P.alloc_local((V,), I32)
            w, lane = P.alloc_var(I32, init=row.warp(P)), row.lane(P)
            t = P.alloc_var(I32, init=row.token(P, b, w, T))
            for s in row.loop(P):
                e = (s * row.lanes + lane) * V
                if e < E:
                    for v in P.vectorized(V):
                        x[v] = scores[t, e + v]
                    for v in P.unroll(V):
                        key[v] = key_of(P, x[v])
                    for v in P.vectorized(V):
                        keys[w, e + v] = key[v]
            fill(keys, w)
            sync_warp(P)
            choose(keys, chosen, w)
            for s in row.slots(P, K):
                if s + lane < K:
                    topk_idx[t, s + lane] = P.Cast(idx, chosen[w, s + lane])

    return main


# ------------------------------------------------------------------ selection of groups


def group_lanes(P, G: int) -> int:
    """Lanes that share a group."""
    return 1 if P.cpu else SLOTS // (1 << (G - 1).bit_length())


def rank_groups(P, row: Row, G: int, num_sum: int):
    """Macro: place[w, g] <- how many groups come before group g by the sum of their num_sum largest keys.

    A barrier of the warp is behind them. `group_key` is a shared array for it.
    """
    Eg, share = row.E // G, group_lanes(P, G)
    groups_at_once = G if P.cpu else 1

    @P.macro
    def run(keys, group_key, place, w):
        lane = row.lane(P)
        one = P.alloc_var(I32, init=NONE)
        two = P.alloc_var(I32, init=NONE)
        key = P.alloc_var(I32, init=NONE)
        other = P.alloc_var(I32, init=NONE)
        other_two = P.alloc_var(I32, init=NONE)
        total = P.alloc_var(F32, init=0.0)
        before = P.alloc_var(I32, init=0)
        for s in P.serial(groups_at_once):
            g = s + lane // share
            part = lane % share
            # lanes without a group look at the last one, for all of them exchange what they found
            of = P.min(g, G - 1) * Eg
            one = P.Cast(I32, NONE)
            two = P.Cast(I32, NONE)
            for i in P.serial(-(-Eg // share)):
                if i * share + part < Eg:
                    key = keys[w, of + i * share + part]
                    two = P.max(two, P.min(one, key))
                    one = P.max(one, key)
            for step in P.unroll(share.bit_length() - 1):
                other = P.shfl_xor(one, 1 << step)
                other_two = P.shfl_xor(two, 1 << step)
                two = P.max(P.min(one, other), P.max(two, other_two))
                one = P.max(one, other)
            total = P.add(number_of(P, one), number_of(P, two)) if num_sum == 2 else number_of(P, one)
            if g < G and part == 0:
                group_key[w, g] = key_of(P, total)
        sync_warp(P)
        for s in row.slots(P, G):
            g = s + lane
            if g < G:
                before = 0
                for i in P.serial(G):
                    before += P.Cast(I32, group_key[w, i] > group_key[w, g] or (group_key[w, i] == group_key[w, g] and i < g))
                place[w, g] = before
        sync_warp(P)

    return run


def topk_groups(P, G, Eg, num_topk_sum, num_topk_groups, idx):
    """A warp takes a row, a few lanes a group."""
    T, E = P.dynamic("T"), G * Eg
    row = Row(P, E)
    V = row.V
    rank = rank_groups(P, row, G, num_topk_sum)

    @P.prim_func
    def main(scores: P.Tensor((T, G, Eg), F32), group_idx: P.Tensor((T, num_topk_groups), idx)):
        with P.Kernel(P.ceildiv(T, row.warps), threads=row.threads) as b:
            scores = P.view(scores, (T, E), F32)
            keys = P.alloc_shared((row.warps, row.size), I32)
            group_key = P.alloc_shared((row.warps, SLOTS), I32)
            place = P.alloc_shared((row.warps, SLOTS), I32)
            x = P.alloc_local((V,), F32)
            key = P.alloc_local((V,), I32)
            w, lane = P.alloc_var(I32, init=row.warp(P)), row.lane(P)
            t = P.alloc_var(I32, init=row.token(P, b, w, T))
            for s in row.loop(P):
                e = (s * row.lanes + lane) * V
                if e < E:
                    for v in P.vectorized(V):
                        x[v] = scores[t, e + v]
                    for v in P.unroll(V):
                        key[v] = key_of(P, x[v])
                    for v in P.vectorized(V):
                        keys[w, e + v] = key[v]
            sync_warp(P)
            rank(keys, group_key, place, w)
            for s in row.slots(P, G):
                if s + lane < G:
                    if place[w, s + lane] < num_topk_groups:
                        topk_at = place[w, s + lane]
                        group_idx[t, topk_at] = P.Cast(idx, s + lane)

    return main


# ------------------------------------------------------------------ declarations


def check_index(op: str, env: Env) -> None:
    """Indices are int32 or int64."""
    if env["idx"] not in INDEX_DTYPES:
        raise value_error(op, "idx", " or ".join(map(repr, INDEX_DTYPES)), env["idx"])


def check_experts(op: str, argument: str, E: int) -> None:
    """A warp keeps a row in shared memory."""
    if not 1 <= E <= MAX_EXPERTS:
        raise value_error(op, argument, f"1 to {MAX_EXPERTS} experts", E)


def check_topk(env: Env) -> None:
    check_index("topk_gate", env)
    check_experts("topk_gate", "scores", env["E"])
    most = min(env["E"], SLOTS)
    if not 1 <= env["num_topk"] <= most:
        raise value_error("topk_gate", "num_topk", f"1 to {most}", env["num_topk"])
    env["K"] = env["num_topk"]


def check_groups(env: Env) -> None:
    op, G, Eg = "topk_sum_and_topk_group_idx", env["G"], env["Eg"]
    check_index(op, env)
    if not 1 <= G <= SLOTS:
        raise value_error(op, "scores", f"1 to {SLOTS} groups", G)
    check_experts(op, "scores", G * Eg)
    if env["num_topk_sum"] not in (1, 2) or env["num_topk_sum"] > Eg:
        raise value_error(op, "num_topk_sum", f"1 or 2, and at most {Eg} experts of a group", env["num_topk_sum"])
    if not 1 <= env["num_topk_groups"] <= G:
        raise value_error(op, "num_topk_groups", f"1 to {G}", env["num_topk_groups"])


TOPK_DOC = """Indices of the largest scores of every row, descending, ties to the smaller index.

Args:
    scores: [..., E] f32. -inf ranks last, by index; 0.0 and -0.0 are equal; NaN gives some index in range.
    num_topk: how many, 1 to min(E, 32).
    idx: dtype of the result, "int64" or "int32".

Returns:
    [..., num_topk], the first of a stable descending sort.

Raises:
    TypeError: scores is not f32.
    ValueError: num_topk is out of range, or there are more than 8192 experts.

Numerics:
    Exact.

Gradient:
    none.
"""

GROUPS_DOC = """The groups of experts with the highest scores, descending, ties to the smaller group.

A group's score is its largest element, or the sum of its two largest.

Args:
    scores: [..., G, Eg] f32, at most 32 groups.
    num_topk_sum: 1 or 2, elements that are added up.
    num_topk_groups: how many groups, 1 to G.
    idx: dtype of the result, "int64" or "int32".

Returns:
    [..., num_topk_groups].

Raises:
    TypeError: scores is not f32.
    ValueError: an attribute is out of range, or there are more than 32 groups or 8192 experts.

Numerics:
    Exact; the sum is rounded once.

Gradient:
    none.
"""

topk_gate = declare(
    "topk_gate",
    "moe",
    "scores[..., E]:f32 -> topk_idx[..., K]:idx",
    [Launch(topk, "scores -> topk_idx", key="E K idx", pass_configs=PASS_CONFIGS)],
    attrs={"num_topk": 1, "idx": "int64"},
    check=check_topk,
    doc=TOPK_DOC,
)

topk_sum_and_topk_group_idx = declare(
    "topk_sum_and_topk_group_idx",
    "moe",
    "scores[..., G, Eg]:f32 -> group_idx[..., num_topk_groups]:idx",
    [Launch(topk_groups, "scores -> group_idx", key="G Eg num_topk_sum num_topk_groups idx", pass_configs=PASS_CONFIGS)],
    attrs={"num_topk_sum": 1, "num_topk_groups": 1, "idx": "int64"},
    check=check_groups,
    doc=GROUPS_DOC,
)
