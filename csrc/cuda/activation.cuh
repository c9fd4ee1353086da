// The fused activations and their derivatives, in the accumulator's precision (float or double).
//
// Formulas are torch's: gelu by erf, gelu_tanh by its tanh approximation. NaN passes through each of them.
#pragma once

#include "gelu.cuh"
#include "kernels.h"

#include <type_traits>

namespace zoo::cuda {

template <typename Acc>
__device__ __forceinline__ Acc activate(Acc x, Act act) {
  switch (act) {
    case Act::relu: return x < Acc(0) ? Acc(0) : x;  // false for NaN, which stays
    case Act::gelu:
      if constexpr (std::is_same_v<Acc, float>) return gelu_erf<true>(x);
      else return Acc(0.5) * x * (Acc(1) + erf(x * Acc(0.7071067811865476)));
    case Act::gelu_tanh: {
      const Acc c = Acc(0.7978845608028654), a = Acc(0.044715);
      return Acc(0.5) * x * (Acc(1) + tanh(c * (x + a * x * x * x)));
    }
    case Act::silu: return x / (Acc(1) + exp(-x));
    case Act::none: break;
  }
  return x;
}

// d act(x) / dx. For relu x is its output, whose sign tells as much.
template <typename Acc>
__device__ __forceinline__ Acc derivative(Acc x, Act act) {
  switch (act) {
    case Act::relu: return x <= Acc(0) ? Acc(0) : Acc(1);  // 1 for NaN, as torch's threshold_backward
    case Act::gelu: {
      if constexpr (std::is_same_v<Acc, float>) return gelu_derivative<true>(x);
      const Acc density = Acc(0.3989422804014327) * exp(Acc(-0.5) * x * x);
      return Acc(0.5) * (Acc(1) + erf(x * Acc(0.7071067811865476))) + x * density;
    }
    case Act::gelu_tanh: {
      const Acc c = Acc(0.7978845608028654), a = Acc(0.044715);
      const Acc t = tanh(c * (x + a * x * x * x));
      return Acc(0.5) * (Acc(1) + t) + Acc(0.5) * x * (Acc(1) - t * t) * c * (Acc(1) + Acc(3) * a * x * x);
    }
    case Act::silu: {
      const Acc s = Acc(1) / (Acc(1) + exp(-x));
      return s * (Acc(1) + x * (Acc(1) - s));
    }
    case Act::none: break;
  }
  return Acc(1);
}

}  // namespace zoo::cuda
