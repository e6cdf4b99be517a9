"""Rows of indices: `mask_indices_by_tp` renumbers those of one tensor-parallel rank, `unique_group_indices` keeps each once a row."""

from math import gcd

from tk_core.errors import value_error
from tk_core.op import Env, Launch, Op, declare
from tk_core.ops.mhc.common import thread
from tk_core.ops.moe.common import BYTES, EXPLICIT, I32, check_flat, index_of
from tk_core.ops.quant.elementwise import vector_access

THREADS = 256
MAX_GROUPS = 128
U64 = "uint64"


def mask_by_tp(P, K, indices_dtype, n, per_rank, num_tp_ranks, has):
    """A thread takes 16 bytes. An index below n has 32 bits, so divisions are those of constants."""
    T = P.dynamic("T")
    V = 16 // BYTES[indices_dtype]
    threads = 1 if P.cpu else THREADS
    load, store = vector_access(P, V)
    in_memory = "tp_rank" in has

    @P.prim_func
    def main(
        indices: P.Tensor((T, K), indices_dtype),
        tp_rank: P.Tensor((1,), I32),
        out: P.Tensor((T, K), indices_dtype),
        tp_rank_value: P.int32,
    ):
        with P.Kernel(P.ceildiv(T * K, V * threads), threads=threads) as b:
            indices = P.view(indices, (T * K,), indices_dtype)
            out = P.view(out, (T * K,), indices_dtype)
            given, masked = P.alloc_local((1, V), indices_dtype), P.alloc_local((V,), indices_dtype)
            mine, i = P.alloc_local((1,), I32), P.alloc_local((1,), I32)
            mine[0] = tp_rank[0] if in_memory else tp_rank_value
            load(given, 0, indices, (b * threads + thread(P)) * V, T * K)
            for v in P.unroll(V):
                i[0] = index_of(P, given[0, v], n)
                if i[0] >= 0:
                    rank = i[0] // per_rank
                    if rank % num_tp_ranks == mine[0]:
                        i[0] = rank // num_tp_ranks * per_rank + i[0] % per_rank
                    else:
                        i[0] = -1
                masked[v] = P.Cast(indices_dtype, i[0])
            store(out, (b * threads + thread(P)) * V, masked, T * K)

    return main


def unique(P, K, group_indices_dtype, num_groups):
    """A thread takes a row and keeps what it has seen in 128 bits. It reads the row before it writes it, so both may be the same array."""
    T = P.dynamic("T")
    V = gcd(K, 16 // BYTES[group_indices_dtype])
    threads = 1 if P.cpu else THREADS

    @P.prim_func
    def main(group_indices: P.Tensor((T, K), group_indices_dtype), out: P.Tensor((T, K), group_indices_dtype)):
        with P.Kernel(P.ceildiv(T, threads), threads=threads) as b:
            value = P.alloc_local((K,), group_indices_dtype)
            seen = P.alloc_local((2,), U64)
            bit = P.alloc_local((1,), U64)
            group = P.alloc_local((1,), I32)
            t = b * threads + thread(P)
            if t < T:
                for c in P.unroll(K // V):
                    for v in P.vectorized(V):
                        value[c * V + v] = group_indices[t, c * V + v]
                seen[0] = P.uint64(0)
                seen[1] = P.uint64(0)
                for k in P.unroll(K):
                    group[0] = index_of(P, value[k], num_groups)
                    if group[0] >= 0:
                        bit[0] = P.uint64(1) << P.Cast(U64, group[0] % 64)
                        if group[0] < 64:
                            if (seen[0] & bit[0]) != P.uint64(0):
                                value[k] = P.Cast(group_indices_dtype, P.int32(-1))
                            seen[0] = seen[0] | bit[0]
                        else:
                            if (seen[1] & bit[0]) != P.uint64(0):
                                value[k] = P.Cast(group_indices_dtype, P.int32(-1))
                            seen[1] = seen[1] | bit[0]
                for c in P.unroll(K // V):
                    for v in P.vectorized(V):
                        out[t, c * V + v] = value[c * V + v]

    return main


def check_mask(env: Env) -> None:
    def expect(argument: str, what: str, good: bool, got) -> None:
        if not good:
            raise value_error("mask_indices_by_tp", argument, what, got)

    expect("num_ep_ranks", "at least 1", env["num_ep_ranks"] >= 1, env["num_ep_ranks"])
    expect("n", "at least one expert for every rank", env["num_ep_ranks"] <= env["n"] < 2**31, env["n"])
    expect("num_tp_ranks", "at least 1", env["num_tp_ranks"] >= 1, env["num_tp_ranks"])
    rank = env["tp_rank_value"]
    expect("tp_rank", f"0 to {env['num_tp_ranks'] - 1}", 0 <= rank < env["num_tp_ranks"], rank)
    check_flat("mask_indices_by_tp", "indices", env, "rows")
    env["per_rank"] = env["n"] // env["num_ep_ranks"]


MASK_DOC = """Keep the experts of one tensor-parallel rank, renumbered over the ranks of that kind.

With R = n // num_ep_ranks experts a rank and rank = i // R, in which the tensor-parallel rank runs fastest:
out = (rank // num_tp_ranks) * R + i % R where rank % num_tp_ranks == tp_rank, else -1

Args:
    indices: [..., K] i32 or i64, experts over all ranks; what is negative or at least n becomes -1.
    tp_rank: [1] i32, the rank in memory; where absent, `tp_rank_value` is the rank.

Attributes:
    n: experts over all ranks.
    num_ep_ranks: ranks that share them.
    num_tp_ranks: tensor-parallel ranks.
    tp_rank_value: the rank, where it is not in memory.

Returns:
    [..., K] in the dtype of indices.

Raises:
    TypeError: a dtype is another one.
    ValueError: n < num_ep_ranks, num_tp_ranks < 1, or a rank that does not exist.

Numerics:
    Exact.

Gradient:
    None.
"""

mask_indices_by_tp = declare(
    "mask_indices_by_tp",
    "moe",
    "indices[..., K]:i32|i64 tp_rank?[1]:i32 -> out[..., K]:indices_dtype",
    [
        Launch(
            mask_by_tp,
            "indices tp_rank -> out; tp_rank_value",
            key="K indices_dtype n per_rank num_tp_ranks",
            pass_configs=EXPLICIT,
        )
    ],
    attrs={"n": 1, "num_ep_ranks": 1, "num_tp_ranks": 1, "tp_rank_value": 0},
    dynamic="tp_rank_value",
    check=check_mask,
    doc=MASK_DOC,
)

UNIQUE_DOC = """Keep every group once a row: its leftmost entry stays, later ones become -1.

Args:
    group_indices: [..., K] i32 or i64; what is negative or at least num_groups stays as it is.

Attributes:
    num_groups: number of groups, 1 to 128.

Returns:
    [..., K] in the dtype of group_indices.

Raises:
    TypeError: group_indices is neither i32 nor i64.
    ValueError: num_groups is out of its range.

Numerics:
    Exact. The kernel may write its argument.

Gradient:
    None.
"""


def declare_unique(name: str) -> Op:
    """The operation by that name."""

    def check(env: Env) -> None:
        if not 1 <= env["num_groups"] <= MAX_GROUPS:
            raise value_error(name, "num_groups", f"1 to {MAX_GROUPS}", env["num_groups"])

    return declare(
        name,
        "moe",
        "group_indices[..., K]:i32|i64 -> out[..., K]:group_indices_dtype",
        [Launch(unique, "group_indices -> out", key="K group_indices_dtype num_groups", pass_configs=EXPLICIT)],
        attrs={"num_groups": 1},
        check=check,
        doc=UNIQUE_DOC,
    )


unique_group_indices = declare_unique("unique_group_indices")
# the result is the argument
inplace_unique_group_indices = declare_unique("inplace_unique_group_indices")
