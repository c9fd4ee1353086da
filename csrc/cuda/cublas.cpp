// The product by cuBLAS through aten, where zoo has no faster kernel: float64, chips without wgmma, and shapes where it was
// measured to be. Bias and activation follow in one pass of our own, where torch takes one or two more for them; 2-byte types
// and float32 in tf32 take the bias in cuBLASLt.

#include "products.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

namespace zoo::cuda {
namespace {

// Memory that others own, as a tensor.
Tensor seen(const Tensor& like, const void* data, const Sizes& sizes, const Sizes& strides) {
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(
      const_cast<void*>(data), static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), 0, dtype,
      aoti_torch_device_type_cuda(), like.get_device_index(), &handle));
  return Tensor(handle);
}

}  // namespace

void cublas_product(const Product& p, bool exact_float32, const Tensor& like, const Launch& launch) {
  const Type type = type_of(like);
  void* product = p.z ? p.z : p.y;
  if (p.batch != 1) {
    const Tensor y = seen(like, product, {p.batch, p.M, p.N}, {p.M * p.N, p.N, 1});
    const Tensor a = seen(like, p.a.data, {p.batch, p.M, p.K}, {p.a.batch_stride, p.a.row_stride, p.a.col_stride});
    const Tensor b = seen(like, p.b.data, {p.batch, p.K, p.N}, {p.b.batch_stride, p.b.row_stride, p.b.col_stride});
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_bmm_out(y.get(), a.get(), b.get()));
    return;
  }
  const Tensor y = seen(like, product, {p.M, p.N}, {p.N, 1});
  const Tensor a = seen(like, p.a.data, {p.M, p.K}, {p.a.row_stride, p.a.col_stride});
  const Tensor b = seen(like, p.b.data, {p.K, p.N}, {p.b.row_stride, p.b.col_stride});
  const bool with_bias = p.bias && type != Type::f64 && !exact_float32;
  if (with_bias) {
    const Tensor bias = seen(like, p.bias, {p.N}, {1});
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_addmm_out(y.get(), bias.get(), a.get(), b.get(), 1.0, 1.0));
  } else {
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_mm_out(y.get(), a.get(), b.get()));
  }
  const void* bias = with_bias ? nullptr : p.bias;
  if (bias || p.z || p.act != Act::none) {
    bias_and_activation(product, bias, bias ? p.z : nullptr, p.y, p.M, p.N, p.act, type, launch.stream);
  }
}

}  // namespace zoo::cuda
