// bf16 and fp16 products by mma.sync and cp.async: for chips from compute capability 8.0 on that have no wgmma.
//
// A block computes 128 x 256, eight warps 64 x 64 each. A ring of shared-memory stages of 64 of K is filled ahead by
// cp.async, which writes zeros for what lies outside. Fragments are double: those of the next 16 of K are on their way
// from shared memory while these are multiplied, across stages too. Rows of an operand lie along K or along M (N);
// ldmatrix turns the latter. Chunks of 16 bytes are permuted within rows, so that the eight rows that ldmatrix reads
// lie in different banks.

#include "activation.cuh"
#include "mma.cuh"
#include "types.cuh"

#include <type_traits>

namespace zoo::cuda {
namespace {

constexpr int kM = 128, kN = 256, kK = 64;
constexpr int kStagesMost = 4;               // 192 KiB; chips with less shared memory have three, or two
constexpr int kThreads = 256, kWarpsM = 2;   // two warps down, four across
constexpr int kGroup = 8;                    // rows of tiles whose blocks run together and share b in the L2
constexpr int kBytesA = kM * kK * 2, kBytesB = kN * kK * 2, kStageBytes = kBytesA + kBytesB;

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
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
__device__ __forceinline__ uint32_t both(float low, float high) {
  __align__(4) const T v[2] = {narrow<T>(low), narrow<T>(high)};
  return *reinterpret_cast<const uint32_t*>(v);
}

// An operand's share of a stage. Along K: `size` rows of 128 bytes. Along the rows: kK rows of `size` elements.
template <bool mn, int size>
struct Share {
  static constexpr int kPitch = (mn ? size : kK) * 2, kInner = kPitch / 16;  // bytes and chunks of a row
  static __device__ __forceinline__ uint32_t chunk(int outer, int inner) {
    return static_cast<uint32_t>(outer * kPitch + ((inner ^ (outer & 7)) * 16));
  }

  // Where this lane reads from; `first_k`: matrices go down K before they go across rows (b's order).
  template <bool first_k>
  static __device__ __forceinline__ uint32_t lane_offset(int row) {
    const int lane = threadIdx.x % 32, which = lane / 8;
    const int over_row = first_k ? which >> 1 : which & 1, over_k = first_k ? which & 1 : which >> 1;
    if constexpr (mn) return chunk(over_k * 8 + lane % 8, row / 8 + over_row);
    else return chunk(row + over_row * 8 + lane % 8, over_k);
  }

  // Fragments of the i-th 16 rows and the k-th 16 of K, of those from the warp's first row on. In a permuted chunk's
  // address i (or k) is an exclusive or, as the rows begin at a multiple of 64 and the stage at one of 1024 bytes.
  static __device__ __forceinline__ void load(uint32_t (&v)[4], uint32_t from, int i, int k) {
    if constexpr (mn) load_matrices<true>(v, (from ^ (i * 32)) + k * 16 * kPitch);
    else load_matrices<false>(v, (from ^ (k * 32)) + i * 16 * kPitch);
  }
};

// The way of one operand into the stages, one after the other. A thread copies the same chunks of each.
//
// What lies beyond the last row ends in sums that are not stored: along K the last row is read in its place. Along the
// rows a chunk may reach beyond the end of memory, and only the bytes before it are read. So only the last step of K,
// where it is not a whole one, needs a look at every chunk.
template <bool mn, int size>
struct Feed {
  using Where = Share<mn, size>;
  static constexpr int kApart = kThreads / Where::kInner;      // rows of memory between a thread's chunks
  static constexpr uint32_t kStride = kApart * Where::kPitch;  // bytes of shared memory between them
  static_assert(kApart % 8 == 0);                              // so that all are permuted alike
  const char* at;
  uint32_t pitch;  // bytes between rows of memory
  uint32_t to;
  int limit;  // along K: rows from the first chunk's to the last there is; along the rows: bytes of a chunk

  // `step`: elements between rows of memory; the share begins at `row` of `rows`.
  __device__ __forceinline__ Feed(const void* data, int64_t step, int64_t row, int64_t rows) {
    const int outer = threadIdx.x / Where::kInner, inner = threadIdx.x % Where::kInner;
    pitch = static_cast<uint32_t>(step * 2);
    to = Where::chunk(outer, inner);
    at = static_cast<const char*>(data);
    if constexpr (mn) {
      const int64_t left = rows - row - inner * 8;
      limit = left >= 8 ? 16 : left > 0 ? static_cast<int>(left) * 2 : 0;
      at += (left > 0 ? row + inner * 8 : 0) * 2 + static_cast<uint64_t>(outer) * pitch;
    } else {
      const int64_t own = row + outer < rows ? row + outer : rows - 1;
      limit = rows - 1 - own < size ? static_cast<int>(rows - 1 - own) : size;
      at += inner * 16 + own * step * 2;
    }
  }

  // The chunks from `first` on of a whole step.
  template <int first, int count>
  __device__ __forceinline__ void copy(uint32_t stage) const {
#pragma unroll
    for (int i = first; i < first + count; ++i) {
      const uint32_t place = stage + to + i * kStride;
      if constexpr (mn) copy_async(place, at + static_cast<uint64_t>(i * kApart) * pitch, limit);
      else copy_async(place, at + static_cast<uint64_t>(min(i * kApart, limit)) * pitch);
    }
  }

  // The same of a step that has `left` of K.
  template <int first, int count>
  __device__ __forceinline__ void copy_rest(uint32_t stage, const void* data, int left) const {
    const int outer = threadIdx.x / Where::kInner, inner = threadIdx.x % Where::kInner;
#pragma unroll
    for (int i = first; i < first + count; ++i) {
      const int own = left - (mn ? outer + i * kApart : inner * 8);
      const int bytes = own <= 0 ? 0 : mn ? limit : min(own * 2, 16), rows = mn ? i * kApart : min(i * kApart, limit);
      copy_async(stage + to + i * kStride, bytes ? at + static_cast<uint64_t>(rows) * pitch : data, bytes);
    }
  }

  __device__ __forceinline__ void advance() { at += mn ? static_cast<uint64_t>(kK) * pitch : kK * 2; }
};

template <typename T, bool a_mn, bool b_mn>
__global__ void __launch_bounds__(kThreads, 1) mma_kernel(const __grid_constant__ Product p, int stages) {
  using A = Share<a_mn, kM>;
  using B = Share<b_mn, kN>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = shared_address(shared), end = base + stages * kStageBytes;
  const int64_t m_tiles = (p.M + kM - 1) / kM, n_tiles = (p.N + kN - 1) / kN;
  const int64_t first_row = blockIdx.x / (kGroup * n_tiles) * kGroup;
  const int64_t group = m_tiles - first_row < kGroup ? m_tiles - first_row : kGroup;
  const int64_t in_group = blockIdx.x % (kGroup * n_tiles);
  const int64_t m0 = (first_row + in_group % group) * kM, n0 = in_group / group * kN;
  const int steps = static_cast<int>((p.K + kK - 1) / kK);
  const int whole_steps = static_cast<int>(p.K / kK), rest = static_cast<int>(p.K % kK);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int wm = warp % kWarpsM * 64, wn = warp / kWarpsM * 64;

  Feed<a_mn, kM> a(p.a.data, a_mn ? p.a.col_stride : p.a.row_stride, m0, p.M);
  Feed<b_mn, kN> b(p.b.data, b_mn ? p.b.row_stride : p.b.col_stride, n0, p.N);
  uint32_t filled = base;  // the stage that is filled next
  int fills = 0;           // and its step of K
  const auto fill = [&](auto third) {  // in three parts, so that copies and products alternate
    constexpr int part = decltype(third)::value;
    if (fills < whole_steps) {
      if constexpr (part == 0) a.template copy<0, 4>(filled);
      else b.template copy<(part - 1) * 4, 4>(filled + kBytesA);
    } else if (fills < steps) {
      if constexpr (part == 0) a.template copy_rest<0, 4>(filled, p.a.data, rest);
      else b.template copy_rest<(part - 1) * 4, 4>(filled + kBytesA, p.b.data, rest);
    }
    if constexpr (part == 2) {
      copy_commit();
      a.advance();
      b.advance();
      ++fills;
      filled = filled + kStageBytes == end ? base : filled + kStageBytes;
    }
  };
  using First = std::integral_constant<int, 0>;
  using Second = std::integral_constant<int, 1>;
  using Third = std::integral_constant<int, 2>;
  for (int s = 0; s < stages - 1; ++s) fill(First{}), fill(Second{}), fill(Third{});

  const uint32_t a_lane = A::template lane_offset<false>(wm), b_lane = B::template lane_offset<true>(wn) + kBytesA;
  uint32_t a_part[2][4][4], b_part[2][4][4];
  const auto load = [&](int which, uint32_t stage, int k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) A::load(a_part[which][i], stage + a_lane, i, k);
#pragma unroll
    for (int j = 0; j < 4; ++j) B::load(b_part[which][j], stage + b_lane, j, k);
  };
  float sums[4][8][4] = {};
  const auto products = [&](int which) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t(&v)[4] = b_part[which][j / 2];
        multiply<T>(sums[i][j], a_part[which][i], v[j % 2 * 2], v[j % 2 * 2 + 1]);
      }
    }
  };

  copy_wait_for(stages - 2);
  __syncthreads();
  load(0, base, 0);
  uint32_t stage = base;
  for (int step = 0; step < steps; ++step) {
    load(1, stage, 1);
    fill(First{});  // over the last step's stage, of which everyone had the last fragments before the barrier
    products(0);
    load(0, stage, 2);
    fill(Second{});
    products(1);
    load(1, stage, 3);
    fill(Third{});
    products(0);
    copy_wait_for(stages - 2);  // the next step's is there; after the last step, what is loaded is not used
    __syncthreads();
    stage = stage + kStageBytes == end ? base : stage + kStageBytes;
    load(0, stage, 0);
    products(1);
  }

  const T* bias = static_cast<const T*>(p.bias);
  // sums[i][j][2 half + e] lies at row m0 + wm + 16 i + 8 half + lane / 4, column n0 + wn + 8 j + 2 (lane % 4) + e
  if (bias) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int64_t n = n0 + wn + 8 * j + 2 * (lane % 4) + e;
        const float shift = n < p.N ? widen<float>(bias[n * p.bias_stride]) : 0.f;
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i][j][e] += shift, sums[i][j][2 + e] += shift;
      }
    }
  }
  const auto store = [&](T* to) {
    const int64_t row = m0 + wm + lane / 4;
    if (p.N % 4 == 0) {
      // Two lanes exchange halves of two neighbouring pieces of eight columns: then a lane has four columns in a row,
      // and four lanes write whole 32 bytes.
      const bool odd = lane & 1;
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const int64_t n = n0 + wn + 8 * (j + odd) + 2 * (lane & 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint32_t left = both<T>(sums[i][j][2 * half], sums[i][j][2 * half + 1]);
            const uint32_t right = both<T>(sums[i][j + 1][2 * half], sums[i][j + 1][2 * half + 1]);
            const uint32_t other = __shfl_xor_sync(~0u, odd ? left : right, 1);
            const int64_t m = row + 16 * i + 8 * half;
            const uint2 four = odd ? make_uint2(other, right) : make_uint2(left, other);
            if (m < p.M && n < p.N) *reinterpret_cast<uint2*>(to + m * p.N + n) = four;
          }
        }
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t m = row + 16 * i + 8 * half;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int64_t n = n0 + wn + 8 * j + 2 * (lane % 4) + e;
            if (m < p.M && n < p.N) to[m * p.N + n] = narrow<T>(sums[i][j][2 * half + e]);
          }
        }
      }
    }
  };
  if (p.z) store(static_cast<T*>(p.z));
  if (p.act != Act::none) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[i][j][e] = activate<float>(sums[i][j][e], p.act);
      }
    }
  }
  store(static_cast<T*>(p.y));
}

// As many as this device has shared memory for.
int stages_here() {
  static std::atomic<int> known[64];
  int device = 0;
  check(cudaGetDevice(&device), "the current device");
  int stages = device < 64 ? known[device].load(std::memory_order_relaxed) : 0;
  if (stages == 0) {
    int bytes = 0;
    check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "the shared memory");
    stages = bytes / kStageBytes < kStagesMost ? bytes / kStageBytes : kStagesMost;
    if (device < 64) known[device].store(stages, std::memory_order_relaxed);
  }
  return stages;
}

template <typename T, bool a_mn, bool b_mn>
void launch(const Product& p, cudaStream_t stream) {
  static std::atomic<uint64_t> told{0};
  const int stages = stages_here(), bytes = stages * kStageBytes;
  allow_shared(mma_kernel<T, a_mn, b_mn>, bytes, told);
  const int64_t tiles = ((p.M + kM - 1) / kM) * ((p.N + kN - 1) / kN);
  mma_kernel<T, a_mn, b_mn><<<static_cast<unsigned>(tiles), kThreads, bytes, stream>>>(p, stages);
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
