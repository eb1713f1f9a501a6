// Clipped policy-gradient loss over packed sequences, with its gradient, in one pass on the CPU.
//
// N packed tokens, B sequences; sequence i is tokens [cu_seqlens[i], cu_seqlens[i + 1]).
#pragma once

#include <cstdint>

namespace mrl {

enum class Ratio : int {
  kToken = 0,     // r_t = exp(logp_t - old_t): PPO, GRPO
  kSequence = 1,  // s = exp(mean_t(logp_t - old_t)): GSPO, arXiv 2507.18071 eq. 7
};

struct PolicyLossInput {
  const float* logprobs;      // [N]
  const float* old_logprobs;  // [N]
  const uint8_t* loss_mask;   // [N], non-zero on tokens that count
  const int32_t* cu_seqlens;  // [B + 1]
  const float* advantages;    // [B]
  const float* seq_weight;    // [B], carries the whole normaliser
  int64_t num_tokens;         // N
  int64_t num_sequences;      // B
  Ratio ratio;
  double clip_low;   // the ratio is clipped below at 1 - clip_low
  double clip_high;  // and above at 1 + clip_high
};

struct PolicyLossStats {
  double ratio_sum = 0;
  double ratio_count = 0;  // sequences under kSequence, tokens under kToken
  double ratio_max = 0;    // 0 where nothing counts: a ratio is never negative
  double clip_count = 0;   // ratios whose clipped branch was taken: no gradient
};

// Returns the loss, summed over sequences, and writes d loss / d logprobs to grad f32[N].
//
// Numerics: fp32 elements; fp32 sums over blocks of a constant size that start at the sequence's
// own first token; fp64 across blocks and sequences. The sum over sequences does not see their
// order. So neither the threads nor the packing change a bit. Masked tokens are selected away:
// whatever stands there, NaN included, their gradient is 0 and they touch nothing else.
//
// Throws std::invalid_argument when cu_seqlens does not partition [0, N).
double PolicyLoss(const PolicyLossInput& in, int num_threads, float* grad, PolicyLossStats* stats);

}  // namespace mrl
