"""`expand_to_mhc`: every residual stream starts as a copy of the hidden states.

out[t, m, d] = hidden[t, d]        d_hidden[t, d] = sum_m d_out[t, m, d]
"""

from tk_core.op import Env, Launch, declare
from tk_core.ops.mhc.common import BF16, F32, check_hidden, check_streams, row_threads, thread, vector


def expand(P, mhc_mult, H):
    """A thread reads one vector and writes it to every stream."""
    T = P.dynamic("T")
    threads = row_threads(H)
    V = vector(P)
    B = H if P.cpu else threads * V

    @P.prim_func
    def main(hidden: P.Tensor((T, H), BF16), out: P.Tensor((T, mhc_mult, H), BF16)):
        with P.Kernel(T, P.ceildiv(H, B), threads=threads) as (t, b):
            xs = P.alloc_local((V,), P.storage(BF16))
            for k in P.serial(H // V if P.cpu else 1):
                col = b * B + (k + thread(P)) * V
                if col < H:
                    for v in P.vectorized(V):
                        xs[v] = hidden[t, col + v]
                    for m in P.unroll(mhc_mult):
                        for v in P.vectorized(V):
                            out[t, m, col + v] = xs[v]

    return main


def expand_bwd(P, mhc_mult, H):
    """A thread sums one vector over the streams in ascending order in fp32 and rounds once."""
    T = P.dynamic("T")
    threads = row_threads(H)
    V = vector(P)
    B = H if P.cpu else threads * V

    @P.prim_func
    def main(d_out: P.Tensor((T, mhc_mult, H), BF16), d_hidden: P.Tensor((T, H), BF16)):
        with P.Kernel(T, P.ceildiv(H, B), threads=threads) as (t, b):
            gs = P.alloc_local((mhc_mult, V), P.storage(BF16))
            acc = P.alloc_local((V,), F32)
            total = P.alloc_local((V,), P.storage(BF16))
            for k in P.serial(H // V if P.cpu else 1):
                col = b * B + (k + thread(P)) * V
                if col < H:
                    for m in P.unroll(mhc_mult):
                        for v in P.vectorized(V):
                            gs[m, v] = d_out[t, m, col + v]
                    for v in P.unroll(V):
                        acc[v] = P.to_f32(gs[0, v], BF16)
                    for m in P.unroll(mhc_mult - 1):
                        for v in P.unroll(V):
                            acc[v] = acc[v] + P.to_f32(gs[m + 1, v], BF16)
                    for v in P.vectorized(V):
                        total[v] = P.from_f32(acc[v], BF16)
                    for v in P.vectorized(V):
                        d_hidden[t, col + v] = total[v]

    return main


def check(env: Env) -> None:
    check_streams("expand_to_mhc", "mhc_mult", "mhc_mult", env)
    check_hidden("expand_to_mhc", "hidden", env)


DOC = """Start the residual streams: every one is a copy of the hidden states.

out[..., m, d] = hidden[..., d]

Args:
    hidden: [..., H] bf16; H a multiple of 128.
    mhc_mult: number of streams, at least 1.

Returns:
    [..., mhc_mult, H] bf16.

Raises:
    TypeError: a dtype is another one.
    ValueError: H is no multiple of 128, or mhc_mult < 1.

Numerics:
    Exact copies.

Gradient:
    d_hidden = sum over the streams in ascending order in fp32, rounded once.

Source:
    mHC: Manifold-Constrained Hyper-Connections, 2025.
"""

expand_to_mhc = declare(
    "expand_to_mhc",
    "mhc",
    "hidden[..., H]:bf16 -> out[..., mhc_mult, H]:bf16",
    [Launch(expand, "hidden -> out", key="mhc_mult H")],
    attrs={"mhc_mult": 4},
    backward="d_out -> d_hidden",
    backward_launches=[Launch(expand_bwd, "d_out -> d_hidden", key="mhc_mult H")],
    check=check,
    doc=DOC,
)
