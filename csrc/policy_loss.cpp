#include "policy_loss.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

// One body, compiled for several instruction sets; the loader picks. The lanes below are explicit
// and FMA contraction is off, so all of them give the same bits.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MRL_MULTIVERSION __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define MRL_MULTIVERSION
#endif
#define MRL_INLINE inline __attribute__((always_inline))

namespace mrl {
namespace {

constexpr int kBlock = 1024;  // tokens per fp32 partial sum: a constant, never a function of N or B
constexpr int kLanes = 16;    // token t of a block is added in lane t % kLanes
constexpr int64_t kMinTokensForThreads = 16384;

// 2^k for -127 < k < 128.
MRL_INLINE float PowerOfTwo(int32_t k) {
  const int32_t bits = (k + 127) << 23;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// exp(x) to about 1 ulp, without a branch so that loops over it vectorise. exp(0) == 1 exactly;
// overflow gives inf, NaN gives NaN. libm's expf is a call and stays scalar without -ffast-math.
MRL_INLINE float Exp(float x) {
  constexpr float kLog2e = 1.44269504088896341f;
  constexpr float kLn2High = 0.693359375f;  // few bits, so n * kLn2High is exact
  constexpr float kLn2Low = -2.12194440e-4f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  float y = x > 89.0f ? 89.0f : x;
  y = y < -104.0f ? -104.0f : y;
  const float n = (y * kLog2e + kRound) - kRound;
  const float r = (y - n * kLn2High) - n * kLn2Low;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // 2^n in two factors: n reaches 128 (overflow) and -150 (subnormals), one factor does not.
  const int32_t k = static_cast<int32_t>(x == x ? n : 0.0f);
  const int32_t half = k >> 1;
  return p * PowerOfTwo(half) * PowerOfTwo(k - half);
}

// Adds up a block: lane by lane, then the lanes as a tree. The order is fixed by kLanes alone.
MRL_INLINE double SumBlock(const float* values) {
  float lanes[kLanes] = {};
  for (int i = 0; i < kBlock; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += values[i + lane];
  }
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

// What one sequence contributes.
struct SequenceResult {
  double loss = 0;
  double ratio_sum = 0;
  double ratio_max = 0;
  int64_t ratio_count = 0;
  int64_t clip_count = 0;
};

// One sequence's slice of the input.
struct Sequence {
  const float* logprobs;
  const float* old_logprobs;
  const uint8_t* mask;
  int64_t length;
  double slope;        // -seq_weight * advantage: d loss / d ratio while nothing clips
  double lower_bound;  // ratios outside [lower_bound, upper_bound] take the clipped branch;
  double upper_bound;  // min(rA, clip(r)A) clips above only for A > 0, below only for A < 0
};

MRL_MULTIVERSION SequenceResult TokenRatioLoss(const Sequence& seq, float* grad) {
  SequenceResult result;
  const float slope = static_cast<float>(seq.slope);
  const int32_t has_slope = seq.slope != 0;  // selected, so that 0 * inf cannot make a NaN
  const float lower = static_cast<float>(seq.lower_bound);
  const float upper = static_cast<float>(seq.upper_bound);
  double clipped_ratio_sum = 0;
  int32_t max_bits = 0;
  alignas(64) float ratios[kBlock], clipped_ratios[kBlock];
  for (int64_t start = 0; start < seq.length; start += kBlock) {
    const int n = static_cast<int>(std::min<int64_t>(kBlock, seq.length - start));
    const float* __restrict logp = seq.logprobs + start;
    const float* __restrict old = seq.old_logprobs + start;
    const uint8_t* __restrict mask = seq.mask + start;
    float* __restrict out = grad + start;
    int32_t count = 0, clips = 0;
    for (int i = 0; i < n; ++i) {
      const int32_t keep = mask[i] != 0;
      const float r = Exp(logp[i] - old[i]);  // of anything where masked: selected away below
      const float bounded = r > upper ? upper : (r < lower ? lower : r);
      const int32_t clipped = keep & ((r > upper) | (r < lower));
      const float slope_r = slope * r;
      ratios[i] = keep ? r : 0.0f;
      clipped_ratios[i] = keep ? bounded : 0.0f;
      out[i] = (keep & has_slope & (clipped ^ 1)) ? slope_r : 0.0f;
      count += keep;
      clips += clipped;
    }
    std::fill(ratios + n, ratios + kBlock, 0.0f);
    std::fill(clipped_ratios + n, clipped_ratios + kBlock, 0.0f);
    for (int i = 0; i < kBlock; ++i) {  // ratios are >= 0, so they order like their bits
      int32_t bits;
      std::memcpy(&bits, &ratios[i], sizeof(bits));
      max_bits = std::max(max_bits, bits);
    }
    result.ratio_sum += SumBlock(ratios);
    clipped_ratio_sum += SumBlock(clipped_ratios);
    result.ratio_count += count;
    result.clip_count += clips;
  }
  float ratio_max;
  std::memcpy(&ratio_max, &max_bits, sizeof(ratio_max));
  result.ratio_max = ratio_max;
  if (has_slope && result.ratio_count) result.loss = seq.slope * clipped_ratio_sum;
  return result;
}

MRL_MULTIVERSION SequenceResult SequenceRatioLoss(const Sequence& seq, float* grad) {
  SequenceResult result;
  double logratio_sum = 0;
  int64_t count = 0;
  alignas(64) float logratios[kBlock];
  for (int64_t start = 0; start < seq.length; start += kBlock) {
    const int n = static_cast<int>(std::min<int64_t>(kBlock, seq.length - start));
    const float* __restrict logp = seq.logprobs + start;
    const float* __restrict old = seq.old_logprobs + start;
    const uint8_t* __restrict mask = seq.mask + start;
    int32_t block_count = 0;
    for (int i = 0; i < n; ++i) {
      const int32_t keep = mask[i] != 0;
      const float logratio = logp[i] - old[i];
      logratios[i] = keep ? logratio : 0.0f;
      block_count += keep;
    }
    std::fill(logratios + n, logratios + kBlock, 0.0f);
    logratio_sum += SumBlock(logratios);
    count += block_count;
  }
  float token_grad = 0;
  if (count) {
    const double ratio = std::exp(logratio_sum / static_cast<double>(count));
    const bool clipped = ratio > seq.upper_bound || ratio < seq.lower_bound;
    result.ratio_sum = result.ratio_max = ratio;
    result.ratio_count = 1;
    result.clip_count = clipped;
    if (seq.slope != 0) {
      const double bounded = ratio > seq.upper_bound ? seq.upper_bound : seq.lower_bound;
      result.loss = seq.slope * (clipped ? bounded : ratio);
      if (!clipped) token_grad = static_cast<float>(seq.slope * ratio / static_cast<double>(count));
    }
  }
  for (int64_t i = 0; i < seq.length; ++i) grad[i] = seq.mask[i] ? token_grad : 0.0f;
  return result;
}

SequenceResult LossOfSequence(const PolicyLossInput& in, int64_t index, float* grad) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const int64_t start = in.cu_seqlens[index];
  const float advantage = in.advantages[index];
  const Sequence seq{
      in.logprobs + start,
      in.old_logprobs + start,
      in.loss_mask + start,
      in.cu_seqlens[index + 1] - start,
      -static_cast<double>(in.seq_weight[index]) * static_cast<double>(advantage),
      advantage < 0 ? 1.0 - in.clip_low : -kInf,
      advantage > 0 ? 1.0 + in.clip_high : kInf,
  };
  return in.ratio == Ratio::kToken ? TokenRatioLoss(seq, grad + start)
                                   : SequenceRatioLoss(seq, grad + start);
}

// Sorted by bit pattern first (a total order, NaN included), so that the sum cannot depend on how
// the sequences were packed.
double OrderFreeSum(std::vector<double> values) {
  std::sort(values.begin(), values.end(), [](double a, double b) {
    int64_t bits_a, bits_b;
    std::memcpy(&bits_a, &a, sizeof(a));
    std::memcpy(&bits_b, &b, sizeof(b));
    return bits_a < bits_b;
  });
  double sum = 0;
  for (double value : values) sum += value;
  return sum;
}

void CheckSequences(const PolicyLossInput& in) {
  const int32_t* cu = in.cu_seqlens;
  if (cu[0] != 0) {
    throw std::invalid_argument("cu_seqlens: got cu_seqlens[0] = " + std::to_string(cu[0]) +
                                ", expected 0");
  }
  for (int64_t i = 0; i < in.num_sequences; ++i) {
    if (cu[i + 1] < cu[i]) {
      throw std::invalid_argument("cu_seqlens: got " + std::to_string(cu[i + 1]) + " after " +
                                  std::to_string(cu[i]) + " at index " + std::to_string(i + 1) +
                                  ", expected values that never decrease");
    }
  }
  if (cu[in.num_sequences] != in.num_tokens) {
    throw std::invalid_argument(
        "cu_seqlens: got cu_seqlens[-1] = " + std::to_string(cu[in.num_sequences]) +
        ", expected the number of tokens, " + std::to_string(in.num_tokens));
  }
}

}  // namespace

double PolicyLoss(const PolicyLossInput& in, int num_threads, float* grad, PolicyLossStats* stats) {
  CheckSequences(in);
  std::vector<SequenceResult> results(in.num_sequences);
  const bool use_threads = num_threads > 1 && in.num_tokens >= kMinTokensForThreads;
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (use_threads)
  for (int64_t i = 0; i < in.num_sequences; ++i) results[i] = LossOfSequence(in, i, grad);

  std::vector<double> losses, ratio_sums;
  losses.reserve(results.size());
  ratio_sums.reserve(results.size());
  for (const SequenceResult& result : results) {
    losses.push_back(result.loss);
    ratio_sums.push_back(result.ratio_sum);
    stats->ratio_count += static_cast<double>(result.ratio_count);
    stats->ratio_max = std::max(stats->ratio_max, result.ratio_max);
    stats->clip_count += static_cast<double>(result.clip_count);
  }
  stats->ratio_sum = OrderFreeSum(std::move(ratio_sums));
  if (std::isnan(stats->ratio_sum)) stats->ratio_max = stats->ratio_sum;  // max() drops a NaN
  return OrderFreeSum(std::move(losses));
}

}  // namespace mrl
