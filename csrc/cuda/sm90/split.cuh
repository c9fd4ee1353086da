// One float32 as three bf16 that sum to it, to the last bit unless it is tiny. Rounded, for planes in memory: the first two
// are short by about 2^-17.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace zoo::cuda::sm90 {

// What is not finite keeps its value in the first plane, and the others are zero.
__device__ __forceinline__ void split(float x, __nv_bfloat16 (&planes)[3], bool& special) {
  const float largest = 3.3895314e38f;  // of bf16: rounding up to inf must not happen
  const bool finite = fabsf(x) <= 3.402823466e38f;
  special |= !finite;
  planes[0] = __float2bfloat16_rn(finite ? fminf(fmaxf(x, -largest), largest) : x);
  const float rest = finite ? x - __bfloat162float(planes[0]) : 0.f;
  planes[1] = __float2bfloat16_rn(rest);
  planes[2] = __float2bfloat16_rn(rest - __bfloat162float(planes[1]));
}

// Eight of them, 16 bytes to each of the first `count` planes.
__device__ __forceinline__ void store_planes(
    const float (&x)[8], __nv_bfloat16* to, int64_t plane, int count, bool& special) {
  __align__(16) __nv_bfloat16 out[3][8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    __nv_bfloat16 planes[3];
    split(x[j], planes, special);
#pragma unroll
    for (int p = 0; p < 3; ++p) out[p][j] = planes[p];
  }
#pragma unroll
  for (int p = 0; p < 3; ++p) {
    if (p < count) *reinterpret_cast<uint4*>(to + p * plane) = *reinterpret_cast<uint4*>(out[p]);
  }
}

// In registers, by truncation: x = high + middle + low, each a float whose lower half is zero, so its upper half is a bf16.
// Exact but for tiny x, and all of x's sign. What is not finite makes NaN, and the outputs that meet it are computed again.
struct Parts {
  uint32_t high, middle, low;  // of two numbers, the first in the lower half
};
__device__ __forceinline__ Parts split_pair(float x, float y) {
  constexpr uint32_t upper = 0xFFFF0000u;
  const auto rest = [](float v) { return v - __uint_as_float(__float_as_uint(v) & upper); };
  const auto halves = [](float v, float w) { return __byte_perm(__float_as_uint(v), __float_as_uint(w), 0x7632); };
  const float x1 = rest(x), y1 = rest(y);
  return {halves(x, y), halves(x1, y1), halves(rest(x1), rest(y1))};
}

// Rounded: the three hold all of x's bits just the same, and what a product drops has no sign of its own. Beyond bf16's range
// it is inf and -inf, so NaN, as what is not finite is.
__device__ __forceinline__ Parts split_pair_rounded(float x, float y) {
  const auto rounded = [](float v, float w) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(w), "f"(v));
    return packed;
  };
  const auto low = [](uint32_t pair) { return __uint_as_float(pair << 16); };
  const auto high = [](uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); };
  Parts parts;
  parts.high = rounded(x, y);
  const float x1 = x - low(parts.high), y1 = y - high(parts.high);
  parts.middle = rounded(x1, y1);
  parts.low = rounded(x1 - low(parts.middle), y1 - high(parts.middle));
  return parts;
}

}  // namespace zoo::cuda::sm90
