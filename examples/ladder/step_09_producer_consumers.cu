// Step 9: a warpgroup that only loads, two that only multiply, and between them a ring of four stages. 128 x 256 a block.
#include "tma.cuh"

namespace ladder {

constexpr int kTileM = 128, kTileN = 256, kStages = 4, kConsumers = 2, kThreads = 128 * (1 + kConsumers);
constexpr int kBytesX = kTileM * kDepth * 2, kBytesW = kTileN * kDepth * 2, kStage = kBytesX + kBytesW;
constexpr int kShared = 1024 + kStages * kStage + 2 * 8 * kStages;

// Where in the ring, and the parity of its barriers this time around.
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void step() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

__global__ void __launch_bounds__(kThreads, 1) kernel(
    const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, bf16* y, int M, int N, int K) {
  extern __shared__ uint8_t shared[];
  const uint32_t stages = (ptx::shared_address(shared) + 1023) / 1024 * 1024;
  const uint32_t full = stages + kStages * kStage, empty = full + 8 * kStages;
  const int m0 = blockIdx.y * kTileM, n0 = blockIdx.x * kTileN, blocks = divided_up(K, kDepth);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::barrier_init(full + 8 * s, 1);                // the producer's announcement, and the bytes
      ptx::barrier_init(empty + 8 * s, kConsumers * 4);  // one lane of each consuming warp
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();

  Ring ring;
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // uniform, for setmaxnreg
  if (group == 0) {
    ptx::fewer_registers<24>();
    if (threadIdx.x == 0) {
      for (int i = 0; i < blocks; ++i, ring.step()) {
        ptx::barrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);  // passes at once the first time around
        const uint32_t at = stages + ring.stage * kStage, barrier = full + 8 * ring.stage;
        ptx::barrier_expect(barrier, kStage);
        ptx::tma_load_2d(at, &x_map, barrier, i * kDepth, m0);
        ptx::tma_load_2d(at + kBytesX, &w_map, barrier, i * kDepth, n0);
      }
    }
  } else {
    ptx::more_registers<240>();
    const int row = (group - 1) * 64;
    float acc[kTileN / 2];
    ptx::forget(acc);
    int before = 0;
    auto release = [&](int stage) {
      if (threadIdx.x % 32 == 0) ptx::barrier_arrive(empty + 8 * stage);
    };
    for (int i = 0; i < blocks; ++i, ring.step()) {
      ptx::barrier_wait(full + 8 * ring.stage, ring.phase);
      const uint32_t at = stages + ring.stage * kStage;
      ptx::pin(acc);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kDepth / 16; ++k) {
        ptx::wgmma<bf16, kTileN, false, false>(acc, operand(at, row, k), operand(at + kBytesX, 0, k), i | k);
      }
      ptx::wgmma_commit();
      ptx::pin(acc);
      ptx::wgmma_wait<1>();  // the products of the stage before are done; these run on while the next are issued
      if (i > 0) release(before);
      before = ring.stage;
    }
    ptx::wgmma_wait<0>();
    ptx::pin(acc);
    store<kTileN>(acc, y, m0 + row, n0, M, N);
  }
}

}  // namespace ladder

LADDER_LAUNCH(x, w, y, M, N, K, stream) {
  using namespace ladder;
  if (K % 8) return "K must be a multiple of 8";
  CUtensorMap x_map, w_map;
  if (const char* error = describe(&x_map, x, M, K, kTileM)) return error;
  if (const char* error = describe(&w_map, w, N, K, kTileN)) return error;
  if (const char* error = allow_shared(kernel, kShared)) return error;
  kernel<<<dim3(divided_up(N, kTileN), divided_up(M, kTileM)), kThreads, kShared, stream>>>(x_map, w_map, y, M, N, K);
  return launched();
}
