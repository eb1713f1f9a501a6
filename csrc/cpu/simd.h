// 32 fp32 lanes, whatever the machine's vector width: two AVX-512 registers, of which one hides the
// other's latency, or four AVX2 or eight SSE registers. The assignment to lanes does not depend on
// the width, so the order of summation is always the same.
//
// No include guard: for_each_target.h includes this once per instruction set, in separate
// namespaces and with MRL_WIDTH set. Loads and stores need no alignment.

constexpr int kParts = kLanes / MRL_WIDTH;

typedef float FloatPart __attribute__((vector_size(MRL_WIDTH * 4)));
typedef int32_t IntPart __attribute__((vector_size(MRL_WIDTH * 4)));

// Also masks: -1 is true, 0 is false.
struct Ints {
  IntPart part[kParts];
  Ints() = default;
  MRL_FN Ints(int32_t value) {
    for (auto& p : part) p = IntPart{} + value;
  }
};

struct Floats {
  FloatPart part[kParts];
  Floats() = default;
  MRL_FN Floats(float value) {
    for (auto& p : part) p = FloatPart{} + value;
  }
};

#define MRL_LANES(Result, Left, Right, expression)                               \
  MRL_FN Result operator expression(const Left& a, const Right& b) {             \
    Result r;                                                                    \
    for (int i = 0; i < kParts; ++i) r.part[i] = a.part[i] expression b.part[i]; \
    return r;                                                                    \
  }
MRL_LANES(Floats, Floats, Floats, +)
MRL_LANES(Floats, Floats, Floats, -)
MRL_LANES(Floats, Floats, Floats, *)
MRL_LANES(Floats, Floats, Floats, /)
MRL_LANES(Ints, Floats, Floats, <)
MRL_LANES(Ints, Floats, Floats, >)
MRL_LANES(Ints, Floats, Floats, ==)
MRL_LANES(Ints, Floats, Floats, !=)
MRL_LANES(Ints, Ints, Ints, <)
MRL_LANES(Ints, Ints, Ints, >)
MRL_LANES(Ints, Ints, Ints, !=)
MRL_LANES(Ints, Ints, Ints, ==)
MRL_LANES(Ints, Ints, Ints, +)
MRL_LANES(Ints, Ints, Ints, -)
MRL_LANES(Ints, Ints, Ints, &)
MRL_LANES(Ints, Ints, Ints, |)
MRL_LANES(Ints, Ints, Ints, <<)
MRL_LANES(Ints, Ints, Ints, >>)
#undef MRL_LANES

MRL_FN Floats Select(const Ints& mask, const Floats& a, const Floats& b) {
  Floats r;
  for (int i = 0; i < kParts; ++i) r.part[i] = mask.part[i] ? a.part[i] : b.part[i];
  return r;
}

MRL_FN Ints Select(const Ints& mask, const Ints& a, const Ints& b) {
  Ints r;
  for (int i = 0; i < kParts; ++i) r.part[i] = mask.part[i] ? a.part[i] : b.part[i];
  return r;
}

// Part by part, because a copy of the whole struct would go through memory.
MRL_FN Ints AsInts(const Floats& x) {
  Ints r;
  for (int i = 0; i < kParts; ++i) r.part[i] = (IntPart)x.part[i];
  return r;
}

MRL_FN Floats AsFloats(const Ints& x) {
  Floats r;
  for (int i = 0; i < kParts; ++i) r.part[i] = (FloatPart)x.part[i];
  return r;
}

MRL_FN Floats Load(const float* from) {
  Floats r;
  for (int i = 0; i < kParts; ++i) std::memcpy(&r.part[i], from + i * MRL_WIDTH, sizeof(r.part[i]));
  return r;
}

MRL_FN void Store(float* to, const Floats& x) {
  for (int i = 0; i < kParts; ++i) std::memcpy(to + i * MRL_WIDTH, &x.part[i], sizeof(x.part[i]));
}

// GCC 12 compiles __builtin_convertvector to up to twenty instructions here instead of one. (maskz
// is used because the unmasked intrinsics cause warnings about uninitialised values.)
MRL_FN IntPart WidenBytes(const uint8_t* from) {
#if MRL_WIDTH == 16
  return (IntPart)_mm512_maskz_cvtepu8_epi32((__mmask16)-1, _mm_loadu_si128((const __m128i*)from));
#elif MRL_WIDTH == 8
  return (IntPart)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  return IntPart{from[0], from[1], from[2], from[3]};
#endif
}

MRL_FN IntPart WidenShorts(const uint16_t* from) {
#if MRL_WIDTH == 16
  return (IntPart)_mm512_maskz_cvtepu16_epi32((__mmask16)-1,
                                              _mm256_loadu_si256((const __m256i*)from));
#elif MRL_WIDTH == 8
  return (IntPart)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
#else
  return IntPart{from[0], from[1], from[2], from[3]};
#endif
}

MRL_FN void NarrowToShorts(uint16_t* to, const IntPart& x) {
#if MRL_WIDTH == 16
  _mm256_storeu_si256((__m256i*)to, _mm512_maskz_cvtepi32_epi16((__mmask16)-1, (__m512i)x));
#else
  for (int i = 0; i < MRL_WIDTH; ++i) to[i] = static_cast<uint16_t>(x[i]);
#endif
}

// True if the byte is not 0.
MRL_FN Ints LoadMask(const uint8_t* from) {
  Ints r;
  for (int i = 0; i < kParts; ++i) r.part[i] = WidenBytes(from + i * MRL_WIDTH) != 0;
  return r;
}

MRL_FN Ints LoadShorts(const uint16_t* from) {
  Ints r;
  for (int i = 0; i < kParts; ++i) r.part[i] = WidenShorts(from + i * MRL_WIDTH);
  return r;
}

// The low 16 bits of each lane.
MRL_FN void StoreShorts(uint16_t* to, const Ints& x) {
  for (int i = 0; i < kParts; ++i) NarrowToShorts(to + i * MRL_WIDTH, x.part[i]);
}

// Returns whether any of the bytes of 32 tokens is not 0.
MRL_FN bool AnyByte(const uint8_t* from) {
  uint64_t any = 0;
  for (int i = 0; i < kLanes; i += 8) {
    uint64_t word;
    std::memcpy(&word, from + i, sizeof(word));
    any |= word;
  }
  return any != 0;
}

MRL_FN Floats Magnitude(const Floats& x) { return AsFloats(AsInts(x) & 0x7fffffff); }

MRL_FN bool AllSmaller(const Floats& x, float bound) {  // false for NaN
  const Floats size = Magnitude(x);
#if MRL_WIDTH == 16
  __mmask16 smaller = 0xffff;
  for (const FloatPart& part : size.part) {
    smaller &= _mm512_cmp_ps_mask((__m512)part, _mm512_set1_ps(bound), _CMP_LT_OQ);
  }
  return smaller == 0xffff;
#else
  const Ints smaller = size < Floats(bound);
  uint64_t words[sizeof(smaller) / 8], all = ~uint64_t{0};
  std::memcpy(words, &smaller, sizeof(smaller));
  for (const uint64_t word : words) all &= word;
  return all == ~uint64_t{0};
#endif
}

// x 2^n for an integer n in [-150, 128].
MRL_FN Floats TimesPowerOfTwo(const Floats& x, const Floats& n) {
#if MRL_WIDTH == 16
  Floats r;
  for (int i = 0; i < kParts; ++i) {
    r.part[i] =
        (FloatPart)_mm512_maskz_scalef_ps((__mmask16)-1, (__m512)x.part[i], (__m512)n.part[i]);
  }
  return r;
#else
  const Floats round(12582912.0f);
  const Ints k = AsInts(n + round) - AsInts(round), half = k >> 1;  // two factors: see scalar.h
  return x * AsFloats((half + 127) << 23) * AsFloats((k - half + 127) << 23);
#endif
}

// AtLeast is the larger and AtMost the smaller of both; NaN if x is NaN.
MRL_FN Floats AtLeast(const Floats& bound, const Floats& x) {
#if MRL_WIDTH == 16
  Floats r;
  for (int i = 0; i < kParts; ++i) {
    r.part[i] =
        (FloatPart)_mm512_maskz_max_ps((__mmask16)-1, (__m512)bound.part[i], (__m512)x.part[i]);
  }
  return r;
#else
  return Select(x < bound, bound, x);
#endif
}

MRL_FN Floats AtMost(const Floats& bound, const Floats& x) {
#if MRL_WIDTH == 16
  Floats r;
  for (int i = 0; i < kParts; ++i) {
    r.part[i] =
        (FloatPart)_mm512_maskz_min_ps((__mmask16)-1, (__m512)bound.part[i], (__m512)x.part[i]);
  }
  return r;
#else
  return Select(x > bound, bound, x);
#endif
}

// Combines the upper half of the lanes with the lower half until one is left, an order that does
// not depend on the width.
template <class T, class Combine>
MRL_FN T Fold(const void* lanes, Combine&& combine) {
  typedef T Vector16 __attribute__((vector_size(64)));
  typedef T Vector8 __attribute__((vector_size(32)));
  typedef T Vector4 __attribute__((vector_size(16)));
  const char* at = static_cast<const char*>(lanes);
  Vector16 a16, b16;
  std::memcpy(&a16, at, 64);
  std::memcpy(&b16, at + 64, 64);
  a16 = combine(a16, b16);
  Vector8 a8, b8;
  std::memcpy(&a8, &a16, 32);
  std::memcpy(&b8, reinterpret_cast<const char*>(&a16) + 32, 32);
  a8 = combine(a8, b8);
  Vector4 a4, b4;
  std::memcpy(&a4, &a8, 16);
  std::memcpy(&b4, reinterpret_cast<const char*>(&a8) + 16, 16);
  a4 = combine(a4, b4);
  const T even = combine(a4[0], a4[2]), odd = combine(a4[1], a4[3]);
  return combine(even, odd);
}

struct Plus {
  template <class T>
  MRL_FN T operator()(const T& a, const T& b) const {
    return a + b;
  }
};

struct Larger {  // may ignore NaN
  template <class T>
  MRL_FN T operator()(const T& a, const T& b) const {
    return a > b ? a : b;
  }
};

MRL_FN float SumOfLanes(const Floats& x) { return Fold<float>(&x, Plus()); }
MRL_FN int32_t SumOfLanes(const Ints& x) { return Fold<int32_t>(&x, Plus()); }
MRL_FN float MaxOfLanes(const Floats& x) { return Fold<float>(&x, Larger()); }

// Non-negative floats are ordered like their bits, and NaN is above all of them.
MRL_FN Ints LargerBits(const Ints& a, const Ints& b) {
#if MRL_WIDTH == 16
  Ints r;
  for (int i = 0; i < kParts; ++i) {
    r.part[i] =
        (IntPart)_mm512_maskz_max_epi32((__mmask16)-1, (__m512i)a.part[i], (__m512i)b.part[i]);
  }
  return r;
#else
  return Select(a > b, a, b);
#endif
}

MRL_FN float LargestOfLanes(const Ints& bits) {
  const int32_t largest = Fold<int32_t>(&bits, Larger());
  float value;
  std::memcpy(&value, &largest, sizeof(value));
  return value;
}
