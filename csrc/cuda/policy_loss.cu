// Two launches: first the sums that a sequence-level ratio or weight needs, then all tokens. The
// last CTA to finish sums the statistics. The order of every sum depends only on the sequence.
#include "cuda/launch.h"
#include "cuda/packed.h"
#include "order_free_sum.h"
#include "policy_loss.h"
#include "policy_sequence.h"

namespace mrl {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kPerThread = kPolicyBlock / kThreads;
constexpr int kNumSums = sizeof(PolicySums<float>) / sizeof(float);
constexpr int kFirstMax = kNumSums - 2;

struct Workspace {
  unsigned* ticket;            // number of CTAs that are done
  double* logratio;            // [blocks, 2]
  double* importance;          // [blocks, 2]
  PolicySums<double>* blocks;  // [blocks]
};

__host__ Workspace Partition(void* memory, int64_t num_blocks) {
  char* at = static_cast<char*>(memory);
  Workspace w;
  w.ticket = reinterpret_cast<unsigned*>(at);
  w.logratio = reinterpret_cast<double*>(at + 16);
  w.importance = w.logratio + 2 * num_blocks;
  w.blocks = reinterpret_cast<PolicySums<double>*>(w.importance + 2 * num_blocks);
  return w;
}

// Computes (sum, count) over the loss tokens of one block; thread 0 writes the result.
__device__ void SumBlock(const float* a, const float* b, const uint8_t* mask,
                         const TokenBlock& block, double* result) {
  __shared__ float sums[kWarps], counts[kWarps];
  float sum = 0, count = 0;
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int t = k * kThreads + threadIdx.x;
    if (t >= block.size || !mask[block.start + t]) continue;
    sum += a[block.start + t] - b[block.start + t];
    count += 1;
  }
  sum = WarpSum(sum);
  count = WarpSum(count);
  if (threadIdx.x % 32 == 0) {
    sums[threadIdx.x / 32] = sum;
    counts[threadIdx.x / 32] = count;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kWarps; ++warp) {
      sum += sums[warp];
      count += counts[warp];
    }
    result[0] = sum;
    result[1] = count;
  }
  __syncthreads();  // the shared arrays may be used again
}

// Adds all blocks of a sequence, in order.
__device__ void AddBlocks(const double* of_blocks, int64_t first, int64_t count, double* total) {
  total[0] = total[1] = 0;
  for (int64_t k = first; k < first + count; ++k) {
    total[0] += of_blocks[2 * k];
    total[1] += of_blocks[2 * k + 1];
  }
}

__device__ int64_t BlocksOf(const int32_t* cu_seqlens, int64_t sequence) {
  const int64_t length = cu_seqlens[sequence + 1] - cu_seqlens[sequence];
  return (length + kPolicyBlock - 1) / kPolicyBlock;
}

__global__ void __launch_bounds__(kThreads)
    PolicySumsKernel(PolicyLossInput in, Workspace work, bool logratio, bool importance) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *work.ticket = 0;
  const TokenBlock block =
      FindBlock(in.cu_seqlens, in.num_sequences, in.num_tokens, kPolicyBlock, blockIdx.x);
  if (logratio) {
    SumBlock(in.logprobs, in.old_logprobs, in.loss_mask, block, work.logratio + 2 * blockIdx.x);
  }
  if (importance) {
    SumBlock(in.old_logprobs, in.rollout_logprobs, in.loss_mask, block,
             work.importance + 2 * blockIdx.x);
  }
}

__device__ SequenceFactors FactorsOf(const PolicyLossInput& in, const Workspace& work,
                                     const RatioBounds& bounds, int64_t sequence) {
  const PolicyLossOptions& o = in.options;
  const int64_t first = FirstBlock(in.cu_seqlens, sequence, kPolicyBlock);
  const int64_t count = BlocksOf(in.cu_seqlens, sequence);
  double logratio[2] = {0, 0}, importance[2] = {0, 0};
  if (in.seq_logratio != nullptr) {
    logratio[0] = in.seq_logratio[2 * sequence];
    logratio[1] = in.seq_logratio[2 * sequence + 1];
  } else if (o.ratio == Ratio::kSequence) {
    AddBlocks(work.logratio, first, count, logratio);
  }
  if (in.seq_importance != nullptr) {
    importance[0] = in.seq_importance[2 * sequence];
    importance[1] = in.seq_importance[2 * sequence + 1];
  } else if (o.importance != Importance::kNone && o.importance_level == Level::kSequence) {
    AddBlocks(work.importance, first, count, importance);
  }
  return MakeFactors(o, bounds, in.seq_weight[sequence], logratio, importance);
}

__device__ scalar::Objective<float> ObjectiveOf(const PolicyLossOptions& o,
                                                const RatioBounds& bounds, const SequenceFactors& f,
                                                float r, float a, float logp) {
  if (o.ratio == Ratio::kToken) {
    if (o.clip == Clip::kCispo) return scalar::CispoObjective(r, a, logp, bounds);
    if (o.clip == Clip::kSapo) return scalar::SapoObjective(r, a, bounds);
    return scalar::BoundedObjective(r, a, bounds);
  }
  const SequenceObjective& s = a > 0 ? f.good : a < 0 ? f.bad : f.zero;
  const float value = a * s.value;
  return {o.clip == Clip::kCispo ? value * logp : value, a * s.slope, s.over, s.under};
}

// Adds one loss token to `sums` and returns its gradient.
__device__ float RunToken(const PolicyLossInput& in, const RatioBounds& bounds,
                          const SequenceFactors& f, int64_t t, int64_t sequence,
                          PolicySums<float>& sums) {
  const PolicyLossOptions& o = in.options;
  const float logp = in.logprobs[t], old = in.old_logprobs[t];
  float weight = static_cast<float>(f.weight), grad = 0;
  if (in.rollout_logprobs != nullptr) {
    const float gap = old - in.rollout_logprobs[t], size = gap < 0 ? 0 - gap : gap;
    sums.mismatch += size;
    if (size > sums.mismatch_max || size != size) sums.mismatch_max = size;
    if (o.importance != Importance::kNone && o.importance_level == Level::kToken) {
      const float low = static_cast<float>(o.importance_low);
      const float high = static_cast<float>(o.importance_high);
      const float raw = scalar::Exp(gap).exp;
      weight = scalar::ApplyRange(o.importance, raw, low, high);
      sums.weight += weight;
      sums.weight_square += weight * weight;
      sums.truncated += raw >= low && raw <= high ? 0.0f : 1.0f;
    }
  }
  if (o.kl != Kl::kNone) {
    const auto term = scalar::KlPenalty(o.kl, in.ref_logprobs[t] - logp);
    sums.kl += term.value;
    grad = static_cast<float>(f.unit * o.kl_coef) * term.slope;
  }
  const float gap = logp - old;
  const scalar::ExpTerms<float> terms = scalar::Exp(gap);
  const float a = in.advantages[in.options.token_advantages ? t : sequence];
  const auto objective = ObjectiveOf(o, bounds, f, terms.exp, a, logp);
  // Tokens with a factor 0 are excluded, because 0 * inf would be NaN.
  const bool counts = a != 0 && weight != 0;
  if (counts) sums.value += objective.value * weight;
  if (counts && f.unit != 0) grad += objective.slope * static_cast<float>(-f.unit) * weight;
  sums.k1 -= gap;
  sums.k3 += terms.k3;
  sums.count += 1;
  sums.over += objective.over ? 1.0f : 0.0f;
  sums.under += objective.under ? 1.0f : 0.0f;
  if (o.ratio == Ratio::kToken) {
    sums.ratio += terms.exp;
    if (terms.exp > sums.ratio_max || terms.exp != terms.exp) sums.ratio_max = terms.exp;
  }
  return grad;
}

__device__ float WarpMaxOrNan(float value) {
  for (int offset = 16; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(kFullWarp, value, offset);
    if (other > value || other != other) value = other;
  }
  return value;
}

// Reduces the sums of a CTA; the result is written by one thread per field.
__device__ void ReduceCta(PolicySums<float>& sums, PolicySums<double>* result) {
  __shared__ float of_warps[kWarps][kNumSums];
  float* fields = &sums.value;
#pragma unroll
  for (int i = 0; i < kNumSums; ++i) {
    fields[i] = i < kFirstMax ? WarpSum(fields[i]) : WarpMaxOrNan(fields[i]);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32][i] = fields[i];
  }
  __syncthreads();
  if (threadIdx.x < kNumSums) {  // one thread per field, warps in order
    const int i = threadIdx.x;
    float total = of_warps[0][i];
    for (int warp = 1; warp < kWarps; ++warp) {
      const float next = of_warps[warp][i];
      if (i < kFirstMax) {
        total += next;
      } else if (next > total || next != next) {
        total = next;
      }
    }
    (&result->value)[i] = total;
  }
}

// Returns the sum (or maximum) of one statistic over all sequences, computed by one warp. The bits
// do not depend on the order.
__device__ double WarpTotal(const double* column, int64_t count, bool largest) {
  const int lane = threadIdx.x % 32;
  double top = 0, plain = 0, size = 0;
  for (int64_t i = lane; i < count; i += 32) {
    const double x = column[i * kNumPolicyStats];
    top = LargerOrNan(top, x);
    size = LargerOrNan(size, fabs(x));
    plain += x;
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    top = LargerOrNan(top, __shfl_xor_sync(kFullWarp, top, offset));
    size = LargerOrNan(size, __shfl_xor_sync(kFullWarp, size, offset));
  }
  plain = WarpSum(plain);
  if (largest) return top;
  if (!(size > 0) || !(size < kLargestOrderFree)) return plain;
  const double first = FirstBoundary(size, count), second = NextBoundary(first, count);
  double coarse = 0, fine = 0;
  for (int64_t i = lane; i < count; i += 32) {
    const double x = column[i * kNumPolicyStats];
    const double rounded = RoundTo(first, x);
    coarse += rounded;
    fine += RoundTo(second, x - rounded);
  }
  return WarpSum(coarse) + WarpSum(fine);
}

__device__ void FinishAll(const PolicyLossInput& in, const PolicyLossOutput& out,
                          const Workspace& work, const RatioBounds& bounds) {
  for (int64_t i = threadIdx.x; i < in.num_sequences; i += kThreads) {
    const int64_t first = FirstBlock(in.cu_seqlens, i, kPolicyBlock);
    const int64_t count = BlocksOf(in.cu_seqlens, i);
    PolicySums<double> sums;
    for (int64_t k = first; k < first + count; ++k) Add(sums, work.blocks[k]);
    FinishSequence(in.options, FactorsOf(in, work, bounds, i), sums,
                   out.seq_stats + i * kNumPolicyStats);
  }
  __syncthreads();
  for (int stat = threadIdx.x / 32; stat < kNumPolicyStats; stat += kWarps) {
    const bool largest = stat == kRatioMax || stat == kMismatchAbsMax;
    const double total = WarpTotal(out.seq_stats + stat, in.num_sequences, largest);
    if (threadIdx.x % 32 != 0) continue;
    out.stats[stat] = total;
    if (stat == kLoss) *out.loss = total;
  }
}

__global__ void __launch_bounds__(kThreads)
    PolicyLossKernel(PolicyLossInput in, PolicyLossOutput out, Workspace work) {
  __shared__ bool last;
  const RatioBounds bounds = MakeBounds(in.options);
  const TokenBlock block =
      FindBlock(in.cu_seqlens, in.num_sequences, in.num_tokens, kPolicyBlock, blockIdx.x);
  PolicySums<float> sums;
  if (block.size > 0) {
    // Every thread computes these: the inputs are in the cache, and a broadcast would need a
    // barrier.
    const SequenceFactors factors = FactorsOf(in, work, bounds, block.sequence);
#pragma unroll 1
    for (int k = 0; k < kPerThread; ++k) {
      const int offset = k * kThreads + threadIdx.x;
      if (offset >= block.size) break;
      const int64_t t = block.start + offset;
      out.grad[t] = in.loss_mask[t] ? RunToken(in, bounds, factors, t, block.sequence, sums) : 0.0f;
    }
  }
  ReduceCta(sums, work.blocks + blockIdx.x);
  __threadfence();  // before the ticket, so that the last CTA sees what the others wrote
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(work.ticket, 1u) == gridDim.x - 1;
    __threadfence();  // after it, so that this CTA then reads what the others wrote
  }
  __syncthreads();
  if (!last) return;
  FinishAll(in, out, work, bounds);
}

__global__ void SeqLogratioKernel(SeqLogratioInput in, const double* of_blocks, double* sums) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= in.num_sequences) return;
  AddBlocks(of_blocks, FirstBlock(in.cu_seqlens, i, kPolicyBlock), BlocksOf(in.cu_seqlens, i),
            sums + 2 * i);
}

}  // namespace

int64_t PolicyLossWorkspaceBytes(int64_t num_tokens, int64_t num_sequences) {
  const int64_t blocks = NumBlocks(num_tokens, num_sequences, kPolicyBlock);
  return 16 + blocks * static_cast<int64_t>(4 * sizeof(double) + sizeof(PolicySums<double>));
}

void PolicyLossCuda(const PolicyLossInput& in, const PolicyLossOutput& out, void* workspace,
                    uintptr_t stream) {
  const PolicyLossOptions& o = in.options;
  const int64_t blocks = NumBlocks(in.num_tokens, in.num_sequences, kPolicyBlock);
  const Workspace work = Partition(workspace, blocks);
  const bool logratio = o.ratio == Ratio::kSequence && in.seq_logratio == nullptr;
  const bool importance = o.importance != Importance::kNone &&
                          o.importance_level == Level::kSequence && in.seq_importance == nullptr;
  // If there are no sums to compute first, one CTA resets the ticket.
  MRL_LAUNCH(PolicySumsKernel, logratio || importance ? blocks : 1, kThreads, stream, in, work,
             logratio, importance);
  MRL_LAUNCH(PolicyLossKernel, blocks, kThreads, stream, in, out, work);
}

void SeqLogratioCuda(const SeqLogratioInput& in, double* sums, void* workspace, uintptr_t stream) {
  const int64_t blocks = NumBlocks(in.num_tokens, in.num_sequences, kPolicyBlock);
  const Workspace work = Partition(workspace, blocks);
  PolicyLossInput policy{};
  policy.logprobs = in.a;
  policy.old_logprobs = in.b;
  policy.loss_mask = in.loss_mask;
  policy.cu_seqlens = in.cu_seqlens;
  policy.num_tokens = in.num_tokens;
  policy.num_sequences = in.num_sequences;
  MRL_LAUNCH(PolicySumsKernel, blocks, kThreads, stream, policy, work, true, false);
  if (in.num_sequences == 0) return;
  MRL_LAUNCH(SeqLogratioKernel, (in.num_sequences + kThreads - 1) / kThreads, kThreads, stream, in,
             work.logratio, sums);
}

}  // namespace mrl
