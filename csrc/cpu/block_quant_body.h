// 32 elements at a time of the kernels of block_quant.h.
//
// A product is not contracted with the addition that follows: between the two its sign bit is
// masked out as an integer.
//
// No include guard: compiled once for each instruction set, see cpu/for_each_target.h.

template <FloatType kType>
struct QuantElements;

template <>
struct QuantElements<FloatType::kFloat32> {
  typedef float Stored;
  static MRL_FN Floats Read(const float* from) { return Load(from); }
  static MRL_FN void Write(float* to, const Floats& x) { Store(to, x); }
};

template <>
struct QuantElements<FloatType::kBfloat16> {
  typedef uint16_t Stored;
  static MRL_FN Floats Read(const uint16_t* from) { return AsFloats(LoadShorts(from) << 16); }
  static MRL_FN void Write(uint16_t* to, const Floats& x) {  // ties to even
    const Ints bits = AsInts(x);
    const Ints rounded = (bits + (((bits >> 16) & 1) + 0x7fff)) >> 16;
    StoreShorts(to, Select(x != x, Ints(0x7fc0), rounded));
  }
};

template <>
struct QuantElements<FloatType::kFloat16> {
  typedef uint16_t Stored;
  static MRL_FN Floats Read(const uint16_t* from) {
    const Ints half = LoadShorts(from);
    const Ints sign = (half & 0x8000) << 16, magnitude = half & 0x7fff;
    // Rebiasing the exponent by a multiplication also turns subnormal halves into normal floats.
    const Floats finite = AsFloats(magnitude << 13) * Floats(5.192296858534828e33f);  // 2^112
    const Ints special = (magnitude << 13) | 0x7f800000;
    return AsFloats(Select(magnitude > Ints(0x7bff), special, AsInts(finite)) | sign);
  }
  static MRL_FN void Write(uint16_t* to, const Floats& x) {  // ties to even
    const Ints bits = AsInts(x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    const Ints normal = (magnitude + (((magnitude >> 13) & 1) + 0xfff) - (112 << 23)) >> 13;
    // Below 2^-14, adding 0.5 aligns the half's last bit with the float's last bit.
    const Ints subnormal = AsInts(AsFloats(magnitude) + Floats(0.5f)) - AsInts(Floats(0.5f));
    Ints result = Select(magnitude < Ints(0x38800000), subnormal, normal);
    result = Select(magnitude > Ints(0x477fefff), Ints(0x7c00), result);  // rounds to inf
    result = Select(magnitude > Ints(0x7f800000), Ints(0x7e00), result);  // NaN
    StoreShorts(to, result | sign);
  }
};

// Calls function(from, to, count) for `count` elements, 32 or fewer at a time. It may read and
// write 32 elements each time: fewer are in buffers of that size, where the other elements are 0.
template <class From, class To, class Function>
MRL_FN void ForEachPart(const From* from, To* to, int64_t count, Function&& function) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) function(from + i, to + i);
  if (i == count) return;
  From padded[kLanes] = {};
  To results[kLanes] = {};
  std::memcpy(padded, from + i, (count - i) * sizeof(From));
  function(padded, results);
  std::memcpy(to + i, results, (count - i) * sizeof(To));
}

template <FloatType kType>
MRL_FN Ints AmaxBits(const typename QuantElements<kType>::Stored* x, int64_t count, Ints bits) {
  typedef typename QuantElements<kType>::Stored Stored;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    bits = LargerBits(bits, AsInts(QuantElements<kType>::Read(x + i)) & 0x7fffffff);
  }
  if (i == count) return bits;
  Stored padded[kLanes] = {};
  std::memcpy(padded, x + i, (count - i) * sizeof(Stored));
  return LargerBits(bits, AsInts(QuantElements<kType>::Read(padded)) & 0x7fffffff);
}

MRL_FN void StoreBytes(uint8_t* to, const Ints& x) {
#if MRL_WIDTH == 16
  for (int i = 0; i < kParts; ++i) {
    _mm_storeu_si128((__m128i*)(to + i * MRL_WIDTH),
                     _mm512_maskz_cvtepi32_epi8((__mmask16)-1, (__m512i)x.part[i]));
  }
#else
  int32_t lanes[kLanes];
  std::memcpy(lanes, &x, sizeof(lanes));
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<uint8_t>(lanes[i]);
#endif
}

MRL_FN Ints LoadBytes(const uint8_t* from) {
  Ints r;
  for (int i = 0; i < kParts; ++i) r.part[i] = WidenBytes(from + i * MRL_WIDTH);
  return r;
}

// e4m3 has 3 bits of fraction and the exponent bias 7; below 2^-6 its numbers are multiples of
// 2^-9. The sum of a number below 2^-6 and 2^14 is rounded to such a multiple.
constexpr float kFp8Normal = 0x1p-6f, kFp8Aligner = 0x1p14f;
constexpr int32_t kFp8Bias = (127 - 7) << 23;

MRL_FN Ints RoundedToFp8(const Ints& magnitude) {  // bits of a float, of which 20 are cut off
  return magnitude + (((magnitude >> 20) & 1) + 0x7ffff);
}

// The e4m3fn bits of x for |x| < 464.
MRL_FN Ints Fp8Bits(const Floats& x) {
  const Ints bits = AsInts(x), magnitude = bits & 0x7fffffff;
  const Ints normal = (RoundedToFp8(magnitude) - kFp8Bias) >> 20;
  const Ints aligned = AsInts(AsFloats(magnitude) + Floats(kFp8Aligner));
  const Ints subnormal = aligned - AsInts(Floats(kFp8Aligner));
  return Select(AsFloats(magnitude) < Floats(kFp8Normal), subnormal, normal) |
         ((bits >> 24) & 0x80);
}

// x rounded to e4m3, for |x| < 464 or NaN.
MRL_FN Floats RoundToFp8(const Floats& x) {
  const Ints bits = AsInts(x), magnitude = bits & 0x7fffffff;
  const Ints normal = RoundedToFp8(magnitude) & ~0xfffff;
  const Ints subnormal = AsInts(AsFloats(magnitude) + Floats(kFp8Aligner) - Floats(kFp8Aligner));
  const Ints rounded = Select(AsFloats(magnitude) < Floats(kFp8Normal), subnormal, normal);
  return Select(x != x, x, AsFloats(rounded | (bits & ~0x7fffffff)));
}

MRL_FN Floats Fp8Values(const Ints& q) {
  const Ints magnitude = q & 0x7f;
  const Ints normal = (magnitude << 20) + kFp8Bias;
  const Floats aligner(kFp8Aligner);
  const Ints subnormal = AsInts(AsFloats(AsInts(aligner) + magnitude) - aligner);
  Ints values = Select(magnitude < Ints(8), subnormal, normal);
  values = Select(magnitude == Ints(0x7f), Ints(0x7fc00000), values);
  return AsFloats(values | ((q & 0x80) << 24));
}

// |x| rounded to an integer, with ties away from zero, for |x| < 2^22: first with ties to even.
MRL_FN Floats RoundedMagnitude(const Floats& magnitude) {
  const Floats aligner(0x1p23f), even = magnitude + aligner - aligner;
  return Select(magnitude - even == Floats(0.5f), even + Floats(1.0f), even);
}

MRL_FN Floats RoundToInt8(const Floats& x) {
  const Ints bits = AsInts(x);
  const Floats rounded = RoundedMagnitude(AsFloats(bits & 0x7fffffff));
  return AsFloats(AsInts(rounded) | (bits & ~0x7fffffff));
}

MRL_FN Ints Int8Bits(const Floats& x) {  // two's complement, in the low 8 bits
  const Floats aligner(0x1.8p23f);
  return AsInts(RoundToInt8(x) + aligner) - AsInts(aligner);
}

MRL_FN Floats Int8Values(const Ints& q) {
  const Floats aligner(0x1.8p23f);
  return AsFloats(AsInts(aligner) + ((q << 24) >> 24)) - aligner;
}

template <FloatType kType>
MRL_FN void Fp8Block(const QuantInput& in, bool powers_of_two, int64_t row, int64_t column,
                     uint8_t* q, float* scale) {
  typedef typename QuantElements<kType>::Stored Stored;
  const int64_t num_rows = std::min(kQuantBlock, in.num_rows - row);
  const int64_t num_columns = std::min(kQuantBlock, in.num_columns - column);
  const int64_t start = row * in.num_columns + column;
  const Stored* x = static_cast<const Stored*>(in.x) + start;
  Ints bits(0);
  for (int64_t i = 0; i < num_rows; ++i) {
    bits = AmaxBits<kType>(x + i * in.num_columns, num_columns, bits);
  }
  const QuantScale found = Fp8WeightScale(scalar::AsInts(LargestOfLanes(bits)), powers_of_two);
  *scale = found.scale;
  const Floats factor(found.factor);
  for (int64_t i = 0; i < num_rows; ++i) {
    ForEachPart(x + i * in.num_columns, q + start + i * in.num_columns, num_columns,
                [&](const Stored* from, uint8_t* to) {
                  StoreBytes(to, Fp8Bits(QuantElements<kType>::Read(from) * factor));
                });
  }
}

template <FloatType kType>
MRL_FN void Int8Row(const QuantInput& in, int64_t row, uint8_t* q, float* scale) {
  typedef typename QuantElements<kType>::Stored Stored;
  const Stored* x = static_cast<const Stored*>(in.x) + row * in.num_columns;
  const Ints bits = AmaxBits<kType>(x, in.num_columns, Ints(0));
  const QuantScale found = Int8WeightScale(scalar::AsInts(LargestOfLanes(bits)));
  *scale = found.scale;
  const Floats factor(found.factor);
  ForEachPart(x, q + row * in.num_columns, in.num_columns, [&](const Stored* from, uint8_t* to) {
    StoreBytes(to, Int8Bits(QuantElements<kType>::Read(from) * factor));
  });
}

// `count` columns of one row from `column` on: a group.
template <FloatType kType, bool kFp8>
MRL_FN void FakeGroup(const QuantInput& in, int64_t row, int64_t column, int64_t count, void* out) {
  typedef typename QuantElements<kType>::Stored Stored;
  const int64_t start = row * in.num_columns + column;
  const Stored* x = static_cast<const Stored*>(in.x) + start;
  const Ints bits = AmaxBits<kType>(x, count, Ints(0));
  const float amax = QuantAmax(scalar::AsInts(LargestOfLanes(bits)));
  const QuantScale found = kFp8 ? Fp8Scale(amax) : Int8Scale(amax);
  const Floats factor(found.factor), scale(found.scale);
  ForEachPart(x, static_cast<Stored*>(out) + start, count, [&](const Stored* from, Stored* to) {
    const Floats scaled = QuantElements<kType>::Read(from) * factor;
    QuantElements<kType>::Write(to, (kFp8 ? RoundToFp8(scaled) : RoundToInt8(scaled)) * scale);
  });
}

// `count` columns of one row from `column` on, all of one scale.
template <FloatType kType, bool kFp8>
MRL_FN void DequantizePart(const DequantInput& in, int64_t row, int64_t column, int64_t count,
                           float scale, void* out) {
  typedef typename QuantElements<kType>::Stored Stored;
  const int64_t start = row * in.num_columns + column;
  const Floats scales(scale);
  ForEachPart(in.q + start, static_cast<Stored*>(out) + start, count,
              [&](const uint8_t* from, Stored* to) {
                const Ints q = LoadBytes(from);
                QuantElements<kType>::Write(to, (kFp8 ? Fp8Values(q) : Int8Values(q)) * scales);
              });
}

template <class Function>
MRL_FN void WithFloatType(FloatType type, Function&& function) {
  switch (type) {
    case FloatType::kFloat32:
      return function(std::integral_constant<FloatType, FloatType::kFloat32>());
    case FloatType::kBfloat16:
      return function(std::integral_constant<FloatType, FloatType::kBfloat16>());
    case FloatType::kFloat16:
      return function(std::integral_constant<FloatType, FloatType::kFloat16>());
  }
}

// The blocks of one row of blocks, from number `first` to `last`, counted over all rows.
inline void Fp8Blocks(const QuantInput& in, bool powers_of_two, int64_t first, int64_t last,
                      uint8_t* q, float* scales) {
  const int64_t per_row = (in.num_columns + kQuantBlock - 1) / kQuantBlock;
  WithFloatType(in.type, [&](auto type) {
    for (int64_t block = first; block < last; ++block) {
      Fp8Block<type.value>(in, powers_of_two, block / per_row * kQuantBlock,
                           block % per_row * kQuantBlock, q, scales + block);
    }
  });
}

inline void Int8Rows(const QuantInput& in, int64_t first, int64_t last, uint8_t* q, float* scales) {
  WithFloatType(in.type, [&](auto type) {
    for (int64_t row = first; row < last; ++row) Int8Row<type.value>(in, row, q, scales + row);
  });
}

inline void FakeFp8Rows(const QuantInput& in, int64_t group, int64_t first, int64_t last,
                        void* out) {
  WithFloatType(in.type, [&](auto type) {
    for (int64_t row = first; row < last; ++row) {
      for (int64_t column = 0; column < in.num_columns; column += group) {
        FakeGroup<type.value, true>(in, row, column, std::min(group, in.num_columns - column), out);
      }
    }
  });
}

inline void FakeInt8Rows(const QuantInput& in, int64_t first, int64_t last, void* out) {
  WithFloatType(in.type, [&](auto type) {
    for (int64_t row = first; row < last; ++row) {
      FakeGroup<type.value, false>(in, row, 0, in.num_columns, out);
    }
  });
}

inline void DequantizeFp8Rows(const DequantInput& in, int64_t first, int64_t last, void* out) {
  const int64_t per_row = (in.num_columns + kQuantBlock - 1) / kQuantBlock;
  WithFloatType(in.type, [&](auto type) {
    for (int64_t row = first; row < last; ++row) {
      const float* scales = in.scales + row / kQuantBlock * per_row;
      for (int64_t column = 0; column < in.num_columns; column += kQuantBlock) {
        DequantizePart<type.value, true>(in, row, column,
                                         std::min(kQuantBlock, in.num_columns - column),
                                         scales[column / kQuantBlock], out);
      }
    }
  });
}

inline void DequantizeInt8Rows(const DequantInput& in, int64_t first, int64_t last, void* out) {
  WithFloatType(in.type, [&](auto type) {
    for (int64_t row = first; row < last; ++row) {
      DequantizePart<type.value, false>(in, row, 0, in.num_columns, in.scales[row], out);
    }
  });
}
