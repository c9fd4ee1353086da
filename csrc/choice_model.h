// What csrc/choice.cpp and csrc/choice_backward.cpp share: the model of how long a kernel takes.
#pragma once

#include "choice.h"

namespace zoo::model {

constexpr double kLaunch = 2.5;       // microseconds of a kernel that does nothing
constexpr double kBandwidth = 3.3e6;  // bytes a microsecond, of passes that read and write
constexpr double kReading = 4.2e6;    // of passes that only read

inline int64_t divided_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

inline int bytes_of(Type type) {
  return type == Type::f64 ? 8 : type == Type::f32 ? 4 : 2;
}

// "wgmma", or with the tile shape's number and whether tiles are spread, "wgmma:2" and "wgmma:2:1".
struct Forced {
  const Kernel* kernel = nullptr;
  int config = -1, spread = -1;
};
Forced parse(const char* text);

struct Candidate {
  Choice choice;
  const char* why_not = nullptr;  // it cannot
};
Candidate by_tiles(const Query& q, Kernel kernel, const Forced& forced);

// Why no kernel of Hopper's own takes it, or null.
const char* hopper_refuses(const Query& q);

double bytes_moved(const Query& q);

// 64 x 64 tiles and 64 steps of K in one launch of `small`.
struct SmallWork {
  double tiles, steps;  // `steps` of K a tile
};
SmallWork small_work(const Query& q);

// Microseconds of `small`, as measured: a step of a block that has a processor to itself, and of each where many share all; what
// a tile costs besides its steps; how much of the longest block shows where many share all.
struct SmallCosts {
  double alone, among, begin, tail, base, crowd;
};
SmallCosts small_costs(const Query& q, int through);

// `works` with their slices beside each other.
double small_time(
    const SmallWork* works, const int* slices, int count, const SmallCosts& cost, int processors, double bytes);

}  // namespace zoo::model
