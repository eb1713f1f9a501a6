#include "packed_gae.h"

#include "bind/arguments.h"

namespace mrl {
namespace {

PackedGaeInput Input(const pybind11::kwargs& arguments) {
  return {
      Pointer<const float>(arguments, "rewards"),
      Pointer<const float>(arguments, "values"),
      Pointer<const uint8_t>(arguments, "loss_mask"),
      Pointer<const int32_t>(arguments, "cu_seqlens"),
      Pointer<const float>(arguments, "seq_lam"),
      Value<int64_t>(arguments, "num_tokens"),
      Value<int64_t>(arguments, "num_sequences"),
      Value<double>(arguments, "gamma"),
      Value<double>(arguments, "lam"),
  };
}

}  // namespace

void BindPackedGae(pybind11::module_& module) {
  module.def("packed_gae_cpu", [](const pybind11::kwargs& arguments) {
    const PackedGaeInput input = Input(arguments);
    const int num_threads = Value<int>(arguments, "num_threads");
    float* advantages = Pointer<float>(arguments, "advantages");
    float* returns = Pointer<float>(arguments, "returns");
    Run([&] { PackedGaeCpu(input, num_threads, advantages, returns); });
  });
#ifdef MRL_WITH_CUDA
  module.def("packed_gae_cuda", [](const pybind11::kwargs& arguments) {
    const PackedGaeInput input = Input(arguments);
    const uintptr_t stream = Value<uintptr_t>(arguments, "stream");
    float* advantages = Pointer<float>(arguments, "advantages");
    float* returns = Pointer<float>(arguments, "returns");
    Run([&] { PackedGaeCuda(input, stream, advantages, returns); });
  });
#endif
}

}  // namespace mrl
