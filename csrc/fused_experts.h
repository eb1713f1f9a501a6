// The experts of an MoE layer for a batch of tokens: two projections with a gated activation
// between them, and the sum of a token's experts by their weights.
//
// T tokens, k experts of each, E experts of this rank, H hidden size, I size of an expert.
//
// Products and sums are fp32. The sums of a token have one order: those of a projection that of
// cpu/dot_rows.h, and a token's experts that of its route. So the bits of a token depend neither on
// the other tokens nor on the number of threads.
#pragma once

#include <cstdint>

#include "elements.h"

namespace mrl {

struct FusedExpertsInput {
  FloatType type;         // of x, w13, w2 and the output
  const void* x;          // [T, H]
  const void* w13;        // [E, 2 I, H]: gate and up, one after the other or interleaved
  const void* w2;         // [E, H, I]
  const float* w13_bias;  // [E, 2 I], may be null
  const float* w2_bias;   // [E, H], may be null
  const int64_t* ids;     // [T, k], -1 for no expert
  const float* weights;   // [T, k]
  int64_t num_tokens, top_k, num_experts, hidden_size, expert_size;
  // The activation is gate sigmoid(alpha gate) (up + up_shift), with gate at most `limit` and up
  // within [-limit, limit]; a negative limit means none.
  bool interleaved;
  float alpha, limit, up_shift;
};

// out: [T, H]; 0 for a token without experts. H and I are multiples of 8. Throws
// std::invalid_argument for an id out of range.
void FusedExpertsCpu(const FusedExpertsInput& in, int num_threads, void* out);

}  // namespace mrl
