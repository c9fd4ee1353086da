#include "wgmma.cuh"

namespace zoo::cuda::sm90 {

void wgmma_weight_grad(const Problem& p, cudaStream_t stream) {
  wgmma_layout<true, true>(p, stream);
}

}  // namespace zoo::cuda::sm90
