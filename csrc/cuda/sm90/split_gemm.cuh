// float32 products by two or three bf16 planes an operand; layouts as in wgmma.cuh.
#pragma once

#include "launch.cuh"

namespace zoo::cuda::sm90 {

template <bool a_mn, bool b_mn>
void split_layout(const Problem& p, cudaStream_t stream) {
  using T = __nv_bfloat16;
  if (p.planes == 3) switch (p.config) {
    //                                       m    n  k              workers alone stages
    case 0: return launch<Config<T, 3, 128, 128, 32, a_mn, b_mn, 2, false, 4>>(p, stream);
    case 1: return launch<Config<T, 3, 128, 192, 32, a_mn, b_mn, 2, false, 3>>(p, stream);
    case 3: return launch<Config<T, 3, 128, 64, 32, a_mn, b_mn, 2, false, 6>>(p, stream);
    case 6: return launch<Config<T, 3, 192, 128, 32, a_mn, b_mn, 3, false, 3>>(p, stream);
  }
  if (p.planes == 2) switch (p.config) {
    case 0: return launch<Config<T, 2, 128, 128, 32, a_mn, b_mn, 2, false, 6>>(p, stream);
    case 1: return launch<Config<T, 2, 128, 192, 32, a_mn, b_mn, 2, false, 5>>(p, stream);
  }
  no_such(p);
}

}  // namespace zoo::cuda::sm90
