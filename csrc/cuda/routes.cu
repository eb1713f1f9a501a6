#include <algorithm>

#include "cuda/launch.h"
#include "routes.h"

namespace mrl {
namespace {

constexpr int kThreads = 256;
constexpr int kTileRows = 64;    // rows of one layer that a block unpacks
constexpr int kMaxLayers = 256;  // of one launch: the list travels as a kernel argument

// One thread a (token, layer) row.
template <class Id>
__global__ void __launch_bounds__(kThreads)
    PackRoutesKernel(const Id* ids, int64_t num_rows, RouteFormat format, uint8_t* packed) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= num_rows) return;
  const RouteFault fault = PackRoute(ids + i * format.topk, format, packed + i * format.row_bytes);
  MRL_REQUIRE(fault != RouteFault::kOutOfRange, "expert_ids must be from 0 to num_experts - 1");
  MRL_REQUIRE(fault != RouteFault::kPartlyNative, "expert_ids: a row is native as a whole or not");
  MRL_REQUIRE(fault != RouteFault::kRepeated, "expert_ids: a row must not repeat an id");
}

struct LayerList {
  int32_t index[kMaxLayers];
};

// A block unpacks kTileRows rows of one layer, one thread an id: stores are contiguous, and the
// neighbours that share a row find its bytes in the cache.
__global__ void __launch_bounds__(kThreads)
    UnpackRoutesKernel(const uint8_t* packed, int64_t num_layers, RouteFormat format,
                       LayerList layers, int64_t start, int64_t num_rows, int64_t num_tiles,
                       int64_t* expert_ids) {
  const int64_t wanted = blockIdx.x / num_tiles;
  const int64_t first = (blockIdx.x % num_tiles) * kTileRows;
  const int64_t stride = num_layers * format.row_bytes;
  const uint8_t* rows = packed + (start + first) * stride + layers.index[wanted] * format.row_bytes;
  int64_t* out = expert_ids + (wanted * num_rows + first) * format.topk;
  const int64_t left = num_rows - first;
  const int num_ids = static_cast<int>(left < kTileRows ? left : kTileRows) * format.topk;
  for (int i = threadIdx.x; i < num_ids; i += kThreads) {
    const uint8_t* row = rows + (i / format.topk) * stride;
    out[i] = IsNativeRoute(row, format) ? kNativeRoute : RouteCode(row, i % format.topk, format);
  }
}

template <class Id>
void Pack(const PackRoutesInput& in, uintptr_t stream, uint8_t* packed) {
  const int64_t num_rows = in.num_rows * in.num_layers;
  if (num_rows == 0) return;
  MRL_LAUNCH(PackRoutesKernel<Id>, (num_rows + kThreads - 1) / kThreads, kThreads, stream,
             static_cast<const Id*>(in.expert_ids), num_rows, in.format, packed);
}

}  // namespace

void PackRoutesCuda(const PackRoutesInput& in, uintptr_t stream, uint8_t* packed) {
  switch (in.id_type) {
    case IdType::kUint8:
      return Pack<uint8_t>(in, stream, packed);
    case IdType::kUint16:
      return Pack<uint16_t>(in, stream, packed);
    case IdType::kInt16:
      return Pack<int16_t>(in, stream, packed);
    case IdType::kInt32:
      return Pack<int32_t>(in, stream, packed);
    case IdType::kInt64:
      return Pack<int64_t>(in, stream, packed);
  }
}

void UnpackRoutesCuda(const UnpackRoutesInput& in, uintptr_t stream, int64_t* expert_ids) {
  const int64_t num_rows = in.stop - in.start;
  if (num_rows == 0) return;
  const int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
  for (int64_t first = 0; first < in.num_wanted; first += kMaxLayers) {
    const int64_t count = std::min<int64_t>(kMaxLayers, in.num_wanted - first);
    LayerList layers = {};
    for (int64_t i = 0; i < count; ++i) {
      layers.index[i] = static_cast<int32_t>(in.layers[first + i]);
    }
    MRL_LAUNCH(UnpackRoutesKernel, count * num_tiles, kThreads, stream, in.packed, in.num_layers,
               in.format, layers, in.start, num_rows, num_tiles,
               expert_ids + first * num_rows * in.format.topk);
  }
}

}  // namespace mrl
