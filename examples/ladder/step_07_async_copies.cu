// Step 7: cp.async keeps three tiles on their way while one is multiplied, and a warp's tile is 64 x 64.
#include "ladder.cuh"
#include "mma.cuh"

namespace ladder {

constexpr int kTile = 128, kDepth = 32, kThreads = 128, kStages = 4;
constexpr int kRow = kDepth + 8;
constexpr int kWarp = 64;  // a warp's rows and columns: twice the products of 64 x 32 for 4/3 of the shared-memory reads
constexpr int kOperand = kTile * kRow, kShared = kStages * 2 * kOperand * int(sizeof(bf16));

__device__ __forceinline__ void load(bf16* tile, const bf16* matrix, int i0, int k0, int rows, int K) {
#pragma unroll
  for (int e = threadIdx.x; e < kTile * kDepth / 8; e += kThreads) {
    const int i = e / (kDepth / 8), k = e % (kDepth / 8) * 8;
    const bool inside = i0 + i < rows && k0 + k < K;
    copy_async(shared_address(tile + i * kRow + k), inside ? matrix + static_cast<int64_t>(i0 + i) * K + k0 + k : matrix,
               inside);
  }
}

__global__ void __launch_bounds__(kThreads, 2) kernel(const bf16* x, const bf16* w, bf16* y, int M, int N, int K) {
  extern __shared__ __align__(16) bf16 shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int wm = warp / 2 * kWarp, wn = warp % 2 * kWarp;
  const int m0 = blockIdx.y * kTile, n0 = blockIdx.x * kTile, blocks = divided_up(K, kDepth);
  auto fill = [&](int block) {
    bf16* stage = shared + block % kStages * 2 * kOperand;
    if (block < blocks) {
      load(stage, x, m0, block * kDepth, M, K);
      load(stage + kOperand, w, n0, block * kDepth, N, K);
    }
    copy_commit();  // also an empty group, so that counting groups counts tiles
  };
  for (int block = 0; block < kStages - 1; ++block) fill(block);

  float acc[kWarp / 16][kWarp / 8][4] = {};
  for (int block = 0; block < blocks; ++block) {
    copy_wait<kStages - 2>();  // this thread's copies of the tile are there,
    __syncthreads();           // now everybody's, and everybody has done with the tile before, whose stage is
    fill(block + kStages - 1);  // filled again
    const bf16* x_tile = shared + block % kStages * 2 * kOperand;
    const bf16* w_tile = x_tile + kOperand;
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      uint32_t a[kWarp / 16][4], b[kWarp / 16][4];
#pragma unroll
      for (int i = 0; i < kWarp / 16; ++i) {
        ldmatrix(a[i], shared_address(x_tile + (wm + 16 * i + lane % 16) * kRow + k + lane / 16 * 8));
      }
#pragma unroll
      for (int j = 0; j < kWarp / 16; ++j) {
        ldmatrix(b[j], shared_address(w_tile + (wn + 16 * j + lane / 16 * 8 + lane % 8) * kRow + k + lane / 8 % 2 * 8));
      }
#pragma unroll
      for (int i = 0; i < kWarp / 16; ++i) {
#pragma unroll
        for (int j = 0; j < kWarp / 8; ++j) mma(acc[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kWarp / 16; ++i) {
#pragma unroll
    for (int j = 0; j < kWarp / 8; ++j) {
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
  if (const char* error = allow_shared(kernel, kShared)) return error;
  kernel<<<dim3(divided_up(N, kTile), divided_up(M, kTile)), kThreads, kShared, stream>>>(x, w, y, M, N, K);
  return launched();
}
