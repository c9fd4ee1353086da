// Step 6: tensor cores by mma.sync. Tiles stay bf16 in shared memory, and ldmatrix brings them in the order that mma wants.
#include "ladder.cuh"
#include "mma.cuh"

namespace ladder {

constexpr int kTile = 128, kDepth = 32, kThreads = 256;
constexpr int kRow = kDepth + 8;  // 80 bytes: eight rows of 16 bytes then fall into different banks
constexpr int kWarpM = 64, kWarpN = 32;

__device__ __forceinline__ void load(bf16* tile, const bf16* matrix, int i0, int k0, int rows, int K) {
#pragma unroll
  for (int e = threadIdx.x; e < kTile * kDepth / 8; e += kThreads) {
    const int i = e / (kDepth / 8), k = e % (kDepth / 8) * 8;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (i0 + i < rows && k0 + k < K) {
      v = __ldg(reinterpret_cast<const uint4*>(matrix + static_cast<int64_t>(i0 + i) * K + k0 + k));
    }
    *reinterpret_cast<uint4*>(tile + i * kRow + k) = v;
  }
}

__global__ void __launch_bounds__(kThreads, 2) kernel(const bf16* x, const bf16* w, bf16* y, int M, int N, int K) {
  __shared__ __align__(16) bf16 x_tile[kTile * kRow], w_tile[kTile * kRow];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int wm = warp / 4 * kWarpM, wn = warp % 4 * kWarpN;
  const int m0 = blockIdx.y * kTile, n0 = blockIdx.x * kTile;
  float acc[kWarpM / 16][kWarpN / 8][4] = {};
  for (int k0 = 0; k0 < K; k0 += kDepth) {
    load(x_tile, x, m0, k0, M, K);
    load(w_tile, w, n0, k0, N, K);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      uint32_t a[kWarpM / 16][4], b[kWarpN / 16][4];
#pragma unroll
      for (int i = 0; i < kWarpM / 16; ++i) {  // 16 rows, 16 k: rows 0-7 and 8-15 of k 0-7, then of k 8-15
        ldmatrix(a[i], shared_address(x_tile + (wm + 16 * i + lane % 16) * kRow + k + lane / 16 * 8));
      }
#pragma unroll
      for (int j = 0; j < kWarpN / 16; ++j) {  // 16 columns, 16 k: k 0-7 and 8-15 of columns 0-7, then of columns 8-15
        ldmatrix(b[j], shared_address(w_tile + (wn + 16 * j + lane / 16 * 8 + lane % 8) * kRow + k + lane / 8 % 2 * 8));
      }
#pragma unroll
      for (int i = 0; i < kWarpM / 16; ++i) {
#pragma unroll
        for (int j = 0; j < kWarpN / 8; ++j) mma(acc[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kWarpM / 16; ++i) {
#pragma unroll
    for (int j = 0; j < kWarpN / 8; ++j) {
      const int m = m0 + wm + 16 * i + lane / 4, n = n0 + wn + 8 * j + lane % 4 * 2;
      store_pair(y, m, n, acc[i][j][0], acc[i][j][1], M, N);
      store_pair(y, m + 8, n, acc[i][j][2], acc[i][j][3], M, N);
    }
  }
}

}  // namespace ladder

LADDER_LAUNCH(x, w, y, M, N, K, stream) {
  using namespace ladder;
  if (K % 8) return "K must be a multiple of 8";
  kernel<<<dim3(divided_up(N, kTile), divided_up(M, kTile)), kThreads, 0, stream>>>(x, w, y, M, N, K);
  return launched();
}
