// Policy-gradient loss over packed sequences, with its gradient and statistics, in one pass.
//
// N packed tokens, B sequences; sequence i is tokens [cu_seqlens[i], cu_seqlens[i + 1]), y_i its
// loss tokens. The formulas are in mrl/kernels/policy_loss.py.
//
// Numerics: fp32 elements; fp32 sums over blocks of a constant size that start at the sequence's
// first token; fp64 across blocks and sequences. So a sequence's gradient and statistics do not
// depend on threads, on the grid or on other packed sequences. Masked tokens are excluded by
// selection: even if they are NaN, their gradient is 0 and they affect nothing else.
#pragma once

#include <cstdint>

namespace mrl {

constexpr int kPolicyBlock = 1024;  // tokens per fp32 partial sum, independent of N and B

enum class Ratio : int { kToken, kSequence };
enum class Clip : int { kNone, kPpo, kCispo, kSapo };
enum class Importance : int { kNone, kTis, kMis };
enum class Level : int { kToken, kSequence };
enum class Kl : int { kNone, kK1, kK2, kK3, kK1Plus, kK3Plus };

struct PolicyLossOptions {
  Ratio ratio;
  Clip clip;
  double clip_low, clip_high;         // the ratio's range is [1 - clip_low, 1 + clip_high]
  double dual_clip;                   // PPO, A < 0: largest ratio, or inf
  double tau_positive, tau_negative;  // SAPO
  bool token_advantages;              // one A per token, else one per sequence
  Importance importance;
  Level importance_level;
  double importance_low, importance_high;
  Kl kl;
  double kl_coef;
};

struct PolicyLossInput {
  PolicyLossOptions options;
  const float* logprobs;          // [N]
  const float* old_logprobs;      // [N]
  const uint8_t* loss_mask;       // [N], non-zero for loss tokens
  const int32_t* cu_seqlens;      // [B + 1]
  const float* advantages;        // [B], or [N] with token_advantages
  const float* seq_weight;        // [B], includes the whole normaliser
  const float* rollout_logprobs;  // [N] or null
  const float* ref_logprobs;      // [N] or null
  const double* seq_logratio;     // [B, 2] or null; summed over context-parallel ranks
  const double* seq_importance;   // [B, 2] or null; the same for old - rollout
  int64_t num_tokens, num_sequences;
};

// Sums over a sequence's loss tokens on this rank. Under Ratio::kSequence, `ratio_*` and `clip_*`
// are divided by |y_i|, so that a whole sequence counts as 1; likewise `weight_*` and
// `truncated_count` under Level::kSequence.
enum PolicyStat : int {
  kLoss,
  kKlLoss,  // the part of kLoss that is the KL penalty
  kNumTokens,
  kRatioSum,
  kRatioCount,
  kRatioMax,       // 0 without loss tokens
  kClipHighCount,  // ratios above their bound
  kClipLowCount,   // ratios below their bound
  kK1Sum,          // old - logp: estimates KL(old || current)
  kK3Sum,          // exp(d) - 1 - d with d = logp - old: estimates the same
  kRefKlSum,       // the chosen estimator of KL(current || ref)
  kWeightSum,      // importance weights as applied
  kWeightSquareSum,
  kWeightCount,
  kTruncatedCount,  // importance weights outside their range
  kMismatchAbsSum,  // |old - rollout|
  kMismatchAbsMax,  // 0 without loss tokens
  kNumPolicyStats,
};

constexpr const char* kPolicyStatNames[kNumPolicyStats] = {"loss",
                                                           "kl_loss",
                                                           "num_tokens",
                                                           "ratio_sum",
                                                           "ratio_count",
                                                           "ratio_max",
                                                           "clip_high_count",
                                                           "clip_low_count",
                                                           "k1_sum",
                                                           "k3_sum",
                                                           "ref_kl_sum",
                                                           "weight_sum",
                                                           "weight_sq_sum",
                                                           "weight_count",
                                                           "truncated_count",
                                                           "mismatch_abs_sum",
                                                           "mismatch_abs_max"};

struct PolicyLossOutput {
  float* grad;        // [N]: d loss / d logprobs
  double* loss;       // []
  double* stats;      // [kNumPolicyStats]: over all sequences
  double* seq_stats;  // [B, kNumPolicyStats]
};

// Throws std::invalid_argument if cu_seqlens does not partition [0, N).
void PolicyLossCpu(const PolicyLossInput& in, const PolicyLossOutput& out, int num_threads);

// Launches two kernels and does not wait. `workspace` has PolicyLossWorkspaceBytes(N, B) bytes.
void PolicyLossCuda(const PolicyLossInput& in, const PolicyLossOutput& out, void* workspace,
                    uintptr_t stream);
int64_t PolicyLossWorkspaceBytes(int64_t num_tokens, int64_t num_sequences);

// sums f64[B, 2]: (sum over loss tokens of a - b, number of loss tokens) of each sequence.
struct SeqLogratioInput {
  const float* a;             // [N]
  const float* b;             // [N]
  const uint8_t* loss_mask;   // [N]
  const int32_t* cu_seqlens;  // [B + 1]
  int64_t num_tokens, num_sequences;
};

void SeqLogratioCpu(const SeqLogratioInput& in, double* sums, int num_threads);
void SeqLogratioCuda(const SeqLogratioInput& in, double* sums, void* workspace, uintptr_t stream);

}  // namespace mrl
