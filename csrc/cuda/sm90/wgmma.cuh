// bf16 and fp16 products, by layout: a along K and b along K (forward), b along N (input gradient), both along the rows
// (weight gradient). A file compiles one layout.
#pragma once

#include "launch.cuh"

namespace zoo::cuda::sm90 {

template <typename T, bool a_mn, bool b_mn>
void wgmma_of(const Problem& p, cudaStream_t stream) {
  switch (p.config) {
    //                                       m    n  k              workers alone stages
    case 0: return launch<Config<T, 1, 128, 128, 64, a_mn, b_mn, 2, true, 5>>(p, stream);
    case 1: return launch<Config<T, 1, 128, 192, 64, a_mn, b_mn, 2, true, 4>>(p, stream);
  }
  if constexpr (std::is_same_v<T, __nv_bfloat16>) switch (p.config) {
    case 2: return launch<Config<T, 1, 128, 256, 64, a_mn, b_mn, 2, false, 4>>(p, stream);
    case 4: return launch<Config<T, 1, 64, 64, 64, a_mn, b_mn, 2, true, 8>>(p, stream);
    case 5: return launch<Config<T, 1, 256, 128, 64, a_mn, b_mn, 2, false, 4>>(p, stream);
  }
  no_such(p);
}

template <bool a_mn, bool b_mn>
void wgmma_layout(const Problem& p, cudaStream_t stream) {
  if (p.type == Type::bf16) wgmma_of<__nv_bfloat16, a_mn, b_mn>(p, stream);
  else wgmma_of<__half, a_mn, b_mn>(p, stream);
}

}  // namespace zoo::cuda::sm90
