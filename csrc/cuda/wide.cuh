// Elements that are read and written together: 16 bytes, or 8, a lane.
#pragma once

#include "types.cuh"

#include <type_traits>

namespace zoo::cuda {

// In the registers' own units, so that no element is ever picked out of memory.
template <typename T, int bytes = 16>
struct Pack {
  static_assert(bytes == 8 || bytes == 16);
  static constexpr int wide = bytes / sizeof(T), count = bytes / 4;
  uint32_t words[count];
};

// Zeros are the same bits in every type.
template <typename T, int bytes = 16>
__device__ __forceinline__ Pack<T, bytes> zero_pack() {
  Pack<T, bytes> p;
#pragma unroll
  for (int i = 0; i < p.count; ++i) p.words[i] = 0;
  return p;
}

// Element `j`, known when the loop around it is unrolled, in the type that T accumulates in.
template <typename T, int bytes>
__device__ __forceinline__ typename Accumulator<T>::type element(const Pack<T, bytes>& p, int j) {
  if constexpr (std::is_same_v<T, double>) {
    return __hiloint2double(static_cast<int>(p.words[2 * j + 1]), static_cast<int>(p.words[2 * j]));
  } else if constexpr (std::is_same_v<T, float>) {
    return __uint_as_float(p.words[j]);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __uint_as_float(j % 2 ? p.words[j / 2] & 0xFFFF0000u : p.words[j / 2] << 16);
  } else {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(p.words[j / 2] >> 16 * (j % 2))));
  }
}

template <typename T, int bytes>
__device__ __forceinline__ Pack<T, bytes> narrow_pack(const typename Accumulator<T>::type (&v)[bytes / sizeof(T)]) {
  Pack<T, bytes> p;
#pragma unroll
  for (int i = 0; i < p.count; ++i) {
    if constexpr (std::is_same_v<T, double>) {
      p.words[i] = static_cast<uint32_t>(i % 2 ? __double2hiint(v[i / 2]) : __double2loint(v[i / 2]));
    } else if constexpr (std::is_same_v<T, float>) {
      p.words[i] = __float_as_uint(v[i]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      p.words[i] = static_cast<uint32_t>(__bfloat16_as_ushort(narrow<T>(v[2 * i]))) |
                   static_cast<uint32_t>(__bfloat16_as_ushort(narrow<T>(v[2 * i + 1]))) << 16;
    } else {
      p.words[i] = static_cast<uint32_t>(__half_as_ushort(narrow<T>(v[2 * i]))) |
                   static_cast<uint32_t>(__half_as_ushort(narrow<T>(v[2 * i + 1]))) << 16;
    }
  }
  return p;
}

// Of memory that nothing writes while the kernel runs. `once`: nobody else on this processor reads it, so the L1 is
// left to what is read again.
template <bool once, int bytes = 16, typename T>
__device__ __forceinline__ Pack<T, bytes> load_pack(const T* from) {
  Pack<T, bytes> p;
  if constexpr (bytes == 16) {
    if constexpr (once) {
      asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
          : "=r"(p.words[0]), "=r"(p.words[1]), "=r"(p.words[2]), "=r"(p.words[3])
          : "l"(from));
    } else {
      asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
          : "=r"(p.words[0]), "=r"(p.words[1]), "=r"(p.words[2]), "=r"(p.words[3])
          : "l"(from));
    }
  } else if constexpr (once) {
    asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(p.words[0]), "=r"(p.words[1]) : "l"(from));
  } else {
    asm("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(p.words[0]), "=r"(p.words[1]) : "l"(from));
  }
  return p;
}

// Of an output that this kernel does not read again: the first to leave the L2.
template <typename T, int bytes>
__device__ __forceinline__ void store_pack(T* to, const Pack<T, bytes>& p) {
  if constexpr (bytes == 16) {
    __stcs(reinterpret_cast<uint4*>(to), make_uint4(p.words[0], p.words[1], p.words[2], p.words[3]));
  } else {
    __stcs(reinterpret_cast<uint2*>(to), make_uint2(p.words[0], p.words[1]));
  }
}

}  // namespace zoo::cuda
