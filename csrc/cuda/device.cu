// What the operators ask of the CUDA runtime itself.
#include "types.cuh"

#include <atomic>

namespace zoo::cuda {

Chip chip_of(int device) {
  static std::atomic<uint32_t> known[64];  // capability and processors, in 16 bits each
  uint32_t packed = device < 64 ? known[device].load(std::memory_order_relaxed) : 0;
  if (packed == 0) {
    int major = 0, minor = 0, processors = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "the compute capability");
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "the compute capability");
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "the number of processors");
    packed = static_cast<uint32_t>(10 * major + minor) << 16 | static_cast<uint32_t>(processors);
    if (device < 64) known[device].store(packed, std::memory_order_relaxed);
  }
  return {static_cast<int>(packed >> 16), static_cast<int>(packed & 0xFFFF)};
}

void zero(void* memory, int64_t bytes, void* stream) {
  check(cudaMemsetAsync(memory, 0, static_cast<size_t>(bytes), static_cast<cudaStream_t>(stream)), "zeroing a workspace");
}

}  // namespace zoo::cuda
