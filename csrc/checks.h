// The arguments of zoo's operators, checked before any kernel runs, and seen as plain matrices.
//
// Shapes: input (*, K), weight (N, K), bias (N), output and its gradient (*, N). `*` is any number of leading
// dimensions, none included; every size may be zero and every stride is allowed.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace zoo {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Sizes = std::vector<int64_t>;

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

// Throws what was got and expected; the parts are only made if it does. Not STD_TORCH_CHECK, which puts the source
// file's path into the message.
#define ZOO_CHECK(condition, ...)          \
  do {                                     \
    if (!(condition)) fail(__VA_ARGS__);   \
  } while (false)

enum class Activation { none, relu, gelu, gelu_tanh, silu };

inline Activation parse_activation(const std::string& name) {
  if (name == "none") return Activation::none;
  if (name == "relu") return Activation::relu;
  if (name == "gelu") return Activation::gelu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  if (name == "silu") return Activation::silu;
  fail("zoo: unknown activation '", name, "'; known: none, relu, gelu, gelu_tanh, silu");
}

// What the activation's derivative is computed from: the product before it, or (relu) the output alone.
inline bool needs_preactivation(Activation activation) {
  return activation != Activation::none && activation != Activation::relu;
}

inline Sizes sizes_of(const Tensor& t) {
  auto sizes = t.sizes();
  return Sizes(sizes.begin(), sizes.end());
}

inline std::string shape_of(const Tensor& t) {
  std::ostringstream text;
  text << '(';
  for (int64_t i = 0; i < t.dim(); ++i) text << (i ? ", " : "") << t.size(i);
  text << ')';
  return text.str();
}

inline std::string device_of(const Tensor& t) {
  if (t.is_cpu()) return "cpu";
  if (t.is_cuda()) return "cuda:" + std::to_string(t.get_device_index());
  return "another device";
}

inline void check_dtype(const char* op, const Tensor& t, const char* name) {
  const auto type = t.scalar_type();
  ZOO_CHECK(
      type == ScalarType::Float || type == ScalarType::Double || type == ScalarType::Half ||
          type == ScalarType::BFloat16,
      op, ": ", name, " must be float64, float32, float16 or bfloat16, got ", torch::headeronly::toString(type));
}

inline void check_same(const char* op, const Tensor& a, const char* a_name, const Tensor& b, const char* b_name) {
  ZOO_CHECK(
      a.scalar_type() == b.scalar_type(), op, ": ", b_name, " must have the dtype of ", a_name, " (",
      torch::headeronly::toString(a.scalar_type()), "), got ", torch::headeronly::toString(b.scalar_type()),
      "; convert one of them");
  ZOO_CHECK(
      a.device() == b.device(), op, ": ", b_name, " must be on the device of ", a_name, " (", device_of(a), "), got ",
      device_of(b), "; move one of them");
}

inline void check_dim(const char* op, const Tensor& t, const char* name, int64_t dim) {
  ZOO_CHECK(t.dim() == dim, op, ": ", name, " must have ", dim, " dimension(s), got shape ", shape_of(t));
}

inline void check_linear(const char* op, const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  check_dtype(op, input, "input");
  ZOO_CHECK(input.dim() >= 1, op, ": input must have at least 1 dimension, got a scalar");
  check_dim(op, weight, "weight", 2);
  check_same(op, input, "input", weight, "weight");
  ZOO_CHECK(
      input.size(input.dim() - 1) == weight.size(1), op, ": input's last size must be weight's in_features (",
      weight.size(1), "), got input ", shape_of(input), " and weight ", shape_of(weight));
  if (bias) {
    check_dim(op, *bias, "bias", 1);
    check_same(op, input, "input", *bias, "bias");
    ZOO_CHECK(
        bias->size(0) == weight.size(0), op, ": bias must have weight's out_features (", weight.size(0), "), got ",
        shape_of(*bias));
  }
}

// grad (*, N) against weight (N, K)
inline void check_input_grad(const char* op, const Tensor& grad, const Tensor& weight) {
  check_dtype(op, grad, "grad");
  ZOO_CHECK(grad.dim() >= 1, op, ": grad must have at least 1 dimension, got a scalar");
  check_dim(op, weight, "weight", 2);
  check_same(op, grad, "grad", weight, "weight");
  ZOO_CHECK(
      grad.size(grad.dim() - 1) == weight.size(0), op, ": grad's last size must be weight's out_features (",
      weight.size(0), "), got grad ", shape_of(grad), " and weight ", shape_of(weight));
}

// grad (*, N) against input (*, K) with the same leading sizes
inline void check_weight_grad(const char* op, const Tensor& grad, const Tensor& input) {
  check_dtype(op, grad, "grad");
  ZOO_CHECK(grad.dim() >= 1, op, ": grad must have at least 1 dimension, got a scalar");
  check_same(op, grad, "grad", input, "input");
  bool same = grad.dim() == input.dim();
  for (int64_t i = 0; same && i + 1 < grad.dim(); ++i) same = grad.size(i) == input.size(i);
  ZOO_CHECK(
      same, op, ": grad and input must have the same leading sizes, got grad ", shape_of(grad), " and input ",
      shape_of(input));
}

inline void check_bias_grad(const char* op, const Tensor& grad) {
  check_dtype(op, grad, "grad");
  ZOO_CHECK(grad.dim() >= 1, op, ": grad must have at least 1 dimension, got a scalar");
}

inline void check_activation_grad(const char* op, const Tensor& grad, const Tensor& saved) {
  check_dtype(op, grad, "grad");
  check_same(op, grad, "grad", saved, "saved");
  ZOO_CHECK(
      sizes_of(grad) == sizes_of(saved), op, ": grad must have the shape of saved ", shape_of(saved), ", got ",
      shape_of(grad));
}

// The gradients of act(input weight^T + bias) that are asked for, and what each needs.
inline void check_backward(
    const char* op, const Tensor& grad, const std::optional<Tensor>& saved, const std::optional<Tensor>& input,
    const std::optional<Tensor>& weight, Activation activation, bool input_grad, bool weight_grad) {
  check_bias_grad(op, grad);
  ZOO_CHECK(
      activation == Activation::none || saved, op, ": saved must be given with an activation, got none; pass what "
      "linear_activation returned");
  if (activation != Activation::none) check_activation_grad(op, grad, *saved);
  ZOO_CHECK(!input_grad || weight, op, ": weight must be given for the input's gradient, got none");
  ZOO_CHECK(!weight_grad || input, op, ": input must be given for the weight's gradient, got none");
  if (input_grad) check_input_grad(op, grad, *weight);
  if (weight_grad) check_weight_grad(op, grad, *input);
}

// a (*, M, K) against b (*, K, N) with the same leading sizes
inline void check_matmul(const char* op, const Tensor& a, const Tensor& b) {
  check_dtype(op, a, "a");
  ZOO_CHECK(
      a.dim() >= 2 && a.dim() == b.dim(), op, ": a and b must have the same number of dimensions, at least 2, got a ",
      shape_of(a), " and b ", shape_of(b));
  check_same(op, a, "a", b, "b");
  const int64_t d = a.dim();
  bool same = a.size(d - 1) == b.size(d - 2);
  for (int64_t i = 0; same && i < d - 2; ++i) same = a.size(i) == b.size(i);
  ZOO_CHECK(
      same, op, ": expected a (*, M, K) and b (*, K, N) with the same leading sizes, got a ", shape_of(a), " and b ",
      shape_of(b));
}

// Rows of (*, last) seen as a matrix. Not numel / last, which is 0 / 0 for a last size of zero.
inline int64_t rows_of(const Tensor& t) {
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < t.dim(); ++i) rows *= t.size(i);
  return rows;
}

// The same memory in other sizes and strides. Straight to the shim: as an operator call it would cost more host time than
// a small product. Not an autograd view, so that an output seen through it may be changed in place later.
inline Tensor reinterpret(const Tensor& t, const Sizes& sizes, const Sizes& strides) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
      t.get(), static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), 0, &handle));
  return Tensor(handle);
}

// (*, last) as (rows, last): a view where the strides allow it, else a copy.
inline Tensor as_matrix(const Tensor& t) {
  const int64_t d = t.dim();
  if (d == 2) return t;
  const Sizes sizes{rows_of(t), t.size(d - 1)};
  int64_t stride = 0, span = 0;  // of a row; what one step of the dimension outside must be
  for (int64_t i = d - 2; i >= 0; --i) {
    if (t.size(i) == 1) continue;
    if (span == 0) stride = t.stride(i);
    else if (t.stride(i) != span) return torch::stable::reshape(t, sizes);
    span = t.stride(i) * t.size(i);
    if (span == 0) return torch::stable::reshape(t, sizes);
  }
  return reinterpret(t, sizes, {stride ? stride : sizes[1] > 0 ? sizes[1] : 1, t.stride(d - 1)});
}

// The sizes of t with another last size.
inline Sizes with_last(const Tensor& t, int64_t last) {
  Sizes sizes = sizes_of(t);
  sizes.back() = last;
  return sizes;
}

}  // namespace zoo
