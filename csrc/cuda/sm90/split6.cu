// float32 products by three bf16 planes an operand. Compiled once a layout, as wgmma.cu.
#include "launch.cuh"

namespace zoo::sm90 {

constexpr bool a_mn = ZOO_LAYOUT == 2, b_mn = ZOO_LAYOUT >= 1;

#define ZOO_NAME(layout) ZOO_PASTE(split6_, layout)
#define ZOO_PASTE(a, b) a##b
int ZOO_NAME(ZOO_LAYOUT)(const zoo_problem& p, cudaStream_t stream) {
  using T = __nv_bfloat16;
  switch (p.config) {
    //                                       m    n  k              workers alone stages
    case 0: return launch<Config<T, 3, 128, 128, 32, a_mn, b_mn, 2, false, 4>>(p, stream);
    case 1: return launch<Config<T, 3, 128, 192, 32, a_mn, b_mn, 2, false, 3>>(p, stream);
    case 3: return launch<Config<T, 3, 128, 64, 32, a_mn, b_mn, 2, false, 6>>(p, stream);
    case 6: return launch<Config<T, 3, 192, 128, 32, a_mn, b_mn, 3, false, 3>>(p, stream);
  }
  return fail("no such configuration", p.config);
}

}  // namespace zoo::sm90
