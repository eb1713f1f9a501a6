#include "invariant.h"

#include "bind/arguments.h"

namespace mrl {

void BindInvariant(pybind11::module_& module) {
  module.def("invariant_linear_cpu", [](const pybind11::kwargs& arguments) {
    const LinearInput input = {
        Pointer<const float>(arguments, "rows"),  Pointer<const float>(arguments, "weights"),
        Value<int64_t>(arguments, "num_rows"),    Value<int64_t>(arguments, "num_inputs"),
        Value<int64_t>(arguments, "num_outputs"),
    };
    const int num_threads = Value<int>(arguments, "num_threads");
    float* out = Pointer<float>(arguments, "out");
    Run([&] { InvariantLinearCpu(input, num_threads, out); });
  });
  module.def("invariant_attention_cpu", [](const pybind11::kwargs& arguments) {
    const AttentionInput input = {
        Pointer<const float>(arguments, "queries"),
        Pointer<const float>(arguments, "keys"),
        Pointer<const float>(arguments, "values"),
        Pointer<const int32_t>(arguments, "first_key"),
        Pointer<const int32_t>(arguments, "key_count"),
        Value<int64_t>(arguments, "num_queries"),
        Value<int64_t>(arguments, "num_keys"),
        Value<int64_t>(arguments, "num_heads"),
        Value<int64_t>(arguments, "num_groups"),
        Value<int64_t>(arguments, "key_size"),
        Value<int64_t>(arguments, "value_size"),
        Value<float>(arguments, "scale"),
    };
    const int num_threads = Value<int>(arguments, "num_threads");
    float* out = Pointer<float>(arguments, "out");
    Run([&] { InvariantAttentionCpu(input, num_threads, out); });
  });
  module.def("invariant_silu_cpu", [](const pybind11::kwargs& arguments) {
    const float* x = Pointer<const float>(arguments, "x");
    const int64_t count = Value<int64_t>(arguments, "count");
    const int num_threads = Value<int>(arguments, "num_threads");
    float* out = Pointer<float>(arguments, "out");
    Run([&] { InvariantSiluCpu(x, count, num_threads, out); });
  });
}

}  // namespace mrl
