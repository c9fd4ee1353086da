// A float32 operand that is not split beforehand: 32 of K in shared memory, from there into a warpgroup's registers, and
// there into the three bf16 planes that wgmma takes.
//
// Along K: rows of 32 floats. Along its rows (`mn`): blocks of 32 of them, for each k 32 floats. Both are lines of 128 bytes,
// swizzled as TMA does it, and 64 rows are 8 KiB.
#pragma once

#include "ptx.cuh"
#include "split.cuh"

namespace zoo::cuda::sm90 {

constexpr int kRawDepth = 32;
constexpr int kRawLine = 128;

// Where a thread's first number lies within a strip of 64 rows. Its rows are 16 of the warp and lane / 4, and eight more; of
// every 8 of K it takes the two from 2 (lane % 4). The half of a warp that reads at once meets every bank once; along K by
// odd rows' reading the upper 16 of K first.
template <bool mn>
__device__ __forceinline__ uint32_t raw_offset() {
  const uint32_t warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  if constexpr (mn) {
    const uint32_t chunk = warp % 2 * 4 + g / 4;
    return warp / 2 * (kRawDepth * kRawLine) + 2 * q * kRawLine + (chunk ^ 2 * q) * 16 + g % 4 * 4;
  } else {
    const uint32_t odd = g % 2;
    return (warp * 16 + g) * kRawLine + ((g & 6) ^ odd * 4) * 16 + (q / 2 ^ odd) * 16 + q % 2 * 8;
  }
}

// v[j][r]: of the j-th 8 of K a thread's two, of its row and the row eight below.
template <bool mn>
__device__ __forceinline__ void raw_read(float2 (&v)[4][2], uint32_t strip, uint32_t offset) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (mn) {
        const uint32_t at = strip + j * 8 * kRawLine;
        v[j][r].x = __uint_as_float(ptx::load_shared(at + (offset ^ r * 32)));
        v[j][r].y = __uint_as_float(ptx::load_shared(at + (offset ^ r * 32 ^ 16) + kRawLine));
      } else {
        v[j][r] = ptx::load2_shared(strip + (offset ^ 32 * j) + r * 8 * kRawLine);
      }
    }
  }
  if constexpr (!mn) {
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
  }
}

// planes[step][plane]: A's registers of wgmma for 16 of K, the largest plane first.
template <bool mn>
__device__ __forceinline__ void raw_planes(uint32_t (&planes)[2][3][4], uint32_t strip, uint32_t offset) {
  float2 v[4][2];
  raw_read<mn>(v, strip, offset);
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
