// Passes over one tile or one row of logits.
//
// No include guard: compiled once for each instruction set, see cpu/for_each_target.h.

// Minimax fits of e^r for |r| <= ln(2)/2, highest power first, with errors of 3e-9 (fp32 rounding
// gives 6e-8), and of 3e-6 for results that are rounded to 16 bits.
constexpr float kExpFine[] = {1.3814596459e-3f,
                              8.3687175065e-3f,
                              4.1668388993e-2f,
                              1.6666521132e-1f,
                              4.9999994040e-1f,
                              1.0f,
                              1.0f};
constexpr float kExpCoarse[] = {4.1513808072e-2f, 1.6787499189e-1f, 5.0003015995e-1f,
                                9.9996680021e-1f, 1.0f};

constexpr float kLowest = -87.0f;  // below it e^y underflows to 0
constexpr float kHighest = 30.0f;  // the sum of 1,024 such e^y is far from overflow

// e^y for y from kLowest (1.6e-38, which does not change a sum) to kHighest. One fma of range
// reduction is enough: its error grows only with the exponent by which the result shrinks.
template <int kSize>
MRL_FN Floats ExpOfLogit(const Floats& y, const float (&coefficients)[kSize]) {
  const Floats round(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats shifted = y * Floats(1.44269504088896341f) + round;
  const Floats r = y - (shifted - round) * Floats(0.693147180559945f);
  Floats p(coefficients[0]);
  for (int i = 1; i < kSize; ++i) p = p * r + Floats(coefficients[i]);
  return AsFloats(AsInts(p) + (AsInts(shifted) << 23));
}

template <LogitType kType>
struct Logits;

template <>
struct Logits<LogitType::kFloat32> {
  typedef float Element;
  static MRL_FN Floats Read(const float* from) { return Load(from); }
  static MRL_FN void Write(float* to, const Floats& x) { Store(to, x); }
};

template <>
struct Logits<LogitType::kBfloat16> {
  typedef uint16_t Element;
  static MRL_FN Floats Read(const uint16_t* from) { return AsFloats(LoadShorts(from) << 16); }
  static MRL_FN void Write(uint16_t* to, const Floats& x) {
    // Round to nearest; ties (one value in 65,536) round away from 0.
    const Ints bits = AsInts(x);
    StoreShorts(to, Select(x != x, Ints(0x7fc0), (bits + 0x8000) >> 16));
  }
};

template <>
struct Logits<LogitType::kFloat16> {
  typedef uint16_t Element;
  static MRL_FN Floats Read(const uint16_t* from) {
    const Ints half = LoadShorts(from);
    const Ints sign = (half & 0x8000) << 16;
    const Ints magnitude = half & 0x7fff;
    // Rebiasing the exponent by a multiplication also turns subnormal halves into normal floats.
    const Floats finite = AsFloats(magnitude << 13) * Floats(5.192296858534828e33f);  // 2^112
    const Ints special = (magnitude << 13) | 0x7f800000;
    return AsFloats(Select(magnitude > Ints(0x7bff), special, AsInts(finite)) | sign);
  }
  static MRL_FN void Write(uint16_t* to, const Floats& x) {  // rounds to nearest, ties to even
    const Ints bits = AsInts(x);
    const Ints sign = (bits >> 16) & 0x8000;
    const Ints magnitude = bits & 0x7fffffff;
    const Ints normal = (magnitude + (((magnitude >> 13) & 1) + 0xfff) - (112 << 23)) >> 13;
    // Below 2^-14, adding 0.5 aligns the half's last bit with the float's last bit.
    const Ints subnormal = AsInts(AsFloats(magnitude) + Floats(0.5f)) - AsInts(Floats(0.5f));
    Ints result = Select(magnitude < Ints(0x38800000), subnormal, normal);
    result = Select(magnitude > Ints(0x477fefff), Ints(0x7c00), result);  // rounds to inf
    result = Select(magnitude > Ints(0x7f800000), Ints(0x7e00), result);  // NaN
    StoreShorts(to, result | sign);
  }
};

// Reads up to 32 elements; the other lanes are -inf.
template <LogitType kType>
MRL_FN Floats ReadSome(const typename Logits<kType>::Element* from, int64_t count) {
  typename Logits<kType>::Element padded[kLanes] = {};
  std::memcpy(padded, from, count * sizeof(padded[0]));
  float values[kLanes];
  Store(values, Logits<kType>::Read(padded));
  for (int64_t i = count; i < kLanes; ++i) values[i] = -__builtin_inff();
  return Load(values);
}

// Returns the largest of `size` columns.
template <LogitType kType>
MRL_FN float LargestOf(const typename Logits<kType>::Element* x, int64_t size) {
  Floats tops(-__builtin_inff());
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Floats y = Logits<kType>::Read(x + i);
    tops = Select(y > tops, y, tops);
  }
  if (i < size) {
    const Floats y = ReadSome<kType>(x + i, size - i);
    tops = Select(y > tops, y, tops);
  }
  return MaxOfLanes(tops);
}

// Computes sum e and sum e y, with y = x * scale - shift. Returns false if a y is above kHighest.
template <LogitType kType>
MRL_FN bool SumTile(const typename Logits<kType>::Element* x, int64_t size, float scale,
                    float shift, double* sums) {
  const Floats invt(scale), zero(shift);
  Ints tops(0);  // bits, which order like the positive floats, NaN on top
  sums[0] = sums[1] = 0;
  for (int64_t start = 0; start < size; start += kColumnBlock) {
    const int64_t end = std::min(size, start + kColumnBlock);
    Floats total(0.0f), weighted(0.0f);
    int64_t i = start;
    for (; i + kLanes <= end; i += kLanes) {
      const Floats y = AtLeast(kLowest, Logits<kType>::Read(x + i) * invt - zero);
      const Floats e = ExpOfLogit(y, kExpFine);
      total = total + e;
      weighted = weighted + e * y;
      tops = LargerBits(tops, AsInts(y));
    }
    if (i < end) {
      const Floats y = AtLeast(kLowest, ReadSome<kType>(x + i, end - i) * invt - zero);
      const Floats e = ExpOfLogit(y, kExpFine);
      total = total + e;
      weighted = weighted + e * y;
      tops = LargerBits(tops, AsInts(y));
    }
    sums[0] += SumOfLanes(total);
    sums[1] += SumOfLanes(weighted);
  }
  return LargestOfLanes(tops) <= kHighest;
}

// Computes a tile's fields. The exponentials are relative to the largest of its first columns,
// which is usually near enough to the largest of all; otherwise the pass is repeated with that.
template <LogitType kType>
MRL_FN void ReduceTileOf(const typename Logits<kType>::Element* x, int64_t size, float scale,
                         float* fields) {
  double sums[2];
  float shift = LargestOf<kType>(x, std::min<int64_t>(size, 2 * kLanes)) * scale;
  if (!std::isfinite(shift) || !SumTile<kType>(x, size, scale, shift, sums)) {
    shift = LargestOf<kType>(x, size) * scale;
    const bool empty = shift == -__builtin_inff();  // all columns are masked out, or NaN
    SumTile<kType>(x, size, scale, empty ? 0.0f : shift, sums);
    if (empty && sums[0] == sums[0]) sums[0] = sums[1] = 0;
  }
  // The bit arithmetic of the exponential may lose a NaN; the product with y does not.
  if (sums[1] != sums[1]) sums[0] = sums[1];
  fields[0] = shift;
  fields[1] = static_cast<float>(sums[0]);
  fields[2] = static_cast<float>(sums[1]);
}

// grad = p (offset + slope * log p), p = exp(x * scale - lse).
template <LogitType kType>
MRL_FN Floats GradientOf(const Floats& x, const Floats& invt, const Floats& lse,
                         const Floats& offset, const Floats& slope) {
  const Floats y = AtLeast(kLowest, x * invt - lse);
  if constexpr (kType == LogitType::kFloat32) {
    return ExpOfLogit(y, kExpFine) * (slope * y + offset);
  }
  return ExpOfLogit(y, kExpCoarse) * (slope * y + offset);
}

template <LogitType kType>
MRL_FN void BackwardRowOf(const typename Logits<kType>::Element* x, int64_t size,
                          const RowGradient& row, typename Logits<kType>::Element* grad) {
  const Floats invt(row.inv_temperature), lse(row.lse), offset(row.offset), slope(row.slope);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Floats y = Logits<kType>::Read(x + i);
    Logits<kType>::Write(grad + i, GradientOf<kType>(y, invt, lse, offset, slope));
  }
  if (i == size) return;
  typename Logits<kType>::Element last[kLanes];
  const Floats y = ReadSome<kType>(x + i, size - i);
  Logits<kType>::Write(last, GradientOf<kType>(y, invt, lse, offset, slope));
  std::memcpy(grad + i, last, (size - i) * sizeof(last[0]));
}

inline void ReduceTile(LogitType type, const void* x, int64_t size, float scale, float* fields) {
  if (type == LogitType::kFloat32) {
    ReduceTileOf<LogitType::kFloat32>(static_cast<const float*>(x), size, scale, fields);
  } else if (type == LogitType::kBfloat16) {
    ReduceTileOf<LogitType::kBfloat16>(static_cast<const uint16_t*>(x), size, scale, fields);
  } else {
    ReduceTileOf<LogitType::kFloat16>(static_cast<const uint16_t*>(x), size, scale, fields);
  }
}

inline void BackwardRow(LogitType type, const void* x, int64_t size, const RowGradient& row,
                        void* grad) {
  if (type == LogitType::kFloat32) {
    BackwardRowOf<LogitType::kFloat32>(static_cast<const float*>(x), size, row,
                                       static_cast<float*>(grad));
  } else if (type == LogitType::kBfloat16) {
    BackwardRowOf<LogitType::kBfloat16>(static_cast<const uint16_t*>(x), size, row,
                                        static_cast<uint16_t*>(grad));
  } else {
    BackwardRowOf<LogitType::kFloat16>(static_cast<const uint16_t*>(x), size, row,
                                       static_cast<uint16_t*>(grad));
  }
}

// Converts one element like the vector code.
inline float ReadOne(LogitType type, const void* from) {
  float lanes[kLanes];
  if (type == LogitType::kFloat32) return *static_cast<const float*>(from);
  const auto* bits = static_cast<const uint16_t*>(from);
  Store(lanes, type == LogitType::kBfloat16 ? ReadSome<LogitType::kBfloat16>(bits, 1)
                                            : ReadSome<LogitType::kFloat16>(bits, 1));
  return lanes[0];
}

inline void WriteOne(LogitType type, void* to, float x) {
  if (type == LogitType::kFloat32) {
    *static_cast<float*>(to) = x;
    return;
  }
  uint16_t lanes[kLanes];
  type == LogitType::kBfloat16 ? Logits<LogitType::kBfloat16>::Write(lanes, Floats(x))
                               : Logits<LogitType::kFloat16>::Write(lanes, Floats(x));
  *static_cast<uint16_t*>(to) = lanes[0];
}
