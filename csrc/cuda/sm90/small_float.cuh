// A step of `small` for float32: 64 x 64 by wgmma, six products of bf16 planes. A warpgroup has a half of the step's K. It
// splits a in registers, by truncation, on the way from shared memory to the tensor cores, and b, by rounding, into planes in
// shared memory, which take the place of the step's operands once they are read.
//
// A thread takes of every 16 steps of K the four 4 c .. 4 c + 3 (c = lane % 4), whatever steps wgmma's fragments name them: both
// operands agree. Of a it has the rows 2 g and 2 g + 1 (g = lane / 4) of its warp's 16, of b's rows 8 w + g and 32 below.
#pragma once

#include "epilogue.cuh"
#include "split.cuh"

namespace zoo::cuda::sm90 {

struct FloatTile {
  static constexpr int kSide = 64, kDepth = 32;  // rows and columns; K of a warpgroup
  static constexpr int kPlane = kSide * kDepth * 2;

  float acc[kSide / 2] = {};
  double sums[2] = {};  // over K of the thread's rows of a

  // Chunks of 16 bytes are permuted so that the lanes that read together meet different banks.
  template <bool mn>
  static __device__ __forceinline__ uint32_t place(int outer, int chunk) {
    const int turn = mn ? (outer >> 2 & 3) * 2 : ((outer >> 1 ^ outer) & 1) * 4;
    return static_cast<uint32_t>(outer * (kSide * 4) + (chunk ^ turn) * 16);
  }

  using Rows = float[2][4];

  // Rows `row` and `row` + 1, which is odd.
  template <bool mn>
  static __device__ __forceinline__ void read_neighbours(Rows& v, const uint8_t* from, int row, int k) {
    if constexpr (mn) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 two = *reinterpret_cast<const float2*>(from + place<true>(k + i, row / 4) + row % 4 * 4);
        v[0][i] = two.x, v[1][i] = two.y;
      }
    } else {
      read_row(v[0], from, row, k);
      read_row(v[1], from, row + 1, k);
    }
  }

  // Rows `row` and `row` + 32.
  template <bool mn>
  static __device__ __forceinline__ void read_apart(Rows& v, const uint8_t* from, int row, int k) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (mn) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          v[r][i] = *reinterpret_cast<const float*>(from + place<true>(k + i, (row + 32 * r) / 4) + row % 4 * 4);
        }
      } else {
        read_row(v[r], from, row + 32 * r, k);
      }
    }
  }

  static __device__ __forceinline__ void read_row(float (&v)[4], const uint8_t* from, int row, int k) {
    const float4 four = *reinterpret_cast<const float4*>(from + place<false>(row, k / 4));
    v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
  }

  // `at`: a, b and where `through` what a is multiplied by, act' of it, one after the other. `never` is false. `fetch` is called
  // once.
  template <bool a_mn, bool b_mn, bool through, typename Fetch>
  __device__ __forceinline__ void step(uint8_t* at, int group, int act, bool wants_sums, bool never, const Fetch& fetch) {
    constexpr int operand = kSide * kSide * 4, kPlanes = 3;
    const int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    const int row_a = 16 * warp + 2 * g, row_b = 8 * warp + g;
    Rows a[2], b[2];
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int k = group * kDepth + s * 16 + c * 4;
      read_neighbours<a_mn>(a[s], at, row_a, k);
      read_apart<b_mn>(b[s], at + operand, row_b, k);
      if constexpr (through) {
        Rows z;
        read_neighbours<a_mn>(z, at + 2 * operand, row_a, k);
#pragma unroll
        for (int r = 0; r < 2; ++r) go_through<true>(a[s][r], z[r], act);
      }
    }
    __syncthreads();  // both groups have read
    const uint32_t planes = ptx::shared_address(at) + group * kPlanes * kPlane;
    uint32_t parts[2][kPlanes][4];
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = row_b + 32 * r;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const Parts p = split_pair_rounded(b[s][r][2 * h], b[s][r][2 * h + 1]);
          const uint32_t to = planes + row * (kDepth * 2) + ((2 * s + h) ^ (row >> 1 & 3)) * 16 + c * 4;
          ptx::store_shared(to, __uint_as_float(p.high));
          ptx::store_shared(to + kPlane, __uint_as_float(p.middle));
          ptx::store_shared(to + 2 * kPlane, __uint_as_float(p.low));
        }
      }
    }
    ptx::proxy_fence();
    fetch();  // not before: the fence would wait for it
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const Parts p = split_pair(a[s][r][2 * h], a[s][r][2 * h + 1]);
          parts[s][0][2 * h + r] = p.high, parts[s][1][2 * h + r] = p.middle, parts[s][2][2 * h + r] = p.low;
        }
      }
    }
    if (group == 0) ptx::named_sync(1, 128);  // the planes are there
    else ptx::named_sync(2, 128);

    // Small products first, from zero, and the sum of 32 steps of K added in float: the tensor cores' own accumulator is not
    // exact enough.
    float chunk[kSide / 2];
#pragma unroll
    for (int i = 0; i < 2 * kPlanes; ++i) ptx::pin(parts[i / kPlanes][i % kPlanes]);
    ptx::forget(chunk);
    ptx::wgmma_fence();
#pragma unroll
    for (int product = 0; product < 6; ++product) {
      constexpr int a_part[6] = {2, 0, 1, 1, 0, 0}, b_part[6] = {0, 2, 1, 0, 1, 0};
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const uint64_t tile = ptx::descriptor(planes + b_part[product] * kPlane + s * 32, 0, 8 * kDepth * 2, ptx::Swizzle::b64);
        ptx::wgmma_registers<kSide, false>(chunk, parts[s][a_part[product]], tile, product | s);
      }
    }
    ptx::wgmma_commit();
    if (wants_sums) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float sum = 0.f;
#pragma unroll
        for (int s = 0; s < 2; ++s) sum += (a[s][r][0] + a[s][r][1]) + (a[s][r][2] + a[s][r][3]);
        sums[r] += sum;
      }
    }
    ptx::pin(chunk);
    ptx::wgmma_wait<0>();
    ptx::pin(chunk);
#pragma unroll
    for (int s = 0; s < 2; ++s) ptx::keep(parts[s], never);
#pragma unroll
    for (int j = 0; j < kSide / 2; ++j) acc[j] += chunk[j];
  }

  // Into rows of `pitch` floats; the rows' sums, where wanted, into `row_sums`.
  __device__ __forceinline__ void park(uint32_t to, int pitch, float* row_sums, bool wants_sums) {
    const int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4, c = threadIdx.x % 4, row = 16 * warp + 2 * g;
#pragma unroll
    for (int j = 0; j < kSide / 8; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        ptx::store2_shared(to + ((row + r) * pitch + 8 * j + 2 * c) * 4, acc[4 * j + 2 * r], acc[4 * j + 2 * r + 1]);
      }
    }
    if (!wants_sums) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sums[r] += __shfl_xor_sync(~0u, sums[r], 1);
      sums[r] += __shfl_xor_sync(~0u, sums[r], 2);
      if (c == 0) row_sums[row + r] = static_cast<float>(sums[r]);
    }
  }
};

}  // namespace zoo::cuda::sm90
