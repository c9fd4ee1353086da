#include "wgmma.cuh"

namespace zoo::cuda::sm90 {

void wgmma_forward(const Problem& p, cudaStream_t stream) {
  wgmma_layout<false, false>(p, stream);
}

}  // namespace zoo::cuda::sm90
