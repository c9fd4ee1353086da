// The choices of a backward pass: what is one launch, and what is done in a product's epilogue.
#include "choice_model.h"

#include <algorithm>
#include <cmath>

namespace zoo {

using namespace model;

bool turned_is_better(const Query& turned, const Choice& turned_choice, const Choice& dw_choice) {
  return turned_choice.raw_a && turned.a.mn_major() && turned_choice.microseconds < dw_choice.microseconds;
}

Together choose_together(
    const Query& dw, const Query& dx, int activation, bool bias, double apart, const char* forced) {
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
  const bool planes = dx.type == Type::f32 && dx.a_in_planes && dx.precision == Precision::highest;
  const double moved = (activation != 0 ? 2 : 1) + (planes ? 1.5 : activation != 0 ? 1 : 0);  // times dY's bytes
  const double pass_apart = activation != 0 || bias || planes ? kLaunch + moved * grad / kBandwidth : 0;
  const double gaps = dx.type == Type::f32 ? 6 : 0;  // between launches: as much as 7 were measured
  best.microseconds = wanted.kernel ? HUGE_VAL : apart + pass_apart + gaps;
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
