// One expert's tokens, and the sum of one token's experts.
//
// No include guard: compiled once for each instruction set, see cpu/for_each_target.h.

#include "cpu/dot_rows.h"
#include "exp_terms.h"

// out[row][n] = rows[row] . weight[n] for all n: rows are `stride` apart, weight is [count, size].
template <class Element>
inline void Project(const float* rows, int64_t stride, int64_t num_rows, const void* weight,
                    int64_t offset, int64_t count, int64_t size, std::vector<float>* widened,
                    float* const* out) {
  for (int64_t n = 0; n < count; n += kEight) {
    const float* others[kEight];
    for (int64_t i = 0; i < kEight; ++i) {
      others[i] = Widened<Element>(weight, offset + (n + i) * size, i, size, widened);
    }
    int64_t row = 0;
    for (; row + 4 <= num_rows; row += 4) {
      Eight dots[4];
      DotEight<4>(rows + row * stride, stride, others, size, &dots);
      for (int r = 0; r < 4; ++r) StoreEight(out[row + r] + n, dots[r]);
    }
    for (; row < num_rows; ++row) {
      Eight dots[1];
      DotEight<1>(rows + row * stride, stride, others, size, &dots);
      StoreEight(out[row] + n, dots[0]);
    }
  }
}

// Writes the gated activation of a row of products [2 I] to `to` [I], with room for whole vectors.
inline void Activate(const FusedExpertsInput& in, float* products, float* pairs, float* to) {
  const int64_t size = in.expert_size;
  const float *gates = products, *ups = products + size;
  if (in.interleaved) {
    float* own_ups = pairs + (size + kLanes);
    for (int64_t i = 0; i < size; ++i) {
      pairs[i] = products[2 * i];
      own_ups[i] = products[2 * i + 1];
    }
    gates = pairs;
    ups = own_ups;
  }
  for (int64_t i = 0; i < size; i += kLanes) {
    Floats gate = Load(gates + i), up = Load(ups + i);
    if (in.limit >= 0) {
      gate = AtMost(Floats(in.limit), gate);
      up = AtLeast(Floats(-in.limit), AtMost(Floats(in.limit), up));
    }
    const Floats exp = Exp(gate * Floats(-in.alpha)).exp;
    Store(to + i, gate / (exp + Floats(1.0f)) * (up + Floats(in.up_shift)));
  }
}

// Computes expert `expert` for `count` of the pairs (token, place in its route), which are numbered
// token * k + place, and writes the results to the pairs' rows of `outputs` [T k, H].
template <class Element>
inline void ExpertTileOf(const FusedExpertsInput& in, int64_t expert, const int64_t* pairs,
                         int64_t count, ExpertScratch* scratch, float* outputs) {
  const int64_t hidden = in.hidden_size, size = in.expert_size;
  const auto* x = static_cast<const typename Element::Stored*>(in.x);
  for (int64_t r = 0; r < count; ++r) {
    const auto* from = x + pairs[r] / in.top_k * hidden;
    float* to = scratch->inputs.data() + r * hidden;
    for (int64_t i = 0; i < hidden; ++i) to[i] = Element::Read(from[i]);
    scratch->rows[r] = scratch->products.data() + r * scratch->product_stride;
  }
  Project<Element>(scratch->inputs.data(), hidden, count, in.w13, expert * 2 * size * hidden,
                   2 * size, hidden, &scratch->widened, scratch->rows.data());
  for (int64_t r = 0; r < count; ++r) {
    float* products = scratch->rows[r];
    if (in.w13_bias) {
      const float* bias = in.w13_bias + expert * 2 * size;
      for (int64_t i = 0; i < 2 * size; ++i) products[i] += bias[i];
    }
    Activate(in, products, scratch->pairs.data(),
             scratch->activated.data() + r * scratch->activated_stride);
    scratch->rows[r] = outputs + pairs[r] * hidden;
  }
  Project<Element>(scratch->activated.data(), scratch->activated_stride, count, in.w2,
                   expert * hidden * size, hidden, size, &scratch->widened, scratch->rows.data());
  if (!in.w2_bias) return;
  for (int64_t r = 0; r < count; ++r) {
    const float* bias = in.w2_bias + expert * hidden;
    for (int64_t i = 0; i < hidden; ++i) scratch->rows[r][i] += bias[i];
  }
}

// Writes the sum of a token's experts, in the order of its route.
template <class Element>
inline void SumTokenOf(const FusedExpertsInput& in, int64_t token, const float* outputs,
                       void* out) {
  auto* to = static_cast<typename Element::Stored*>(out) + token * in.hidden_size;
  for (int64_t i = 0; i < in.hidden_size; i += kEight) {
    Eight sum = {};
    for (int64_t pair = token * in.top_k; pair < (token + 1) * in.top_k; ++pair) {
      if (in.ids[pair] < 0) continue;
      sum += in.weights[pair] * LoadEight(outputs + pair * in.hidden_size + i);
    }
    for (int64_t k = 0; k < kEight; ++k) to[i + k] = Element::Write(sum[k]);
  }
}

inline void ExpertTile(const FusedExpertsInput& in, int64_t expert, const int64_t* pairs,
                       int64_t count, ExpertScratch* scratch, float* outputs) {
  switch (in.type) {
    case FloatType::kBfloat16:
      return ExpertTileOf<Bfloat16Element>(in, expert, pairs, count, scratch, outputs);
    case FloatType::kFloat16:
      return ExpertTileOf<Float16Element>(in, expert, pairs, count, scratch, outputs);
    default:
      return ExpertTileOf<Float32Element>(in, expert, pairs, count, scratch, outputs);
  }
}

inline void SumToken(const FusedExpertsInput& in, int64_t token, const float* outputs, void* out) {
  switch (in.type) {
    case FloatType::kBfloat16:
      return SumTokenOf<Bfloat16Element>(in, token, outputs, out);
    case FloatType::kFloat16:
      return SumTokenOf<Float16Element>(in, token, outputs, out);
    default:
      return SumTokenOf<Float32Element>(in, token, outputs, out);
  }
}
