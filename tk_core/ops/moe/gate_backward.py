"""The gradient of the gates, and `moe_topk_gate_backward`: the same as an operation of its own.

D = 1e-20 + sum over filled slots of u[e_k]
r[e] = sum over slots k of e of (c g_k - sum_j g_j w_j) / D           g: cotangent of the weights w
a[e] = (h[e] - (sum_i h[i] u[i]) / s) / s,  s = sum_e u[e]            h: cotangent of the sum of scores, on rows of the mask
d_logits = score'(u) (r + a)

A warp takes a row. Slots that name one expert are added up in the order of the slots and laid down in a row in shared memory. Where the
score looks at one logit and there is no h, all of the gradient is in those slots, and the scores of other experts are not read.
"""

from tk_core.bits import select
from tk_core.errors import value_error
from tk_core.op import Env, Launch, declare
from tk_core.ops.moe.scores_sum import check_sequences, partials
from tk_core.ops.moe.scoring import F32, I32, SCORINGS, slope, smallest, tiny
from tk_core.ops.moe.topk import check_experts
from tk_core.ops.moe.warps import PASS_CONFIGS, SLOTS, Row, flag, sync_warp, warp_sum

I64 = "int64"


def backward(P, E, K, C, scoring_func, idx, routed, aux, masked):
    """K slots of C columns; `routed` and `aux` tell which cotangents there are."""
    T, B = P.dynamic("T"), P.dynamic("B")
    softmax = scoring_func == "softmax"
    # whether all scores of a row take part
    whole = aux or softmax
    row = Row(P, E, arrays=2 if whole else 1)
    V, W = row.V, row.warps
    sum_of = warp_sum(P)

    @P.prim_func
    def main(
        d_topk_weights: P.RowTensor((T, C), "d_weights_row", F32),
        d_scores_sum: P.Tensor((B, E), F32),
        scores: P.Tensor((T, E), F32),
        topk_idx: P.Tensor((T, K), idx),
        topk_weights: P.RowTensor((T, C), "weights_row", F32),
        mask: P.Tensor((T,), "bool"),
        d_logits: P.Tensor((T, E), F32),
        routed_scaling_factor: P.float32,
        seq_rows: P.int32,
    ):
        with P.Kernel(P.ceildiv(T, W), threads=row.threads) as b:
            grad = P.alloc_shared((W, row.size), F32)
            u = P.alloc_shared((W, row.size if whole else 1), F32)
            chosen = P.alloc_shared((W, SLOTS), I32)
            part = P.alloc_shared((W, SLOTS), F32)
            x = P.alloc_local((V,), F32)
            h = P.alloc_local((V,), F32)
            g = P.alloc_local((V,), F32)
            total = P.alloc_local((1,), F32)
            dot = P.alloc_local((1,), F32)
            score_of_slot = P.alloc_local((1 if not P.cpu else K,), F32)
            d_slot = P.alloc_local((1 if not P.cpu else K,), F32)
            given = P.alloc_var(I64, init=P.Cast(I64, 0))
            expert = P.alloc_var(I32, init=-1)
            denominator = P.alloc_var(F32, init=0.0)
            weighted = P.alloc_var(F32, init=0.0)
            route = P.alloc_var(F32, init=0.0)
            factor = P.alloc_var(F32, init=0.0)
            mean = P.alloc_var(F32, init=0.0)
            w, lane = P.alloc_var(I32, init=row.warp(P)), row.lane(P)
            t = P.alloc_var(I32, init=row.token(P, b, w, T))
            seq = P.alloc_var(I32, init=P.truncdiv(t, seq_rows) if aux else 0)
            # loads of the whole row first, so that they are on their way
            total[0] = P.f32(0)
            dot[0] = P.f32(0)
            for s in row.loop(P):
                e = (s * row.lanes + lane) * V
                if e < E:
                    for v in P.unroll(V):
                        g[v] = P.f32(0)
                    for v in P.vectorized(V):
                        grad[w, e + v] = g[v]
                    if whole:
                        for v in P.vectorized(V):
                            x[v] = scores[t, e + v]
                        for v in P.vectorized(V):
                            u[w, e + v] = x[v]
                        if aux:
                            for v in P.vectorized(V):
                                h[v] = d_scores_sum[seq, e + v]
                            for v in P.unroll(V):
                                total[0] = total[0] + x[v]
                                dot[0] = P.fma(h[v], x[v], dot[0])
            if aux:
                sum_of(total)
                sum_of(dot)
                factor = select(total[0] > P.f32(0) and flag(P, mask, t, masked) > 0, P.f32(1) / P.max(total[0], smallest(P)), P.f32(0))
                mean = P.mul(dot[0], factor)
            if routed:
                for s in row.slots(P, K):
                    k = s + lane
                    score_of_slot[s] = P.f32(0)
                    d_slot[s] = P.f32(0)
                    if k < K:
                        given = P.Cast(I64, topk_idx[t, k])
                        expert = P.Cast(I32, select(given >= 0 and given < E, given, P.Cast(I64, -1)))
                        chosen[w, k] = expert
                        if expert >= 0:
                            score_of_slot[s] = scores[t, expert]
                            d_slot[s] = d_topk_weights[t, k]
                            part[w, k] = score_of_slot[s]
                        else:
                            part[w, k] = P.f32(0)
                sync_warp(P)
                denominator = tiny(P)
                for j in P.serial(K):
                    denominator = denominator + part[w, j]
                sync_warp(P)
                for s in row.slots(P, K):
                    k = s + lane
                    if k < K:
                        part[w, k] = P.f32(0)
                        if chosen[w, k] >= 0:
                            part[w, k] = d_slot[s] * topk_weights[t, k]
                sync_warp(P)
                weighted = P.f32(0)
                for j in P.serial(K):
                    weighted = weighted + part[w, j]
                sync_warp(P)
                for s in row.slots(P, K):
                    k = s + lane
                    if k < K:
                        part[w, k] = (routed_scaling_factor * d_slot[s] - weighted) / denominator
                sync_warp(P)
                for s in row.slots(P, K):
                    k = s + lane
                    if k < K:
                        expert = chosen[w, k]
                        if expert >= 0:
                            route = P.f32(0)
                            for j in P.serial(K):
                                if chosen[w, j] == expert:
                                    route = route + part[w, j]
                            # lanes with the same expert write the same
                            grad[w, expert] = route if whole else route * slope(P, scoring_func, score_of_slot[s])
            sync_warp(P)
            if softmax:
                total[0] = P.f32(0)
            for s in row.loop(P):
                e = (s * row.lanes + lane) * V
                if e < E:
                    for v in P.vectorized(V):
                        g[v] = grad[w, e + v]
                    if whole:
                        for v in P.vectorized(V):
                            x[v] = u[w, e + v]
                        if aux:
                            if factor > P.f32(0):
                                for v in P.vectorized(V):
                                    h[v] = d_scores_sum[seq, e + v]
                                for v in P.unroll(V):
                                    g[v] = g[v] + (h[v] - mean) * factor
                        if softmax:
                            for v in P.unroll(V):
                                total[0] = P.fma(x[v], g[v], total[0])
                            for v in P.vectorized(V):
                                grad[w, e + v] = g[v]
                        else:
                            for v in P.unroll(V):
                                g[v] = g[v] * slope(P, scoring_func, x[v])
                    if not softmax:
                        for v in P.vectorized(V):
                            d_logits[t, e + v] = g[v]
            if softmax:
                sum_of(total)
                for s in row.loop(P):
                    e = (s * row.lanes + lane) * V
                    if e < E:
                        for v in P.vectorized(V):
                            g[v] = grad[w, e + v]
                        for v in P.vectorized(V):
                            x[v] = u[w, e + v]
                        for v in P.unroll(V):
                            h[v] = x[v] * (g[v] - total[0])
                        for v in P.vectorized(V):
                            d_logits[t, e + v] = h[v]

    return main


def gate_bwd(P, E, num_topk, columns, scoring_func, idx, sums, has):
    """The gradient rule of the gates."""
    routed, aux = "d_topk_weights" in has, "d_scores_sum" in has and sums
    return backward(P, E, num_topk, columns, scoring_func, idx, routed, aux, "mask" in has)


def gate_backward(P, E, K, scoring_func, topk_idx_dtype, has):
    """The operation."""
    return backward(P, E, K, K, scoring_func, topk_idx_dtype, True, "grad_scores_sum" in has, "mask" in has)


def check(env: Env) -> None:
    name = "moe_topk_gate_backward"
    check_experts(name, "scores", env["E"])
    if not 1 <= env["K"] <= SLOTS:
        raise value_error(name, "topk_idx", f"1 to {SLOTS} slots", env["K"])
    if env["scoring_func"] not in SCORINGS:
        raise value_error(name, "scoring_func", " or ".join(map(repr, SCORINGS)), env["scoring_func"])
    env["num_seqs"] = env.get("B", 1)
    check_sequences(name, env)
    env["rows"] = env["T"]


DOC = """Gradient of a gate to its logits, from the scores and the selection that it made.

Args:
    scores: [T, E] f32, those of the gate.
    topk_idx: [T, K] i32 or i64, logical experts; what names none is an empty slot. Repeated experts add up.
    topk_weights, grad_topk_weights: [T, K] f32, routed slots only.
    mask: [T] bool, rows that take part in grad_scores_sum; all of them where there is none.
    grad_scores_sum: [B, E] f32, cotangent of the sum of scores of every sequence.
    routed_scaling_factor, scoring_func: those of the gate.

Returns:
    [T, E] f32.

Raises:
    TypeError: a dtype is another one.
    ValueError: a shape does not fit, or B does not divide T.

Numerics:
    fp32, sums in a fixed order.

Gradient:
    none.
"""

moe_topk_gate_backward = declare(
    "moe_topk_gate_backward",
    "moe",
    "scores[T, E]:f32 topk_idx[T, K]:i32|i64 topk_weights[T, K]:f32 grad_topk_weights[T, K]:f32 mask?[T]:bool "
    "grad_scores_sum?[B, E]:f32 -> grad_logits[T, E]:f32",
    [
        Launch(
            gate_backward,
            "grad_topk_weights grad_scores_sum scores topk_idx topk_weights mask -> grad_logits; routed_scaling_factor seq_rows",
            key="E K scoring_func topk_idx_dtype",
            pass_configs=PASS_CONFIGS,
        )
    ],
    attrs={"routed_scaling_factor": 1.0, "scoring_func": "sqrtsoftplus"},
    loose="topk_weights grad_topk_weights",
    check=check,
    derive=partials,
    doc=DOC,
)
