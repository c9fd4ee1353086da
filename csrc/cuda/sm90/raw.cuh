// A float32 operand that is not split beforehand: rows of 32 floats in shared memory, from there into a warpgroup's
// registers, and there into the three bf16 planes that wgmma takes.
#pragma once

#include "ptx.cuh"
#include "split.cuh"

namespace zoo::cuda::sm90 {

constexpr int kRawDepth = 32;  // floats of a row: 128 bytes, swizzled as TMA does it

// Where a thread reads its rows (16 of the warp and lane / 4, and eight below) within a strip of 64: of every 8 floats the
// two from 2 (lane % 4), the four pairs at this offset with 0, 32, 64 and 96 flipped into it. Odd rows read the upper 16
// floats first: then the half of a warp that reads at once meets every bank once.
__device__ __forceinline__ uint32_t raw_offset() {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const uint32_t row = threadIdx.x % 128 / 32 * 16 + g, odd = g % 2;
  return row * kRawDepth * 4 + ((g & 6) ^ odd * 4) * 16 + (q / 2 ^ odd) * 16 + q % 2 * 8;
}

// planes[step][plane]: A's registers of wgmma for 16 of K, the largest plane first.
__device__ __forceinline__ void raw_planes(uint32_t (&planes)[2][3][4], uint32_t strip, uint32_t offset) {
  float2 v[4][2];  // [8 floats of K][row, row + 8]
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) v[j][r] = ptx::load2_shared(strip + (offset ^ 32 * j) + r * 8 * kRawDepth * 4);
  }
  const bool odd = threadIdx.x & 4;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 first = v[j][r], second = v[j + 2][r];
      v[j][r] = odd ? second : first;
      v[j + 2][r] = odd ? first : second;
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Parts parts = split_pair(v[j][r].x, v[j][r].y);
      planes[j / 2][0][j % 2 * 2 + r] = parts.high;
      planes[j / 2][1][j % 2 * 2 + r] = parts.middle;
      planes[j / 2][2][j % 2 * 2 + r] = parts.low;
    }
  }
}

}  // namespace zoo::cuda::sm90
