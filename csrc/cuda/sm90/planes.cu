// Passes before a product: float32 to bf16 planes whose sum is the float32 (to its last bit, where there are three, unless
// it is tiny), and any matrix into dense rows.
#include "sm90.h"
#include "split.cuh"

#include "../types.cuh"

#include <algorithm>

namespace zoo::cuda::sm90 {

constexpr int kThreads = 256, kSpan = 8;  // columns a thread, 16 bytes of a plane
constexpr int kMostBlocks = 132 * 8;

struct Split {
  Planes job[2];
  int blocks[2];
};

__global__ void __launch_bounds__(kThreads) split_kernel(const __grid_constant__ Split work) {
  const bool second = blockIdx.x >= work.blocks[0];
  const Planes& job = work.job[second];
  const int block = second ? blockIdx.x - work.blocks[0] : blockIdx.x;
  const uint32_t spans = (job.cols + kSpan - 1) / kSpan, count = job.rows * spans, step = work.blocks[second] * kThreads;
  const bool quads = job.ld % 4 == 0 && reinterpret_cast<uintptr_t>(job.x) % 16 == 0 && job.cols % kSpan == 0;
  bool special = false;
  for (uint32_t i = block * kThreads + threadIdx.x; i < count; i += 2 * step) {
    float x[2][kSpan];
#pragma unroll
    for (int u = 0; u < 2; ++u) {  // both loads on their way before either is used
      const uint32_t at = min(i + u * step, count - 1), row = at / spans, col = at % spans * kSpan;
      const float* from = job.x + row * job.ld + col;
      if (quads) {
        const float4 low = __ldcs(reinterpret_cast<const float4*>(from));
        const float4 high = __ldcs(reinterpret_cast<const float4*>(from) + 1);
        x[u][0] = low.x, x[u][1] = low.y, x[u][2] = low.z, x[u][3] = low.w;
        x[u][4] = high.x, x[u][5] = high.y, x[u][6] = high.z, x[u][7] = high.w;
      } else {
#pragma unroll
        for (int j = 0; j < kSpan; ++j) x[u][j] = col + j < job.cols ? from[j] : 0.f;
      }
    }
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      if (i + u * step >= count) break;
      const uint32_t row = (i + u * step) / spans, col = (i + u * step) % spans * kSpan;
      __nv_bfloat16* to = static_cast<__nv_bfloat16*>(job.planes) + row * job.planes_ld + col;
      store_planes(x[u], to, job.plane, job.count, special);
    }
  }
  const int any = __syncthreads_or(special);
  if (threadIdx.x == 0) job.flags[block] = any;
}

int32_t split_blocks(int32_t rows, int32_t cols) {
  const int64_t threads = static_cast<int64_t>(rows) * ((cols + kSpan - 1) / kSpan);  // below 2^31
  return static_cast<int32_t>(std::min<int64_t>((threads + kThreads - 1) / kThreads, kMostBlocks));
}

void split(const Planes& first, const Planes& second, void* stream) {
  const Split work{{first, second}, {split_blocks(first.rows, first.cols), split_blocks(second.rows, second.cols)}};
  split_kernel<<<work.blocks[0] + work.blocks[1], kThreads, 0, static_cast<cudaStream_t>(stream)>>>(work);
  check_launch("split");
}

constexpr int kSide = 32, kDown = 8;

// 32 x 32 elements by way of shared memory: read along whichever stride is the smaller, written along rows.
template <typename T>
__global__ void __launch_bounds__(kSide * kDown)
    pack_kernel(const T* from, int64_t row_stride, int64_t col_stride, int64_t rows, int64_t cols, T* to, int64_t ld) {
  __shared__ T tile[kSide][kSide + 1];
  const int64_t row_tiles = (rows + kSide - 1) / kSide;
  const int64_t row = blockIdx.x % row_tiles * kSide, col = blockIdx.x / row_tiles * kSide;
  const bool along_cols = llabs(col_stride) <= llabs(row_stride);
  for (int i = threadIdx.y; i < kSide; i += kDown) {
    const int r = along_cols ? i : threadIdx.x, c = along_cols ? threadIdx.x : i;
    if (row + r < rows && col + c < cols) tile[r][c] = from[(row + r) * row_stride + (col + c) * col_stride];
  }
  __syncthreads();
  for (int i = threadIdx.y; i < kSide; i += kDown) {
    if (row + i < rows && col + threadIdx.x < cols) to[(row + i) * ld + col + threadIdx.x] = tile[i][threadIdx.x];
  }
}

void pack(const Matrix& from, int64_t rows, int64_t cols, void* to, int64_t ld, int element_bytes, void* stream) {
  const int64_t blocks = ((rows + kSide - 1) / kSide) * ((cols + kSide - 1) / kSide);
  if (blocks == 0) return;
  if (blocks > INT32_MAX) throw std::runtime_error("zoo: a matrix has too many tiles to copy in one launch");
  const dim3 block(kSide, kDown);
  const auto s = static_cast<cudaStream_t>(stream);
  const auto grid = static_cast<unsigned>(blocks);
  if (element_bytes == 2) {
    pack_kernel<uint16_t><<<grid, block, 0, s>>>(
        static_cast<const uint16_t*>(from.data), from.row_stride, from.col_stride, rows, cols, static_cast<uint16_t*>(to), ld);
  } else {
    pack_kernel<uint32_t><<<grid, block, 0, s>>>(
        static_cast<const uint32_t*>(from.data), from.row_stride, from.col_stride, rows, cols, static_cast<uint32_t*>(to), ld);
  }
  check_launch("pack");
}

}  // namespace zoo::cuda::sm90
