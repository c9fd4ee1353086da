#include "wgmma.cuh"

namespace zoo::cuda::sm90 {

void wgmma_input_grad(const Problem& p, cudaStream_t stream) {
  wgmma_layout<false, true>(p, stream);
}

}  // namespace zoo::cuda::sm90
