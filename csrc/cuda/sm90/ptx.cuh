// Hopper's instructions that CUDA C++ has no name for, one thin wrapper each.
//
// Shared-memory addresses are 32-bit (`shared_address`). Everything here is sm_90; wgmma and setmaxnreg are sm_90a.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace zoo::cuda::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- mbarrier: a phase ends when `count` arrivals and all announced bytes are in; waits name the phase's parity

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes initialised barriers visible to the other blocks of the cluster and to the copy engine.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the same barrier of another block of the cluster. Not .release.cluster: that is a memory barrier for all that
// the thread has written, 500 cycles and more, and the arrival only says that wgmma has read the stage.
__device__ __forceinline__ void barrier_arrive_remote(uint32_t barrier, uint32_t block) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(barrier),
      "r"(block)
      : "memory");
}

// Arrives and announces `bytes` that copies will bring.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Spins: a __trap() for hangs here would make ptxas ignore the registers that setmaxnreg adds (it spilled for it).
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
}

// ---- TMA: boxes of a tensor that a map describes. Out of bounds is read as zero and not written.

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tma_load(
    uint32_t to, const CUtensorMap* map, uint32_t barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
      ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// The same into every block of `blocks` (a bit mask of the cluster), at the same address and barrier in each.
__device__ __forceinline__ void tma_load_multicast(
    uint32_t to, const CUtensorMap* map, uint32_t barrier, int x, int y, int z, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;"
      ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(blocks)
      : "memory");
}

__device__ __forceinline__ void tma_load_2d(uint32_t to, const CUtensorMap* map, uint32_t barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
      ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}

__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
               ::"l"(map), "r"(from), "r"(x), "r"(y)
               : "memory");
}

__device__ __forceinline__ void tma_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until at most `pending` of this thread's groups of stores still read shared memory.
template <int pending>
__device__ __forceinline__ void tma_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

__device__ __forceinline__ void tma_wait_all() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Before the copy engine or wgmma reads shared memory that this thread wrote by ordinary stores.
__device__ __forceinline__ void proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- threads

template <int registers>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// Barrier 0 is __syncthreads.
__device__ __forceinline__ void named_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// named_sync that tells all whether any thread's `value` is true.
__device__ __forceinline__ bool named_or(int barrier, int threads, bool value) {
  uint32_t any;
  asm volatile(
      "{\n.reg .pred p, q;\n"
      "setp.ne.u32 p, %3, 0;\n"
      "barrier.cta.red.or.pred q, %1, %2, p;\n"
      "selp.b32 %0, 1, 0, q;\n}\n"
      : "=r"(any)
      : "r"(barrier), "r"(threads), "r"(uint32_t(value))
      : "memory");
  return any;
}

__device__ __forceinline__ void named_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// From another block's shared memory.
__device__ __forceinline__ int load_remote(uint32_t address, uint32_t block) {
  int v;
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %1, %2;\n"
      "ld.shared::cluster.b32 %0, [remote];\n}\n"
      : "=r"(v)
      : "r"(address), "r"(block)
      : "memory");
  return v;
}

__device__ __forceinline__ float4 load4_remote(uint32_t address, uint32_t block) {
  float4 v;
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n}\n"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(address), "r"(block)
      : "memory");
  return v;
}

__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ float2 load2_shared(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ void store2_shared(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

template <typename T>
__device__ __forceinline__ void store_shared(uint32_t address, T v) {
  if constexpr (sizeof(T) == 4) asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
  else asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(*reinterpret_cast<uint16_t*>(&v)) : "memory");
}

// Stores four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Loads what stmatrix stores.
__device__ __forceinline__ void ldmatrix(uint32_t from, uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(from)
               : "memory");
}

// ---- wgmma: D (64 x N, float, in the registers of four warps) += A (64 x 16) B (16 x N), B in shared memory and A there
// too or in registers

enum class Swizzle : uint64_t { b128 = 1, b64 = 2, b32 = 3 };

// An operand in shared memory. K-major: `stride` bytes between groups of 8 rows, `leading` unused with a swizzle.
// MN-major: `stride` between groups of 8 k, `leading` between blocks of 64 rows (128 bytes).
__device__ __forceinline__ uint64_t descriptor(uint32_t address, uint32_t leading, uint32_t stride, Swizzle swizzle) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | static_cast<uint64_t>(leading >> 4) << 16 |
         static_cast<uint64_t>(stride >> 4) << 32 | static_cast<uint64_t>(swizzle) << 62;
}

// Orders register accesses before the next wgmma.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Keeps the compiler from moving accesses of accumulators across a wait.
template <int n>
__device__ __forceinline__ void pin(float (&d)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(d[i]));
}

// The same for A in registers: their values are there before.
template <int n>
__device__ __forceinline__ void pin(uint32_t (&a)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+r"(a[i]));
}

// Nothing takes the place of A's registers before this. wgmma reads them until it is waited for, but ptxas has them free as
// soon as it is issued (measured: wrong sums). What it understands is an instruction that reads them; `never` is false.
template <int count>
__device__ __forceinline__ void keep(const uint32_t (&a)[count][4], bool never) {
  if (__builtin_expect(never, false)) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      asm volatile("st.volatile.shared.v4.b32 [%4], {%0, %1, %2, %3};"
                   ::"r"(a[i][0]), "r"(a[i][1]), "r"(a[i][2]), "r"(a[i][3]), "r"(16 * i)
                   : "memory");
    }
  }
}

// The accumulators' old values are not needed: the next wgmma overwrites them.
template <int n>
__device__ __forceinline__ void forget(float (&d)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "=f"(d[i]));
}

#define ZOO_8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
                    "+f"(d[i + 6]), "+f"(d[i + 7])
#define ZOO_16(d, i) ZOO_8(d, i), ZOO_8(d, i + 8)
#define ZOO_32(d, i) ZOO_16(d, i), ZOO_16(d, i + 16)
#define ZOO_NAMES_0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24," \
                    "%25,%26,%27,%28,%29,%30,%31"
#define ZOO_NAMES_1 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54," \
                    "%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define ZOO_NAMES_1_HALF ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define ZOO_NAMES_2 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86," \
                    "%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define ZOO_NAMES_3 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114," \
                    "%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// One instruction: `a`, `b`, `on`, `ta`, `tb` are the operand numbers that follow the accumulators'.
#define ZOO_WGMMA(shape, type, names, a, b, on, ta, tb, ...)                                              \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" on ", 0;\n"                                           \
               "wgmma.mma_async.sync.aligned." shape ".f32." type "." type " {" names "}, %" a ", %" b    \
               ", p, 1, 1, %" ta ", %" tb ";\n}\n"                                                        \
               : __VA_ARGS__                                                                              \
               : "l"(a_tile), "l"(b_tile), "r"(add), "n"(int(a_mn)), "n"(int(b_mn)))

// d = a b, or with `add` d += a b. a_mn, b_mn: the operand is MN-major.
template <typename T, int N, bool a_mn, bool b_mn>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], uint64_t a_tile, uint64_t b_tile, int add) {
  static_assert(N == 64 || N == 128 || N == 192 || N == 256);
  constexpr bool bf16 = std::is_same_v<T, __nv_bfloat16>;
#define ZOO_WGMMA_TYPES(...)                            \
  if constexpr (bf16) ZOO_WGMMA_OF("bf16", __VA_ARGS__); \
  else ZOO_WGMMA_OF("f16", __VA_ARGS__)
#define ZOO_WGMMA_OF(type, shape, ...) ZOO_WGMMA(shape, type, __VA_ARGS__)
  if constexpr (N == 64) {
    ZOO_WGMMA_TYPES("m64n64k16", ZOO_NAMES_0, "32", "33", "34", "35", "36", ZOO_32(d, 0));
  } else if constexpr (N == 128) {
    ZOO_WGMMA_TYPES("m64n128k16", ZOO_NAMES_0 ZOO_NAMES_1, "64", "65", "66", "67", "68", ZOO_32(d, 0), ZOO_32(d, 32));
  } else if constexpr (N == 192) {
    ZOO_WGMMA_TYPES("m64n192k16", ZOO_NAMES_0 ZOO_NAMES_1 ZOO_NAMES_2, "96", "97", "98", "99", "100", ZOO_32(d, 0),
                    ZOO_32(d, 32), ZOO_32(d, 64));
  } else {
    ZOO_WGMMA_TYPES("m64n256k16", ZOO_NAMES_0 ZOO_NAMES_1 ZOO_NAMES_2 ZOO_NAMES_3, "128", "129", "130", "131", "132",
                    ZOO_32(d, 0), ZOO_32(d, 32), ZOO_32(d, 64), ZOO_32(d, 96));
  }
#undef ZOO_WGMMA_TYPES
#undef ZOO_WGMMA_OF
}

// A's registers of thread t, with g = t % 32 / 4 and q = t % 4: two neighbours in K each, the first in the lower half; row
// 16 (t / 32) + g, k 2 q; row + 8; k + 8; both. bf16.
#define ZOO_WGMMA_REGISTERS(shape, names, a0, a1, a2, a3, b, on, tb, ...)                                          \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" on ", 0;\n"                                                   \
               "wgmma.mma_async.sync.aligned." shape ".f32.bf16.bf16 {" names "}, {%" a0 ", %" a1 ", %" a2 ", %" a3 \
               "}, %" b ", p, 1, 1, %" tb ";\n}\n"                                                                 \
               : __VA_ARGS__                                                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_tile), "r"(add), "n"(int(b_mn)))

template <int N, bool b_mn>
__device__ __forceinline__ void wgmma_registers(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b_tile, int add) {
  static_assert(N == 64 || N == 96 || N == 128 || N == 192);
  if constexpr (N == 64) {
    ZOO_WGMMA_REGISTERS("m64n64k16", ZOO_NAMES_0, "32", "33", "34", "35", "36", "37", "38", ZOO_32(d, 0));
  } else if constexpr (N == 96) {
    ZOO_WGMMA_REGISTERS("m64n96k16", ZOO_NAMES_0 ZOO_NAMES_1_HALF, "48", "49", "50", "51", "52", "53", "54", ZOO_32(d, 0),
                        ZOO_16(d, 32));
  } else if constexpr (N == 128) {
    ZOO_WGMMA_REGISTERS("m64n128k16", ZOO_NAMES_0 ZOO_NAMES_1, "64", "65", "66", "67", "68", "69", "70", ZOO_32(d, 0),
                        ZOO_32(d, 32));
  } else {
    ZOO_WGMMA_REGISTERS("m64n192k16", ZOO_NAMES_0 ZOO_NAMES_1 ZOO_NAMES_2, "96", "97", "98", "99", "100", "101", "102",
                        ZOO_32(d, 0), ZOO_32(d, 32), ZOO_32(d, 64));
  }
}

#undef ZOO_WGMMA_REGISTERS
#undef ZOO_WGMMA
#undef ZOO_8
#undef ZOO_16
#undef ZOO_32
#undef ZOO_NAMES_0
#undef ZOO_NAMES_1
#undef ZOO_NAMES_1_HALF
#undef ZOO_NAMES_2
#undef ZOO_NAMES_3

}  // namespace zoo::cuda::ptx
