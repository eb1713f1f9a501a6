// Zeroes the results of groups without rows, which a grouped matrix product that sums over a
// group's rows leaves undefined.
#pragma once

#include <cstdint>

namespace mrl {

struct EmptyGroupsInput {
  void* values;         // [num_groups, group_bytes]
  const int32_t* ends;  // [num_groups]: the end of each group's rows; the first group starts at 0
  int64_t num_groups;
  int64_t group_bytes;
};

// Writes only to groups without rows, and reads none of the values.
void ZeroEmptyGroupsCpu(const EmptyGroupsInput& in);
void ZeroEmptyGroupsCuda(const EmptyGroupsInput& in, uintptr_t stream);

}  // namespace mrl
