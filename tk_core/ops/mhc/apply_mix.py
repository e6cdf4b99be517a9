"""`mhc_pre_apply_mix`: the input of a sub-layer, a mix of the residual streams.

out[t, d] = sum_i mix[t, i] * x[t, i, d]
d_mix[t, i] = sum_d d_out[t, d] * x[t, i, d]        d_x[t, i, d] = mix[t, i] * d_out[t, d]
"""

from tk_core.op import Env, Launch, declare
from tk_core.ops.mhc.common import BF16, F32, check_hidden, columns


def apply_mix(P, n, H, threads=128):
    """One block a token and 1024 columns; the streams are summed in ascending order by FMA."""
    T = P.dynamic("T")
    B = columns(P, H, threads)

    @P.prim_func
    def main(x: P.Tensor((T, n, H), BF16), mix: P.Tensor((T, n, 1), F32), out: P.Tensor((T, H), BF16)):
        with P.Kernel(T, P.ceildiv(H, B), threads=threads) as (t, b):
            xs = P.alloc_fragment((n, B), F32)
            acc = P.alloc_fragment((B,), F32)
            P.load(x[t, 0:n, b * B : b * B + B], xs, BF16)
            for j in P.Parallel(B, loop_layout=P.row_layout(B, threads)):
                acc[j] = P.f32(0)
                for i in P.unroll(n):
                    acc[j] = P.fma(mix[t, i, 0], xs[i, j], acc[j])
            P.store(acc, out[t, b * B : b * B + B], BF16)

    return main


def apply_mix_bwd(P, n, H, has, threads=256):
    """One block a token, which sums d_mix over the whole row."""
    T = P.dynamic("T")
    B = P.pad(H, threads)
    want_x, want_mix, add = "d_x" in has, "d_mix" in has, "+d_x" in has

    @P.prim_func
    def main(
        d_out: P.Tensor((T, H), BF16),
        x: P.Tensor((T, n, H), BF16),
        mix: P.Tensor((T, n, 1), F32),
        d_x: P.Tensor((T, n, H), BF16),
        d_mix: P.Tensor((T, n, 1), F32),
    ):
        with P.Kernel(T, threads=threads) as t:
            g = P.alloc_fragment((B,), F32)
            xs = P.alloc_fragment((B,), F32)
            s = P.alloc_fragment((1,), F32)
            P.load(d_out[t, 0:B], g, BF16)
            for i in P.unroll(n):
                if want_mix:
                    P.load(x[t, i, 0:B], xs, BF16)
                    for j in P.Parallel(B):
                        xs[j] = xs[j] * g[j]
                    P.reduce_sum(xs, s)
                    for k in P.Parallel(1):
                        d_mix[t, i, k] = s[k]
                if want_x:
                    if add:
                        P.load(d_x[t, i, 0:B], xs, BF16)
                        for j in P.Parallel(B):
                            xs[j] = P.fma(mix[t, i, 0], g[j], xs[j])
                    else:
                        for j in P.Parallel(B):
                            xs[j] = P.mul(mix[t, i, 0], g[j])
                    P.store(xs, d_x[t, i, 0:B], BF16)

    return main


def check(env: Env) -> None:
    check_hidden("mhc_pre_apply_mix", "x", env)


mhc_pre_apply_mix = declare(
    "mhc_pre_apply_mix",
    "mhc",
    "x[..., n, H]:bf16 mix[..., n, 1]:f32 -> out[..., H]:bf16",
    [Launch(apply_mix, "x mix -> out", key="n H")],
    backward="d_out x mix -> d_x d_mix",
    backward_launches=[Launch(apply_mix_bwd, "d_out x mix -> d_x d_mix", key="n H")],
    accumulates="d_x",
    check=check,
)
