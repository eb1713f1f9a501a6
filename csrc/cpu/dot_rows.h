// Dot products of rows of floats, eight at a time, in one order of sums however many rows there
// are.
//
// No include guard: compiled once for each instruction set, see cpu/for_each_target.h.

// Eight lanes for every instruction set, because the rows' sizes are multiples of eight.
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

// (*dots)[r][i] = row r . others[i], for kRows rows that are `stride` apart. As many others are
// read together as there are registers for their sums. `size` is a multiple of eight.
template <int kRows>
MRL_FN void DotEight(const float* rows, int64_t stride, const float* const* others, int64_t size,
                     Eight (*dots)[kRows]) {
  constexpr int kTogether = kRows == 1 ? 8 : kRows == 4 && MRL_WIDTH < 16 ? 2 : 4;
  Eight sums[kRows][8];
  for (int first = 0; first < 8; first += kTogether) {
    Eight parts[kRows][kTogether] = {};
    for (int64_t i = 0; i < size; i += kEight) {
      for (int k = 0; k < kTogether; ++k) {
        const Eight other = LoadEight(others[first + k] + i);
        for (int r = 0; r < kRows; ++r) parts[r][k] += LoadEight(rows + r * stride + i) * other;
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int k = 0; k < kTogether; ++k) sums[r][first + k] = parts[r][k];
    }
  }
  for (int r = 0; r < kRows; ++r) (*dots)[r] = SumEach(sums[r]);
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
