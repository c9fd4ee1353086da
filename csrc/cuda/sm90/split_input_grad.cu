#include "split_gemm.cuh"

namespace zoo::cuda::sm90 {

void split_input_grad(const Problem& p, cudaStream_t stream) {
  split_layout<false, true>(p, stream);
}

}  // namespace zoo::cuda::sm90
