#include "split_gemm.cuh"

namespace zoo::cuda::sm90 {

void split_forward(const Problem& p, cudaStream_t stream) {
  split_layout<false, false>(p, stream);
}

}  // namespace zoo::cuda::sm90
