// What the steps share: their interface, and the last centimetre to memory.
//
// y (M, N) = x (M, K) w (N, K)^T; all three bf16, row-major and dense; sums in float32. Both operands run along K in memory.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace ladder {

using bf16 = __nv_bfloat16;

__host__ __device__ constexpr int divided_up(int a, int b) {
  return (a + b - 1) / b;
}

// Two neighbours of a row as one 32-bit store where both are inside and the address is a multiple of 4.
__device__ __forceinline__ void store_pair(bf16* y, int m, int n, float a, float b, int M, int N) {
  if (m >= M || n >= N) return;
  bf16* to = y + static_cast<int64_t>(m) * N + n;
  if (N % 2 == 0) {
    *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(a, b);
  } else {
    to[0] = __float2bfloat16_rn(a);
    if (n + 1 < N) to[1] = __float2bfloat16_rn(b);
  }
}

// Lets a kernel use more than 48 KiB of shared memory. Returns what went wrong, or null.
template <typename Kernel>
const char* allow_shared(Kernel* kernel, int bytes) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

inline const char* launched() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace ladder

// Each step defines this one function, and ladder.py calls it: launches on `stream` and returns null, or what went wrong.
#define LADDER_LAUNCH(x, w, y, M, N, K, stream)                                                                       \
  extern "C" const char* launch(const ladder::bf16* x, const ladder::bf16* w, ladder::bf16* y, int M, int N, int K, \
                                cudaStream_t stream)
