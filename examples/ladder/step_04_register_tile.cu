// Step 4: a thread owns 8 x 8 outputs in registers, so that 16 loads from shared memory serve 64 multiply-adds.
#include "ladder.cuh"

namespace ladder {

constexpr int kTile = 128, kDepth = 16, kPiece = 8, kThreads = 256;
constexpr int kRow = kTile + 4;  // a multiple of 4 floats, and not of 32

// tile[k][i] = matrix[i0 + i][k0 + k], zero outside: transposed, so that a thread's rows lie side by side.
__device__ __forceinline__ void load(float (*tile)[kRow], const bf16* matrix, int i0, int k0, int rows, int K) {
#pragma unroll
  for (int e = threadIdx.x; e < kTile * kDepth; e += kThreads) {
    const int i = e / kDepth, k = e % kDepth;
    const bool inside = i0 + i < rows && k0 + k < K;
    tile[k][i] = inside ? __bfloat162float(matrix[static_cast<int64_t>(i0 + i) * K + k0 + k]) : 0.f;
  }
}

__global__ void __launch_bounds__(kThreads) kernel(const bf16* x, const bf16* w, bf16* y, int M, int N, int K) {
  __shared__ __align__(16) float x_tile[kDepth][kRow], w_tile[kDepth][kRow];
  const int tm = threadIdx.x / 16 * kPiece, tn = threadIdx.x % 16 * kPiece;
  const int m0 = blockIdx.y * kTile, n0 = blockIdx.x * kTile;
  float sums[kPiece][kPiece] = {};
  for (int k0 = 0; k0 < K; k0 += kDepth) {
    load(x_tile, x, m0, k0, M, K);
    load(w_tile, w, n0, k0, N, K);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      float a[kPiece], b[kPiece];
#pragma unroll
      for (int i = 0; i < kPiece; ++i) a[i] = x_tile[k][tm + i], b[i] = w_tile[k][tn + i];
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
#pragma unroll
        for (int j = 0; j < kPiece; ++j) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
#pragma unroll
    for (int j = 0; j < kPiece; j += 2) store_pair(y, m0 + tm + i, n0 + tn + j, sums[i][j], sums[i][j + 1], M, N);
  }
}

}  // namespace ladder

LADDER_LAUNCH(x, w, y, M, N, K, stream) {
  using namespace ladder;
  kernel<<<dim3(divided_up(N, kTile), divided_up(M, kTile)), kThreads, 0, stream>>>(x, w, y, M, N, K);
  return launched();
}
