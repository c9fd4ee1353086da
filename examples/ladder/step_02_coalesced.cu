// Step 2: a warp an output; its lanes lie side by side along K, 16 bytes each, and add up across the warp at the end.
#include "ladder.cuh"

namespace ladder {

constexpr int kWarps = 8;

__device__ __forceinline__ float dot8(uint4 a, uint4 b) {
  const auto* p = reinterpret_cast<const __nv_bfloat162*>(&a);
  const auto* q = reinterpret_cast<const __nv_bfloat162*>(&b);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 u = __bfloat1622float2(p[i]), v = __bfloat1622float2(q[i]);
    sum = fmaf(u.x, v.x, sum);
    sum = fmaf(u.y, v.y, sum);
  }
  return sum;
}

// K a multiple of 8.
__global__ void __launch_bounds__(32 * kWarps) kernel(const bf16* x, const bf16* w, bf16* y, int M, int N, int K) {
  const int lane = threadIdx.x, n = blockIdx.x * kWarps + threadIdx.y, m = blockIdx.y;
  if (n >= N) return;  // a whole warp
  const auto* a = reinterpret_cast<const uint4*>(x + static_cast<int64_t>(m) * K);
  const auto* b = reinterpret_cast<const uint4*>(w + static_cast<int64_t>(n) * K);
  float sum = 0.f;
#pragma unroll 4
  for (int i = lane; i < K / 8; i += 32) sum += dot8(__ldg(a + i), __ldg(b + i));  // 512 bytes an instruction
#pragma unroll
  for (int over = 16; over > 0; over /= 2) sum += __shfl_xor_sync(~0u, sum, over);
  if (lane == 0) y[static_cast<int64_t>(m) * N + n] = __float2bfloat16_rn(sum);
}

}  // namespace ladder

LADDER_LAUNCH(x, w, y, M, N, K, stream) {
  using namespace ladder;
  if (K % 8) return "K must be a multiple of 8";
  kernel<<<dim3(divided_up(N, kWarps), M), dim3(32, kWarps), 0, stream>>>(x, w, y, M, N, K);
  return launched();
}
