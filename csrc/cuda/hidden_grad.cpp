#include "hidden_grad.h"

#include "products.h"
#include "sm90/sm90.h"

#include <cstdlib>

namespace zoo::cuda {

std::optional<HiddenGrad> hidden_grad(
    const Tensor& grad, const Tensor& weight2, const Tensor& saved, const std::string& activation, bool bias_grad, bool wide) {
  const Act act = act_of(activation);
  if (act == Act::none || !has_two_bytes(grad)) return std::nullopt;
  const Launch launch(grad);
  const Type type = type_of(grad);
  const Tensor g = as_matrix(grad), z = as_matrix(saved);
  Product p{};
  p.batch = 1;
  p.M = g.size(0), p.N = weight2.size(1), p.K = weight2.size(0);
  p.a = {g.const_data_ptr(), 0, g.stride(0), g.stride(1)};
  p.b = {weight2.const_data_ptr(), 0, weight2.stride(0), weight2.stride(1)};
  if (z.stride(1) != 1 || z.stride(0) < p.N || z.stride(0) % 8 != 0 || !aligned(z.const_data_ptr())) return std::nullopt;
  const Query q = query_of(p, type, launch);
  const ThroughChoice c = choose_through(q, static_cast<int>(act), bias_grad, std::getenv("ZOO_LINEAR_KERNEL"));
  if (!c.better) return std::nullopt;

  HiddenGrad made{empty(grad, with_last(grad, p.N)), empty(grad, Sizes{0})};
  sm90::Problem problem{};
  problem.M = static_cast<int32_t>(p.M);
  problem.N = static_cast<int32_t>(p.N);
  problem.K = static_cast<int32_t>(p.K);
  problem.type = type;
  problem.planes = 1;
  problem.a.data = p.a.data, problem.a.ld = p.a.row_stride;
  problem.b.data = p.b.data, problem.b.ld = p.b.row_stride, problem.b.mn = true;
  problem.y = made.product.mutable_data_ptr();
  problem.ld = p.N;
  problem.config = c.config;
  problem.processors = q.processors;
  problem.saved = z.const_data_ptr();
  problem.saved_ld = z.stride(0);
  problem.through = act;
  std::optional<Tensor> sums;
  const int32_t rows = sm90::through_rows(problem.M);
  if (bias_grad) {
    sums = bytes(grad, int64_t{4} * rows * p.N);
    problem.sums = static_cast<float*>(sums->mutable_data_ptr());
  }
  sm90::product(problem, launch.stream);
  if (bias_grad) {
    made.bias = wide ? empty(grad, Sizes{p.N}, aoti_torch_dtype_float32()) : empty(grad, Sizes{p.N});
    sm90::add_rows(problem.sums, rows, problem.N, made.bias.mutable_data_ptr(), wide ? Type::f32 : type, launch.stream);
  }
  return made;
}

}  // namespace zoo::cuda
