// Sums of mixed bits over a range of weights. The compiler vectorizes the loops.
//
// No include guard: compiled once for each instruction set, see cpu/for_each_target.h.

MRL_FN uint64_t Signed64(uint32_t mixed) {
  return static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(mixed)));
}

inline uint64_t SumFloat32(const uint32_t* __restrict bits, int64_t count) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += Signed64(MixBits(bits[i]));
  return sum;
}

inline uint64_t SumBfloat16(const uint16_t* __restrict bits, int64_t count) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i)
    sum += Signed64(MixBits(static_cast<uint32_t>(bits[i]) << 16));
  return sum;
}

// Widens IEEE halves to singles exactly; subnormal halves become normal singles.
inline uint64_t SumFloat16(const uint16_t* __restrict bits, int64_t count) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t sign = static_cast<uint32_t>(bits[i] & 0x8000u) << 16;
    const uint32_t rest = bits[i] & 0x7fffu;
    const uint32_t bias = rest < 0x7c00u ? 112u << 23 : 224u << 23;  // infinities and NaN: 255
    const float tiny = static_cast<float>(static_cast<int32_t>(rest)) * 0x1p-24f;
    uint32_t small;
    std::memcpy(&small, &tiny, sizeof small);
    const uint32_t wide = rest < 0x0400u ? small : (rest << 13) + bias;
    sum += Signed64(MixBits(sign | wide));
  }
  return sum;
}

inline uint64_t SumWeights(const void* weights, WeightType type, int64_t first, int64_t count) {
  if (type == WeightType::kFloat32) {
    return SumFloat32(static_cast<const uint32_t*>(weights) + first, count);
  }
  const uint16_t* halves = static_cast<const uint16_t*>(weights) + first;
  return type == WeightType::kBfloat16 ? SumBfloat16(halves, count) : SumFloat16(halves, count);
}
