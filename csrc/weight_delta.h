// The elements that changed between two versions of the weights, compared as bits.
//
// Elements are handled in chunks of kDeltaChunk, independently of each other. For each chunk there
// are the values of its changed elements, in order, and their positions in one of two forms:
// - gaps, if at most an eighth of its elements changed: for each changed element the number g of
//   unchanged elements since the changed element before it, or since the start of the chunk, as
//   g / 255 bytes of 255 and one byte g % 255;
// - a bitmap otherwise, with the first element in the lowest bit of the first byte.
#pragma once

#include <cstdint>

namespace mrl {

constexpr int64_t kDeltaChunk = 1 << 16;

// The parts of a delta; part i of `values` and `positions` begins where part i - 1 ends.
struct DeltaParts {
  const uint32_t* changed;         // [num_chunks]
  const uint32_t* position_bytes;  // [num_chunks]
  const int64_t* value_starts;     // [num_chunks], in elements
  const int64_t* position_starts;  // [num_chunks], in bytes
};

// Compares [num_elements] of element_size bytes, which is 1, 2, 4 or 8.
// marks: [num_chunks * kDeltaChunk / 64], a bit for each element that changed, the first in the
// lowest bit. changed, position_bytes: [num_chunks], as in DeltaParts.
void WeightDeltaMarkCpu(const void* before, const void* after, int64_t element_size,
                        int64_t num_elements, int num_threads, uint64_t* marks, uint32_t* changed,
                        uint32_t* position_bytes);

// values: [sum of changed]; positions: [sum of position_bytes]
void WeightDeltaEncodeCpu(const void* after, const uint64_t* marks, int64_t element_size,
                          int64_t num_elements, int num_threads, const DeltaParts& parts,
                          void* values, uint8_t* positions);

// Writes the values into base, [num_elements]. Throws std::invalid_argument if the positions of a
// chunk are not those of its number of changed elements; base then holds neither version.
void WeightDeltaApplyCpu(void* base, int64_t element_size, int64_t num_elements, int num_threads,
                         const DeltaParts& parts, const void* values, const uint8_t* positions);

}  // namespace mrl
