// The factors of a whole sequence that the loss needs before its tokens, and the final statistics
// from the sums over its tokens. In fp64, the same code for CPU and CUDA.
#pragma once

#include <cmath>
#include <cstdint>

#include "policy_loss.h"
#include "portable.h"
#include "scalar.h"

namespace mrl {

// min(rA, clip(r)A) clips from above only for A > 0, and from below only for A < 0, for which a
// dual clip also sets an upper bound. CISPO's range is [lower_negative, upper_positive] for every
// A.
struct RatioBounds {
  float upper_positive, lower_negative, upper_negative;
  float tau_positive, tau_negative;
};

MRL_FN RatioBounds MakeBounds(const PolicyLossOptions& o) {
  const float inf = INFINITY;
  RatioBounds bounds{inf, -inf, inf, static_cast<float>(o.tau_positive),
                     static_cast<float>(o.tau_negative)};
  if (o.clip == Clip::kPpo || o.clip == Clip::kCispo) {
    bounds.upper_positive = static_cast<float>(1.0 + o.clip_high);
    bounds.lower_negative = static_cast<float>(1.0 - o.clip_low);
  }
  if (o.clip == Clip::kPpo) bounds.upper_negative = static_cast<float>(o.dual_clip);
  return bounds;
}

namespace scalar {
#include "policy_terms.h"
}  // namespace scalar

// Sums over loss tokens, in fp32 within a block and fp64 beyond. The two maxima are the last
// fields.
template <class Real>
struct PolicySums {
  Real value = 0;  // w f
  Real k1 = 0, k3 = 0, kl = 0;
  Real ratio = 0;
  Real weight = 0, weight_square = 0;
  Real mismatch = 0;
  Real count = 0, over = 0, under = 0, truncated = 0;
  Real ratio_max = 0, mismatch_max = 0;
};

MRL_FN double LargerOrNan(double a, double b) { return b > a || b != b ? b : a; }

template <class From>
MRL_FN void Add(PolicySums<double>& to, const PolicySums<From>& from) {
  to.value += from.value;
  to.k1 += from.k1;
  to.k3 += from.k3;
  to.kl += from.kl;
  to.ratio += from.ratio;
  to.weight += from.weight;
  to.weight_square += from.weight_square;
  to.mismatch += from.mismatch;
  to.count += from.count;
  to.over += from.over;
  to.under += from.under;
  to.truncated += from.truncated;
  to.ratio_max = LargerOrNan(to.ratio_max, from.ratio_max);
  to.mismatch_max = LargerOrNan(to.mismatch_max, from.mismatch_max);
}

// f / A at one ratio, its derivative by logp, and whether it clips; all depend only on the sign of
// A.
struct SequenceObjective {
  float value = 0, slope = 0;
  bool over = false, under = false;
};

// Factors that all tokens of a sequence share.
struct SequenceFactors {
  double num_loss_tokens = 0;  // |y_i| over all context-parallel ranks; for sequence level only
  double ratio = 1;            // Ratio::kSequence
  double weight = 1;           // Level::kSequence
  bool truncated = false;      // whether the weight was outside its range
  SequenceObjective good, zero, bad;  // Ratio::kSequence: by the sign of A
  double unit = 0;                    // seq_weight, or seq_weight / |y_i| under Ratio::kSequence
};

// Compares in fp64, because GSPO's whole range is 7e-4 wide. `sign` is the sign of A.
MRL_FN SequenceObjective ObjectiveOfSequence(const PolicyLossOptions& o, const RatioBounds& b,
                                             double ratio, int sign) {
  const float r = static_cast<float>(ratio);
  if (o.clip == Clip::kSapo) {
    const auto f = scalar::SapoObjective(r, static_cast<float>(sign), b);
    return {sign * f.value, sign * f.slope, false, false};
  }
  const bool cispo = o.clip == Clip::kCispo, ppo = o.clip == Clip::kPpo;
  const double high = sign < 0 && ppo ? o.dual_clip : 1.0 + o.clip_high;
  SequenceObjective f{r, r, false, false};
  f.over = ratio > high && (cispo || (ppo && sign != 0));
  f.under = ratio < 1.0 - o.clip_low && (cispo || (ppo && sign < 0));
  if (f.over) f.value = sign < 0 && ppo ? b.upper_negative : b.upper_positive;
  if (f.under) f.value = b.lower_negative;
  f.slope = ppo && (f.over || f.under) ? 0.0f : f.value;
  return f;
}

// logratio, importance: (sum, count) over the sequence's loss tokens; read only if needed.
MRL_FN SequenceFactors MakeFactors(const PolicyLossOptions& o, const RatioBounds& bounds,
                                   float seq_weight, const double* logratio,
                                   const double* importance) {
  SequenceFactors f;
  f.unit = seq_weight;
  if (o.ratio == Ratio::kSequence) {
    f.num_loss_tokens = logratio[1];
    f.unit = 0;
    if (f.num_loss_tokens > 0) {
      f.ratio = exp(logratio[0] / f.num_loss_tokens);
      f.unit = static_cast<double>(seq_weight) / f.num_loss_tokens;
      f.good = ObjectiveOfSequence(o, bounds, f.ratio, 1);
      f.zero = ObjectiveOfSequence(o, bounds, f.ratio, 0);
      f.bad = ObjectiveOfSequence(o, bounds, f.ratio, -1);
    }
  }
  if (o.importance != Importance::kNone && o.importance_level == Level::kSequence) {
    f.num_loss_tokens = importance[1];
    if (f.num_loss_tokens > 0) {
      const double raw = exp(importance[0] / f.num_loss_tokens);
      f.truncated = raw > o.importance_high || raw < o.importance_low;
      f.weight = scalar::ApplyRange(o.importance, raw, o.importance_low, o.importance_high);
    }
  }
  return f;
}

// Writes one row of seq_stats from the sums of a sequence.
MRL_FN void FinishSequence(const PolicyLossOptions& o, const SequenceFactors& f,
                           const PolicySums<double>& sums, double* row) {
  for (int i = 0; i < kNumPolicyStats; ++i) row[i] = 0;
  if (sums.count == 0) return;
  const bool sequence_ratio = o.ratio == Ratio::kSequence;
  const bool weighted = o.importance != Importance::kNone;
  const bool sequence_weight = weighted && o.importance_level == Level::kSequence;
  // Exactly 1 for a sequence that is whole on this rank.
  const double share =
      sequence_ratio || sequence_weight ? sums.count / f.num_loss_tokens : sums.count;
  if (f.unit != 0) {  // because 0 * inf would be NaN
    row[kKlLoss] = o.kl == Kl::kNone ? 0.0 : f.unit * o.kl_coef * sums.kl;
    row[kLoss] = -f.unit * sums.value + row[kKlLoss];
  }
  row[kNumTokens] = sums.count;
  row[kRatioSum] = sequence_ratio ? f.ratio * share : sums.ratio;
  row[kRatioCount] = sequence_ratio ? share : sums.count;
  row[kRatioMax] = sequence_ratio ? f.ratio : sums.ratio_max;
  const double per_ratio = sequence_ratio ? f.num_loss_tokens : 1.0;
  row[kClipHighCount] = sums.over / per_ratio;
  row[kClipLowCount] = sums.under / per_ratio;
  row[kK1Sum] = sums.k1;
  row[kK3Sum] = sums.k3;
  row[kRefKlSum] = sums.kl;
  if (weighted) {
    row[kWeightSum] = sequence_weight ? f.weight * share : sums.weight;
    row[kWeightSquareSum] = sequence_weight ? f.weight * f.weight * share : sums.weight_square;
    row[kWeightCount] = sequence_weight ? share : sums.count;
    row[kTruncatedCount] = sequence_weight ? (f.truncated ? share : 0.0) : sums.truncated;
  }
  row[kMismatchAbsSum] = sums.mismatch;
  row[kMismatchAbsMax] = sums.mismatch_max;
}

}  // namespace mrl
