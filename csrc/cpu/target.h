// Which instruction set the CPU kernels use.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MRL_X86_TARGETS 1
#endif

namespace mrl {

constexpr int kLanes = 32;  // of cpu/simd.h

enum class Target { kNarrow, kMedium, kWide };

// The widest that this processor has, or MRL_CPU_TARGET's. Throws std::invalid_argument where that
// names none, or one that this processor lacks.
Target ChosenTarget();

}  // namespace mrl
