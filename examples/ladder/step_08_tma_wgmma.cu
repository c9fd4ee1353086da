// Step 8: one thread asks the copy engine for whole tiles, and one warpgroup multiplies them where they lie (wgmma).
#include "tma.cuh"

namespace ladder {

constexpr int kTile = 128, kThreads = 128;
constexpr int kOperand = kTile * kDepth * 2, kShared = 1024 + 2 * kOperand + 8;

__global__ void __launch_bounds__(kThreads) kernel(
    const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, bf16* y, int M, int N, int K) {
  extern __shared__ uint8_t shared[];
  const uint32_t x_at = (ptx::shared_address(shared) + 1023) / 1024 * 1024;  // the swizzle counts from 1024
  const uint32_t w_at = x_at + kOperand, full = w_at + kOperand;
  const int m0 = blockIdx.y * kTile, n0 = blockIdx.x * kTile;
  if (threadIdx.x == 0) {
    ptx::barrier_init(full, 1);
    ptx::barrier_init_fence();
  }
  __syncthreads();

  float acc[2][kTile / 2];  // two strips of 64 rows
  ptx::forget(acc[0]);
  ptx::forget(acc[1]);
  uint32_t phase = 0;
  for (int k0 = 0; k0 < K; k0 += kDepth, phase ^= 1) {
    if (threadIdx.x == 0) {
      ptx::barrier_expect(full, 2 * kOperand);  // zeros from outside the matrix count too
      ptx::tma_load_2d(x_at, &x_map, full, k0, m0);
      ptx::tma_load_2d(w_at, &w_map, full, k0, n0);
    }
    ptx::barrier_wait(full, phase);
    __syncwarp();  // wgmma wants the whole warp, also the one whose first lane was busy
    ptx::pin(acc[0]);
    ptx::pin(acc[1]);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        ptx::wgmma<bf16, kTile, false, false>(acc[s], operand(x_at, 64 * s, k), operand(w_at, 0, k), k0 | k);
      }
    }
    ptx::wgmma_commit();
    ptx::pin(acc[0]);
    ptx::pin(acc[1]);
    ptx::wgmma_wait<0>();
    ptx::pin(acc[0]);
    ptx::pin(acc[1]);
    __syncthreads();  // all four warps have read the tile before it is overwritten
  }
  store<kTile>(acc[0], y, m0, n0, M, N);
  store<kTile>(acc[1], y, m0 + 64, n0, M, N);
}

}  // namespace ladder

LADDER_LAUNCH(x, w, y, M, N, K, stream) {
  using namespace ladder;
  if (K % 8) return "K must be a multiple of 8";
  CUtensorMap x_map, w_map;
  if (const char* error = describe(&x_map, x, M, K, kTile)) return error;
  if (const char* error = describe(&w_map, w, N, K, kTile)) return error;
  if (const char* error = allow_shared(kernel, kShared)) return error;
  kernel<<<dim3(divided_up(N, kTile), divided_up(M, kTile)), kThreads, kShared, stream>>>(x_map, w_map, y, M, N, K);
  return launched();
}
