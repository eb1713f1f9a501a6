// Reads the keyword arguments of a kernel. Addresses are integers, and 0 means "not given". Without
// torch headers one binary works with every torch version. mrl/kernels/ checks shapes, types and
// devices before the call.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <utility>

namespace mrl {

// Raises KeyError if the argument was not passed.
template <class T>
T Value(const pybind11::kwargs& arguments, const char* name) {
  return arguments[name].template cast<T>();
}

template <class T>
T* Pointer(const pybind11::kwargs& arguments, const char* name) {
  return reinterpret_cast<T*>(Value<uintptr_t>(arguments, name));
}

// Runs a kernel without the interpreter lock.
template <class Function>
void Run(Function&& function) {
  const pybind11::gil_scoped_release released;
  std::forward<Function>(function)();
}

void BindBlockQuant(pybind11::module_& module);
void BindEmptyGroups(pybind11::module_& module);
void BindFusedExperts(pybind11::module_& module);
void BindInvariant(pybind11::module_& module);
void BindMoePermute(pybind11::module_& module);
void BindNormRope(pybind11::module_& module);
void BindPackedGae(pybind11::module_& module);
void BindPagedAttention(pybind11::module_& module);
void BindPolicyLoss(pybind11::module_& module);
void BindSeededSample(pybind11::module_& module);
void BindVpLogprob(pybind11::module_& module);
void BindWeightDelta(pybind11::module_& module);
void BindWeightDigest(pybind11::module_& module);

}  // namespace mrl
