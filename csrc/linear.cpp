// zoo's operators: their schemas, and the CPU core, which is aten's (oneDNN, MKL) behind zoo's checks.
//
// The CUDA core is a library of its own (csrc/cuda/), so that this one loads wherever torch does.

#include "mlp.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <array>
#include <tuple>

namespace zoo::cpu {
namespace {

using torch::stable::detail::from;
using torch::stable::detail::to;

// Calls an aten operator that returns one tensor. The stable ABI does not pass Scalars, so only operators without one.
template <typename... Args>
Tensor aten(const char* name, const char* overload, const Args&... args) {
  std::array<StableIValue, sizeof...(Args)> stack{from(args)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  return to<Tensor>(stack[0]);
}

Tensor transposed(const Tensor& matrix) {
  return reinterpret(matrix, {matrix.size(1), matrix.size(0)}, {matrix.stride(1), matrix.stride(0)});
}

// a b, and a bias added to each row, in a new tensor of `sizes`. aten's kernels by their direct door, without the
// dispatcher, which costs more than a small product.
Tensor product(const Tensor& a, const Tensor& b, const Tensor* bias, const Sizes& sizes) {
  const Tensor y = empty(a, sizes);
  const Tensor rows = sizes.size() == 2 ? y : reinterpret(y, {a.size(0), b.size(1)}, {b.size(1) > 1 ? b.size(1) : 1, 1});
  TORCH_ERROR_CODE_CHECK(
      bias ? aoti_torch_cpu_addmm_out(rows.get(), bias->get(), a.get(), b.get(), 1.0, 1.0)
           : aoti_torch_cpu_mm_out(rows.get(), a.get(), b.get()));
  return y;
}

// act(z), in z's memory unless z must be kept
Tensor activate(const Tensor& z, Activation activation, bool keep) {
  switch (activation) {
    case Activation::relu: return aten(keep ? "aten::relu" : "aten::relu_", "", z);
    case Activation::gelu: return aten(keep ? "aten::gelu" : "aten::gelu_", "", z, std::string("none"));
    case Activation::gelu_tanh: return aten(keep ? "aten::gelu" : "aten::gelu_", "", z, std::string("tanh"));
    case Activation::silu: return aten(keep ? "aten::silu" : "aten::silu_", "", z);
    case Activation::none: break;
  }
  return keep ? torch::stable::clone(z) : z;
}

}  // namespace

Tensor linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  check_linear("zoo::linear", input, weight, bias);
  return product(as_matrix(input), transposed(weight), bias ? &*bias : nullptr, with_last(input, weight.size(0)));
}

std::tuple<Tensor, Tensor> linear_activation(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, const std::string& activation,
    bool save) {
  const Activation act = parse_activation(activation);
  const Tensor z = linear(input, weight, bias);
  const bool keep = save && needs_preactivation(act);
  const Tensor y = activate(z, act, keep);
  return {y, keep ? z : empty(y, Sizes{0})};
}

Tensor linear_input_grad(const Tensor& grad, const Tensor& weight) {
  check_input_grad("zoo::linear_input_grad", grad, weight);
  return product(as_matrix(grad), weight, nullptr, with_last(grad, weight.size(1)));
}

Tensor linear_weight_grad(const Tensor& grad, const Tensor& input) {
  check_weight_grad("zoo::linear_weight_grad", grad, input);
  const Tensor g = as_matrix(grad), x = as_matrix(input);
  return product(transposed(g), x, nullptr, {g.size(1), x.size(1)});
}

Tensor linear_bias_grad(const Tensor& grad) {
  check_bias_grad("zoo::linear_bias_grad", grad);
  return torch::stable::sum(as_matrix(grad), Sizes{0});
}

Tensor activation_grad(const Tensor& grad, const Tensor& saved, const std::string& activation) {
  check_activation_grad("zoo::activation_grad", grad, saved);
  switch (parse_activation(activation)) {
    case Activation::relu: {  // saved is relu's output: zero, or positive, or NaN
      const Tensor off = aten("aten::logical_not", "", saved);
      return dense(aten("aten::where", "self", off, torch::stable::new_zeros(grad, Sizes{1}), grad));
    }
    case Activation::gelu: return dense(aten("aten::gelu_backward", "", grad, saved, std::string("none")));
    case Activation::gelu_tanh: return dense(aten("aten::gelu_backward", "", grad, saved, std::string("tanh")));
    case Activation::silu: return dense(aten("aten::silu_backward", "", grad, saved));
    case Activation::none: break;
  }
  return dense(torch::stable::clone(grad));
}

std::tuple<Tensor, Tensor, Tensor> linear_backward(
    const Tensor& grad, const std::optional<Tensor>& saved, const std::optional<Tensor>& input,
    const std::optional<Tensor>& weight, const std::string& activation, bool input_grad, bool weight_grad,
    bool bias_grad, bool wide) {
  const Activation act = parse_activation(activation);
  check_backward("zoo::linear_backward", grad, saved, input, weight, act, input_grad, weight_grad);
  const Tensor g = act == Activation::none ? grad : activation_grad(grad, *saved, activation);
  const auto none = [&] { return empty(grad, Sizes{0}); };
  const auto widened = [&](const Tensor& t) {
    return wide && has_two_bytes(grad) ? torch::stable::to(t, ScalarType::Float) : t;
  };
  return {input_grad ? linear_input_grad(g, *weight) : none(),
          weight_grad ? widened(linear_weight_grad(g, *input)) : none(),
          bias_grad ? widened(linear_bias_grad(g)) : none()};
}

// The parameters as they are multiplied.
std::vector<Tensor> lowered(const Tensor& input, const std::vector<const Tensor*>& parameters) {
  std::vector<Tensor> all;
  for (const Tensor* p : parameters) {
    all.push_back(empty(input, sizes_of(*p)));
    TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(all.back().get(), p->get(), 0));
  }
  return all;
}

Tensor matmul(const Tensor& a, const Tensor& b) {
  check_matmul("zoo::matmul", a, b);
  return dense(aten("aten::matmul", "", a, b));
}

}  // namespace zoo::cpu

STABLE_TORCH_LIBRARY(zoo, m) {
  m.def("linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor");
  m.def(
      "linear_activation(Tensor input, Tensor weight, Tensor? bias, str activation, bool save) -> (Tensor, Tensor)");
  m.def("linear_input_grad(Tensor grad, Tensor weight) -> Tensor");
  m.def("linear_weight_grad(Tensor grad, Tensor input) -> Tensor");
  m.def("linear_bias_grad(Tensor grad) -> Tensor");
  m.def("activation_grad(Tensor grad, Tensor saved, str activation) -> Tensor");
  m.def(
      "linear_backward(Tensor grad, Tensor? saved, Tensor? input, Tensor? weight, str activation, bool input_grad, "
      "bool weight_grad, bool bias_grad, bool wide=False) -> (Tensor, Tensor, Tensor)");
  m.def(
      "linear_cast(Tensor input, Tensor weight, Tensor? bias, str activation, bool save) -> (Tensor, Tensor, Tensor)");
  m.def(
      "mlp(Tensor input, Tensor weight1, Tensor? bias1, Tensor weight2, Tensor? bias2, str activation, bool save) -> "
      "(Tensor, Tensor, Tensor)");
  m.def(
      "mlp_backward(Tensor grad, Tensor? hidden, Tensor? saved, Tensor? input, Tensor? weight1, Tensor? weight2, "
      "str activation, bool input_grad, bool weight1_grad, bool bias1_grad, bool weight2_grad, bool bias2_grad, "
      "bool wide=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "mlp_cast(Tensor input, Tensor weight1, Tensor? bias1, Tensor weight2, Tensor? bias2, str activation, bool save) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("matmul(Tensor a, Tensor b) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(zoo, CPU, m) {
  m.impl("linear", TORCH_BOX(&zoo::cpu::linear));
  m.impl("linear_activation", TORCH_BOX(&zoo::cpu::linear_activation));
  m.impl("linear_input_grad", TORCH_BOX(&zoo::cpu::linear_input_grad));
  m.impl("linear_weight_grad", TORCH_BOX(&zoo::cpu::linear_weight_grad));
  m.impl("linear_bias_grad", TORCH_BOX(&zoo::cpu::linear_bias_grad));
  m.impl("activation_grad", TORCH_BOX(&zoo::cpu::activation_grad));
  m.impl("linear_cast", TORCH_BOX((&zoo::linear_cast<&zoo::cpu::lowered, &zoo::cpu::linear_activation>)));
  m.impl("mlp_cast", TORCH_BOX((&zoo::mlp_cast<&zoo::cpu::lowered, &zoo::cpu::linear, &zoo::cpu::linear_activation>)));
  m.impl("linear_backward", TORCH_BOX(&zoo::cpu::linear_backward));
  m.impl("mlp", TORCH_BOX((&zoo::mlp<&zoo::cpu::linear, &zoo::cpu::linear_activation>)));
  m.impl("mlp_backward", TORCH_BOX(&zoo::mlp_backward<&zoo::cpu::linear_backward>));
  m.impl("matmul", TORCH_BOX(&zoo::cpu::matmul));
}
