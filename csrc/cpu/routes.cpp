#include "routes.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

// One body, compiled for several instruction sets; the loader picks.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MRL_MULTIVERSION \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MRL_MULTIVERSION
#endif

namespace mrl {
namespace {

constexpr int kWord = 8;    // bytes in a uint64_t; also the K of the fast paths
constexpr int kTile = 256;  // (token, layer) rows a step
constexpr int64_t kMinRowsForThreads = 16384;

// --- Packing ---

// Eight u8 ids as one little-endian word: the shape of most models (K = 8, E <= 256). Packs `count`
// rows into words and says whether all are fine; the slow path finds out which one is not.
MRL_MULTIVERSION bool PackWords(const uint8_t* __restrict ids, int count, int num_experts, int bits,
                                uint64_t* __restrict words) {
  constexpr uint64_t kOnes = 0x0101010101010101u, kHighs = 0x8080808080808080u;
  constexpr uint64_t kEven8 = 0x00ff00ff00ff00ffu, kEven16 = 0x0000ffff0000ffffu;
  constexpr uint64_t kEven32 = 0x00000000ffffffffu;
  uint8_t largest = 0;
  for (int i = 0; i < count * kWord; ++i) largest = std::max(largest, ids[i]);
  const int gap = 8 - bits;
  uint64_t repeated = 0;
  for (int i = 0; i < count; ++i) {
    uint64_t x;
    std::memcpy(&x, ids + i * kWord, kWord);
    // Every pair of bytes is at distance 1, 2, 3 or 4 around the word: a zero byte in the xor.
    const uint64_t one = x ^ (x << 8 | x >> 56), two = x ^ (x << 16 | x >> 48);
    const uint64_t three = x ^ (x << 24 | x >> 40), four = x ^ (x << 32 | x >> 32);
    repeated |= ((one - kOnes) & ~one) | ((two - kOnes) & ~two) | ((three - kOnes) & ~three) |
                ((four - kOnes) & ~four);
    // Close the gaps between 1, then 2, then 4 neighbours.
    x = (x & kEven8) | ((x & ~kEven8) >> gap);
    x = (x & kEven16) | ((x & ~kEven16) >> 2 * gap);
    words[i] = (x & kEven32) | ((x & ~kEven32) >> 4 * gap);
  }
  return (repeated & kHighs) == 0 && largest < num_experts;
}

// The lowest `row_bytes` bytes of each word. Writes whole words where the next row comes after.
void StoreWords(const uint64_t* words, int count, int row_bytes, uint8_t* packed) {
  const int whole = std::max(0, count - kWord);  // a word reaches over at most 7 more rows
  for (int i = 0; i < whole; ++i) std::memcpy(packed + i * row_bytes, &words[i], kWord);
  for (int i = whole; i < count; ++i) std::memcpy(packed + i * row_bytes, &words[i], row_bytes);
}

// Returns the first faulty row of [first, last), or `last`.
template <class Id>
int64_t PackRows(const Id* ids, const RouteFormat& format, int64_t first, int64_t last,
                 uint8_t* packed) {
  for (int64_t i = first; i < last; ++i) {
    const RouteFault fault =
        PackRoute(ids + i * format.topk, format, packed + i * format.row_bytes);
    if (fault != RouteFault::kNone) return i;
  }
  return last;
}

constexpr bool kLittleEndian = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;

int64_t PackTile(const uint8_t* ids, const RouteFormat& format, int64_t first, int64_t last,
                 uint8_t* packed) {
  if (kLittleEndian && format.topk == kWord && format.bits <= 8) {
    uint64_t words[kTile];
    const int count = static_cast<int>(last - first);
    if (PackWords(ids + first * kWord, count, format.num_experts, format.bits, words)) {
      StoreWords(words, count, format.row_bytes, packed + first * format.row_bytes);
      return last;
    }
  }
  return PackRows(ids, format, first, last, packed);
}

template <class Id>
int64_t PackTile(const Id* ids, const RouteFormat& format, int64_t first, int64_t last,
                 uint8_t* packed) {
  return PackRows(ids, format, first, last, packed);
}

template <class Id>
[[noreturn]] void Refuse(const Id* ids, const RouteFormat& format, int64_t row, int64_t layer) {
  std::string given, expected;
  for (int k = 0; k < format.topk; ++k) {
    given += (k ? ", " : "") + std::to_string(static_cast<int64_t>(ids[k]));
  }
  switch (PackRoute(ids, format, nullptr)) {  // faulty, so nothing is written
    case RouteFault::kOutOfRange:
      expected = "ids from 0 to " + std::to_string(format.num_experts - 1);
      break;
    case RouteFault::kPartlyNative:
      expected = "no native id (-1), or nothing else";
      break;
    default:
      expected = "no id twice";
  }
  throw std::invalid_argument("expert_ids: got [" + given + "] in row " + std::to_string(row) +
                              ", layer " + std::to_string(layer) + ", expected " + expected);
}

template <class Id>
void Pack(const PackRoutesInput& in, int threads, uint8_t* packed) {
  const Id* ids = static_cast<const Id*>(in.expert_ids);
  const int64_t num_rows = in.num_rows * in.num_layers;
  const int64_t num_tiles = (num_rows + kTile - 1) / kTile;
  int64_t faulty = num_rows;
#pragma omp parallel for num_threads(threads) reduction(min : faulty)
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t last = std::min(num_rows, (tile + 1) * kTile);
    const int64_t done = PackTile(ids, in.format, tile * kTile, last, packed);
    if (done < last) faulty = std::min(faulty, done);
  }
  if (faulty < num_rows) {
    Refuse(ids + faulty * in.format.topk, in.format, faulty / in.num_layers,
           faulty % in.num_layers);
  }
}

// --- Unpacking ---

// Rows of K == 8 codes that fit a word each.
MRL_MULTIVERSION void UnpackWords(const uint64_t* words, int count, int bits, int64_t* ids) {
  const uint64_t mask = (uint64_t{1} << bits) - 1;
  for (int i = 0; i < count; ++i) {
    const uint64_t word = words[i];
    const uint64_t native = word == 0 ? ~uint64_t{0} : 0;
    for (int k = 0; k < kWord; ++k) {
      ids[i * kWord + k] = static_cast<int64_t>(((word >> (k * bits)) & mask) | native);
    }
  }
}

void LoadWords(const uint8_t* row, const uint8_t* end, int64_t stride, int count, int row_bytes,
               uint64_t* words) {
  const uint64_t mask = row_bytes == kWord ? ~uint64_t{0} : (uint64_t{1} << 8 * row_bytes) - 1;
  for (int i = 0; i < count; ++i, row += stride) {
    uint64_t word = 0;
    if (end - row >= kWord) {
      std::memcpy(&word, row, kWord);
    } else {
      std::memcpy(&word, row, row_bytes);
    }
    words[i] = word & mask;
  }
}

void UnpackTile(const UnpackRoutesInput& in, int64_t layer, int64_t first, int count,
                int64_t* ids) {
  const RouteFormat& format = in.format;
  const int64_t stride = in.num_layers * format.row_bytes;
  const uint8_t* row = in.packed + first * stride + layer * format.row_bytes;
  if (kLittleEndian && format.topk == kWord && format.row_bytes <= kWord) {
    uint64_t words[kTile];
    LoadWords(row, in.packed + in.num_rows * stride, stride, count, format.row_bytes, words);
    UnpackWords(words, count, format.bits, ids);
    return;
  }
  for (int i = 0; i < count; ++i, row += stride, ids += format.topk) {
    const int64_t native = IsNativeRoute(row, format) ? kNativeRoute : 0;
    if (native) {
      std::fill_n(ids, format.topk, kNativeRoute);
    } else if (format.bits == 8) {
      for (int k = 0; k < format.topk; ++k) ids[k] = row[k];
    } else {
      for (int k = 0; k < format.topk; ++k) ids[k] = RouteCode(row, k, format);
    }
  }
}

}  // namespace

void PackRoutesCpu(const PackRoutesInput& in, int num_threads, uint8_t* packed) {
  const bool small = in.num_rows * in.num_layers < kMinRowsForThreads;
  const int threads = small ? 1 : std::max(1, num_threads);
  switch (in.id_type) {
    case IdType::kUint8:
      return Pack<uint8_t>(in, threads, packed);
    case IdType::kUint16:
      return Pack<uint16_t>(in, threads, packed);
    case IdType::kInt16:
      return Pack<int16_t>(in, threads, packed);
    case IdType::kInt32:
      return Pack<int32_t>(in, threads, packed);
    case IdType::kInt64:
      return Pack<int64_t>(in, threads, packed);
  }
}

void UnpackRoutesCpu(const UnpackRoutesInput& in, int num_threads, int64_t* expert_ids) {
  // Layers inside tiles of rows: the tile's bytes stay in the cache while each layer picks its own.
  constexpr int kRows = 64;
  const int64_t num_rows = in.stop - in.start, row_size = in.format.topk;
  const bool small = num_rows * in.num_wanted < kMinRowsForThreads;
  const int threads = small ? 1 : std::max(1, num_threads);
  const int64_t num_tiles = (num_rows + kRows - 1) / kRows;
#pragma omp parallel for num_threads(threads)
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t row = tile * kRows;
    const int count = static_cast<int>(std::min<int64_t>(kRows, num_rows - row));
    for (int64_t i = 0; i < in.num_wanted; ++i) {
      int64_t* out = expert_ids + (i * num_rows + row) * row_size;
      UnpackTile(in, in.layers[i], in.start + row, count, out);
    }
  }
}

}  // namespace mrl
