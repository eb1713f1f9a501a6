// Attention of one tile of queries in one group of heads.
//
// No include guard: compiled once for each instruction set, see cpu/for_each_target.h.

#include "cpu/dot_rows.h"
#include "exp_terms.h"

// scores[r][at + i] = scale q_r . keys[i] for kRows rows and eight keys.
template <int kRows>
MRL_FN void ScoreEight(const float* q, const float* const* keys, int64_t size, float scale,
                       int64_t at, float (*scores)[kAttentionBlock]) {
  Eight dots[kRows];
  DotEight<kRows>(q, size, keys, size, &dots);
  for (int r = 0; r < kRows; ++r) StoreEight(scores[r] + at, dots[r] * scale);
}

// Replaces the scores in [first, last) by e^(score - largest). `largest` is that of the row so far,
// and becomes the new one. Returns the sum of the exponentials. Those of the other scores are not
// read; here they are at most 2e-45 each, which vanishes beside the exponential of the largest, 1.
MRL_FN float ExpOfBlock(float* scores, int64_t first, int64_t last, float* largest) {
  const int64_t padded = (last + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = 0; i < first; ++i) scores[i] = -__builtin_inff();
  for (int64_t i = last; i < padded; ++i) scores[i] = -__builtin_inff();
  Floats tops(*largest);
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Floats part = Load(scores + i);
    tops = Select(part > tops, part, tops);
  }
  *largest = MaxOfLanes(tops);
  const Floats top(*largest);
  Floats sum(0.0f);
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Floats part = Exp(Load(scores + i) - top).exp;
    Store(scores + i, part);
    sum = sum + part;
  }
  return SumOfLanes(sum);
}

// The exponentials of a block and the factors of the sums before it, for kRows rows.
template <int kRows>
struct Weights {
  alignas(64) float of_keys[kRows][kAttentionBlock];
  float shrink[kRows];
};

// sums[r] = sums[r] * shrink[r] + the values in [first, last) times their weights, in columns from
// `column` on: 8 kVectors at a time as long as possible, then fewer.
template <int kRows, int kVectors>
MRL_FN void AddValues(const Weights<kRows>& weights, const float* const* values, int64_t first,
                      int64_t last, int64_t size, int64_t column, float* sums) {
  for (; column + kVectors * kEight <= size; column += kVectors * kEight) {
    Eight parts[kRows][kVectors] = {};
    for (int64_t i = first; i < last; ++i) {
      for (int c = 0; c < kVectors; ++c) {
        const Eight value = LoadEight(values[i] + column + c * kEight);
        for (int r = 0; r < kRows; ++r) parts[r][c] += weights.of_keys[r][i] * value;
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kVectors; ++c) {
        float* to = sums + r * size + column + c * kEight;
        StoreEight(to, LoadEight(to) * weights.shrink[r] + parts[r][c]);
      }
    }
  }
  if constexpr (kVectors > 1) {
    AddValues<kRows, kVectors / 2>(weights, values, first, last, size, column, sums);
  }
}

// The first position that the query at `position` attends to.
MRL_FN int64_t FirstSeen(const PagedAttentionInput& in, int64_t position) {
  return in.window < 0 || position < in.window ? 0 : position - in.window;
}

// Sets the key and value rows of positions [first, last) of the block that begins at `block`; the
// key rows are padded to whole eights by repeating one. Returns false for a slot out of range.
template <class Element>
MRL_FN bool FindRows(const PagedAttentionInput& in, const int32_t* slots, int64_t group,
                     int64_t block, int64_t first, int64_t last, AttentionScratch* scratch) {
  for (int64_t i = first; i < last; ++i) {
    const int64_t slot = slots[block + i];
    if (slot < 0 || slot >= in.num_slots) return false;
    const int64_t key = slot * in.key_stride + group * in.key_head_stride;
    const int64_t value = slot * in.value_stride + group * in.value_head_stride;
    scratch->key_rows[i] = Widened<Element>(in.keys, key, i, in.key_size, &scratch->keys);
    scratch->value_rows[i] = Widened<Element>(in.values, value, i, in.value_size, &scratch->values);
  }
  for (int64_t i = first / kEight * kEight; i < first; ++i) {
    scratch->key_rows[i] = scratch->key_rows[first];
  }
  for (int64_t i = last; i % kEight; ++i) scratch->key_rows[i] = scratch->key_rows[first];
  return true;
}

// Adds positions [first, last) of a block to kRows rows from `row` on.
template <int kRows>
inline void AttendBlock(const PagedAttentionInput& in, int64_t row, int64_t first, int64_t last,
                        AttentionScratch* scratch) {
  Weights<kRows> weights;
  const float* q = scratch->queries.data() + row * in.key_size;
  for (int64_t i = first / kEight * kEight; i < last; i += kEight) {
    ScoreEight<kRows>(q, scratch->key_rows + i, in.key_size, in.scale, i, weights.of_keys);
  }
  for (int r = 0; r < kRows; ++r) {
    float& largest = scratch->largest[row + r];
    const float before = largest;
    const float sum = ExpOfBlock(weights.of_keys[r], first, last, &largest);
    const float shrink = scalar::Exp(before - largest).exp;  // at first it multiplies zeros
    scratch->weight[row + r] = scratch->weight[row + r] * shrink + sum;
    weights.shrink[r] = shrink;
  }
  constexpr int kVectors = kRows == 1 ? 8 : kRows == 2 ? 4 : 2;
  AddValues<kRows, kVectors>(weights, scratch->value_rows, first, last, in.value_size, 0,
                             scratch->sums.data() + row * in.value_size);
}

// The same for all heads of one query, up to four of which share the loads of keys and values.
inline void AttendHeads(const PagedAttentionInput& in, int64_t row, int64_t heads, int64_t first,
                        int64_t last, AttentionScratch* scratch) {
  for (; heads >= 4; heads -= 4, row += 4) AttendBlock<4>(in, row, first, last, scratch);
  if (heads == 3) AttendBlock<3>(in, row, first, last, scratch);
  if (heads == 2) AttendBlock<2>(in, row, first, last, scratch);
  if (heads == 1) AttendBlock<1>(in, row, first, last, scratch);
}

template <class Element>
inline bool AttendTileOf(const PagedAttentionInput& in, const QueryTile& tile, int64_t group,
                         AttentionScratch* scratch, void* out) {
  const int64_t heads = in.num_heads / in.num_groups, num_rows = tile.num_queries * heads;
  const auto* queries = static_cast<const typename Element::Stored*>(in.queries);
  for (int64_t row = 0; row < num_rows; ++row) {
    const auto* from = queries + (tile.first_query + row / heads) * in.query_stride +
                       (group * heads + row % heads) * in.query_head_stride;
    float* to = scratch->queries.data() + row * in.key_size;
    for (int64_t i = 0; i < in.key_size; ++i) to[i] = Element::Read(from[i]);
    scratch->largest[row] = -__FLT_MAX__;  // finite: a block may have scores of -inf alone
    scratch->weight[row] = 0;
  }
  std::fill_n(scratch->sums.begin(), num_rows * in.value_size, 0.0f);

  const int32_t* slots = in.slots + in.requests[tile.request] * in.slot_stride;
  const int64_t begin = FirstSeen(in, tile.first_position);
  const int64_t end = tile.first_position + tile.num_queries;
  for (int64_t block = begin / kAttentionBlock * kAttentionBlock; block < end;
       block += kAttentionBlock) {
    const int64_t block_end = std::min<int64_t>(block + kAttentionBlock, end);
    if (!FindRows<Element>(in, slots, group, block, std::max(begin, block) - block,
                           block_end - block, scratch)) {
      return false;
    }
    for (int64_t query = 0; query < tile.num_queries; ++query) {
      const int64_t position = tile.first_position + query;
      const int64_t first = std::max(FirstSeen(in, position), block);
      const int64_t last = std::min(position + 1, block_end);
      if (first >= last) continue;
      AttendHeads(in, query * heads, heads, first - block, last - block, scratch);
    }
  }

  auto* to = static_cast<typename Element::Stored*>(out);
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t query = tile.first_query + row / heads, head = group * heads + row % heads;
    const float* sums = scratch->sums.data() + row * in.value_size;
    for (int64_t i = 0; i < in.value_size; ++i) {
      to[(query * in.num_heads + head) * in.value_size + i] =
          Element::Write(sums[i] / scratch->weight[row]);
    }
  }
  return true;
}

// Returns false, and leaves the output unfinished, for a slot out of range.
inline bool AttendTile(const PagedAttentionInput& in, const QueryTile& tile, int64_t group,
                       AttentionScratch* scratch, void* out) {
  switch (in.type) {
    case FloatType::kBfloat16:
      return AttendTileOf<Bfloat16Element>(in, tile, group, scratch, out);
    case FloatType::kFloat16:
      return AttendTileOf<Float16Element>(in, tile, group, scratch, out);
    default:
      return AttendTileOf<Float32Element>(in, tile, group, scratch, out);
  }
}
