// The tokens that a CTA works on, and the device-side check of packed sequences.
#pragma once

#include <cstdint>

#include "cuda/launch.h"

namespace mrl {

// An assertion, because reporting an error would make the host wait.
__device__ inline void RequireSequence(const int32_t* cu_seqlens, int64_t index,
                                       int64_t num_sequences, int64_t num_tokens) {
  const int32_t start = cu_seqlens[index], end = cu_seqlens[index + 1];
  MRL_REQUIRE(start >= 0 && start <= end && end <= num_tokens,
              "cu_seqlens must go from 0 to N, never decreasing");
  MRL_REQUIRE(index > 0 || start == 0, "cu_seqlens must start at 0");
  MRL_REQUIRE(index + 1 < num_sequences || end == num_tokens, "cu_seqlens must end at N");
}

// A block of up to `size` tokens of one sequence, aligned to the sequence's start.
struct TokenBlock {
  int64_t sequence;
  int64_t start;  // token
  int size;       // 0 for blocks that are not needed
};

// Sequence i has the blocks from cu_seqlens[i] / size + i on. There are always enough of them, and
// the host need not know the lengths.
__host__ __device__ inline int64_t NumBlocks(int64_t num_tokens, int64_t num_sequences, int size) {
  const int64_t blocks = num_tokens / size + num_sequences;
  return blocks > 0 ? blocks : 1;
}

__device__ inline int64_t FirstBlock(const int32_t* cu_seqlens, int64_t sequence, int size) {
  return cu_seqlens[sequence] / size + sequence;
}

__device__ inline TokenBlock FindBlock(const int32_t* cu_seqlens, int64_t num_sequences,
                                       int64_t num_tokens, int size, int64_t block) {
  if (num_sequences == 0) return {0, 0, 0};
  int64_t low = 0, high = num_sequences - 1;
  while (low < high) {  // the last sequence whose first block is not after this one
    const int64_t middle = (low + high + 1) / 2;
    if (FirstBlock(cu_seqlens, middle, size) <= block) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  RequireSequence(cu_seqlens, low, num_sequences, num_tokens);
  const int64_t start = cu_seqlens[low] + (block - FirstBlock(cu_seqlens, low, size)) * size;
  const int64_t left = cu_seqlens[low + 1] - start;
  return {low, start, static_cast<int>(left < 0 ? 0 : left < size ? left : size)};
}

}  // namespace mrl
