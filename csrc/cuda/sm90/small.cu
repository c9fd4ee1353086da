// Products of few tiles, any strides and alignment: a cluster of blocks shares the K of one 64 x 64 tile.
//
// Each block has three or four warpgroups, each with its own part of K: it loads 64 x 64 pieces into registers, splits float32
// into planes there, stores them swizzled and multiplies by wgmma; one group's loads pass under another's work. The parts are
// added through the cluster's distributed shared memory, always in the same order: no workspace, one launch.
#include "epilogue.cuh"
#include "launch.cuh"
#include "split.cuh"

namespace zoo::cuda::sm90 {

struct SmallOperand {
  const void* data;
  int64_t outer, inner;  // strides
  bool vector;           // inner is 1, and 16-byte loads are aligned and never cross its end
};

struct SmallArgs {
  SmallOperand a, b;
  const void* bias;
  void* y;
  void* z;
  int64_t ld;
  int M, N, K, act, share_of_k;  // blocks a cluster
};

constexpr int kSide = 64, kPlane = kSide * 128, kPad = 72;  // bytes of a plane; floats of a row of sums

template <typename T, bool a_mn, bool b_mn>
struct Small {
  static constexpr int planes = std::is_same_v<T, float> ? 3 : 1, groups = planes == 3 ? 3 : 4;
  using Element = std::conditional_t<planes == 3, __nv_bfloat16, T>;
  static constexpr int stage_bytes = 2 * planes * kPlane, sums_bytes = kSide * kPad * 4;
  static constexpr int group_bytes = stage_bytes > sums_bytes ? stage_bytes : (sums_bytes + 1023) / 1024 * 1024;
  static constexpr int shared_bytes = 1024 + groups * group_bytes;

  // A 64 x 64 piece as a thread holds it: four rows of eight neighbours.
  struct Piece {
    T v[4][8];
  };

  // Without a branch, so that all loads are on their way at once: what is outside is read from inside and dropped.
  static __device__ __forceinline__ void load(
      Piece& piece, const SmallOperand& x, int outer0, int inner0, int outer_size, int inner_size) {
    constexpr int wide = 16 / sizeof(T);
    const int thread = threadIdx.x % 128, inner = inner0 + thread % 8 * 8;
    const T zero = narrow<T>(0.f);
    if (x.vector) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int outer = outer0 + thread / 8 + 16 * i;
        const T* from = static_cast<const T*>(x.data) + min(outer, outer_size - 1) * x.outer;
#pragma unroll
        for (int q = 0; q < 8 / wide; ++q) {
          const int at = inner + q * wide;
          const uint4 raw = __ldg(reinterpret_cast<const uint4*>(from + min(at, inner_size - wide)));
          const bool inside = outer < outer_size && at < inner_size;
          reinterpret_cast<uint4*>(piece.v[i])[q] =
              make_uint4(inside ? raw.x : 0, inside ? raw.y : 0, inside ? raw.z : 0, inside ? raw.w : 0);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int outer = outer0 + thread / 8 + 16 * i;
        const T* from = static_cast<const T*>(x.data) + min(outer, outer_size - 1) * x.outer;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const T raw = from[min(inner + j, inner_size - 1) * x.inner];
          piece.v[i][j] = outer < outer_size && inner + j < inner_size ? raw : zero;
        }
      }
    }
  }

  static __device__ __forceinline__ void store(uint32_t at, const Piece& piece, bool& special) {
    const uint32_t thread = threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t row = thread / 8 + 16 * i, to = at + row * 128 + (thread % 8 ^ row % 8) * 16;
      __align__(16) Element out[planes][8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if constexpr (planes == 3) {
          __nv_bfloat16 parts[3];
          split(piece.v[i][j], parts, special);
          out[0][j] = parts[0], out[1][j] = parts[1], out[2][j] = parts[2];
        } else {
          out[0][j] = piece.v[i][j];
        }
      }
#pragma unroll
      for (int p = 0; p < planes; ++p) {
        const uint4 q = *reinterpret_cast<uint4*>(out[p]);
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to + p * kPlane), "r"(q.x), "r"(q.y), "r"(q.z),
                     "r"(q.w)
                     : "memory");
      }
    }
  }

  template <bool mn>
  static __device__ __forceinline__ uint64_t tile(uint32_t at, int step) {
    return mn ? ptx::descriptor(at + step * 16 * 128, 0, 1024, ptx::Swizzle::b128)
              : ptx::descriptor(at + step * 32, 0, 1024, ptx::Swizzle::b128);
  }

  static __device__ __forceinline__ void run(const SmallArgs& args) {
    extern __shared__ uint8_t shared[];
    __shared__ int met;  // a value that is not finite
    const uint32_t base = (ptx::shared_address(shared) + 1023) / 1024 * 1024;
    const int group = threadIdx.x / 128, rank = static_cast<int>(ptx::cluster_rank());
    const int n_tiles = (args.N + kSide - 1) / kSide, t = blockIdx.x / args.share_of_k;
    const int m0 = t / n_tiles * kSide, n0 = t % n_tiles * kSide;
    const int steps = (args.K + 63) / 64, parts = groups * args.share_of_k, part = groups * rank + group;
    const int first = steps * part / parts, end = steps * (part + 1) / parts;
    if (threadIdx.x == 0) met = 0;
    __syncthreads();

    float acc[32], chunk[32];
#pragma unroll
    for (int j = 0; j < 32; ++j) acc[j] = 0.f;
    bool special = false;
    Piece a, b;
    auto fetch = [&](int step) {
      if constexpr (a_mn) load(a, args.a, step * 64, m0, args.K, args.M);
      else load(a, args.a, m0, step * 64, args.M, args.K);
      if constexpr (b_mn) load(b, args.b, step * 64, n0, args.K, args.N);
      else load(b, args.b, n0, step * 64, args.N, args.K);
    };
    const uint32_t at = base + group * group_bytes, b_at = at + planes * kPlane;
    for (int step = first; step < end; ++step) {
      fetch(step);
      if (step > first) ptx::named_sync(1 + group, 128);  // all have multiplied the piece before
      store(at, a, special);
      store(b_at, b, special);
      ptx::proxy_fence();
      ptx::named_sync(1 + group, 128);
      ptx::forget(chunk);
      ptx::wgmma_fence();
      constexpr int products = planes == 3 ? 6 : 1;
      constexpr int a_planes[6] = {2, 0, 1, 1, 0, 0}, b_planes[6] = {0, 2, 1, 0, 1, 0};
#pragma unroll
      for (int p = 0; p < products; ++p) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int ap = planes == 3 ? a_planes[p] : 0, bp = planes == 3 ? b_planes[p] : 0;
          ptx::wgmma<Element, 64, a_mn, b_mn>(
              chunk, tile<a_mn>(at + ap * kPlane, k), tile<b_mn>(b_at + bp * kPlane, k), p | k);
        }
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::pin(chunk);
#pragma unroll
      for (int j = 0; j < 32; ++j) acc[j] += chunk[j];
    }
    if (special) met = 1;

    // every part's sums into its own shared memory, over its stage
    ptx::named_sync(1 + group, 128);
    const uint32_t sums = at;
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint32_t to = sums + (row * kPad + 8 * j + 2 * (lane % 4)) * 4;
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(acc[4 * j]), "f"(acc[4 * j + 1]) : "memory");
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + 8 * kPad * 4), "f"(acc[4 * j + 2]), "f"(acc[4 * j + 3]) : "memory");
    }
    ptx::cluster_sync();

    const int rows = kSide / args.share_of_k;
    bool redo = false;
    if constexpr (planes == 3) {
      for (int r = 0; r < args.share_of_k; ++r) redo |= ptx::load_remote(ptx::shared_address(&met), r) != 0;
    }
    for (int e = threadIdx.x; e < rows * 16; e += 128 * groups) {
      const int r = rank * rows + e / 16, c = e % 16 * 4, m = m0 + r, n = n0 + c;
      if (m >= args.M || n >= args.N) continue;
      float v[4] = {};
      for (int p = 0; p < args.share_of_k; ++p) {
#pragma unroll
        for (int g = 0; g < groups; ++g) {
          const float4 q = ptx::load4_remote(base + g * group_bytes + (r * kPad + c) * 4, p);
          v[0] += q.x, v[1] += q.y, v[2] += q.z, v[3] += q.w;
        }
      }
      if constexpr (planes == 3) {
        bool overflown = false;  // the product of the first planes may, where float32's does not
#pragma unroll
        for (int i = 0; i < 4; ++i) overflown |= !(fabsf(v[i]) <= 3.402823466e38f);
        if (redo || overflown) {
          const int64_t a_row = a_mn ? args.a.inner : args.a.outer, a_k = a_mn ? args.a.outer : args.a.inner;
          const int64_t b_row = b_mn ? args.b.inner : args.b.outer, b_k = b_mn ? args.b.outer : args.b.inner;
          for (int i = 0; i < 4; ++i) {
            v[i] = 0.f;
            for (int k = 0; k < args.K && n + i < args.N; ++k) {
              v[i] = fmaf(static_cast<const float*>(args.a.data)[m * a_row + k * a_k],
                          static_cast<const float*>(args.b.data)[(n + i) * b_row + k * b_k], v[i]);
            }
          }
        }
      }
      T* y = static_cast<T*>(args.y) + m * args.ld + n;
      T* z = static_cast<T*>(args.z) + m * args.ld + n;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (args.bias && n + i < args.N) v[i] += widen(static_cast<const T*>(args.bias)[n + i]);
      }
      if (args.z) put(z, v, args.N - n, args.ld);
      activate<planes == 3>(v, args.act);
      put(y, v, args.N - n, args.ld);
    }
    ptx::cluster_sync();  // the others may still read this block's sums
  }

  static __device__ __forceinline__ void put(T* to, const float (&v)[4], int room, int64_t ld) {
    if (room >= 4 && ld % 4 == 0) {
      if constexpr (planes == 3) *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
      else *reinterpret_cast<uint2*>(to) = make_uint2(pack<T>(v[0], v[1]), pack<T>(v[2], v[3]));
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < room) to[i] = narrow<T>(v[i]);
      }
    }
  }
};

template <class S>
__global__ void __launch_bounds__(128 * S::groups, 1) small_kernel(const __grid_constant__ SmallArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  S::run(args);
#endif
}

template <typename T, bool a_mn, bool b_mn>
void launch_small(const SmallArgs& args, cudaStream_t stream) {
  using S = Small<T, a_mn, b_mn>;
  static std::atomic<uint64_t> told{0};
  allow_shared(small_kernel<S>, S::shared_bytes, told);
  cudaLaunchConfig_t config{};
  const int tiles = ((args.M + 63) / 64) * ((args.N + 63) / 64);
  config.gridDim = dim3(unsigned(tiles * args.share_of_k));
  config.blockDim = dim3(128 * S::groups);
  config.dynamicSmemBytes = S::shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = unsigned(args.share_of_k);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, small_kernel<S>, args), "small product");
}

// Along K, or along the rows where they are dense and K is not.
template <typename T>
SmallOperand operand(const void* data, int64_t outer, int64_t k, int64_t rows, int64_t K, bool* mn) {
  *mn = k != 1 && outer == 1;
  SmallOperand x{data, *mn ? k : outer, *mn ? outer : k, false};
  x.vector = x.inner == 1 && reinterpret_cast<uintptr_t>(data) % 16 == 0 && x.outer * int64_t(sizeof(T)) % 16 == 0 &&
             (*mn ? rows : K) * int64_t(sizeof(T)) % 16 == 0;
  return x;
}

template <typename T>
void small_of(const SmallProblem& p, cudaStream_t stream) {
  SmallArgs args{};
  bool a_mn, b_mn;
  args.a = operand<T>(p.a.data, p.a.row_stride, p.a.col_stride, p.M, p.K, &a_mn);
  args.b = operand<T>(p.b.data, p.b.col_stride, p.b.row_stride, p.N, p.K, &b_mn);
  args.bias = p.bias;
  args.y = p.y;
  args.z = p.z;
  args.ld = p.ld;
  args.M = p.M, args.N = p.N, args.K = p.K, args.act = static_cast<int>(p.act);
  args.share_of_k = p.slices;
  if (a_mn) {
    if (b_mn) launch_small<T, true, true>(args, stream);
    else launch_small<T, true, false>(args, stream);
  } else {
    if (b_mn) launch_small<T, false, true>(args, stream);
    else launch_small<T, false, false>(args, stream);
  }
}

void small_product(const SmallProblem& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  if (p.type == Type::bf16) small_of<__nv_bfloat16>(p, s);
  else if (p.type == Type::f16) small_of<__half>(p, s);
  else small_of<float>(p, s);
}

}  // namespace zoo::cuda::sm90
