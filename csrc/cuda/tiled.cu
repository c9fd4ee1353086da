// The tiled product: shared-memory tiles, one thread a 4x4 piece of the output, bias and activation in the epilogue.
//
// It asks nothing of its operands, neither alignment nor strides, and is the reference that faster kernels are tested
// against. Offsets are 64-bit: more than 2^31 elements are fine.

#include "activation.cuh"
#include "types.cuh"
#include "wide.cuh"

namespace zoo::cuda {
namespace {

constexpr int kTile = 64;    // rows and columns of the output a block computes
constexpr int kDepth = 16;   // of K, per step
constexpr int kPiece = 4;    // rows and columns of the output a thread computes
constexpr int kThreads = (kTile / kPiece) * (kTile / kPiece);

// Loads tile[k][i] = matrix[i0 + i, k0 + k], zero outside. Consecutive threads follow the smaller stride.
template <typename T, typename Acc>
__device__ void load_tile(
    Acc (*tile)[kTile + 1], const T* data, int64_t i_stride, int64_t k_stride, int64_t i0, int64_t k0, int64_t i_size,
    int64_t k_size) {
  const bool along_k = llabs(k_stride) <= llabs(i_stride);
  for (int e = threadIdx.x; e < kTile * kDepth; e += kThreads) {
    const int k = along_k ? e % kDepth : e / kTile;
    const int i = along_k ? e / kDepth : e % kTile;
    const bool inside = i0 + i < i_size && k0 + k < k_size;
    tile[k][i] = inside ? widen<Acc>(data[(i0 + i) * i_stride + (k0 + k) * k_stride]) : Acc(0);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) tiled_kernel(Product p) {
  using Acc = typename Accumulator<T>::type;
  __shared__ Acc a_tile[kDepth][kTile + 1];
  __shared__ Acc b_tile[kDepth][kTile + 1];

  const int64_t n_tiles = (p.N + kTile - 1) / kTile;
  const int64_t m_tiles = (p.M + kTile - 1) / kTile;
  const int64_t batch = blockIdx.x / (n_tiles * m_tiles);
  const int64_t m0 = blockIdx.x / n_tiles % m_tiles * kTile;
  const int64_t n0 = blockIdx.x % n_tiles * kTile;
  const T* a = static_cast<const T*>(p.a.data) + batch * p.a.batch_stride;
  const T* b = static_cast<const T*>(p.b.data) + batch * p.b.batch_stride;
  const int tm = threadIdx.x / (kTile / kPiece) * kPiece;
  const int tn = threadIdx.x % (kTile / kPiece) * kPiece;

  Acc sums[kPiece][kPiece] = {};
  for (int64_t k0 = 0; k0 < p.K; k0 += kDepth) {
    load_tile<T, Acc>(a_tile, a, p.a.row_stride, p.a.col_stride, m0, k0, p.M, p.K);
    load_tile<T, Acc>(b_tile, b, p.b.col_stride, p.b.row_stride, n0, k0, p.N, p.K);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      Acc a_piece[kPiece], b_piece[kPiece];
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        a_piece[i] = a_tile[k][tm + i];
        b_piece[i] = b_tile[k][tn + i];
      }
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
#pragma unroll
        for (int j = 0; j < kPiece; ++j) sums[i][j] += a_piece[i] * b_piece[j];
      }
    }
    __syncthreads();
  }

  const T* bias = static_cast<const T*>(p.bias);
  for (int i = 0; i < kPiece; ++i) {
    for (int j = 0; j < kPiece; ++j) {
      const int64_t m = m0 + tm + i, n = n0 + tn + j;
      if (m >= p.M || n >= p.N) continue;
      const Acc z = sums[i][j] + (bias ? widen<Acc>(bias[n * p.bias_stride]) : Acc(0));
      const int64_t at = (batch * p.M + m) * p.N + n;
      if (p.z) static_cast<T*>(p.z)[at] = narrow<T>(z);
      static_cast<T*>(p.y)[at] = narrow<T>(activate<Acc>(z, p.act));
    }
  }
}

constexpr int kSumColumns = 32;
constexpr int kSumRows = 8;
constexpr int64_t kSumChunk = 2048;  // rows that one block sums

// One block sums a chunk of rows of 32 columns; thread rows first, then across them, always in the same order.
template <typename T, typename Out>
__global__ void __launch_bounds__(kSumColumns * kSumRows)
    column_sum_kernel(const T* data, int64_t row_stride, int64_t col_stride, int64_t M, int64_t N, int64_t chunk,
                      Out* out) {
  using Acc = typename Accumulator<T>::type;
  __shared__ Acc partial[kSumRows][kSumColumns];
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kSumColumns + threadIdx.x;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * chunk;
  const int64_t last = first + chunk < M ? first + chunk : M;
  Acc sum = 0;
  if (n < N) {
    for (int64_t m = first + threadIdx.y; m < last; m += kSumRows) {
      sum += widen<Acc>(data[m * row_stride + n * col_stride]);
    }
  }
  partial[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && n < N) {
    for (int r = 1; r < kSumRows; ++r) sum += partial[r][threadIdx.x];
    out[blockIdx.y * N + n] = narrow<Out>(sum);
  }
}

template <typename T>
__global__ void bias_and_activation_kernel(
    const T* z, const T* bias, T* z_out, T* y, int64_t count, int64_t N, Act act) {
  using Acc = typename Accumulator<T>::type;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    const Acc value = widen<Acc>(z[i]) + (bias ? widen<Acc>(bias[i % N]) : Acc(0));
    if (z_out) z_out[i] = narrow<T>(value);
    y[i] = narrow<T>(activate<Acc>(value, act));
  }
}

// The same by whole packs: rows of `columns` packs, all of them aligned.
template <typename T>
__global__ void __launch_bounds__(256) bias_and_activation_packs_kernel(
    const T* z, const T* bias, T* z_out, T* y, uint32_t packs, uint32_t columns, Act act) {
  using Acc = typename Accumulator<T>::type;
  constexpr int wide = Pack<T>::wide;
  for (uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < packs; i += gridDim.x * blockDim.x) {
    Pack<T> in;
    memcpy(&in, __builtin_assume_aligned(z + i * wide, 16), 16);  // not load_pack: y may be z
    const Pack<T> b = bias ? load_pack<false>(bias + static_cast<uint32_t>(i) % columns * wide) : zero_pack<T>();
    Acc v[wide];
#pragma unroll
    for (int j = 0; j < wide; ++j) v[j] = element(in, j) + element(b, j);
    if (z_out) store_pack(z_out + i * wide, narrow_pack<T, 16>(v));
#pragma unroll
    for (int j = 0; j < wide; ++j) v[j] = activate<Acc>(v[j], act);
    store_pack(y + i * wide, narrow_pack<T, 16>(v));
  }
}

template <typename T>
__global__ void activation_grad_kernel(const T* grad, const T* saved, T* out, int64_t count, Act act) {
  using Acc = typename Accumulator<T>::type;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    const Acc slope = derivative<Acc>(widen<Acc>(saved[i]), act);
    // not a product with zero: torch masks relu's gradient, so that an infinite one becomes 0 and not NaN
    const Acc value = widen<Acc>(grad[i]);
    out[i] = narrow<T>(act == Act::relu ? (slope == Acc(0) ? Acc(0) : value) : value * slope);
  }
}

int64_t divided_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace

void tiled_product(const Product& p, Type type, void* stream) {
  const int64_t blocks = p.batch * divided_up(p.M, kTile) * divided_up(p.N, kTile);
  if (blocks == 0) return;
  if (blocks > INT32_MAX) throw std::runtime_error("zoo: the output has too many tiles for one launch");
  with_type(type, [&](auto element) {
    tiled_kernel<decltype(element)>
        <<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
  });
  check_launch("tiled product");
}

// At most 1024 chunks, so that summing the partial sums stays small whatever M is.
int64_t column_sum_chunks(int64_t M) {
  const int64_t chunks = divided_up(M, kSumChunk);
  return chunks < 1 ? 1 : chunks > 1024 ? 1024 : chunks;
}

void column_sum(const Matrix& grad, int64_t M, int64_t N, void* sums, void* workspace, Type type, void* stream) {
  if (N == 0) return;
  const int64_t chunks = column_sum_chunks(M);
  const dim3 block(kSumColumns, kSumRows);
  const unsigned columns = static_cast<unsigned>(divided_up(N, kSumColumns));
  const auto launch_stream = static_cast<cudaStream_t>(stream);
  with_type(type, [&](auto element) {
    using T = decltype(element);
    using Acc = typename Accumulator<T>::type;
    const T* data = static_cast<const T*>(grad.data);
    if (chunks == 1) {
      column_sum_kernel<T, T><<<dim3(columns, 1), block, 0, launch_stream>>>(
          data, grad.row_stride, grad.col_stride, M, N, M, static_cast<T*>(sums));
      return;
    }
    Acc* partial = static_cast<Acc*>(workspace);
    column_sum_kernel<T, Acc><<<dim3(columns, static_cast<unsigned>(chunks)), block, 0, launch_stream>>>(
        data, grad.row_stride, grad.col_stride, M, N, divided_up(M, chunks), partial);
    check_launch("column sum");
    column_sum_kernel<Acc, T><<<dim3(columns, 1), block, 0, launch_stream>>>(
        partial, N, 1, chunks, N, chunks, static_cast<T*>(sums));
  });
  check_launch("column sum");
}

// Of an elementwise pass: enough to fill any chip, and each thread has more than one element of a large array.
unsigned pass_blocks(int64_t count, int threads) {
  const int64_t blocks = divided_up(count, threads);
  return static_cast<unsigned>(blocks < 132 * 16 ? blocks : 132 * 16);
}

void bias_and_activation(
    const void* z, const void* bias, void* z_out, void* y, int64_t M, int64_t N, Act act, Type type, void* stream) {
  const int64_t count = M * N;
  if (count == 0) return;
  with_type(type, [&](auto element) {
    using T = decltype(element);
    const int wide = Pack<T>::wide;
    const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
    if (N % wide == 0 && count / wide <= UINT32_MAX && aligned(z) && aligned(bias) && aligned(z_out) && aligned(y)) {
      bias_and_activation_packs_kernel<T>
          <<<pass_blocks(count / wide, 256), 256, 0, static_cast<cudaStream_t>(stream)>>>(
              static_cast<const T*>(z), static_cast<const T*>(bias), static_cast<T*>(z_out), static_cast<T*>(y),
              static_cast<uint32_t>(count / wide), static_cast<uint32_t>(N / wide), act);
      return;
    }
    bias_and_activation_kernel<T><<<pass_blocks(count, 256), 256, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const T*>(z), static_cast<const T*>(bias), static_cast<T*>(z_out), static_cast<T*>(y), count, N, act);
  });
  check_launch("bias and activation");
}

void activation_grad(
    const void* grad, const void* saved, void* out, int64_t count, Act act, Type type, void* stream) {
  if (count == 0) return;
  with_type(type, [&](auto element) {
    using T = decltype(element);
    activation_grad_kernel<T>
        <<<pass_blocks(count, 256), 256, 0, static_cast<cudaStream_t>(stream)>>>(
            static_cast<const T*>(grad), static_cast<const T*>(saved), static_cast<T*>(out), count, act);
  });
  check_launch("activation gradient");
}

}  // namespace zoo::cuda
