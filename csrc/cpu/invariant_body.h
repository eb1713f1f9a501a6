// One row of each op of invariant.h.
//
// No include guard: compiled once for each instruction set, see cpu/for_each_target.h.

#include "exp_terms.h"

// Loads up to 32 elements; the other lanes are 0.
MRL_FN Floats LoadSome(const float* from, int64_t count) {
  float padded[kLanes] = {};
  std::memcpy(padded, from, count * sizeof(float));
  return Load(padded);
}

// out[c] = x . weights[c] for kColumns neighbouring rows of the weights.
template <int kColumns>
MRL_FN void DotColumns(const float* x, const float* weights, int64_t size, float* out) {
  Floats sums[kColumns];
  for (auto& sum : sums) sum = Floats(0.0f);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Floats part = Load(x + i);
    for (int c = 0; c < kColumns; ++c) sums[c] = sums[c] + part * Load(weights + c * size + i);
  }
  if (i < size) {
    const Floats part = LoadSome(x + i, size - i);
    for (int c = 0; c < kColumns; ++c) {
      sums[c] = sums[c] + part * LoadSome(weights + c * size + i, size - i);
    }
  }
  for (int c = 0; c < kColumns; ++c) out[c] = SumOfLanes(sums[c]);
}

constexpr int kColumnsAtOnce = 4;

// Computes all outputs of rows [first, last). The grouping of columns depends on num_outputs only.
// A group of columns is used for all rows while it is in the cache.
inline void LinearRows(const LinearInput& in, int64_t first, int64_t last, float* out) {
  const int64_t size = in.num_inputs;
  int64_t column = 0;
  for (; column + kColumnsAtOnce <= in.num_outputs; column += kColumnsAtOnce) {
    for (int64_t row = first; row < last; ++row) {
      DotColumns<kColumnsAtOnce>(in.rows + row * size, in.weights + column * size, size,
                                 out + row * in.num_outputs + column);
    }
  }
  for (; column < in.num_outputs; ++column) {
    for (int64_t row = first; row < last; ++row) {
      DotColumns<1>(in.rows + row * size, in.weights + column * size, size,
                    out + row * in.num_outputs + column);
    }
  }
}

// Replaces `count` scores by e^(score - largest) and returns their sum. The scores are padded to a
// whole number of lanes with zeros, for which there must be room.
MRL_FN float ExpOfScores(float* scores, int64_t count) {
  const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = count; i < padded; ++i) scores[i] = -__builtin_inff();
  Floats tops(-__builtin_inff());
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Floats part = Load(scores + i);
    tops = Select(part > tops, part, tops);
  }
  const Floats largest(MaxOfLanes(tops));
  Floats sum(0.0f);
  for (int64_t i = 0; i < padded; i += kLanes) {
    Floats part = Exp(Load(scores + i) - largest).exp;
    if (i + kLanes > count) {  // Exp(-inf) gives e^-104, which is not exactly 0
      Store(scores + i, part);
      for (int64_t j = count; j < i + kLanes; ++j) scores[j] = 0.0f;
      part = Load(scores + i);
    }
    Store(scores + i, part);
    sum = sum + part;
  }
  return SumOfLanes(sum);
}

// Computes one head of one query. `scores` has room for key_count scores, rounded up to whole
// lanes.
inline void AttendHead(const AttentionInput& in, int64_t query, int64_t head, float* scores,
                       float* out) {
  const int64_t group = head / (in.num_heads / in.num_groups);
  const int64_t first = in.first_key[query], count = in.key_count[query];
  const float* q = in.queries + (query * in.num_heads + head) * in.key_size;
  const float* k = in.keys + (first * in.num_groups + group) * in.key_size;
  const float* v = in.values + (first * in.num_groups + group) * in.value_size;
  for (int64_t i = 0; i < count; ++i) {
    float product;
    DotColumns<1>(q, k + i * in.num_groups * in.key_size, in.key_size, &product);
    scores[i] = product * in.scale;
  }
  const float sum = ExpOfScores(scores, count);
  float* to = out + (query * in.num_heads + head) * in.value_size;
  for (int64_t column = 0; column < in.value_size; column += kLanes) {
    const int64_t width = std::min<int64_t>(kLanes, in.value_size - column);
    Floats total(0.0f);
    for (int64_t i = 0; i < count; ++i) {
      const float* from = v + i * in.num_groups * in.value_size + column;
      const Floats part = width == kLanes ? Load(from) : LoadSome(from, width);
      total = total + Floats(scores[i]) * part;
    }
    float lanes[kLanes];
    Store(lanes, total / Floats(sum));
    std::memcpy(to + column, lanes, width * sizeof(float));
  }
}

inline void SiluRun(const float* x, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t width = std::min<int64_t>(kLanes, count - i);
    const Floats part = width == kLanes ? Load(x + i) : LoadSome(x + i, width);
    float lanes[kLanes];
    Store(lanes, part / (Floats(1.0f) + Exp(Floats(0.0f) - part).exp));
    std::memcpy(out + i, lanes, width * sizeof(float));
  }
}
