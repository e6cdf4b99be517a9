"""`normalize_weight`: the weights of a token divided by their sum.

D = ((1e-20 + w_0) + w_1) + ...        n_k = w_k / D
d_w_k = (g_k - sum_j g_j n_j) / D + d  for cotangents g of n and d of D

A thread takes a row.
"""

from math import gcd

from tk_core.errors import value_error
from tk_core.op import Env, Launch, declare
from tk_core.ops.moe.scoring import F32, tiny
from tk_core.ops.quant.bits import divide

_THREADS = 128
_MOST = 32


def row_of_thread(P, b):
    return b if P.cpu else b * _THREADS + P.get_thread_binding(0)


def rows_at_once(P) -> int:
    return 1 if P.cpu else _THREADS


def normalize(P, K):
    T = P.dynamic("T")
    V = gcd(K, 4)

    @P.prim_func
    def main(topk_weights: P.Tensor((T, K), F32), denominator: P.Tensor((T,), F32), normalized_weights: P.Tensor((T, K), F32)):
        with P.Kernel(P.ceildiv(T, rows_at_once(P)), threads=_THREADS) as b:
            weight = P.alloc_local((K,), F32)
            total = P.alloc_var(F32, init=tiny(P))
            t = row_of_thread(P, b)
            if t < T:
                for i in P.unroll(K // V):
                    for v in P.vectorized(V):
                        weight[i * V + v] = topk_weights[t, i * V + v]
                for k in P.unroll(K):
                    total = P.add(total, weight[k])
                denominator[t] = total
                for k in P.unroll(K):
                    weight[k] = divide(P, weight[k], total)
                for i in P.unroll(K // V):
                    for v in P.vectorized(V):
                        normalized_weights[t, i * V + v] = weight[i * V + v]

    return main


def normalize_bwd(P, K, has):
    T = P.dynamic("T")
    V = gcd(K, 4)
    weighted, plain = "d_normalized_weights" in has, "d_denominator" in has

    @P.prim_func
    def main(
        d_denominator: P.Tensor((T,), F32),
        d_normalized_weights: P.Tensor((T, K), F32),
        denominator: P.Tensor((T,), F32),
        normalized_weights: P.Tensor((T, K), F32),
        d_topk_weights: P.Tensor((T, K), F32),
    ):
        with P.Kernel(P.ceildiv(T, rows_at_once(P)), threads=_THREADS) as b:
            g = P.alloc_local((K,), F32)
            n = P.alloc_local((K,), F32)
            dot = P.alloc_var(F32, init=0.0)
            share = P.alloc_var(F32, init=0.0)
            more = P.alloc_var(F32, init=0.0)
            t = row_of_thread(P, b)
            if t < T:
                dot = P.f32(0)
                more = d_denominator[t] if plain else P.f32(0)
                if weighted:
                    share = P.f32(1) / denominator[t]
                    for i in P.unroll(K // V):
                        for v in P.vectorized(V):
                            g[i * V + v] = d_normalized_weights[t, i * V + v]
                        for v in P.vectorized(V):
                            n[i * V + v] = normalized_weights[t, i * V + v]
                    for k in P.unroll(K):
                        dot = P.fma(g[k], n[k], dot)
                    for k in P.unroll(K):
                        n[k] = (g[k] - dot) * share + more
                else:
                    for k in P.unroll(K):
                        n[k] = more
                for i in P.unroll(K // V):
                    for v in P.vectorized(V):
                        d_topk_weights[t, i * V + v] = n[i * V + v]

    return main


def check(env: Env) -> None:
    if not 1 <= env["K"] <= _MOST:
        raise value_error("normalize_weight", "topk_weights", f"1 to {_MOST} weights a row", env["K"])


DOC = """Divide the weights of every row by their sum.

D = 1e-20 + sum_k w_k; out = w_k / D

Args:
    topk_weights: [..., K] f32, K at most 32.

Returns:
    denominator [...] f32 and normalized_weights [..., K] f32. A row of zeros stays one.

Raises:
    TypeError: topk_weights is not f32.
    ValueError: K is out of range.

Numerics:
    Exact: fp32 sums from left to right, beginning with 1e-20; one IEEE division a weight.

Gradient:
    d_w_k = (g_k - sum_j g_j n_j) / D + d in fp32, from the saved results.

Source:
    DeepSeek-V3 Technical Report, 2024.
"""

normalize_weight = declare(
    "normalize_weight",
    "moe",
    "topk_weights[..., K]:f32 -> denominator[...]:f32 normalized_weights[..., K]:f32",
    [Launch(normalize, "topk_weights -> denominator normalized_weights", key="K")],
    backward="d_denominator d_normalized_weights denominator normalized_weights -> d_topk_weights",
    backward_launches=[
        Launch(normalize_bwd, "d_denominator d_normalized_weights denominator normalized_weights -> d_topk_weights", key="K")
    ],
    check=check,
    doc=DOC,
)
