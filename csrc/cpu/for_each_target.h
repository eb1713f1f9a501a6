// Compiles the file named by MRL_BODY for AVX-512, for AVX2 with FMA and for the baseline, in the
// namespaces wide, medium and narrow. MRL_DISPATCH calls the best one that this processor supports.
//
// The environment variable MRL_CPU_TARGET (wide, medium, narrow) forces one, for tests.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/target.h"
#include "portable.h"

#ifdef MRL_X86_TARGETS
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
namespace mrl::wide {
#define MRL_WIDTH 16
#include "cpu/simd.h"
#include MRL_BODY
#undef MRL_WIDTH
}  // namespace mrl::wide
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace mrl::medium {
#define MRL_WIDTH 8
#include "cpu/simd.h"
#include MRL_BODY
#undef MRL_WIDTH
}  // namespace mrl::medium
#pragma GCC pop_options
#endif

namespace mrl::narrow {
#define MRL_WIDTH 4
#include "cpu/simd.h"
#include MRL_BODY
#undef MRL_WIDTH
}  // namespace mrl::narrow

#ifdef MRL_X86_TARGETS
#define MRL_DISPATCH(function)                                          \
  (::mrl::ChosenTarget() == ::mrl::Target::kWide     ? wide::function   \
   : ::mrl::ChosenTarget() == ::mrl::Target::kMedium ? medium::function \
                                                     : narrow::function)
#else
#define MRL_DISPATCH(function) (narrow::function)
#endif
