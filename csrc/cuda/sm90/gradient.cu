// dY' = dY act'(z) and db = its column sums, in one pass: every element is read once and written once.
//
// float32 leaves as the three planes that both products of the backward pass read.
#include "epilogue.cuh"
#include "sm90.h"
#include "split.cuh"

#include "../types.cuh"

namespace zoo::cuda::sm90 {

constexpr int kColumns = 256, kRows = 8;  // a block: 32 threads x 8 columns, 8 rows
constexpr int kChunk = 128;               // rows a block

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

template <typename T, int act>
__global__ void __launch_bounds__(256, 3) grad_kernel(const __grid_constant__ GradientPass w) {
  constexpr bool f32 = std::is_same_v<T, float>;
  constexpr int unroll = 2;  // rows in flight a thread
  __shared__ float sums_of[kRows][kColumns];
  __shared__ bool last;
  const int lane = threadIdx.x % 32, r = threadIdx.x / 32;
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
  for (int i = 0; i < kRows; ++i) sum += sums_of[i][column];
  if (at < w.N) __stcg(w.partial + static_cast<int64_t>(blockIdx.y) * w.N + at, static_cast<float>(sum));
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = gridDim.y == 1 || atomicAdd(w.arrivals + blockIdx.x, 1u) == gridDim.y - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  if (threadIdx.x == 0 && gridDim.y > 1) w.arrivals[blockIdx.x] = 0;
  if (at >= w.N) return;
  sum = 0;
#pragma unroll 16
  for (int c = 0; c < static_cast<int>(gridDim.y); ++c) sum += __ldcg(w.partial + static_cast<int64_t>(c) * w.N + at);
  static_cast<T*>(w.sums)[at] = narrow<T>(static_cast<float>(sum));
}

template <typename T>
void launch_pass(const GradientPass& w, dim3 grid, cudaStream_t s) {
  switch (static_cast<int>(w.act)) {
    case none: return grad_kernel<T, none><<<grid, 256, 0, s>>>(w);
    case relu: return grad_kernel<T, relu><<<grid, 256, 0, s>>>(w);
    case gelu: return grad_kernel<T, gelu><<<grid, 256, 0, s>>>(w);
    case gelu_tanh: return grad_kernel<T, gelu_tanh><<<grid, 256, 0, s>>>(w);
    case silu: return grad_kernel<T, silu><<<grid, 256, 0, s>>>(w);
  }
}

int32_t gradient_chunks(int32_t M) {
  return (M + kChunk - 1) / kChunk;
}

int32_t gradient_columns(int32_t N) {
  return (N + kColumns - 1) / kColumns;
}

int32_t gradient_flags(int32_t M, int32_t N) {
  return gradient_chunks(M) * gradient_columns(N);
}

void gradient_pass(const GradientPass& pass, void* stream) {
  GradientPass w = pass;
  w.chunk = kChunk;
  const dim3 grid(gradient_columns(w.N), gradient_chunks(w.M));
  const auto s = static_cast<cudaStream_t>(stream);
  if (w.type == Type::bf16) launch_pass<__nv_bfloat16>(w, grid, s);
  else if (w.type == Type::f16) launch_pass<__half>(w, grid, s);
  else launch_pass<float>(w, grid, s);
  check_launch("gradient pass");
}

}  // namespace zoo::cuda::sm90
