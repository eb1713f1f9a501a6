// A digest of weights that does not depend on their order: for each group of elements, the sum
// modulo 2^64 of a mix of every element's float32 bits.
//
// Fusing, sharding and zero-padding tensors do not change the total digest, so both sides of a
// weight sync can compare their weights without knowing each other's layout. MixBits is a bijection
// of 32 bits with MixBits(0) = 0, taken as a signed number: one changed element changes the sum by
// more than 0 and less than 2^32, so it is always detected; several changes cancel with probability
// 2^-32 or less. Elements that move within a group are not detected.
#pragma once

#include <cstdint>

#include "portable.h"

namespace mrl {

enum class WeightType { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

struct WeightDigestInput {
  const void* weights;  // [num_groups, group_size], of `type`
  WeightType type;
  int64_t num_groups;
  int64_t group_size;
};

// The finalizer of MurmurHash3 (Appleby, public domain).
MRL_FN uint32_t MixBits(uint32_t x) {
  x ^= x >> 16;
  x *= 0x85ebca6bu;
  x ^= x >> 13;
  x *= 0xc2b2ae35u;
  return x ^ (x >> 16);
}

// sums: [num_groups]. They are exact, so they do not depend on the number of threads.
void WeightDigestCpu(const WeightDigestInput& in, int num_threads, uint64_t* sums);

}  // namespace mrl
