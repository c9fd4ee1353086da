// The mlp and its gradients, and layers whose parameters are cast, the same on every device: by its own linear operators.
#pragma once

#include "checks.h"

#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

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
  return {output, save ? hidden : empty(output, Sizes{0}), product};
}

// The two with the parameters in float32, cast to the input's dtype on the way; the weights that were multiplied follow the
// outputs, for backward. `lowered` casts a layer's parameters, all at once.
template <auto lowered, auto linear_activation>
std::tuple<Tensor, Tensor, Tensor> linear_cast(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, const std::string& activation, bool save) {
  const char* op = "zoo::linear_cast";
  std::vector<const Tensor*> parameters{&weight};
  check_cast(op, input, weight, "weight");
  if (bias) {
    check_cast(op, input, *bias, "bias");
    parameters.push_back(&*bias);
  }
  const std::vector<Tensor> low = lowered(input, parameters);
  auto [y, z] = linear_activation(input, low[0], bias ? std::optional<Tensor>(low[1]) : std::nullopt, activation, save);
  return {y, z, low[0]};
}

template <auto lowered, auto linear, auto linear_activation>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> mlp_cast(
    const Tensor& input, const Tensor& weight1, const std::optional<Tensor>& bias1, const Tensor& weight2,
    const std::optional<Tensor>& bias2, const std::string& activation, bool save) {
  const char* op = "zoo::mlp_cast";
  std::vector<const Tensor*> parameters{&weight1, &weight2};
  check_cast(op, input, weight1, "weight1");
  check_cast(op, input, weight2, "weight2");
  for (const auto* bias : {&bias1, &bias2}) {
    if (!*bias) continue;
    check_cast(op, input, **bias, bias == &bias1 ? "bias1" : "bias2");
    parameters.push_back(&**bias);
  }
  const std::vector<Tensor> low = lowered(input, parameters);
  std::optional<Tensor> low1, low2;
  if (bias1) low1 = low[2];
  if (bias2) low2 = low.back();
  auto [output, hidden, product] = mlp<linear, linear_activation>(input, low[0], low1, low[1], low2, activation, save);
  return {output, hidden, product, low[0], low[1]};
}

// grad weight2 act'(saved), and its column sums, empty where they are not asked for.
struct HiddenGrad {
  Tensor product, bias;
};

// dX, dW1, db1, dW2, db2; each empty where it is not asked for. `wide`: those of parameters in float32, of a 2-byte type.
// `hidden_grad`, where a device has one, may make grad weight2 act'(saved) and db1 in one go, or nothing.
template <auto linear_backward, auto hidden_grad = nullptr>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> mlp_backward(
    const Tensor& grad, const std::optional<Tensor>& hidden, const std::optional<Tensor>& saved,
    const std::optional<Tensor>& input, const std::optional<Tensor>& weight1, const std::optional<Tensor>& weight2,
    const std::string& activation, bool input_grad, bool weight1_grad, bool bias1_grad, bool weight2_grad,
    bool bias2_grad, bool wide) {
  const MlpGradients asked{input_grad, weight1_grad, bias1_grad, weight2_grad, bias2_grad};
  check_mlp_backward(
      "zoo::mlp_backward", grad, hidden, saved, input, weight1, weight2, parse_activation(activation), asked);
  if constexpr (!std::is_same_v<decltype(hidden_grad), std::nullptr_t>) {
    std::optional<HiddenGrad> made;
    if (asked.first() && saved) made = hidden_grad(grad, *weight2, *saved, activation, bias1_grad, wide);
    if (made) {
      auto [dx, dw1, no_db1] = linear_backward(
          made->product, std::nullopt, input, weight1, "none", input_grad, weight1_grad, false, wide);
      auto [no_dh, dw2, db2] = linear_backward(
          grad, std::nullopt, hidden, std::nullopt, "none", false, weight2_grad, bias2_grad, wide);
      return {dx, dw1, made->bias, dw2, db2};
    }
  }
  auto [through, dw2, db2] =
      linear_backward(grad, std::nullopt, hidden, weight2, "none", asked.first(), weight2_grad, bias2_grad, wide);
  if (!asked.first()) {
    const auto none = [&] { return empty(grad, Sizes{0}); };
    return {none(), none(), none(), dw2, db2};
  }
  auto [dx, dw1, db1] =
      linear_backward(through, saved, input, weight1, activation, input_grad, weight1_grad, bias1_grad, wide);
  return {dx, dw1, db1, dw2, db2};
}

}  // namespace zoo
