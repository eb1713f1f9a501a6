// Which instruction set the CPU kernels use.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MRL_X86_TARGETS 1
#endif

namespace mrl {

constexpr int kLanes = 32;  // lanes of cpu/simd.h
constexpr int kEight = 8;   // lanes of cpu/dot_rows.h

enum class Target { kNarrow, kMedium, kWide };

// Returns the widest target of this processor, or that of MRL_CPU_TARGET. Throws
// std::invalid_argument if the variable is invalid, or if this processor lacks the target.
Target ChosenTarget();

}  // namespace mrl
