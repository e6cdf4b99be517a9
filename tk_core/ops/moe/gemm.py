"""`grouped_gemm`: the rows of every expert's segment times the matrix of that expert, and its gradients.

out[p] = x[p] w[e]      d_x[p] = d_out[p] w[e]^T      d_w[e] = sum over the rows p of its segment of x[p]^T d_out[p]

Segments begin at multiples of ROWS, as a mapping with such an alignment makes them: a block of ROWS rows has one expert, that of its first
row. The factors are bfloat16. Every element of a result is one fp32 sum, over columns or over the rows of a segment, in their order.
"""

from tk_core.errors import value_error
from tk_core.op import Env, Launch, declare
from tk_core.ops.mhc.norm_fn_gemm import large_shared, staged

BF16 = "bfloat16"
F32 = "float32"
I32 = "int32"

# Rows of a block, which all belong to one expert.
ROWS = 128
# Columns or rows of one step of a sum.
STEP = 64


def columns(P, length: int) -> int:
    """Columns of a block: as many as there is shared memory for, in whole blocks; those of a step on the C target."""
    return STEP if P.cpu else next(n for n in (256 if large_shared(P) else 128, 128, 64) if length % n == 0)


def steps_ahead(P) -> int:
    """Steps that are on their way while one is multiplied: 192 or 64 kB of shared memory."""
    return staged(P, 4 if large_shared(P) else 2)


def product(P, H, F, transposed):
    """out[p, f] = sum_h x[p, h] w[e, h, f], or w[e, f, h]; zeros where a block begins with padding."""
    N, E = P.dynamic("N"), P.dynamic("E")
    BN = columns(P, F)
    multiply = rows_on_c(P, H, transposed) if P.cpu else rows_by_tiles(P, H, F, BN, transposed)

    @P.prim_func
    def main(
        x: P.Tensor((N, H), BF16),
        w: P.Tensor((E, F, H) if transposed else (E, H, F), BF16),
        pos_to_expert: P.Tensor((N,), I32),
        out: P.Tensor((N, F), BF16),
    ):
        with P.Kernel(F // BN, P.ceildiv(N, ROWS), threads=1 if P.cpu else 256) as (n, b):
            w = P.reshape(w, (E * F, H) if transposed else (E * H, F))
            e = pos_to_expert[b * ROWS]
            multiply(x, w, out, e, P.if_then_else(e >= 0 and e < E, H // STEP, 0), n, b, N, F)

    return main


def rows_by_tiles(P, H, F, BN, transposed):
    """Macro: ROWS rows and BN columns of the products with the matrix of expert e, on tensor cores."""

    @P.macro
    def run(x, w, out, e, steps, n, b, N, F):
        xs = P.alloc_shared((ROWS, STEP), BF16)
        ws = P.alloc_shared((BN, STEP) if transposed else (STEP, BN), BF16)
        rounded = P.alloc_shared((ROWS, BN), BF16)
        acc = P.alloc_fragment((ROWS, BN), F32)
        P.clear(acc)
        for k in P.Pipelined(steps, num_stages=steps_ahead(P)):
            P.copy(x[b * ROWS, k * STEP], xs)
            if transposed:
                P.copy(w[e * F + n * BN, k * STEP], ws)
            else:
                P.copy(w[e * H + k * STEP, n * BN], ws)
            P.gemm(xs, ws, acc, transpose_B=transposed)
        P.copy(acc, rounded)
        P.copy(rounded, out[b * ROWS, n * BN])

    return run


def rows_on_c(P, H, transposed):
    """Macro: the same. Columns innermost and contiguous: independent sums, vectorized without reassociation."""

    @P.macro
    def run(x, w, out, e, steps, n, b, N, F):
        matrix = P.alloc_local((STEP, STEP), F32)
        acc = P.alloc_local((ROWS, STEP), F32)
        rows = P.min(ROWS, N - b * ROWS)
        for i, j in P.grid(ROWS, STEP):
            acc[i, j] = 0
        for k in P.serial(steps):
            for i, j in P.grid(STEP, STEP):
                if transposed:
                    matrix[i, j] = P.to_f32(w[e * F + n * STEP + j, k * STEP + i], BF16)
                else:
                    matrix[i, j] = P.to_f32(w[e * H + k * STEP + i, n * STEP + j], BF16)
            for i in P.serial(rows):
                for c in P.serial(STEP):
                    for j in P.serial(STEP):
                        acc[i, j] = acc[i, j] + P.to_f32(x[b * ROWS + i, k * STEP + c], BF16) * matrix[c, j]
        for i in P.serial(rows):
            for j in P.serial(STEP):
                out[b * ROWS + i, n * STEP + j] = P.from_f32(acc[i, j], BF16)

    return run


def product_fwd(P, H, F):
    """The products."""
    return product(P, H, F, False)


def product_rows(P, H, F):
    """The gradient of the rows."""
    return product(P, F, H, True)


def product_weights(P, H, F):
    """The gradient of the matrices: a block walks over the rows of a segment; zeros where there are none."""
    N, E = P.dynamic("N"), P.dynamic("E")
    BM, BN = min(columns(P, H), ROWS), columns(P, F)
    multiply = segment_on_c(P) if P.cpu else segment_by_tiles(P, BM, BN)

    @P.prim_func
    def main(
        x: P.Tensor((N, H), BF16),
        d_out: P.Tensor((N, F), BF16),
        expert_start: P.Tensor((E,), I32),
        expert_end: P.Tensor((E,), I32),
        d_w: P.Tensor((E, H, F), BF16),
    ):
        with P.Kernel(F // BN, H // BM, E, threads=1 if P.cpu else 256) as (n, m, e):
            d_w = P.reshape(d_w, (E * H, F))
            multiply(x, d_out, d_w, expert_start[e], expert_end[e], e * H + m * BM, n, m, N)

    return main


def segment_by_tiles(P, BM, BN):
    """Macro: BM rows and BN columns of a gradient, from row `row` on, on tensor cores."""

    @P.macro
    def run(x, d_out, d_w, start, end, row, n, m, N):
        xs = P.alloc_shared((STEP, BM), BF16)
        gs = P.alloc_shared((STEP, BN), BF16)
        rounded = P.alloc_shared((BM, BN), BF16)
        acc = P.alloc_fragment((BM, BN), F32)
        P.clear(acc)
        for k in P.Pipelined(P.ceildiv(end - start, STEP), num_stages=steps_ahead(P)):
            P.copy(x[start + k * STEP, m * BM], xs)
            P.copy(d_out[start + k * STEP, n * BN], gs)
            P.gemm(xs, gs, acc, transpose_A=True)
        P.copy(acc, rounded)
        P.copy(rounded, d_w[row, n * BN])

    return run


def segment_on_c(P):
    """Macro: the same."""

    @P.macro
    def run(x, d_out, d_w, start, end, row, n, m, N):
        acc = P.alloc_local((STEP, STEP), F32)
        g = P.alloc_local((STEP,), F32)
        for i, j in P.grid(STEP, STEP):
            acc[i, j] = 0
        for k in P.serial(P.min(end, N) - P.max(start, 0)):
            p = P.max(start, 0) + k
            for j in P.serial(STEP):
                g[j] = P.to_f32(d_out[p, n * STEP + j], BF16)
            for i in P.serial(STEP):
                for j in P.serial(STEP):
                    acc[i, j] = acc[i, j] + P.to_f32(x[p, m * STEP + i], BF16) * g[j]
        for i, j in P.grid(STEP, STEP):
            d_w[row + i, n * STEP + j] = P.from_f32(acc[i, j], BF16)

    return run


# ------------------------------------------------------------------ declaration


def takes(dtype: str, rows: int, alignment: int, H: int, F: int) -> bool:
    """Whether a layer's products can be these: bfloat16, segments of whole blocks, widths of whole steps."""
    return dtype == BF16 and rows > 0 and alignment % ROWS == 0 and H % STEP == 0 and F % STEP == 0


def check(env: Env) -> None:
    op = "grouped_gemm"
    for name in ("H", "F"):
        if env[name] % STEP or not env[name]:
            raise value_error(op, "w", f"{name} a positive multiple of {STEP}", env[name])
    if not env["E"]:
        raise value_error(op, "w", "at least one expert", 0)
    if not env["N"]:
        raise value_error(op, "x", "at least one row", 0)


DOC = """Multiply the rows of every expert's segment with the matrix of that expert.

out[p] = x[p] w[e] where row p lies in the segment of expert e

Args:
    x: [N, H] bf16, a buffer of `fused_mapping` with an alignment that is a multiple of 128; H a multiple of 64.
    w: [E, H, F] bf16, a matrix for every expert; F a multiple of 64.
    pos_to_expert: [N] i32, the expert of every row; every 128th is looked at.
    expert_start: [E] i32, where segments begin.
    expert_end: [E] i32, where they end.

Returns:
    [N, F] bf16. Padding of a segment is multiplied like its other rows; what lies behind the last segment is zero.

Raises:
    TypeError: a dtype is another one.
    ValueError: a shape does not fit.

Numerics:
    Products of bfloat16, one fp32 sum for every element, rounded once.

Gradient:
    d_x[p] = d_out[p] w[e]^T and d_w[e] = sum over the rows of its segment of x[p]^T d_out[p], each rounded once; padding that is not
    zero takes part.

Source:
    MegaBlocks: Efficient Sparse Training with Mixture-of-Experts, 2022.
"""

grouped_gemm = declare(
    "grouped_gemm",
    "moe",
    "x[N, H]:bf16 w[E, H, F]:bf16 pos_to_expert[N]:i32 expert_start[E]:i32 expert_end[E]:i32 -> out[N, F]:bf16",
    [Launch(product_fwd, "x w pos_to_expert -> out", key="H F")],
    backward="d_out x w pos_to_expert expert_start expert_end -> d_x d_w",
    backward_launches=[
        Launch(product_rows, "d_out w pos_to_expert -> d_x", key="H F"),
        Launch(product_weights, "x d_out expert_start expert_end -> d_w", key="H F"),
    ],
    check=check,
    only_for={"x": "d_w"},
    doc=DOC,
)
