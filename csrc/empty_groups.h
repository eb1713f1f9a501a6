// Zeroes of groups without rows: a grouped product whose sums run over a group's rows leaves the
// result of a group that has none undefined.
#pragma once

#include <cstdint>

namespace mrl {

struct EmptyGroupsInput {
  void* values;         // [num_groups, group_bytes]
  const int32_t* ends;  // [num_groups]: where the rows of each group end, from 0 on
  int64_t num_groups;
  int64_t group_bytes;
};

// Writes to groups without rows, and reads none of the values.
void ZeroEmptyGroupsCpu(const EmptyGroupsInput& in);
void ZeroEmptyGroupsCuda(const EmptyGroupsInput& in, uintptr_t stream);

}  // namespace mrl
