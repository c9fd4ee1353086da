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

inline bool has_two_bytes(const Tensor& t) {
  return t.scalar_type() == ScalarType::Half || t.scalar_type() == ScalarType::BFloat16;
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

// The weight (N, K) and the bias (N) of a layer that takes (*, in_features), of the dtype and device of `input`.
inline void check_layer(
    const char* op, const Tensor& input, const Tensor& weight, const char* weight_name,
    const std::optional<Tensor>& bias, const char* bias_name) {
  check_dim(op, weight, weight_name, 2);
  check_same(op, input, "input", weight, weight_name);
  if (bias) {
    check_dim(op, *bias, bias_name, 1);
    check_same(op, input, "input", *bias, bias_name);
    ZOO_CHECK(
        bias->size(0) == weight.size(0), op, ": ", bias_name, " must have ", weight_name, "'s out_features (",
        weight.size(0), "), got ", shape_of(*bias));
  }
}

inline void check_linear(
    const char* op, const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
    const char* weight_name = "weight", const char* bias_name = "bias") {
  check_dtype(op, input, "input");
  ZOO_CHECK(input.dim() >= 1, op, ": input must have at least 1 dimension, got a scalar");
  check_layer(op, input, weight, weight_name, bias, bias_name);
  ZOO_CHECK(
      input.size(input.dim() - 1) == weight.size(1), op, ": input's last size must be ", weight_name,
      "'s in_features (", weight.size(1), "), got input ", shape_of(input), " and ", weight_name, " ",
      shape_of(weight));
}

// A layer's parameters in float32, to be cast to the dtype of its input, which is a 2-byte one.
inline void check_cast(
    const char* op, const Tensor& input, const Tensor& parameter, const char* name) {
  ZOO_CHECK(
      has_two_bytes(input), op, ": input must be float16 or bfloat16, got ",
      torch::headeronly::toString(input.scalar_type()));
  ZOO_CHECK(
      parameter.scalar_type() == ScalarType::Float, op, ": ", name, " must be float32, got ",
      torch::headeronly::toString(parameter.scalar_type()));
  ZOO_CHECK(
      input.device() == parameter.device(), op, ": ", name, " must be on the device of input (", device_of(input),
      "), got ", device_of(parameter), "; move one of them");
}

// grad (*, N) against weight (N, K)
inline void check_input_grad(
    const char* op, const Tensor& grad, const Tensor& weight, const char* weight_name = "weight") {
  check_dtype(op, grad, "grad");
  ZOO_CHECK(grad.dim() >= 1, op, ": grad must have at least 1 dimension, got a scalar");
  check_dim(op, weight, weight_name, 2);
  check_same(op, grad, "grad", weight, weight_name);
  ZOO_CHECK(
      grad.size(grad.dim() - 1) == weight.size(0), op, ": grad's last size must be ", weight_name,
      "'s out_features (", weight.size(0), "), got grad ", shape_of(grad), " and ", weight_name, " ",
      shape_of(weight));
}

// grad (*, N) against input (*, K) with the same leading sizes
inline void check_weight_grad(
    const char* op, const Tensor& grad, const Tensor& input, const char* input_name = "input") {
  check_dtype(op, grad, "grad");
  ZOO_CHECK(grad.dim() >= 1, op, ": grad must have at least 1 dimension, got a scalar");
  check_same(op, grad, "grad", input, input_name);
  bool same = grad.dim() == input.dim();
  for (int64_t i = 0; same && i + 1 < grad.dim(); ++i) same = grad.size(i) == input.size(i);
  ZOO_CHECK(
      same, op, ": grad and ", input_name, " must have the same leading sizes, got grad ", shape_of(grad), " and ",
      input_name, " ", shape_of(input));
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

// act(input weight1^T + bias1) weight2^T + bias2: input (*, K), weight1 (H, K), weight2 (N, H)
inline void check_mlp(
    const char* op, const Tensor& input, const Tensor& weight1, const std::optional<Tensor>& bias1,
    const Tensor& weight2, const std::optional<Tensor>& bias2) {
  check_linear(op, input, weight1, bias1, "weight1", "bias1");
  check_layer(op, input, weight2, "weight2", bias2, "bias2");
  ZOO_CHECK(
      weight2.size(1) == weight1.size(0), op, ": weight2's in_features must be weight1's out_features (",
      weight1.size(0), "), got weight1 ", shape_of(weight1), " and weight2 ", shape_of(weight2));
}

// The gradients of the mlp that are asked for, and what each needs. grad (*, N), hidden and saved (*, H).
struct MlpGradients {
  bool input, weight1, bias1, weight2, bias2;
  bool first() const { return input || weight1 || bias1; }
};

inline void check_mlp_backward(
    const char* op, const Tensor& grad, const std::optional<Tensor>& hidden, const std::optional<Tensor>& saved,
    const std::optional<Tensor>& input, const std::optional<Tensor>& weight1, const std::optional<Tensor>& weight2,
    Activation activation, const MlpGradients& asked) {
  check_bias_grad(op, grad);
  ZOO_CHECK(!asked.weight2 || hidden, op, ": hidden must be given for weight2's gradient, got none");
  if (asked.weight2) check_weight_grad(op, grad, *hidden, "hidden");
  if (!asked.first()) return;
  ZOO_CHECK(weight2, op, ": weight2 must be given for the gradients of input, weight1 and bias1, got none");
  check_input_grad(op, grad, *weight2, "weight2");
  const int64_t width = weight2->size(1);
  ZOO_CHECK(
      !asked.weight2 || hidden->size(hidden->dim() - 1) == width, op,
      ": hidden's last size must be weight2's in_features (", width, "), got ",
      asked.weight2 ? shape_of(*hidden) : "");
  if (activation != Activation::none) {
    ZOO_CHECK(saved, op, ": saved must be given with an activation, got none; pass what mlp returned");
    check_weight_grad(op, grad, *saved, "saved");
    ZOO_CHECK(
        saved->size(saved->dim() - 1) == width, op, ": saved's last size must be weight2's in_features (", width,
        "), got ", shape_of(*saved));
  }
  ZOO_CHECK(!asked.input || weight1, op, ": weight1 must be given for the input's gradient, got none");
  if (asked.input) {
    check_dim(op, *weight1, "weight1", 2);
    check_same(op, grad, "grad", *weight1, "weight1");
    ZOO_CHECK(
        weight1->size(0) == width, op, ": weight1's out_features must be weight2's in_features (", width,
        "), got weight1 ", shape_of(*weight1));
  }
  ZOO_CHECK(!asked.weight1 || input, op, ": input must be given for weight1's gradient, got none");
  if (asked.weight1) check_weight_grad(op, grad, *input);
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

// An uninitialised row-major tensor on t's device. By the shim too.
inline Tensor empty(const Tensor& t, const Sizes& sizes, int32_t dtype) {
  Sizes strides(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0; step *= sizes[i] > 1 ? sizes[i] : 1) strides[i] = step;
  int32_t type = 0, index = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(t.get(), &index));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype, type, index, &handle));
  return Tensor(handle);
}

// Of t's dtype.
inline Tensor empty(const Tensor& t, const Sizes& sizes) {
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
  return empty(t, sizes, dtype);
}

// t in row-major order: itself where it is, which costs nothing to see, else a copy.
inline Tensor dense(const Tensor& t) {
  int64_t step = 1;
  for (int64_t i = t.dim() - 1; i >= 0; --i) {
    if (t.size(i) != 1 && t.stride(i) != step) return torch::stable::contiguous(t);
    step *= t.size(i);
  }
  return t;
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
