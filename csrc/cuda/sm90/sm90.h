// The Hopper kernels' launchers, seen from the operators. Each throws std::runtime_error where a launch fails.
#pragma once

#include "../kernels.h"

namespace zoo::cuda::sm90 {

// An operand in 2-byte elements. Not `mn`: row i of a (column i of b) lies `ld` elements after row i - 1, K runs along
// memory. `mn`: M (N) runs along memory, `ld` elements between steps of K. Of a float32 operand these are its bf16 planes,
// `plane` elements apart; `source` is then itself, and `flags` what `split` found.
struct Operand {
  const void* data;
  int64_t ld, plane;
  bool mn;
  const float* source;
  int64_t source_row, source_k;  // strides
  const int32_t* flags;
  int32_t flag_count;
  // of a gradient: what it is multiplied by, act'(saved), with the same strides; or null
  const float* saved;
  Act act;
};

// y (M, N) = act(a (M, K) b (K, N) + bias), z (M, N) before the activation where not null. With `saved`
// y = (a b) through'(saved), and nothing else.
struct Problem {
  int32_t M, N, K;
  Type type;
  int32_t planes;  // of an operand: 1, or of float32 2 or 3
  bool raw_a;      // a's data is float32, rows that TMA can read, and has no planes; needs 3 of b
  bool turned;     // y is (N, M): a along M and raw, no bias, no activation, no z
  Operand a, b;
  const void* bias;  // of the output's type, dense, or null
  void* y;
  void* z;
  int64_t ld;  // of y and z
  Act act;
  int32_t config, spread, processors;  // as zoo::Choice has them
  void* workspace;                     // spread: its first arrival_bytes() are zero
  int64_t workspace_bytes;             // arrival_bytes(), and two tiles of floats a processor
  // 2-byte types, a along K, b along N, config 0 or 1, not spread: (M, N), rows `saved_ld` apart, as y's and ld multiples
  // of 16 bytes; or null
  const void* saved;
  int64_t saved_ld;
  Act through;
  float* sums;  // (through_rows(M), N): parts of y's column sums, before y is rounded; or null
};
int32_t through_rows(int32_t M);
// sums (N), of any type but float64, over the M dense rows; N a multiple of 4
void add_rows(const float* rows, int32_t M, int32_t N, void* sums, Type type, void* stream);

int64_t arrival_bytes();
void product(const Problem& problem, void* stream);

// Any strides, no planes: `a` and `b` as strided matrices of (M, K) and (K, N).
struct SmallProblem {
  int32_t M, N, K;
  Type type;
  Matrix a, b;
  const void* bias;
  void* y;
  void* z;
  int64_t ld;
  Act act;
  int32_t slices;  // blocks that share the K of a tile: 1, 2, 4 or 8
  // small_backward alone:
  const void* saved;  // a is multiplied by act'(saved), with a's strides; or null
  Act through;
  void* sums;  // (M): over K of a's rows; or null
};
void small_product(const SmallProblem& problem, void* stream);

// dW = dY'^T X with db in `sums`, and dX = dY' W, in one launch. X and W have dense rows, dY dense rows of more than one
// element; the slices are equal, or 1 for one of both.
void small_backward(const SmallProblem& dw, const SmallProblem& dx, void* stream);

// float32 (rows, cols), columns dense, to `count` bf16 planes of row stride planes_ld, a multiple of 8. Block i of the
// launch sets flags[i] to whether it met a value that is not finite.
struct Planes {
  const float* x;
  int64_t ld;
  int32_t rows, cols, count;
  void* planes;
  int64_t planes_ld, plane;
  int32_t* flags;
};
int32_t split_blocks(int32_t rows, int32_t cols);
void split(const Planes& first, const Planes& second, void* stream);  // one launch for both

// dY' = dY act'(saved) and its column sums, in one pass. Rows of grad, saved and out are `ld` elements apart, N and ld
// multiples of 8 and all of them aligned to 16 bytes. dY' goes to `out`, and where it is float32 into `planes`; either may be
// null. `saved` is the activation's input, for relu its output; with Act::none it is not read.
struct GradientPass {
  int32_t M, N;
  int64_t ld;
  Type type;
  Act act;
  const void* grad;
  const void* saved;
  void* out;
  Planes planes;       // planes, planes_ld, plane, count and flags, one of gradient_flags()
  void* sums;          // (N), or null
  float* partial;      // gradient_chunks() * N, where there is more than one chunk
};
int32_t gradient_chunks(int32_t M, int32_t N);
int32_t gradient_flags(int32_t M, int32_t N);
void gradient_pass(const GradientPass& pass, void* stream);

// Any (rows, cols) matrix into rows of stride `ld`; elements of 2 or 4 bytes.
void pack(const Matrix& from, int64_t rows, int64_t cols, void* to, int64_t ld, int element_bytes, void* stream);

}  // namespace zoo::cuda::sm90
