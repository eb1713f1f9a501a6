#include "vp_logprob.h"

#include "bind/arguments.h"

namespace py = pybind11;

namespace mrl {
namespace {

VpLogits ReadShape(const py::kwargs& a) {
  return {static_cast<LogitType>(Value<int>(a, "type")),
          Value<int64_t>(a, "num_rows"),
          Value<int64_t>(a, "num_columns"),
          Value<int64_t>(a, "row_stride"),
          Pointer<const int64_t>(a, "labels"),
          Pointer<const uint8_t>(a, "mask"),
          Value<int64_t>(a, "vocab_start"),
          Value<int64_t>(a, "vocab_size"),
          Value<float>(a, "inv_temperature")};
}

VpStatsInput ReadStats(const py::kwargs& a) {
  return {ReadShape(a), Pointer<const void>(a, "logits"), Value<int64_t>(a, "tile")};
}

VpCombineInput ReadCombine(const py::kwargs& a) {
  return {Pointer<const float>(a, "tiles"),  Pointer<const int64_t>(a, "labels"),
          Pointer<const uint8_t>(a, "mask"), Value<int64_t>(a, "num_ranks"),
          Value<int64_t>(a, "num_rows"),     Value<int64_t>(a, "tiles_per_rank"),
          Value<int64_t>(a, "tile"),         Value<float>(a, "inv_temperature")};
}

VpCombineOutput ReadCombined(const py::kwargs& a) {
  return {Pointer<float>(a, "logprobs"), Pointer<float>(a, "lse"), Pointer<float>(a, "entropy")};
}

VpBackwardInput ReadBackward(const py::kwargs& a) {
  return {ReadShape(a),
          Pointer<const void>(a, "logits"),
          Pointer<const float>(a, "lse"),
          Pointer<const float>(a, "entropy"),
          Pointer<const float>(a, "grad_logprobs"),
          Pointer<const float>(a, "grad_entropy")};
}

}  // namespace

void BindVpLogprob(py::module_& module) {
  module.def("vp_logprob_stats_cpu", [](const py::kwargs& a) {
    const VpStatsInput in = ReadStats(a);
    float* tiles = Pointer<float>(a, "tiles");
    const int num_threads = Value<int>(a, "num_threads");
    Run([&] { VpLogprobStatsCpu(in, tiles, num_threads); });
  });
  module.def("vp_logprob_combine_cpu", [](const py::kwargs& a) {
    const VpCombineInput in = ReadCombine(a);
    const VpCombineOutput out = ReadCombined(a);
    const int num_threads = Value<int>(a, "num_threads");
    Run([&] { VpLogprobCombineCpu(in, out, num_threads); });
  });
  module.def("vp_logprob_bwd_cpu", [](const py::kwargs& a) {
    const VpBackwardInput in = ReadBackward(a);
    void* grad = Pointer<void>(a, "grad");
    const int64_t grad_stride = Value<int64_t>(a, "grad_stride");
    const int num_threads = Value<int>(a, "num_threads");
    Run([&] { VpLogprobBackwardCpu(in, grad, grad_stride, num_threads); });
  });
#ifdef MRL_WITH_CUDA
  module.def("vp_logprob_stats_cuda", [](const py::kwargs& a) {
    const VpStatsInput in = ReadStats(a);
    float* tiles = Pointer<float>(a, "tiles");
    const uintptr_t stream = Value<uintptr_t>(a, "stream");
    Run([&] { VpLogprobStatsCuda(in, tiles, stream); });
  });
  module.def("vp_logprob_combine_cuda", [](const py::kwargs& a) {
    const VpCombineInput in = ReadCombine(a);
    const VpCombineOutput out = ReadCombined(a);
    const uintptr_t stream = Value<uintptr_t>(a, "stream");
    Run([&] { VpLogprobCombineCuda(in, out, stream); });
  });
  module.def("vp_logprob_bwd_cuda", [](const py::kwargs& a) {
    const VpBackwardInput in = ReadBackward(a);
    void* grad = Pointer<void>(a, "grad");
    const int64_t grad_stride = Value<int64_t>(a, "grad_stride");
    const uintptr_t stream = Value<uintptr_t>(a, "stream");
    Run([&] { VpLogprobBackwardCuda(in, grad, grad_stride, stream); });
  });
#endif
}

}  // namespace mrl
