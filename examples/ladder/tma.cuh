// A matrix as the copy engine sees it, and a tile of it as wgmma sees it.
#pragma once

#include "ladder.cuh"
#include "ptx.cuh"  // csrc/cuda/sm90: mbarrier, TMA and wgmma, one wrapper an instruction

#include <cudaTypedefs.h>

namespace ladder {

namespace ptx = zoo::cuda::ptx;

constexpr int kDepth = 64;  // of K, a stage: 128 bytes, one swizzled row

// Describes a matrix (rows, K) to the copy engine, to be copied in boxes of box_rows x 64. In shared memory a box's row r
// is 128 bytes at r * 128, its 16-byte pieces in the order piece ^ (r % 8): so a column of pieces, which is what wgmma
// reads, falls into all the banks. Rows and columns outside the matrix arrive as zeros.
inline const char* describe(CUtensorMap* map, const bf16* matrix, int rows, int K, int box_rows) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result) != cudaSuccess ||
      !found) {
    return "the driver has no cuTensorMapEncodeTiled";
  }
  const cuuint64_t sizes[2] = {cuuint64_t(K), cuuint64_t(rows)}, strides[1] = {cuuint64_t(K) * sizeof(bf16)};
  const cuuint32_t box[2] = {kDepth, cuuint32_t(box_rows)}, ones[2] = {1, 1};
  const CUresult error = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found)(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<bf16*>(matrix), sizes, strides, box, ones,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return error == CUDA_SUCCESS ? nullptr : "the driver makes no tensor map of this matrix";
}

// wgmma's name for rows from `row` and 16 k from 16 * step of a box at `at`: groups of 8 rows are 1024 bytes apart.
__device__ __forceinline__ uint64_t operand(uint32_t at, int row, int step) {
  return ptx::descriptor(at + row * kDepth * 2 + step * 32, 0, 1024, ptx::Swizzle::b128);
}

// The 64 x n accumulator of a warpgroup, to memory: eight columns at a time it is mma.sync's.
template <int n>
__device__ __forceinline__ void store(const float (&acc)[n / 2], bf16* y, int m0, int n0, int M, int N) {
  const int lane = threadIdx.x % 32, m = m0 + threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < n / 8; ++j) {
    const int column = n0 + 8 * j + lane % 4 * 2;
    store_pair(y, m, column, acc[4 * j], acc[4 * j + 1], M, N);
    store_pair(y, m + 8, column, acc[4 * j + 2], acc[4 * j + 3], M, N);
  }
}

}  // namespace ladder
