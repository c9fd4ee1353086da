// A gradient's epilogue: y = (A B) act'(saved), and the sums of y's columns before it is rounded.
//
// `saved` comes by TMA into the very buffers that the result leaves from: most of a tile's under its products, the rest as
// buffers get free. A warp's sums are of its own rows, and lie in memory as a row of their own: add_rows adds them up.
// Nothing here waits for another warp.
#pragma once

#include "gemm.cuh"

namespace zoo::cuda::sm90 {

// d gelu(x) / dx for results that leave as bfloat16: (x > 0) - e (sign(x) / 2 + x P(|x|)), e = exp(-x^2 / 2). P is fitted: off
// by at most 2.4e-4, and in the negative tail by 0.07% of the value down to x = -5; held from there on. One reciprocal less
// than gelu_derivative; infinities give NaN, as there.
__device__ __forceinline__ float gelu_derivative_bf16(float x) {
  const float a = fminf(fabsf(x), 5.f), e = exp2_fast(x * x * -0.72134752f);
  float p = fmaf(1.98902533e-4f, a, -3.42387124e-3f);
  p = fmaf(p, a, 2.42228583e-2f);
  p = fmaf(p, a, -9.38538760e-2f);
  p = fmaf(p, a, 0.229495034f);
  p = fmaf(p, a, -0.793945134f);
  const float half = copysignf(0.5f, x);
  return fmaf(-e, fmaf(x, p, half), 0.5f + half);
}

// v *= act'(x): go_through, with `family` known and gelu's derivative as exact as the result's type needs it.
template <typename T, int family, int n>
__device__ __forceinline__ void multiply_by_derivative(float (&v)[n], const float (&x)[n], int act) {
  if constexpr (family == gelu && std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
    for (int i = 0; i < n; ++i) v[i] *= gelu_derivative_bf16(x[i]);
  } else if constexpr (family == silu) {
    go_through<false>(v, x, act == silu ? silu : gelu_tanh);
  } else {
    go_through<false>(v, x, family);
  }
}

// What to_shared wrote, or TMA in its place.
template <typename T, int n>
__device__ __forceinline__ void from_shared(float (&v)[n], uint32_t buffer, uint32_t part) {
  const uint32_t lane = threadIdx.x % 32, row = lane % 16;
#pragma unroll
  for (int j = 0; j < n / 4; j += 2) {
    const uint32_t chunk = (n / 4 * part + j + lane / 16) ^ (row % 8);
    uint32_t raw[4];
    ptx::ldmatrix(buffer + row * 128 + chunk * 16, raw[0], raw[1], raw[2], raw[3]);
#pragma unroll
    for (int i = 0; i < 4; ++i) unpack<T>(raw[i], v[4 * j + 2 * i], v[4 * j + 2 * i + 1]);
  }
}

// Rows from `rows` on do not exist: zero, whatever the product made of them.
template <int n>
__device__ __forceinline__ void drop_rows(float (&v)[n], int rows) {
  asm volatile("");  // a branch, not a select of each value of every tile
  const int row = threadIdx.x % 32 / 4;
#pragma unroll
  for (int j = 0; j < n; ++j) v[j] = row + j / 2 % 2 * 8 < rows ? v[j] : 0.f;
}

// A thread's part of the sums of 64 columns, 2 (lane % 4) + {0, 1} of every eight.
template <int n>
__device__ __forceinline__ void add_to_sums(float (&sums)[16], const float (&v)[n], int part) {
#pragma unroll
  for (int j = 0; j < n; ++j) sums[n / 2 * part + j / 4 * 2 + j % 2] += v[j];
}

// One step of it: a lane keeps `kept` of its sums, of its own rows and of the rows that its neighbour has.
template <int kept>
__device__ __forceinline__ void halve(float (&sums)[16]) {
  const bool upper = threadIdx.x & 2 * kept;
#pragma unroll
  for (int j = 0; j < kept; ++j) {
    const float mine = upper ? sums[j + kept] : sums[j], theirs = upper ? sums[j] : sums[j + kept];
    sums[j] = mine + __shfl_xor_sync(~0u, theirs, 2 * kept);
  }
}

// Of columns 2 lane and 2 lane + 1, over the warp's eight groups of rows.
__device__ __forceinline__ float2 sums_of_columns(float (&sums)[16]) {
  halve<8>(sums);
  halve<4>(sums);
  halve<2>(sums);
  return make_float2(sums[0], sums[1]);
}

template <class C>
struct Through {
  using T = typename C::T;
  static constexpr int pieces = C::strips * C::n / 64;  // of a warp in a tile, 16 rows x 64 columns
  static constexpr int values = C::n > 128 ? 8 : 16;    // of a thread at once, as registers allow

  Kernel<C>& kernel;
  const Args& args;
  int worker;
  uint32_t buffers, barriers;  // a warp's own: a barrier a buffer
  uint32_t phases = 0;         // a bit a barrier, the parity of what it completes next

  __device__ Through(Kernel<C>& k, int which, uint32_t arrived) : kernel(k), args(k.args), worker(which) {
    const int warp = threadIdx.x / 32 - 4;
    buffers = k.staging + warp * C::warp_staging;
    barriers = arrived + warp * C::buffers * 8;
  }

  // The strips of the same columns follow each other, so that the sums of these are soon done with.
  struct Place {
    int m, n;
  };
  __device__ __forceinline__ Place place(const Tile& tile, int piece) const {
    return {tile.m * C::m + piece % C::strips * 64 + static_cast<int>(threadIdx.x % 128 / 32) * 16,
            tile.n * C::n + piece / C::strips * 64};
  }

  // By one lane. Out of bounds it is zero.
  __device__ __forceinline__ void load(const Tile& tile, int piece) {
    const Place at = place(tile, piece);
    if (at.m >= args.M || at.n >= args.N) return;
    const int which = piece % C::buffers;
    ptx::barrier_expect(barriers + 8 * which, 2048);
    ptx::tma_load_2d(buffers + 2048 * which, &args.z, barriers + 8 * which, at.n, at.m);
  }

  // Before a tile's products.
  __device__ __forceinline__ void begin(const Tile& tile) {
    if (threadIdx.x % 32 == 0) {
      ptx::tma_wait_read<0>();  // what the tile before left there
#pragma unroll
      for (int i = 0; i < (pieces < C::buffers ? pieces : C::buffers); ++i) load(tile, i);
    }
    __syncwarp();
  }

  template <int family>
  __device__ __forceinline__ void finish(typename Kernel<C>::Accumulators& acc, const Tile& tile) {
    const int lane = threadIdx.x % 32;
    float sums[16];
#pragma unroll
    for (int i = 0; i < pieces; ++i) {
      const int strip = i % C::strips, which = i % C::buffers;
      const uint32_t buffer = buffers + 2048 * which;
      const Place at = place(tile, i);
      if (strip == 0) {
#pragma unroll
        for (int j = 0; j < 16; ++j) sums[j] = 0.f;
      }
      if (at.m < args.M && at.n < args.N) {
        ptx::barrier_wait(barriers + 8 * which, phases >> which & 1);
        __syncwarp();
        phases ^= 1u << which;
#pragma unroll
        for (int part = 0; part < 32 / values; ++part) {
          float v[values], x[values];
#pragma unroll
          for (int j = 0; j < values; ++j) v[j] = acc[strip][i / C::strips * 32 + part * values + j];
          from_shared<T>(x, buffer, part);
          multiply_by_derivative<T, family>(v, x, args.act);
          if (at.m + 16 > args.M) drop_rows(v, args.M - at.m);
          add_to_sums(sums, v, part);
          to_shared<T>(buffer, v, part);
        }
        ptx::proxy_fence();
        __syncwarp();
        if (lane == 0) ptx::tma_store(&args.y, buffer, at.n, at.m);
      }
      if (lane == 0) {
        ptx::tma_commit();  // a group a piece, empty or not, so that they can be counted
        if (i > 0 && i - 1 + C::buffers < pieces) {
          ptx::tma_wait_read<1>();
          load(tile, i - 1 + C::buffers);
        }
      }
      if (strip == C::strips - 1 && args.sums) {
        const int64_t row = 4 * tile.m + threadIdx.x % 128 / 32;
        const float2 sum = sums_of_columns(sums);
        if (at.n + 2 * lane < args.N) *reinterpret_cast<float2*>(args.sums + row * args.N + at.n + 2 * lane) = sum;
      }
    }
  }

  // Kernel::consume without what is not asked for here: every tile is whole, without a bias, and each worker's own.
  __device__ void consume() {
    static_assert(C::alone && C::planes == 1);
    const int beside = (C::workers - 1) * args.k_blocks;  // blocks of K between a worker's own tiles
    typename Kernel<C>::Accumulators acc;
    Ring<C::stages> ring;
    ring.skip(worker * args.k_blocks);
    const Walk walk(args);
    if (worker == C::workers - 1) ptx::named_arrive(1, 256);
    for (int t = blockIdx.x + worker * gridDim.x; t < args.whole; t += C::workers * gridDim.x) {
      Tile tile;
      walk.locate(t, tile);
      begin(tile);
      kernel.multiply(acc, ring, args.k_blocks, 0, worker);
      switch (args.act) {  // as in Kernel::finish
        case relu: finish<relu>(acc, tile); break;
        case gelu: finish<gelu>(acc, tile); break;
        default: finish<silu>(acc, tile);
      }
      ring.skip(beside);
    }
    if (threadIdx.x % 32 == 0) ptx::tma_wait_all();
  }
};

}  // namespace zoo::cuda::sm90
