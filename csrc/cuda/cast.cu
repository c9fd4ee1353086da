// Several dense arrays from float to a 2-byte type, or back, in one launch: a layer's parameters under autocast, and their
// gradients.
#include "types.cuh"

#include <algorithm>

namespace zoo::cuda {
namespace {

constexpr int kThreads = 256, kWide = 8;  // elements a thread, at once
constexpr int64_t kBlock = int64_t{kThreads} * kWide * 2;

struct Casts {
  Cast job[kMostCasts];
  int64_t blocks[kMostCasts];
};

template <typename From, typename To>
__global__ void __launch_bounds__(kThreads) cast_kernel(const __grid_constant__ Casts work) {
  int64_t block = blockIdx.x;
  int which = 0;
  while (block >= work.blocks[which]) block -= work.blocks[which++];
  const Cast& job = work.job[which];
  const From* from = static_cast<const From*>(job.from);
  To* to = static_cast<To*>(job.to);
  const bool aligned = (reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) % 16 == 0;
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int64_t at = block * kBlock + (u * kThreads + threadIdx.x) * kWide;
    if (aligned && at + kWide <= job.count) {
      alignas(16) From in[kWide];
      alignas(16) To out[kWide];
#pragma unroll
      for (int i = 0; i < int(sizeof in / 16); ++i) {
        reinterpret_cast<uint4*>(in)[i] = reinterpret_cast<const uint4*>(from + at)[i];
      }
#pragma unroll
      for (int i = 0; i < kWide; ++i) out[i] = narrow<To>(widen<float>(in[i]));
#pragma unroll
      for (int i = 0; i < int(sizeof out / 16); ++i) reinterpret_cast<uint4*>(to + at)[i] = reinterpret_cast<uint4*>(out)[i];
    } else {
      for (int64_t i = at; i < min(at + kWide, job.count); ++i) to[i] = narrow<To>(widen<float>(from[i]));
    }
  }
}

template <typename From, typename To>
void launch(const Casts& work, unsigned blocks, void* stream) {
  cast_kernel<From, To><<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(work);
}

}  // namespace

void cast(const Cast* jobs, int count, Type from, Type to, void* stream) {
  Casts work{};
  int64_t blocks = 0;
  int used = 0;
  for (int i = 0; i < count; ++i) {
    if (jobs[i].count == 0) continue;
    work.job[used] = jobs[i];
    work.blocks[used] = (jobs[i].count + kBlock - 1) / kBlock;
    blocks += work.blocks[used++];
  }
  if (blocks == 0) return;
  if (blocks > INT32_MAX) throw std::runtime_error("zoo: too many elements to cast in one launch");
  const auto grid = static_cast<unsigned>(blocks);
  if (from == Type::f32 && to == Type::bf16) launch<float, __nv_bfloat16>(work, grid, stream);
  else if (from == Type::f32 && to == Type::f16) launch<float, __half>(work, grid, stream);
  else if (from == Type::bf16 && to == Type::f32) launch<__nv_bfloat16, float>(work, grid, stream);
  else if (from == Type::f16 && to == Type::f32) launch<__half, float>(work, grid, stream);
  else throw std::runtime_error("zoo: a cast is between float32 and a 2-byte type");
  check_launch("cast");
}

}  // namespace zoo::cuda
