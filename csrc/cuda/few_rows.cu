// The gradients of a Linear of few rows in one pass: W is read once and dW written once, and nothing else is large.
//
// dY' = dY act'(saved) (M, N), dX = dY' W (M, K), dW = dY'^T X (N, K), db = the column sums of dY'. A block owns a band
// of K and all of N: a thread has a pack of the band, its X and its dX in registers, and walks down rows of W and dW.
// So dX is summed inside the block, in a fixed order, and no block waits for another. Where K has too few bands to keep
// the chip busy, blocks share N and a second, small kernel adds what they found.

#include "activation.cuh"
#include "wide.cuh"

#include <algorithm>

namespace zoo::cuda {
namespace {

constexpr int kAhead = 4;           // packs of W on their way at once, a thread
constexpr int kStaged = 32 * 1024;  // bytes of dY' in shared memory at once

// Of a pack. Eight rows of 2-byte types take half as much, so that dX and X stay in registers.
constexpr int bytes_of_pack(int rows, int element_bytes) {
  return rows == 8 && element_bytes == 2 ? 8 : 16;
}
constexpr int threads_of(int rows) {
  return rows == 1 ? 1024 : 512;
}
constexpr int rows_of(int64_t M) {
  return M <= 1 ? 1 : M <= 2 ? 2 : M <= 4 ? 4 : 8;
}

// How the work is dealt: 2^lanes threads across a band of K, `slices` blocks down N.
struct Plan {
  int lanes, slices;
};

struct Job {
  Backward b;
  int lanes;
  int64_t slice;  // rows of W that a block walks
  void* partial;  // (slices, M, K) accumulators, where there are slices
};

template <typename T, int rows>
__global__ void __launch_bounds__(threads_of(rows), 1) few_rows_kernel(const __grid_constant__ Job job) {
  using Acc = typename Accumulator<T>::type;
  constexpr int bytes = bytes_of_pack(rows, sizeof(T)), wide = bytes / sizeof(T);
  constexpr int threads = threads_of(rows), warps = threads / 32;
  static_assert(warps * 32 * wide * sizeof(Acc) <= kStaged);
  __shared__ __align__(16) Acc shared[kStaged / sizeof(Acc)];  // dY' along the rows, then what is added up for dX
  const Backward& b = job.b;
  const int M = static_cast<int>(b.M);
  const int band = 1 << job.lanes, groups = threads >> job.lanes;
  const int own = threadIdx.x & (band - 1), group = threadIdx.x >> job.lanes;
  const int64_t pack = (static_cast<int64_t>(blockIdx.x) << job.lanes) + own, packs = b.K / wide;
  const bool inside = pack < packs;
  const int64_t k = (inside ? pack : packs - 1) * wide;  // beyond the end the last pack is read and nothing stored
  const int64_t first = blockIdx.y * job.slice, end = first + job.slice < b.N ? first + job.slice : b.N;
  const T* weight = static_cast<const T*>(b.weight.data) + k;
  T* weight_grad = static_cast<T*>(b.weight_grad) + k;
  const bool wants_input = b.input_grad, wants_weight = b.weight_grad;

  Pack<T, bytes> x[rows];
#pragma unroll
  for (int m = 0; m < rows; ++m) {
    const T* from = static_cast<const T*>(b.input.data) + m * b.input.row_stride + k;
    x[m] = wants_weight && m < M ? load_pack<true, bytes>(from) : zero_pack<T, bytes>();
  }
  Acc sums[rows][wide] = {};
  constexpr int together = rows == 1 ? 4 : rows == 2 ? 2 : 1;  // columns of dY' a thread
  constexpr int stage = kStaged / sizeof(Acc) / rows;
  for (int64_t begin = first; begin < end; begin += stage) {
    const int count = static_cast<int>(end - begin < stage ? end - begin : stage);
    const T* from = weight + begin * b.weight.row_stride;
    Pack<T, bytes> w[kAhead];
    const auto load = [&](int n0) {
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const int n = n0 + u * groups;
        w[u] = load_pack<true, bytes>(from + (n < count ? n : count - 1) * b.weight.row_stride);
      }
    };
    if (wants_input) load(group);  // on their way while dY' is prepared

    if (begin > first) __syncthreads();  // nobody reads the last rows' dY' any more
    for (int n0 = threadIdx.x; n0 < count; n0 += together * threads) {
      T g[together][rows], z[together][rows];  // read before anything is computed: one wait for all
#pragma unroll
      for (int u = 0; u < together; ++u) {
        const int64_t n = begin + n0 + u * threads;
#pragma unroll
        for (int m = 0; m < rows; ++m) {
          g[u][m] = z[u][m] = narrow<T>(Acc(0));
          if (m >= M || n >= begin + count) continue;
          g[u][m] = static_cast<const T*>(b.grad.data)[m * b.grad.row_stride + n * b.grad.col_stride];
          if (b.act == Act::none) continue;
          z[u][m] = static_cast<const T*>(b.saved.data)[m * b.saved.row_stride + n * b.saved.col_stride];
        }
      }
#pragma unroll
      for (int u = 0; u < together; ++u) {
        const int n = n0 + u * threads;
        if (n >= count) break;
        Acc sum = 0;
#pragma unroll
        for (int m = 0; m < rows; ++m) {
          Acc v = widen<Acc>(g[u][m]);
          if (m < M && b.act != Act::none) {
            const Acc slope = derivative<Acc>(widen<Acc>(z[u][m]), b.act);
            // not a product with zero: relu's masked gradient is 0 even where it was infinite
            v = b.act == Act::relu ? (slope == Acc(0) ? Acc(0) : v) : v * slope;
          }
          sum += v;
          shared[n * rows + m] = widen<Acc>(narrow<T>(v));  // both products see it in the type, as if it were stored
        }
        if (b.bias_grad && blockIdx.x == 0) static_cast<T*>(b.bias_grad)[begin + n] = narrow<T>(sum);
      }
    }
    __syncthreads();
    if (!wants_input && !wants_weight) continue;

    T* to = weight_grad + begin * b.K;
    for (int n0 = group; n0 < count; n0 += kAhead * groups) {
      if (wants_input && n0 != group) load(n0);
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const int n = n0 + u * groups;
        if (n >= count) break;
        Acc g[rows];
#pragma unroll
        for (int m = 0; m < rows; ++m) g[m] = shared[n * rows + m];
        if (wants_input) {
#pragma unroll
          for (int m = 0; m < rows; ++m) {
#pragma unroll
            for (int j = 0; j < wide; ++j) sums[m][j] += g[m] * element(w[u], j);
          }
        }
        if (wants_weight && inside) {
          Acc out[wide];
#pragma unroll
          for (int j = 0; j < wide; ++j) out[j] = g[0] * element(x[0], j);
#pragma unroll
          for (int m = 1; m < rows; ++m) {
#pragma unroll
            for (int j = 0; j < wide; ++j) out[j] += g[m] * element(x[m], j);
          }
          store_pack(to + n * b.K, narrow_pack<T, bytes>(out));
        }
      }
    }
  }
  if (!wants_input) return;

  // dX: the lanes of a warp that have the same pack, then the warps, one row after the other
  for (int over = 16; over >= band; over /= 2) {
#pragma unroll
    for (int m = 0; m < rows; ++m) {
#pragma unroll
      for (int j = 0; j < wide; ++j) sums[m][j] += __shfl_xor_sync(~0u, sums[m][j], over);
    }
  }
  const int columns = band * wide;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * columns + threadIdx.x;
#pragma unroll
  for (int m = 0; m < rows; ++m) {
    if (m >= M) break;
    __syncthreads();  // nobody reads what was there any more
    if (threadIdx.x % 32 < band) {
#pragma unroll
      for (int j = 0; j < wide; ++j) shared[threadIdx.x / 32 * columns + own * wide + j] = sums[m][j];
    }
    __syncthreads();
    if (threadIdx.x >= columns || column >= b.K) continue;
    Acc sum = 0;
#pragma unroll 8
    for (int warp = 0; warp < warps; ++warp) sum += shared[warp * columns + threadIdx.x];
    if (gridDim.y == 1) static_cast<T*>(b.input_grad)[m * b.K + column] = narrow<T>(sum);
    else static_cast<Acc*>(job.partial)[(static_cast<int64_t>(blockIdx.y) * M + m) * b.K + column] = sum;
  }
}

template <typename T>
__global__ void sum_of_slices_kernel(
    const typename Accumulator<T>::type* partial, T* out, int64_t count, int slices) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  typename Accumulator<T>::type sum = 0;
#pragma unroll 8
  for (int s = 0; s < slices; ++s) sum += partial[s * count + i];
  out[i] = narrow<T>(sum);
}

int64_t divided_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

int size_of(Type type) {
  return type == Type::f64 ? 8 : type == Type::f32 ? 4 : 2;
}

// By what an H200 is expected to do: a band of 64 bytes at least, so that the memory's bursts are whole; 0.6 of the
// processors are enough to keep the memory busy; a second kernel costs 2.5 us, as much as 10 MB.
Plan plan_of(const Backward& b, Type type, int processors) {
  const int rows = rows_of(b.M), size = size_of(type), bytes = bytes_of_pack(rows, size);
  const int64_t packs = b.K * size / bytes;
  Plan plan{bytes == 8 ? 3 : 2, 1};
  if (!b.input_grad && !b.weight_grad) {  // db alone
    plan.slices = static_cast<int>(std::min<int64_t>(divided_up(b.N, 1024), processors));
    return plan;
  }
  while (plan.lanes < 5 && divided_up(packs, int64_t{1} << plan.lanes) > processors) ++plan.lanes;
  const int64_t bands = divided_up(packs, int64_t{1} << plan.lanes);
  const int64_t each_step = int64_t{kAhead} * (threads_of(rows) >> plan.lanes);  // rows of W that a block loads at once
  const double bytes_moved = 1.0 * b.N * b.K * size * ((b.input_grad != nullptr) + (b.weight_grad != nullptr));
  double lost = 0;  // in bytes that could have been moved
  int64_t slices = 1;
  if (bands > processors) {
    // the last round of blocks is not a whole one
    lost = 0.5 * bytes_moved * (static_cast<double>(divided_up(bands, processors) * processors) / bands - 1);
    slices = 4;
  } else {
    lost = bytes_moved * (0.6 * processors / bands - 1);
    slices = processors / bands;
  }
  slices = std::min<int64_t>({slices, divided_up(b.N, each_step), 64});
  if (slices > 1 && (!b.input_grad || lost > 10e6)) plan.slices = static_cast<int>(slices);
  return plan;
}

template <typename T, int rows>
void launch(const Job& job, const Plan& plan, cudaStream_t stream) {
  const int64_t packs = job.b.K * sizeof(T) / bytes_of_pack(rows, sizeof(T));
  const bool products = job.b.input_grad || job.b.weight_grad;
  const int64_t bands = products ? divided_up(packs, int64_t{1} << plan.lanes) : 1;
  const dim3 grid(static_cast<unsigned>(bands), static_cast<unsigned>(plan.slices));
  few_rows_kernel<T, rows><<<grid, threads_of(rows), 0, stream>>>(job);
  if (plan.slices == 1 || !job.b.input_grad) return;
  const int64_t count = job.b.M * job.b.K;
  sum_of_slices_kernel<T><<<static_cast<unsigned>(divided_up(count, 128)), 128, 0, stream>>>(
      static_cast<const typename Accumulator<T>::type*>(job.partial), static_cast<T*>(job.b.input_grad), count,
      plan.slices);
}

}  // namespace

bool few_rows_takes(const Backward& b, Type type) {
  const int64_t wide = 16 / size_of(type);
  const auto whole = [&](const Matrix& x, int64_t rows) {
    const bool aligned = reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
    return x.col_stride == 1 && (rows == 1 || x.row_stride % wide == 0) && aligned;
  };
  if (b.M < 1 || b.M > kGemvRows || b.N < 1 || b.K < 1) return false;
  if (!b.input_grad && !b.weight_grad) return b.bias_grad != nullptr;
  return b.K % wide == 0 && (!b.input_grad || whole(b.weight, b.N)) && (!b.weight_grad || whole(b.input, b.M));
}

int64_t few_rows_workspace(const Backward& b, Type type, int processors) {
  const int slices = plan_of(b, type, processors).slices;
  return slices > 1 && b.input_grad ? slices * b.M * b.K * (type == Type::f64 ? 8 : 4) : 0;
}

void few_rows_backward(const Backward& b, Type type, int processors, void* workspace, void* stream) {
  const Plan plan = plan_of(b, type, processors);
  const Job job{b, plan.lanes, divided_up(b.N, plan.slices), workspace};
  const auto s = static_cast<cudaStream_t>(stream);
  with_type(type, [&](auto element) {
    using T = decltype(element);
    switch (rows_of(b.M)) {
      case 1: return launch<T, 1>(job, plan, s);
      case 2: return launch<T, 2>(job, plan, s);
      case 4: return launch<T, 4>(job, plan, s);
      default: return launch<T, 8>(job, plan, s);
    }
  });
  check_launch("gradients of few rows");
}

}  // namespace zoo::cuda
