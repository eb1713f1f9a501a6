#include "norm_rope.h"

#include "bind/arguments.h"

namespace mrl {

void BindNormRope(pybind11::module_& module) {
  module.def("rms_norm_cpu", [](const pybind11::kwargs& arguments) {
    const auto size = [&](const char* name) { return Value<int64_t>(arguments, name); };
    RmsNormInput input;
    input.type = static_cast<FloatType>(Value<int>(arguments, "type"));
    input.x = Pointer<const void>(arguments, "x");
    input.residual = Pointer<const void>(arguments, "residual");
    input.weight = Pointer<const void>(arguments, "weight");
    input.num_tokens = size("num_tokens");
    input.num_heads = size("num_heads");
    input.size = size("size");
    input.stride = size("stride");
    input.eps = Value<float>(arguments, "eps");
    const int num_threads = Value<int>(arguments, "num_threads");
    void* out = Pointer<void>(arguments, "out");
    void* sum = Pointer<void>(arguments, "sum");
    Run([&] { RmsNormCpu(input, num_threads, out, sum); });
  });
  module.def("rotate_cpu", [](const pybind11::kwargs& arguments) {
    const auto size = [&](const char* name) { return Value<int64_t>(arguments, name); };
    RotateInput input;
    input.type = static_cast<FloatType>(Value<int>(arguments, "type"));
    input.query = {Pointer<const void>(arguments, "query"), size("query_heads"),
                   size("query_stride"), Pointer<void>(arguments, "query_out")};
    input.key = {Pointer<const void>(arguments, "key"), size("key_heads"), size("key_stride"),
                 Pointer<void>(arguments, "key_out")};
    input.positions = Pointer<const int64_t>(arguments, "positions");
    input.cos_sin = Pointer<const float>(arguments, "cos_sin");
    input.num_tokens = size("num_tokens");
    input.num_positions = size("num_positions");
    input.size = size("size");
    input.rotary_size = size("rotary_size");
    input.halves = Value<bool>(arguments, "halves");
    const int num_threads = Value<int>(arguments, "num_threads");
    Run([&] { RotateCpu(input, num_threads); });
  });
}

}  // namespace mrl
