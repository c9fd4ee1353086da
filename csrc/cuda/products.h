// A product of two matrices by the kernel that was chosen for it.
#pragma once

#include "../checks.h"
#include "kernels.h"

#include <string>

namespace zoo::cuda {

// Makes the tensor's device current and knows its current stream.
struct Launch {
  explicit Launch(const Tensor& t) : device(t.get_device_index()), guard(device) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  }
  int32_t device;
  torch::stable::accelerator::DeviceGuard guard;
  void* stream = nullptr;
};

Type type_of(const Tensor& t);
Act act_of(const std::string& activation);
bool aligned(const void* p);                       // to 16 bytes
Tensor bytes(const Tensor& like, int64_t count);  // memory on its device

// `product` as the choice of kernel sees it.
Query query_of(const Product& product, Type type, const Launch& launch);

// `product` as it would be for the tiled kernel; `like` gives dtype and device of what is needed on the way.
void run_product(const Product& product, const Tensor& like, const Launch& launch);

// `exact_float32`: the product is of float32 and stays so, by torch's setting.
void cublas_product(const Product& product, bool exact_float32, const Tensor& like, const Launch& launch);

// Of few rows in one kernel, on any chip. Of more, on Hopper, in one launch or as choose_apart says: dY', or planes of it, and db
// by a pass, then the products. False, and nothing done, where another way is better or the only one.
bool run_backward(const Backward& backward, const Tensor& like, const Launch& launch);

}  // namespace zoo::cuda
