#include "weight_delta.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

#include "cpu/packed.h"

#define MRL_BODY "cpu/weight_delta_body.h"
#include "cpu/for_each_target.h"

namespace mrl {
namespace {

constexpr uint32_t kLongGap = 255;
constexpr int64_t kMarkBits = 64;

int64_t NumChunks(int64_t num_elements) { return (num_elements + kDeltaChunk - 1) / kDeltaChunk; }

bool IsBitmap(uint32_t changed, int64_t count) { return int64_t{changed} * 8 > count; }

// Calls visit(i) for each marked element i in [0, count), in order.
template <class Visit>
void ForEachMark(const uint64_t* marks, int64_t count, Visit&& visit) {
  for (int64_t start = 0; start < count; start += kMarkBits) {
    for (uint64_t bits = marks[start / kMarkBits]; bits != 0; bits &= bits - 1) {
      visit(start + __builtin_ctzll(bits));
    }
  }
}

void CountChunk(const uint64_t* marks, int64_t count, uint32_t* changed, uint32_t* position_bytes) {
  uint32_t num = 0;
  for (int64_t start = 0; start < count; start += kMarkBits) {
    num += static_cast<uint32_t>(__builtin_popcountll(marks[start / kMarkBits]));
  }
  int64_t num_bytes = (count + 7) / 8;
  if (!IsBitmap(num, count)) {
    int64_t next = 0;  // the element after the last that changed
    num_bytes = 0;
    ForEachMark(marks, count, [&](int64_t i) {
      num_bytes += 1 + static_cast<uint32_t>(i - next) / kLongGap;
      next = i + 1;
    });
  }
  *changed = num;
  *position_bytes = static_cast<uint32_t>(num_bytes);
}

template <class T>
void EncodeChunk(const T* after, const uint64_t* marks, int64_t count, uint32_t changed, T* values,
                 uint8_t* positions) {
  if (IsBitmap(changed, count)) {
    std::memcpy(positions, marks, (count + 7) / 8);
    ForEachMark(marks, count, [&](int64_t i) { *values++ = after[i]; });
    return;
  }
  int64_t next = 0;
  ForEachMark(marks, count, [&](int64_t i) {
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

void WeightDeltaMarkCpu(const void* before, const void* after, int64_t element_size,
                        int64_t num_elements, int num_threads, uint64_t* marks, uint32_t* changed,
                        uint32_t* position_bytes) {
  const auto mark = MRL_DISPATCH(MarkElements);
  ForEachChunk(num_elements, num_threads, [&](int64_t chunk, int64_t first, int64_t count) {
    uint64_t* const own = marks + first / kMarkBits;
    mark(before, after, element_size, first, count, own);
    CountChunk(own, count, changed + chunk, position_bytes + chunk);
  });
}

void WeightDeltaEncodeCpu(const void* after, const uint64_t* marks, int64_t element_size,
                          int64_t num_elements, int num_threads, const DeltaParts& parts,
                          void* values, uint8_t* positions) {
  WithElements(element_size, [&](auto zero) {
    using T = decltype(zero);
    const T* const elements = static_cast<const T*>(after);
    T* const all_values = static_cast<T*>(values);
    ForEachChunk(num_elements, num_threads, [&](int64_t chunk, int64_t first, int64_t count) {
      if (parts.changed[chunk] == 0) return;
      EncodeChunk(elements + first, marks + first / kMarkBits, count, parts.changed[chunk],
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
