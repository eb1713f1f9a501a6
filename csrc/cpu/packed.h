// Packed sequences: their check, and from which size threads pay off.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "order_free_sum.h"

namespace mrl {

inline bool UseThreads(int num_threads, int64_t num_tokens) {
  return num_threads > 1 && num_tokens >= 16384;
}

// Throws std::invalid_argument unless cu_seqlens goes from 0 to num_tokens without decreasing.
inline void CheckSequences(const int32_t* cu_seqlens, int64_t num_sequences, int64_t num_tokens) {
  if (cu_seqlens[0] != 0) {
    throw std::invalid_argument("cu_seqlens: got cu_seqlens[0] = " + std::to_string(cu_seqlens[0]) +
                                ", expected 0");
  }
  for (int64_t i = 0; i < num_sequences; ++i) {
    if (cu_seqlens[i + 1] < cu_seqlens[i]) {
      throw std::invalid_argument("cu_seqlens: got " + std::to_string(cu_seqlens[i + 1]) +
                                  " after " + std::to_string(cu_seqlens[i]) + " at index " +
                                  std::to_string(i + 1) + ", expected values that never decrease");
    }
  }
  if (cu_seqlens[num_sequences] != num_tokens) {
    throw std::invalid_argument(
        "cu_seqlens: got cu_seqlens[-1] = " + std::to_string(cu_seqlens[num_sequences]) +
        ", expected the number of tokens, " + std::to_string(num_tokens));
  }
}

}  // namespace mrl
