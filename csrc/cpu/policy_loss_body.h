// Processes one block of a sequence's tokens in short loops: importance weights, KL penalty,
// objective and, if it needs a factor of the whole sequence, the gradient later. Each loop keeps
// its sums in registers, and intermediate values stay in the caches. Inputs are prefetched one
// block ahead, because the hardware prefetcher stops at every page of every stream.
//
// No include guard: compiled once for each instruction set, see cpu/for_each_target.h.

#include "exp_terms.h"
#include "policy_terms.h"

// BlockSums per lane. Counts are negative, because a true mask is -1.
struct LaneSums {
  Floats value = 0.0f, bad_value = 0.0f, k1 = 0.0f, k3 = 0.0f, kl = 0.0f, ratio = 0.0f;
  Floats weight = 0.0f, weight_square = 0.0f, drift = 0.0f, mismatch = 0.0f;
  Ints count = 0, good = 0, bad = 0, over = 0, under = 0, truncated = 0;
  Ints ratio_max = 0, mismatch_max = 0;  // bits
  MRL_FN LaneSums() {}                   // the implicit one would be compiled for the baseline
};

template <class T>
MRL_FN void FetchAhead(const T* at) {
  __builtin_prefetch(at + kPolicyBlock, 0, 2);
}

template <bool kWeights>
MRL_FN void WeighTokens(const PolicyBlock& block, const PolicyLossOptions& o, LaneSums& total) {
  Floats sum = 0.0f, square = 0.0f, drift = 0.0f, mismatch = 0.0f;
  Ints truncated = 0, mismatch_max = 0;
  const Floats low(static_cast<float>(o.importance_low));
  const Floats high(static_cast<float>(o.importance_high));
  for (int t = 0; t < block.size; t += kLanes) {
    FetchAhead(block.rollout_logprobs + t);
    FetchAhead(block.mask + t);
    if (!AnyByte(block.mask + t)) continue;
    const Ints keep = LoadMask(block.mask + t);
    const Floats gap =
        Select(keep, Load(block.old_logprobs + t) - Load(block.rollout_logprobs + t), 0.0f);
    const Floats size = Magnitude(gap);
    drift = drift + gap;
    mismatch = mismatch + size;
    mismatch_max = LargerBits(mismatch_max, AsInts(size));
    if constexpr (kWeights) {
      const Floats raw = Exp(gap).exp;
      const Floats weight = Select(keep, ApplyRange(o.importance, raw, low, high), 0.0f);
      truncated = truncated + ((AtMost(high, AtLeast(low, raw)) != raw) & keep);
      sum = sum + weight;
      square = square + weight * weight;
      Store(block.parts + t, weight);
    }
  }
  total.weight = sum, total.weight_square = square, total.truncated = truncated;
  total.drift = drift, total.mismatch = mismatch, total.mismatch_max = mismatch_max;
}

template <Kl kKind>
MRL_FN void PenalizeTokens(const PolicyBlock& block, LaneSums& total) {
  Floats sum = 0.0f;
  const Floats scale(block.kl_scale);
  for (int t = 0; t < block.size; t += kLanes) {
    FetchAhead(block.ref_logprobs + t);
    if (!AnyByte(block.mask + t)) continue;
    const Ints keep = LoadMask(block.mask + t);
    const Floats gap = Select(keep, Load(block.ref_logprobs + t) - Load(block.logprobs + t), 0.0f);
    const KlTerm<Floats> term = KlPenalty(kKind, gap);  // 0 at 0, so masked tokens add nothing
    sum = sum + term.value;
    Store(block.grad + t, scale * term.slope);
  }
  total.kl = sum;
}

enum class Form { kBounded, kCispo, kSapo };

template <Form kForm>
MRL_FN Objective<Floats> ObjectiveOf(const RatioBounds& bounds, const Floats& r, const Floats& a,
                                     const Floats& logp) {
  if constexpr (kForm == Form::kCispo) return CispoObjective(r, a, logp, bounds);
  if constexpr (kForm == Form::kSapo) return SapoObjective(r, a, bounds);
  return BoundedObjective(r, a, bounds);
}

// Ratio::kToken: computes the gradient or, with a sequence weight, the gradient without that
// weight.
template <Form kForm, bool kTokenWeight>
MRL_FN void ScoreTokens(const PolicyBlock& block, LaneSums& total) {
  Floats value = 0.0f, k1 = 0.0f, k3 = 0.0f, ratio = 0.0f;
  Ints count = 0, over = 0, under = 0, ratio_max = 0;
  const Floats zero(0.0f), scale(block.policy_scale);
  for (int t = 0; t < block.size; t += kLanes) {
    FetchAhead(block.logprobs + t);
    FetchAhead(block.old_logprobs + t);
    __builtin_prefetch(block.grad + t + kPolicyBlock, 1, 2);
    if (!AnyByte(block.mask + t)) {
      Store(block.grad + t, zero);
      continue;
    }
    const Ints keep = LoadMask(block.mask + t);
    const Floats logp = Load(block.logprobs + t);
    const Floats gap = Select(keep, logp - Load(block.old_logprobs + t), zero);
    const ExpTerms<Floats> terms = Exp(gap);
    const Floats a = block.advantages ? Load(block.advantages + t) : Floats(block.advantage);
    const Floats w = kTokenWeight ? Load(block.parts + t) : Floats(1.0f);
    const Objective<Floats> f = ObjectiveOf<kForm>(*block.bounds, terms.exp, a, logp);
    // Tokens with a factor 0 are excluded, because 0 * inf would be NaN.
    const Ints counts = keep & (a != zero) & (w != zero);
    value = value + Select(counts, f.value * w, zero);
    if (block.needs_sequence) {
      Store(block.parts + t, Select(counts, f.slope * w, zero));
    } else {
      Floats grad = Select(counts & Ints(-block.has_unit), (f.slope * scale) * w, zero);
      if (block.ref_logprobs) grad = grad + Select(keep, Load(block.grad + t), zero);
      Store(block.grad + t, grad);
    }
    const Floats r = Select(keep, terms.exp, zero);
    k1 = k1 - gap;
    k3 = k3 + terms.k3;
    ratio = ratio + r;
    count = count + keep;
    over = over + (f.over & keep);
    under = under + (f.under & keep);
    ratio_max = LargerBits(ratio_max, AsInts(Magnitude(r)));
  }
  total.value = value, total.k1 = k1, total.k3 = k3, total.count = count;
  total.ratio = ratio, total.ratio_max = ratio_max, total.over = over, total.under = under;
}

// Ratio::kSequence: sums A w (times logp under CISPO) by the sign of A; the sequence's ratio is
// multiplied later. The factor A w of each token is kept in `parts`. If all tokens share one A, it
// is left out: the sum is that of w, in `value`.
template <bool kTokenAdvantage, bool kTokenWeight, bool kCispo>
MRL_FN void SumTokens(const PolicyBlock& block, LaneSums& total) {
  Floats value = 0.0f, bad_value = 0.0f, k1 = 0.0f, k3 = 0.0f;
  Ints count = 0, good_count = 0, bad_count = 0;
  const Floats zero(0.0f);
  for (int t = 0; t < block.size; t += kLanes) {
    FetchAhead(block.logprobs + t);
    FetchAhead(block.old_logprobs + t);
    __builtin_prefetch(block.grad + t + kPolicyBlock, 1, 2);
    if (!AnyByte(block.mask + t)) continue;
    const Ints keep = LoadMask(block.mask + t);
    const Floats logp = Load(block.logprobs + t);
    const Floats gap = Select(keep, logp - Load(block.old_logprobs + t), zero);
    k1 = k1 - gap;
    k3 = k3 + Exp(gap).k3;
    count = count + keep;
    Floats part = kTokenWeight ? Load(block.parts + t) : Floats(1.0f);
    if constexpr (kTokenAdvantage) {
      const Floats a = Load(block.advantages + t);
      // NaN counts as bad, so that it is not lost.
      const Ints good = keep & (a > zero), bad = keep & (a != zero) & (good == Ints(0));
      good_count = good_count + good;
      bad_count = bad_count + bad;
      part = Select(good | bad, a * part, zero);
      Store(block.parts + t, part);
      const Floats amount = kCispo ? Select(part == zero, zero, part * logp) : part;
      value = value + Select(good, amount, zero);
      bad_value = bad_value + Select(bad, amount, zero);
    } else {
      const Ints counts = kCispo ? keep & (part != zero) : keep;
      value = value + Select(counts, kCispo ? part * logp : part, zero);
    }
  }
  total.value = value, total.bad_value = bad_value, total.k1 = k1, total.k3 = k3;
  total.count = count, total.good = good_count, total.bad = bad_count;
}

// Computes the gradient once the sequence's factors are known: for positive parts, for other parts,
// and for the KL penalty. Factors 0 are excluded, because 0 * inf would be NaN.
inline void FinishPolicyBlock(const PolicyBlock& block, const GradientFactors& factors) {
  const Floats zero(0.0f), up(factors.positive), down(factors.negative), kl(factors.kl);
  for (int t = 0; t < block.size; t += kLanes) {
    if (!AnyByte(block.mask + t)) {
      Store(block.grad + t, zero);
      continue;
    }
    const Ints keep = LoadMask(block.mask + t);
    Floats grad = up;
    if (block.parts) {
      const Floats part = Load(block.parts + t);
      const Floats factor = Select(part > zero, up, down);
      grad = Select((part != zero) & (factor != zero), factor * part, zero);
    }
    if (block.ref_logprobs && factors.kl != 0) grad = grad + kl * Load(block.grad + t);
    Store(block.grad + t, Select(keep, grad, zero));
  }
}

template <bool kCispo>
MRL_FN void SumTokensOf(const PolicyBlock& block, bool weights, LaneSums& lanes) {
  if (block.advantages) {
    weights ? SumTokens<true, true, kCispo>(block, lanes)
            : SumTokens<true, false, kCispo>(block, lanes);
  } else {
    weights ? SumTokens<false, true, kCispo>(block, lanes)
            : SumTokens<false, false, kCispo>(block, lanes);
  }
}

template <Form kForm>
MRL_FN void ScoreTokensOf(const PolicyBlock& block, bool weights, LaneSums& lanes) {
  weights ? ScoreTokens<kForm, true>(block, lanes) : ScoreTokens<kForm, false>(block, lanes);
}

inline void RunPolicyBlock(const PolicyBlock& block, const PolicyLossOptions& o, BlockSums& sums) {
  LaneSums lanes;
  const bool weights = o.importance != Importance::kNone && o.importance_level == Level::kToken;
  if (weights) {
    WeighTokens<true>(block, o, lanes);
  } else if (block.rollout_logprobs) {
    WeighTokens<false>(block, o, lanes);
  }
  if (block.ref_logprobs) {
    if (o.kl == Kl::kK1) PenalizeTokens<Kl::kK1>(block, lanes);
    if (o.kl == Kl::kK2) PenalizeTokens<Kl::kK2>(block, lanes);
    if (o.kl == Kl::kK3) PenalizeTokens<Kl::kK3>(block, lanes);
    if (o.kl == Kl::kK1Plus) PenalizeTokens<Kl::kK1Plus>(block, lanes);
    if (o.kl == Kl::kK3Plus) PenalizeTokens<Kl::kK3Plus>(block, lanes);
  }
  const bool cispo = o.clip == Clip::kCispo;
  if (o.ratio == Ratio::kSequence) {
    cispo ? SumTokensOf<true>(block, weights, lanes) : SumTokensOf<false>(block, weights, lanes);
  } else if (cispo) {
    ScoreTokensOf<Form::kCispo>(block, weights, lanes);
  } else if (o.clip == Clip::kSapo) {
    ScoreTokensOf<Form::kSapo>(block, weights, lanes);
  } else {
    ScoreTokensOf<Form::kBounded>(block, weights, lanes);
  }
  sums.value = SumOfLanes(lanes.value), sums.bad_value = SumOfLanes(lanes.bad_value);
  sums.k1 = SumOfLanes(lanes.k1), sums.k3 = SumOfLanes(lanes.k3), sums.kl = SumOfLanes(lanes.kl);
  sums.ratio = SumOfLanes(lanes.ratio), sums.ratio_max = LargestOfLanes(lanes.ratio_max);
  sums.weight = SumOfLanes(lanes.weight);
  sums.weight_square = SumOfLanes(lanes.weight_square);
  sums.drift = SumOfLanes(lanes.drift), sums.mismatch = SumOfLanes(lanes.mismatch);
  sums.mismatch_max = LargestOfLanes(lanes.mismatch_max);
  sums.count = -static_cast<float>(SumOfLanes(lanes.count));
  sums.good = -static_cast<float>(SumOfLanes(lanes.good));
  sums.bad = -static_cast<float>(SumOfLanes(lanes.bad));
  sums.over = -static_cast<float>(SumOfLanes(lanes.over));
  sums.under = -static_cast<float>(SumOfLanes(lanes.under));
  sums.truncated = -static_cast<float>(SumOfLanes(lanes.truncated));
}

inline void SumLogratioBlock(const float* a, const float* b, const uint8_t* mask, int size,
                             float* sum, int* count) {
  Floats total = 0.0f;
  Ints kept = 0;
  for (int t = 0; t < size; t += kLanes) {
    if (!AnyByte(mask + t)) continue;
    const Ints keep = LoadMask(mask + t);
    total = total + Select(keep, Load(a + t) - Load(b + t), 0.0f);
    kept = kept + keep;
  }
  *sum = SumOfLanes(total);
  *count = -SumOfLanes(kept);
}
