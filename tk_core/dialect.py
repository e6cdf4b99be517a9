"""The portable TileLang dialect: one kernel source for the C target and for CUDA.

A kernel builder takes a `Dialect` P where TileLang code has `tilelang.language`; what is not overridden here is TileLang
itself. On the C target a block is one thread: fragments and shared tiles are local arrays, parallel loops are serial
ones that the C++ compiler vectorizes, and bfloat16 is stored as 16 bits and converted by exact bit arithmetic.
"""

from __future__ import annotations

import math
from typing import Any

import tilelang.language as T
from tilelang import tvm

from tk_core.bits import f32_bits, select, u32
from tk_core.dtypes import DTYPES

# Independent accumulators of a reduction on C: the compiler vectorizes the lane loop, and the order is fixed.
_LANES = 16


class Dialect:
    """TileLang for one target: "c" or an sm_xx architecture (`sm` is its number, 0 on C and HIP)."""

    def __init__(self, target: str):
        self.target = target
        self.cpu = target == "c"
        self.sm = int("".join(ch for ch in target if ch.isdigit())) if target.startswith("sm_") else 0

    def __getattr__(self, name: str) -> Any:
        return getattr(T, name)

    # ---- types and constants

    def Tensor(self, shape: Any, dtype: str) -> Any:
        """A contiguous tensor parameter of that logical dtype."""
        return T.Tensor(shape, self.storage(dtype))

    def RowTensor(self, shape: Any, row: str, dtype: str) -> Any:
        """A tensor parameter of two axes whose rows lie `row` elements apart, a name for the distance in the kernel."""
        return T.StridedTensor(shape, (T.dynamic(row, "int64"), 1), self.storage(dtype))

    def storage(self, dtype: str) -> str:
        """The dtype of a buffer that holds that logical dtype."""
        return DTYPES[dtype].c_storage if self.cpu else dtype

    def f32(self, value: float) -> Any:
        """An exact fp32 constant: the C code generator prints 7 significant digits, which is not enough."""
        value = float(value)
        if not self.cpu or math.isinf(value) or value == float(f"{value:.6e}"):
            return tvm.tirx.const(value, "float32")
        return T.reinterpret(u32(f32_bits(value)), "float32")

    # ---- loops and memory

    def Parallel(self, *extents: int, **options: Any) -> Any:
        """Elements in any order."""
        if not self.cpu:
            return T.Parallel(*extents, **options)
        return T.grid(*extents) if len(extents) > 1 else T.serial(extents[0])

    def vectorized(self, n: int) -> Any:
        """One thread moves n contiguous elements; a plain loop on C, whose vector types are slow structs."""
        return T.serial(n) if self.cpu else T.vectorized(n)

    def Pipelined(self, n: Any, **options: Any) -> Any:
        """A loop whose loads run ahead of its arithmetic on CUDA."""
        return T.serial(n) if self.cpu else T.Pipelined(n, **options)

    def alloc_fragment(self, shape: Any, dtype: str) -> Any:
        """Registers spread over the block."""
        return T.alloc_local(shape, self.storage(dtype)) if self.cpu else T.alloc_fragment(shape, dtype)

    def alloc_shared(self, shape: Any, dtype: str) -> Any:
        """Memory shared by the block."""
        return T.alloc_local(shape, self.storage(dtype)) if self.cpu else T.alloc_shared(shape, dtype)

    def sync_threads(self) -> Any:
        """A barrier of the block."""
        return None if self.cpu else T.sync_threads()

    # ---- clusters: blocks that read each other's shared memory

    @property
    def cluster(self) -> int:
        """The most blocks of one cluster: 16 on data-centre GPUs, 8 on others, 1 where there are no clusters."""
        return 1 if self.sm < 90 else 16 if self.sm < 120 else 8

    def ClusterKernel(self, *blocks: Any, **options: Any) -> Any:
        """A kernel whose first axis of blocks is one cluster."""
        prelude = options.pop("prelude", "")
        if self.cluster == 1:
            return T.Kernel(*blocks, prelude=prelude or None, **options)
        return T.ClusterKernel(*blocks, cluster_dims=(self.cluster, 1, 1), prelude=prelude + _CLUSTER, **options)

    def sync_cluster(self) -> Any:
        """A barrier of the cluster: what its blocks wrote before, to shared or to global memory, all of them see."""
        return self.sync_threads() if self.cluster == 1 else T.cluster_sync()

    def leave_cluster(self) -> Any:
        """A barrier behind the last read of another block's shared memory: none of them ends before. It orders no memory."""
        if self.cluster == 1:
            return None
        return T.evaluate(T.call_extern("int32", "tk_leave"))

    def remote(self, element: Any, rank: Any) -> Any:
        """An int32 of the shared memory of the block with that rank in the cluster, at the place of `element` in this one."""
        if self.cluster == 1:
            return element
        return T.call_extern("int32", "tk_remote", T.address_of(element), rank)

    # ---- what blocks of a cluster send each other: the only wait is the receiver's, and no block has to stay for a reader

    def expect_mail(self, mail: Any, size: Any) -> Any:
        """This block is going to receive that many bytes, counted in `mail`, an int64 of its shared memory. All threads call it, once."""
        return None if self.cluster == 1 else T.evaluate(T.call_extern("int32", "tk_expect", T.address_of(mail[0]), size))

    def open_mail(self) -> Any:
        """A barrier of the block, and all blocks of the cluster expect their mail."""
        return self.sync_threads() if self.cluster == 1 else T.evaluate(T.call_extern("int32", "tk_open"))

    def send(self, element: Any, rank: Any, value: Any, mail: Any) -> Any:
        """`value`, an int32, to the place of `element` in the shared memory of the block with that rank."""
        if self.cluster == 1:
            return T.buffer_store(element.buffer, value, element.indices)
        return T.evaluate(T.call_extern("int32", "tk_send", T.address_of(element), rank, value, T.address_of(mail[0])))

    def await_mail(self, mail: Any) -> Any:
        """All bytes that this block expects have come. All threads call it."""
        return self.sync_threads() if self.cluster == 1 else T.evaluate(T.call_extern("int32", "tk_await", T.address_of(mail[0])))

    # ---- conversions: `dtype` is always the logical one

    def to_f32(self, x: Any, dtype: str) -> Any:
        """Exact."""
        if dtype == "float32":
            return x
        if self.cpu and dtype == "bfloat16":
            return T.reinterpret(T.Cast("uint32", x) << u32(16), "float32")
        return T.Cast("float32", x)

    def from_f32(self, x: Any, dtype: str) -> Any:
        """Round to nearest, ties to even, once."""
        if dtype == "float32":
            return x
        if self.cpu and dtype == "bfloat16":
            return _bf16_bits(x)
        return T.Cast(dtype, x)

    # ---- fp32 arithmetic with a fixed rounding on every target

    def mul(self, a: Any, b: Any) -> Any:
        """A product that is never contracted into an FMA (C: by -ffp-contract=off)."""
        return a * b if self.cpu else T.ieee_mul(a, b)

    def add(self, a: Any, b: Any) -> Any:
        """A sum that is never contracted into an FMA."""
        return a + b if self.cpu else T.ieee_add(a, b)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c with one rounding."""
        return T.call_pure_extern("float32", "fmaf", a, b, c)

    def abs(self, x: Any) -> Any:
        """|x| (TileLang's own has no lowering on C)."""
        return T.call_pure_extern("float32", "fabsf", x)

    # ---- tile copies with conversion

    def load(self, region: Any, fragment: Any, dtype: str) -> Any:
        """Global region of a logical dtype to a fragment of float32 or of the same dtype."""
        if not self.cpu or fragment.dtype == self.storage(dtype):
            return T.copy(region, fragment)
        base, axes = _split(region, fragment)
        return _c_load(self, region.buffer, base, axes, fragment, dtype)

    def store(self, fragment: Any, region: Any, dtype: str) -> Any:
        """The reverse of `load`, rounding once."""
        if not self.cpu or fragment.dtype == self.storage(dtype):
            return T.copy(fragment, region)
        base, axes = _split(region, fragment)
        return _c_store(self, fragment, region.buffer, base, axes, dtype)

    # ---- reductions

    def reduce_sum(self, a: Any, out: Any, dim: int = -1) -> Any:
        """Sum over one axis in a fixed order."""
        dim = dim % len(a.shape)
        if not self.cpu or dim != len(a.shape) - 1 or a.dtype != "float32":
            return T.reduce_sum(a, out, dim=dim)
        outer, n = [int(e) for e in a.shape[:-1]], int(a.shape[-1])
        lanes = next(k for k in (_LANES, 8, 4, 2, 1) if n % k == 0)
        return _c_sum(a, out, outer or [1], n, lanes)


_CLUSTER = """
static __device__ __forceinline__ int tk_remote(const void* own, int rank) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(own));
  int value;
  asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %1, %2; ld.shared::cluster.s32 %0, [there]; }"
               : "=r"(value) : "r"(address), "r"(rank) : "memory");
  return value;
}
static __device__ __forceinline__ int tk_leave() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;" ::: "memory");
  return 0;
}
static __device__ __forceinline__ int tk_expect(const void* mail, int bytes) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(mail));
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1; fence.mbarrier_init.release.cluster;" :: "r"(address) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(address), "r"(bytes) : "memory");
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  return 0;
}
static __device__ __forceinline__ int tk_open() {
  __syncthreads();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  return 0;
}
static __device__ __forceinline__ int tk_send(const void* place, int rank, int value, const void* mail) {
  unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(place)), counter = static_cast<unsigned>(__cvta_generic_to_shared(mail));
  asm volatile("{ .reg .b32 there, bar; mapa.shared::cluster.u32 there, %0, %1; mapa.shared::cluster.u32 bar, %2, %1;"
               " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.s32 [there], %3, [bar]; }"
               :: "r"(to), "r"(rank), "r"(counter), "r"(value) : "memory");
  return 0;
}
static __device__ __forceinline__ int tk_await(const void* mail) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(mail)), done = 0;
  while (!done) {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(address) : "memory");
  }
  return 0;
}
"""


@T.macro
def _bf16_bits(x):
    u = T.reinterpret(x, "uint32")
    rounded = (u + u32(0x7FFF) + ((u >> u32(16)) & u32(1))) >> u32(16)
    return T.Cast("uint16", select((u & u32(0x7FFFFFFF)) > u32(0x7F800000), (u >> u32(16)) | u32(0x40), rounded))


def _split(region: Any, fragment: Any) -> tuple[list, list[int]]:
    """Origin of a region, and the axes that the fragment runs over."""
    extents = [r.extent for r in region.region]
    axes = [k for k, e in enumerate(extents) if not (isinstance(e, tvm.tirx.IntImm) and e.value == 1)]
    if len(axes) < len(fragment.shape):  # extents of one that belong to the fragment
        axes = list(range(len(extents) - len(fragment.shape), len(extents)))
    return [r.min for r in region.region], axes


def _tuple(x: Any) -> tuple:
    """A one-dimensional grid yields a bare loop variable."""
    return (x,) if isinstance(x, tvm.tirx.PrimExpr) else tuple(x)


def _at(base: list, axes: list[int], index: tuple) -> tuple:
    at = list(base)
    for axis, i in zip(axes, index, strict=True):
        at[axis] = at[axis] + i
    return tuple(at)


@T.macro
def _c_load(P, buffer, base, axes, fragment, dtype):
    for ij in T.grid(*fragment.shape):
        index = _tuple(ij)
        fragment[index] = P.to_f32(buffer[_at(base, axes, index)], dtype)


@T.macro
def _c_store(P, fragment, buffer, base, axes, dtype):
    for ij in T.grid(*fragment.shape):
        index = _tuple(ij)
        buffer[_at(base, axes, index)] = P.from_f32(fragment[index], dtype)


@T.macro
def _c_sum(a, out, outer, n, lanes):
    acc = T.alloc_local((lanes,), "float32")
    for rr in T.grid(*outer):
        r = _tuple(rr)
        src = r if len(a.shape) > 1 else ()
        for lane in T.serial(lanes):
            acc[lane] = T.float32(0)
        for j in T.serial(n // lanes):
            for lane in T.serial(lanes):
                acc[lane] = acc[lane] + a[(*src, j * lanes + lane)]
        out[r] = acc[0]
        for lane in T.serial(lanes - 1):
            out[r] = out[r] + acc[lane + 1]
