// Attention of one tile of queries in one group of heads.
//
// No include guard: compiled once for each instruction set, see cpu/for_each_target.h.

#include "exp_terms.h"

// Eight lanes for every instruction set, because head sizes are multiples of eight.
typedef float Eight __attribute__((vector_size(32)));
typedef int32_t EightInts __attribute__((vector_size(32)));

MRL_FN Eight LoadEight(const float* from) {
  Eight x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

MRL_FN void StoreEight(float* to, const Eight& x) { std::memcpy(to, &x, sizeof(x)); }

// Lane i of the result is the sum over the lanes of x[i]: the upper half is added to the lower
// half until one lane is left.
MRL_FN Eight SumEach(const Eight (&x)[8]) {
  const EightInts low4 = {0, 1, 2, 3, 8, 9, 10, 11}, high4 = {4, 5, 6, 7, 12, 13, 14, 15};
  const EightInts low2 = {0, 1, 8, 9, 4, 5, 12, 13}, high2 = {2, 3, 10, 11, 6, 7, 14, 15};
  const EightInts low1 = {0, 8, 2, 10, 4, 12, 6, 14}, high1 = {1, 9, 3, 11, 5, 13, 7, 15};
  Eight four[4], two[2];
  for (int i = 0; i < 4; ++i) {
    four[i] = __builtin_shuffle(x[i], x[i + 4], low4) + __builtin_shuffle(x[i], x[i + 4], high4);
  }
  for (int i = 0; i < 2; ++i) {
    two[i] = __builtin_shuffle(four[i], four[i + 2], low2) +
             __builtin_shuffle(four[i], four[i + 2], high2);
  }
  return __builtin_shuffle(two[0], two[1], low1) + __builtin_shuffle(two[0], two[1], high1);
}

// scores[r][at + i] = scale q_r . keys[i] for kRows rows and eight keys. As many keys are read
// together as there are registers for their sums.
template <int kRows>
MRL_FN void ScoreEight(const float* q, const float* const* keys, int64_t size, float scale,
                       int64_t at, float (*scores)[kAttentionBlock]) {
  constexpr int kKeys = kRows == 1 ? 8 : kRows == 4 ? 2 : 4;
  Eight sums[kRows][8];
  for (int first = 0; first < 8; first += kKeys) {
    Eight parts[kRows][kKeys] = {};
    for (int64_t i = 0; i < size; i += kEight) {
      for (int k = 0; k < kKeys; ++k) {
        const Eight key = LoadEight(keys[first + k] + i);
        for (int r = 0; r < kRows; ++r) parts[r][k] += LoadEight(q + r * size + i) * key;
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int k = 0; k < kKeys; ++k) sums[r][first + k] = parts[r][k];
    }
  }
  for (int r = 0; r < kRows; ++r) StoreEight(scores[r] + at, SumEach(sums[r]) * scale);
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

// Returns `size` elements from `offset` on as floats: as they are stored, or widened into a row of
// `buffer`.
template <class Element>
MRL_FN const float* Widened(const void* stored, int64_t offset, int64_t row, int64_t size,
                            std::vector<float>* buffer) {
  const auto* from = static_cast<const typename Element::Stored*>(stored) + offset;
  if constexpr (std::is_same_v<Element, Float32Element>) {
    return from;
  } else {
    float* to = buffer->data() + row * size;
    for (int64_t i = 0; i < size; ++i) to[i] = Element::Read(from[i]);
    return to;
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
    const float shrink = scalar::Exp(before - largest).exp;  // of -inf it multiplies zeros
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
    scratch->largest[row] = -__builtin_inff();
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
    case CacheType::kBfloat16:
      return AttendTileOf<Bfloat16Element>(in, tile, group, scratch, out);
    case CacheType::kFloat16:
      return AttendTileOf<Float16Element>(in, tile, group, scratch, out);
    default:
      return AttendTileOf<Float32Element>(in, tile, group, scratch, out);
  }
}
