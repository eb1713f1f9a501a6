#include "cpu/target.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace mrl {
namespace {

Target WidestTarget() {
#ifdef MRL_X86_TARGETS
  __builtin_cpu_init();
  const bool medium = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (medium && wide) return Target::kWide;
  if (medium) return Target::kMedium;
#endif
  return Target::kNarrow;
}

Target Choose() {
  const Target widest = WidestTarget();
  const char* wanted = std::getenv("MRL_CPU_TARGET");
  if (wanted == nullptr) return widest;
  const std::string name = wanted;
  const Target target = name == "wide"     ? Target::kWide
                        : name == "medium" ? Target::kMedium
                                           : Target::kNarrow;
  if ((name != "wide" && name != "medium" && name != "narrow") || target > widest) {
    throw std::invalid_argument("MRL_CPU_TARGET: got '" + name +
                                "', expected wide, medium or narrow, and one that this processor "
                                "has");
  }
  return target;
}

}  // namespace

Target ChosenTarget() {
  static const Target chosen = Choose();
  return chosen;
}

}  // namespace mrl
