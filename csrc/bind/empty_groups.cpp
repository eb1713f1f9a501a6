#include "empty_groups.h"

#include "bind/arguments.h"

namespace mrl {
namespace {

EmptyGroupsInput GroupsInput(const pybind11::kwargs& arguments) {
  return {
      Pointer<void>(arguments, "values"),
      Pointer<const int32_t>(arguments, "ends"),
      Value<int64_t>(arguments, "num_groups"),
      Value<int64_t>(arguments, "group_bytes"),
  };
}

}  // namespace

void BindEmptyGroups(pybind11::module_& module) {
  module.def("zero_empty_groups_cpu", [](const pybind11::kwargs& arguments) {
    const EmptyGroupsInput input = GroupsInput(arguments);
    Run([&] { ZeroEmptyGroupsCpu(input); });
  });
#ifdef MRL_WITH_CUDA
  module.def("zero_empty_groups_cuda", [](const pybind11::kwargs& arguments) {
    const EmptyGroupsInput input = GroupsInput(arguments);
    const uintptr_t stream = Value<uintptr_t>(arguments, "stream");
    Run([&] { ZeroEmptyGroupsCuda(input, stream); });
  });
#endif
}

}  // namespace mrl
