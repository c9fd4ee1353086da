// Step 3: a block copies 32 x 32 tiles of both operands into shared memory, and each of its threads still owns one output.
#include "ladder.cuh"

namespace ladder {

constexpr int kTile = 32;

__global__ void __launch_bounds__(kTile* kTile) kernel(const bf16* x, const bf16* w, bf16* y, int M, int N, int K) {
  __shared__ float x_tile[kTile][kTile];
  __shared__ float w_tile[kTile][kTile + 1];  // the odd row length puts a column's elements into 32 different banks
  const int tx = threadIdx.x, ty = threadIdx.y;
  const int m0 = blockIdx.y * kTile, n0 = blockIdx.x * kTile;
  float sum = 0.f;
  for (int k0 = 0; k0 < K; k0 += kTile) {
    const int k = k0 + tx;  // neighbouring lanes, neighbouring addresses
    x_tile[ty][tx] = m0 + ty < M && k < K ? __bfloat162float(x[static_cast<int64_t>(m0 + ty) * K + k]) : 0.f;
    w_tile[ty][tx] = n0 + ty < N && k < K ? __bfloat162float(w[static_cast<int64_t>(n0 + ty) * K + k]) : 0.f;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kTile; ++j) sum += x_tile[ty][j] * w_tile[tx][j];  // two loads for one multiply-add
    __syncthreads();
  }
  if (m0 + ty < M && n0 + tx < N) y[static_cast<int64_t>(m0 + ty) * N + n0 + tx] = __float2bfloat16_rn(sum);
}

}  // namespace ladder

LADDER_LAUNCH(x, w, y, M, N, K, stream) {
  using namespace ladder;
  kernel<<<dim3(divided_up(N, kTile), divided_up(M, kTile)), dim3(kTile, kTile), 0, stream>>>(x, w, y, M, N, K);
  return launched();
}
