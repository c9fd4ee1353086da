// bf16 and fp16 products by mma.sync and cp.async: for chips from compute capability 8.0 on that have no wgmma.
//
// A block computes 128 x 256, eight warps 64 x 64 each. A ring of shared-memory stages of 32 of K is filled ahead by
// cp.async, which writes zeros for what lies outside. Rows of an operand lie along K or along M (N); ldmatrix turns the
// latter. Chunks of 16 bytes are permuted within rows, so that the eight rows that ldmatrix reads lie in different banks.

#include "activation.cuh"
#include "types.cuh"

#include <type_traits>

namespace zoo::cuda {
namespace {

constexpr int kM = 128, kN = 256, kK = 32, kStages = 4;
constexpr int kThreads = 256, kWarpsM = 2;   // two warps down, four across
constexpr int kGroup = 8;                    // rows of tiles whose blocks run together and share b in the L2
constexpr int kBytesA = kM * kK * 2, kBytesB = kN * kK * 2, kStageBytes = kBytesA + kBytesB;

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes, of which only the first `bytes` are read and the others zero.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

template <bool turned>
__device__ __forceinline__ void load_matrices(uint32_t (&v)[4], uint32_t from) {
  if constexpr (turned) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(from)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(from)
                 : "memory");
  }
}

template <typename T>
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// An operand's share of a stage. Along K: rows of 64 bytes, four chunks. Along the rows: kK rows of `size` elements.
template <typename T, bool mn, int size>
struct Share {
  static __device__ __forceinline__ uint32_t chunk(int outer, int inner) {
    if constexpr (mn) return static_cast<uint32_t>(outer * size * 2 + ((inner ^ (outer & 7)) * 16));
    else return static_cast<uint32_t>(outer * kK * 2 + ((inner ^ (outer >> 1 & 3)) * 16));
  }

  // `step`: elements between rows of memory; `row` and `k` where the share begins, `rows` and `K` where the operand ends.
  static __device__ __forceinline__ void fill(
      uint32_t to, const T* data, int64_t step, int64_t row, int64_t rows, int64_t k, int64_t K) {
    constexpr int inner_chunks = (mn ? size : kK) / 8, chunks = size * kK / 8;
#pragma unroll
    for (int i = 0; i < chunks / kThreads; ++i) {
      const int c = threadIdx.x + i * kThreads, outer = c / inner_chunks, inner = c % inner_chunks;
      const int64_t along = (mn ? row : k) + inner * 8, across = (mn ? k : row) + outer;
      const int64_t end = mn ? rows : K, last = mn ? K : rows;
      const int64_t left = across < last ? end - along : 0;
      const int bytes = left >= 8 ? 16 : left > 0 ? static_cast<int>(left) * 2 : 0;
      copy_async(to + chunk(outer, inner), bytes ? data + across * step + along : data, bytes);
    }
  }

  // Fragments of 16 rows from `row`, 16 of K from `k`; `first_k`: matrices go down K before they go across rows (b's order).
  template <bool first_k>
  static __device__ __forceinline__ void load(uint32_t (&v)[4], uint32_t from, int row, int k) {
    const int lane = threadIdx.x % 32, which = lane / 8;
    const int over_row = (first_k ? which >> 1 : which & 1) * 8, over_k = (first_k ? which & 1 : which >> 1) * 8;
    if constexpr (mn) load_matrices<true>(v, from + chunk(k + over_k + lane % 8, (row + over_row) / 8));
    else load_matrices<false>(v, from + chunk(row + over_row + lane % 8, (k + over_k) / 8));
  }
};

template <typename T, bool a_mn, bool b_mn>
__global__ void __launch_bounds__(kThreads, 1) mma_kernel(Product p) {
  using A = Share<T, a_mn, kM>;
  using B = Share<T, b_mn, kN>;
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t base = shared_address(shared);
  const int64_t m_tiles = (p.M + kM - 1) / kM, n_tiles = (p.N + kN - 1) / kN;
  const int64_t first_row = blockIdx.x / (kGroup * n_tiles) * kGroup;
  const int64_t group = m_tiles - first_row < kGroup ? m_tiles - first_row : kGroup;
  const int64_t in_group = blockIdx.x % (kGroup * n_tiles);
  const int64_t m0 = (first_row + in_group % group) * kM, n0 = in_group / group * kN;
  const T* a = static_cast<const T*>(p.a.data);
  const T* b = static_cast<const T*>(p.b.data);
  const int64_t a_step = a_mn ? p.a.col_stride : p.a.row_stride, b_step = b_mn ? p.b.row_stride : p.b.col_stride;
  const int steps = static_cast<int>((p.K + kK - 1) / kK);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int wm = warp % kWarpsM * 64, wn = warp / kWarpsM * 64;

  auto fill = [&](int step) {
    if (step < steps) {
      const uint32_t to = base + step % kStages * kStageBytes;
      A::fill(to, a, a_step, m0, p.M, static_cast<int64_t>(step) * kK, p.K);
      B::fill(to + kBytesA, b, b_step, n0, p.N, static_cast<int64_t>(step) * kK, p.K);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");  // an empty group, too: the count is what is waited for
  };
  for (int s = 0; s < kStages - 1; ++s) fill(s);

  float sums[4][8][4] = {};
  for (int step = 0; step < steps; ++step) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
    __syncthreads();  // everyone's part of this stage is there, and everyone is done with the one that is filled next
    fill(step + kStages - 1);
    const uint32_t at = base + step % kStages * kStageBytes;
#pragma unroll
    for (int k = 0; k < kK; k += 16) {
      uint32_t a_part[4][4], b_part[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) A::template load<false>(a_part[i], at, wm + 16 * i, k);
#pragma unroll
      for (int j = 0; j < 4; ++j) B::template load<true>(b_part[j], at + kBytesA, wn + 16 * j, k);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          multiply<T>(sums[i][j], a_part[i], b_part[j / 2][j % 2 * 2], b_part[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }

  const T* bias = static_cast<const T*>(p.bias);
  T* y = static_cast<T*>(p.y);
  T* z = static_cast<T*>(p.z);
  const bool pairs = p.N % 2 == 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int64_t n = n0 + wn + 8 * j + 2 * (lane % 4);
    if (n >= p.N) continue;
    const bool second = n + 1 < p.N;
    const float low = bias ? widen<float>(bias[n * p.bias_stride]) : 0.f;
    const float high = bias && second ? widen<float>(bias[(n + 1) * p.bias_stride]) : 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t m = m0 + wm + 16 * i + lane / 4 + 8 * half;
        if (m >= p.M) continue;
        auto put = [&](T* to, float v0, float v1) {
          __align__(4) const T both[2] = {narrow<T>(v0), narrow<T>(v1)};
          if (pairs) {
            *reinterpret_cast<uint32_t*>(to) = *reinterpret_cast<const uint32_t*>(both);
          } else {
            to[0] = both[0];
            if (second) to[1] = both[1];
          }
        };
        const float v0 = sums[i][j][2 * half] + low, v1 = sums[i][j][2 * half + 1] + high;
        if (z) put(z + m * p.N + n, v0, v1);
        put(y + m * p.N + n, activate<float>(v0, p.act), activate<float>(v1, p.act));
      }
    }
  }
}

template <typename T, bool a_mn, bool b_mn>
void launch(const Product& p, cudaStream_t stream) {
  static std::atomic<uint64_t> told{0};
  allow_shared(mma_kernel<T, a_mn, b_mn>, kStages * kStageBytes, told);
  const int64_t tiles = ((p.M + kM - 1) / kM) * ((p.N + kN - 1) / kN);
  mma_kernel<T, a_mn, b_mn><<<static_cast<unsigned>(tiles), kThreads, kStages * kStageBytes, stream>>>(p);
}

template <typename T>
void by_layout(const Product& p, cudaStream_t stream) {
  const bool a_mn = p.a.col_stride != 1, b_mn = p.b.row_stride != 1;
  if (a_mn) {
    if (b_mn) launch<T, true, true>(p, stream);
    else launch<T, true, false>(p, stream);
  } else {
    if (b_mn) launch<T, false, true>(p, stream);
    else launch<T, false, false>(p, stream);
  }
}

}  // namespace

void mma_product(const Product& p, Type type, void* stream) {
  if (type == Type::bf16) by_layout<__nv_bfloat16>(p, static_cast<cudaStream_t>(stream));
  else by_layout<__half>(p, static_cast<cudaStream_t>(stream));
  check_launch("mma product");
}

}  // namespace zoo::cuda
