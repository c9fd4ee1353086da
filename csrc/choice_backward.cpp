// The choices of a backward pass: what is one launch, and what is done in a product's epilogue.
#include "choice_model.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace zoo {

using namespace model;

namespace {

bool by_planes(const Choice& c) {
  return (c.kernel == Kernel::split6 || c.kernel == Kernel::split3) && !c.pack_a && !c.raw_a;
}

double pass_time(double bytes, double bandwidth, bool adds) {
  return kLaunch + bytes / bandwidth + (adds ? kLaunch : 0);
}

}  // namespace

Query turned(const Query& dw) {
  Query q = dw;
  std::swap(q.M, q.N);
  std::swap(q.a, q.b);
  q.a_in_planes = false, q.b_in_planes = true;
  return q;
}

Apart choose_apart(const Query* dw, const Query* dx, int activation, bool bias, bool rows, const char* forced) {
  const bool changed = activation != 0;
  Apart plain;
  if (dx) plain.dx = choose(*dx, forced, nullptr);
  if (dw) plain.dw = choose(*dw, forced, nullptr);
  if (!dx && !dw) return plain;
  const Query& any = dx ? *dx : *dw;
  const int64_t count = dx ? dx->M : dw->K;
  const double elements = static_cast<double>(count) * (dx ? dx->K : dw->M), each = bytes_of(any.type);
  const bool adds = bias && count > kOneBlockRows;
  plain.microseconds = plain.dx.microseconds + plain.dw.microseconds;
  if (changed) plain.microseconds += pass_time(3 * each * elements, kBandwidth, adds);
  else if (bias) plain.microseconds += pass_time(each * elements, kReading, adds);
  if (any.type != Type::f32 || !rows) return plain;

  Query dx_planes{}, dw_planes{};
  Choice dx_of[2], dw_of[2];  // from dY's planes, and X from dY itself, which is what the pass reads; W from dY's planes, and turned
  bool dx_can[2] = {!dx, dx && dw && !changed}, dw_can[2] = {!dw, false};
  if (dx) {
    (dx_planes = *dx).a_in_planes = true;
    dx_of[0] = choose(dx_planes, forced, nullptr), dx_of[1] = plain.dx;
    dx_can[0] = by_planes(dx_of[0]);
    dx_can[1] = dx_can[1] && dx_of[1].microseconds < 0.97 * dx_of[0].microseconds;  // the model is no finer
  }
  if (dw) {
    (dw_planes = *dw).a_in_planes = true;
    dw_of[0] = choose(dw_planes, forced, nullptr), dw_of[1] = choose(turned(*dw), forced, nullptr);
    dw_can[0] = by_planes(dw_of[0]), dw_can[1] = dw_of[1].raw_a && dw->b.mn_major();
  }
  Apart best = plain;
  for (const bool raw : {false, true}) {
    for (const bool turn : {false, true}) {
      if (!dx_can[raw] || !dw_can[turn]) continue;
      Apart c{true, raw, turn, dx_of[raw], dw_of[turn]};
      const bool three = (dx && !raw && c.dx.kernel == Kernel::split6) || (dw && c.dw.kernel == Kernel::split6);
      const double bytes = 4.0 * (changed ? 2 : 1) + (three ? 6 : 4);
      c.microseconds = c.dx.microseconds + c.dw.microseconds + pass_time(bytes * elements, kBandwidth, adds);
      if (c.microseconds < best.microseconds) best = c;
    }
  }
  return best;
}

Together choose_together(const Query& dw, const Query& dx, int activation, double apart, const char* forced) {
  const Forced wanted = parse(forced);
  Together best;
  if (wanted.kernel && *wanted.kernel != Kernel::small) return best;
  if (hopper_refuses(dw) || hopper_refuses(dx)) return best;
  // dY along its rows for dW, along K for dX; the others along their rows
  if (!dw.a.mn_major() || !dw.b.mn_major() || !dx.a.k_major() || !dx.b.mn_major()) return best;
  const SmallWork works[2] = {small_work(dw), small_work(dx)};
  if (works[0].tiles + works[1].tiles > 1 << 24) return best;
  const double grad = static_cast<double>(dx.M) * dx.K * bytes_of(dx.type);
  const double bytes = bytes_moved(dw) + bytes_moved(dx);
  const double gaps = dx.type == Type::f32 ? 6 : 0;  // between launches: as much as 7 were measured
  best.microseconds = wanted.kernel ? HUGE_VAL : apart + gaps;
  for (const bool pass : {false, true}) {  // act' as dY is read, or in a pass before
    if (pass && (activation == 0 || wanted.kernel)) continue;
    const double before = pass ? kLaunch + 3 * grad / kBandwidth : 0;
    const SmallCosts cost = small_costs(dx, pass ? 0 : activation);
    for (int cluster = 1; cluster <= 8; cluster *= 2) {
      if (wanted.config > 0 && cluster != wanted.config) continue;
      for (int which = 0; which < (cluster == 1 ? 1 : 3); ++which) {  // both shared, or one
        const int slices[2] = {which == 1 ? 1 : cluster, which == 2 ? 1 : cluster};
        const double time = before + small_time(works, slices, 2, cost, dx.processors, bytes);
        if (time >= best.microseconds) continue;
        best = {true, pass, slices[0], slices[1], time};
      }
    }
  }
  return best;
}

ThroughChoice choose_through(const Query& product, int activation, bool sums, const char* forced) {
  const Forced wanted = parse(forced);
  ThroughChoice best;
  if (activation == 0 || (wanted.kernel && *wanted.kernel != Kernel::wgmma) || wanted.spread > 0) return best;
  Query q = product;
  q.through = activation;
  // a along K and b along its rows, as they lie, and results in whole 16 bytes
  if (!q.a.k_major() || !q.b.mn_major() || q.N % 8 != 0) return best;
  const Candidate c = by_tiles(q, Kernel::wgmma, wanted);
  if (c.why_not || c.choice.pack_a || c.choice.pack_b) return best;
  const double parts = static_cast<double>(divided_up(q.M, 128)) * 4 * q.N * 4;  // bytes
  best.config = c.choice.config;
  best.microseconds = c.choice.microseconds + (sums ? kLaunch + 1 + parts / kBandwidth : 0);
  const double pass = kLaunch + 3.0 * q.M * q.N * bytes_of(q.type) / kBandwidth;
  best.better = wanted.kernel || best.microseconds < choose(product, forced, nullptr).microseconds + pass;
  return best;
}

}  // namespace zoo
