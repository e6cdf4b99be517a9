"""`mhc_post`: the next residual streams from the output of a sub-layer and the old streams.

out[t, o, d] = post[t, o] * x[t, d] + sum_i comb[t, i, o] * residual[t, i, d]

d_x[t, d] = sum_o post[t, o] * d_out[t, o, d]       d_residual[t, i, d] = sum_o comb[t, i, o] * d_out[t, o, d]
d_post[t, o] = sum_d x[t, d] * d_out[t, o, d]       d_comb[t, i, o] = sum_d residual[t, i, d] * d_out[t, o, d]
"""

from tk_core.op import Env, Launch, declare
from tk_core.ops.mhc.common import BF16, F32, block_sums, check_hidden, check_streams, lanes, row_threads, sums_of_thread, thread, vector


def post(P, n, H):
    """A thread makes one vector of every new stream from one vector of x and of every old one."""
    T = P.dynamic("T")
    threads = row_threads(H, 1024 if n <= 4 else 256)
    V = vector(P)
    B = H if P.cpu else threads * V

    @P.prim_func
    def main(
        x: P.Tensor((T, H), BF16),
        residual: P.Tensor((T, n, H), BF16),
        post_layer_mix: P.Tensor((T, n, 1), F32),
        comb_res_mix: P.Tensor((T, n, n), F32),
        out: P.Tensor((T, n, H), BF16),
    ):
        with P.Kernel(T, P.ceildiv(H, B), threads=threads) as (t, b):
            if not P.cpu:
                P.annotate_min_blocks_per_sm(1024 // threads if n <= 4 else 1)
            xs = P.alloc_local((V,), P.storage(BF16))
            rs = P.alloc_local((n, V), P.storage(BF16))
            gate = P.alloc_local((n,), F32)
            comb = P.alloc_local((n, n), F32)
            acc = P.alloc_local((V,), F32)
            rounded = P.alloc_local((V,), P.storage(BF16))
            for i in P.vectorized(n):
                gate[i] = post_layer_mix[t, i, 0]
            for i in P.unroll(n):
                for o in P.vectorized(n):
                    comb[i, o] = comb_res_mix[t, i, o]
            for k in P.serial(H // V if P.cpu else 1):
                col = b * B + (k + thread(P)) * V
                if col < H:
                    for v in P.vectorized(V):
                        xs[v] = x[t, col + v]
                    for i in P.unroll(n):
                        for v in P.vectorized(V):
                            rs[i, v] = residual[t, i, col + v]
                    for o in P.unroll(n):
                        for v in P.unroll(V):
                            acc[v] = P.mul(gate[o], P.to_f32(xs[v], BF16))
                        for i in P.unroll(n):
                            for v in P.unroll(V):
                                acc[v] = P.fma(comb[i, o], P.to_f32(rs[i, v], BF16), acc[v])
                        for v in P.vectorized(V):
                            rounded[v] = P.from_f32(acc[v], BF16)
                        for v in P.vectorized(V):
                            out[t, o, col + v] = rounded[v]

    return main


def post_bwd(P, n, H, has):
    """A block takes a token and reads every tensor once: d_x and d_residual column by column, the mixes as row sums."""
    T = P.dynamic("T")
    # 64 registers a thread hold what four streams need in a single part of a row, not in several
    tight = n <= 4 and H <= 8192
    threads = row_threads(H, 1024 if tight else 512 if n <= 4 else 256)
    V = vector(P)
    L = lanes(P)
    want_x, want_residual = "d_x" in has, "d_residual" in has
    want_post, want_comb = "d_post_layer_mix" in has, "d_comb_res_mix" in has
    # sums 0 .. n - 1 are d_post, sum n + i * n + o is d_comb[i, o]
    first = 0 if want_post else n
    K = n + n * n if want_comb else n
    sums = block_sums(P)
    steps = H // V if P.cpu else -(-H // (threads * V))
    stride = 1 if P.cpu else threads
    each = sums_of_thread(P, K - first, threads)

    @P.macro
    def mix(part, weight, gs):
        for v in P.unroll(V):
            part[v] = P.mul(weight[0], P.to_f32(gs[0, v], BF16))
        for o in P.unroll(n - 1):
            for v in P.unroll(V):
                part[v] = P.fma(weight[o + 1], P.to_f32(gs[o + 1, v], BF16), part[v])

    @P.prim_func
    def main(
        d_out: P.Tensor((T, n, H), BF16),
        x: P.Tensor((T, H), BF16),
        residual: P.Tensor((T, n, H), BF16),
        post_layer_mix: P.Tensor((T, n, 1), F32),
        comb_res_mix: P.Tensor((T, n, n), F32),
        d_x: P.Tensor((T, H), BF16),
        d_residual: P.Tensor((T, n, H), BF16),
        d_post_layer_mix: P.Tensor((T, n, 1), F32),
        d_comb_res_mix: P.Tensor((T, n, n), F32),
    ):
        with P.Kernel(T, threads=threads) as t:
            if not P.cpu:
                # on sm_100a, where this was not measured, the register limit that comes with it leads to spills
                P.annotate_min_blocks_per_sm(1024 // threads if tight and P.sm == 90 else 1)
            gs = P.alloc_local((n, V), P.storage(BF16))
            xs = P.alloc_local((V,), P.storage(BF16))
            rs = P.alloc_local((n, V), P.storage(BF16))
            weight = P.alloc_local((n,), F32)
            acc = P.alloc_local((K - first, L), F32)
            total = P.alloc_local((each,), F32)
            part = P.alloc_local((V,), F32)
            rounded = P.alloc_local((V,), P.storage(BF16))
            shared = P.alloc_shared(((K - first) * threads // 32,), F32)
            if want_post or want_comb:
                for k in P.unroll(K - first):
                    for lane in P.unroll(L):
                        acc[k, lane] = P.f32(0)
            for k in P.serial(steps):
                col = (k * stride + thread(P)) * V
                if col < H:
                    for o in P.unroll(n):
                        for v in P.vectorized(V):
                            gs[o, v] = d_out[t, o, col + v]
                    if want_post:
                        for v in P.vectorized(V):
                            xs[v] = x[t, col + v]
                    if want_comb:
                        for i in P.unroll(n):
                            for v in P.vectorized(V):
                                rs[i, v] = residual[t, i, col + v]
                    if want_x:
                        for o in P.vectorized(n):
                            weight[o] = post_layer_mix[t, o, 0]
                        mix(part, weight, gs)
                        for v in P.vectorized(V):
                            rounded[v] = P.from_f32(part[v], BF16)
                        for v in P.vectorized(V):
                            d_x[t, col + v] = rounded[v]
                    if want_post:
                        for o in P.unroll(n):
                            for c in P.unroll(V // L):
                                for lane in P.unroll(L):
                                    e = c * L + lane
                                    acc[o, lane] = P.fma(P.to_f32(xs[e], BF16), P.to_f32(gs[o, e], BF16), acc[o, lane])
                    # stream by stream, so that a vector of the residual is dead before the next sums are made
                    for i in P.unroll(n):
                        if want_residual:
                            for o in P.vectorized(n):
                                weight[o] = comb_res_mix[t, i, o]
                            mix(part, weight, gs)
                            for v in P.vectorized(V):
                                rounded[v] = P.from_f32(part[v], BF16)
                            for v in P.vectorized(V):
                                d_residual[t, i, col + v] = rounded[v]
                        if want_comb:
                            for o in P.unroll(n):
                                for c in P.unroll(V // L):
                                    for lane in P.unroll(L):
                                        e = c * L + lane
                                        s = n - first + i * n + o
                                        acc[s, lane] = P.fma(P.to_f32(rs[i, e], BF16), P.to_f32(gs[o, e], BF16), acc[s, lane])
            if want_post or want_comb:
                sums(acc, total, shared, K - first, threads)
                for r in P.unroll(each):
                    s = first + r * stride + thread(P)
                    if want_post:
                        if s < n:
                            d_post_layer_mix[t, s, 0] = total[r]
                    if want_comb:
                        if s >= n and s < K:
                            d_comb_res_mix[t, (s - n) // n, (s - n) % n] = total[r]

    return main


def check(env: Env) -> None:
    check_streams("mhc_post", "residual", "n", env)
    check_hidden("mhc_post", "x", env)


DOC = """Write the output of a sub-layer into the residual streams and mix the streams.

out[..., o, d] = post_layer_mix[..., o, 0] * x[..., d] + sum_i comb_res_mix[..., i, o] * residual[..., i, d]

Args:
    x: [..., H] bf16, the output of the sub-layer; H a multiple of 128.
    residual: [..., n, H] bf16, the residual streams.
    post_layer_mix: [..., n, 1] f32, the share of x in every stream.
    comb_res_mix: [..., n, n] f32, rows are input streams, columns are output streams.

Returns:
    [..., n, H] bf16, the next residual streams.

Raises:
    TypeError: a dtype is another one.
    ValueError: a shape does not fit, or H is no multiple of 128.

Numerics:
    fp32, from the product with x by FMA over the input streams in ascending order, rounded once.

Gradient:
    d_x = sum_o post_o * d_out[o] and d_residual[i] = sum_o comb[i, o] * d_out[o], fp32 and rounded once;
    d_post_o = sum_d x * d_out[o] and d_comb[i, o] = sum_d residual[i] * d_out[o] in fp32, in a fixed order.

Source:
    mHC: Manifold-Constrained Hyper-Connections, 2025.
"""

mhc_post = declare(
    "mhc_post",
    "mhc",
    "x[..., H]:bf16 residual[..., n, H]:bf16 post_layer_mix[..., n, 1]:f32 comb_res_mix[..., n, n]:f32 -> out[..., n, H]:bf16",
    [Launch(post, "x residual post_layer_mix comb_res_mix -> out", key="n H")],
    backward="d_out x residual post_layer_mix comb_res_mix -> d_x d_residual d_post_layer_mix d_comb_res_mix",
    backward_launches=[
        Launch(
            post_bwd,
            "d_out x residual post_layer_mix comb_res_mix -> d_x d_residual d_post_layer_mix d_comb_res_mix",
            key="n H",
        )
    ],
    check=check,
    doc=DOC,
)
