// A sum of doubles whose bits do not depend on the order of summation.
#pragma once

#include <cmath>
#include <cstdint>

#include "portable.h"

namespace mrl {

// (boundary + x) - boundary rounds x to a multiple of a fixed unit, and such multiples are summed
// exactly in any order. Two rounds of this are accurate to double precision (Demmel and Nguyen,
// "Fast reproducible floating-point summation", 2013). `largest` is the largest |x| of `count`.
MRL_FN double FirstBoundary(double largest, int64_t count) {
  int exponent;
  frexp(largest * static_cast<double>(count), &exponent);
  return ldexp(3.0, exponent);  // 1.5 * 2^(exponent + 1), which has the same unit on both sides
}

MRL_FN double NextBoundary(double boundary, int64_t count) {
  // The remainders are below the unit of the previous round, 2^-51 of its boundary's power of two.
  int exponent;
  frexp(static_cast<double>(count), &exponent);
  return ldexp(boundary, exponent - 50);
}

MRL_FN double RoundTo(double boundary, double x) { return (boundary + x) - boundary; }

// For larger values, inf and NaN the sum is plain, because the boundary would overflow.
constexpr double kLargestOrderFree = 1e280;

// Sums `count` values at distance `stride`.
inline double OrderFreeSum(const double* values, int64_t count, int64_t stride) {
  double largest = 0, plain = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double x = values[i * stride];
    largest = std::fabs(x) > largest ? std::fabs(x) : largest;
    plain += x;
  }
  if (!(largest > 0) || !(largest < kLargestOrderFree) || plain != plain) return plain;
  const double first = FirstBoundary(largest, count);
  const double second = NextBoundary(first, count);
  double coarse = 0, fine = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double x = values[i * stride];
    const double rounded = RoundTo(first, x);
    coarse += rounded;
    fine += RoundTo(second, x - rounded);
  }
  return coarse + fine;
}

}  // namespace mrl
