#include "paged_attention.h"

#include "bind/arguments.h"

namespace mrl {

void BindPagedAttention(pybind11::module_& module) {
  module.def("paged_attention_cpu", [](const pybind11::kwargs& arguments) {
    const auto size = [&](const char* name) { return Value<int64_t>(arguments, name); };
    PagedAttentionInput input;
    input.type = static_cast<FloatType>(Value<int>(arguments, "type"));
    input.queries = Pointer<const void>(arguments, "queries");
    input.keys = Pointer<const void>(arguments, "keys");
    input.values = Pointer<const void>(arguments, "values");
    input.slots = Pointer<const int32_t>(arguments, "slots");
    input.requests = Pointer<const int64_t>(arguments, "requests");
    input.lengths = Pointer<const int64_t>(arguments, "lengths");
    input.query_starts = Pointer<const int64_t>(arguments, "query_starts");
    input.num_requests = size("num_requests");
    input.num_queries = size("num_queries");
    input.num_heads = size("num_heads");
    input.num_groups = size("num_groups");
    input.key_size = size("key_size");
    input.value_size = size("value_size");
    input.num_slots = size("num_slots");
    input.max_requests = size("max_requests");
    input.max_positions = size("max_positions");
    input.query_stride = size("query_stride");
    input.query_head_stride = size("query_head_stride");
    input.key_stride = size("key_stride");
    input.key_head_stride = size("key_head_stride");
    input.value_stride = size("value_stride");
    input.value_head_stride = size("value_head_stride");
    input.slot_stride = size("slot_stride");
    input.window = size("window");
    input.scale = Value<float>(arguments, "scale");
    const int num_threads = Value<int>(arguments, "num_threads");
    void* out = Pointer<void>(arguments, "out");
    Run([&] { PagedAttentionCpu(input, num_threads, out); });
  });
}

}  // namespace mrl
