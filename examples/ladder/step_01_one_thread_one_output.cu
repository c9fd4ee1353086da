// Step 1: one thread, one output; the lanes of a warp go down a column of y.
#include "ladder.cuh"

namespace ladder {

__global__ void kernel(const bf16* x, const bf16* w, bf16* y, int M, int N, int K) {
  const int m = blockIdx.y * blockDim.x + threadIdx.x;
  const int n = blockIdx.x * blockDim.y + threadIdx.y;
  if (m >= M || n >= N) return;
  float sum = 0.f;
  for (int k = 0; k < K; ++k) {
    // 32 lanes, 32 rows of x: 32 cache lines an instruction. w's element is the same for all.
    sum += __bfloat162float(x[static_cast<int64_t>(m) * K + k]) * __bfloat162float(w[static_cast<int64_t>(n) * K + k]);
  }
  y[static_cast<int64_t>(m) * N + n] = __float2bfloat16_rn(sum);
}

}  // namespace ladder

LADDER_LAUNCH(x, w, y, M, N, K, stream) {
  using namespace ladder;
  const dim3 block(32, 8), grid(divided_up(N, 8), divided_up(M, 32));
  kernel<<<grid, block, 0, stream>>>(x, w, y, M, N, K);
  return launched();
}
