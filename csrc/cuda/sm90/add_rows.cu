// Sums over the rows of a matrix of floats, in double and always in the same order: one launch for any number of rows.
//
// A cluster of blocks shares 32 columns, every block with its share of the rows; the first adds up what the others have.
#include "ptx.cuh"
#include "sm90.h"

#include "../types.cuh"

namespace zoo::cuda::sm90 {

constexpr int kColumns = 32, kWide = 4;  // a block's, a thread's
constexpr int kLanes = kColumns / kWide, kThreads = 256, kRows = kThreads / kLanes;
constexpr int kBlocks = 8;                                // a cluster's
constexpr int kStep = kBlocks * kRows, kFlying = 4;       // rows of a cluster at once; of a thread on their way

template <typename T>
__global__ void __launch_bounds__(kThreads) add_rows_kernel(const float* rows, int M, int N, T* sums) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ double parts[kRows][kColumns];
  __shared__ float total[kColumns];
  const int lane = threadIdx.x % kLanes, row = threadIdx.x / kLanes, rank = blockIdx.x % kBlocks;
  const int first = blockIdx.x / kBlocks * kColumns, column = first + kWide * lane;
  double sum[kWide] = {};
  if (column < N) {
    for (int m0 = rank * kRows + row; m0 < M; m0 += kStep * kFlying) {
      float4 v[kFlying];
#pragma unroll
      for (int u = 0; u < kFlying; ++u) {
        const int64_t m = min(m0 + u * kStep, M - 1);
        v[u] = __ldcg(reinterpret_cast<const float4*>(rows + m * N + column));
      }
#pragma unroll
      for (int u = 0; u < kFlying; ++u) {
        if (m0 + u * kStep >= M) break;
        sum[0] += v[u].x, sum[1] += v[u].y, sum[2] += v[u].z, sum[3] += v[u].w;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kWide; ++i) parts[row][kWide * lane + i] = sum[i];
  __syncthreads();
  const int mine = threadIdx.x;
  if (mine < kColumns) {
    double all = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) all += parts[r][mine];
    total[mine] = static_cast<float>(all);
  }
  ptx::cluster_sync();
  if (rank == 0 && mine < kColumns && first + mine < N) {
    double all = 0;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) all += __int_as_float(ptx::load_remote(ptx::shared_address(total + mine), b));
    sums[first + mine] = narrow<T>(static_cast<float>(all));
  }
  ptx::cluster_sync();  // the first still reads
#endif
}

template <typename T>
void launch(const float* rows, int32_t M, int32_t N, void* sums, void* stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned((N + kColumns - 1) / kColumns * kBlocks));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = kBlocks;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, add_rows_kernel<T>, rows, M, N, static_cast<T*>(sums)), "sums of rows");
}

void add_rows(const float* rows, int32_t M, int32_t N, void* sums, Type type, void* stream) {
  if (type == Type::bf16) launch<__nv_bfloat16>(rows, M, N, sums, stream);
  else if (type == Type::f16) launch<__half>(rows, M, N, sums, stream);
  else launch<float>(rows, M, N, sums, stream);
}

}  // namespace zoo::cuda::sm90
