// dY' = dY act'(z) and db = its column sums, in one pass: every element is read once and written once.
//
// float32 leaves as the three planes that both products of the backward pass read.
#include "epilogue.cuh"
#include "sm90.h"
#include "split.cuh"

#include "../types.cuh"

namespace zoo::cuda::sm90 {

constexpr int kThreads = 256;
constexpr int kChunk = 128;  // rows a block; up to twice as many are one, which needs no counters

// Threads that share a row, each with 8 columns: few where one block has all rows, so that these are read at once.
constexpr int kMany = 32, kFew = 8;
int lanes_of(int32_t M) {
  return gradient_chunks(M) == 1 ? kFew : kMany;
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
__global__ void __launch_bounds__(kThreads, 3) grad_kernel(const __grid_constant__ GradientPass w) {
  constexpr bool f32 = std::is_same_v<T, float>;
  constexpr int kColumns = 8 * lanes, kRows = kThreads / lanes;  // of a block, at once
  constexpr int unroll = act == none && !f32 ? 4 : 2;            // of those rows, in flight
  __shared__ float sums_of[kRows][kColumns];
  __shared__ bool last;
  const int lane = threadIdx.x % lanes, r = threadIdx.x / lanes;
  const int n = blockIdx.x * kColumns + lane * 8;
  const int first = blockIdx.y * w.chunk, end = min(first + w.chunk, w.M);
  const T* dy = static_cast<const T*>(w.grad);
  const T* z = static_cast<const T*>(w.saved);
  float sums[8] = {};
  bool special = false;
  if (n < w.N) {
    for (int m0 = first + r; m0 < end; m0 += kRows * unroll) {
      float g[unroll][8], x[unroll][8];
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
        for (int i = 0; i < 8; ++i) sums[i] += g[u][i];
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

  // rows of the block, then the chunks by the last block of these columns: always in the same order
#pragma unroll
  for (int i = 0; i < 8; ++i) sums_of[r][lane * 8 + i] = sums[i];
  __syncthreads();
  const int column = threadIdx.x, at = blockIdx.x * kColumns + column;
  double sum = 0;  // few additions, so that a column of any length keeps float32's accuracy
#pragma unroll
  for (int i = 0; i < kRows; ++i) sum += sums_of[i][column % kColumns];
  if (column < kColumns && at < w.N) __stcg(w.partial + static_cast<int64_t>(blockIdx.y) * w.N + at, static_cast<float>(sum));
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = gridDim.y == 1 || atomicAdd(w.arrivals + blockIdx.x, 1u) == gridDim.y - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  if (threadIdx.x == 0 && gridDim.y > 1) w.arrivals[blockIdx.x] = 0;
  if (column >= kColumns || at >= w.N) return;
  sum = 0;
#pragma unroll 16
  for (int c = 0; c < static_cast<int>(gridDim.y); ++c) sum += __ldcg(w.partial + static_cast<int64_t>(c) * w.N + at);
  static_cast<T*>(w.sums)[at] = narrow<T>(static_cast<float>(sum));
}

template <typename T, int lanes>
void launch_pass(const GradientPass& w, cudaStream_t s) {
  const dim3 grid(gradient_columns(w.M, w.N), gradient_chunks(w.M));
  switch (static_cast<int>(w.act)) {
    case none: return grad_kernel<T, none, lanes><<<grid, kThreads, 0, s>>>(w);
    case relu: return grad_kernel<T, relu, lanes><<<grid, kThreads, 0, s>>>(w);
    case gelu: return grad_kernel<T, gelu, lanes><<<grid, kThreads, 0, s>>>(w);
    case gelu_tanh: return grad_kernel<T, gelu_tanh, lanes><<<grid, kThreads, 0, s>>>(w);
    case silu: return grad_kernel<T, silu, lanes><<<grid, kThreads, 0, s>>>(w);
  }
}

template <typename T>
void launch_pass(const GradientPass& w, cudaStream_t s) {
  if (lanes_of(w.M) == kFew) launch_pass<T, kFew>(w, s);
  else launch_pass<T, kMany>(w, s);
}

int32_t gradient_chunks(int32_t M) {
  return M <= 2 * kChunk ? 1 : (M + kChunk - 1) / kChunk;
}

int32_t gradient_columns(int32_t M, int32_t N) {
  const int columns = 8 * lanes_of(M);
  return (N + columns - 1) / columns;
}

int32_t gradient_flags(int32_t M, int32_t N) {
  return gradient_chunks(M) * gradient_columns(M, N);
}

void gradient_pass(const GradientPass& pass, void* stream) {
  GradientPass w = pass;
  w.chunk = gradient_chunks(w.M) == 1 ? w.M : kChunk;
  const auto s = static_cast<cudaStream_t>(stream);
  if (w.type == Type::bf16) launch_pass<__nv_bfloat16>(w, s);
  else if (w.type == Type::f16) launch_pass<__half>(w, s);
  else launch_pass<float>(w, s);
  check_launch("gradient pass");
}

}  // namespace zoo::cuda::sm90
