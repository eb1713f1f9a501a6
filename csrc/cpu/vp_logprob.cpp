#include "vp_logprob.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace mrl {
namespace {

constexpr int64_t kColumnBlock = 1024;  // columns per fp32 partial sum

struct RowGradient {
  float inv_temperature, lse, offset, slope;
};

}  // namespace
}  // namespace mrl

#define MRL_BODY "cpu/vp_logprob_body.h"
#include "cpu/for_each_target.h"

namespace mrl {
namespace {

int64_t BytesOf(LogitType type) { return type == LogitType::kFloat32 ? 4 : 2; }

bool Counts(const uint8_t* mask, int64_t row) { return mask == nullptr || mask[row] != 0; }

const char* At(const void* data, LogitType type, int64_t element) {
  return static_cast<const char*>(data) + element * BytesOf(type);
}

void CheckLabels(const VpLogits& shape) {
  for (int64_t row = 0; row < shape.num_rows; ++row) {
    if (!Counts(shape.mask, row)) continue;
    if (shape.labels[row] < 0 || shape.labels[row] >= shape.vocab_size) {
      throw std::invalid_argument("labels: got " + std::to_string(shape.labels[row]) + " in row " +
                                  std::to_string(row) + ", expected 0 to " +
                                  std::to_string(shape.vocab_size - 1) + " where the mask is true");
    }
  }
}

}  // namespace

void VpLogprobStatsCpu(const VpStatsInput& in, float* tiles, int num_threads) {
  const VpLogits& shape = in.shape;
  CheckLabels(shape);
  const auto reduce = MRL_DISPATCH(ReduceTile);
  const auto read = MRL_DISPATCH(ReadOne);
  const int64_t num_tiles = shape.num_columns / in.tile;
#pragma omp parallel for schedule(dynamic, 4) num_threads(num_threads) if (num_threads > 1)
  for (int64_t row = 0; row < shape.num_rows; ++row) {
    float* fields = tiles + row * num_tiles * kTileFields;
    if (!Counts(shape.mask, row)) {
      std::fill_n(fields, num_tiles * kTileFields, 0.0f);
      continue;
    }
    const char* x = At(in.logits, shape.type, row * shape.row_stride);
    for (int64_t k = 0; k < num_tiles; ++k) {
      reduce(shape.type, At(x, shape.type, k * in.tile), in.tile, shape.inv_temperature,
             fields + k * kTileFields);
      fields[k * kTileFields + 3] = 0;
    }
    const int64_t label = shape.labels[row] - shape.vocab_start;
    if (label >= 0 && label < shape.num_columns) {
      fields[label / in.tile * kTileFields + 3] = read(shape.type, At(x, shape.type, label));
    }
  }
}

void VpLogprobCombineCpu(const VpCombineInput& in, const VpCombineOutput& out, int num_threads) {
  const int64_t rank_stride = in.num_rows * in.tiles_per_rank * kTileFields;
  const int64_t num_tiles = in.num_ranks * in.tiles_per_rank;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && in.num_rows >= 512)
  for (int64_t row = 0; row < in.num_rows; ++row) {
    out.logprobs[row] = out.lse[row] = out.entropy[row] = 0;
    if (!Counts(in.mask, row)) continue;
    const auto tile = [&](int64_t k) {
      return in.tiles + k / in.tiles_per_rank * rank_stride +
             (row * in.tiles_per_rank + k % in.tiles_per_rank) * kTileFields;
    };
    double top = -INFINITY;
    for (int64_t k = 0; k < num_tiles; ++k) top = std::max<double>(top, tile(k)[0]);
    double total = 0, weighted = 0;
    for (int64_t k = 0; k < num_tiles; ++k) {
      const float* fields = tile(k);
      if (fields[1] == 0) continue;
      const double shift = fields[0] - top, scale = std::exp(shift);
      total += scale * fields[1];
      weighted += scale * (fields[2] + shift * fields[1]);
    }
    const double log_total = std::log(total), label = tile(in.labels[row] / in.tile)[3];
    const double target = label * in.inv_temperature;
    out.lse[row] = static_cast<float>(top + log_total);
    const double logprob = (target - top) - log_total, entropy = log_total - weighted / total;
    // Only rounding can cross 0; NaN is kept.
    out.logprobs[row] = static_cast<float>(logprob > 0 ? 0 : logprob);
    out.entropy[row] = static_cast<float>(entropy < 0 ? 0 : entropy);
  }
}

void VpLogprobBackwardCpu(const VpBackwardInput& in, void* grad, int64_t grad_stride,
                          int num_threads) {
  const VpLogits& shape = in.shape;
  const auto run = MRL_DISPATCH(BackwardRow);
  const auto read = MRL_DISPATCH(ReadOne);
  const auto write = MRL_DISPATCH(WriteOne);
#pragma omp parallel for schedule(dynamic, 4) num_threads(num_threads) if (num_threads > 1)
  for (int64_t row = 0; row < shape.num_rows; ++row) {
    const float g = in.grad_logprobs[row];
    const float g_entropy = in.grad_entropy == nullptr ? 0.0f : in.grad_entropy[row];
    char* out = const_cast<char*>(At(grad, shape.type, row * grad_stride));
    if (!Counts(shape.mask, row) || (g == 0 && g_entropy == 0)) {
      std::memset(out, 0, shape.num_columns * BytesOf(shape.type));
      continue;
    }
    const char* x = At(in.logits, shape.type, row * shape.row_stride);
    const RowGradient gradient{shape.inv_temperature, in.lse[row],
                               -shape.inv_temperature * (g + g_entropy * in.entropy[row]),
                               -shape.inv_temperature * g_entropy};
    const int64_t label = shape.labels[row] - shape.vocab_start;
    const bool here = label >= 0 && label < shape.num_columns;
    // Read before writing, because `grad` may be the logits.
    const float target = here ? read(shape.type, At(x, shape.type, label)) : 0.0f;
    run(shape.type, x, shape.num_columns, gradient, out);
    if (!here) continue;
    const double log_p = static_cast<double>(target) * shape.inv_temperature - in.lse[row];
    const double p = std::exp(log_p);
    const double rest = p == 0 ? 0.0 : p * (gradient.offset + gradient.slope * log_p);
    write(shape.type, out + label * BytesOf(shape.type),
          static_cast<float>(rest + static_cast<double>(g) * shape.inv_temperature));
  }
}

}  // namespace mrl
