// float32 products with B as three bf16 planes, and A as it is.
#pragma once

#include "launch.cuh"

namespace zoo::cuda::sm90 {

template <bool a_mn, bool b_mn>
void raw_layout(const Problem& p, cudaStream_t stream) {
  using T = __nv_bfloat16;
  switch (p.config) {
    //                                       m    n   k                workers alone stages promote raw
    case 8: return launch<Config<T, 3, 128, 192, 32, a_mn, b_mn, 2, false, 3, 32, true>>(p, stream);
    case 9: return launch<Config<T, 3, 128, 128, 32, a_mn, b_mn, 2, false, 4, 32, true>>(p, stream);
    case 10: return launch<Config<T, 3, 192, 96, 32, a_mn, b_mn, 3, false, 3, 32, true>>(p, stream);
    case 11: return launch<Config<T, 3, 128, 96, 32, a_mn, b_mn, 2, false, 4, 32, true>>(p, stream);
  }
  no_such(p);
}

}  // namespace zoo::cuda::sm90
