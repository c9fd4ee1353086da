// A step of `small` for 2-byte types: 64 x 64 by mma.sync. Four warps have 32 x 32 each, and four more the other half of the
// step's K.
//
// Every thread takes the rows 4 g .. 4 g + 3 and of K 4 c .. 4 c + 3 (g = lane / 4, c = lane % 4), whatever rows and steps of K
// mma's fragments name them: the product does not care, as long as both operands agree. So everything is read in vectors,
// operands along K and along rows alike, and a thread ends with 4 x 8 neighbours of the output.
#pragma once

#include "epilogue.cuh"

#include "../mma.cuh"

namespace zoo::cuda::sm90 {

template <typename T>
struct HalfTile {
  static constexpr int kSide = 64, kDepth = 32;  // rows and columns; K of four warps
  static constexpr int kBeside = 2;  // columns' fragments at once: 2 x kBeside chains of products that do not wait for each other

  float acc[2][4][4] = {};  // [16 rows][8 columns][mma's registers]
  double sums[4] = {};      // over K of the thread's rows of a

  // Chunks of 16 bytes are permuted so that the lanes that read together meet different banks.
  template <bool mn>
  static __device__ __forceinline__ uint32_t place(int outer, int chunk) {
    return static_cast<uint32_t>(outer * (kSide * 2) + (chunk ^ (outer >> 2 & 3) * 2) * 16);
  }

  // Four rows, four steps of K, two of these in a word.
  using Raw = uint32_t[4][2];

  template <bool mn>
  static __device__ __forceinline__ void read(Raw& v, const uint8_t* from, int row0, int k0) {
    const int lane = threadIdx.x % 32, row = row0 + lane / 4 * 4, k = k0 + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int outer = (mn ? k : row) + i, inner = mn ? row : k;
      const uint2 q = *reinterpret_cast<const uint2*>(from + place<mn>(outer, inner / 8) + inner % 8 * 2);
      v[i][0] = q.x, v[i][1] = q.y;
    }
    if constexpr (mn) {  // v[step][rows / 2] until here
      Raw w;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) w[i][h] = __byte_perm(v[2 * h][i / 2], v[2 * h + 1][i / 2], i % 2 ? 0x7632 : 0x5410);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i][0] = w[i][0], v[i][1] = w[i][1];
    }
  }

  static __device__ __forceinline__ void widened(float (&row)[4], const Raw& v, int i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint16_t half = static_cast<uint16_t>(v[i][j / 2] >> (j % 2 * 16));
      T x;
      memcpy(&x, &half, 2);
      row[j] = widen(x);
    }
  }

  // `at`: a, b and where `through` what a is multiplied by, act' of it, one after the other.
  template <bool a_mn, bool b_mn, bool through, typename Fetch>
  __device__ __forceinline__ void step(uint8_t* at, int group, int act, bool wants_sums, bool, const Fetch& fetch) {
    fetch();
    constexpr int operand = kSide * kSide * 2;
    const int warp = threadIdx.x / 32, wm = warp % 2 * 32, wn = warp / 2 % 2 * 32;
    float sum[4] = {};
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      const int k0 = group * kDepth + k;
      Raw a, b;
      read<a_mn>(a, at, wm, k0);
      read<b_mn>(b, at + operand, wn, k0);
      if constexpr (through) {
        Raw z;
        read<a_mn>(z, at + 2 * operand, wm, k0);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float g[4], x[4];
          widened(g, a, i);
          widened(x, z, i);
          go_through<false>(g, x, act);
#pragma unroll
          for (int j = 0; j < 4; ++j) sum[i] += g[j];
          a[i][0] = pack<T>(g[0], g[1]), a[i][1] = pack<T>(g[2], g[3]);
        }
      } else if (wants_sums) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float g[4];
          widened(g, a, i);
          sum[i] += (g[0] + g[1]) + (g[2] + g[3]);
        }
      }
      uint32_t af[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) af[i / 2][i % 2] = a[i][0], af[i / 2][2 + i % 2] = a[i][1];
#pragma unroll
      for (int pair = 0; pair < 4; pair += kBeside) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
          for (int n = 0; n < kBeside; ++n) multiply<T>(acc[m][pair + n], af[m], b[pair + n][0], b[pair + n][1]);
        }
      }
    }
    if (wants_sums) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] += sum[i];
    }
  }

  // Into rows of `pitch` floats; the rows' sums, where wanted, into `row_sums`.
  __device__ __forceinline__ void park(uint32_t to, int pitch, float* row_sums, bool wants_sums) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, wm = warp % 2 * 32, wn = warp / 2 % 2 * 32;
    const int row = wm + lane / 4 * 4, column = wn + lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t at = to + ((row + i) * pitch + column) * 4;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = i % 2 * 2 + h;
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at + h * 16), "f"(acc[i / 2][0][r]), "f"(acc[i / 2][1][r]),
                     "f"(acc[i / 2][2][r]), "f"(acc[i / 2][3][r])
                     : "memory");
      }
    }
    if (!wants_sums) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[i] += __shfl_xor_sync(~0u, sums[i], 1);
      sums[i] += __shfl_xor_sync(~0u, sums[i], 2);
      if (wn == 0 && lane % 4 == 0) row_sums[row + i] = static_cast<float>(sums[i]);
    }
  }
};

}  // namespace zoo::cuda::sm90
