#include "routes.h"

#include "bind/arguments.h"

namespace mrl {
namespace {

RouteFormat Format(const pybind11::kwargs& arguments) {
  return MakeRouteFormat(Value<int32_t>(arguments, "num_experts"),
                         Value<int32_t>(arguments, "topk"));
}

PackRoutesInput PackInput(const pybind11::kwargs& arguments) {
  return {
      Pointer<const void>(arguments, "expert_ids"),
      static_cast<IdType>(Value<int>(arguments, "id_type")),
      Value<int64_t>(arguments, "num_rows"),
      Value<int64_t>(arguments, "num_layers"),
      Format(arguments),
  };
}

UnpackRoutesInput UnpackInput(const pybind11::kwargs& arguments) {
  return {
      Pointer<const uint8_t>(arguments, "packed"), Value<int64_t>(arguments, "num_rows"),
      Value<int64_t>(arguments, "num_layers"),     Format(arguments),
      Pointer<const int64_t>(arguments, "layers"), Value<int64_t>(arguments, "num_wanted"),
      Value<int64_t>(arguments, "start"),          Value<int64_t>(arguments, "stop"),
  };
}

}  // namespace

void BindRoutes(pybind11::module_& module) {
  module.def("pack_routes_cpu", [](const pybind11::kwargs& arguments) {
    const PackRoutesInput input = PackInput(arguments);
    const int num_threads = Value<int>(arguments, "num_threads");
    uint8_t* packed = Pointer<uint8_t>(arguments, "out");
    Run([&] { PackRoutesCpu(input, num_threads, packed); });
  });
  module.def("unpack_routes_cpu", [](const pybind11::kwargs& arguments) {
    const UnpackRoutesInput input = UnpackInput(arguments);
    const int num_threads = Value<int>(arguments, "num_threads");
    int64_t* expert_ids = Pointer<int64_t>(arguments, "expert_ids");
    Run([&] { UnpackRoutesCpu(input, num_threads, expert_ids); });
  });
#ifdef MRL_WITH_CUDA
  module.def("pack_routes_cuda", [](const pybind11::kwargs& arguments) {
    const PackRoutesInput input = PackInput(arguments);
    const uintptr_t stream = Value<uintptr_t>(arguments, "stream");
    uint8_t* packed = Pointer<uint8_t>(arguments, "out");
    Run([&] { PackRoutesCuda(input, stream, packed); });
  });
  module.def("unpack_routes_cuda", [](const pybind11::kwargs& arguments) {
    const UnpackRoutesInput input = UnpackInput(arguments);
    const uintptr_t stream = Value<uintptr_t>(arguments, "stream");
    int64_t* expert_ids = Pointer<int64_t>(arguments, "expert_ids");
    Run([&] { UnpackRoutesCuda(input, stream, expert_ids); });
  });
#endif
}

}  // namespace mrl
