#include "choice_model.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <stdexcept>

namespace zoo {

using namespace model;

namespace {

constexpr Kernel kAll[kKernels] = {Kernel::tiled, Kernel::gemv,  Kernel::cublas, Kernel::mma,
                                   Kernel::small, Kernel::wgmma, Kernel::split3, Kernel::split6};

// A tile shape of the wgmma kernels. `alone`: each of two warpgroups has a tile of its own, and the epilogue of one runs
// under the products of the other; else the warpgroups share a tile.
struct Shape {
  int config, m, n;
  bool alone;
  double rate;        // products of 2-byte types on one processor, in MFLOP a microsecond
  double begin = 0;   // where float32 a is split in registers: microseconds until a tile's first products are issued
  double left = 0.55;  // of the epilogue, where warpgroups share a tile, and one's instructions fill the others' waits
  bool raw() const { return begin > 0; }
};

constexpr Shape kWgmma[] = {{0, 128, 128, true, 5.2}, {1, 128, 192, true, 5.64}, {2, 128, 256, false, 6.0},
                            {4, 64, 64, true, 2.2},   {5, 256, 128, false, 6.0}};
constexpr Shape kSplit[] = {
    {0, 128, 128, false, 6.18},      {1, 128, 192, false, 6.36},      {3, 128, 64, false, 5.0},
    {6, 192, 128, false, 6.18},      {8, 128, 192, false, 6.38, 1}, {9, 128, 128, false, 6.34, 1},
    {10, 192, 96, false, 5.6, 0.7, 0.4}, {11, 128, 96, false, 5.69, 1}};

// Epilogue of one element by one warpgroup, in nanoseconds, by activation: of mma's; of wgmma's, fitted to bf16.
constexpr double kEpilogue[] = {0.28, 0.30, 0.52, 0.45, 0.45};
constexpr double kWgmmaEpilogue[] = {0.26, 0.28, 0.44, 0.42, 0.42};
// And of the splits', fitted to none and gelu; the others by gelu's ratio.
constexpr double kSplitEpilogue[] = {0.28, 0.30, 0.80, 0.69, 0.69};
// The same where it multiplies by the activation's derivative and sums columns: predicted from the number of instructions.
constexpr double kThroughEpilogue[] = {0, 0.34, 0.51, 0.54, 0.54};
constexpr double kWgmmaLeft = 0.65;  // wgmma's `left`
constexpr double kPieces = 0.2e-3;      // microseconds an element of a spread tile and piece of it

// The numbers here were fitted to what one H200 measured; examples/results/h200-linear*.json hold it, and sm90/NOTES.md.

// The model's time of a product by the tiles of one shape; `spread` is set to the better of both ways.
double tiles_time(const Query& q, const Shape& s, int products, int* spread) {
  const double tiles = static_cast<double>(divided_up(q.M, s.m)) * divided_up(q.N, s.n);
  const int64_t step = s.raw() ? 32 : 64;
  const double k = static_cast<double>(step * divided_up(q.K, step));
  // three products a step of K do not cover the way of the stages as six do
  // and fp16's products draw more power: the chip clocks lower
  const double rate = products == 3 ? 0.75 * s.rate : q.type == Type::f16 ? 0.94 * s.rate : s.rate;
  const double body = 2e-6 * s.m * s.n * k * products / rate;
  const bool wgmma = products == 1;
  const double* const table = q.through ? kThroughEpilogue : wgmma ? kWgmmaEpilogue : kSplitEpilogue;
  const double each = table[q.through ? q.through : q.activation];
  const double epilogue = each * 1e-3 * s.m * s.n;
  const double exposed = epilogue / 2 * (wgmma ? kWgmmaLeft : s.left);
  double tile = s.alone ? std::max(body, (body + epilogue) / 2) : body + exposed;
  tile += s.begin;
  const double waves = divided_up(static_cast<int64_t>(tiles), q.processors);
  const double whole = waves * tile + (s.alone ? epilogue / 2 : 0);
  const int64_t rest = static_cast<int64_t>(tiles) % q.processors;
  *spread = 0;
  // 2-byte tiles that warpgroups share lose more by being spread than they win
  if (q.through || rest == 0 || q.K < 512 || (!s.alone && products == 1)) return whole;
  const double pieces = static_cast<double>(q.processors) / rest;
  const double shared = tiles / q.processors * tile + 6 + kPieces * (pieces + 1) * s.m * s.n / (s.alone ? 1 : 2);
  if (shared >= whole) return whole;
  *spread = 1;
  return shared;
}

// Rows that do not overlap, each beginning at a multiple of 16 bytes.
bool tma_reads(const Layout& x, int64_t rows, int64_t K, Type type) {
  const int64_t step = x.k_major() ? x.outer : x.k, length = x.k_major() ? K : rows;
  return (x.k_major() || x.mn_major()) && x.aligned && step >= length && step * bytes_of(type) % 16 == 0;
}

}  // namespace

Forced model::parse(const char* text) {
  Forced forced;
  if (!text || !*text) return forced;
  const char* end = std::strchr(text, ':');
  const size_t length = end ? static_cast<size_t>(end - text) : std::strlen(text);
  for (const Kernel& k : kAll) {
    if (std::strlen(name_of(k)) == length && std::strncmp(name_of(k), text, length) == 0) forced.kernel = &k;
  }
  int read = 0;
  bool known = forced.kernel != nullptr;
  if (known && end) {
    known = std::sscanf(end, ":%d%n", &forced.config, &read) == 1;
    if (known && end[read] == ':') {
      int more = 0;
      known = std::sscanf(end + read, ":%d%n", &forced.spread, &more) == 1 && (forced.spread == 0 || forced.spread == 1);
      read += more;
    }
    known = known && end[read] == 0;
  }
  if (!known) {
    throw std::runtime_error(
        std::string("zoo: ZOO_LINEAR_KERNEL is '") + text +
        "'; expected tiled, gemv, cublas, mma, small, wgmma, split3 or split6 (wgmma:2 its tile shape 2, wgmma:2:1 spread), or "
        "leave it unset");
  }
  return forced;
}

namespace {

// Microseconds of reading both operands and writing the output; `a_bytes`, `b_bytes` of an element, where it is not the type's.
double traffic(const Query& q, int a_bytes, int b_bytes) {
  const double output = static_cast<double>(q.M) * q.N * (q.through ? 2 : 1) * bytes_of(q.type);
  const double a = static_cast<double>(q.M) * q.K * a_bytes, b = static_cast<double>(q.N) * q.K * b_bytes;
  return static_cast<double>(q.batch) * (a + b + output) / kBandwidth;
}

double traffic(const Query& q) {
  return traffic(q, bytes_of(q.type), bytes_of(q.type));
}

double packing_time(const Query& q, const Choice& c) {
  const double each = 2.0 * bytes_of(q.type) * static_cast<double>(q.K) / kBandwidth;
  return (c.pack_a ? kLaunch + each * static_cast<double>(q.M) : 0) +
         (c.pack_b ? kLaunch + each * static_cast<double>(q.N) : 0);
}

Candidate tiled(const Query& q) {
  Candidate c;
  const double rate = q.type == Type::f64 ? 0.04 : 0.09;  // MFLOP a microsecond and processor
  const double tiles = static_cast<double>(q.batch) * divided_up(q.M, 64) * divided_up(q.N, 64);
  const double waves = divided_up(static_cast<int64_t>(tiles), q.processors);
  c.choice.kernel = Kernel::tiled;
  c.choice.microseconds = kLaunch + waves * (1 + 2e-6 * 64 * 64 * static_cast<double>(q.K) / rate);
  return c;
}

Candidate gemv(const Query& q) {
  Candidate c;
  c.choice.kernel = Kernel::gemv;
  const int64_t wide = 16 / bytes_of(q.type);
  auto whole = [&](const Layout& x, int64_t rows) {
    return x.k_major() && x.aligned && (x.outer % wide == 0 || rows == 1);
  };
  if (q.batch != 1) c.why_not = "takes no batches";
  else if (q.M > 8) c.why_not = "takes up to 8 rows";
  else if (q.M == 0 || q.N == 0 || q.K == 0) c.why_not = "nothing to multiply";
  else if (q.K % wide != 0 || !whole(q.a, q.M) || !whole(q.b, q.N)) c.why_not = "wants rows along K in whole 16 bytes";
  else if (q.K > int64_t{1} << 31) c.why_not = "too large";
  // the weight is read at the memory's own rate; what is multiplied shows from five rows of 2-byte types on
  const double read = static_cast<double>(q.N) * q.K * bytes_of(q.type);
  const double rows = q.M > 4 ? (wide == 8 ? 1.25 : 1.1) : 1.0;
  c.choice.microseconds = kLaunch + 0.4 + read * rows / kReading;
  return c;
}

Candidate mma(const Query& q) {
  Candidate c;
  c.choice.kernel = Kernel::mma;
  if (q.capability < 80) c.why_not = "needs compute capability 8.0";
  else if (q.type != Type::bf16 && q.type != Type::f16) c.why_not = "multiplies 2-byte types";
  else if (q.batch != 1) c.why_not = "takes no batches";
  else if (q.M == 0 || q.N == 0 || q.K == 0) c.why_not = "nothing to multiply";
  else if (divided_up(q.M, 128) * divided_up(q.N, 256) > INT32_MAX) c.why_not = "too large";
  // its rows lie less than 4 GiB apart
  else if (std::max({q.K, q.M, q.N, q.a.outer, q.a.k, q.b.outer, q.b.k}) > INT32_MAX - 64) c.why_not = "too large";
  if (c.why_not) return c;
  const double tiles = static_cast<double>(divided_up(q.M, 128)) * divided_up(q.N, 256);
  const double waves = divided_up(static_cast<int64_t>(tiles), q.processors);
  const double epilogue = kEpilogue[q.activation] * 1e-3 * 128 * 256 / 2;
  c.choice.microseconds = kLaunch + waves * (2e-6 * 128 * 256 * static_cast<double>(q.K) / 3.7 + epilogue);
  c.choice.pack_a = !tma_reads(q.a, q.M, q.K, q.type);
  c.choice.pack_b = !tma_reads(q.b, q.N, q.K, q.type);
  c.choice.microseconds += packing_time(q, c.choice);
  return c;
}

// aten's own product: as fast and as exact as torch's. The rates are those of an H200's processors.
Candidate cublas(const Query& q, const Forced& forced) {
  Candidate c;
  c.choice.kernel = Kernel::cublas;
  const bool hopper = q.capability == 90 && q.hopper, exact = q.type == Type::f32 && q.precision == Precision::highest;
  if (q.M == 0 || q.N == 0 || q.K == 0 || q.batch == 0) c.why_not = "nothing to multiply";
  else if (exact && hopper && q.batch == 1 && !forced.kernel) c.why_not = "less accurate than the planes of split6 and small";
  const bool two = q.type == Type::bf16 || q.type == Type::f16;
  const double rate = q.type == Type::f64 ? 0.38 : two ? 5.0 : exact ? 0.36 : 2.65;
  const double tiles = static_cast<double>(q.batch) * divided_up(q.M, 128) * divided_up(q.N, 128);
  const double flop = 2e-6 * static_cast<double>(q.batch) * q.M * q.N * q.K;
  const double pieces = exact || q.type == Type::f64 ? 1 : std::max<double>(1, q.K / 4096);  // in tf32 a long K is shared
  const double used = two ? q.processors : std::max(1.0, std::min<double>(tiles * 2 * pieces, q.processors));
  double time = std::max(flop / (rate * used), traffic(q));
  if (two && (q.K % 8 != 0 || q.N % 4 != 0)) time *= 4;  // rows that are no whole 16 bytes
  else if (two && q.N % 8 != 0) time *= 2;
  if (two && 2 * tiles < q.processors) time += 1.4e-3 * std::min<double>(q.K, 4096);  // the walk along K shows
  time += 3.6;
  if (q.activation != 0 || q.type == Type::f64 || exact) {
    time += kLaunch + (two ? 2.2 : 1.6) * q.batch * q.M * q.N * bytes_of(q.type) / kBandwidth;
  }
  // at equal times our own, whose accumulation does not hang on a setting; where launches decide, it was measured slower
  c.choice.microseconds = two && time < 8 ? time - 0.3 : 1.05 * time;
  return c;
}

}  // namespace

const char* model::hopper_refuses(const Query& q) {
  if (q.capability != 90) return "needs compute capability 9.0";
  if (!q.hopper) return "this build has no code for sm_90a";
  if (q.type == Type::f64) return "wgmma has no float64";
  if (q.batch != 1) return "takes no batches";
  if (q.M == 0 || q.N == 0 || q.K == 0) return "nothing to multiply";
  if (std::max({q.M, q.N, q.K}) >= INT32_MAX / 2 || q.M * q.K >= int64_t{1} << 33 || q.N * q.K >= int64_t{1} << 33) {
    return "sizes beyond its 32-bit indices";
  }
  return nullptr;
}

SmallWork model::small_work(const Query& q) {
  return {static_cast<double>(divided_up(q.M, 64)) * divided_up(q.N, 64), static_cast<double>(divided_up(q.K, 64))};
}

SmallCosts model::small_costs(const Query& q, int through) {
  const double derivative = through == 0 ? 0 : through == 1 ? 0.1 : 0.5;
  if (q.type == Type::f32) {
    const auto whole = [](const Layout& x) {
      return x.aligned && (x.k_major() || x.mn_major()) && (x.k_major() ? x.outer : x.k) % 4 == 0;
    };
    const double bytewise = whole(q.a) && whole(q.b) ? 0 : 0.9;  // copies of 4 bytes in place of 16
    return {1.4 + derivative + bytewise, (q.b.mn_major() ? 1.0 : 1.15) + derivative + bytewise, 0, 0.2, 1.9, 2.7};
  }
  return {0.55 + derivative, 1.0 + derivative, 1, 0, 2.5, 2.5};
}

double model::small_time(
    const SmallWork* works, const int* slices, int count, const SmallCosts& cost, int processors, double bytes) {
  double all = 0, longest = 0, cluster = 0;
  for (int i = 0; i < count; ++i) {
    const double steps = std::ceil(works[i].steps / slices[i]);
    all += works[i].tiles * slices[i] * (steps + 1.5);  // beginning and end cost as much as one or two steps
    longest = std::max(longest, (steps + cost.begin) * cost.alone);
    // more than eight clusters of eight do not all find room at once
    if (slices[i] > 1) cluster = std::max(cluster, slices[i] == 8 && works[i].tiles > 8 ? cost.crowd : 0.5);
    if (slices[i] == 4 && works[i].tiles * 4 > processors) cluster = std::max(cluster, 0.8 * cost.crowd);
  }
  return kLaunch + cost.base + cluster +
         std::max({all * cost.among / processors + cost.tail * longest, longest, bytes / kBandwidth});
}

double model::bytes_moved(const Query& q) {
  return traffic(q) * kBandwidth;
}

namespace {

Candidate small(const Query& q, const Forced& forced) {
  Candidate c;
  c.choice.kernel = Kernel::small;
  c.why_not = hopper_refuses(q);
  const SmallWork work = small_work(q);
  if (!c.why_not && work.tiles > 1 << 24) c.why_not = "too many tiles";
  if (!c.why_not && forced.config >= 0 && (forced.config == 0 || forced.config > 8 || (forced.config & (forced.config - 1)))) {
    c.why_not = "1, 2, 4 or 8 blocks share a tile";
  }
  if (c.why_not) return c;
  for (int slices = 1; slices <= 8; slices *= 2) {
    if (forced.config > 0 && slices != forced.config) continue;
    if (forced.config <= 0 && slices > std::max(1.0, work.steps)) break;  // nothing left to share
    const double time = small_time(&work, &slices, 1, small_costs(q, 0), q.processors, bytes_moved(q));
    if (c.choice.microseconds > 0 && time >= c.choice.microseconds) continue;
    c.choice.microseconds = time;
    c.choice.slices = slices;
  }
  return c;
}

}  // namespace

Candidate model::by_tiles(const Query& q, Kernel kernel, const Forced& forced) {
  Candidate c;
  c.choice.kernel = kernel;
  const bool f32 = kernel != Kernel::wgmma;
  c.why_not = hopper_refuses(q);
  if (!c.why_not && f32 != (q.type == Type::f32)) c.why_not = f32 ? "splits float32 alone" : "multiplies 2-byte types";
  if (!c.why_not && kernel == Kernel::split3 && q.precision == Precision::highest) {
    c.why_not = "less accurate than float32; torch.set_float32_matmul_precision(\"high\") allows it";
  }
  if (c.why_not) return c;
  const int products = kernel == Kernel::split6 ? 6 : kernel == Kernel::split3 ? 3 : 1;
  const char* no_raw = q.a_in_planes ? "takes no planes of a, which are there"
                       : tma_reads(q.a, q.M, q.K, q.type) && (q.a.k_major() || q.b.mn_major())
                           ? nullptr
                           : "splits a in rows of whole 16 bytes, along M only with b along N";
  bool first = true;
  double best_tiles = 0;
  auto consider = [&](const Shape& s) {
    if (forced.config >= 0 && forced.config != s.config) return;
    if (s.raw() && (c.why_not = no_raw)) return;
    int spread = 0;
    const double tiles = tiles_time(q, s, products, &spread);
    const int planes = f32 ? products == 6 ? 6 : 4 : 2;  // bytes of an element
    double time = kLaunch + std::max(tiles, traffic(q, s.raw() ? 4 : planes, planes));
    // the pass that makes planes
    const int64_t split = (s.raw() || q.a_in_planes ? 0 : q.M) + (q.b_in_planes ? 0 : q.N);
    if (f32 && split > 0) time += kLaunch + static_cast<double>(split) * q.K * 10 / kBandwidth;
    if (forced.spread >= 0) spread = forced.spread;
    // where memory decides, the better tiles still
    if (!first && (time > c.choice.microseconds || (time == c.choice.microseconds && tiles >= best_tiles))) return;
    first = false;
    best_tiles = tiles;
    c.choice.config = s.config;
    c.choice.spread = spread;
    c.choice.raw_a = s.raw();
    c.choice.tile = s.m * s.n;
    c.choice.microseconds = time;
  };
  if (!f32) {
    for (const Shape& s : kWgmma) {
      if ((q.type == Type::f16 || q.through) && s.config > 1) continue;  // these are compiled for bf16 alone, and plain
      consider(s);
    }
  } else {
    for (const Shape& s : kSplit) {
      if (kernel == Kernel::split3 && s.config > 1) continue;
      consider(s);
    }
  }
  if (first) {
    if (!c.why_not) c.why_not = "it has no such tile shape for this type";
    return c;
  }
  c.why_not = nullptr;
  if (f32) {
    c.choice.pack_a = !q.a.k_major() && !q.a.mn_major();
    c.choice.pack_b = !q.b.k_major() && !q.b.mn_major();
  } else {
    c.choice.pack_a = !tma_reads(q.a, q.M, q.K, q.type);
    c.choice.pack_b = !tma_reads(q.b, q.N, q.K, q.type);
  }
  // a along M with b along K is the one pair of layouts without a kernel
  if (q.a.mn_major() && !c.choice.pack_a && (c.choice.pack_b || q.b.k_major())) c.choice.pack_a = true;
  c.choice.microseconds += packing_time(q, c.choice);
  return c;
}

namespace {

Candidate candidate(const Query& q, Kernel kernel, const Forced& forced = {}) {
  switch (kernel) {
    case Kernel::tiled: return tiled(q);
    case Kernel::gemv: return gemv(q);
    case Kernel::cublas: return cublas(q, forced);
    case Kernel::mma: return mma(q);
    case Kernel::small: return small(q, forced);
    default: return by_tiles(q, kernel, forced);
  }
}

std::string words(const Choice& c) {
  char text[160];
  switch (c.kernel) {
    case Kernel::tiled: return "64x64 tiles in plain CUDA";
    case Kernel::gemv: return "two or four columns a warp";
    case Kernel::cublas: return "aten's product; bias and activation after it";
    case Kernel::small:
      snprintf(text, sizeof text, "64x64 tiles, %d block%s a tile", c.slices, c.slices > 1 ? "s" : "");
      break;
    default: {
      const Shape* shape = nullptr;
      static constexpr Shape mma{0, 128, 256, false, 0};
      if (c.kernel == Kernel::mma) shape = &mma;
      else if (c.kernel == Kernel::wgmma) {
        for (const Shape& s : kWgmma) if (s.config == c.config) shape = &s;
      } else {
        for (const Shape& s : kSplit) if (s.config == c.config) shape = &s;
      }
      snprintf(text, sizeof text, "%dx%d tiles%s%s%s%s", shape->m, shape->n, shape->alone ? ", one a warpgroup" : "",
               c.raw_a ? ", a split in registers" : "",
               c.spread ? ", the last round spread along K" : "",
               c.pack_a && c.pack_b ? ", both operands copied first" : c.pack_a ? ", a copied first"
               : c.pack_b ? ", b copied first" : "");
    }
  }
  return text;
}

}  // namespace

const char* name_of(Kernel kernel) {
  switch (kernel) {
    case Kernel::tiled: return "tiled";
    case Kernel::gemv: return "gemv";
    case Kernel::cublas: return "cublas";
    case Kernel::mma: return "mma";
    case Kernel::small: return "small";
    case Kernel::wgmma: return "wgmma";
    case Kernel::split3: return "split3";
    case Kernel::split6: return "split6";
  }
  return "";
}

bool forces_raw(const char* text) {
  const Forced forced = parse(text);
  if (!forced.kernel || *forced.kernel != Kernel::split6) return false;
  for (const Shape& s : kSplit) {
    if (s.config == forced.config) return s.raw();
  }
  return false;
}

Choice choose(const Query& q, const char* forced, Trace* trace) {
  const Forced wanted = parse(forced);
  const Kernel* only = wanted.kernel;
  Choice best;
  bool found = false;
  for (const Kernel kernel : kAll) {
    if (only && kernel != *only) continue;
    const Candidate c = candidate(q, kernel, wanted);
    if (c.why_not) {
      if (only) {
        throw std::runtime_error(
            std::string("zoo: ZOO_LINEAR_KERNEL=") + forced + " cannot compute this product: " + c.why_not +
            "; unset it");
      }
      if (trace) trace->rejected.push_back({kernel, c.why_not});
      continue;
    }
    if (!found || c.choice.microseconds < best.microseconds) {
      best = c.choice;
      found = true;
    }
  }
  if (trace) {
    trace->configuration = words(best);
    char text[96];
    if (only) {
      trace->reason = "ZOO_LINEAR_KERNEL forces it";
    } else {
      snprintf(text, sizeof text, "%.1f us by the model, the least of those that can", best.microseconds);
      trace->reason = text;
      for (const Kernel kernel : kAll) {
        if (kernel == best.kernel) continue;
        const Candidate c = candidate(q, kernel);
        if (c.why_not) continue;
        snprintf(text, sizeof text, "%.1f us by the model", c.choice.microseconds);
        trace->rejected.push_back({kernel, text});
      }
    }
  }
  return best;
}

}  // namespace zoo
