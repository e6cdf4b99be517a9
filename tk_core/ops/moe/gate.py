"""`top2_sum_gate`, `moe_topk_gate`: from router logits to the experts of every token and their weights.

u = score(logits)                      key = fl(u + bias), of softmax fl(logits + bias)
e_1 .. e_K: largest keys, of the best groups where groups are limited, in descending order, ties to the lower expert
D = ((1e-20 + u[e_1]) + u[e_2]) + ...  weight_k = fl(fl(u[e_k] / D) * c); shared experts follow with weight 1
physical = map[e, (ep_rank + 23333 t) mod count[e]], then the experts of this TP rank, renumbered, and -1 for those of others

A warp takes a token. Scores and keys of its row lie in shared memory, where lane k picks up what slot k needs. What it does with a
row is in gate_rows.py, the gradient in gate_backward.py, sums of scores in scores_sum.py: with them a warp takes several rows and adds
their shares up in shared memory. Both gates have this kernel; the first one limits groups and splits ranks, the second one has
biases of images and random routing.
"""

from collections.abc import Callable
from typing import Any

from tk_core.bits import select, u32
from tk_core.errors import value_error
from tk_core.op import Env, Launch, Op, declare
from tk_core.ops.moe.gate_backward import gate_bwd
from tk_core.ops.moe.gate_rows import clear_row, draw, hashed, limit_groups, physical_count, prelude, score_row
from tk_core.ops.moe.scores_sum import SCALARS, accumulate, check_sequences, clear, leave, partials, sum_partials
from tk_core.ops.moe.scoring import F32, I32, SCORINGS, U32, tiny
from tk_core.ops.moe.topk import check_experts, check_index, fill_rest, row_of, select_experts
from tk_core.ops.moe.warps import PASS_CONFIGS, SLOTS, flag, sync_warp, uniform
from tk_core.ops.quant.bits import divide

I64 = "int64"
TOP2_SUM = "top2_sum_gate"
# What happens to a row.
MASKED, ROUTED, FIXED, RANDOM = 0, 1, 2, 3

# ------------------------------------------------------------------ the kernel


def gate(
    P, E, L, D, num_topk, num_shared_experts, num_topk_groups, num_groups, num_ep_ranks, num_tp_ranks, scoring_func, idx,
    fixed_topk_idx_dtype, sums, has,
):  # fmt: skip
    """A warp takes a token, or with sums of scores some tokens of a sequence, one after the other."""
    T, Q = P.dynamic("T"), P.dynamic("Q")
    K, n = num_topk, num_topk + num_shared_experts
    row = row_of(P, E, K, arrays=3 if sums else 2)
    W = row.warps
    limited = num_groups != num_topk_groups
    mapped, fixed, random = "to_physical_map" in has, "fix_routing_mask" in has, "force_random" in has
    masked, imaged, want_scores = "mask" in has, "image_token_mask" in has, "scores" in has
    want_unmapped = "unmapped_topk_idx" in has
    # many warps hide the latency of a chain of reductions; as many as need no spilled registers
    plain = not (limited or mapped or fixed or imaged) and row.per <= 12
    resident = 1 if sums or random or row.per > 16 else 6 if plain else 4
    # experts of all ranks, and of one
    physical = E + (D - 1 if mapped else num_shared_experts)
    per_rank = max(1, (E + D - 1) // num_ep_ranks)
    split = num_ep_ranks > 1 or num_tp_ranks > 1
    scored = score_row(P, row, scoring_func, "bias" in has, imaged, want_scores, sums)
    choose, fill, unscored = select_experts(P, row, K), fill_rest(P, row), clear_row(P, row)
    limit = limit_groups(P, row, num_groups, num_topk_groups) if limited else None
    drawn = draw(P, n)
    zero, add, out = clear(P, row), accumulate(P, row), leave(P, row)
    count = physical_count(P, row, L, D)

    @P.prim_func
    def main(
        logits: P.Tensor((T, E), F32),
        bias: P.Tensor((E,), F32),
        image_bias: P.Tensor((E,), F32),
        image_token_mask: P.Tensor((T,), "bool"),
        mask: P.Tensor((T,), "bool"),
        force_random: P.Tensor((T,), "bool"),
        fix_routing_mask: P.Tensor((T,), "bool"),
        fixed_topk_idx: P.Tensor((T, K), fixed_topk_idx_dtype or I64),
        to_physical_map: P.Tensor((L, D), I32),
        logical_count: P.Tensor((L,), I32),
        ep_rank: P.Tensor((1,), I32),
        tp_rank: P.Tensor((1,), I32),
        topk_idx: P.Tensor((T, n), idx),
        topk_weights: P.Tensor((T, n), F32),
        unmapped_topk_idx: P.Tensor((T, K), idx),
        scores: P.Tensor((T, E), F32),
        partial: P.Tensor((Q, E), F32),
        routed_scaling_factor: P.float32,
        ep_rank_value: P.int32,
        tp_rank_value: P.int32,
        seq_rows: P.int32,
        chunk: P.int32,
        parts: P.int32,
    ):
        with P.Kernel(Q if sums else P.ceildiv(T, W), threads=row.threads, prelude=prelude(P)) as b:
            if not P.cpu:
                P.annotate_min_blocks_per_sm(resident)
            u = P.alloc_shared((W, row.size), F32)
            keys = P.alloc_shared((W, row.size), I32)
            share = P.alloc_shared((W, row.size if sums else 1), F32)
            group_key = P.alloc_shared((W, SLOTS if limited else 1), I32)
            place = P.alloc_shared((W, SLOTS if limited else 1), I32)
            chosen = P.alloc_shared((W, SLOTS), I32)
            weight = P.alloc_shared((W, SLOTS), F32)
            total = P.alloc_local((1,), F32)
            bound = P.alloc_local((1,), I32)
            w, lane = P.alloc_var(I32, init=row.warp(P)), row.lane(P)
            seq = P.alloc_var(I32, init=P.truncdiv(b, parts) if sums else 0)
            first = P.alloc_var(I32, init=seq * seq_rows + (b - seq * parts) * chunk if sums else 0)
            end = P.alloc_var(I32, init=P.min(first + chunk, (seq + 1) * seq_rows) if sums else 0)
            t = P.alloc_var(I32, init=0)
            # a traced rank is not judged: no replica before the first one
            ep = P.alloc_var(I32, init=P.max(ep_rank[0], 0) if "ep_rank" in has else ep_rank_value)
            tp = P.alloc_var(I32, init=tp_rank[0] if "tp_rank" in has else tp_rank_value)
            kind = P.alloc_var(I32, init=ROUTED)
            seed = P.alloc_var(U32, init=u32(0))
            sum_of_slots = P.alloc_var(F32, init=0.0)
            expert = P.alloc_var(I32, init=-1)
            replica = P.alloc_var(I32, init=0)
            turn = P.alloc_var(I64, init=P.Cast(I64, 0))
            rank = P.alloc_var(I32, init=0)
            group = P.alloc_var(I32, init=0)
            slot_weight = P.alloc_var(F32, init=0.0)
            bound[0] = physical
            if mapped and random:
                count(logical_count, bound)
            if sums:
                zero(share, w)
            for step in P.serial(P.ceildiv(end - first - w, W) if sums else 1):
                t = first + step * W + w if sums else row.token(P, b, w, T)
                kind = flag(P, mask, t, masked)
                if random:
                    kind = select(kind == ROUTED and flag(P, force_random, t, True) > 0, RANDOM, kind)
                if fixed:
                    kind = select(kind == ROUTED and flag(P, fix_routing_mask, t, True) > 0, FIXED, kind)

                if masked or random or fixed:
                    kind = uniform(P, kind)

                # experts of the slots, and scores
                if kind == ROUTED or kind == FIXED:
                    scored(logits, bias, image_bias, flag(P, image_token_mask, t, imaged, 0), scores, u, keys, total, t, w)
                    if sums:
                        add(u, share, w, total)
                    fill(keys, w)
                elif want_scores:
                    unscored(scores, t)
                sync_warp(P)
                if kind == ROUTED:
                    if limited:
                        limit(keys, group_key, place, w)
                    choose(keys, chosen, w)
                if fixed:
                    if kind == FIXED:
                        for s in row.slots(P, K):
                            k = s + lane
                            if k < K:
                                given = P.Cast(I64, fixed_topk_idx[t, k])
                                chosen[w, k] = P.Cast(I32, select(given >= 0 and given < E, given, P.Cast(I64, -1)))
                if random:
                    if kind == RANDOM:
                        seed = hashed(P, P.Cast(U32, ep), t)
                        drawn(chosen, w, seed, bound[0])
                        sync_warp(P)

                # weights before their sum is known
                for s in row.slots(P, K):
                    k = s + lane
                    if k < K:
                        slot_weight = P.f32(0)
                        if kind == ROUTED or kind == FIXED:
                            if chosen[w, k] >= 0:
                                slot_weight = u[w, chosen[w, k]]
                        weight[w, k] = slot_weight
                sync_warp(P)
                sum_of_slots = tiny(P)
                for j in P.unroll(K) if not P.cpu else P.serial(K):
                    sum_of_slots = P.add(sum_of_slots, weight[w, j])

                for s in row.slots(P, n):
                    k = s + lane
                    if k < n:
                        expert = P.Cast(I32, -1)
                        slot_weight = P.f32(0)
                        if kind == ROUTED or kind == FIXED:
                            if k < K:
                                expert = chosen[w, k]
                                slot_weight = P.mul(divide(P, weight[w, k], sum_of_slots), routed_scaling_factor)
                            else:
                                expert = E + k - K
                                slot_weight = P.f32(1)
                        if want_unmapped:
                            if k < K:
                                unmapped_topk_idx[t, k] = P.Cast(idx, expert)
                        if mapped:
                            if expert >= 0:
                                replica = P.min(P.max(logical_count[expert], 1), D)
                                turn = P.Cast(I64, ep) + P.Cast(I64, 23333) * P.Cast(I64, t)
                                replica = P.Cast(I32, P.truncmod(turn, P.Cast(I64, replica)))
                                expert = to_physical_map[expert, replica]
                                expert = select(expert >= 0 and expert < physical, expert, -1)
                        if random:
                            if kind == RANDOM:
                                expert = chosen[w, k]
                                # (0, 1]
                                slot_weight = P.Cast(F32, (hashed(P, seed, k + SLOTS) >> u32(8)) + u32(1)) * P.f32(2.0**-24)
                        if split:
                            if expert >= 0:
                                rank = P.truncdiv(expert, per_rank)
                                group = P.truncdiv(rank, num_tp_ranks)
                                if rank - group * num_tp_ranks == tp:
                                    expert = expert + (group - rank) * per_rank
                                else:
                                    expert = P.Cast(I32, -1)
                        topk_idx[t, k] = P.Cast(idx, expert)
                        topk_weights[t, k] = slot_weight
                if sums:
                    sync_warp(P)
            if sums:
                out(share, partial, b)

    return main


# ------------------------------------------------------------------ declaration


def checked(name: str) -> Callable[[Env], None]:
    """The check of a gate by that name."""

    def expect(argument: str, what: str, good: bool, got: Any) -> None:
        if not good:
            raise value_error(name, argument, what, got)

    def run(env: Env) -> None:
        E, T, K, S = env["E"], env["T"], env["num_topk"], env["num_shared_experts"]
        G, Gk = env["num_groups"], env["num_topk_groups"]
        ep, tp = env["num_ep_ranks"], env["num_tp_ranks"]
        check_index(name, env)
        check_experts(name, "logits", E)
        expect("scoring_func", " or ".join(map(repr, SCORINGS)), env["scoring_func"] in SCORINGS, repr(env["scoring_func"]))
        expect("num_shared_experts", "0, 1 or 2", S in (0, 1, 2), S)
        expect("num_topk", f"1 to {min(E, SLOTS - S)}", 1 <= K <= min(E, SLOTS - S), K)
        expect("num_groups", "with num_topk_groups zero, or both positive", (G == 0) == (Gk == 0) and G >= 0, (G, Gk))
        expect("num_topk_groups", f"0 to {G}", 0 <= Gk <= G, Gk)
        if G != Gk:
            expect("num_groups", f"at most {SLOTS}, and a divisor of {E} experts", G <= SLOTS and E % G == 0, G)
            expect("num_groups", "at least two experts a group", E // G >= 2, G)
            expect("num_topk", f"at most the {E // G * Gk} experts of {Gk} groups", K <= E // G * Gk, K)
        for one, first, other, second in (
            ("image_bias", "IE", "image_token_mask", "IT"),
            ("fix_routing_mask", "FT", "fixed_topk_idx", "FI"),
            ("to_physical_map", "L", "logical_count", "CL"),
        ):
            expect(other if first in env else one, f"an array, as {one} and {other} go together", (first in env) == (second in env), None)
        for argument, size, rows in (
            ("image_bias", "IE", E), ("image_token_mask", "IT", T), ("fix_routing_mask", "FT", T), ("fixed_topk_idx", "FI", T),
            ("force_random", "RT", T), ("to_physical_map", "L", E + S), ("logical_count", "CL", E + S),
        ):  # fmt: skip
            expect(argument, f"{rows} rows", env.get(size, rows) == rows, env.get(size))
        mapped = "L" in env
        env.setdefault("L", E + S)
        D = env.setdefault("D", 1)
        expect("to_physical_map", "at least one column", D >= 1, D)
        forward = "columns" not in env  # the gradient rule has weights, but no map
        if forward and (name == TOP2_SUM or ep > 1 or tp > 1):
            # indices are renumbered over E + D - 1 physical experts
            where = (
                f"at most {D - 1}, the physical experts that to_physical_map has beside {E}" if mapped else "0 without a to_physical_map"
            )
            expect("num_shared_experts", where, S <= D - 1, S)
        expect("num_ep_ranks", f"1 to {E + D - 1} experts", 1 <= ep and (ep <= E + D - 1 or not forward), ep)
        expect("num_tp_ranks", "at least 1", tp >= 1, tp)
        expect("tp_rank", f"0 to {tp - 1}", 0 <= env["tp_rank_value"] < tp, env["tp_rank_value"])
        expect("ep_rank", "no negative number", env["ep_rank_value"] >= 0, env["ep_rank_value"])
        expect("num_seqs", "no negative number", env["num_seqs"] >= 0, env["num_seqs"])
        env["sums"] = env["num_seqs"] > 0
        if env["sums"]:
            check_sequences(name, env)
        expect("grad_scores_sum", f"{env['num_seqs']} rows", env.setdefault("B", env["num_seqs"]) == env["num_seqs"], env["B"])
        env["rows"] = T
        env["columns"] = K + S

    return run


def sizes(env: Env) -> Env:
    """Partial sums, none where sums are not asked for."""
    return partials(env) if env["sums"] else {**partials(env), "parts": 0, "Q": 0}


DOC = """Choose the experts of every token by the logits of a router, and weigh them.

u = score(logits); experts: the largest u + bias (softmax: logits + bias), of the num_topk_groups best groups where groups are limited;
weight_k = u_k / (1e-20 + sum of u over the chosen) * routed_scaling_factor.

Args:
    logits: [T, E] f32.
    bias: [E] f32, added for ranking only.
    image_bias, image_token_mask: [E] f32 and [T] bool; rows with True rank with image_bias instead.
    mask: [T] bool; rows with False have indices -1, weights 0, scores 0, and their logits are not used.
    force_random: [T] bool; rows with True have distinct physical experts and weights at random, a function of ep_rank and the row alone.
    fix_routing_mask, fixed_topk_idx: [T] bool and [T, num_topk] i32 or i64; rows with True take the experts given. A slot with an
        index that names no expert is empty: -1, weight 0.
    to_physical_map, logical_count: [L, D] i32 and [L] i32 with L = E + num_shared_experts, replicas of every expert and how many there are.
    ep_rank, tp_rank: [1] i32, ranks in memory of the device, else ep_rank_value and tp_rank_value.

Returns:
    topk_idx [T, num_topk + num_shared_experts], physical and of this TP rank, and topk_weights, f32; unmapped_topk_idx [T, num_topk],
    logical; scores u [T, E] f32; scores_sum [num_seqs, E] f32, shares of the experts summed over the rows of every sequence.

Attributes:
    num_topk, num_shared_experts: slots; the shared experts follow the routed ones with weight 1.
    num_topk_groups, num_groups: equal numbers do not limit groups.
    num_ep_ranks, num_tp_ranks: indices are renumbered over the ranks with this tp_rank; others become -1 and keep their weight.
    scoring_func: "sigmoid", "sqrtsoftplus" or "softmax".
    num_seqs: sequences of scores_sum; 0 where it is not wanted.
    idx: dtype of indices, "int64" or "int32".

Raises:
    TypeError: a dtype is another one.
    ValueError: a shape does not fit, or an attribute is out of range.

Numerics:
    fp32. Indices and weights follow from scores bit for bit; scores are within 2 ulp.

Gradient:
    To logits from topk_weights and scores_sum, by the saved scores and unmapped_topk_idx; the selection is a constant.

Source:
    DeepSeek-V3 Technical Report, 2024.
"""

KEY = (
    "E L D num_topk num_shared_experts num_topk_groups num_groups num_ep_ranks num_tp_ranks scoring_func idx fixed_topk_idx_dtype sums"
)  # fmt: skip


def declare_gate(name: str) -> Op:
    """A gate by that name."""
    return declare(
        name,
        "moe",
        "logits[T, E]:f32 bias?[E]:f32 image_bias?[IE]:f32 image_token_mask?[IT]:bool mask?[T]:bool force_random?[RT]:bool "
        "fix_routing_mask?[FT]:bool fixed_topk_idx?[FI, num_topk]:i32|i64 to_physical_map?[L, D]:i32 logical_count?[CL]:i32 "
        "ep_rank?[1]:i32 tp_rank?[1]:i32 -> topk_idx[T, columns]:idx topk_weights[T, columns]:f32 unmapped_topk_idx?[T, num_topk]:idx "
        "scores?[T, E]:f32 scores_sum?[B, E]:f32",
        [
            Launch(
                gate,
                "logits bias image_bias image_token_mask mask force_random fix_routing_mask fixed_topk_idx to_physical_map logical_count "
                "ep_rank tp_rank -> topk_idx topk_weights unmapped_topk_idx scores partial; "
                f"routed_scaling_factor ep_rank_value tp_rank_value {SCALARS}",
                key=KEY,
                pass_configs=PASS_CONFIGS,
            ),
            Launch(sum_partials, "partial -> scores_sum; parts", key="E"),
        ],
        attrs={
            "num_topk": 1, "num_shared_experts": 0, "num_topk_groups": 0, "num_groups": 0, "num_ep_ranks": 1, "num_tp_ranks": 1,
            "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.0, "num_seqs": 0, "idx": "int64", "ep_rank_value": 0,
            "tp_rank_value": 0,
        },
        dynamic="ep_rank_value tp_rank_value",
        work="partial[Q, E]:f32",
        derive=sizes,
        backward="d_topk_weights d_scores_sum scores unmapped_topk_idx topk_weights mask -> d_logits",
        backward_launches=[
            Launch(
                gate_bwd,
                "d_topk_weights d_scores_sum scores unmapped_topk_idx topk_weights mask -> d_logits; routed_scaling_factor seq_rows",
                key="E num_topk columns scoring_func idx sums",
                pass_configs=PASS_CONFIGS,
            )
        ],
        backward_derive=sizes,
        check=checked(name),
        doc=DOC,
    )  # fmt: skip


top2_sum_gate = declare_gate(TOP2_SUM)
moe_topk_gate = declare_gate("moe_topk_gate")
