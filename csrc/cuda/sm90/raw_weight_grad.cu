#include "raw_gemm.cuh"

namespace zoo::cuda::sm90 {

void raw_weight_grad(const Problem& p, cudaStream_t stream) {
  raw_layout<true, true>(p, stream);
}

}  // namespace zoo::cuda::sm90
