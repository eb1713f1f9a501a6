// RMSNorm and rotary position embeddings of an inference batch.
//
// All arithmetic is fp32. The squares of a row are summed in the order of cpu/simd.h, so the bits
// of a row depend neither on the other rows nor on the number of threads.
#pragma once

#include <cstdint>

#include "elements.h"

namespace mrl {

// Row (t, h) of x has `size` elements and begins at t * stride + h * size.
struct RmsNormInput {
  FloatType type;        // of all tensors
  const void* x;         // [T, h, size]
  const void* residual;  // [T, h, size], contiguous; may be null
  const void* weight;    // [size]
  int64_t num_tokens, num_heads, size, stride;
  float eps;
};

// out: [T, h, size], x / sqrt(mean(x^2) + eps) * weight of the sum of x and the residual. `sum`
// [T, h, size] becomes that sum; it is null if there is no residual. Both are contiguous.
void RmsNormCpu(const RmsNormInput& in, int num_threads, void* out, void* sum);

// Row (t, h) of a tensor has `size` elements and begins at t * stride + h * size.
struct RotatedTensor {
  const void* x;  // [T, h, size]
  int64_t num_heads, stride;
  void* out;  // [T, h, size], contiguous
};

struct RotateInput {
  FloatType type;            // of queries and keys
  RotatedTensor query, key;  // with the same number of tokens and the same head size
  const int64_t* positions;  // [T]
  const float* cos_sin;      // [P, R]: R / 2 cosines, then R / 2 sines
  int64_t num_tokens, num_positions, size, rotary_size;
  // Whether element i is rotated with element i + R / 2. Otherwise elements 2 i and 2 i + 1 are.
  bool halves;
};

// Rotates the first R elements of each row and copies the others. Throws std::invalid_argument for
// a position outside of [0, P).
void RotateCpu(const RotateInput& in, int num_threads);

}  // namespace mrl
