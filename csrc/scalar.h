// exp_terms.h for one float, with the operations that its templates need: the scalar counterpart of
// cpu/simd.h. It has its own namespace, so that argument-dependent lookup from there does not find
// it.
#pragma once

#include <cstdint>
#include <cstring>

#include "portable.h"

namespace mrl::scalar {

MRL_FN float Select(bool condition, float a, float b) { return condition ? a : b; }
MRL_FN double Select(bool condition, double a, double b) { return condition ? a : b; }

MRL_FN int32_t AsInts(float x) {
  int32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

MRL_FN float AsFloats(int32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

MRL_FN float AtLeast(float bound, float x) { return x < bound ? bound : x; }
MRL_FN float AtMost(float bound, float x) { return x > bound ? bound : x; }
MRL_FN double AtLeast(double bound, double x) { return x < bound ? bound : x; }
MRL_FN double AtMost(double bound, double x) { return x > bound ? bound : x; }

MRL_FN bool AllSmaller(float x, float bound) { return x < bound && x > -bound; }

// x 2^n for an integer n in [-150, 128], as two factors, because one power of two could overflow.
MRL_FN float TimesPowerOfTwo(float x, float n) {
  const int32_t k = static_cast<int32_t>(n == n ? n : 0.0f), half = k >> 1;
  return x * AsFloats((half + 127) << 23) * AsFloats((k - half + 127) << 23);
}

#include "exp_terms.h"

}  // namespace mrl::scalar
