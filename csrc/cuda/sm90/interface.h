// The C interface of the prototype: y (M x N) = act(A (M x K) B (K x N) + bias).
#pragma once

#include <stdint.h>

// 2-byte elements. Not `mn`: row i of A (column i of B) is `ld` elements after row i - 1, K runs along memory. `mn`: M
// (N) runs along memory, `ld` elements between steps of K. float32 problems take three bf16 planes, `plane` apart.
struct zoo_operand {
  const void* data;
  int64_t ld, plane;
  int32_t mn;
  // of a float32 operand: itself, and the words of zoo_split
  int32_t flag_count;
  const int32_t* flags;
  const float* source;
  int64_t source_row, source_k;
};

enum { zoo_arrival_bytes = 1 << 18 };

struct zoo_problem {
  int32_t M, N, K;
  int32_t type;  // 0 bf16, 1 fp16, 2 float32 in planes
  struct zoo_operand a, b;
  const void* bias;  // of the output's type, or null
  void* y;
  void* z;     // before the activation, or null
  int64_t ld;  // of y and z
  int32_t act;
  int32_t config, spread, slices, group, sms, unused;  // spread: 0 no tiles, 1 those beyond full rounds, 2 a round more
  float* sums;      // configs 20 and 21, y = (A B) act'(z): column sums of y over 32 rows, 4 ceil(M / 128) x N
  void* workspace;  // for spread; its first zoo_arrival_bytes zero before and after
  int64_t workspace_bytes;
};

#ifdef __cplusplus
extern "C" {
#endif
int zoo_gemm(const struct zoo_problem* problem, void* stream);
const char* zoo_message();

// float32 (rows x cols, row stride ld) to three bf16 planes of row stride planes_ld, a multiple of 8. Block i of the
// launch sets flags[i] to whether it met a value that is not finite.
struct zoo_planes {
  const float* x;
  int64_t ld;
  int32_t rows, cols;
  void* planes;
  int64_t planes_ld, plane;
  int32_t* flags;
};
int zoo_split_blocks(int32_t rows, int32_t cols);
// One launch for both; the second may be null.
int zoo_split(const struct zoo_planes* first, const struct zoo_planes* second, void* stream);

// out (or planes) = dy * act'(z), db its column sums. N and ld multiples of 8; dense but for ld.
struct zoo_grad_work {
  int32_t M, N, type, act;
  int64_t ld;
  const void* dy;
  const void* z;
  void* out;                 // of the type; float32: may be null
  struct zoo_planes planes;  // float32: planes, planes_ld, plane, flags (one a block: chunks * ceil(N / 256))
  void* db;                  // or null
  float* partial;            // zoo_grad_chunks(M) * N
  uint32_t* arrivals;        // ceil(N / 256), zero before and after
  int32_t chunk;             // set by the launcher
};
// db = the sum of rows of `sums`
int zoo_sum_rows(const float* sums, int32_t rows, int32_t N, void* db, int32_t type, void* stream);
int zoo_grad_chunks(int32_t M);
int zoo_grad(const struct zoo_grad_work* work, void* stream);
#ifdef __cplusplus
}
#endif
