"""`weight_sf`: from the power-of-two scales of weights in square blocks, packed exponents for every row and for every column.

With E the exponent bytes of sf[b, i, j], zero where there is no block, and t = 0..3:
rows[b, J, r] = sum_t E[b, r // block_size, 4 J + t] << 8 t        columns[b, I, c] = sum_t E[b, 4 I + t, c // block_size] << 8 t

That is the column-major storage of the scales of the rows of a weight, and of its transpose. Weights are many and their scales are
few, so a launch takes several weights; `launches` cuts a list of any length into launches of a few sizes.
"""

import functools

from tk_core.bits import u32
from tk_core.errors import value_error
from tk_core.op import Env, Launch, Op, declare
from tk_core.ops.mhc.common import thread
from tk_core.ops.quant.bits import F32, U32, bits_of
from tk_core.ops.quant.layouts import PACK

I32 = "int32"
# Weights of a launch, at most. Blocks that share the lines of a weight, blocks that share a line, and their threads.
MOST, LINES, PARTS, THREADS = 8, 32, 8, 256
# Words that a thread stores at once, 16 bytes; they belong to one block of a weight and are equal.
WIDTH = 4


def launches(count: int) -> list[int]:
    """How many weights each launch takes: a list of any length needs four sizes, and so four kernels, at most."""
    rest = [1 << k for k in reversed(range(MOST.bit_length() - 1)) if count % MOST >> k & 1]
    return [MOST] * (count // MOST) + rest


def function(P, parameters, body):
    """A TileLang function whose parameters are known when it is built; `body` is a macro."""
    from tilelang.language.eager.builder import Builder

    builder = Builder()
    with builder.prim_func("main"):
        body(*(builder.arg(name, kind) for name, kind in parameters.items()))
    return builder.get()


def weight_sf_kernel(P, count, block_size):
    """Some blocks for every weight. They take the lines of its results in turn, those of the rows first."""
    lines, parts, threads = (1, 1, 1) if P.cpu else (LINES, PARTS, THREADS)
    # vectors of one block
    equal = block_size // WIDTH
    inputs, results, sizes = {}, {}, []
    for w in range(count):
        B, N, K = (P.dynamic(f"{name}{w}") for name in "BNK")
        sizes.append(((B, N, K), (B, K, N)))
        inputs[f"sf_{w}"] = P.Tensor((B, N, K), F32)
        results[f"rows_{w}"] = P.Tensor((B, P.ceildiv(K, PACK), N * block_size), I32)
        results[f"columns_{w}"] = P.Tensor((B, P.ceildiv(N, PACK), K * block_size), I32)

    def scale_of(sf, b, block, other, transposed):
        return sf[b, other, block] if transposed else sf[b, block, other]

    @P.macro
    def pack(sf, out, size, transposed, line, lane):
        """`size` is the number of weights, of blocks along a line, and of blocks across."""
        # sizes get no names here: these would replace those by which the entry of the C target knows them
        groups = P.ceildiv(size[2], PACK)
        exponents = P.alloc_var(U32)
        word = P.alloc_local((WIDTH,), I32)
        for turn in P.serial(P.ceildiv(size[0] * groups - line, lines)):
            b = P.alloc_var(I32, init=P.truncdiv(turn * lines + line, groups))
            group = P.alloc_var(I32, init=turn * lines + line - b * groups)
            for step in P.serial(P.ceildiv(size[1] * equal - lane, parts * threads)):
                vector = step * (parts * threads) + lane
                exponents = u32(0)
                for t in P.unroll(PACK):
                    if group * PACK + t < size[2]:
                        scale = P.alloc_var(F32, init=scale_of(sf, b, vector // equal, group * PACK + t, transposed))
                        exponents = exponents | (((bits_of(P, scale) >> u32(23)) & u32(0xFF)) << P.Cast(U32, 8 * t))
                for v in P.unroll(WIDTH):
                    word[v] = P.reinterpret(exponents, I32)
                for v in P.vectorized(WIDTH):
                    out[b, group, vector * WIDTH + v] = word[v]

    @P.macro
    def body(*tensors):
        with P.Kernel(lines * parts, count, threads=threads) as (block, weight):
            line, lane = block // parts, block % parts * threads + thread(P)
            for w, (rows, columns) in enumerate(sizes):
                if weight == w:
                    pack(tensors[w], tensors[count + 2 * w], rows, False, line, lane)
                    pack(tensors[w], tensors[count + 2 * w + 1], columns, True, line, lane)

    return function(P, inputs | results, body)


DOC = """Packed exponents for the rows and the columns of weights that were quantized in square blocks.

Args:
    sf: [B, N, K] f32, powers of two, the scales of B weights of [N * block_size, K * block_size]; of other numbers the exponent byte
        is taken.

Returns:
    rows [B, ceil(K / 4), N * block_size] i32 and columns [B, ceil(N / 4), K * block_size] i32, exponents of four blocks a word.

Attributes:
    block_size: 32 or 128; the weights are multiples of 128 in both directions.
"""


@functools.cache
def weight_sf_op(count: int) -> Op:
    """The operation on that many weights at once: all arguments, then rows and columns of one weight after the other."""
    name = "weight_sf" if count == 1 else f"weight_sf_{count}"
    every = range(count)

    def check(env: Env) -> None:
        size = env["block_size"]
        if size not in (32, 128):
            raise value_error(name, "block_size", "32 or 128", size)
        for w in every:
            shape = env[f"B{w}"], env[f"N{w}"], env[f"K{w}"]
            if min(shape) < 1 or shape[1] * size % 128 or shape[2] * size % 128:
                raise value_error(name, f"sf_{w}", "weights that are multiples of 128, at least one", f"scales {shape} of blocks of {size}")
        env["count"] = count

    arguments = " ".join(f"sf_{w}[B{w}, N{w}, K{w}]:f32" for w in every)
    results = " ".join(
        f"rows_{w}[B{w}, -(-K{w} // 4), N{w} * block_size]:i32 columns_{w}[B{w}, -(-N{w} // 4), K{w} * block_size]:i32" for w in every
    )
    names = f"{' '.join(f'sf_{w}' for w in every)} -> {' '.join(f'rows_{w} columns_{w}' for w in every)}"
    launch = Launch(
        weight_sf_kernel, names, key="count block_size", name="weight_sf", pass_configs={"tl.disable_safe_memory_legalize": True}
    )
    return declare(name, "quant", f"{arguments} -> {results}", [launch], attrs={"block_size": 128}, check=check, doc=DOC)


weight_sf = weight_sf_op(1)
