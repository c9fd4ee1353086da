// zoo's operators: their schemas, and the CPU core, which is aten's (oneDNN, MKL) behind zoo's checks.
//
// The CUDA core is a library of its own (csrc/cuda/), so that this one loads wherever torch does.

#include "checks.h"

#include <Python.h>

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

// What every operator returns: a tensor of its own, in row-major order, whatever the strides of its arguments.
Tensor dense(const Tensor& t) {
  return torch::stable::contiguous(t);
}

// A matrix just made, in other sizes. As aten::view's result it would count as a view of something, and autograd
// forbids changing such an output in place (nn.ReLU(inplace=True) after a layer).
Tensor with_sizes(const Tensor& matrix, const Sizes& sizes) {
  return sizes.size() == 2 ? matrix : aten("aten::_unsafe_view", "", matrix, sizes);
}

Tensor mm(const Tensor& a, const Tensor& b) {
  return aten("aten::mm", "", a, b);
}

Tensor transposed(const Tensor& matrix) {
  return torch::stable::transpose(matrix, 0, 1);
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
  const Tensor y = aten("aten::linear", "", as_matrix(input), weight, bias);
  return with_sizes(y, with_last(input, weight.size(0)));
}

std::tuple<Tensor, Tensor> linear_activation(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, const std::string& activation,
    bool save) {
  const Activation act = parse_activation(activation);
  const Tensor z = linear(input, weight, bias);
  const bool keep = save && needs_preactivation(act);
  const Tensor y = activate(z, act, keep);
  return {y, keep ? z : torch::stable::new_empty(y, Sizes{0})};
}

Tensor linear_input_grad(const Tensor& grad, const Tensor& weight) {
  check_input_grad("zoo::linear_input_grad", grad, weight);
  return with_sizes(mm(as_matrix(grad), weight), with_last(grad, weight.size(1)));
}

Tensor linear_weight_grad(const Tensor& grad, const Tensor& input) {
  check_weight_grad("zoo::linear_weight_grad", grad, input);
  return mm(transposed(as_matrix(grad)), as_matrix(input));
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
  m.def("matmul(Tensor a, Tensor b) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(zoo, CPU, m) {
  m.impl("linear", TORCH_BOX(&zoo::cpu::linear));
  m.impl("linear_activation", TORCH_BOX(&zoo::cpu::linear_activation));
  m.impl("linear_input_grad", TORCH_BOX(&zoo::cpu::linear_input_grad));
  m.impl("linear_weight_grad", TORCH_BOX(&zoo::cpu::linear_weight_grad));
  m.impl("linear_bias_grad", TORCH_BOX(&zoo::cpu::linear_bias_grad));
  m.impl("activation_grad", TORCH_BOX(&zoo::cpu::activation_grad));
  m.impl("matmul", TORCH_BOX(&zoo::cpu::matmul));
}

// setuptools names the library as a Python module; `import zoo._C` loads it, and its static initialisers register.
PyMODINIT_FUNC PyInit__C(void) {
  static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
