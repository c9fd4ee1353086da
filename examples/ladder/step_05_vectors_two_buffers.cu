// Step 5: 16-byte loads, no bank conflicts in the inner loop, and the next tile on its way while this one is multiplied.
#include "ladder.cuh"

namespace ladder {

constexpr int kTile = 128, kDepth = 16, kThreads = 256;
constexpr int kRow = kTile + 4;

using Buffer = float[kDepth][kRow];

// A thread's share of a tile: 8 of the 16 k of one row. K is a multiple of 8, so it is inside or outside as a whole.
__device__ __forceinline__ uint4 fetch(const bf16* matrix, int i0, int k0, int rows, int K) {
  const int i = i0 + threadIdx.x / 2, k = k0 + threadIdx.x % 2 * 8;
  if (i >= rows || k >= K) return make_uint4(0, 0, 0, 0);
  return __ldg(reinterpret_cast<const uint4*>(matrix + static_cast<int64_t>(i) * K + k));
}

__device__ __forceinline__ void put(Buffer& tile, uint4 raw) {
  const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&raw);
  const int i = threadIdx.x / 2, k = threadIdx.x % 2 * 8;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 v = __bfloat1622float2(pairs[j]);
    tile[k + 2 * j][i] = v.x;
    tile[k + 2 * j + 1][i] = v.y;
  }
}

// Four floats from each half of the tile: lanes then read 16 bytes side by side, where 8 in a row met in the same banks.
__device__ __forceinline__ void pick(float (&v)[8], const float* row, int at) {
  const float4 low = *reinterpret_cast<const float4*>(row + at);
  const float4 high = *reinterpret_cast<const float4*>(row + kTile / 2 + at);
  v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
  v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
}

__global__ void __launch_bounds__(kThreads, 2) kernel(const bf16* x, const bf16* w, bf16* y, int M, int N, int K) {
  __shared__ __align__(16) Buffer x_tile[2], w_tile[2];
  const int tm = threadIdx.x / 16 * 4, tn = threadIdx.x % 16 * 4;
  const int m0 = blockIdx.y * kTile, n0 = blockIdx.x * kTile;
  float sums[8][8] = {};
  put(x_tile[0], fetch(x, m0, 0, M, K));
  put(w_tile[0], fetch(w, n0, 0, N, K));
  __syncthreads();
  int now = 0;
  for (int k0 = 0; k0 < K; k0 += kDepth, now ^= 1) {
    const uint4 next_x = fetch(x, m0, k0 + kDepth, M, K);  // past the end: zeros, which nobody reads
    const uint4 next_w = fetch(w, n0, k0 + kDepth, N, K);
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      float a[8], b[8];
      pick(a, x_tile[now][k], tm);
      pick(b, w_tile[now][k], tn);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
      }
    }
    // One barrier a tile: the buffer written here was last read before the barrier of the tile before.
    put(x_tile[now ^ 1], next_x);
    put(w_tile[now ^ 1], next_w);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int m = m0 + tm + i % 4 + i / 4 * (kTile / 2);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      store_pair(y, m, n0 + tn + j % 4 + j / 4 * (kTile / 2), sums[i][j], sums[i][j + 1], M, N);
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
