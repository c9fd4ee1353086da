// What happens to a tile's float accumulators: bias, activation, and the way to memory.
#pragma once

#include "ptx.cuh"

#include "../gelu.cuh"

#include <cstring>

namespace zoo::cuda::sm90 {

enum Act : int { none, relu, gelu, gelu_tanh, silu };

// x sigmoid(x (a + b x^2)): silu with (1, 0), gelu's tanh form with (2 c, 2 c 0.044715); a and b times -log2(e) here
struct SigmoidFamily {
  float a, b;
  __device__ __forceinline__ explicit SigmoidFamily(int act)
      : a(act == silu ? -1.44269504f : -2.30220820f), b(act == silu ? 0.f : -0.102943240f) {}
  __device__ __forceinline__ float operator()(float x) const {
    const float square = fminf(x * x, 1e30f);
    return x * reciprocal_fast(1.f + exp2_fast(x * fmaf(b, square, a)));
  }
};

template <bool precise, int n>
__device__ __forceinline__ void activate(float (&v)[n], int act) {
  if (act == none) return;
  if (act == relu) {
#pragma unroll
    for (int i = 0; i < n; ++i) v[i] = v[i] < 0.f ? 0.f : v[i];
  } else if (act == gelu) {
#pragma unroll
    for (int i = 0; i < n; ++i) v[i] = gelu_erf<precise>(v[i]);
  } else {
    const SigmoidFamily f(act);
#pragma unroll
    for (int i = 0; i < n; ++i) v[i] = f(v[i]);
  }
}

// v *= act'(x); for relu x may be the output, and a masked gradient is 0 even where it was infinite.
template <bool precise, int n>
__device__ __forceinline__ void go_through(float (&v)[n], const float (&x)[n], int act) {
  if (act == none) return;
  if (act == relu) {
#pragma unroll
    for (int i = 0; i < n; ++i) v[i] = x[i] <= 0.f ? 0.f : v[i];
  } else if (act == gelu) {
#pragma unroll
    for (int i = 0; i < n; ++i) v[i] *= gelu_derivative<precise>(x[i]);
  } else {
    const float a = act == silu ? 1.f : 1.5957691216f, b = act == silu ? 0.f : 0.0713548163f;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float square = fminf(x[i] * x[i], 1e30f), inner = fmaf(b, square, a);
      const float s = reciprocal_fast(1.f + exp2_fast(x[i] * inner * -1.44269504f));
      v[i] *= fmaf(x[i] * s * (1.f - s), fmaf(2.f * b, square, inner), s);
    }
  }
}

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t packed;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

template <typename T>
__device__ __forceinline__ void unpack(uint32_t packed, float& low, float& high) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    low = __uint_as_float(packed << 16);
    high = __uint_as_float(packed & 0xffff0000u);
  } else {
    const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&packed));
    low = both.x;
    high = both.y;
  }
}

template <typename T>
__device__ __forceinline__ float widen(T x) {
  if constexpr (std::is_same_v<T, float>) return x;
  else if constexpr (std::is_same_v<T, __nv_bfloat16>) return __bfloat162float(x);
  else return __half2float(x);
}

template <typename T>
__device__ __forceinline__ T narrow(float x) {
  if constexpr (std::is_same_v<T, float>) return x;
  else if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(x);
  else return __float2half_rn(x);
}

// A warp's piece of an accumulator: 16 rows x 32 columns, v[4 j + {0, 1}] at row lane / 4, columns 8 j + 2 (lane % 4)
// + {0, 1}, and v[4 j + {2, 3}] eight rows below. 
constexpr int kPiece = 32;

// v = the which-th piece, a number that is known to the compiler.
template <int strips, int registers>
__device__ __forceinline__ void piece(float (&v)[16], const float (&acc)[strips][registers], int which) {
#pragma unroll
  for (int j = 0; j < 16; ++j) v[j] = acc[which / (registers / 16)][which % (registers / 16) * 16 + j];
}

// The same for a number that is not: every piece is moved, under a predicate.
template <int strips, int registers>
__device__ __forceinline__ void pick(float (&v)[16], const float (&acc)[strips][registers], int which) {
#pragma unroll
  for (int i = 0; i < strips * registers / 16; ++i) {
    if (which == i) {
      asm volatile("");  // not a select of each register
      piece(v, acc, i);
    }
  }
}

// From shared memory, where the piece's values begin at `bias`.
template <typename T, int n>
__device__ __forceinline__ void add_bias(float (&v)[n], uint32_t bias) {
#pragma unroll
  for (int j = 0; j < n / 4; ++j) {
    const uint32_t at = bias + (8 * j + 2 * (threadIdx.x % 4)) * sizeof(T);
    T b[2];
    if constexpr (sizeof(T) == 4) {
      const float2 raw = ptx::load2_shared(at);
      b[0] = raw.x, b[1] = raw.y;
    } else {
      const uint32_t raw = ptx::load_shared(at);
      memcpy(b, &raw, 4);
    }
    v[4 * j] += widen(b[0]);
    v[4 * j + 1] += widen(b[1]);
    v[4 * j + 2] += widen(b[0]);
    v[4 * j + 3] += widen(b[1]);
  }
}

// Into 16 rows of 128 bytes, or the part of them that is 2 n columns wide, swizzled as TMA expects.
template <typename T, int n>
__device__ __forceinline__ void to_shared(uint32_t buffer, const float (&v)[n], uint32_t part) {
  const uint32_t lane = threadIdx.x % 32, row = lane % 16;
#pragma unroll
  for (int j = 0; j < n / 4; j += 2) {
    const uint32_t chunk = (n / 4 * part + j + lane / 16) ^ (row % 8);
    ptx::stmatrix(buffer + row * 128 + chunk * 16, pack<T>(v[4 * j], v[4 * j + 1]), pack<T>(v[4 * j + 2], v[4 * j + 3]),
                  pack<T>(v[4 * j + 4], v[4 * j + 5]), pack<T>(v[4 * j + 6], v[4 * j + 7]));
  }
}

// The same of floats: 32 columns are 128 bytes. Odd rows write the columns from 16 on first, so that the half of a warp that
// writes at once meets every bank once.
__device__ __forceinline__ void floats_to_shared(uint32_t buffer, const float (&v)[16]) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const bool odd = g % 2;
  const uint32_t at = buffer + g * 128 + q % 2 * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t chunk = 2 * (odd ? i ^ 2 : i) + q / 2 ^ g;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float x = odd ? v[4 * (i ^ 2) + 2 * r] : v[4 * i + 2 * r];
      const float y = odd ? v[4 * (i ^ 2) + 2 * r + 1] : v[4 * i + 2 * r + 1];
      ptx::store2_shared(at + chunk * 16 + r * 1024, x, y);
    }
  }
}

template <typename T>
__device__ __forceinline__ void store_pair(T* to, float a, float b, bool second, bool aligned) {
  if (aligned && second) {
    if constexpr (std::is_same_v<T, float>) *reinterpret_cast<float2*>(to) = make_float2(a, b);
    else *reinterpret_cast<uint32_t*>(to) = pack<T>(a, b);
  } else {
    to[0] = narrow<T>(a);
    if (second) to[1] = narrow<T>(b);
  }
}

// Straight to memory, for what TMA cannot write. Four lanes write 32 bytes (float) or 16 side by side.
template <typename T>
__device__ __forceinline__ void to_memory(T* y, int64_t ld, const float (&v)[16], int m, int n, int M, int N) {
  const int row = m + threadIdx.x % 32 / 4;
  const bool aligned = ld % 2 == 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int at = n + 8 * j + 2 * (threadIdx.x % 4);
    if (at >= N) continue;
    if (row < M) store_pair(y + row * ld + at, v[4 * j], v[4 * j + 1], at + 1 < N, aligned);
    if (row + 8 < M) store_pair(y + (row + 8) * ld + at, v[4 * j + 2], v[4 * j + 3], at + 1 < N, aligned);
  }
}

}  // namespace zoo::cuda::sm90
