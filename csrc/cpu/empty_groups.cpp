#include "empty_groups.h"

#include <cstring>

namespace mrl {

void ZeroEmptyGroupsCpu(const EmptyGroupsInput& in) {
  char* const values = static_cast<char*>(in.values);
  int32_t start = 0;
  for (int64_t group = 0; group < in.num_groups; ++group) {
    if (in.ends[group] == start) std::memset(values + group * in.group_bytes, 0, in.group_bytes);
    start = in.ends[group];
  }
}

}  // namespace mrl
