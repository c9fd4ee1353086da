// The Hopper product: y = act(A B + bias) by TMA and wgmma.
//
// A block has one warpgroup that loads (a single thread of it works) and `workers` warpgroups that multiply. The ring of
// shared-memory stages between them is guarded by two barriers a stage: `full` (the bytes are there) and `empty` (all
// workers have read them). Blocks are persistent: each walks over its share of the tiles, so that the loads of the next
// tile run under the epilogue of this one. With `alone`, each worker has a tile of its own and the epilogue of one runs
// under the products of the other; without, the workers share a tile by rows.
//
// float32 comes as two or three bf16 planes an operand (planes.cu); three or six products of planes make one of float32. The tensor
// core's accumulator truncates, so it is added into float registers every `promote` of K. With `raw`, A comes as float32
// itself and is split on its way through the workers' registers (raw.cuh).
//
// Tiles that do not fill a whole round of all blocks can be spread: their blocks of K are dealt out evenly, and who ends
// a tile last adds the pieces up.
//
// With `through` the epilogue is a gradient's: y = (A B) act'(saved), and the sums of y's columns (through.cuh).
#pragma once

#include "epilogue.cuh"
#include "raw.cuh"

namespace zoo::cuda::sm90 {

// A float32 operand as it was, for the rare product that has an infinity or a NaN in it: inf times a zero lower plane
// would be NaN. The split left a word a block, non-zero where it met one.
struct Source {
  const float* data;
  int64_t row, k;  // strides
  const int* flags;
  int flag_count;
  const float* saved;  // a gradient is multiplied by act'(saved) first
  int act;

  __device__ float at(int row_index, int k_index) const {
    const int64_t offset = row_index * row + k_index * k;
    float v[1] = {data[offset]};
    if (saved) {
      const float x[1] = {saved[offset]};
      go_through<true>(v, x, act);
    }
    return v[0];
  }
};

struct Args {
  CUtensorMap a, b, y, z;  // through: z is read, and is `saved`
  const void* bias;
  void* y_data;
  void* z_data;
  int64_t ld;          // of y and z
  float* partial;      // spread: the accumulators of two tiles a block
  unsigned* arrivals;  // spread: zero before and after, one a tile and worker
  int M, N, K, k_blocks;
  int m_tiles, n_tiles, group;
  int whole;  // tiles that are not spread
  int act;
  Source a_source, b_source;
  bool staged;  // y and z through shared memory and TMA
  bool turned;  // y is (N, M)
  float* sums;  // through: (4 m_tiles, N), of the rows that a warp has in a tile; or null
};

template <typename T_, int planes_, int m_, int n_, int k_, bool a_mn_, bool b_mn_, int workers_, bool alone_,
          int stages_, int promote_ = 32, bool raw_ = false, bool through_ = false>
struct Config {
  using T = T_;
  using Out = std::conditional_t<planes_ == 1, T, float>;
  static constexpr int planes = planes_, m = m_, n = n_, k = k_, workers = workers_, stages = stages_;
  static constexpr bool a_mn = a_mn_, b_mn = b_mn_, alone = alone_;
  static constexpr int promote = promote_;
  static constexpr bool raw = raw_;    // A is float32, not its planes
  static constexpr bool through = through_;
  static constexpr int worker_m = alone ? m : m / workers;
  static constexpr int strips = worker_m / 64;  // of 64 rows, a worker
  static constexpr int threads = 128 * (1 + workers);
  static constexpr int producer_registers = workers == 3 ? 32 : planes > 1 ? 40 : 24;
  static constexpr int worker_registers = workers == 3 ? 160 : planes > 1 ? 232 : 240;
  static constexpr bool ahead = raw && (strips + 1) * n / 2 + 2 * 24 + 32 <= worker_registers;  // two strips of raw A
  static constexpr int a_bytes = raw ? m * k * 4 : planes * m * k * 2, b_bytes = planes * n * k * 2;
  static constexpr int stage_bytes = a_bytes + b_bytes;
  // a warp, of 16 rows x 128 bytes each
  static constexpr int buffers = raw ? 4 : planes != 1 ? 0 : m * n <= 128 * 192 ? 4 : 2;
  static constexpr int warp_staging = buffers * 2048;
  static constexpr int staging_bytes = workers * 4 * warp_staging;
  static constexpr int bias_bytes = workers * n * sizeof(Out);
  static constexpr int shared_bytes = 1024 + stages * stage_bytes + staging_bytes + bias_bytes + 384;
  static constexpr int arrived_at = 16 * stages + 16;  // through: the barriers of the staging buffers, behind those of the ring
  static_assert(!through || (planes == 1 && alone && buffers == 4 && n % 64 == 0 &&
                             arrived_at + 8 * workers * 4 * buffers <= 384));
  static_assert(!raw || (planes == 3 && k == kRawDepth && promote == k && !alone));
  static_assert(worker_m % 64 == 0 && n % 32 == 0 && k % 16 == 0 && stages <= 14);
  static_assert(shared_bytes <= 227 * 1024, "a block has 227 KiB");
};

// One operand's share of a stage. K-major: planes of rows x k. MN-major: blocks of 64 rows, or of 32 where these are too
// many, in them planes of k x block.
template <bool mn, int planes, int rows, int k>
struct StageOperand {
  static constexpr int block = rows % 64 == 0 ? 64 : 32;
  static constexpr ptx::Swizzle swizzle = (mn ? block : k) == 64 ? ptx::Swizzle::b128 : ptx::Swizzle::b64;

  static __device__ __forceinline__ void load(const CUtensorMap* map, uint32_t at, uint32_t barrier, int row, int depth) {
#pragma unroll
    for (int p = 0; p < planes; ++p) {
      if constexpr (mn) {
#pragma unroll
        for (int b = 0; b < rows / block; ++b) {
          ptx::tma_load(at + (b * planes + p) * k * block * 2, map, barrier, row + block * b, depth, p);
        }
      } else {
        ptx::tma_load(at + p * rows * k * 2, map, barrier, depth, row, p);
      }
    }
  }

  // The 16 columns from 16 * step of K, rows from `row`, of a plane.
  static __device__ __forceinline__ uint64_t tile(uint32_t at, int plane, int row, int step) {
    if constexpr (mn) {
      return ptx::descriptor(
          at + ((row / block * planes + plane) * k + step * 16) * block * 2, planes * k * block * 2, 8 * block * 2, swizzle);
    } else {
      return ptx::descriptor(at + plane * rows * k * 2 + row * k * 2 + step * 32, 0, 8 * k * 2, swizzle);
    }
  }
};

struct Tile {
  int m, n, spread;   // which; of the spread ones, or -1 if it is whole
  int first, blocks;  // of K
  int slot;           // where its piece goes
};

// A block's way through the tiles: every gridDim-th of the whole ones, then its stretch of the spread ones. Groups of
// rows, so that the tiles in flight together share their operands in the L2.
struct Walk {
  const Args& args;
  int whole, at;
  bool begun = false;

  // What can be had from the arguments is worked out anew for each tile: registers are dearer.
  __device__ explicit Walk(const Args& a) : args(a), whole(blockIdx.x), at(begin(blockIdx.x)) {}
  // blocks of K in spread tiles
  __device__ int64_t total() const {
    return static_cast<int64_t>(args.m_tiles * args.n_tiles - args.whole) * args.k_blocks;
  }
  __device__ int begin(int block) const { return static_cast<int>(block * total() / gridDim.x); }
  __device__ int owner(int block_of_k) const {
    return static_cast<int>(((block_of_k + int64_t{1}) * gridDim.x - 1) / total());
  }
  __device__ bool next(Tile& tile) {
    int t;
    if (whole < args.whole) {
      t = whole;
      whole += gridDim.x;
      tile.spread = -1;
      tile.first = 0;
      tile.blocks = args.k_blocks;
    } else {
      const int end = begin(blockIdx.x + 1);
      if (at >= end) return false;
      const int spread = at / args.k_blocks;
      tile.first = at - spread * args.k_blocks;
      tile.blocks = min(args.k_blocks - tile.first, end - at);
      tile.spread = tile.blocks == args.k_blocks ? -1 : spread;
      tile.slot = 2 * blockIdx.x + begun;  // pieces are a block's first and last
      t = args.whole + spread;
      at += tile.blocks;
      begun = true;
    }
    locate(t, tile);
    return true;
  }
  __device__ void locate(int t, Tile& tile) const {
    const int first_row = t / (args.group * args.n_tiles) * args.group;
    const int rows = min(args.group, args.m_tiles - first_row), in_group = t % (args.group * args.n_tiles);
    tile.m = first_row + in_group % rows;
    tile.n = in_group / rows;
  }
};

template <int stages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void step() {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
  __device__ __forceinline__ void skip(int blocks) {
    stage += blocks;
    phase ^= stage / stages & 1;
    stage %= stages;
  }
};

template <class C>
struct Kernel {
  using A = StageOperand<C::a_mn, C::planes, C::m, C::k>;
  using B = StageOperand<C::b_mn, C::planes, C::n, C::k>;
  using Accumulators = float[C::strips][C::n / 2];

  const Args& args;
  uint32_t stages, staging, bias, full, empty;
  unsigned* last;  // in shared memory, one a worker: how many slices came before

  __device__ void produce() {
    Ring<C::stages> ring;
    Walk walk(args);
    for (Tile tile; walk.next(tile);) {
      for (int i = 0; i < tile.blocks; ++i, ring.step()) {
        ptx::barrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
        const uint32_t barrier = full + 8 * ring.stage, at = stages + ring.stage * C::stage_bytes;
        ptx::barrier_expect(barrier, C::stage_bytes);
        const int depth = (tile.first + i) * C::k;
        if constexpr (C::raw && C::a_mn) {
#pragma unroll
          for (int r = 0; r < C::m; r += 32) {
            ptx::tma_load_2d(at + r * kRawLine, &args.a, barrier, tile.m * C::m + r, depth);
          }
        } else if constexpr (C::raw) ptx::tma_load_2d(at, &args.a, barrier, depth, tile.m * C::m);
        else A::load(&args.a, at, barrier, tile.m * C::m, depth);
        B::load(&args.b, at + C::a_bytes, barrier, tile.n * C::n, depth);
      }
    }
  }

  __device__ __forceinline__ void release(int stage) {
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(empty + 8 * stage);
  }

  // Workers with tiles of their own take turns at the ring: the parity of a barrier tells one phase from the next, not
  // from the one after that, so nobody may wait for a stage before the tile ahead has seen all of its own.
  __device__ __forceinline__ void turn_begin(int worker) {
    if constexpr (C::alone) ptx::named_sync(1 + worker, 256);
  }
  __device__ __forceinline__ void turn_end(int worker) {
    if constexpr (C::alone) ptx::named_arrive(1 + (worker + 1) % C::workers, 256);
  }

  // One operand pair a stage; the products of a stage run while the next is issued.
  __device__ __forceinline__ void multiply(
      Accumulators& acc, Ring<C::stages>& ring, int blocks, int row, int worker) {
    int before = 0;
    turn_begin(worker);
#pragma unroll
    for (int s = 0; s < C::strips; ++s) ptx::forget(acc[s]);
    for (int i = 0; i < blocks; ++i) {
      ptx::barrier_wait(full + 8 * ring.stage, ring.phase);
      const uint32_t at = stages + ring.stage * C::stage_bytes;
#pragma unroll
      for (int s = 0; s < C::strips; ++s) ptx::pin(acc[s]);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < C::k / 16; ++k) {
#pragma unroll
        for (int s = 0; s < C::strips; ++s) {
          ptx::wgmma<typename C::T, C::n, C::a_mn, C::b_mn>(
              acc[s], A::tile(at, 0, row + 64 * s, k), B::tile(at + C::a_bytes, 0, 0, k), i | k);
        }
      }
      ptx::wgmma_commit();
#pragma unroll
      for (int s = 0; s < C::strips; ++s) ptx::pin(acc[s]);
      ptx::wgmma_wait<1>();
      if (i > 0) release(before);
      before = ring.stage;
      ring.step();
    }
    turn_end(worker);
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int s = 0; s < C::strips; ++s) ptx::pin(acc[s]);
    release(before);
  }

  // Three planes: six products (two planes: three), the small ones first, into `chunk`, and that into `acc` as floats. Workers that
  // share a tile issue in turn, so that one adds while another's products run; left alone they may fall into step.
  __device__ __forceinline__ void multiply_planes(
      Accumulators& acc, Ring<C::stages>& ring, int blocks, int row, int worker) {
    static_assert(C::strips == 1 && C::k % C::promote == 0);
    float chunk[C::n / 2];
    turn_begin(worker);
#pragma unroll
    for (int j = 0; j < C::n / 2; ++j) acc[0][j] = 0.f;
    for (int i = 0; i < blocks; ++i) {
      ptx::barrier_wait(full + 8 * ring.stage, ring.phase);
      const uint32_t at = stages + ring.stage * C::stage_bytes;
#pragma unroll
      for (int part = 0; part < C::k / C::promote; ++part) {
        if constexpr (!C::alone) ptx::named_sync(1 + worker, 256);
        ptx::forget(chunk);
        ptx::wgmma_fence();
#pragma unroll
        for (int product = C::planes == 3 ? 0 : 3; product < 6; ++product) {
          constexpr int a_planes[6] = {2, 0, 1, 1, 0, 0}, b_planes[6] = {0, 2, 1, 0, 1, 0};
#pragma unroll
          for (int k = 0; k < C::promote / 16; ++k) {
            const int step = part * (C::promote / 16) + k;
            ptx::wgmma<typename C::T, C::n, C::a_mn, C::b_mn>(
                chunk, A::tile(at, a_planes[product], row, step),
                B::tile(at + C::a_bytes, b_planes[product], 0, step),
                product - (C::planes == 3 ? 0 : 3) | k);
          }
        }
        ptx::wgmma_commit();
        if constexpr (!C::alone) ptx::named_arrive(1 + (worker + 1) % C::workers, 256);
        else if (part == C::k / C::promote - 1 && i + 1 == blocks) turn_end(worker);
        ptx::pin(chunk);
        ptx::wgmma_wait<0>();
        ptx::pin(chunk);
        if (part == C::k / C::promote - 1) release(ring.stage);
#pragma unroll
        for (int j = 0; j < C::n / 2; ++j) acc[0][j] += chunk[j];
      }
      ring.step();
    }
  }

  using RawPlanes = uint32_t[C::k / 16][3][4];

  // The six products of one strip of a stage, into `chunk`.
  static __device__ __forceinline__ void issue_raw(float (&chunk)[C::n / 2], RawPlanes& a, uint32_t b) {
#pragma unroll
    for (int i = 0; i < C::k / 16 * 3; ++i) ptx::pin(a[i / 3][i % 3]);
    ptx::forget(chunk);
    ptx::wgmma_fence();
#pragma unroll
    for (int product = 0; product < 6; ++product) {
      constexpr int a_planes[6] = {2, 0, 1, 1, 0, 0}, b_planes[6] = {0, 2, 1, 0, 1, 0};
#pragma unroll
      for (int k = 0; k < C::k / 16; ++k) {
        ptx::wgmma_registers<C::n, C::b_mn>(chunk, a[k][a_planes[product]], B::tile(b, b_planes[product], 0, k), product | k);
      }
    }
    ptx::wgmma_commit();
  }

  // They are done: `a` and `chunk` may be written again.
  __device__ __forceinline__ void settle_raw(float (&sums)[C::n / 2], float (&chunk)[C::n / 2], const RawPlanes& a) {
    ptx::pin(chunk);
    ptx::wgmma_wait<0>();
    ptx::pin(chunk);
#pragma unroll
    for (int k = 0; k < C::k / 16; ++k) ptx::keep(a[k], args.k_blocks < 0);
#pragma unroll
    for (int j = 0; j < C::n / 2; ++j) sums[j] += chunk[j];
  }

  // multiply_planes with A split on the way. While one worker reads, splits and adds, the others' products run; where registers
  // allow it, a worker's own do, too: two sets of A's registers then, in turn.
  __device__ __forceinline__ void multiply_raw(
      Accumulators& acc, Ring<C::stages>& ring, int blocks, int row, int worker) {
    static_assert(C::strips == 1);
    float chunk[C::n / 2];
    const uint32_t offset = row * kRawLine + raw_offset<C::a_mn>();
    const auto at = [&] { return stages + ring.stage * C::stage_bytes; };
    const auto read = [&](RawPlanes& a) {
      ptx::barrier_wait(full + 8 * ring.stage, ring.phase);
      raw_planes<C::a_mn>(a, at(), offset);
    };
    const auto issue = [&](RawPlanes& a) {
      ptx::named_sync(1 + worker, 256);
      issue_raw(chunk, a, at() + C::a_bytes);
      ptx::named_arrive(1 + (worker + 1) % C::workers, 256);
    };
#pragma unroll
    for (int j = 0; j < C::n / 2; ++j) acc[0][j] = 0.f;
    if constexpr (C::ahead) {
      RawPlanes even, odd;
      // `a` is multiplied while `next` is read
      const auto step = [&](RawPlanes& a, RawPlanes& next, bool last) {
        issue(a);
        const int stage = ring.stage;
        ring.step();
        if (!last) read(next);
        settle_raw(acc[0], chunk, a);
        release(stage);
      };
      read(even);
      for (int i = 0; i < blocks; i += 2) {
        step(even, odd, i + 1 == blocks);
        if (i + 1 == blocks) break;
        step(odd, even, i + 2 == blocks);
      }
    } else {
      for (int i = 0; i < blocks; ++i) {
        RawPlanes a;
        read(a);
        issue(a);
        settle_raw(acc[0], chunk, a);
        release(ring.stage);
        ring.step();
      }
    }
  }

  // A piece of a spread tile: left for whoever comes last, who adds them up, always in the same order. True for that one.
  __device__ bool collect(Accumulators& acc, const Tile& tile, const Walk& walk, int worker) {
    constexpr int parts = C::alone ? 1 : C::workers, quads = C::strips * C::n / 8;
    const int thread = threadIdx.x % 128, part = C::alone ? 0 : worker;
    auto slot = [&](int i) {
      return reinterpret_cast<float4*>(args.partial) + (static_cast<int64_t>(i) * parts + part) * quads * 128 + thread;
    };
    float4* mine = slot(tile.slot);
#pragma unroll
    for (int s = 0; s < C::strips; ++s) {
#pragma unroll
      for (int j = 0; j < C::n / 8; ++j) {
        __stcg(mine + (s * (C::n / 8) + j) * 128,
               make_float4(acc[s][4 * j], acc[s][4 * j + 1], acc[s][4 * j + 2], acc[s][4 * j + 3]));
      }
    }
    const int start = tile.spread * args.k_blocks;
    const int first = walk.owner(start), pieces = walk.owner(start + args.k_blocks - 1) - first + 1;
    unsigned* arrivals = args.arrivals + tile.spread * parts + part;
    __threadfence();
    ptx::named_sync(8 + worker, 128);
    if (thread == 0) last[worker] = atomicAdd(arrivals, 1u);
    ptx::named_sync(8 + worker, 128);
    if (last[worker] != pieces - 1) return false;
    __threadfence();
    if (thread == 0) *arrivals = 0;
#pragma unroll
    for (int s = 0; s < C::strips; ++s) {
#pragma unroll
      for (int j = 0; j < C::n / 2; ++j) acc[s][j] = 0.f;
    }
    for (int p = first; p < first + pieces; ++p) {
      const float4* theirs = slot(2 * p + (walk.begin(p) < start));
#pragma unroll
      for (int s = 0; s < C::strips; ++s) {
#pragma unroll
        for (int j = 0; j < C::n / 8; ++j) {
          const float4 v = __ldcg(theirs + (s * (C::n / 8) + j) * 128);
          acc[s][4 * j] += v.x;
          acc[s][4 * j + 1] += v.y;
          acc[s][4 * j + 2] += v.z;
          acc[s][4 * j + 3] += v.w;
        }
      }
    }
    return true;
  }

  template <int family>
  __device__ __forceinline__ void finish_staged(
      Accumulators& acc, const Tile& tile, int row, uint32_t bias_at, uint32_t buffers, int& turn) {
    using Out = typename C::Out;
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const bool both = args.z_data != nullptr;
    constexpr int wide = C::n / kPiece;
#pragma unroll
    for (int i = 0; i < C::strips * wide; ++i) {
      const int q = i % wide, half = q % 2;
      const int m = tile.m * C::m + row + i / wide * 64 + 16 * warp, n = tile.n * C::n + kPiece * q;
      if (m >= args.M || n - kPiece * half >= args.N) continue;
      const uint32_t z_at = buffers + (C::buffers == 4 ? 2 * turn : 0) * 2048;
      const uint32_t y_at = buffers + (C::buffers == 4 ? 2 * turn + 1 : both ? 1 : turn) * 2048;
      if (half == 0) {
        if (lane == 0) {
          if (C::buffers == 4 || !both) ptx::tma_wait_read<1>();
          else ptx::tma_wait_read<0>();
        }
        __syncwarp();
      }
      float v[16];
      piece(v, acc, i);
      if (args.bias) add_bias<Out>(v, bias_at + kPiece * q * sizeof(Out));
      if (both) to_shared<Out>(z_at, v, half);
      if constexpr (family == silu) {
        const SigmoidFamily f(args.act);
#pragma unroll
        for (int j = 0; j < 16; ++j) v[j] = f(v[j]);
      } else if constexpr (family == gelu && std::is_same_v<Out, __nv_bfloat16>) {
#pragma unroll
        for (int j = 0; j < 16; ++j) v[j] = gelu_bf16(v[j]);
      } else {
        activate<false>(v, family);
      }
      to_shared<Out>(y_at, v, half);
      if (half == 1) {
        ptx::proxy_fence();
        __syncwarp();
        if (lane == 0) {
          if (both) ptx::tma_store(&args.z, z_at, n - kPiece, m);
          ptx::tma_store(&args.y, y_at, n - kPiece, m);
          ptx::tma_commit();
        }
        turn ^= 1;
      }
    }
  }

  // As the other operand's rows: eight lanes write 32 bytes side by side.
  __device__ __forceinline__ void finish_turned(Accumulators& acc, const Tile& tile, int row) {
    constexpr int wide = C::n / kPiece;
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int i = 0; i < C::strips * wide; ++i) {
      const int m = tile.m * C::m + row + i / wide * 64 + 16 * warp + lane / 4;
      const int n = tile.n * C::n + kPiece * (i % wide) + 2 * (lane % 4);
      float v[16] = {};  // as in finish
      pick(v, acc, i);
      float* to = static_cast<float*>(args.y_data) + n * args.ld + m;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const int right = j / 4 * 8 + j % 2, down = j / 2 % 2 * 8;
        if (m + down < args.M && n + right < args.N) to[right * args.ld + down] = v[j];
      }
    }
  }

  // A piece of float32 leaves by lines of 128 bytes while the next is worked on. `family`: of activations, or -1, any.
  template <int family>
  __device__ __forceinline__ void put_floats(float (&v)[16], int m, int n, uint32_t bias_at, uint32_t buffers, int& turn) {
    const int lane = threadIdx.x % 32;
    const bool both = args.z_data != nullptr;
    const uint32_t z_at = buffers + 2 * turn * 2048, y_at = both ? z_at + 2048 : buffers + turn * 2048;
    if (lane == 0) {  // for what left these two, or this one, before
      if (both) ptx::tma_wait_read<1>();
      else ptx::tma_wait_read<3>();
    }
    __syncwarp();
    if (args.bias) add_bias<float>(v, bias_at);
    if (both) floats_to_shared(z_at, v);
    if constexpr (family == silu) {
      const SigmoidFamily f(args.act);
#pragma unroll
      for (int j = 0; j < 16; ++j) v[j] = f(v[j]);
    } else {
      activate<true>(v, family < 0 ? args.act : family);
    }
    floats_to_shared(y_at, v);
    ptx::proxy_fence();
    __syncwarp();
    if (lane == 0) {
      if (both) ptx::tma_store(&args.z, z_at, n, m);
      ptx::tma_store(&args.y, y_at, n, m);
      ptx::tma_commit();
    }
    turn = both ? turn ^ 1 : (turn + 1) % 4;
  }

  // Straight code for the activations that these operands meet in a model: to pick a piece by a number that the compiler does not
  // know costs as many instructions as all that is done without an activation.
  template <int family>
  __device__ __forceinline__ void finish_floats(
      Accumulators& acc, const Tile& tile, int row, uint32_t bias_at, uint32_t buffers, int& turn) {
    constexpr int wide = C::n / kPiece;
    const int m0 = tile.m * C::m + row + 16 * (threadIdx.x % 128 / 32), n0 = tile.n * C::n;
    const auto put = [&](float (&v)[16], int i) {
      const int m = m0 + i / wide * 64, n = n0 + kPiece * (i % wide);
      if (m >= args.M || n >= args.N) return;
      put_floats<family>(v, m, n, bias_at + kPiece * (i % wide) * sizeof(float), buffers, turn);
    };
    if constexpr (family >= 0) {
#pragma unroll
      for (int i = 0; i < C::strips * wide; ++i) {
        float v[16];
        piece(v, acc, i);
        put(v, i);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < C::strips * wide; ++i) {
        float v[16] = {};  // as in finish
        pick(v, acc, i);
        put(v, i);
      }
    }
  }

  __device__ __forceinline__ void finish(
      Accumulators& acc, const Tile& tile, int row, uint32_t bias_at, uint32_t buffers, int& turn) {
    using Out = typename C::Out;
    constexpr int wide = C::n / kPiece;
    const int warp = threadIdx.x % 128 / 32;
    const bool both = args.z_data != nullptr;
    if constexpr (C::raw) {
      if (args.staged) {
        if (args.act == none) return finish_floats<none>(acc, tile, row, bias_at, buffers, turn);
        if constexpr (!C::a_mn && !C::b_mn) {
          if (args.act == relu) return finish_floats<relu>(acc, tile, row, bias_at, buffers, turn);
          if (args.act == gelu) return finish_floats<gelu>(acc, tile, row, bias_at, buffers, turn);
          return finish_floats<silu>(acc, tile, row, bias_at, buffers, turn);
        }
        return finish_floats<-1>(acc, tile, row, bias_at, buffers, turn);
      }
      if (C::a_mn && args.turned) return finish_turned(acc, tile, row);
    } else if constexpr (C::planes == 1) {
      if (args.staged) {  // one straight path an activation: jumps starve the instruction cache
        switch (args.act) {
          case none: return finish_staged<none>(acc, tile, row, bias_at, buffers, turn);
          case relu: return finish_staged<relu>(acc, tile, row, bias_at, buffers, turn);
          case gelu: return finish_staged<gelu>(acc, tile, row, bias_at, buffers, turn);
          default: return finish_staged<silu>(acc, tile, row, bias_at, buffers, turn);
        }
      }
    }
#pragma unroll 1
    for (int i = 0; i < C::strips * wide; ++i) {
      const int q = i % wide, m = tile.m * C::m + row + i / wide * 64 + 16 * warp, n = tile.n * C::n + kPiece * q;
      if (m >= args.M || n >= args.N) continue;
      float v[16] = {};  // or else they stay live from tile to tile: no one branch of `pick` is sure to be taken
      pick(v, acc, i);
      if (args.bias) add_bias<Out>(v, bias_at + kPiece * q * sizeof(Out));
      if (both) to_memory(static_cast<Out*>(args.z_data), args.ld, v, m, n, args.M, args.N);
      activate<C::planes != 1>(v, args.act);
      to_memory(static_cast<Out*>(args.y_data), args.ld, v, m, n, args.M, args.N);
    }
  }

  __device__ bool flagged(const Source& source) {
    bool any = false;
    for (int i = threadIdx.x % 128; i < source.flag_count; i += 128) any |= source.flags[i] != 0;
    return any;
  }

  // The first planes are rounded up by as much as one part in 500, and their product may overflow where float32's does not.
  // And raw A's planes of what is not finite are NaN.
  __device__ __forceinline__ bool overflown(const Accumulators& acc) {
    bool any = false;
#pragma unroll
    for (int s = 0; s < C::strips; ++s) {
#pragma unroll
      for (int j = 0; j < C::n / 2; ++j) any |= !(fabsf(acc[s][j]) <= 3.402823466e38f);
    }
    return any;
  }

  // A worker's part of a tile again, in plain float32.
  __device__ void redo(const Tile& tile, int row, int worker) {
    if (C::buffers > 0 && threadIdx.x % 32 == 0) ptx::tma_wait_all();  // the first results may not arrive after these
    ptx::named_sync(8 + worker, 128);
    for (int e = threadIdx.x % 128; e < C::worker_m * C::n; e += 128) {
      const int m = tile.m * C::m + row + e / C::n, n = tile.n * C::n + e % C::n;
      if (m >= args.M || n >= args.N) continue;
      float v[1] = {0.f};
      for (int k = 0; k < args.K; ++k) v[0] = fmaf(args.a_source.at(m, k), args.b_source.at(n, k), v[0]);
      if (args.bias) v[0] += static_cast<const float*>(args.bias)[n];
      if (args.z_data) static_cast<float*>(args.z_data)[m * args.ld + n] = v[0];
      activate<true>(v, args.act);
      static_cast<float*>(args.y_data)[args.turned ? n * args.ld + m : m * args.ld + n] = v[0];
    }
  }

  __device__ void consume(int worker) {
    bool special = false;
    if constexpr (C::planes > 1) {
      special = flagged(args.a_source) || flagged(args.b_source);
      if (ptx::named_or(8 + worker, 128, special)) special = true;
    }
    const int row = C::alone ? 0 : worker * C::worker_m;
    const int warp = worker * 4 + threadIdx.x % 128 / 32;
    const uint32_t buffers = staging + warp * C::warp_staging;
    const uint32_t bias_at = bias + worker * C::n * sizeof(typename C::Out);
    int turn = 0, count = 0;
    Ring<C::stages> ring;
    if constexpr (C::alone || C::planes > 1) {
      if (worker == C::workers - 1) ptx::named_arrive(1, 256);
    }
    Accumulators acc;
    Walk walk(args);
    for (Tile tile; walk.next(tile); ++count) {
      if (C::alone && count % C::workers != worker) {
        ring.skip(tile.blocks);
        continue;
      }
      if (args.bias) {  // the loads pass under the products
        using Out = typename C::Out;
        ptx::named_sync(8 + worker, 128);  // the tile before has read its own
        for (int j = threadIdx.x % 128; j < C::n; j += 128) {
          const int n = tile.n * C::n + j;
          ptx::store_shared(bias_at + j * sizeof(Out), n < args.N ? static_cast<const Out*>(args.bias)[n] : narrow<Out>(0.f));
        }
      }
      if constexpr (C::planes == 1) multiply(acc, ring, tile.blocks, row, worker);
      else if constexpr (C::raw) multiply_raw(acc, ring, tile.blocks, row, worker);
      else multiply_planes(acc, ring, tile.blocks, row, worker);
      if (tile.spread >= 0 && !collect(acc, tile, walk, worker)) continue;
      if (args.bias) ptx::named_sync(8 + worker, 128);
      bool again = special;
      if constexpr (C::planes > 1) again |= ptx::named_or(8 + worker, 128, overflown(acc));
      finish(acc, tile, row, bias_at, buffers, turn);
      if (C::planes > 1 && again) redo(tile, row, worker);
    }
    if (threadIdx.x % 32 == 0) ptx::tma_wait_all();
  }
};

template <class C>
struct Through;

template <class C>
__global__ void __launch_bounds__(C::threads, 1) gemm_kernel(const __grid_constant__ Args args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // nothing for other chips; the choice of kernel keeps it from them
  extern __shared__ uint8_t shared[];
  const uint32_t base = (ptx::shared_address(shared) + 1023) / 1024 * 1024;
  const uint32_t staging = base + C::stages * C::stage_bytes, bias = staging + C::staging_bytes;
  const uint32_t barriers = bias + C::bias_bytes;
  Kernel<C> kernel{args, base, staging, bias, barriers, barriers + 8 * C::stages};
  kernel.last = reinterpret_cast<unsigned*>(shared + (barriers + 16 * C::stages - ptx::shared_address(shared)));

  if (threadIdx.x == 0) {
    ptx::prefetch_map(&args.a);
    ptx::prefetch_map(&args.b);
    for (int s = 0; s < C::stages; ++s) {
      ptx::barrier_init(kernel.full + 8 * s, 1);
      ptx::barrier_init(kernel.empty + 8 * s, (C::alone ? 1 : C::workers) * 4);
    }
    if constexpr (C::through) {
      for (int i = 0; i < C::workers * 4 * C::buffers; ++i) ptx::barrier_init(barriers + C::arrived_at + 8 * i, 1);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();

  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // uniform, for setmaxnreg
  if (group == 0) {
    ptx::fewer_registers<C::producer_registers>();
    if (threadIdx.x == 0) kernel.produce();
  } else {
    ptx::more_registers<C::worker_registers>();
    if constexpr (C::through) Through<C>(kernel, group - 1, barriers + C::arrived_at).consume();
    else kernel.consume(group - 1);
  }
#endif
}

}  // namespace zoo::cuda::sm90
