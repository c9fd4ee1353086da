// From plain numbers to a launch: tensor maps, grid, shared memory.
#pragma once

#include "gemm.cuh"
#include "sm90.h"

#include "../types.cuh"

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <algorithm>

namespace zoo::cuda::sm90 {

inline PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const auto found = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &result),
          "cuTensorMapEncodeTiled");
    if (!f) throw std::runtime_error("zoo: the driver has no cuTensorMapEncodeTiled; update it");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(f);
  }();
  return found;
}

// A map of (depth, outer, inner) elements and of the boxes copied.
inline void encode(
    CUtensorMap* map, int rank, Type type, const void* data, int64_t inner, int64_t outer, int64_t depth, int64_t ld,
    int64_t plane, int box_inner, int box_outer, bool swizzle64 = false) {
  const CUtensorMapDataType element = type == Type::f32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                      : type == Type::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                           : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const int size = type == Type::f32 ? 4 : 2;
  const cuuint64_t sizes[3] = {cuuint64_t(inner), cuuint64_t(outer), cuuint64_t(depth)};
  const cuuint64_t strides[2] = {cuuint64_t(ld) * size, cuuint64_t(plane) * size};
  const cuuint32_t box[3] = {cuuint32_t(box_inner), cuuint32_t(box_outer), 1}, ones[3] = {1, 1, 1};
  const auto make = [&] {
    return encoder()(
        map, element, rank, const_cast<void*>(data), sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = make();
  if (result == CUDA_ERROR_INVALID_CONTEXT) {  // a thread's first call, and the driver does not bind it by itself
    int device = 0;
    check(cudaGetDevice(&device), "the current device");
    check(cudaSetDevice(device), "the current device");
    result = make();
  }
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("zoo: no tensor map of this matrix, CUDA driver error " + std::to_string(int(result)));
  }
}

template <bool mn>
void encode_operand(
    CUtensorMap* map, Type type, const Operand& x, int rows, int K, int planes, int tile_rows, int tile_k) {
  const int64_t plane = planes == 1 ? x.ld * (mn ? K : rows) : x.plane;
  const int block = tile_rows % 64 == 0 ? 64 : 32;
  if constexpr (mn) encode(map, 3, type, x.data, rows, K, planes, x.ld, plane, block, tile_k, block == 32);
  else encode(map, 3, type, x.data, K, rows, planes, x.ld, plane, tile_k, tile_rows, tile_k == 32);
}

constexpr int64_t kArrivalBytes = int64_t{1} << 14;  // counters of the spread tiles, under two rounds of them

template <class C>
void launch(const Problem& p, cudaStream_t stream) {
  constexpr Type type = std::is_same_v<typename C::T, __nv_bfloat16> ? Type::bf16 : Type::f16;
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
  args.whole = p.spread == 0 ? tiles : std::max(0, tiles / p.processors - (p.spread - 1)) * p.processors;
  // a block without a share between two that have one would be taken for a piece that never comes
  if (args.whole > 0 && int64_t(tiles - args.whole) * args.k_blocks < p.processors) args.whole = tiles;
  const int64_t spread = int64_t(tiles - args.whole) * args.k_blocks;
  args.group = 8;
  args.act = static_cast<int>(C::through ? p.through : p.act);
  args.K = p.K;
  auto source = [](const Operand& x) {
    return Source{x.source, x.source_row, x.source_k, x.flags, x.flag_count, x.saved, static_cast<int>(x.act)};
  };
  args.a_source = source(p.a);
  args.b_source = source(p.b);
  args.turned = p.turned;
  args.staged = C::buffers > 0 && !p.turned && p.ld % (C::raw ? 4 : 8) == 0;
  if (C::raw && C::a_mn) encode(&args.a, 2, Type::f32, p.a.data, p.M, p.K, 1, p.a.ld, 0, 32, C::k);
  else if (C::raw) encode(&args.a, 2, Type::f32, p.a.data, p.K, p.M, 1, p.a.ld, 0, C::k, C::m);
  else encode_operand<C::a_mn>(&args.a, type, p.a, p.M, p.K, C::planes, C::m, C::k);
  encode_operand<C::b_mn>(&args.b, type, p.b, p.N, p.K, C::planes, C::n, C::k);
  if (args.staged) {
    constexpr Type out = C::raw ? Type::f32 : type;
    constexpr int columns = C::raw ? 32 : 64;  // 128 bytes
    encode(&args.y, 2, out, p.y, p.N, p.M, 1, p.ld, 0, columns, 16);
    if constexpr (C::through) encode(&args.z, 2, out, p.saved, p.N, p.M, 1, p.saved_ld, 0, columns, 16);
    else if (p.z) encode(&args.z, 2, out, p.z, p.N, p.M, 1, p.ld, 0, columns, 16);
  }
  args.sums = p.sums;
  if (C::through && (!args.staged || spread > 0)) throw std::runtime_error("zoo: a product goes through act' in rows of 16 bytes, its tiles whole");
  const int blocks = args.whole > 0 ? std::min(p.processors, args.whole) : int(std::min<int64_t>(p.processors, spread));
  if (spread > 0) {
    if (p.workspace_bytes < kArrivalBytes + int64_t(2) * blocks * C::m * C::n * 4 ||
        int64_t(tiles - args.whole) * C::workers * 4 > kArrivalBytes) {
      throw std::runtime_error("zoo: the workspace of a spread product is too small");
    }
    args.arrivals = static_cast<unsigned*>(p.workspace);
    args.partial = reinterpret_cast<float*>(static_cast<char*>(p.workspace) + kArrivalBytes);
  }
  static std::atomic<uint64_t> told{0};
  allow_shared(gemm_kernel<C>, C::shared_bytes, told);
  gemm_kernel<C><<<blocks, C::threads, C::shared_bytes, stream>>>(args);
  check_launch("wgmma product");
}

[[noreturn]] inline void no_such(const Problem& p) {
  throw std::runtime_error("zoo: no wgmma kernel has configuration " + std::to_string(p.config));
}

void wgmma_forward(const Problem&, cudaStream_t);
void wgmma_input_grad(const Problem&, cudaStream_t);
void wgmma_weight_grad(const Problem&, cudaStream_t);
void wgmma_through(const Problem&, cudaStream_t);
void split_forward(const Problem&, cudaStream_t);
void split_input_grad(const Problem&, cudaStream_t);
void split_weight_grad(const Problem&, cudaStream_t);
void raw_forward(const Problem&, cudaStream_t);
void raw_input_grad(const Problem&, cudaStream_t);
void raw_weight_grad(const Problem&, cudaStream_t);

}  // namespace zoo::cuda::sm90
