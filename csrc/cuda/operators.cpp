// zoo's operators on CUDA: the arguments checked and laid out as strided products, the kernels launched on the current
// stream of the tensors' own device.

#include "../checks.h"
#include "kernels.h"

#include <Python.h>

#include <tuple>

namespace zoo::cuda {
namespace {

using torch::stable::accelerator::DeviceGuard;

// Makes the tensor's device current and knows its current stream.
struct Launch {
  explicit Launch(const Tensor& t) : guard(t.get_device_index()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
  }
  DeviceGuard guard;
  void* stream = nullptr;
};

Type type_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Double: return Type::f64;
    case ScalarType::Half: return Type::f16;
    case ScalarType::BFloat16: return Type::bf16;
    default: return Type::f32;
  }
}

Act act_of(const std::string& name) {
  switch (parse_activation(name)) {
    case Activation::relu: return Act::relu;
    case Activation::gelu: return Act::gelu;
    case Activation::gelu_tanh: return Act::gelu_tanh;
    case Activation::silu: return Act::silu;
    case Activation::none: break;
  }
  return Act::none;
}

// An empty tensor's pointer is null, and no kernel reads it.
Matrix matrix(const Tensor& t) {
  return {t.const_data_ptr(), 0, t.stride(0), t.stride(1)};
}

Matrix transposed(const Matrix& m) {
  return {m.data, m.batch_stride, m.col_stride, m.row_stride};
}

void forward(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, Act act, const Tensor& y,
    const Tensor* z) {
  const Tensor rows = as_matrix(input);
  Product p{};
  p.batch = 1;
  p.M = rows.size(0);
  p.N = weight.size(0);
  p.K = weight.size(1);
  p.a = matrix(rows);
  p.b = transposed(matrix(weight));
  if (bias) {
    p.bias = bias->const_data_ptr();
    p.bias_stride = bias->stride(0);
  }
  p.y = y.mutable_data_ptr();
  p.z = z ? z->mutable_data_ptr() : nullptr;
  p.act = act;
  tiled_product(p, type_of(input), Launch(input).stream);
}

// y = a b for plain matrices
Tensor product(const Matrix& a, const Matrix& b, int64_t M, int64_t N, int64_t K, const Tensor& like, Sizes sizes) {
  const Launch launch(like);
  const Tensor y = torch::stable::new_empty(like, sizes);
  Product p{};
  p.batch = 1;
  p.M = M;
  p.N = N;
  p.K = K;
  p.a = a;
  p.b = b;
  p.y = y.mutable_data_ptr();
  tiled_product(p, type_of(like), launch.stream);
  return y;
}

}  // namespace

Tensor linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  check_linear("zoo::linear", input, weight, bias);
  const Launch launch(input);
  const Tensor y = torch::stable::new_empty(input, with_last(input, weight.size(0)));
  forward(input, weight, bias, Act::none, y, nullptr);
  return y;
}

std::tuple<Tensor, Tensor> linear_activation(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, const std::string& activation,
    bool save) {
  const bool keep = save && needs_preactivation(parse_activation(activation));
  check_linear("zoo::linear_activation", input, weight, bias);
  const Launch launch(input);
  const Tensor y = torch::stable::new_empty(input, with_last(input, weight.size(0)));
  const Tensor z = torch::stable::new_empty(input, keep ? sizes_of(y) : Sizes{0});
  forward(input, weight, bias, act_of(activation), y, keep ? &z : nullptr);
  return {y, z};
}

Tensor linear_input_grad(const Tensor& grad, const Tensor& weight) {
  check_input_grad("zoo::linear_input_grad", grad, weight);
  const Tensor rows = as_matrix(grad);
  return product(
      matrix(rows), matrix(weight), rows.size(0), weight.size(1), weight.size(0), grad,
      with_last(grad, weight.size(1)));
}

Tensor linear_weight_grad(const Tensor& grad, const Tensor& input) {
  check_weight_grad("zoo::linear_weight_grad", grad, input);
  const Tensor g = as_matrix(grad), x = as_matrix(input);
  return product(
      transposed(matrix(g)), matrix(x), g.size(1), x.size(1), g.size(0), grad, Sizes{g.size(1), x.size(1)});
}

Tensor linear_bias_grad(const Tensor& grad) {
  check_bias_grad("zoo::linear_bias_grad", grad);
  const Launch launch(grad);
  const Tensor rows = as_matrix(grad);
  const int64_t M = rows.size(0), N = rows.size(1), chunks = column_sum_chunks(M);
  const Tensor sums = torch::stable::new_empty(grad, Sizes{N});
  const auto accumulator = grad.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  const Tensor workspace = torch::stable::new_empty(grad, Sizes{chunks > 1 ? chunks * N : 0}, accumulator);
  column_sum(matrix(rows), M, N, sums.mutable_data_ptr(), workspace.mutable_data_ptr(), type_of(grad), launch.stream);
  return sums;
}

Tensor activation_grad_op(const Tensor& grad, const Tensor& saved, const std::string& activation) {
  check_activation_grad("zoo::activation_grad", grad, saved);
  const Act act = act_of(activation);
  const Launch launch(grad);
  const Tensor dense_grad = torch::stable::contiguous(grad), dense_saved = torch::stable::contiguous(saved);
  const Tensor out = torch::stable::new_empty(grad, sizes_of(grad));
  activation_grad(
      dense_grad.const_data_ptr(), dense_saved.const_data_ptr(), out.mutable_data_ptr(), out.numel(), act,
      type_of(grad), launch.stream);
  return out;
}

Tensor matmul(const Tensor& a, const Tensor& b) {
  check_matmul("zoo::matmul", a, b);
  const Launch launch(a);
  const int64_t d = a.dim();
  int64_t batch = 1;
  for (int64_t i = 0; i < d - 2; ++i) batch *= a.size(i);
  const Tensor a3 = torch::stable::reshape(a, Sizes{batch, a.size(d - 2), a.size(d - 1)});
  const Tensor b3 = torch::stable::reshape(b, Sizes{batch, b.size(d - 2), b.size(d - 1)});
  Sizes sizes = sizes_of(a);
  sizes.back() = b.size(d - 1);
  const Tensor y = torch::stable::new_empty(a, sizes);
  Product p{};
  p.batch = batch;
  p.M = a3.size(1);
  p.N = b3.size(2);
  p.K = a3.size(2);
  p.a = {a3.const_data_ptr(), a3.stride(0), a3.stride(1), a3.stride(2)};
  p.b = {b3.const_data_ptr(), b3.stride(0), b3.stride(1), b3.stride(2)};
  p.y = y.mutable_data_ptr();
  tiled_product(p, type_of(a), launch.stream);
  return y;
}

}  // namespace zoo::cuda

STABLE_TORCH_LIBRARY_IMPL(zoo, CUDA, m) {
  m.impl("linear", TORCH_BOX(&zoo::cuda::linear));
  m.impl("linear_activation", TORCH_BOX(&zoo::cuda::linear_activation));
  m.impl("linear_input_grad", TORCH_BOX(&zoo::cuda::linear_input_grad));
  m.impl("linear_weight_grad", TORCH_BOX(&zoo::cuda::linear_weight_grad));
  m.impl("linear_bias_grad", TORCH_BOX(&zoo::cuda::linear_bias_grad));
  m.impl("activation_grad", TORCH_BOX(&zoo::cuda::activation_grad_op));
  m.impl("matmul", TORCH_BOX(&zoo::cuda::matmul));
}

PyMODINIT_FUNC PyInit__C_cuda(void) {
  static struct PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
