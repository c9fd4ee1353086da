// zoo's operators on CUDA: the arguments checked and laid out as strided products, which run on the current stream of
// the tensors' own device.

#include "hidden_grad.h"
#include "products.h"

#include "../mlp.h"

#ifndef ZOO_WITHOUT_PYTHON
#include <Python.h>
#endif

#include <tuple>

namespace zoo::cuda {
namespace {

// An empty tensor's pointer is null, and no kernel reads it.
Matrix matrix(const Tensor& t) {
  return {t.const_data_ptr(), 0, t.stride(0), t.stride(1)};
}

Matrix transposed(const Matrix& m) {
  return {m.data, m.batch_stride, m.col_stride, m.row_stride};
}

void forward(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, Act act, const Tensor& y,
    const Tensor* z, const Launch& launch) {
  const Tensor rows = as_matrix(input);
  Product p{};
  p.batch = 1;
  p.M = rows.size(0);
  p.N = weight.size(0);
  p.K = weight.size(1);
  p.a = matrix(rows);
  p.b = transposed(matrix(weight));
  std::optional<Tensor> dense_bias;
  if (bias) {
    dense_bias = dense(*bias);
    p.bias = dense_bias->const_data_ptr();
    p.bias_stride = 1;
  }
  p.y = y.mutable_data_ptr();
  p.z = z ? z->mutable_data_ptr() : nullptr;
  p.act = act;
  run_product(p, input, launch);
}

// y = a b for plain matrices
Tensor product(const Matrix& a, const Matrix& b, int64_t M, int64_t N, int64_t K, const Tensor& like, Sizes sizes) {
  const Launch launch(like);
  const Tensor y = empty(like, sizes);
  Product p{};
  p.batch = 1;
  p.M = M;
  p.N = N;
  p.K = K;
  p.a = a;
  p.b = b;
  p.y = y.mutable_data_ptr();
  run_product(p, like, launch);
  return y;
}

}  // namespace

Tensor linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  check_linear("zoo::linear", input, weight, bias);
  const Launch launch(input);
  const Tensor y = empty(input, with_last(input, weight.size(0)));
  forward(input, weight, bias, Act::none, y, nullptr, launch);
  return y;
}

std::tuple<Tensor, Tensor> linear_activation(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, const std::string& activation,
    bool save) {
  const bool keep = save && needs_preactivation(parse_activation(activation));
  check_linear("zoo::linear_activation", input, weight, bias);
  const Launch launch(input);
  const Tensor y = empty(input, with_last(input, weight.size(0)));
  const Tensor z = empty(input, keep ? sizes_of(y) : Sizes{0});
  forward(input, weight, bias, act_of(activation), y, keep ? &z : nullptr, launch);
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
  const Tensor sums = empty(grad, Sizes{N});
  const auto accumulator = grad.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  const Tensor workspace = torch::stable::new_empty(grad, Sizes{chunks > 1 ? chunks * N : 0}, accumulator);
  column_sum(matrix(rows), M, N, sums.mutable_data_ptr(), workspace.mutable_data_ptr(), type_of(grad), launch.stream);
  return sums;
}

Tensor activation_grad_op(const Tensor& grad, const Tensor& saved, const std::string& activation) {
  check_activation_grad("zoo::activation_grad", grad, saved);
  const Act act = act_of(activation);
  const Launch launch(grad);
  const Tensor dense_grad = dense(grad), dense_saved = dense(saved);
  const Tensor out = empty(grad, sizes_of(grad));
  activation_grad(
      dense_grad.const_data_ptr(), dense_saved.const_data_ptr(), out.mutable_data_ptr(), out.numel(), act,
      type_of(grad), launch.stream);
  return out;
}

std::tuple<Tensor, Tensor, Tensor> linear_backward(
    const Tensor& grad, const std::optional<Tensor>& saved, const std::optional<Tensor>& input,
    const std::optional<Tensor>& weight, const std::string& activation, bool input_grad, bool weight_grad,
    bool bias_grad, bool wide) {
  const Act act = act_of(activation);
  check_backward(
      "zoo::linear_backward", grad, saved, input, weight, parse_activation(activation), input_grad, weight_grad);
  const Launch launch(grad);
  const Tensor g = as_matrix(grad);
  Backward b{};
  b.M = g.size(0);
  b.N = g.size(1);
  b.K = input_grad ? weight->size(1) : weight_grad ? input->size(input->dim() - 1) : 1;
  b.grad = matrix(g);
  b.act = act;
  std::optional<Tensor> z, x;
  if (act != Act::none) {
    z = as_matrix(*saved);
    b.saved = matrix(*z);
  }
  if (weight_grad) {
    x = as_matrix(*input);
    b.input = matrix(*x);
  }
  if (input_grad) b.weight = matrix(*weight);
  const auto made = [&](bool wanted, Sizes sizes) {
    return empty(grad, wanted ? std::move(sizes) : Sizes{0});
  };
  // of a 2-byte type the parameters' gradients are computed in it, then widened, both in one launch
  const auto widened = [&](const Tensor& dx, const Tensor& dw, const Tensor& db) -> std::tuple<Tensor, Tensor, Tensor> {
    if (!wide || !has_two_bytes(grad)) return {dx, dw, db};
    Cast jobs[2];
    Tensor out[2] = {dw, db};
    int count = 0;
    for (int i = 0; i < 2; ++i) {
      if (!(i == 0 ? weight_grad : bias_grad)) continue;
      const Tensor low = out[i];
      out[i] = empty(grad, sizes_of(low), aoti_torch_dtype_float32());
      jobs[count++] = {low.const_data_ptr(), out[i].mutable_data_ptr(), low.numel()};
    }
    cast(jobs, count, type_of(grad), Type::f32, launch.stream);
    return {dx, out[0], out[1]};
  };
  const Tensor dx = made(input_grad, with_last(grad, b.K));
  const Tensor dw = made(weight_grad, {b.N, b.K});
  const Tensor db = made(bias_grad, {b.N});
  b.input_grad = input_grad ? dx.mutable_data_ptr() : nullptr;
  b.weight_grad = weight_grad ? dw.mutable_data_ptr() : nullptr;
  b.bias_grad = bias_grad ? db.mutable_data_ptr() : nullptr;
  if (run_backward(b, grad, launch)) return widened(dx, dw, db);
  const Tensor through = act == Act::none ? grad : activation_grad_op(grad, *saved, activation);
  return widened(
      input_grad ? linear_input_grad(through, *weight) : dx, weight_grad ? linear_weight_grad(through, *input) : dw,
      bias_grad ? linear_bias_grad(through) : db);
}

std::vector<Tensor> lowered(const Tensor& input, const std::vector<const Tensor*>& parameters) {
  const Launch launch(input);
  std::vector<Tensor> from, to;
  Cast jobs[kMostCasts];
  int count = 0;
  for (const Tensor* p : parameters) {
    from.push_back(dense(*p));
    to.push_back(empty(input, sizes_of(*p)));
    jobs[count++] = {from.back().const_data_ptr(), to.back().mutable_data_ptr(), p->numel()};
  }
  cast(jobs, count, Type::f32, type_of(input), launch.stream);
  return to;
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
  const Tensor y = empty(a, sizes);
  Product p{};
  p.batch = batch;
  p.M = a3.size(1);
  p.N = b3.size(2);
  p.K = a3.size(2);
  p.a = {a3.const_data_ptr(), a3.stride(0), a3.stride(1), a3.stride(2)};
  p.b = {b3.const_data_ptr(), b3.stride(0), b3.stride(1), b3.stride(2)};
  p.y = y.mutable_data_ptr();
  run_product(p, a, launch);
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
  m.impl("linear_cast", TORCH_BOX((&zoo::linear_cast<&zoo::cuda::lowered, &zoo::cuda::linear_activation>)));
  m.impl("mlp_cast", TORCH_BOX((&zoo::mlp_cast<&zoo::cuda::lowered, &zoo::cuda::linear, &zoo::cuda::linear_activation>)));
  m.impl("linear_backward", TORCH_BOX(&zoo::cuda::linear_backward));
  m.impl("mlp", TORCH_BOX((&zoo::mlp<&zoo::cuda::linear, &zoo::cuda::linear_activation>)));
  m.impl("mlp_backward", TORCH_BOX((&zoo::mlp_backward<&zoo::cuda::linear_backward, &zoo::cuda::hidden_grad>)));
  m.impl("matmul", TORCH_BOX(&zoo::cuda::matmul));
}

#ifndef ZOO_WITHOUT_PYTHON
PyMODINIT_FUNC PyInit__C_cuda(void) {
  static struct PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
#endif
