"""`mhc_pre_apply_mix`: the input of a sub-layer, a mix of the residual streams.

out[t, d] = sum_i mix[t, i] * x[t, i, d]
d_mix[t, i] = sum_d d_out[t, d] * x[t, i, d]        d_x[t, i, d] = mix[t, i] * d_out[t, d]
"""

from tk_core.op import Env, Launch, declare
from tk_core.ops.mhc.common import BF16, F32, block_sums, check_hidden, check_streams, lanes, row_threads, sums_of_thread, thread, vector


def apply_mix(P, n, H):
    """A thread mixes one vector of columns; the streams are summed in ascending order by FMA."""
    T = P.dynamic("T")
    threads = row_threads(H)
    V = vector(P)
    B = H if P.cpu else threads * V

    @P.prim_func
    def main(x: P.Tensor((T, n, H), BF16), mix: P.Tensor((T, n, 1), F32), out: P.Tensor((T, H), BF16)):
        with P.Kernel(T, P.ceildiv(H, B), threads=threads) as (t, b):
            xs = P.alloc_local((n, V), P.storage(BF16))
            acc = P.alloc_local((V,), F32)
            mixed = P.alloc_local((V,), P.storage(BF16))
            for k in P.serial(H // V if P.cpu else 1):
                col = b * B + (k + thread(P)) * V
                if col < H:
                    for i in P.unroll(n):
                        for v in P.vectorized(V):
                            xs[i, v] = x[t, i, col + v]
                    for v in P.unroll(V):
                        acc[v] = P.f32(0)
                    for i in P.unroll(n):
                        for v in P.unroll(V):
                            acc[v] = P.fma(mix[t, i, 0], P.to_f32(xs[i, v], BF16), acc[v])
                    for v in P.vectorized(V):
                        mixed[v] = P.from_f32(acc[v], BF16)
                    for v in P.vectorized(V):
                        out[t, col + v] = mixed[v]

    return main


def apply_mix_bwd(P, n, H, has):
    """A block takes a token: d_x column by column, and d_mix as sums over the whole row."""
    T = P.dynamic("T")
    threads = row_threads(H, 1024 if n <= 4 else 512)
    V = vector(P)
    L = lanes(P)
    want_x, want_mix, add = "d_x" in has, "d_mix" in has, "+d_x" in has
    sums = block_sums(P)
    steps = H // V if P.cpu else -(-H // (threads * V))
    stride = 1 if P.cpu else threads
    each = sums_of_thread(P, n, threads)

    @P.prim_func
    def main(
        d_out: P.Tensor((T, H), BF16),
        x: P.Tensor((T, n, H), BF16),
        mix: P.Tensor((T, n, 1), F32),
        d_x: P.Tensor((T, n, H), BF16),
        d_mix: P.Tensor((T, n, 1), F32),
    ):
        with P.Kernel(T, threads=threads) as t:
            if not P.cpu:
                P.annotate_min_blocks_per_sm(1024 // threads if n <= 4 else 1)
            gs = P.alloc_local((V,), P.storage(BF16))
            xs = P.alloc_local((n, V), P.storage(BF16))
            old = P.alloc_local((n, V), P.storage(BF16))
            dx = P.alloc_local((V,), F32)
            rounded = P.alloc_local((V,), P.storage(BF16))
            acc = P.alloc_local((n, L), F32)
            total = P.alloc_local((each,), F32)
            shared = P.alloc_shared((n * threads // 32,), F32)
            for i in P.unroll(n):
                for lane in P.unroll(L):
                    acc[i, lane] = P.f32(0)
            for k in P.serial(steps):
                col = (k * stride + thread(P)) * V
                if col < H:
                    for v in P.vectorized(V):
                        gs[v] = d_out[t, col + v]
                    for i in P.unroll(n):
                        if want_mix:
                            for v in P.vectorized(V):
                                xs[i, v] = x[t, i, col + v]
                        if add:
                            for v in P.vectorized(V):
                                old[i, v] = d_x[t, i, col + v]
                    for i in P.unroll(n):
                        if want_mix:
                            for c in P.unroll(V // L):
                                for lane in P.unroll(L):
                                    acc[i, lane] = P.fma(
                                        P.to_f32(gs[c * L + lane], BF16), P.to_f32(xs[i, c * L + lane], BF16), acc[i, lane]
                                    )
                        if want_x:
                            for v in P.unroll(V):
                                if add:
                                    dx[v] = P.fma(mix[t, i, 0], P.to_f32(gs[v], BF16), P.to_f32(old[i, v], BF16))
                                else:
                                    dx[v] = P.mul(mix[t, i, 0], P.to_f32(gs[v], BF16))
                            for v in P.vectorized(V):
                                rounded[v] = P.from_f32(dx[v], BF16)
                            for v in P.vectorized(V):
                                d_x[t, i, col + v] = rounded[v]
            if want_mix:
                sums(acc, total, shared, n, threads)
                for r in P.unroll(each):
                    if r * stride + thread(P) < n:
                        d_mix[t, r * stride + thread(P), 0] = total[r]

    return main


def check(env: Env) -> None:
    check_streams("mhc_pre_apply_mix", "x", "n", env)
    check_hidden("mhc_pre_apply_mix", "x", env)


DOC = """Mix the residual streams into the input of a sub-layer.

out[..., d] = sum_i mix[..., i, 0] * x[..., i, d]

Args:
    x: [..., n, H] bf16, the residual streams; H a multiple of 128.
    mix: [..., n, 1] f32, the weights of the streams.

Returns:
    [..., H] bf16.

Raises:
    TypeError: a dtype is another one.
    ValueError: a shape does not fit, or H is no multiple of 128.

Numerics:
    fp32 FMA in ascending stream order from zero, rounded once.

Gradient:
    d_mix_i = sum_d d_out[d] * x[i, d] in fp32; d_x[i, d] = mix_i * d_out[d], rounded once, also where it is added to a
    gradient buffer.

Source:
    mHC: Manifold-Constrained Hyper-Connections, 2025.
"""

mhc_pre_apply_mix = declare(
    "mhc_pre_apply_mix",
    "mhc",
    "x[..., n, H]:bf16 mix[..., n, 1]:f32 -> out[..., H]:bf16",
    [Launch(apply_mix, "x mix -> out", key="n H")],
    backward="d_out x mix -> d_x d_mix",
    backward_launches=[Launch(apply_mix_bwd, "d_out x mix -> d_x d_mix", key="n H")],
    accumulates="d_x",
    check=check,
    doc=DOC,
)
