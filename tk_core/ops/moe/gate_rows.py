"""What a gate does with one row: scores and keys, limited groups, experts at random."""

from tk_core.bits import select, u32
from tk_core.ops.moe.scoring import F32, I32, NONE, PRELUDE, U32, key_of, score
from tk_core.ops.moe.topk import rank_groups
from tk_core.ops.moe.warps import sync_warp, warp_max, warp_sum
from tk_core.ops.quant.bits import divide


def score_row(P, row, scoring: str, biased: bool, imaged: bool, want_scores: bool, want_sum: bool):
    """Macro: scores of a row to u[w, :] and to memory, keys to keys[w, :], the sum of the scores to total[0] where it is wanted."""
    V, softmax = row.V, scoring == "softmax"
    max_of, sum_of = warp_max(P), warp_sum(P)

    @P.macro
    def run(logits, bias, image_bias, image, scores, u, keys, total, t, w):
        x = P.alloc_local((V,), F32)
        b = P.alloc_local((V,), F32)
        y = P.alloc_local((V,), F32)
        key = P.alloc_local((V,), I32)
        top = P.alloc_local((1,), F32)
        top[0] = P.f32(float("-inf"))
        total[0] = P.f32(0)
        for s in row.loop(P):
            e = (s * row.lanes + row.lane(P)) * V
            if e < row.E:
                for v in P.vectorized(V):
                    x[v] = logits[t, e + v]
                for v in P.unroll(V):
                    b[v] = P.f32(0)
                if imaged:
                    if image > 0:
                        for v in P.vectorized(V):
                            b[v] = image_bias[e + v]
                    elif biased:
                        for v in P.vectorized(V):
                            b[v] = bias[e + v]
                elif biased:
                    for v in P.vectorized(V):
                        b[v] = bias[e + v]
                for v in P.unroll(V):
                    if softmax:
                        y[v] = x[v]
                        top[0] = P.max(top[0], x[v])
                    else:
                        y[v] = score(P, scoring, x[v])
                        total[0] = total[0] + y[v]
                    key[v] = key_of(P, P.add(y[v], b[v]))
                for v in P.vectorized(V):
                    keys[w, e + v] = key[v]
                for v in P.vectorized(V):
                    u[w, e + v] = y[v]
                if want_scores and not softmax:
                    for v in P.vectorized(V):
                        scores[t, e + v] = y[v]
        if softmax:
            max_of(top)
            # a lane has the same experts in every pass
            for s in row.loop(P):
                e = (s * row.lanes + row.lane(P)) * V
                if e < row.E:
                    for v in P.vectorized(V):
                        x[v] = u[w, e + v]
                    for v in P.unroll(V):
                        y[v] = P.exp(x[v] - top[0])
                        total[0] = total[0] + y[v]
                    for v in P.vectorized(V):
                        u[w, e + v] = y[v]
            sum_of(total)
            for s in row.loop(P):
                e = (s * row.lanes + row.lane(P)) * V
                if e < row.E:
                    for v in P.vectorized(V):
                        x[v] = u[w, e + v]
                    for v in P.unroll(V):
                        y[v] = divide(P, x[v], total[0])
                    for v in P.vectorized(V):
                        u[w, e + v] = y[v]
                    if want_scores:
                        for v in P.vectorized(V):
                            scores[t, e + v] = y[v]
            # of the rounded quotients it is one to within their roundings
            total[0] = P.f32(1)
        elif want_sum:
            sum_of(total)

    return run


def clear_row(P, row):
    """Macro: scores[t, :] <- 0."""
    V = row.V

    @P.macro
    def run(scores, t):
        zero = P.alloc_local((V,), F32)
        for v in P.unroll(V):
            zero[v] = P.f32(0)
        for s in row.loop(P):
            e = (s * row.lanes + row.lane(P)) * V
            if e < row.E:
                for v in P.vectorized(V):
                    scores[t, e + v] = zero[v]

    return run


def limit_groups(P, row, G: int, Gk: int):
    """Macro: keys of experts outside the Gk best groups <- NONE, with a barrier of the warp behind them."""
    rank = rank_groups(P, row, G, 2)
    Eg = row.E // G

    @P.macro
    def run(keys, group_key, place, w):
        rank(keys, group_key, place, w)
        for s in P.serial(-(-row.E // row.lanes)):
            e = s * row.lanes + row.lane(P)
            if e < row.E:
                if place[w, e // Eg] >= Gk:
                    keys[w, e] = NONE
        sync_warp(P)

    return run


def draw(P, n: int):
    """Macro: n different numbers of [0, bound) to chosen[w, :n], every choice and every order as likely as any other; -1 beyond bound.

    Number k is one of the bound - k that are left; those before it are stepped over in ascending order.
    """
    # before number k there are k others: what they are compared with, and the place that is free
    rounds = [(k, list(range(k))) for k in range(n)]

    @P.macro
    def run(chosen, w, seed, bound):
        taken = P.alloc_local((n,), I32)
        number = P.alloc_var(I32, init=0)
        carry = P.alloc_var(I32, init=0)
        least = P.alloc_var(I32, init=0)
        for k, before in rounds:
            bits = P.Cast("uint64", hashed(P, seed, k))
            number = P.Cast(I32, (bits * P.Cast("uint64", P.max(bound - k, 1))) >> P.Cast("uint64", 32))
            for i in before:
                number = number + P.Cast(I32, number >= taken[i])
            chosen[w, k] = select(k < bound, number, -1)
            carry = number
            for i in before:
                # no minimum and maximum: the code generator of C would not read `carry` again
                least = select(taken[i] < carry, taken[i], carry)
                carry = select(taken[i] < carry, carry, taken[i])
                taken[i] = least
            taken[k] = carry

    return run


_HASH = """unsigned tk_draw(unsigned seed, unsigned k) {
  unsigned h = seed + k * 0x9E3779B9u;
  h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
  h = (h ^ (h >> 13)) * 0xC2B2AE35u;
  return h ^ (h >> 16);
}
"""


def prelude(P) -> str:
    """That of the scores, and the finalizer of MurmurHash3: as an expression it would hold its argument many times."""
    return 'extern "C" inline ' + _HASH if P.cpu else PRELUDE + "static __device__ __forceinline__ " + _HASH


def hashed(P, seed, k):
    """32 random bits."""
    return P.call_pure_extern(U32, "tk_draw", seed, P.Cast(U32, k))


def physical_count(P, row, L: int, D: int):
    """Macro: bound[0] <- the sum of all counts of replicas."""
    lanes = row.lanes

    @P.macro
    def run(logical_count, bound):
        lane = row.lane(P)
        bound[0] = 0
        for i in P.serial(-(-L // lanes)):
            if i * lanes + lane < L:
                bound[0] = bound[0] + P.min(P.max(logical_count[i * lanes + lane], 1), D)
        if not P.cpu:
            bound[0] = P.call_pure_extern(I32, "__reduce_add_sync", u32(0xFFFFFFFF), bound[0])

    return run
