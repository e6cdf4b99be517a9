"""The one kernel body of the quantization casts: load, largest magnitudes, scales, codes.

A block of threads reads its part of the matrix into registers, and writes scales and codes from there. `Geometry` says who has
which pieces of the matrix, pieces.py what is done with one of them.

Rows and columns behind the end repeat the last ones, so that loads need no condition: what is there already changes no maximum.
"""

from math import gcd

from tk_core.bits import select, u32
from tk_core.ops.mhc.common import thread
from tk_core.ops.quant.bits import F32, U32, constant, divide
from tk_core.ops.quant.formats import E2M1
from tk_core.ops.quant.layouts import KINDS, PACK, read_scale
from tk_core.ops.quant.pieces import BF16, I32, SOURCES, decoder, encoder, loop, storer, taker

FLT_MAX = 2.0**128 - 2.0**104


# ------------------------------------------------------------------ scales


def in_words(P, g, kind: str) -> bool:
    """Whether the four blocks of every word of exponents lie in one warp."""
    return kind == "packed" and not P.cpu and (g.blocks == 1 or g.side % (PACK * g.lanes) == 0)


def as_stored(P, g, sf, kind: str):
    """A view of scales as what is written at a time: bytes, but for fp32 and whole words of exponents."""
    if kind in ("plain", "round") or in_words(P, g, kind):
        return sf
    return P.view(sf, (sf.shape[0], sf.shape[1] * (4 if kind == "packed" else 1)), "uint8")


def largest(P, g):
    """Macro: the largest magnitude of every scaling block from those of its threads, over lanes, then over warps."""

    @P.macro
    def run(top):
        for s in loop(P, g.scales):
            for distance in g.shuffles:
                top[s] = P.max(top[s], P.shfl_xor(top[s], distance))
        if g.warps > 1:
            shared = P.alloc_shared((g.warps, g.groups, g.scales), F32)
            warp, group = thread(P) // 32, thread(P) % 32 % g.across // g.lanes
            for s in P.unroll(g.scales):
                shared[warp, group, s] = top[s]
            P.sync_threads()
            for s in P.unroll(g.scales):
                for w in P.unroll(g.warps):
                    top[s] = P.max(top[s], shared[w, group, s])

    return run


def scale_writer(P, g, kind: str, col: bool):
    """Macro: what `Scale.stored` gave for the scaling blocks of a thread, to memory in that layout; padding becomes zero.

    One thread of a scaling block writes. Packed exponents are written as words where the four blocks of a word lie in one warp,
    else as bytes. Scales of neighbouring rows in a column are one vector.
    """
    packed, S, G = kind == "packed", g.scales, g.blocks
    words = in_words(P, g, kind)
    span = PACK if words and G > 1 else 1
    dtype = {"plain": F32, "round": F32, "e4m3": "uint8"}.get(kind, I32 if words else "uint8")
    zero = P.f32(0) if dtype == F32 else P.Cast(dtype, P.int32(0))
    # bytes behind the last exponent, rows behind the last one
    behind = -G % PACK if packed and not words else 0
    unit = (16 if kind == "e4m3" else PACK) if col else 1
    vector = gcd(S, unit) if col and (words or not packed) else 1
    # the padding belongs to threads as rows do, if a block of threads has whole units of rows
    covered = unit > vector and not P.cpu and not g.tall and (words or not packed) and g.rows * g.down % unit == 0

    def at(i, c):
        if not col:
            return i, c
        return (c // PACK, i * PACK + c % PACK) if packed and not words else (c, i)

    def element(P, stored, j):
        if kind == "plain":
            return stored
        if kind == "round":
            return KINDS[kind].value(P, stored)
        if not words:
            return P.Cast("uint8", stored)
        return P.reinterpret(select(j < G, stored << P.Cast(U32, j % span * 8), u32(0)), I32)

    @P.macro
    def put(sf, i, j, value):
        sf[at(i, j // span)] = value
        if behind:
            if j == G - 1:
                for t in P.unroll(behind):
                    sf[at(i, G + t)] = zero

    @P.macro
    def run(sf, stored, i, j, leads, R):
        out = P.alloc_local((S,), dtype)
        for s in loop(P, S):
            out[s] = element(P, stored[s], j)
            if span > 1:
                out[s] = out[s] | P.shfl_xor(out[s], g.lanes)
                out[s] = out[s] | P.shfl_xor(out[s], 2 * g.lanes)
        end = P.ceildiv(R, unit) * unit if covered else R
        if leads and i < end and j < G and j % span == 0:
            if vector > 1 or covered:
                for s in P.unroll(S):
                    out[s] = select(i + s < R, out[s], zero)
                for c in P.unroll(S // vector):
                    for s in P.vectorized(vector):
                        sf[j // span, i + c * vector + s] = out[c * vector + s]
            else:
                for s in loop(P, S):
                    if i + s < R:
                        put(sf, i + s, j, out[s])
            if unit > vector and not covered:
                # the vector of the last row has written some of the rows behind it
                if i + S >= R:
                    written = i + S if vector > 1 else R
                    for r in P.serial(P.ceildiv(R, unit) * unit - written):
                        put(sf, written + r, j, zero)

    return run


# ------------------------------------------------------------------ the body


def caster(P, g, x_dtype, fmt, kind, col=False, x_scale=None, given="", stochastic=False, back=False, want_data=True, want_sf=True):
    """Macro: the cast of a matrix, of the part of block b.

    x_scale: of quantized input (dtype, block_m, block_k, column-major). given: the dtype of known scales. back: what is written is not
    codes but their values, in the dtype of x.
    """
    source, scale = SOURCES[x_dtype], KINDS[kind]
    V, Q, K, S, tall = g.vector, g.pieces, g.rows, g.scales, g.tall
    wide, narrow = V // source.group, V // fmt.group * fmt.words
    load = gcd(4, wide)
    KX = 1 if x_scale and x_scale[1] % K == 0 else K
    # products with powers of two are exact in bf16
    in_pairs = not P.cpu and fmt is E2M1 and x_dtype == BF16 and kind in ("round", "packed") and not (stochastic or back or given)
    last = g.H // V - 1
    maximum, write_scales = largest(P, g), scale_writer(P, g, kind, col)
    take, encode, decode = taker(P, g, source), encoder(P, g, fmt, stochastic), decoder(P, g, fmt, x_dtype)
    store = storer(P, g, wide if back else narrow)

    @P.macro
    def largest_of_piece(words, top, s, factor):
        if P.cpu:
            rank = P.alloc_local((1,), I32)
            rank[0] = 0
            for w in P.serial(wide):
                rank[0] = P.max(rank[0], P.reinterpret(source.rank(P, words[w]), I32))
            magnitude = source.ranked(P, P.reinterpret(rank[0], U32))
        else:
            magnitude = source.amax(P, [words[w] for w in range(wide)])
        top[s] = P.max(top[s], P.mul(magnitude, factor) if x_scale is not None else magnitude)

    @P.macro
    def run(b, M, x, x_sf, given_sf, seed, data, sf, amax_clamp):
        row, j, lane = g.place(P, b)
        if g.resident:
            P.annotate_min_blocks_per_sm(g.resident)
        raw = P.alloc_local((K, Q, wide), I32)
        x_scales = P.alloc_local((KX, Q), F32)
        top = P.alloc_local((S,), F32)
        stored = P.alloc_local((S,), F32 if kind == "plain" else U32)
        inverse = P.alloc_local((S,), F32)
        words = P.alloc_local((wide,), U32)
        values = P.alloc_local((V,), F32)
        codes = P.alloc_local((narrow,), U32)
        restored = P.alloc_local((wide,), U32)
        piece = j * (g.block_k // V) + lane

        for k in loop(P, K):
            for q in loop(P, Q):
                p = piece + q * g.lanes if g.whole else P.min(piece + q * g.lanes, last)
                for c in loop(P, wide // load):
                    for w in P.vectorized(load):
                        raw[k, q, c * load + w] = x[P.min(row + k, M - 1), p * wide + c * load + w]
        if x_scale is not None:
            for k in loop(P, KX):
                for q in loop(P, Q):
                    i = P.min(row + k, M - 1) // x_scale[1]
                    column = P.min(piece + q * g.lanes, last) * V
                    x_scales[k, q] = read_scale(P, x_sf, x_scale[0], x_scale[3], i, column // x_scale[2])

        if given:
            for s in loop(P, S):
                i = P.min(row // g.block_m if tall else row + s, P.ceildiv(M, g.block_m) - 1)
                known = read_scale(P, given_sf, given, False, i, P.min(j, g.blocks - 1))
                inverse[s] = divide(P, constant(P, 1.0), known)
        else:
            for s in loop(P, S):
                top[s] = amax_clamp
            for k in loop(P, K):
                for q in loop(P, Q):
                    for w in loop(P, wide):
                        words[w] = P.reinterpret(raw[k, q, w], U32)
                    largest_of_piece(words, top, 0 if tall else k, x_scales[k % KX, q])
            maximum(top)
            for s in loop(P, S):
                stored[s] = scale.stored(P, top[s], fmt)
                inverse[s] = scale.inverse(P, top[s], stored[s], fmt)

        if want_data:
            for k in loop(P, K):
                for q in loop(P, Q):
                    s = 0 if tall else k
                    p = piece + q * g.lanes
                    for w in loop(P, wide):
                        words[w] = P.reinterpret(raw[k, q, w], U32)
                    if in_pairs:
                        for u in P.unroll(V // fmt.group):
                            for word in E2M1.pack_bf16(P, [words[u * 4 + w] for w in range(4)], scale.inverse_bf16x2(P, stored[s])):
                                codes[u] = word
                    else:
                        # finite, for it may be that of zeros with a large scale
                        factor = P.min(P.mul(x_scales[k % KX, q], inverse[s]), P.f32(FLT_MAX)) if x_scale is not None else inverse[s]
                        take(words, values, factor)
                        encode(values, codes, P.Cast(U32, row + k) * u32(g.H) + P.Cast(U32, p * V), seed)
                    if back:
                        decode(codes, restored, scale.value(P, stored[s]))
                    store(data, restored if back else codes, row + k, p, row + k < M and p <= last)

        # last: in front of the codes, the few branches of the padding cost registers
        if want_sf and not given:
            leads = lane == 0 if not tall or P.cpu else (lane == 0) & (thread(P) < g.across)
            write_scales(sf, stored, row // g.block_m if tall else row, j, leads, P.ceildiv(M, g.block_m))

    return run
