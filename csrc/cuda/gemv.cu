// Products of few rows: b is read once, 16 bytes a lane, and what is read decides the time, not what is multiplied.
//
// A warp computes a few neighbouring columns of the output for all rows, so that what it reads of a serves several
// times. Where there are few columns, the warps of a block share K between them. Wants K along memory in both operands,
// rows of whole 16 bytes.

#include "activation.cuh"
#include "wide.cuh"

namespace zoo::cuda {
namespace {

constexpr int kWarps = 8;         // a block
constexpr int kLoads = 8;         // of b, on their way at once, a lane
constexpr int kWarpsWanted = 24;  // a processor: fewer do not keep the memory busy

template <int rows>
constexpr int kColumns = rows <= 2 ? 2 : 4;  // a warp

// The sum over the lanes of each of `count` values, which lanes share among them, half and half again: lane i returns
// value i / (32 / count).
template <int over = 16, typename Acc, int count>
__device__ __forceinline__ Acc sum_of_lanes(const Acc (&v)[count]) {
  static_assert(count <= 32 && (count & (count - 1)) == 0);
  if constexpr (count > 1) {
    const bool upper = threadIdx.x & over;
    Acc half[count / 2];
#pragma unroll
    for (int i = 0; i < count / 2; ++i) {
      const Acc low = v[i], high = v[i + count / 2];
      half[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, over);
    }
    return sum_of_lanes<over / 2>(half);
  } else {
    Acc sum = v[0];
#pragma unroll
    for (int distance = over; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    return sum;
  }
}

// 2^split warps share the K of their columns.
template <typename T, int rows>
__global__ void __launch_bounds__(32 * kWarps, rows <= 2 ? 3 : 2)
    gemv_kernel(const __grid_constant__ Product p, int split) {
  using Acc = typename Accumulator<T>::type;
  constexpr int wide = Pack<T>::wide, columns = kColumns<rows>, ahead = kLoads / columns, chunk = 32 * ahead;
  constexpr int values = rows * columns;
  __shared__ Acc sums_of[kWarps][values];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int parts = 1 << split, part = warp & (parts - 1), group = warp >> split;
  const int block_columns = (kWarps >> split) * columns;
  const int64_t n0 = static_cast<int64_t>(blockIdx.x) * block_columns;

  // what this thread stores at the end; its bias is read now, when there is more to wait for, and widened only then
  const int column = threadIdx.x & (block_columns - 1), row = (threadIdx.x << split) / (kWarps * columns);
  const int64_t n = n0 + column;
  const bool stores = row < p.M && n < p.N;
  T bias = narrow<T>(Acc(0));
  if (stores && p.bias) bias = static_cast<const T*>(p.bias)[n * p.bias_stride];

  const T* b[columns];
#pragma unroll
  for (int c = 0; c < columns; ++c) {
    const int64_t own = n0 + group * columns + c;
    b[c] = static_cast<const T*>(p.b.data) + (own < p.N ? own : p.N - 1) * p.b.col_stride + lane * wide;
  }
  const T* a = static_cast<const T*>(p.a.data) + lane * wide;
  const int last_row = static_cast<int>(p.M) - 1, packs = static_cast<int>(p.K / wide);
  Acc sums[values] = {};

  // the chunk of packs from `first`; of one that is not whole, what lies beyond the end is zero on both sides
  const auto step = [&](auto whole, int first) {
    const int64_t offset = static_cast<int64_t>(first) * wide;
    const auto inside = [&](int u) { return decltype(whole)::value || first + 32 * u + lane < packs; };
    Pack<T> weights[ahead][columns];
#pragma unroll
    for (int u = 0; u < ahead; ++u) {
#pragma unroll
      for (int c = 0; c < columns; ++c) {
        weights[u][c] = inside(u) ? load_pack<true>(b[c] + offset + 32 * u * wide) : zero_pack<T>();
      }
    }
#pragma unroll
    for (int u = 0; u < ahead; ++u) {
#pragma unroll
      for (int m = 0; m < rows; ++m) {
        const T* row_of_a = a + (m < last_row ? m : last_row) * p.a.row_stride + offset;
        const Pack<T> x = inside(u) ? load_pack<false>(row_of_a + 32 * u * wide) : zero_pack<T>();
#pragma unroll
        for (int c = 0; c < columns; ++c) {
          // summed by itself first: fewer additions to the long sum, whose rounding is what float32's error comes from
          Acc sum = element(x, 0) * element(weights[u][c], 0);
#pragma unroll
          for (int j = 1; j < wide; ++j) sum += element(x, j) * element(weights[u][c], j);
          sums[m * columns + c] += sum;
        }
      }
    }
  };
  for (int first = part * chunk; first < packs; first += parts * chunk) {
    if (first + chunk <= packs) step(std::true_type{}, first);
    else step(std::false_type{}, first);
  }

  const Acc sum = sum_of_lanes(sums);
  if (lane % (32 / values) == 0) sums_of[warp][lane / (32 / values)] = sum;
  __syncthreads();
  if (!stores) return;
  const int first_warp = column / columns << split;
  Acc z = sums_of[first_warp][row * columns + column % columns];
  for (int i = 1; i < parts; ++i) z += sums_of[first_warp + i][row * columns + column % columns];
  z += widen<Acc>(bias);
  const int64_t at = row * p.N + n;
  if (p.z) static_cast<T*>(p.z)[at] = narrow<T>(z);
  static_cast<T*>(p.y)[at] = narrow<T>(activate<Acc>(z, p.act));
}

template <typename T, int rows>
void launch(const Product& p, cudaStream_t stream) {
  constexpr int columns = kColumns<rows>;
  int device = 0;
  check(cudaGetDevice(&device), "the current device");
  const int64_t wanted = int64_t{kWarpsWanted} * chip_of(device).processors;
  const int64_t packs = p.K / Pack<T>::wide, groups = (p.N + columns - 1) / columns;
  const int64_t chunks = (packs + 32 * (kLoads / columns) - 1) / (32 * (kLoads / columns));
  int split = 0;
  while ((2 << split) <= kWarps && (2 << split) <= chunks && groups << split < wanted) ++split;
  const int64_t block_columns = (kWarps >> split) * columns, blocks = (p.N + block_columns - 1) / block_columns;
  gemv_kernel<T, rows><<<static_cast<unsigned>(blocks), 32 * kWarps, 0, stream>>>(p, split);
}

template <typename T>
void by_rows(const Product& p, cudaStream_t stream) {
  if (p.M <= 1) launch<T, 1>(p, stream);
  else if (p.M <= 2) launch<T, 2>(p, stream);
  else if (p.M <= 4) launch<T, 4>(p, stream);
  else launch<T, 8>(p, stream);
}

}  // namespace

void gemv(const Product& p, Type type, void* stream) {
  with_type(type, [&](auto element) { by_rows<decltype(element)>(p, static_cast<cudaStream_t>(stream)); });
  check_launch("gemv");
}

}  // namespace zoo::cuda
