#include "policy_loss.h"

#include <algorithm>
#include <vector>

#include "cpu/packed.h"
#include "cpu/target.h"
#include "policy_sequence.h"

namespace mrl {
namespace {

// Up to kPolicyBlock tokens of one sequence; their number is a multiple of kLanes.
struct PolicyBlock {
  const float *logprobs, *old_logprobs;
  const float *rollout_logprobs, *ref_logprobs;  // or null
  const uint8_t* mask;
  const float* advantages;  // per token, or null if `advantage` holds for all
  float* parts;             // each token's factor of the gradient, or null if it is constant
  float* grad;
  int size;
  float advantage;
  float policy_scale, kl_scale;  // d loss / d (w f), d loss / d kl
  int32_t has_unit;              // 0 if the sequence's weight is 0
  bool needs_sequence;           // the gradient needs a factor of the whole sequence
  const RatioBounds* bounds;
};

// d loss / d part of a token, for positive parts and for others, and d loss / d its KL part.
struct GradientFactors {
  float positive, negative, kl;
};

// Sums of a block in addition to the statistics. Under Ratio::kSequence, `value` and `bad_value`
// are the sums of A w over A > 0 and A < 0; if all tokens share one A, `value` is the sum of w.
template <class Real>
struct ExtraSums : PolicySums<Real> {
  Real bad_value = 0, good = 0, bad = 0, drift = 0;  // drift: old - rollout
};
typedef ExtraSums<float> BlockSums;

}  // namespace
}  // namespace mrl

#define MRL_BODY "cpu/policy_loss_body.h"
#include "cpu/for_each_target.h"

namespace mrl {
namespace {

// A copy of a block's last tokens, padded to whole lanes with masked tokens.
struct PaddedTail {
  alignas(64) float logprobs[kLanes] = {},
                    old_logprobs[kLanes] = {}, rollout[kLanes] = {}, ref[kLanes] = {};
  alignas(64) float advantages[kLanes] = {}, parts[kLanes] = {}, grad[kLanes] = {};
  uint8_t mask[kLanes] = {};

  PolicyBlock From(const PolicyBlock& from, int count) {
    PolicyBlock tail = from;
    const auto pad = [count](auto* to, auto*& source) {
      if (source == nullptr) return;
      std::copy_n(source, count, to);
      source = to;
    };
    pad(logprobs, tail.logprobs);
    pad(old_logprobs, tail.old_logprobs);
    pad(rollout, tail.rollout_logprobs);
    pad(ref, tail.ref_logprobs);
    pad(advantages, tail.advantages);
    pad(mask, tail.mask);
    pad(parts, tail.parts);
    pad(grad, tail.grad);
    tail.size = kLanes;
    return tail;
  }

  void CopyBack(const PolicyBlock& to, int count) const {
    std::copy_n(grad, count, to.grad);
    if (to.parts) std::copy_n(parts, count, to.parts);
  }
};

void Shift(PolicyBlock& block, int64_t tokens) {
  block.logprobs += tokens;
  block.old_logprobs += tokens;
  block.mask += tokens;
  block.grad += tokens;
  if (block.rollout_logprobs) block.rollout_logprobs += tokens;
  if (block.ref_logprobs) block.ref_logprobs += tokens;
  if (block.advantages) block.advantages += tokens;
  if (block.parts) block.parts += tokens;
}

// Calls run(block) for all blocks of a sequence, with the last tokens padded to kLanes.
template <class Function>
void ForEachBlock(PolicyBlock block, int64_t length, Function&& run) {
  for (int64_t done = 0; done < length; done += kPolicyBlock) {
    const int size = static_cast<int>(std::min<int64_t>(kPolicyBlock, length - done));
    block.size = size / kLanes * kLanes;
    run(block);
    if (block.size < size) {
      PaddedTail padded;
      PolicyBlock rest = block;
      Shift(rest, block.size);
      run(padded.From(rest, size - block.size));
      padded.CopyBack(rest, size - block.size);
    }
    Shift(block, kPolicyBlock);
  }
}

void SumSequence(const float* a, const float* b, const uint8_t* mask, int64_t length,
                 double* sums) {
  const auto run = MRL_DISPATCH(SumLogratioBlock);
  sums[0] = sums[1] = 0;
  for (int64_t start = 0; start < length; start += kPolicyBlock) {
    const int size = static_cast<int>(std::min<int64_t>(kPolicyBlock, length - start));
    const int whole = size / kLanes * kLanes;
    float sum;
    int count;
    run(a + start, b + start, mask + start, whole, &sum, &count);
    sums[0] += sum;
    sums[1] += count;
    if (whole == size) continue;
    float tail_a[kLanes] = {}, tail_b[kLanes] = {};
    uint8_t tail_mask[kLanes] = {};
    std::copy_n(a + start + whole, size - whole, tail_a);
    std::copy_n(b + start + whole, size - whole, tail_b);
    std::copy_n(mask + start + whole, size - whole, tail_mask);
    run(tail_a, tail_b, tail_mask, kLanes, &sum, &count);
    sums[0] += sum;
    sums[1] += count;
  }
}

double NonZeroTimes(double a, double b) { return a == 0 || b == 0 ? 0.0 : a * b; }

// Multiplies the sums of a sequence by its ratio and weight, which are known only at its end.
void ApplyFactors(const PolicyLossOptions& o, const SequenceFactors& f, const PolicyBlock& block,
                  ExtraSums<double>& sums) {
  if (o.ratio == Ratio::kSequence) {
    const double a = block.advantage;
    if (!block.advantages) {  // all tokens share one A: the sums are those of w
      (a > 0 ? sums.good : sums.bad) = a == 0 ? 0.0 : sums.count;
      const double value = NonZeroTimes(a, sums.value);
      sums.bad_value = a > 0 ? 0 : value;  // NaN too
      sums.value = a > 0 ? value : 0;
    }
    sums.value = NonZeroTimes(sums.value, f.good.value) + NonZeroTimes(sums.bad_value, f.bad.value);
    const double zero = sums.count - sums.good - sums.bad;
    sums.over = sums.good * f.good.over + sums.bad * f.bad.over + zero * f.zero.over;
    sums.under = sums.good * f.good.under + sums.bad * f.bad.under + zero * f.zero.under;
  }
  sums.value = NonZeroTimes(sums.value, f.weight);
}

void RunSequence(const PolicyLossInput& in, const RatioBounds& bounds, int64_t index, float* grad,
                 std::vector<float>& scratch, double* row) {
  const PolicyLossOptions& o = in.options;
  const int64_t start = in.cu_seqlens[index], length = in.cu_seqlens[index + 1] - start;
  const bool sequence_ratio = o.ratio == Ratio::kSequence;
  const bool weighted = o.importance != Importance::kNone;
  const bool sequence_weight = weighted && o.importance_level == Level::kSequence;
  const bool token_parts =
      (weighted && !sequence_weight) || o.token_advantages || (sequence_weight && !sequence_ratio);
  if (token_parts && static_cast<int64_t>(scratch.size()) < length) scratch.resize(length);

  // The unit of a sequence ratio needs the number of loss tokens, which the first loop counts.
  // Until then the KL part lacks the unit.
  const double unit = sequence_ratio ? 1.0 : static_cast<double>(in.seq_weight[index]);
  PolicyBlock block{};
  block.logprobs = in.logprobs;
  block.old_logprobs = in.old_logprobs;
  block.rollout_logprobs = in.rollout_logprobs;
  block.ref_logprobs = o.kl == Kl::kNone ? nullptr : in.ref_logprobs;
  block.mask = in.loss_mask;
  block.grad = grad;
  block.advantages = o.token_advantages ? in.advantages : nullptr;
  block.advantage = o.token_advantages ? 0.0f : in.advantages[index];
  block.policy_scale = static_cast<float>(-unit);
  block.kl_scale = static_cast<float>(unit * o.kl_coef);
  block.has_unit = unit != 0;
  block.needs_sequence = sequence_ratio || sequence_weight;
  block.bounds = &bounds;
  Shift(block, start);
  block.parts = token_parts ? scratch.data() : nullptr;

  ExtraSums<double> sums;
  const auto run = MRL_DISPATCH(RunPolicyBlock);
  ForEachBlock(block, length, [&](const PolicyBlock& part) {
    BlockSums of_part;
    run(part, o, of_part);
    Add(sums, of_part);
    sums.bad_value += of_part.bad_value;
    sums.good += of_part.good;
    sums.bad += of_part.bad;
    sums.drift += of_part.drift;
  });

  const double own_logratio[2] = {-sums.k1, sums.count}, own_drift[2] = {sums.drift, sums.count};
  const SequenceFactors factors = MakeFactors(
      o, bounds, in.seq_weight[index], in.seq_logratio ? in.seq_logratio + 2 * index : own_logratio,
      in.seq_importance ? in.seq_importance + 2 * index : own_drift);
  ApplyFactors(o, factors, block, sums);
  if (block.needs_sequence) {
    const auto factor = [&](double slope) {
      return static_cast<float>(-NonZeroTimes(NonZeroTimes(factors.unit, factors.weight), slope));
    };
    const double a = block.advantage;
    GradientFactors of_part;
    of_part.positive = factor(sequence_ratio ? factors.good.slope : 1.0);
    of_part.negative = factor(sequence_ratio ? factors.bad.slope : 1.0);
    if (sequence_ratio && !block.advantages) {  // the parts are then w >= 0, without A
      of_part.positive = factor(NonZeroTimes(a, a > 0 ? factors.good.slope : factors.bad.slope));
    }
    of_part.kl = sequence_ratio ? static_cast<float>(factors.unit) : 1.0f;
    const auto finish = MRL_DISPATCH(FinishPolicyBlock);
    ForEachBlock(block, length, [&](const PolicyBlock& part) { finish(part, of_part); });
  }
  FinishSequence(o, factors, sums, row);
}

}  // namespace

void PolicyLossCpu(const PolicyLossInput& in, const PolicyLossOutput& out, int num_threads) {
  ChosenTarget();  // may throw, which must not happen inside the parallel region
  CheckSequences(in.cu_seqlens, in.num_sequences, in.num_tokens);
  const RatioBounds bounds = MakeBounds(in.options);
  const bool threads = UseThreads(num_threads, in.num_tokens);
#pragma omp parallel num_threads(num_threads) if (threads)
  {
    std::vector<float> scratch;
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < in.num_sequences; ++i) {
      RunSequence(in, bounds, i, out.grad, scratch, out.seq_stats + i * kNumPolicyStats);
    }
  }
  for (int stat = 0; stat < kNumPolicyStats; ++stat) {
    const double* column = out.seq_stats + stat;
    if (stat != kRatioMax && stat != kMismatchAbsMax) {
      out.stats[stat] = OrderFreeSum(column, in.num_sequences, kNumPolicyStats);
      continue;
    }
    double top = 0;
    for (int64_t i = 0; i < in.num_sequences; ++i) {
      top = LargerOrNan(top, column[i * kNumPolicyStats]);
    }
    out.stats[stat] = top;
  }
  *out.loss = out.stats[kLoss];
}

void SeqLogratioCpu(const SeqLogratioInput& in, double* sums, int num_threads) {
  ChosenTarget();  // may throw, which must not happen inside the parallel region
  CheckSequences(in.cu_seqlens, in.num_sequences, in.num_tokens);
  const bool threads = UseThreads(num_threads, in.num_tokens);
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (threads)
  for (int64_t i = 0; i < in.num_sequences; ++i) {
    const int64_t start = in.cu_seqlens[i];
    SumSequence(in.a + start, in.b + start, in.loss_mask + start, in.cu_seqlens[i + 1] - start,
                sums + 2 * i);
  }
}

}  // namespace mrl
