// Products of few tiles, or of float32 that is too thin for planes in memory; any strides and alignment; one launch.
//
// A block computes 64 x 64: four warps, and four more with the other half of every stage of K. The K of a tile may be shared by
// a cluster of blocks. The parts are added through (distributed) shared memory, always in the same order: no workspace. A
// backward pass is one launch too: dW with db beside dX, act'(z) applied to dY as it is read.
// What a stage is multiplied by is in small_float.cuh and small_half.cuh.
#pragma once

#include "small_float.cuh"
#include "small_half.cuh"

#include "../mma.cuh"

namespace zoo::cuda::sm90 {

constexpr int kSide = 64, kStep = 64;     // a tile's rows and columns; K of a stage
constexpr int kThreads = 256, kGroups = 2;  // groups of four warps, each with its half of a stage's K
constexpr int kPitch = kSide + 4;         // floats of a row of sums
constexpr int kMostStages = 6;
constexpr int kAligned = 1024;            // of the stages, as wgmma's swizzles want it

struct SmallOperand {
  const void* data;
  int64_t outer, inner;  // strides
  bool vector;           // inner is 1, and rows begin at multiples of 16 bytes
};

struct SmallJob {
  SmallOperand a, b;
  const void* saved;  // a is multiplied by act'(saved), which lies as a does; or null
  const void* bias;
  void* y;
  void* z;
  void* sums;  // over K of every row of a, or null
  int64_t ld;
  int M, N, K, act, through;  // the activation of the output, and of `saved`
  int slices;                 // blocks that share a tile's K: 1, or all of a cluster
  int blocks;                 // a multiple of the cluster's
};

struct SmallArgs {
  SmallJob job[2];
  int stages;
};

template <typename T>
struct Small {
  static constexpr bool f32 = std::is_same_v<T, float>;
  static constexpr int wide = 16 / sizeof(T), chunks = kSide / wide;
  static constexpr int tile_bytes = kSide * kStep * sizeof(T);
  static constexpr int sums_bytes = kGroups * kSide * kPitch * 4;
  using Tile = std::conditional_t<f32, FloatTile, HalfTile<T>>;

  // ---- a stage's share of one operand: 64 rows of 64 elements, along K or (mn) along its rows

  // Where a thread's first chunk of the next stage lies in memory; its others are `rows_apart` rows down.
  static constexpr int rows_apart = kThreads / chunks;
  struct Source {
    const T* at;
    int64_t down, ahead;          // elements: to the thread's next chunk, to the next stage
    int outer_left, inner_left;   // rows and elements until the operand ends
    int outer_ahead, inner_ahead; // how they shrink
  };

  template <bool mn>
  static __device__ __forceinline__ Source source(const void* data, const SmallOperand& x, int row0, int k0, int rows, int K) {
    const int outer = (mn ? k0 : row0) + threadIdx.x / chunks, inner = (mn ? row0 : k0) + threadIdx.x % chunks * wide;
    Source s;
    s.at = static_cast<const T*>(data) + outer * x.outer + inner * x.inner;
    s.down = rows_apart * x.outer;
    s.ahead = kStep * (mn ? x.outer : x.inner);
    s.outer_left = (mn ? K : rows) - outer, s.inner_left = (mn ? rows : K) - inner;
    s.outer_ahead = mn ? kStep : 0, s.inner_ahead = mn ? 0 : kStep;
    return s;
  }

  template <bool mn>
  static __device__ __forceinline__ void fill(uint32_t to, Source& s, const void* data, const SmallOperand& x) {
    const uint32_t at0 = to + Tile::template place<mn>(threadIdx.x / chunks, threadIdx.x % chunks);
    if (x.vector && s.outer_left > kSide - rows_apart && s.inner_left >= wide) {  // all of it inside
      const T* begin = s.at;
#pragma unroll
      for (int i = 0; i < kSide / rows_apart; ++i, begin += s.down) copy_async(at0 + i * rows_apart * chunks * 16, begin);
    } else if (x.vector && (s.inner_left >= wide || s.inner_left <= 0)) {
      const int rows = s.inner_left > 0 ? s.outer_left : 0;
      const T* begin = s.at;
#pragma unroll
      for (int i = 0; i < kSide / rows_apart; ++i, begin += s.down) {
        const bool in = i * rows_apart < rows;
        copy_async(at0 + i * rows_apart * chunks * 16, in ? begin : static_cast<const T*>(data), in ? 16 : 0);
      }
    } else {
      fill_edge(at0, s.at, s.down, s.outer_left, s.inner_left, x.vector, x.inner, static_cast<const T*>(data));
    }
    s.at += s.ahead;
    s.outer_left -= s.outer_ahead;
    s.inner_left -= s.inner_ahead;
  }

  // By value: a reference would keep all of a Source in memory.
  static __device__ __noinline__ void fill_edge(
      uint32_t at0, const T* first, int64_t down, int outer_left, int inner_left, bool vector, int64_t step, const T* inside) {
#pragma unroll 1
    for (int i = 0; i < kSide / rows_apart; ++i) {
      const uint32_t at = at0 + i * rows_apart * chunks * 16;
      const int left = i * rows_apart < outer_left ? inner_left : 0;
      const T* begin = left > 0 ? first + i * down : inside;
      if (vector) {
        copy_async(at, begin, left >= wide ? 16 : left > 0 ? left * static_cast<int>(sizeof(T)) : 0);
      } else if constexpr (f32) {
#pragma unroll
        for (int j = 0; j < wide; ++j) copy_async<4>(at + 4 * j, j < left ? begin + j * step : inside, j < left ? 4 : 0);
      } else {
        uint32_t packed[4] = {};
#pragma unroll
        for (int j = 0; j < wide; ++j) {
          const uint32_t half = j < left ? reinterpret_cast<const uint16_t*>(begin)[j * step] : 0;
          packed[j / 2] |= half << (j % 2 * 16);
        }
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(packed[0]), "r"(packed[1]), "r"(packed[2]),
                     "r"(packed[3])
                     : "memory");
      }
    }
  }

  // ---- one block's work

  template <bool a_mn, bool b_mn, bool through>
  static __device__ __forceinline__ void run(const SmallJob& job, int block, int stages) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ float row_sums[kGroups][kSide];
    uint8_t* const stage_0 = shared + (kAligned - ptx::shared_address(shared) % kAligned) % kAligned;
    const uint32_t base = ptx::shared_address(stage_0);
    constexpr int stage_bytes = (through ? 3 : 2) * tile_bytes;
    const int group = threadIdx.x / 128;
    const int n_tiles = (job.N + kSide - 1) / kSide, t = block / job.slices;
    const int m0 = t / n_tiles * kSide, n0 = t % n_tiles * kSide;
    if (m0 >= job.M) return;  // only where slices is 1: no other block waits for this one
    const int rank = job.slices > 1 ? static_cast<int>(ptx::cluster_rank()) : 0;
    const int steps = (job.K + kStep - 1) / kStep;
    const int first = static_cast<int>(int64_t{steps} * rank / job.slices);
    const int end = static_cast<int>(int64_t{steps} * (rank + 1) / job.slices);
    const bool wants_sums = job.sums && n0 == 0;

    Source from_a = source<a_mn>(job.a.data, job.a, m0, first * kStep, job.M, job.K);
    Source from_b = source<b_mn>(job.b.data, job.b, n0, first * kStep, job.N, job.K);
    Source from_z = through ? source<a_mn>(job.saved, job.a, m0, first * kStep, job.M, job.K) : Source{};
    auto fetch = [&](int step, int stage) {  // in the order of steps
      if (step < end) {
        const uint32_t to = base + stage * stage_bytes;
        fill<a_mn>(to, from_a, job.a.data, job.a);
        fill<b_mn>(to + tile_bytes, from_b, job.b.data, job.b);
        if constexpr (through) fill<a_mn>(to + 2 * tile_bytes, from_z, job.saved, job.a);
      }
      copy_commit();  // an empty group, too: the count is what is waited for
    };
    for (int s = 0; s < stages - 1; ++s) fetch(first + s, s);
    if (stages == 1) fetch(first, 0);

    Tile product;
    int stage = 0;
    for (int step = first; step < end; ++step) {
      copy_wait_for(stages - 2);
      __syncthreads();  // everyone's part of this stage is there, and everyone is done with the one that is filled next
      product.template step<a_mn, b_mn, through>(
          stage_0 + stage * stage_bytes, group, job.through, wants_sums, job.K < 0, [&] {
            if (stages > 1) fetch(step + stages - 1, stage == 0 ? stages - 1 : stage - 1);
          });
      stage = stage + 1 == stages ? 0 : stage + 1;
    }
    copy_wait_for(0);
    __syncthreads();  // the stages are read: sums may take their place
    product.park(base + group * kSide * kPitch * 4, kPitch, row_sums[group], wants_sums);
    if (job.slices > 1) ptx::cluster_sync();
    else __syncthreads();

    const int rows = kSide / job.slices;
    const auto part_of = [&](uint32_t at, int slice) {
      if (job.slices > 1) return ptx::load4_remote(at, slice);
      float4 v;
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
      return v;
    };
    for (int e = threadIdx.x; e < rows * (kSide / 4); e += kThreads) {
      const int r = rank * rows + e / (kSide / 4), c = e % (kSide / 4) * 4, m = m0 + r, n = n0 + c;
      if (m >= job.M || n >= job.N) continue;
      float v[4] = {};
      for (int s = 0; s < job.slices; ++s) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          const float4 q = part_of(base + ((g * kSide + r) * kPitch + c) * 4, s);
          v[0] += q.x, v[1] += q.y, v[2] += q.z, v[3] += q.w;
        }
      }
      if constexpr (f32) again<a_mn, b_mn, through>(job, v, m, n);
      T* y = static_cast<T*>(job.y) + m * job.ld + n;
      T* z = static_cast<T*>(job.z) + m * job.ld + n;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (job.bias && n + i < job.N) v[i] += widen(static_cast<const T*>(job.bias)[n + i]);
      }
      if (job.z) put(z, v, job.N - n, job.ld);
      activate<f32>(v, job.act);
      put(y, v, job.N - n, job.ld);
    }
    if (wants_sums && threadIdx.x < rows) {
      const int r = rank * rows + threadIdx.x;
      if (m0 + r < job.M) {
        float sum = 0.f;
        for (int s = 0; s < job.slices; ++s) {
#pragma unroll
          for (int g = 0; g < kGroups; ++g) {
            const uint32_t at = ptx::shared_address(&row_sums[g][r]);
            sum += job.slices > 1 ? __int_as_float(ptx::load_remote(at, s)) : row_sums[g][r];
          }
        }
        static_cast<T*>(job.sums)[m0 + r] = narrow<T>(sum);
      }
    }
    if (job.slices > 1) ptx::cluster_sync();  // the others may still read this block's sums
  }

  // What is not finite, of an operand or because the product of the first parts overflows where float32's does not.
  template <bool a_mn, bool b_mn, bool through>
  static __device__ __forceinline__ void again(const SmallJob& job, float (&v)[4], int m, int n) {
    bool all = true;
#pragma unroll
    for (int i = 0; i < 4; ++i) all &= fabsf(v[i]) <= 3.402823466e38f;
    if (all) return;
    const int64_t a_row = a_mn ? job.a.inner : job.a.outer, a_k = a_mn ? job.a.outer : job.a.inner;
    const int64_t b_row = b_mn ? job.b.inner : job.b.outer, b_k = b_mn ? job.b.outer : job.b.inner;
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      if (n + i >= job.N) break;
      float sum = 0.f;
#pragma unroll 1
      for (int k = 0; k < job.K; ++k) {
        float x[1] = {static_cast<const float*>(job.a.data)[m * a_row + k * a_k]};
        if constexpr (through) {
          const float z[1] = {static_cast<const float*>(job.saved)[m * a_row + k * a_k]};
          go_through<true>(x, z, job.through);
        }
        sum = fmaf(x[0], static_cast<const float*>(job.b.data)[(n + i) * b_row + k * b_k], sum);
      }
      v[0] = i == 0 ? sum : v[0], v[1] = i == 1 ? sum : v[1], v[2] = i == 2 ? sum : v[2], v[3] = i == 3 ? sum : v[3];
    }
  }

  static __device__ __forceinline__ void put(T* to, const float (&v)[4], int room, int64_t ld) {
    if (room >= 4 && ld % 4 == 0) {
      if constexpr (f32) *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
      else *reinterpret_cast<uint2*>(to) = make_uint2(pack<T>(v[0], v[1]), pack<T>(v[2], v[3]));
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < room) to[i] = narrow<T>(v[i]);
      }
    }
  }
};

}  // namespace zoo::cuda::sm90
