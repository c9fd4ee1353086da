// The element types, the type each accumulates in, and the choice between them at run time.
#pragma once

#include "kernels.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace zoo::cuda {

template <typename T>
struct Accumulator {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};

// Spelled out: torch's build turns the implicit conversions of the half types off.
template <typename Acc, typename T>
__device__ __forceinline__ Acc widen(T x) {
  return x;
}
template <>
__device__ __forceinline__ float widen<float, __half>(__half x) {
  return __half2float(x);
}
template <>
__device__ __forceinline__ float widen<float, __nv_bfloat16>(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

template <typename T, typename Acc>
__device__ __forceinline__ T narrow(Acc x) {
  return x;
}
template <>
__device__ __forceinline__ __half narrow<__half, float>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16, float>(float x) {
  return __float2bfloat16_rn(x);
}

// Calls f with a value of the element type.
template <typename F>
void with_type(Type type, F&& f) {
  switch (type) {
    case Type::f64: return f(double{});
    case Type::f32: return f(float{});
    case Type::f16: return f(__half{});
    case Type::bf16: return f(__nv_bfloat16{});
  }
}

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("zoo: ") + what + ": " + cudaGetErrorString(error));
  }
}

inline void check_launch(const char* kernel) {
  check(cudaGetLastError(), kernel);
}

// A kernel may use more than 48 KiB of shared memory once it is told so, on each device.
template <typename Kernel>
void allow_shared(Kernel* kernel, int bytes, std::atomic<uint64_t>& told) {
  int device = 0;
  check(cudaGetDevice(&device), "the current device");
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (told.load(std::memory_order_relaxed) & bit) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "shared memory");
  told.fetch_or(bit, std::memory_order_relaxed);
}

}  // namespace zoo::cuda
