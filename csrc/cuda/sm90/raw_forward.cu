#include "raw_gemm.cuh"

namespace zoo::cuda::sm90 {

void raw_forward(const Problem& p, cudaStream_t stream) {
  raw_layout<false, false>(p, stream);
}

}  // namespace zoo::cuda::sm90
