// Which kernel a problem goes to, by its type and layout.
#include "launch.cuh"

namespace zoo::cuda::sm90 {

int64_t arrival_bytes() {
  return kArrivalBytes;
}

void product(const Problem& p, void* stream) {
  using Launcher = void (*)(const Problem&, cudaStream_t);
  static const Launcher launchers[2][3] = {
      {wgmma_forward, wgmma_input_grad, wgmma_weight_grad}, {split_forward, split_input_grad, split_weight_grad}};
  if (p.a.mn && !p.b.mn) throw std::runtime_error("zoo: no kernel for a along M with b along K");
  if (p.turned && !(p.raw_a && p.a.mn)) throw std::runtime_error("zoo: no kernel turns this product");
  if (p.saved) {
    if (p.planes > 1 || p.a.mn || !p.b.mn) throw std::runtime_error("zoo: no kernel goes through act' in this layout");
    return wgmma_through(p, static_cast<cudaStream_t>(stream));
  }
  if (p.raw_a) {
    return (p.a.mn ? raw_weight_grad : p.b.mn ? raw_input_grad : raw_forward)(p, static_cast<cudaStream_t>(stream));
  }
  launchers[p.planes > 1][p.a.mn ? 2 : p.b.mn ? 1 : 0](p, static_cast<cudaStream_t>(stream));
}

}  // namespace zoo::cuda::sm90
