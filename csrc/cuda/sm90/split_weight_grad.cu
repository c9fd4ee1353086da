#include "split_gemm.cuh"

namespace zoo::cuda::sm90 {

void split_weight_grad(const Problem& p, cudaStream_t stream) {
  split_layout<true, true>(p, stream);
}

}  // namespace zoo::cuda::sm90
