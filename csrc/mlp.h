// The mlp and its gradients, the same on every device: two calls of the device's own linear operators.
#pragma once

#include "checks.h"

#include <string>
#include <tuple>

namespace zoo {

// act(input weight1^T + bias1) weight2^T + bias2; with `save` also what backward needs: the hidden layer (act's output)
// and, unless it tells as much, the product before it.
template <auto linear, auto linear_activation>
std::tuple<Tensor, Tensor, Tensor> mlp(
    const Tensor& input, const Tensor& weight1, const std::optional<Tensor>& bias1, const Tensor& weight2,
    const std::optional<Tensor>& bias2, const std::string& activation, bool save) {
  parse_activation(activation);
  check_mlp("zoo::mlp", input, weight1, bias1, weight2, bias2);
  auto [hidden, product] = linear_activation(input, weight1, bias1, activation, save);
  const Tensor output = linear(hidden, weight2, bias2);
  return {output, save ? hidden : torch::stable::new_empty(output, Sizes{0}), product};
}

// dX, dW1, db1, dW2, db2; each empty where it is not asked for.
template <auto linear_backward>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> mlp_backward(
    const Tensor& grad, const std::optional<Tensor>& hidden, const std::optional<Tensor>& saved,
    const std::optional<Tensor>& input, const std::optional<Tensor>& weight1, const std::optional<Tensor>& weight2,
    const std::string& activation, bool input_grad, bool weight1_grad, bool bias1_grad, bool weight2_grad,
    bool bias2_grad) {
  const MlpGradients asked{input_grad, weight1_grad, bias1_grad, weight2_grad, bias2_grad};
  check_mlp_backward(
      "zoo::mlp_backward", grad, hidden, saved, input, weight1, weight2, parse_activation(activation), asked);
  auto [through, dw2, db2] =
      linear_backward(grad, std::nullopt, hidden, weight2, "none", asked.first(), weight2_grad, bias2_grad);
  if (!asked.first()) {
    const auto none = [&] { return torch::stable::new_empty(grad, Sizes{0}); };
    return {none(), none(), none(), dw2, db2};
  }
  auto [dx, dw1, db1] =
      linear_backward(through, saved, input, weight1, activation, input_grad, weight1_grad, bias1_grad);
  return {dx, dw1, db1, dw2, db2};
}

}  // namespace zoo
