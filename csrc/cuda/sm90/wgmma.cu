// bf16 and fp16 products. Compiled once a layout: ZOO_LAYOUT 0: both K-major (forward), 1: B MN-major (dX), 2: both
// MN-major (dW).
#include "launch.cuh"

namespace zoo::sm90 {

constexpr bool a_mn = ZOO_LAYOUT == 2, b_mn = ZOO_LAYOUT >= 1;

template <typename T>
int select(const zoo_problem& p, cudaStream_t stream) {
  switch (p.config) {
    //                                       m    n  k              workers alone stages
    case 1: return launch<Config<T, 1, 128, 192, 64, a_mn, b_mn, 2, true, 4>>(p, stream);
  }
  if constexpr (std::is_same_v<T, __nv_bfloat16>) switch (p.config) {
    case 0: return launch<Config<T, 1, 128, 128, 64, a_mn, b_mn, 2, true, 5>>(p, stream);
    case 2: return launch<Config<T, 1, 128, 256, 64, a_mn, b_mn, 2, false, 4>>(p, stream);
    case 4: return launch<Config<T, 1, 64, 64, 64, a_mn, b_mn, 2, true, 8>>(p, stream);
    case 5: return launch<Config<T, 1, 256, 128, 64, a_mn, b_mn, 2, false, 4>>(p, stream);
#if ZOO_LAYOUT == 1
    case 20: return launch<Config<T, 1, 128, 128, 64, a_mn, b_mn, 2, true, 5, 32, true>>(p, stream);
#endif
  }
  return fail("no such configuration", p.config);
}

#define ZOO_NAME(layout) ZOO_PASTE(wgmma_, layout)
#define ZOO_PASTE(a, b) a##b
int ZOO_NAME(ZOO_LAYOUT)(const zoo_problem& p, cudaStream_t stream) {
  return p.type == 0 ? select<__nv_bfloat16>(p, stream) : select<__half>(p, stream);
}

}  // namespace zoo::sm90
