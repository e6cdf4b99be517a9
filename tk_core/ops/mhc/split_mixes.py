"""`mhc_pre_split_mixes`: the mixes of a token from its projections, and the activations of two of them.

z_j = m_j * scale_seg(j) + base_j, seg = 0 for j < n, 1 for j < 2n, 2 beyond
pre = sigma(z[:n]) + eps        post = rho * sigma(z[n:2n])        comb = z[2n:], row-major

dz_pre = d_pre * sigma * (1 - sigma), dz_post = d_post * rho * sigma * (1 - sigma), dz_comb = d_comb
d_m_j = dz_j * scale_seg(j)     d_base_j = sum_t dz_j      d_scale_k = sum_t sum_{j in seg k} dz_j * m_j
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
TILE = 32


def split_mixes(P, mhc_mult):
    """A thread takes one vector of up to four mixes of one token; vectors never straddle two segments."""
    T = P.dynamic("T")
    n, M = mhc_mult, mhc_mult * (mhc_mult + 2)
    V = stream_vector(n)
    units = M // V
    tile = tile_of(units, TILE)
    B = 1 if P.cpu else tile
    threads = tile * units

    @P.prim_func
    def main(
        input_mixes: P.Tensor((T, M), F32),
        mhc_scale: P.Tensor((3,), F32),
        mhc_base: P.Tensor((M,), F32),
        pre_layer_mix: P.Tensor((T, n, 1), F32),
        post_layer_mix: P.Tensor((T, n, 1), F32),
        comb_res_mix: P.Tensor((T, n, n), F32),
        mhc_post_mult_value: P.float32,
        mhc_pre_eps: P.float32,
    ):
        with P.Kernel(P.ceildiv(T, B), threads=threads) as b:
            z = P.alloc_local((V,), F32)
            for k in P.serial(units if P.cpu else 1):
                unit = k + thread(P)
                t = b * B + unit // units
                q = unit % units
                j = q * V
                if t < T:
                    for v in P.vectorized(V):
                        z[v] = input_mixes[t, j + v]
                    for v in P.unroll(V):
                        z[v] = affine(P, z[v], mhc_scale[P.min(j // n, 2)], mhc_base[j + v])
                    if j < n:
                        for v in P.unroll(V):
                            z[v] = P.add(sigma(P, z[v]), mhc_pre_eps)
                        for v in P.vectorized(V):
                            pre_layer_mix[t, j + v, 0] = z[v]
                    if j >= n and j < 2 * n:
                        for v in P.unroll(V):
                            z[v] = P.mul(mhc_post_mult_value, sigma(P, z[v]))
                        for v in P.vectorized(V):
                            post_layer_mix[t, j - n + v, 0] = z[v]
                    if j >= 2 * n:
                        for v in P.vectorized(V):
                            comb_res_mix[t, (j - 2 * n) // n, (j - 2 * n) % n + v] = z[v]

    return main


def split_mixes_bwd(P, mhc_mult, has):
    """The same division of work; program b takes tiles b, b + partials, ... and leaves one partial sum of every parameter."""
    T, partials = P.dynamic("T"), P.dynamic("partials")
    n, M = mhc_mult, mhc_mult * (mhc_mult + 2)
    V = stream_vector(n)
    units = M // V
    rows = tile_of(units, TILE)
    threads = rows * units
    want_m, want_sums = "d_input_mixes" in has, "part" in has
    have_pre, have_post, have_comb = "d_pre_layer_mix" in has, "d_post_layer_mix" in has, "d_comb_res_mix" in has
    work = rows * units if P.cpu else 1
    own = units if P.cpu else 1
    sums = tile_sums(P)

    @P.prim_func
    def main(
        d_pre_layer_mix: P.Tensor((T, n, 1), F32),
        d_post_layer_mix: P.Tensor((T, n, 1), F32),
        d_comb_res_mix: P.Tensor((T, n, n), F32),
        input_mixes: P.Tensor((T, M), F32),
        mhc_scale: P.Tensor((3,), F32),
        mhc_base: P.Tensor((M,), F32),
        d_input_mixes: P.Tensor((T, M), F32),
        part: P.Tensor((partials, 2, M + units), F32),
        mhc_post_mult_value: P.float32,
    ):
        with P.Kernel(partials if want_sums else P.ceildiv(T, rows), threads=threads) as b:
            m = P.alloc_local((V,), F32)
            dz = P.alloc_local((V,), F32)
            s = P.alloc_local((V,), F32)
            base_sum = P.alloc_local((own, V), F64)
            scale_sum = P.alloc_local((own,), F64)
            shared = P.alloc_shared((1 if P.cpu else rows, M + units), F64)
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
                            m[v] = input_mixes[t, j + v]
                        for v in P.unroll(V):
                            dz[v] = P.f32(0)
                        if j < 2 * n:
                            for v in P.unroll(V):
                                s[v] = sigma(P, affine(P, m[v], mhc_scale[P.min(j // n, 2)], mhc_base[j + v]))
                        if have_pre:
                            if j < n:
                                for v in P.vectorized(V):
                                    dz[v] = d_pre_layer_mix[t, j + v, 0]
                                for v in P.unroll(V):
                                    dz[v] = dz[v] * (s[v] * (P.f32(1) - s[v]))
                        if have_post:
                            if j >= n and j < 2 * n:
                                for v in P.vectorized(V):
                                    dz[v] = d_post_layer_mix[t, j - n + v, 0]
                                for v in P.unroll(V):
                                    dz[v] = dz[v] * mhc_post_mult_value * (s[v] * (P.f32(1) - s[v]))
                        if have_comb:
                            if j >= 2 * n:
                                for v in P.vectorized(V):
                                    dz[v] = d_comb_res_mix[t, (j - 2 * n) // n, (j - 2 * n) % n + v]
                        if want_sums:
                            for v in P.unroll(V):
                                base_sum[mine, v] = base_sum[mine, v] + P.Cast(F64, dz[v])
                                scale_sum[mine] = scale_sum[mine] + P.Cast(F64, dz[v]) * P.Cast(F64, m[v])
                        if want_m:
                            for v in P.unroll(V):
                                dz[v] = dz[v] * mhc_scale[P.min(j // n, 2)]
                            for v in P.vectorized(V):
                                d_input_mixes[t, j + v] = dz[v]
            if want_sums:
                sums(base_sum, scale_sum, shared, part, b, V, units, rows, threads)

    return main


def split_mixes_reduce(P, mhc_mult, has):
    """The partial sums in a fixed order; the scales' are summed over the vectors of their segment at the end."""
    n = mhc_mult
    per = n // stream_vector(n)
    return sum_partials(P, n * (n + 2), per * (n + 2), 3, per, "d_mhc_scale" in has, "d_mhc_base" in has)


def derive(env: Env) -> Env:
    n = env["mhc_mult"]
    units = n * (n + 2) // stream_vector(n)
    return {"partials": partials_of(env["rows"], tile_of(units, TILE)), "width": n * (n + 2) + units}


def check(env: Env) -> None:
    check_few_streams("mhc_pre_split_mixes", "mhc_mult", "mhc_mult", env)


DOC = """Split the projections of a token into the mixes of its streams.

z_j = input_mixes_j * mhc_scale_seg(j) + mhc_base_j; pre = sigma(z[:n]) + mhc_pre_eps, post = mhc_post_mult_value *
sigma(z[n:2n]), comb = z[2n:] with rows of input streams; seg is 0, 1, 2 for the three parts.

Args:
    input_mixes: [..., n * (n + 2)] f32, in the order pre (n), post (n), comb (n * n).
    mhc_scale: [3] f32, one a part.
    mhc_base: [n * (n + 2)] f32.
    mhc_mult: n, the number of streams.
    mhc_post_mult_value: factor of the post mixes.
    mhc_pre_eps: added to the pre mixes.

Returns:
    pre_layer_mix [..., n, 1], post_layer_mix [..., n, 1] and comb_res_mix [..., n, n], all f32.

Raises:
    TypeError: a dtype is another one.
    ValueError: a shape does not fit, or mhc_mult is not from 1 to 16.

Numerics:
    fp32: one FMA, sigma(z) = 1 / (1 + exp(-z)) with a true division.

Gradient:
    sigma is recomputed; token sums of the parameters in fp64, in a fixed order that depends on the rows only, rounded once.

Source:
    mHC: Manifold-Constrained Hyper-Connections, 2025.
"""

_M = "mhc_mult * (mhc_mult + 2)"

mhc_pre_split_mixes = declare(
    "mhc_pre_split_mixes",
    "mhc",
    f"input_mixes[..., {_M}]:f32 mhc_scale[3]:f32 mhc_base[{_M}]:f32 "
    "-> pre_layer_mix[..., mhc_mult, 1]:f32 post_layer_mix[..., mhc_mult, 1]:f32 comb_res_mix[..., mhc_mult, mhc_mult]:f32",
    [
        Launch(
            split_mixes,
            "input_mixes mhc_scale mhc_base -> pre_layer_mix post_layer_mix comb_res_mix; mhc_post_mult_value mhc_pre_eps",
            key="mhc_mult",
        )
    ],
    attrs={"mhc_mult": 4, "mhc_post_mult_value": 1.0, "mhc_pre_eps": 1e-6},
    backward=("d_pre_layer_mix d_post_layer_mix d_comb_res_mix input_mixes mhc_scale mhc_base -> d_input_mixes d_mhc_scale d_mhc_base"),
    backward_launches=[
        Launch(
            split_mixes_bwd,
            "d_pre_layer_mix d_post_layer_mix d_comb_res_mix input_mixes mhc_scale mhc_base -> d_input_mixes part; mhc_post_mult_value",
            key="mhc_mult",
        ),
        Launch(split_mixes_reduce, "part -> d_mhc_scale d_mhc_base", key="mhc_mult"),
    ],
    backward_work="part[partials, 2, width]:f32",
    backward_derive=derive,
    check=check,
    doc=DOC,
)
