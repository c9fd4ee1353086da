// Which kernel computes a product, as a pure function of what is known before it runs.
//
// No torch and no CUDA here: the same function serves the CUDA core, `zoo.ops.explain` and the tests on a CPU.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace zoo {

enum class Type { f64, f32, f16, bf16 };

// torch.get_float32_matmul_precision()
enum class Precision { highest, high, medium };

// tiled: any product. gemv: up to eight rows. cublas: aten's product, then bias and activation. mma: 2-byte types by
// mma.sync. small: few tiles, any strides, a cluster of blocks shares K. wgmma: TMA and wgmma on 2-byte types.
// split3, split6: the same on float32, an operand as two or three bf16 planes and three or six products of planes; the
// planes lie in memory, or split6 makes those of a in registers.
enum class Kernel { tiled, gemv, cublas, mma, small, wgmma, split3, split6 };
constexpr int kKernels = 8;
const char* name_of(Kernel kernel);

// Where an operand lies: elements between rows of the output (columns, for b) and between steps of K.
struct Layout {
  int64_t outer, k;
  bool aligned;  // its first element, to 16 bytes

  // along K, along the rows (columns), or along neither: then it must be copied for a kernel that reads whole rows
  bool k_major() const { return k == 1; }
  bool mn_major() const { return k != 1 && outer == 1; }
};

// y (batch, M, N) = act(a (batch, M, K) b (batch, K, N) + bias)
struct Query {
  int64_t batch, M, N, K;
  Type type;
  Layout a, b;
  int activation;  // 0 none, 1 relu, 2 gelu, 3 gelu_tanh, 4 silu
  Precision precision;
  int capability;  // 90 for 9.0
  int processors;  // streaming multiprocessors
  bool hopper;     // this build has code for sm_90a
  bool a_in_planes = false;  // bf16 planes of a are made already, and they are taken
  bool b_in_planes = false;  // the same of b
  int through = 0;           // the epilogue multiplies by act'(saved), which it reads, and sums y's columns: an activation
};

// A kernel with its configuration: the tile; of tiles beyond whole rounds of all processors, whether they are spread over
// all of them along K; blocks that share the K of one tile; and which operands are copied into rows that TMA can read.
struct Choice {
  Kernel kernel = Kernel::tiled;
  int config = 0;
  int spread = 0;
  int slices = 1;
  int tile = 0;  // elements
  bool pack_a = false, pack_b = false;
  bool raw_a = false;  // split6: no planes of a in memory
  double microseconds = 0;  // by the model
};

struct Rejected {
  Kernel kernel;
  std::string reason;
};

struct Trace {
  std::string reason;         // of the choice
  std::string configuration;  // in words
  std::vector<Rejected> rejected;
};

// `forced` is a kernel's name, with ":shape" and ":shape:spread" where its tiles are to be forced too, or null. Throws
// std::runtime_error where it is unknown or cannot compute this product. The trace costs host time; without it nothing is
// allocated.
Choice choose(const Query& query, const char* forced, Trace* trace);

// Whether `forced` names a tile shape of split6 that splits a in registers.
bool forces_raw(const char* forced);

// A backward pass, dw = dY^T X and dx = dY W, by products of their own: what a pass before makes of dY, with db and the
// activation's derivative, and how the products read it.
struct Apart {
  bool planes = false;  // of float32, bf16 planes; else dY act'(z), where there is an activation, or nothing
  bool raw_dx = false;  // planes are for dW alone: dX reads dY itself
  bool turn = false;    // dW as X^T dY, turned: X is split in registers, and dY's planes are the other operand
  Choice dx, dw;        // dw of the turned product, where it is
  double microseconds = 0;
};

// Up to so many rows one block of the pass sums a column; more take a launch that adds up what the blocks have.
constexpr int kOneBlockRows = 256;

// A null query: this gradient is not asked for. `rows`: dY's rows are such that a pass can make planes of them.
Apart choose_apart(const Query* dw, const Query* dx, int activation, bool bias, bool rows, const char* forced);

// The product X^T dY, whose result is dW turned.
Query turned(const Query& dw);

// Both gradients in one launch of `small`, with db and the activation's derivative.
struct Together {
  bool better = false;
  bool pass = false;  // dY act'(z) by a pass before, not as dY is read
  int dw_slices = 1, dx_slices = 1;
  double microseconds = 0;
};

// `apart`: microseconds of choose_apart. Forced to `small`, it is better wherever it can be.
Together choose_together(const Query& dw, const Query& dx, int activation, double apart, const char* forced);

// A gradient's product whose epilogue multiplies by act'(saved) and sums the columns.
struct ThroughChoice {
  bool better = false;
  int config = 0;  // wgmma's tile shape; its tiles are not spread
  double microseconds = 0;
};

// `product` has no activation of its own; `saved` has rows that TMA can read. Better than the product and a pass over it;
// forced to `wgmma`, wherever it can be.
ThroughChoice choose_through(const Query& product, int activation, bool sums, const char* forced);

}  // namespace zoo
