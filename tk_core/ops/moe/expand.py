"""`expand_to_fused`, `expand_to_fused_with_sf`: rows of tokens to the rows of their experts. `expand_topk_weights`: their weights.

out[p] = x[t] where p = token_topk_to_pos[t, k], zeros on padding        d_x[t] = sum_k d_out[token_topk_to_pos[t, k]]

A block reads the row of one token once and writes it wherever it goes; positions are unique. It also fills the rows of padding among
those whose number is its own, plus multiples of the number of blocks: they are as many for every block.
"""

from tk_core.errors import value_error
from tk_core.op import Env, Launch, declare
from tk_core.ops.mhc.common import thread
from tk_core.ops.moe.common import (
    BYTES,
    CLEARED,
    EXPLICIT,
    F32,
    I32,
    Threads,
    blocks_of,
    check_flat,
    clear_rows,
    load_rows_of_token,
    read_owners,
    zero,
)
from tk_core.ops.moe.reduce import sum_rows
from tk_core.ops.quant.layouts import PACK, aligned_rows
from tk_core.ops.quant.pieces import loop


class Words(Threads):
    """Rows of any dtype as rows of the widest integers that fill them."""

    def __init__(self, P, H: int, dtype: str):
        size = H * BYTES[dtype]
        width = next(w for w in (4, 2, 1) if size % w == 0)
        self.count, self.dtype = size // width, f"int{8 * width}"
        super().__init__(P, self.count, 16 // width)


def spread(P, by: Words):
    """Macro: row t of x to the rows pos[:] of out."""

    @P.macro
    def run(x, out, t, pos):
        held = P.alloc_local((by.each, by.vector), by.dtype)
        for step in P.serial(by.steps):
            for i in loop(P, by.each):
                if by.unit(P, step, i) < by.units:
                    for v in P.vectorized(by.vector):
                        held[i, v] = x[t, by.unit(P, step, i) * by.vector + v]
            for k in loop(P, int(pos.shape[0])):
                if pos[k] >= 0:
                    for i in loop(P, by.each):
                        if by.unit(P, step, i) < by.units:
                            for v in P.vectorized(by.vector):
                                out[pos[k], by.unit(P, step, i) * by.vector + v] = held[i, v]

    return run


def expand(P, K, H, x_dtype):
    """Rows as they are."""
    T, N = P.dynamic("T"), P.dynamic("N")
    by = Words(P, H, x_dtype)
    read, locate, move, clear = read_owners(P), load_rows_of_token(P, K), spread(P, by), clear_rows(P, by)

    @P.prim_func
    def main(
        x: P.Tensor((T, H), x_dtype),
        token_topk_to_pos: P.Tensor((T, K), I32),
        pos_to_expert: P.Tensor((N,), I32),
        out: P.Tensor((N, H), x_dtype),
    ):
        with P.Kernel(blocks_of(P, T, N), threads=by.threads) as b:
            x = P.view(x, (T, by.count), by.dtype)
            out = P.view(out, (N, by.count), by.dtype)
            pos, owner = P.alloc_local((K,), I32), P.alloc_local((CLEARED,), I32)
            read(owner, pos_to_expert, b, blocks_of(P, T, N), N)
            if b < T:
                locate(pos, token_topk_to_pos, b, N)
                move(x, out, b, pos)
            clear(out, owner, b, blocks_of(P, T, N))

    return main


def expand_with_sf(P, K, C, S, x_dtype, sf_dtype, col):
    """Rows of quantized data, and their scales: row by row, or transposed with zeros behind the last row."""
    T, N = P.dynamic("T"), P.dynamic("N")
    D0, D1 = (S, P.dynamic("D")) if col else (N, S)
    by = Words(P, C, x_dtype)
    scale = f"int{8 * BYTES[sf_dtype]}"
    mine = -(-S // by.threads)
    read, locate, move, clear = read_owners(P), load_rows_of_token(P, K), spread(P, by), clear_rows(P, by)

    @P.macro
    def put(out_sf, p, j, value):
        if col:
            out_sf[j, p] = value
        else:
            out_sf[p, j] = value

    @P.prim_func
    def main(
        x: P.Tensor((T, C), x_dtype),
        sf: P.Tensor((T, S), sf_dtype),
        token_topk_to_pos: P.Tensor((T, K), I32),
        pos_to_expert: P.Tensor((N,), I32),
        out: P.Tensor((N, C), x_dtype),
        out_sf: P.Tensor((D0, D1), sf_dtype),
    ):
        with P.Kernel(blocks_of(P, T, N), threads=by.threads) as b:
            x = P.view(x, (T, by.count), by.dtype)
            out = P.view(out, (N, by.count), by.dtype)
            sf = P.view(sf, (T, S), scale)
            out_sf = P.view(out_sf, (D0, D1), scale)
            pos, owner = P.alloc_local((K,), I32), P.alloc_local((CLEARED,), I32)
            scales = P.alloc_local((mine,), scale)
            read(owner, pos_to_expert, b, blocks_of(P, T, N), N)
            if b < T:
                locate(pos, token_topk_to_pos, b, N)
                for s in loop(P, mine):
                    if s * by.threads + thread(P) < S:
                        scales[s] = sf[b, s * by.threads + thread(P)]
                move(x, out, b, pos)
                for k in loop(P, K):
                    if pos[k] >= 0:
                        for s in loop(P, mine):
                            if s * by.threads + thread(P) < S:
                                put(out_sf, pos[k], s * by.threads + thread(P), scales[s])
            clear(out, owner, b, blocks_of(P, T, N))
            for z in loop(P, CLEARED):
                if owner[z] < 0:
                    for s in loop(P, mine):
                        if s * by.threads + thread(P) < S:
                            put(out_sf, b + z * blocks_of(P, T, N), s * by.threads + thread(P), zero(P, scale))
            if col:
                if b == 0:
                    for s in loop(P, mine):
                        for r in P.serial(D1 - N):
                            if s * by.threads + thread(P) < S:
                                out_sf[s * by.threads + thread(P), N + r] = zero(P, scale)

    return main


def expand_weights(P, K):
    """A thread takes a row."""
    T, N = P.dynamic("T"), P.dynamic("N")
    threads = 1 if P.cpu else 256

    @P.prim_func
    def main(topk_weights: P.Tensor((T, K), F32), pos_to_token_topk: P.Tensor((N,), I32), w_row: P.Tensor((N,), F32)):
        with P.Kernel(P.ceildiv(N, threads), threads=threads) as b:
            topk_weights = P.view(topk_weights, (T * K,), F32)
            p = b * threads + thread(P)
            if p < N:
                w_row[p] = P.f32(0)
                if pos_to_token_topk[p] >= 0 and pos_to_token_topk[p] < T * K:
                    w_row[p] = topk_weights[pos_to_token_topk[p]]

    return main


def expand_weights_bwd(P, K):
    """A thread takes an assignment."""
    T, N = P.dynamic("T"), P.dynamic("N")
    threads = 1 if P.cpu else 256

    @P.prim_func
    def main(d_w_row: P.Tensor((N,), F32), token_topk_to_pos: P.Tensor((T, K), I32), d_topk_weights: P.Tensor((T, K), F32)):
        with P.Kernel(P.ceildiv(T * K, threads), threads=threads) as b:
            token_topk_to_pos = P.view(token_topk_to_pos, (T * K,), I32)
            d_topk_weights = P.view(d_topk_weights, (T * K,), F32)
            i = b * threads + thread(P)
            if i < T * K:
                d_topk_weights[i] = P.f32(0)
                if token_topk_to_pos[i] >= 0 and token_topk_to_pos[i] < N:
                    d_topk_weights[i] = d_w_row[token_topk_to_pos[i]]

    return main


def check(env: Env) -> None:
    check_flat("expand_to_fused", "token_topk_to_pos", env)


def check_with_sf(env: Env) -> None:
    def expect(argument: str, what: str, good: bool, got) -> None:
        if not good:
            raise value_error("expand_to_fused_with_sf", argument, what, got)

    block, packed = env["num_per_channels"], env["sf_dtype"] == "int32"
    expect("num_per_channels", "32 or 128", block in (32, 128), block)
    H = env["C"] * (2 if env["x_dtype"] == "int8" else 1)
    expect("x", "at least one column", H > 0, H)
    want = -(-H // (block * PACK)) if packed else -(-H // block)
    expect("sf", f"{want} columns of scales for {H} channels", env["S"] == want, env["S"])
    check_flat("expand_to_fused_with_sf", "token_topk_to_pos", env)
    rows = aligned_rows("e4m3" if env["sf_dtype"] == "float8_e4m3fn" else "plain", env["N"])
    env["D0"], env["D1"] = (env["S"], rows) if env["col"] else (env["N"], env["S"])


def check_weights(env: Env) -> None:
    check_flat("expand_topk_weights", "topk_weights", env)


DOC = """Copy the rows of tokens to the rows of their experts.

out[p] = x[t] where p = token_topk_to_pos[t, k], zeros where pos_to_expert[p] < 0

Args:
    x: [T, H], of any dtype of one, two or four bytes.
    token_topk_to_pos: [T, K] i32, where they go; what names none of the N rows goes nowhere.
    pos_to_expert: [N] i32, negative on padding. A row that is no padding must be one of token_topk_to_pos, or it stays as it was.

Returns:
    [N, H] in the dtype of x.

Raises:
    TypeError: a dtype is another one.
    ValueError: a shape does not fit.

Numerics:
    Exact copies.

Gradient:
    d_x[t] = sum of d_out over the rows of t in ascending order of k, in fp32, rounded once. Padding is not read.

Source:
    Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer, 2017.
"""

expand_to_fused = declare(
    "expand_to_fused",
    "moe",
    "x[T, H]:bf16|f32|f16|e4m3|i8|u8|i32 token_topk_to_pos[T, K]:i32 pos_to_expert[N]:i32 -> out[N, H]:x_dtype",
    [Launch(expand, "x token_topk_to_pos pos_to_expert -> out", key="K H x_dtype", pass_configs=EXPLICIT)],
    backward="d_out token_topk_to_pos -> d_x",
    backward_launches=[Launch(sum_rows, "d_out token_topk_to_pos -> d_x", key="K H x_dtype", pass_configs=EXPLICIT)],
    check=check,
    doc=DOC,
)

SF_DOC = """Copy the rows of quantized tokens and their scales to the rows of their experts.

Args:
    x: [T, C] e4m3, or i8 with two E2M1 a byte; H = C or 2 C channels.
    sf: [T, S] scales row by row: f32 or e4m3 for each of ceil(H / num_per_channels) blocks, or i32 with four UE8M0 exponents a word.
    token_topk_to_pos: [T, K] i32, where they go; what names none of the N rows goes nowhere.
    pos_to_expert: [N] i32, negative on padding. A row that is no padding must be one of token_topk_to_pos, or it stays as it was.

Attributes:
    num_per_channels: channels of a scale, 32 or 128.
    col: scales of the result column-major: [S, rows], rows up to a multiple of 16 bytes with zeros behind the last one.

Returns:
    out [N, C] and out_sf [N, S] or [S, rows] in the dtypes of x and sf, zeros on padding.

Raises:
    TypeError: a dtype is another one.
    ValueError: a shape does not fit.

Numerics:
    Exact copies.

Gradient:
    None; train through a cast with the gradient of `expand_to_fused`.
"""

expand_to_fused_with_sf = declare(
    "expand_to_fused_with_sf",
    "moe",
    "x[T, C]:e4m3|i8 sf[T, S]:f32|i32|e4m3 token_topk_to_pos[T, K]:i32 pos_to_expert[N]:i32 -> out[N, C]:x_dtype out_sf[D0, D1]:sf_dtype",
    [
        Launch(
            expand_with_sf,
            "x sf token_topk_to_pos pos_to_expert -> out out_sf",
            key="K C S x_dtype sf_dtype col",
            pass_configs=EXPLICIT,
        )
    ],
    attrs={"num_per_channels": 128, "col": False},
    check=check_with_sf,
    doc=SF_DOC,
)

WEIGHTS_DOC = """The weight of every row of the buffer.

w_row[p] = topk_weights[t, k] where pos_to_token_topk[p] = t * K + k, zero on padding

Args:
    topk_weights: [T, K] f32.
    token_topk_to_pos: [T, K] i32, the row of an assignment; the gradient reads it.
    pos_to_token_topk: [N] i32, the assignment of a row, negative on padding.

Returns:
    [N] f32.

Raises:
    TypeError: a dtype is another one.
    ValueError: a shape does not fit.

Numerics:
    Exact copies.

Gradient:
    d_topk_weights[t, k] = d_w_row[token_topk_to_pos[t, k]], zero where it has no row.

Source:
    Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer, 2017.
"""

expand_topk_weights = declare(
    "expand_topk_weights",
    "moe",
    "topk_weights[T, K]:f32 token_topk_to_pos[T, K]:i32 pos_to_token_topk[N]:i32 -> w_row[N]:f32",
    [Launch(expand_weights, "topk_weights pos_to_token_topk -> w_row", key="K", pass_configs=EXPLICIT)],
    backward="d_w_row token_topk_to_pos -> d_topk_weights",
    backward_launches=[Launch(expand_weights_bwd, "d_w_row token_topk_to_pos -> d_topk_weights", key="K", pass_configs=EXPLICIT)],
    check=check_weights,
    doc=WEIGHTS_DOC,
)
