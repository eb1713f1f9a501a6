// Marks the elements that differ, one bit each. The compiler vectorizes the comparison.
//
// No include guard: compiled once for each instruction set, see cpu/for_each_target.h.

// Returns the lowest bits of eight bytes, each of which is 0 or 1.
MRL_FN uint64_t PackEight(const uint8_t* bytes) {
  uint64_t packed;
  std::memcpy(&packed, bytes, sizeof packed);
  return (packed * 0x0102040810204080u) >> 56;  // bit 8i + 7(8 - i) is bit 56 + i
}

template <class T>
inline void MarkTyped(const T* __restrict before, const T* __restrict after, int64_t count,
                      uint64_t* __restrict marks) {
  for (int64_t start = 0; start < count; start += 64) {
    uint8_t differs[64] = {};
    if (count - start >= 64) {
      for (int i = 0; i < 64; ++i) differs[i] = before[start + i] != after[start + i];
    } else {
      for (int i = 0; i < count - start; ++i) differs[i] = before[start + i] != after[start + i];
    }
    uint64_t word = 0;
    for (int i = 0; i < 8; ++i) word |= PackEight(differs + 8 * i) << (8 * i);
    marks[start / 64] = word;
  }
}

// before, after: [count] elements of element_size bytes, from element `first`. marks: ceil(count /
// 64)
inline void MarkElements(const void* before, const void* after, int64_t element_size, int64_t first,
                         int64_t count, uint64_t* marks) {
  const char* const old_bytes = static_cast<const char*>(before) + first * element_size;
  const char* const new_bytes = static_cast<const char*>(after) + first * element_size;
  const auto mark = [&](auto zero) {
    using T = decltype(zero);
    MarkTyped(reinterpret_cast<const T*>(old_bytes), reinterpret_cast<const T*>(new_bytes), count,
              marks);
  };
  if (element_size == 1) return mark(uint8_t{});
  if (element_size == 2) return mark(uint16_t{});
  if (element_size == 4) return mark(uint32_t{});
  mark(uint64_t{});
}
