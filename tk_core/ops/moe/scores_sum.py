"""`scores_sum`: how much of all scores an expert has, summed over the rows of a sequence.

q[b, e] = sum over rows t of sequence b of u[t, e] / s_t,   s_t = sum_e u[t, e]
du[t, e] = (h[b, e] - (sum_i h[b, i] u[t, i]) / s_t) / s_t  for a cotangent h

Rows that a mask leaves out, and rows whose scores are all zero, add nothing and have no gradient. Blocks leave partial sums of
neighbouring rows of one sequence, a second launch adds them up in order: the order of a sum is a function of its length.
"""

from tk_core.bits import select
from tk_core.errors import value_error
from tk_core.op import Env, Launch, declare
from tk_core.ops.moe.scoring import F32, I32, smallest
from tk_core.ops.moe.warps import MAX_EXPERTS, PASS_CONFIGS, Row, flag, uniform, warp_sum

# Rows of a partial sum at least, and partial sums of a sequence at most.
_CHUNK = 32
_MOST_PARTS = 512


def partials(env: Env) -> Env:
    """Rows of a sequence, rows of a partial sum, partial sums of a sequence and of all."""
    seqs = max(env["num_seqs"], 1)
    rows = env["T"] // seqs
    chunk = -(-max(_CHUNK, -(-rows // _MOST_PARTS)) // 8) * 8
    parts = max(1, -(-rows // chunk))
    return {"seq_rows": rows, "chunk": chunk, "parts": parts, "Q": seqs * parts}


def check_sequences(op: str, env: Env) -> None:
    if env["num_seqs"] < 1 or env["T"] % env["num_seqs"]:
        raise value_error(op, "num_seqs", f"a positive divisor of {env['T']} rows", env["num_seqs"])


# ------------------------------------------------------------------ parts of kernels


def clear(P, row: Row):
    """Macro: share[w, :] <- 0."""

    @P.macro
    def run(share, w):
        for s in row.loop(P):
            e = (s * row.lanes + row.lane(P)) * row.V
            if e < row.E:
                for v in P.vectorized(row.V):
                    share[w, e + v] = P.f32(0)

    return run


def accumulate(P, row: Row):
    """Macro: share[w, :] += u[w, :] / its sum, total[0]. A lane has the same experts in both."""
    V = row.V

    @P.macro
    def run(u, share, w, total):
        if total[0] > P.f32(0):
            factor = P.alloc_var(F32, init=P.f32(1) / total[0])
            sofar = P.alloc_local((V,), F32)
            more = P.alloc_local((V,), F32)
            for s in row.loop(P):
                e = (s * row.lanes + row.lane(P)) * V
                if e < row.E:
                    for v in P.vectorized(V):
                        sofar[v] = share[w, e + v]
                    for v in P.vectorized(V):
                        more[v] = u[w, e + v]
                    for v in P.unroll(V):
                        sofar[v] = P.fma(more[v], factor, sofar[v])
                    for v in P.vectorized(V):
                        share[w, e + v] = sofar[v]

    return run


def leave(P, row: Row):
    """Macro: the sums of all warps of a block, in order, to partial[b, :]. There is a barrier of the block before it."""
    W = row.warps

    @P.macro
    def run(share, partial, b):
        thread = 0 if P.cpu else P.get_thread_binding(0)
        part = P.alloc_var(F32, init=0.0)
        P.sync_threads()
        for i in P.serial(-(-row.E // row.threads)):
            e = i * row.threads + thread
            if e < row.E:
                part = share[0, e]
                for w in P.unroll(W - 1):
                    part = P.add(part, share[w + 1, e])
                partial[b, e] = part

    return run


# ------------------------------------------------------------------ kernels


def sum_partials(P, E, has):
    """A thread adds up the partial sums of an expert, eight threads share them."""
    Q, B = P.dynamic("Q"), P.dynamic("B")
    columns, ways = (E, 1) if P.cpu else (32, 8)
    tiles = -(-E // columns)

    @P.prim_func
    def main(partial: P.Tensor((Q, E), F32), scores_sum: P.Tensor((B, E), F32), parts: P.int32):
        # a block even without sequences: a launch has at least one
        with P.Kernel(P.max(B, 1) * tiles, threads=columns * ways) as b:
            shared = P.alloc_shared((ways, columns), F32)
            part = P.alloc_var(F32, init=0.0)
            for c in P.serial(columns if P.cpu else 1):
                column = c if P.cpu else P.get_thread_binding(0) % columns
                way = 0 if P.cpu else P.get_thread_binding(0) // columns
                e = b % tiles * columns + column
                part = P.f32(0)
                if e < E:
                    for i in P.serial(P.ceildiv(parts - way, ways)):
                        part = P.add(part, partial[b // tiles * parts + i * ways + way, e])
                shared[way, column] = part
                P.sync_threads()
                if way == 0 and e < E and b // tiles < B:
                    for i in P.unroll(ways - 1):
                        part = P.add(part, shared[i + 1, column])
                    scores_sum[b // tiles, e] = part

    return main


def share_rows(P, E, has):
    """A block takes neighbouring rows of a sequence, a warp one after the other."""
    T, Q = P.dynamic("T"), P.dynamic("Q")
    row = Row(P, E, arrays=2)
    V, W = row.V, row.warps
    zero, add, out, total_of = clear(P, row), accumulate(P, row), leave(P, row), warp_sum(P)

    @P.prim_func
    def main(
        scores: P.Tensor((T, E), F32),
        mask: P.Tensor((T,), "bool"),
        partial: P.Tensor((Q, E), F32),
        seq_rows: P.int32,
        chunk: P.int32,
        parts: P.int32,
    ):
        with P.Kernel(Q, threads=row.threads) as b:
            share = P.alloc_shared((W, row.size), F32)
            u = P.alloc_shared((W, row.size), F32)
            x = P.alloc_local((V,), F32)
            total = P.alloc_local((1,), F32)
            w, lane = P.alloc_var(I32, init=row.warp(P)), row.lane(P)
            seq = P.alloc_var(I32, init=P.truncdiv(b, parts))
            first = P.alloc_var(I32, init=seq * seq_rows + (b - seq * parts) * chunk)
            end = P.alloc_var(I32, init=P.min(first + chunk, (seq + 1) * seq_rows))
            t = P.alloc_var(I32, init=0)
            zero(share, w)
            for i in P.serial(P.ceildiv(end - first - w, W)):
                t = first + i * W + w
                if uniform(P, flag(P, mask, t, "mask" in has)) > 0:
                    total[0] = P.f32(0)
                    for s in row.loop(P):
                        e = (s * row.lanes + lane) * V
                        if e < E:
                            for v in P.vectorized(V):
                                x[v] = scores[t, e + v]
                            for v in P.vectorized(V):
                                u[w, e + v] = x[v]
                            for v in P.unroll(V):
                                total[0] = total[0] + x[v]
                    total_of(total)
                    add(u, share, w, total)
            out(share, partial, b)

    return main


def share_rows_bwd(P, E, has):
    """A warp takes a row."""
    T, B = P.dynamic("T"), P.dynamic("B")
    row = Row(P, E)
    V, W = row.V, row.warps
    total_of = warp_sum(P)

    @P.prim_func
    def main(
        d_scores_sum: P.Tensor((B, E), F32),
        scores: P.Tensor((T, E), F32),
        mask: P.Tensor((T,), "bool"),
        d_scores: P.Tensor((T, E), F32),
        seq_rows: P.int32,
    ):
        with P.Kernel(P.ceildiv(T, W), threads=row.threads) as b:
            x = P.alloc_local((V,), F32)
            h = P.alloc_local((V,), F32)
            g = P.alloc_local((V,), F32)
            total = P.alloc_local((1,), F32)
            dot = P.alloc_local((1,), F32)
            w, lane = P.alloc_var(I32, init=row.warp(P)), row.lane(P)
            t = P.alloc_var(I32, init=row.token(P, b, w, T))
            on = P.alloc_var(I32, init=uniform(P, flag(P, mask, t, "mask" in has)))
            seq = P.alloc_var(I32, init=P.truncdiv(t, seq_rows))
            total[0] = P.f32(0)
            dot[0] = P.f32(0)
            if on > 0:
                for s in row.loop(P):
                    e = (s * row.lanes + lane) * V
                    if e < E:
                        for v in P.vectorized(V):
                            x[v] = scores[t, e + v]
                        for v in P.vectorized(V):
                            h[v] = d_scores_sum[seq, e + v]
                        for v in P.unroll(V):
                            total[0] = total[0] + x[v]
                            dot[0] = P.fma(h[v], x[v], dot[0])
                total_of(total)
                total_of(dot)
            factor = P.alloc_var(F32, init=select(total[0] > P.f32(0), P.f32(1) / P.max(total[0], smallest(P)), P.f32(0)))
            mean = P.alloc_var(F32, init=dot[0] * factor)
            for s in row.loop(P):
                e = (s * row.lanes + lane) * V
                if e < E:
                    for v in P.unroll(V):
                        g[v] = P.f32(0)
                    if factor > P.f32(0):
                        for v in P.vectorized(V):
                            h[v] = d_scores_sum[seq, e + v]
                        for v in P.unroll(V):
                            g[v] = (h[v] - mean) * factor
                    for v in P.vectorized(V):
                        d_scores[t, e + v] = g[v]

    return main


# ------------------------------------------------------------------ declaration


def check(env: Env) -> None:
    env.setdefault("B", env["num_seqs"])
    check_sequences("scores_sum", env)
    if not 1 <= env["E"] <= MAX_EXPERTS:
        raise value_error("scores_sum", "scores", f"1 to {MAX_EXPERTS} experts", env["E"])
    if env["B"] != env["num_seqs"]:
        raise value_error("scores_sum", "scores_sum", f"{env['num_seqs']} rows", env["B"])
    env["rows"] = env["T"]


DOC = """Shares of the experts in the scores of a row, summed over the rows of every sequence.

q[b, e] = sum over rows t of sequence b of u[t, e] / (sum_i u[t, i])

Args:
    scores: [T, E] f32, none negative.
    mask: [T] bool; rows with False do not count. Nor do rows whose scores are all zero.
    num_seqs: sequences of T / num_seqs rows.

Returns:
    [num_seqs, E] f32.

Raises:
    TypeError: a dtype is another one.
    ValueError: a shape does not fit, or num_seqs does not divide T.

Numerics:
    fp32; the order of the sum depends on the shape alone.

Gradient:
    d_u[t, e] = (h[b, e] - (sum_i h[b, i] u[t, i]) / s_t) / s_t in fp32.

Source:
    DeepSeek-V3 Technical Report, 2024.
"""

SCALARS = "seq_rows chunk parts"

scores_sum = declare(
    "scores_sum",
    "moe",
    "scores[T, E]:f32 mask?[T]:bool -> scores_sum[B, E]:f32",
    [
        Launch(share_rows, f"scores mask -> partial; {SCALARS}", key="E", pass_configs=PASS_CONFIGS),
        Launch(sum_partials, "partial -> scores_sum; parts", key="E"),
    ],
    attrs={"num_seqs": 1},
    work="partial[Q, E]:f32",
    derive=partials,
    backward="d_scores_sum scores mask -> d_scores",
    backward_launches=[Launch(share_rows_bwd, "d_scores_sum scores mask -> d_scores; seq_rows", key="E", pass_configs=PASS_CONFIGS)],
    backward_derive=partials,
    check=check,
    doc=DOC,
)
