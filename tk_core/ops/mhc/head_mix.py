"""`mhc_head_compute_mix`: the weights with which the streams are mixed into the input of the head.

out = sigma(z) + eps, z = input_mix * scale + base

dz = d_out * sigma * (1 - sigma)    d_input_mix = dz * scale    d_scale = sum_t sum_j dz_j * m_j    d_base_j = sum_t dz_j
"""

from tk_core.op import Env, Launch, declare
from tk_core.ops.mhc.common import (
    F32,
    F64,
    affine,
    check_few_streams,
    partials_of,
    sigma,
    stream_vector,
    sum_partials,
    thread,
    tile_of,
    tile_sums,
)

# Tokens that a block takes at a time, at most.
TILE = 128


def head_mix(P, n):
    """A thread takes one vector of up to four mixes of one token."""
    T = P.dynamic("T")
    V = stream_vector(n)
    units = n // V
    tile = tile_of(units, TILE)
    B = 1 if P.cpu else tile
    threads = tile * units

    @P.prim_func
    def main(
        input_mix: P.Tensor((T, n), F32),
        mhc_scale: P.Tensor((1,), F32),
        mhc_base: P.Tensor((n,), F32),
        out: P.Tensor((T, n), F32),
        mhc_pre_eps: P.float32,
    ):
        with P.Kernel(P.ceildiv(T, B), threads=threads) as b:
            z = P.alloc_local((V,), F32)
            for k in P.serial(units if P.cpu else 1):
                unit = k + thread(P)
                t = b * B + unit // units
                j = unit % units * V
                if t < T:
                    for v in P.vectorized(V):
                        z[v] = input_mix[t, j + v]
                    for v in P.unroll(V):
                        z[v] = P.add(sigma(P, affine(P, z[v], mhc_scale[0], mhc_base[j + v])), mhc_pre_eps)
                    for v in P.vectorized(V):
                        out[t, j + v] = z[v]

    return main


def head_mix_bwd(P, n, has):
    """The same division of work; program b takes tiles b, b + partials, ... and leaves one partial sum of every parameter."""
    T, partials = P.dynamic("T"), P.dynamic("partials")
    V = stream_vector(n)
    units = n // V
    rows = tile_of(units, TILE)
    threads = rows * units
    want_m, want_sums = "d_input_mix" in has, "part" in has
    work = rows * units if P.cpu else 1
    own = units if P.cpu else 1
    sums = tile_sums(P)

    @P.prim_func
    def main(
        d_out: P.Tensor((T, n), F32),
        input_mix: P.Tensor((T, n), F32),
        mhc_scale: P.Tensor((1,), F32),
        mhc_base: P.Tensor((n,), F32),
        d_input_mix: P.Tensor((T, n), F32),
        part: P.Tensor((partials, 2, n + units), F32),
    ):
        with P.Kernel(partials if want_sums else P.ceildiv(T, rows), threads=threads) as b:
            m = P.alloc_local((V,), F32)
            dz = P.alloc_local((V,), F32)
            s = P.alloc_local((V,), F32)
            base_sum = P.alloc_local((own, V), F64)
            scale_sum = P.alloc_local((own,), F64)
            shared = P.alloc_shared((1 if P.cpu else rows, n + units), F64)
            for k in P.unroll(own):
                scale_sum[k] = P.float64(0)
                for v in P.unroll(V):
                    base_sum[k, v] = P.float64(0)
            for tile in P.serial(P.ceildiv(P.ceildiv(T, rows) - b, partials) if want_sums else 1):
                for k in P.serial(work):
                    unit = k + thread(P)
                    t = ((tile * partials + b) if want_sums else b) * rows + unit // units
                    q = unit % units
                    mine = q if P.cpu else 0
                    j = q * V
                    if t < T:
                        for v in P.vectorized(V):
                            m[v] = input_mix[t, j + v]
                        for v in P.vectorized(V):
                            dz[v] = d_out[t, j + v]
                        for v in P.unroll(V):
                            s[v] = sigma(P, affine(P, m[v], mhc_scale[0], mhc_base[j + v]))
                            dz[v] = dz[v] * (s[v] * (P.f32(1) - s[v]))
                        if want_sums:
                            for v in P.unroll(V):
                                base_sum[mine, v] = base_sum[mine, v] + P.Cast(F64, dz[v])
                                scale_sum[mine] = scale_sum[mine] + P.Cast(F64, dz[v]) * P.Cast(F64, m[v])
                        if want_m:
                            for v in P.unroll(V):
                                dz[v] = dz[v] * mhc_scale[0]
                            for v in P.vectorized(V):
                                d_input_mix[t, j + v] = dz[v]
            if want_sums:
                sums(base_sum, scale_sum, shared, part, b, V, units, rows, threads)

    return main


def head_mix_reduce(P, n, has):
    """The partial sums in a fixed order."""
    units = n // stream_vector(n)
    return sum_partials(P, n, units, 1, units, "d_mhc_scale" in has, "d_mhc_base" in has)


def derive(env: Env) -> Env:
    n = env["n"]
    units = n // stream_vector(n)
    return {"partials": partials_of(env["rows"], tile_of(units, TILE)), "width": n + units}


def check(env: Env) -> None:
    check_few_streams("mhc_head_compute_mix", "input_mix", "n", env)


DOC = """Weights with which the residual streams are mixed into the input of the head.

out = sigma(input_mix * mhc_scale + mhc_base) + mhc_pre_eps

Args:
    input_mix: [..., n] f32.
    mhc_scale: [1] f32.
    mhc_base: [n] f32.
    mhc_pre_eps: added to every weight.

Returns:
    [..., n] f32.

Raises:
    TypeError: a dtype is another one.
    ValueError: a shape does not fit, or n is not from 1 to 16.

Numerics:
    fp32: one FMA, sigma(z) = 1 / (1 + exp(-z)) with a true division.

Gradient:
    sigma is recomputed; token sums of the parameters in fp64, in a fixed order that depends on the rows only, rounded once.

Source:
    mHC: Manifold-Constrained Hyper-Connections, 2025.
"""

mhc_head_compute_mix = declare(
    "mhc_head_compute_mix",
    "mhc",
    "input_mix[..., n]:f32 mhc_scale[1]:f32 mhc_base[n]:f32 -> out[..., n]:f32",
    [Launch(head_mix, "input_mix mhc_scale mhc_base -> out; mhc_pre_eps", key="n")],
    attrs={"mhc_pre_eps": 1e-6},
    backward="d_out input_mix mhc_scale mhc_base -> d_input_mix d_mhc_scale d_mhc_base",
    backward_launches=[
        Launch(head_mix_bwd, "d_out input_mix mhc_scale mhc_base -> d_input_mix part", key="n"),
        Launch(head_mix_reduce, "part -> d_mhc_scale d_mhc_base", key="n"),
    ],
    backward_work="part[partials, 2, width]:f32",
    backward_derive=derive,
    check=check,
    doc=DOC,
)
