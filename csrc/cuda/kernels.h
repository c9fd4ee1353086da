// The kernels' launchers, seen from the operators: plain structs, no CUDA headers.
#pragma once

#include "../choice.h"

#include <cstdint>

namespace zoo::cuda {

// A GPU as the choice of kernel sees it.
struct Chip {
  int capability, processors;
};
Chip chip_of(int device);

void zero(void* memory, int64_t bytes, void* stream);

enum class Act : int { none, relu, gelu, gelu_tanh, silu };

// A batch of matrices anywhere in memory. Strides in elements; any may be zero or negative.
struct Matrix {
  const void* data;
  int64_t batch_stride, row_stride, col_stride;
};

// y = act(a b + bias): a (batch, M, K), b (batch, K, N), bias (N) or null, y and z (batch, M, N) row-major.
// z, where not null, receives the product before the activation.
struct Product {
  int64_t batch, M, N, K;
  Matrix a, b;
  const void* bias;
  int64_t bias_stride;
  void* y;
  void* z;
  Act act;
};

// The reference of all other kernels: any shape, any strides, any type; accumulates in float (double for f64).
void tiled_product(const Product& product, Type type, void* stream);

// At most kGemvRows rows; K along memory in a and b, rows of both whole and aligned to 16 bytes.
constexpr int64_t kGemvRows = 8;
void gemv(const Product& product, Type type, void* stream);

// dY' = grad act'(saved) (M, N), and of it what is asked for: dX = dY' weight (M, K), dW = dY'^T input (N, K), db (N).
struct Backward {
  int64_t M, N, K;
  Matrix grad, saved, input, weight;
  Act act;
  void* input_grad;
  void* weight_grad;
  void* bias_grad;  // each null where it is not asked for
};

// At most kGemvRows rows; rows of weight and input along K, whole and aligned to 16 bytes, where they are read.
// `workspace` holds few_rows_workspace() bytes.
bool few_rows_takes(const Backward& backward, Type type);
int64_t few_rows_workspace(const Backward& backward, Type type, int processors);
void few_rows_backward(const Backward& backward, Type type, int processors, void* workspace, void* stream);

// 2-byte types, batch 1; rows of a and b, along K or along M (N), whole and aligned to 16 bytes apart.
void mma_product(const Product& product, Type type, void* stream);

// y = act(z + bias) over row-major (M, N); `z_out`, where not null, receives z + bias. In place is fine, bias may be null.
void bias_and_activation(
    const void* z, const void* bias, void* z_out, void* y, int64_t M, int64_t N, Act act, Type type, void* stream);

// sums[n] = sum over m of grad[m, n], in a fixed order. `workspace` holds column_sum_chunks() * N accumulators.
int64_t column_sum_chunks(int64_t M);
void column_sum(const Matrix& grad, int64_t M, int64_t N, void* sums, void* workspace, Type type, void* stream);

// out = grad * act'(saved), elementwise over dense arrays of `count` elements. saved is the activation's input; for
// relu its output.
void activation_grad(
    const void* grad, const void* saved, void* out, int64_t count, Act act, Type type, void* stream);

// Dense arrays of `count` elements from float32 to a 2-byte type or back.
struct Cast {
  const void* from;
  void* to;
  int64_t count;
};
constexpr int kMostCasts = 4;
void cast(const Cast* jobs, int count, Type from, Type to, void* stream);

}  // namespace zoo::cuda
