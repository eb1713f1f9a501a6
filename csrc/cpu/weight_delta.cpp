#include "weight_delta.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

#include "cpu/packed.h"

namespace mrl {
namespace {

constexpr int64_t kLineBytes = 64;
constexpr int64_t kWords = kLineBytes / 8;
constexpr uint32_t kLongGap = 255;

int64_t NumChunks(int64_t num_elements) { return (num_elements + kDeltaChunk - 1) / kDeltaChunk; }

bool IsBitmap(uint32_t changed, int64_t count) { return int64_t{changed} * 8 > count; }

// Calls visit(i) for each i in [0, count), in order, with before[i] != after[i]. Most lines of most
// weights did not change, so whole lines and then words are compared first.
template <class T, class Visit>
void ForEachChange(const T* before, const T* after, int64_t count, Visit&& visit) {
  constexpr int64_t kLine = kLineBytes / sizeof(T), kWord = kLine / kWords;
  int64_t i = 0;
  for (; i + kLine <= count; i += kLine) {
    uint64_t old_words[kWords], new_words[kWords], any = 0;
    std::memcpy(old_words, before + i, kLineBytes);
    std::memcpy(new_words, after + i, kLineBytes);
    for (int64_t w = 0; w < kWords; ++w) any |= old_words[w] ^ new_words[w];
    if (any == 0) continue;
    for (int64_t w = 0; w < kWords; ++w) {
      if (old_words[w] == new_words[w]) continue;
      for (int64_t j = i + w * kWord; j < i + (w + 1) * kWord; ++j) {
        if (before[j] != after[j]) visit(j);
      }
    }
  }
  for (; i < count; ++i) {
    if (before[i] != after[i]) visit(i);
  }
}

template <class T>
void CountChunk(const T* before, const T* after, int64_t count, uint32_t* changed,
                uint32_t* position_bytes) {
  uint32_t num = 0;
  int64_t gap_bytes = 0, next = 0;  // `next` is the element after the last that changed
  ForEachChange(before, after, count, [&](int64_t i) {
    ++num;
    gap_bytes += 1 + (i - next) / kLongGap;
    next = i + 1;
  });
  *changed = num;
  *position_bytes = static_cast<uint32_t>(IsBitmap(num, count) ? (count + 7) / 8 : gap_bytes);
}

template <class T>
void EncodeChunk(const T* before, const T* after, int64_t count, uint32_t changed, T* values,
                 uint8_t* positions) {
  if (IsBitmap(changed, count)) {
    std::memset(positions, 0, (count + 7) / 8);
    ForEachChange(before, after, count, [&](int64_t i) {
      *values++ = after[i];
      positions[i / 8] = static_cast<uint8_t>(positions[i / 8] | 1u << (i % 8));
    });
    return;
  }
  int64_t next = 0;
  ForEachChange(before, after, count, [&](int64_t i) {
    *values++ = after[i];
    int64_t gap = i - next;
    for (; gap >= kLongGap; gap -= kLongGap) *positions++ = kLongGap;
    *positions++ = static_cast<uint8_t>(gap);
    next = i + 1;
  });
}

// Returns whether the positions are those of `changed` elements below `count`.
template <class T>
bool ApplyChunk(T* base, int64_t count, uint32_t changed, uint32_t position_bytes, const T* values,
                const uint8_t* positions) {
  const T* const values_end = values + changed;
  if (IsBitmap(changed, count)) {
    if (position_bytes != (count + 7) / 8) return false;
    for (int64_t byte = 0; byte < position_bytes; ++byte) {
      for (unsigned bits = positions[byte]; bits != 0; bits &= bits - 1) {
        const int64_t i = byte * 8 + __builtin_ctz(bits);
        if (i >= count || values == values_end) return false;
        base[i] = *values++;
      }
    }
    return values == values_end;
  }
  int64_t i = 0;
  for (uint32_t byte = 0; byte < position_bytes; ++byte) {
    i += positions[byte];
    if (positions[byte] == kLongGap) continue;
    if (i >= count || values == values_end) return false;
    base[i++] = *values++;
  }
  return values == values_end;
}

// Calls run(T{}) with the unsigned integer of element_size bytes.
template <class Run>
void WithElements(int64_t element_size, Run&& run) {
  switch (element_size) {
    case 1:
      return run(uint8_t{});
    case 2:
      return run(uint16_t{});
    case 4:
      return run(uint32_t{});
    case 8:
      return run(uint64_t{});
    default:
      throw std::invalid_argument("element_size: expected 1, 2, 4 or 8");
  }
}

// Calls run(chunk, first, count) for each chunk, in parallel.
template <class Run>
void ForEachChunk(int64_t num_elements, int num_threads, Run&& run) {
  const int64_t num_chunks = NumChunks(num_elements);
  const int threads = UseThreads(num_threads, num_elements) ? num_threads : 1;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const int64_t first = chunk * kDeltaChunk;
    run(chunk, first, std::min(kDeltaChunk, num_elements - first));
  }
}

}  // namespace

void WeightDeltaCountCpu(const void* before, const void* after, int64_t element_size,
                         int64_t num_elements, int num_threads, const DeltaCounts& counts) {
  WithElements(element_size, [&](auto zero) {
    using T = decltype(zero);
    const T* const old_elements = static_cast<const T*>(before);
    const T* const new_elements = static_cast<const T*>(after);
    ForEachChunk(num_elements, num_threads, [&](int64_t chunk, int64_t first, int64_t count) {
      CountChunk(old_elements + first, new_elements + first, count, counts.changed + chunk,
                 counts.position_bytes + chunk);
    });
  });
}

void WeightDeltaEncodeCpu(const void* before, const void* after, int64_t element_size,
                          int64_t num_elements, int num_threads, const DeltaParts& parts,
                          void* values, uint8_t* positions) {
  WithElements(element_size, [&](auto zero) {
    using T = decltype(zero);
    const T* const old_elements = static_cast<const T*>(before);
    const T* const new_elements = static_cast<const T*>(after);
    T* const all_values = static_cast<T*>(values);
    ForEachChunk(num_elements, num_threads, [&](int64_t chunk, int64_t first, int64_t count) {
      if (parts.changed[chunk] == 0) return;
      EncodeChunk(old_elements + first, new_elements + first, count, parts.changed[chunk],
                  all_values + parts.value_starts[chunk], positions + parts.position_starts[chunk]);
    });
  });
}

void WeightDeltaApplyCpu(void* base, int64_t element_size, int64_t num_elements, int num_threads,
                         const DeltaParts& parts, const void* values, const uint8_t* positions) {
  std::atomic<bool> is_good{true};
  WithElements(element_size, [&](auto zero) {
    using T = decltype(zero);
    T* const elements = static_cast<T*>(base);
    const T* const all_values = static_cast<const T*>(values);
    ForEachChunk(num_elements, num_threads, [&](int64_t chunk, int64_t first, int64_t count) {
      if (!ApplyChunk(elements + first, count, parts.changed[chunk], parts.position_bytes[chunk],
                      all_values + parts.value_starts[chunk],
                      positions + parts.position_starts[chunk])) {
        is_good = false;
      }
    });
  });
  if (!is_good) {
    throw std::invalid_argument(
        "positions: they are not those of the number of changed elements in a chunk");
  }
}

}  // namespace mrl
