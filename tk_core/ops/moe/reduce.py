"""`reduce_fused`: rows of experts summed up for their tokens, and its gradients, also as `reduce_fused_backward`.

out[t] = sum_k s * x[p], p = token_topk_to_pos[t, k], s = topk_weights[t, k] * x_sf[p], in ascending order of k by FMA; where E4M3, times sf
d_x[p] = topk_weights[t, k] * d_out[t]        d_topk_weights[t, k] = x_sf[p] * sum_h d_out[t, h] * x[p, h]

A block has one token: all its rows, whole. What names no row is not read, and padding of d_x is filled as by `expand_to_fused`.
"""

from tk_core.errors import value_error
from tk_core.op import Env, Launch, declare
from tk_core.ops.mhc.common import block_sums, lanes, sums_of_thread, thread
from tk_core.ops.moe.common import (
    BYTES,
    CLEARED,
    EXPLICIT,
    F32,
    I32,
    Threads,
    blocks_of,
    check_flat,
    clear_rows,
    read_owners,
)
from tk_core.ops.moe.slots import U32, Slots
from tk_core.ops.quant.bits import prelude
from tk_core.ops.quant.elementwise import narrow
from tk_core.ops.quant.pieces import loop

E4M3 = "float8_e4m3fn"
FORMATS = {"": "", "e4m3": E4M3}
# Rows of a token that are on their way at a time, and threads of a block: many small blocks hide that a token is a chain of loads.
ROWS, MOST = 2, 256


def sum_of_rows(P, K: int, H: int, x_dtype: str, out_dtype: str, by: Threads, weighted: bool, scaled: bool, factored: bool):
    """Macro: one token. `weights`, `x_sf` and `sf` are read where they are said to be there."""
    V, slots = by.vector, Slots(P, K, ROWS)
    R, held = slots.rows, K if P.cpu else 1
    locate, following = slots.locate(P, weighted, scaled), slots.next(P)

    @P.macro
    def run(x, weights, where, x_sf, sf, out, t, N):
        place, factor = P.alloc_local((held,), I32), P.alloc_local((held,), F32)
        slot, pos, scale = P.alloc_local((R,), I32), P.alloc_local((R,), I32), P.alloc_local((R,), F32)
        live, rest = P.alloc_local((1,), U32), P.alloc_local((1,), U32)
        rows = P.alloc_local((R, by.each, V), P.storage(x_dtype))
        acc = P.alloc_local((by.each, V), F32)
        rounded = P.alloc_local((V,), P.storage(out_dtype))
        locate(where, weights, x_sf, place, factor, live, t, N, 0)
        for step in P.serial(by.steps):
            for i in loop(P, by.each):
                for v in loop(P, V):
                    acc[i, v] = P.f32(0)
            for c in P.serial(slots.chunks):
                if slots.chunks > 1:
                    locate(where, weights, x_sf, place, factor, live, t, N, c)
                rest[0] = live[0]
                for _ in P.serial(slots.steps(P, live[0])):
                    following(place, factor, rest, slot, pos, scale, c)
                    for j in loop(P, R):
                        if pos[j] >= 0:
                            for i in loop(P, by.each):
                                if by.unit(P, step, i) < by.units:
                                    for v in P.vectorized(V):
                                        rows[j, i, v] = x[pos[j], by.unit(P, step, i) * V + v]
                    for j in loop(P, R):
                        if pos[j] >= 0:
                            for i in loop(P, by.each):
                                for v in loop(P, V):
                                    if weighted or scaled:
                                        acc[i, v] = P.fma(P.to_f32(rows[j, i, v], x_dtype), scale[j], acc[i, v])
                                    else:
                                        acc[i, v] = P.add(acc[i, v], P.to_f32(rows[j, i, v], x_dtype))
            for i in loop(P, by.each):
                if by.unit(P, step, i) < by.units:
                    if factored:
                        for v in loop(P, V):
                            acc[i, v] = P.mul(acc[i, v], sf[0])
                    for v in P.vectorized(V):
                        rounded[v] = narrow(P, acc[i, v], out_dtype)
                    for v in P.vectorized(V):
                        out[t, by.unit(P, step, i) * V + v] = rounded[v]

    return run


def sum_rows(P, K, H, x_dtype):
    """Without weights: the gradient of `expand_to_fused`."""
    T, N = P.dynamic("T"), P.dynamic("N")
    by = Threads(P, H, 16 // BYTES[x_dtype], MOST)
    reduce = sum_of_rows(P, K, H, x_dtype, x_dtype, by, False, False, False)

    @P.prim_func
    def main(x: P.Tensor((N, H), x_dtype), token_topk_to_pos: P.Tensor((T, K), I32), out: P.Tensor((T, H), x_dtype)):
        with P.Kernel(T, threads=by.threads, prelude=prelude(P)) as t:
            reduce(x, None, token_topk_to_pos, None, None, out, t, N)

    return main


def reduce_rows(P, K, H, x_dtype, out_dtype, has):
    """With whatever factors there are."""
    T, N = P.dynamic("T"), P.dynamic("N")
    by = Threads(P, H, 16 // BYTES[x_dtype], MOST)
    reduce = sum_of_rows(P, K, H, x_dtype, out_dtype, by, "topk_weights" in has, "x_sf" in has, "sf" in has)

    @P.prim_func
    def main(
        x: P.Tensor((N, H), x_dtype),
        topk_weights: P.Tensor((T, K), F32),
        token_topk_to_pos: P.Tensor((T, K), I32),
        x_sf: P.Tensor((N,), F32),
        sf: P.Tensor((1,), F32),
        out: P.Tensor((T, H), out_dtype),
    ):
        with P.Kernel(T, threads=by.threads, prelude=prelude(P)) as t:
            reduce(x, topk_weights, token_topk_to_pos, x_sf, sf, out, t, N)

    return main


def reduce_bwd(P, K, H, x_dtype, out_dtype, has):
    """A block reads the gradient of a token once, and its rows of x where weights have a gradient."""
    T, N = P.dynamic("T"), P.dynamic("N")
    by = Threads(P, H, 16 // max(BYTES[x_dtype], BYTES[out_dtype]), MOST)
    V, L, slots = by.vector, lanes(P), Slots(P, K, ROWS)
    R, held = slots.rows, K if P.cpu else 1
    want_x, want_weights, weighted, scaled = "d_x" in has, "d_topk_weights" in has, "topk_weights" in has, "x_sf" in has
    if want_weights and "x" not in has:
        raise value_error("reduce_fused_backward", "x", "an array, for the gradient of the weights", None)
    each = sums_of_thread(P, R, by.threads)
    read, clear, sums = read_owners(P), clear_rows(P, by, T * K), block_sums(P)
    locate, following = slots.locate(P, weighted, False), slots.next(P)

    @P.prim_func
    def main(
        d_out: P.Tensor((T, H), out_dtype),
        x: P.Tensor((N, H), x_dtype),
        topk_weights: P.Tensor((T, K), F32),
        token_topk_to_pos: P.Tensor((T, K), I32),
        pos_to_token_topk: P.Tensor((N,), I32),
        x_sf: P.Tensor((N,), F32),
        d_x: P.Tensor((N, H), out_dtype),
        d_topk_weights: P.Tensor((T, K), F32),
    ):
        with P.Kernel(blocks_of(P, T, N) if want_x else T, threads=by.threads) as b:
            owner = P.alloc_local((CLEARED,), I32)
            place, factor = P.alloc_local((held,), I32), P.alloc_local((held,), F32)
            slot, pos, scale = P.alloc_local((R,), I32), P.alloc_local((R,), I32), P.alloc_local((R,), F32)
            live, rest = P.alloc_local((1,), U32), P.alloc_local((1,), U32)
            gs = P.alloc_local((by.each, V), P.storage(out_dtype))
            rows = P.alloc_local((R, by.each, V), P.storage(x_dtype))
            value = P.alloc_local((V,), F32)
            rounded = P.alloc_local((V,), P.storage(out_dtype))
            acc = P.alloc_local((R, L), F32)
            total = P.alloc_local((each,), F32)
            shared = P.alloc_shared((R * max(1, by.threads // 32),), F32)
            if want_x:
                read(owner, pos_to_token_topk, b, blocks_of(P, T, N), N)
            if b < T:
                if want_weights:
                    # what has no row keeps the zero
                    for r in P.serial(-(-K // by.threads)):
                        if r * by.threads + thread(P) < K:
                            d_topk_weights[b, r * by.threads + thread(P)] = P.f32(0)
                for c in P.serial(slots.chunks):
                    locate(token_topk_to_pos, topk_weights, None, place, factor, live, b, N, c)
                    rest[0] = live[0]
                    for _ in P.serial(slots.steps(P, live[0])):
                        following(place, factor, rest, slot, pos, scale, c)
                        for j in loop(P, R):
                            for lane in loop(P, L):
                                acc[j, lane] = P.f32(0)
                        for step in P.serial(by.steps):
                            for i in loop(P, by.each):
                                if by.unit(P, step, i) < by.units:
                                    for v in P.vectorized(V):
                                        gs[i, v] = d_out[b, by.unit(P, step, i) * V + v]
                            if want_weights:
                                for j in loop(P, R):
                                    if pos[j] >= 0:
                                        for i in loop(P, by.each):
                                            if by.unit(P, step, i) < by.units:
                                                for v in P.vectorized(V):
                                                    rows[j, i, v] = x[pos[j], by.unit(P, step, i) * V + v]
                            for j in loop(P, R):
                                if pos[j] >= 0:
                                    for i in loop(P, by.each):
                                        if by.unit(P, step, i) < by.units:
                                            if want_weights:
                                                for v in loop(P, V):
                                                    acc[j, v % L] = P.fma(
                                                        P.to_f32(gs[i, v], out_dtype), P.to_f32(rows[j, i, v], x_dtype), acc[j, v % L]
                                                    )
                                            if want_x:
                                                for v in loop(P, V):
                                                    value[v] = P.to_f32(gs[i, v], out_dtype)
                                                    if weighted:
                                                        value[v] = P.mul(scale[j], value[v])
                                                for v in P.vectorized(V):
                                                    rounded[v] = P.from_f32(value[v], out_dtype)
                                                for v in P.vectorized(V):
                                                    d_x[pos[j], by.unit(P, step, i) * V + v] = rounded[v]
                        if want_weights:
                            # also the barrier between the zeros and the sums
                            sums(acc, total, shared, R, by.threads)
                            for j in loop(P, R):
                                if pos[j] >= 0 and (P.cpu or thread(P) == j):
                                    sum_of_slot = total[j if P.cpu else 0]
                                    d_topk_weights[b, slot[j]] = P.mul(sum_of_slot, x_sf[pos[j]]) if scaled else sum_of_slot
                            P.sync_threads()
            if want_x:
                clear(d_x, owner, b, blocks_of(P, T, N))

    return main


def gradients(P, K, H, x_dtype, grad_out_dtype, has):
    """As an operation of its own, where x may be absent."""
    return reduce_bwd(P, K, H, x_dtype or grad_out_dtype, grad_out_dtype, has)


# ------------------------------------------------------------------ the assignment of every row, where only the reverse is known


def clear_owners(P):
    """No row has an assignment."""
    N = P.dynamic("N")
    threads = 1 if P.cpu else 256

    @P.prim_func
    def main(owner: P.Tensor((N,), I32)):
        with P.Kernel(P.max(P.ceildiv(N, threads), 1), threads=threads) as b:
            if b * threads + thread(P) < N:
                owner[b * threads + thread(P)] = -1

    return main


def write_owners(P, K):
    """owner[token_topk_to_pos[t, k]] = t * K + k; positions are unique."""
    T, N = P.dynamic("T"), P.dynamic("N")
    threads = 1 if P.cpu else 256

    @P.prim_func
    def main(token_topk_to_pos: P.Tensor((T, K), I32), owner: P.Tensor((N,), I32)):
        with P.Kernel(P.max(P.ceildiv(T * K, threads), 1), threads=threads) as b:
            token_topk_to_pos = P.view(token_topk_to_pos, (T * K,), I32)
            i = b * threads + thread(P)
            if i < T * K:
                if token_topk_to_pos[i] >= 0 and token_topk_to_pos[i] < N:
                    owner[token_topk_to_pos[i]] = i

    return main


def check(env: Env) -> None:
    if env["fp8_format"] not in FORMATS:
        raise value_error("reduce_fused", "fp8_format", "'' or 'e4m3'", env["fp8_format"])
    if "factors" in env and (env["factors"] != 1 or not env["fp8_format"]):
        raise value_error("reduce_fused", "sf", "one number, and only where the output is E4M3", f"{env['factors']} of them")
    check_flat("reduce_fused", "token_topk_to_pos", env)
    # the gradient to x needs no x: its rows are known as an attribute, its dtype is that of the output
    env.setdefault("N", env["num_rows"])
    env["x_dtype"] = env["x_dtype"] or env["out_dtype"]
    env["out_dtype"] = FORMATS[env["fp8_format"]] or env["x_dtype"]


def check_bwd(env: Env) -> None:
    check_flat("reduce_fused_backward", "token_topk_to_pos", env)


DOC = """Sum up the rows of experts for their tokens.

out[t] = sum_k topk_weights[t, k] * x_sf[p] * x[p] where p = token_topk_to_pos[t, k] is a row of x

Args:
    x: [N, H] bf16, f32 or f16.
    topk_weights: [T, K] f32; ones where absent.
    token_topk_to_pos: [T, K] i32, the rows of a token; what names none of the N rows is left out, and other rows are not read.
    x_sf: [N] f32, a factor for every row of x.
    sf: [1] f32, a factor of the sum, only with fp8_format "e4m3".

Attributes:
    fp8_format: "" for the dtype of x, or "e4m3".
    num_rows: N, for a gradient that is computed without x.

Returns:
    [T, H]; zeros for tokens without a row.

Raises:
    TypeError: a dtype is another one.
    ValueError: a shape does not fit, or fp8_format is unknown.

Numerics:
    Bit-exact: fp32 FMA in ascending order of k from zero with the rounded product of the factors, one more product by sf, rounded once;
    E4M3 saturates at 448.

Gradient:
    d_x[p] = topk_weights[t, k] * d_out[t], rounded once, zeros on padding; d_topk_weights[t, k] = x_sf[p] * sum_h d_out[t, h] * x[p, h] in
    fp32, zero where there is no row. Meant for an output in the dtype of x, and d_x for an x without factors.

Source:
    Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer, 2017.
"""

X = "bf16|f32|f16"

reduce_fused = declare(
    "reduce_fused",
    "moe",
    f"x[N, H]:{X} topk_weights?[T, K]:f32 token_topk_to_pos[T, K]:i32 x_sf?[N]:f32 sf?[factors]:f32 -> out[T, H]:out_dtype",
    [
        Launch(
            reduce_rows,
            "x topk_weights token_topk_to_pos x_sf sf -> out",
            key="K H x_dtype out_dtype",
            pass_configs=EXPLICIT,
        )
    ],
    attrs={"fp8_format": "", "num_rows": 0},
    only_for={"x": "d_topk_weights"},
    backward="d_out x topk_weights token_topk_to_pos x_sf -> d_x d_topk_weights",
    backward_launches=[
        Launch(clear_owners, "-> owner", pass_configs=EXPLICIT),
        Launch(write_owners, "token_topk_to_pos -> owner", key="K", pass_configs=EXPLICIT),
        Launch(
            reduce_bwd,
            "d_out x topk_weights token_topk_to_pos owner x_sf -> d_x d_topk_weights",
            key="K H x_dtype out_dtype",
            pass_configs=EXPLICIT,
        ),
    ],
    backward_work="owner[N]:i32",
    check=check,
    doc=DOC,
)

BWD_DOC = """The gradients of `reduce_fused`.

d_x[p] = topk_weights[t, k] * grad_out[t] where pos_to_token_topk[p] = t * K + k, zeros on padding
d_topk_weights[t, k] = x_sf[p] * sum_h grad_out[t, h] * x[p, h] where p = token_topk_to_pos[t, k] is a row of x, else zero

Args:
    grad_out: [T, H] bf16, f32 or f16.
    x: [N, H] bf16, f32 or f16; it may be absent where the gradient of the weights is not wanted.
    topk_weights: [T, K] f32; ones where absent.
    token_topk_to_pos: [T, K] i32, the rows of a token.
    pos_to_token_topk: [N] i32, the assignment of a row, negative on padding.
    x_sf: [N] f32, a factor for every row of x.

Returns:
    d_x [N, H] in the dtype of grad_out, and d_topk_weights [T, K] f32; each only where it is wanted.

Raises:
    TypeError: a dtype is another one.
    ValueError: a shape does not fit, or x is missing.

Numerics:
    d_x is bit-exact: one product, rounded once. Sums in fp32 in an order that depends on H only.

Gradient:
    None.
"""

reduce_fused_backward = declare(
    "reduce_fused_backward",
    "moe",
    f"grad_out[T, H]:{X} x?[N, H]:{X} topk_weights?[T, K]:f32 token_topk_to_pos[T, K]:i32 pos_to_token_topk[N]:i32 x_sf?[N]:f32 "
    "-> d_x?[N, H]:grad_out_dtype d_topk_weights?[T, K]:f32",
    [
        Launch(
            gradients,
            "grad_out x topk_weights token_topk_to_pos pos_to_token_topk x_sf -> d_x d_topk_weights",
            key="K H x_dtype grad_out_dtype",
            pass_configs=EXPLICIT,
        )
    ],
    check=check_bwd,
    doc=BWD_DOC,
)
