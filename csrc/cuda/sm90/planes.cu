// float32 to three bf16 planes whose sum is the float32, to its last bit unless it is tiny; and the C interface.
#include "interface.h"
#include "split.cuh"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>

namespace zoo::sm90 {

constexpr int kThreads = 256, kSpan = 8;  // columns a thread, 16 bytes of a plane
constexpr int kMostBlocks = 132 * 8;

struct Split {
  zoo_planes job[2];
  int blocks[2];
};

__global__ void __launch_bounds__(kThreads) split_kernel(const __grid_constant__ Split work) {
  const bool second = blockIdx.x >= work.blocks[0];
  const zoo_planes& job = work.job[second];
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
        const float4 low = __ldcs(reinterpret_cast<const float4*>(from)), high = __ldcs(reinterpret_cast<const float4*>(from) + 1);
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
      store_planes(x[u], static_cast<__nv_bfloat16*>(job.planes) + row * job.planes_ld + col, job.plane, special);
    }
  }
  const int any = __syncthreads_or(special);
  if (threadIdx.x == 0) job.flags[block] = any;
}

char message[256];
int fail(const char* what, int code) {
  snprintf(message, sizeof message, "%s: %d", what, code);
  return code == 0 ? -1 : code;
}

int small_product(const zoo_problem&, cudaStream_t);
int wgmma_0(const zoo_problem&, cudaStream_t);
int wgmma_1(const zoo_problem&, cudaStream_t);
int wgmma_2(const zoo_problem&, cudaStream_t);
int split6_0(const zoo_problem&, cudaStream_t);
int split6_1(const zoo_problem&, cudaStream_t);
int split6_2(const zoo_problem&, cudaStream_t);

}  // namespace zoo::sm90

using namespace zoo::sm90;

extern "C" {

int zoo_split_blocks(int32_t rows, int32_t cols) {
  const int64_t threads = static_cast<int64_t>(rows) * ((cols + kSpan - 1) / kSpan);  // below 2^32
  return static_cast<int>(std::min<int64_t>((threads + kThreads - 1) / kThreads, kMostBlocks));
}

int zoo_split(const zoo_planes* first, const zoo_planes* second, void* stream) {
  Split work{};
  work.job[0] = *first;
  work.blocks[0] = zoo_split_blocks(first->rows, first->cols);
  if (second) {
    work.job[1] = *second;
    work.blocks[1] = zoo_split_blocks(second->rows, second->cols);
  }
  split_kernel<<<work.blocks[0] + work.blocks[1], kThreads, 0, static_cast<cudaStream_t>(stream)>>>(work);
  return cudaGetLastError();
}

int zoo_gemm(const zoo_problem* p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  if (p->config >= 100) return small_product(*p, s);
  const int layout = p->a.mn ? 2 : p->b.mn ? 1 : 0;
  using Launcher = int (*)(const zoo_problem&, cudaStream_t);
  static const Launcher launchers[2][3] = {{wgmma_0, wgmma_1, wgmma_2}, {split6_0, split6_1, split6_2}};
  return launchers[p->type == 2][layout](*p, s);
}

const char* zoo_message() {
  return message;
}
}
