// dY W act'(saved) of 2-byte types: the input gradient's layout, with a gradient's epilogue.
#include "through.cuh"

#include "launch.cuh"

namespace zoo::cuda::sm90 {

template <typename T>
void through_of(const Problem& p, cudaStream_t stream) {
  switch (p.config) {
    case 0: return launch<Config<T, 1, 128, 128, 64, false, true, 2, true, 5, 32, false, true>>(p, stream);
    case 1: return launch<Config<T, 1, 128, 192, 64, false, true, 2, true, 4, 32, false, true>>(p, stream);
  }
  no_such(p);
}

// four warps with rows of their own in a tile of 128
int32_t through_rows(int32_t M) {
  return 4 * ((M + 127) / 128);
}

void wgmma_through(const Problem& p, cudaStream_t stream) {
  if (p.type == Type::bf16) through_of<__nv_bfloat16>(p, stream);
  else through_of<__half>(p, stream);
}

}  // namespace zoo::cuda::sm90
