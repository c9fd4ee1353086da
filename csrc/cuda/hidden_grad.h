// The gradient of an mlp's hidden layer, before its activation, by one product.
#pragma once

#include "../mlp.h"

namespace zoo::cuda {

// grad weight2 act'(saved) and, with `bias_grad`, its column sums (float32 with `wide`), by the epilogue of the product; nothing
// where no kernel has such an epilogue, or the product and a pass over it are better.
std::optional<HiddenGrad> hidden_grad(
    const Tensor& grad, const Tensor& weight2, const Tensor& saved, const std::string& activation, bool bias_grad, bool wide);

}  // namespace zoo::cuda
