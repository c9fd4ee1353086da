// From plain numbers to a launch: tensor maps, grid, shared memory.
#pragma once

#include "gemm.cuh"
#include "interface.h"

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>

namespace zoo::sm90 {

extern char message[256];

int fail(const char* what, int code);

inline PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const auto found = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(f);
  }();
  return found;
}

// A map of (depth, outer, inner) elements of 2 bytes and of the boxes copied.
inline bool encode(
    CUtensorMap* map, int rank, bool bf16, const void* data, int64_t inner, int64_t outer, int64_t depth, int64_t ld,
    int64_t plane, int box_inner, int box_outer, bool swizzle64 = false) {
  const cuuint64_t sizes[3] = {cuuint64_t(inner), cuuint64_t(outer), cuuint64_t(depth)};
  const cuuint64_t strides[2] = {cuuint64_t(ld) * 2, cuuint64_t(plane) * 2};
  const cuuint32_t box[3] = {cuuint32_t(box_inner), cuuint32_t(box_outer), 1}, ones[3] = {1, 1, 1};
  return encoder()(map, bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, rank,
                   const_cast<void*>(data), sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                   swizzle64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <bool mn>
bool encode_operand(CUtensorMap* map, bool bf16, const zoo_operand& x, int rows, int K, int planes, int tile_rows,
                    int tile_k) {
  const int64_t plane = planes == 1 ? x.ld * (mn ? K : rows) : x.plane;
  if constexpr (mn) return encode(map, 3, bf16, x.data, rows, K, planes, x.ld, plane, 64, tile_k);
  else return encode(map, 3, bf16, x.data, K, rows, planes, x.ld, plane, tile_k, tile_rows, tile_k == 32);
}

template <class C>
int launch(const zoo_problem& p, cudaStream_t stream) {
  constexpr bool bf16 = std::is_same_v<typename C::T, __nv_bfloat16>;
  Args args{};
  args.bias = p.bias;
  args.y_data = p.y;
  args.z_data = p.z;
  args.ld = p.ld;
  args.M = p.M;
  args.N = p.N;
  args.k_blocks = (p.K + C::k - 1) / C::k;
  args.m_tiles = (p.M + C::m - 1) / C::m;
  args.n_tiles = (p.N + C::n - 1) / C::n;
  const int tiles = args.m_tiles * args.n_tiles;
  args.whole = p.spread == 0 ? tiles : std::max(0, tiles / p.sms - (p.spread - 1)) * p.sms;
  const int64_t spread = int64_t(tiles - args.whole) * args.k_blocks;
  args.group = p.group;
  args.act = p.act;
  args.K = p.K;
  args.sums = p.sums;
  args.a_source = {p.a.source, p.a.source_row, p.a.source_k, p.a.flags, p.a.flag_count};
  args.b_source = {p.b.source, p.b.source_row, p.b.source_k, p.b.flags, p.b.flag_count};
  args.staged = C::planes == 1 && p.ld % 8 == 0;
  if (!encode_operand<C::a_mn>(&args.a, bf16, p.a, p.M, p.K, C::planes, C::m, C::k) ||
      !encode_operand<C::b_mn>(&args.b, bf16, p.b, p.N, p.K, C::planes, C::n, C::k)) {
    return fail("operand map", -2);
  }
  if (args.staged) {
    if (!encode(&args.y, 2, bf16, p.y, p.N, p.M, 1, p.ld, 0, 64, 16) ||
        (p.z && !encode(&args.z, 2, bf16, p.z, p.N, p.M, 1, p.ld, 0, 64, 16))) {
      return fail("output map", -3);
    }
  }
  if (C::grad && (!args.staged || args.whole < tiles)) return fail("grad wants whole rows of 16 bytes", -6);
  const int blocks = args.whole > 0 ? std::min(p.sms, args.whole) : int(std::min<int64_t>(p.sms, spread));
  if (spread > 0) {
    if (p.workspace_bytes < zoo_arrival_bytes + int64_t(2) * blocks * C::m * C::n * 4) return fail("workspace", -4);
    args.arrivals = static_cast<unsigned*>(p.workspace);
    args.partial = reinterpret_cast<float*>(static_cast<char*>(p.workspace) + zoo_arrival_bytes);
  }
  static const cudaError_t sized =
      cudaFuncSetAttribute(gemm_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::shared_bytes);
  if (sized != cudaSuccess) return fail("shared memory", sized);
  gemm_kernel<C><<<blocks, C::threads, C::shared_bytes, stream>>>(args);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? 0 : fail("launch", error);
}

}  // namespace zoo::sm90
