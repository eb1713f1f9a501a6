// Expert ids of routing replay in a compact form.
//
// A row holds K codes of `bits` bits each, little-endian bit order, padded with zero bits to
// `row_bytes`. The code of an expert is its id. A row without a captured route (all ids -1) is all
// zeros where K >= 2: elsewhere a row never repeats an id, so that cannot be a route. Where K == 1,
// it is the code E.
#pragma once

#include <cstdint>

#include "portable.h"

namespace mrl {

constexpr int64_t kNativeRoute = -1;

struct RouteFormat {
  int32_t num_experts;  // E
  int32_t topk;         // K
  int32_t bits;
  int32_t row_bytes;
};

inline RouteFormat MakeRouteFormat(int32_t num_experts, int32_t topk) {
  const int32_t num_codes = num_experts + (topk == 1 ? 1 : 0);
  int32_t bits = 1;
  while ((1 << bits) < num_codes) ++bits;
  const int64_t row_bits = static_cast<int64_t>(topk) * bits;
  return {num_experts, topk, bits, static_cast<int32_t>((row_bits + 7) / 8)};
}

enum class RouteFault { kNone, kOutOfRange, kPartlyNative, kRepeated };

// One row of K ids. Writes nothing where there is a fault.
template <class Id>
MRL_FN RouteFault PackRoute(const Id* ids, const RouteFormat& format, uint8_t* row) {
  int num_native = 0;
  bool out_of_range = false;
  for (int k = 0; k < format.topk; ++k) {
    const int64_t id = static_cast<int64_t>(ids[k]);
    num_native += id == kNativeRoute;
    out_of_range |= id < kNativeRoute || id >= format.num_experts;
  }
  if (out_of_range) return RouteFault::kOutOfRange;
  const bool native = num_native == format.topk;
  if (num_native > 0 && !native) return RouteFault::kPartlyNative;
  bool repeated = false;
  for (int k = 1; k < format.topk && !native; ++k) {
    for (int j = 0; j < k; ++j) repeated |= ids[j] == ids[k];
  }
  if (repeated) return RouteFault::kRepeated;

  const uint32_t native_code = format.topk == 1 ? format.num_experts : 0;
  uint64_t pending = 0;
  int num_pending = 0, byte = 0;
  for (int k = 0; k < format.topk; ++k) {
    const uint64_t code = native ? native_code : static_cast<uint64_t>(ids[k]);
    pending |= code << num_pending;
    for (num_pending += format.bits; num_pending >= 8; num_pending -= 8) {
      row[byte++] = static_cast<uint8_t>(pending);
      pending >>= 8;
    }
  }
  if (num_pending > 0) row[byte] = static_cast<uint8_t>(pending);
  return RouteFault::kNone;
}

// A code has at most 16 bits, so it lies in at most three bytes.
MRL_FN int64_t RouteCode(const uint8_t* row, int k, const RouteFormat& format) {
  const int bit = k * format.bits;
  const int byte = bit / 8;
  uint32_t word = row[byte];
  if (byte + 1 < format.row_bytes) word |= static_cast<uint32_t>(row[byte + 1]) << 8;
  if (byte + 2 < format.row_bytes) word |= static_cast<uint32_t>(row[byte + 2]) << 16;
  return (word >> (bit % 8)) & ((1u << format.bits) - 1);
}

MRL_FN bool IsNativeRoute(const uint8_t* row, const RouteFormat& format) {
  if (format.topk == 1) return RouteCode(row, 0, format) == format.num_experts;
  uint32_t any = 0;
  for (int byte = 0; byte < format.row_bytes; ++byte) any |= row[byte];
  return any == 0;
}

enum class IdType : int { kUint8, kUint16, kInt16, kInt32, kInt64 };  // as in mrl/kernels/routes.py

struct PackRoutesInput {
  const void* expert_ids;  // [T, L, K] of `id_type`
  IdType id_type;
  int64_t num_rows;    // T
  int64_t num_layers;  // L
  RouteFormat format;
};

// Writes packed u8[T, L, row_bytes]. Throws std::invalid_argument that names the first row with an
// id out of range, a repeated id or only some native ids.
void PackRoutesCpu(const PackRoutesInput& in, int num_threads, uint8_t* packed);

// The same conditions are printed and trap on the device.
void PackRoutesCuda(const PackRoutesInput& in, uintptr_t stream, uint8_t* packed);

struct UnpackRoutesInput {
  const uint8_t* packed;  // [N, L, row_bytes]
  int64_t num_rows;       // N
  int64_t num_layers;     // L
  RouteFormat format;
  const int64_t* layers;  // [num_wanted], indices into L; on the host for the GPU too
  int64_t num_wanted;
  int64_t start;  // rows [start, stop)
  int64_t stop;
};

// Writes expert_ids i64[num_wanted, stop - start, K].
void UnpackRoutesCpu(const UnpackRoutesInput& in, int num_threads, int64_t* expert_ids);
void UnpackRoutesCuda(const UnpackRoutesInput& in, uintptr_t stream, int64_t* expert_ids);

}  // namespace mrl
