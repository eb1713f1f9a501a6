#include "fused_experts.h"

#include "bind/arguments.h"

namespace mrl {

void BindFusedExperts(pybind11::module_& module) {
  module.def("fused_experts_cpu", [](const pybind11::kwargs& arguments) {
    const auto size = [&](const char* name) { return Value<int64_t>(arguments, name); };
    FusedExpertsInput input;
    input.type = static_cast<FloatType>(Value<int>(arguments, "type"));
    input.x = Pointer<const void>(arguments, "x");
    input.w13 = Pointer<const void>(arguments, "w13");
    input.w2 = Pointer<const void>(arguments, "w2");
    input.w13_bias = Pointer<const float>(arguments, "w13_bias");
    input.w2_bias = Pointer<const float>(arguments, "w2_bias");
    input.ids = Pointer<const int64_t>(arguments, "ids");
    input.weights = Pointer<const float>(arguments, "weights");
    input.num_tokens = size("num_tokens");
    input.top_k = size("top_k");
    input.num_experts = size("num_experts");
    input.hidden_size = size("hidden_size");
    input.expert_size = size("expert_size");
    input.interleaved = Value<bool>(arguments, "interleaved");
    input.alpha = Value<float>(arguments, "alpha");
    input.limit = Value<float>(arguments, "limit");
    input.up_shift = Value<float>(arguments, "up_shift");
    const int num_threads = Value<int>(arguments, "num_threads");
    void* out = Pointer<void>(arguments, "out");
    Run([&] { FusedExpertsCpu(input, num_threads, out); });
  });
}

}  // namespace mrl
