// dY' = dY act'(z) and db = its column sums, in one pass: every element is read once and written once. Blocks sum their rows, and
// add_rows.cu what the blocks have, always in the same order.
//
// float32 may leave as the planes that products of the backward pass read.
#include "epilogue.cuh"
#include "sm90.h"
#include "split.cuh"

#include "../types.cuh"

namespace zoo::cuda::sm90 {

constexpr int kThreads = 256, kWide = 8;  // columns a thread

// Of a block: threads that share a row, and rows.
struct Share {
  int lanes, rows;
};

// Long rows, where these leave few threads beyond the last column and blocks are many all the same. Up to kOneBlockRows
// are one block's, whose sums need no others; a block of more rows has at least 128.
Share share_of(int32_t M, int32_t N) {
  if (M <= kOneBlockRows) return {8, M};
  const auto blocks = [&](int lanes, int64_t rows) {
    const int64_t columns = kWide * lanes;
    return (N + columns - 1) / columns * ((M + rows - 1) / rows);
  };
  const auto fills = [&](int lanes) {
    const int64_t columns = kWide * lanes;
    return 10 * int64_t{N} >= 9 * columns * ((N + columns - 1) / columns);
  };
  constexpr int kMany = 4 * 132;
  const int lanes = fills(32) && blocks(32, 128) >= kMany ? 32 : fills(8) ? 8 : 4;
  int rows = 128;
  while (rows * lanes < 128 * 32 && blocks(lanes, 2 * rows) >= 2 * kMany) rows *= 2;
  return {lanes, rows};
}

template <typename T>
__device__ __forceinline__ void load8(float (&v)[8], const T* from) {
  if constexpr (std::is_same_v<T, float>) {
    const float4 low = __ldcs(reinterpret_cast<const float4*>(from));
    const float4 high = __ldcs(reinterpret_cast<const float4*>(from) + 1);
    v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w, v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
  } else {
    const uint4 raw = __ldcs(reinterpret_cast<const uint4*>(from));
    const T* values = reinterpret_cast<const T*>(&raw);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = widen(values[i]);
  }
}

template <typename T, int act, int lanes>
__global__ void __launch_bounds__(kThreads, 3) grad_kernel(const __grid_constant__ GradientPass w, int share) {
  constexpr bool f32 = std::is_same_v<T, float>;
  constexpr int kColumns = kWide * lanes, kRows = kThreads / lanes;  // of a block, at once
  constexpr int unroll = act == none ? 4 : 2;                        // of those rows, in flight
  __shared__ float sums_of[kRows][kColumns];
  const int lane = threadIdx.x % lanes, r = threadIdx.x / lanes;
  const int n = blockIdx.x * kColumns + lane * kWide;
  const int first = blockIdx.y * share, end = min(first + share, w.M);
  const T* dy = static_cast<const T*>(w.grad);
  const T* z = static_cast<const T*>(w.saved);
  float sums[kWide] = {};
  bool special = false;
  if (n < w.N) {
    for (int m0 = first + r; m0 < end; m0 += kRows * unroll) {
      float g[unroll][kWide], x[unroll][kWide];
#pragma unroll
      for (int u = 0; u < unroll; ++u) {
        const int64_t at = static_cast<int64_t>(min(m0 + u * kRows, end - 1)) * w.ld + n;
        load8(g[u], dy + at);
        if constexpr (act != none) load8(x[u], z + at);
      }
#pragma unroll
      for (int u = 0; u < unroll; ++u) {
        const int m = m0 + u * kRows;
        if (m >= end) break;
        go_through<f32>(g[u], x[u], act);
#pragma unroll
        for (int i = 0; i < kWide; ++i) sums[i] += g[u][i];
        if constexpr (f32) {
          if (w.planes.planes) {
            __nv_bfloat16* to = static_cast<__nv_bfloat16*>(w.planes.planes) + m * w.planes.planes_ld + n;
            store_planes(g[u], to, w.planes.plane, w.planes.count, special);
          }
        }
        if (w.out) {
          T* to = static_cast<T*>(w.out) + m * w.ld + n;
          if constexpr (f32) {
            reinterpret_cast<float4*>(to)[0] = make_float4(g[u][0], g[u][1], g[u][2], g[u][3]);
            reinterpret_cast<float4*>(to)[1] = make_float4(g[u][4], g[u][5], g[u][6], g[u][7]);
          } else {
            *reinterpret_cast<uint4*>(to) = make_uint4(pack<T>(g[u][0], g[u][1]), pack<T>(g[u][2], g[u][3]),
                                                       pack<T>(g[u][4], g[u][5]), pack<T>(g[u][6], g[u][7]));
          }
        }
      }
    }
  }
  if (w.planes.flags) {
    const int any = __syncthreads_or(special);
    if (threadIdx.x == 0) w.planes.flags[blockIdx.y * gridDim.x + blockIdx.x] = any;
  }
  if (!w.sums) return;

#pragma unroll
  for (int i = 0; i < kWide; ++i) sums_of[r][lane * kWide + i] = sums[i];
  __syncthreads();
  const int column = threadIdx.x, at = blockIdx.x * kColumns + column;
  if (column >= kColumns || at >= w.N) return;
  double sum = 0;  // few additions, so that a column of any length keeps float32's accuracy
#pragma unroll
  for (int i = 0; i < kRows; ++i) sum += sums_of[i][column];
  if (gridDim.y == 1) static_cast<T*>(w.sums)[at] = narrow<T>(static_cast<float>(sum));
  else w.partial[static_cast<int64_t>(blockIdx.y) * w.N + at] = static_cast<float>(sum);
}

template <typename T, int lanes>
void launch_pass(const GradientPass& w, int share, cudaStream_t s) {
  const dim3 grid((w.N + kWide * lanes - 1) / (kWide * lanes), gradient_chunks(w.M, w.N));
  switch (static_cast<int>(w.act)) {
    case none: return grad_kernel<T, none, lanes><<<grid, kThreads, 0, s>>>(w, share);
    case relu: return grad_kernel<T, relu, lanes><<<grid, kThreads, 0, s>>>(w, share);
    case gelu: return grad_kernel<T, gelu, lanes><<<grid, kThreads, 0, s>>>(w, share);
    case gelu_tanh: return grad_kernel<T, gelu_tanh, lanes><<<grid, kThreads, 0, s>>>(w, share);
    case silu: return grad_kernel<T, silu, lanes><<<grid, kThreads, 0, s>>>(w, share);
  }
}

template <typename T>
void launch_pass(const GradientPass& w, cudaStream_t s) {
  const Share share = share_of(w.M, w.N);
  if (share.lanes == 32) launch_pass<T, 32>(w, share.rows, s);
  else if (share.lanes == 8) launch_pass<T, 8>(w, share.rows, s);
  else launch_pass<T, 4>(w, share.rows, s);
}

int32_t gradient_chunks(int32_t M, int32_t N) {
  const int rows = share_of(M, N).rows;
  return (M + rows - 1) / rows;
}

int32_t gradient_flags(int32_t M, int32_t N) {
  const int columns = kWide * share_of(M, N).lanes;
  return gradient_chunks(M, N) * ((N + columns - 1) / columns);
}

void gradient_pass(const GradientPass& w, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  if (w.type == Type::bf16) launch_pass<__nv_bfloat16>(w, s);
  else if (w.type == Type::f16) launch_pass<__half>(w, s);
  else launch_pass<float>(w, s);
  check_launch("gradient pass");
  const int32_t chunks = gradient_chunks(w.M, w.N);
  if (w.sums && chunks > 1) add_rows(w.partial, chunks, w.N, w.sums, w.type, stream);
}

}  // namespace zoo::cuda::sm90
