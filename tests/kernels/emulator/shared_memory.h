// Fills the __shared__ variables of a library with poison, so that a block cannot use what an
// earlier one left there, or nobody wrote.
#pragma once

#include <link.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>

#pragma GCC visibility push(hidden)

namespace mrl_emulator {

constexpr unsigned char kPoison = 0xff;  // NaN as a float, -1 as an integer

// __shared__ variables are `static thread_local`, which puts all of them into the one block of
// thread-local storage of this library. Nothing else of it is there, if it holds .cu files only.
inline thread_local char shared_anchor;  // its use makes the dynamic linker allocate that block

inline int PoisonOne(dl_phdr_info* info, size_t, void* anchor) {
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    const uintptr_t start = reinterpret_cast<uintptr_t>(info->dlpi_tls_data);
    const uintptr_t wanted = reinterpret_cast<uintptr_t>(anchor);
    if (header.p_type != PT_TLS || wanted < start || wanted >= start + header.p_memsz) continue;
    std::memset(info->dlpi_tls_data, kPoison, header.p_memsz);
    return 1;
  }
  return 0;
}

inline void PoisonShared() {
  if (!dl_iterate_phdr(PoisonOne, &shared_anchor)) {
    throw std::logic_error("emulator: found no thread-local storage for __shared__ variables");
  }
}

}  // namespace mrl_emulator

#pragma GCC visibility pop
