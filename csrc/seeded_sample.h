// SGLang's seeded sampler: the first maximum of log-prob + Gumbel noise, where the noise of a token
// is a hash of (seed, position, token id).
//
// B rows, V vocabulary. What is maximised over the tokens of a row is, in fp64,
//     s = log p - log E,    E = -log u clamped to [2^-32, 1.8e308],    u = hash / (2^32 - 1).
//
// The result must be SGLang's to the bit, and SGLang takes these logarithms from torch, whose last
// bits depend on its build. So no bit of a logarithm is trusted here: each s is known up to a
// margin that covers whatever a logarithm within a few units in the last place may give, and a row
// whose best token is not ahead of all others by both margins is left open for torch to decide.
#pragma once

#include <cstdint>

namespace mrl {

enum class SampleScores : int { kProbs = 0, kLogProbs = 1, kLogProbs64 = 2 };

struct SeededSampleInput {
  const void* scores;        // [B, V]: f32 probabilities, f32 or f64 log-probs
  const int64_t* seeds;      // [B]
  const int64_t* positions;  // [B], of which the low 32 bits count
  int64_t num_rows;          // B
  int64_t num_columns;       // V, at least 1
  SampleScores kind;
};

// Writes ids [B], or -1 for a row that is left open: one with a tie or nearly so, a NaN or an
// infinity, or a best s outside of (-60, 60), which normalised rows do not have. The result of a
// row depends on that row alone.
void SeededSampleCpu(const SeededSampleInput& in, int num_threads, int64_t* ids);

}  // namespace mrl
