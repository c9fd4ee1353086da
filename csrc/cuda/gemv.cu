// Products of few rows: a warp computes one column of the output for all of them, and b is read once, 16 bytes a lane.
//
// Wants K along memory in both operands, rows of whole 16 bytes. What is read decides the time, not what is multiplied.

#include "activation.cuh"
#include "types.cuh"

namespace zoo::cuda {
namespace {

constexpr int kWarps = 4;  // a block
constexpr int kAhead = 4;  // loads of b on their way at once

template <typename T>
struct alignas(16) Pack {
  T v[16 / sizeof(T)];
};

template <typename T, int rows>
__global__ void __launch_bounds__(32 * kWarps) gemv_kernel(Product p) {
  using Acc = typename Accumulator<T>::type;
  constexpr int wide = 16 / sizeof(T);
  const int lane = threadIdx.x % 32;
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (n >= p.N) return;
  const auto* b = reinterpret_cast<const Pack<T>*>(static_cast<const T*>(p.b.data) + n * p.b.col_stride);
  const T* a = static_cast<const T*>(p.a.data);
  const int64_t packs = p.K / wide;
  Acc sums[rows] = {};
  for (int64_t i0 = lane; i0 < packs; i0 += 32 * kAhead) {
    Pack<T> weights[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int64_t i = i0 + 32 * u;
      weights[u] = b[i < packs ? i : i0];
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int64_t i = i0 + 32 * u;
      if (i >= packs) break;
#pragma unroll
      for (int m = 0; m < rows; ++m) {
        if (m >= p.M) break;
        const Pack<T> values = reinterpret_cast<const Pack<T>*>(a + m * p.a.row_stride)[i];
#pragma unroll
        for (int j = 0; j < wide; ++j) sums[m] += widen<Acc>(values.v[j]) * widen<Acc>(weights[u].v[j]);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < rows; ++m) {
#pragma unroll
    for (int over = 16; over > 0; over /= 2) sums[m] += __shfl_xor_sync(~0u, sums[m], over);
  }
  const T* bias = static_cast<const T*>(p.bias);
#pragma unroll
  for (int m = 0; m < rows; ++m) {
    if (m >= p.M || lane != m) continue;
    const Acc z = sums[m] + (bias ? widen<Acc>(bias[n * p.bias_stride]) : Acc(0));
    const int64_t at = m * p.N + n;
    if (p.z) static_cast<T*>(p.z)[at] = narrow<T>(z);
    static_cast<T*>(p.y)[at] = narrow<T>(activate<Acc>(z, p.act));
  }
}

template <typename T>
void launch(const Product& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((p.N + kWarps - 1) / kWarps);
  if (p.M <= 1) gemv_kernel<T, 1><<<blocks, 32 * kWarps, 0, stream>>>(p);
  else if (p.M <= 2) gemv_kernel<T, 2><<<blocks, 32 * kWarps, 0, stream>>>(p);
  else if (p.M <= 4) gemv_kernel<T, 4><<<blocks, 32 * kWarps, 0, stream>>>(p);
  else gemv_kernel<T, 8><<<blocks, 32 * kWarps, 0, stream>>>(p);
}

}  // namespace

void gemv(const Product& p, Type type, void* stream) {
  with_type(type, [&](auto element) { launch<decltype(element)>(p, static_cast<cudaStream_t>(stream)); });
  check_launch("gemv");
}

}  // namespace zoo::cuda
