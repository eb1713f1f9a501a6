// The part of CUDA that csrc/cuda/launch.h allows, for a C++ compiler: the same kernel source then
// runs on a CPU, where there is no GPU to test it on. It shows errors of logic, races between
// threads of a block and bad addresses; nothing about speed, and the last bits of expf, exp2f and
// logf differ from a GPU's.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>

#include "faults.h"
#include "grid.h"

#pragma GCC visibility push(hidden)

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define printf(...) ::mrl_emulator::Print(__VA_ARGS__)

#define MRL_SITE(what) \
  ::mrl_emulator::Site { what, __FILE__, __LINE__ }
#define __syncthreads() ::mrl_emulator::grid->Barrier(MRL_SITE("__syncthreads"))
#define __syncwarp(...) ::mrl_emulator::SyncWarp(MRL_SITE("__syncwarp"), {__VA_ARGS__})
#define __ballot_sync(...) ::mrl_emulator::Ballot(MRL_SITE("__ballot_sync"), __VA_ARGS__)
#define __any_sync(...) (::mrl_emulator::Ballot(MRL_SITE("__any_sync"), __VA_ARGS__) != 0)
#define __all_sync(...) (::mrl_emulator::Ballot(MRL_SITE("__all_sync"), __VA_ARGS__) == ~0u)
#define __shfl_sync(...) ::mrl_emulator::ShuffleIndex(MRL_SITE("__shfl_sync"), __VA_ARGS__)
#define __shfl_up_sync(...) ::mrl_emulator::ShuffleUp(MRL_SITE("__shfl_up_sync"), __VA_ARGS__)
#define __shfl_down_sync(...) ::mrl_emulator::ShuffleDown(MRL_SITE("__shfl_down_sync"), __VA_ARGS__)
#define __shfl_xor_sync(...) ::mrl_emulator::ShuffleXor(MRL_SITE("__shfl_xor_sync"), __VA_ARGS__)

#define MRL_LAUNCH(kernel, grid, block, stream, ...)                   \
  do {                                                                 \
    static_cast<void>(stream);                                         \
    ::mrl_emulator::Launch(#kernel, static_cast<int64_t>(grid), block, \
                           [&] { kernel(__VA_ARGS__); });              \
  } while (0)

enum cudaError_t { cudaSuccess = 0 };
using cudaStream_t = struct CUstream_st*;
inline cudaError_t cudaGetLastError() { return cudaSuccess; }  // MRL_LAUNCH has thrown before
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }

#define MRL_VECTORS(type, name)                                                          \
  struct alignas(2 * sizeof(type)) name##2 { type x, y; };                               \
  struct alignas(sizeof(type) < 8 ? 4 * sizeof(type) : 16) name##4 { type x, y, z, w; }; \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }                       \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
MRL_VECTORS(unsigned char, uchar)
MRL_VECTORS(unsigned short, ushort)
MRL_VECTORS(int, int)
MRL_VECTORS(unsigned, uint)
MRL_VECTORS(float, float)
MRL_VECTORS(double, double)
MRL_VECTORS(long long, longlong)
#undef MRL_VECTORS

namespace mrl_emulator {

// Runs every thread of every block. Raises std::runtime_error on what CUDA would refuse or hang on.
inline void Launch(const char* kernel, int64_t num_blocks, int64_t block_size,
                   const std::function<void()>& body) {
  if (num_blocks < 1 || num_blocks > INT32_MAX || block_size < 1 || block_size > 1024) {
    throw std::runtime_error(std::string(kernel) + ": invalid configuration: got " +
                             std::to_string(num_blocks) + " blocks of " +
                             std::to_string(block_size) + " threads");
  }
  static std::mutex one_at_a_time;  // the index variables and shared memory are one for all
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  const FaultHandlers handlers;
  Grid running(kernel, static_cast<unsigned>(num_blocks), static_cast<unsigned>(block_size), body);
  struct Current {
    explicit Current(Grid* now) { grid = now; }
    ~Current() { grid = nullptr; }
  } const current(&running);
  running.Run();
}

inline void CheckMask(const Site& site, unsigned mask) {
  if (mask != 0xffffffffu) Fail(site.Name() + ": only the full mask is emulated");
}

struct OptionalMask {
  unsigned bits = 0xffffffffu;
};

inline void SyncWarp(const Site& site, OptionalMask mask) {
  CheckMask(site, mask.bits);
  grid->Exchange(site, 0);
}

inline unsigned Ballot(const Site& site, unsigned mask, bool predicate) {
  CheckMask(site, mask);
  const auto& lanes = grid->Exchange(site, predicate);
  unsigned bits = 0;
  for (unsigned lane = 0; lane < kWarp; ++lane) bits |= static_cast<unsigned>(lanes[lane]) << lane;
  return bits;
}

// As in CUDA, a narrow integer travels as an int.
template <class T>
using Traveller = std::conditional_t<std::is_integral_v<T> && sizeof(T) < 4, int, T>;

// `choose(lane, first, last)` is the lane to read from, where first and last bound its group of
// `width` lanes.
template <class T, class Choose>
Traveller<T> Shuffle(Site site, unsigned mask, T given, int width, Choose choose) {
  using Value = Traveller<T>;
  static_assert(sizeof(Value) == 4 || sizeof(Value) == 8);
  static_assert(std::is_arithmetic_v<Value>);
  CheckMask(site, mask);
  if (width < 1 || width > 32 || (width & (width - 1))) Fail(site.Name() + ": bad width");
  Value value = given;
  site.num_bytes = sizeof value;
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  const auto& lanes = grid->Exchange(site, bits);
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const int first = lane / width * width;
  const int source = choose(lane, first, first + width - 1);
  std::memcpy(&value, &lanes[static_cast<size_t>(source)], sizeof value);
  return value;
}

template <class T>
auto ShuffleIndex(const Site& site, unsigned mask, T value, int source, int width = 32) {
  return Shuffle(site, mask, value, width,
                 [=](int, int first, int) { return first + (source & (width - 1)); });
}

template <class T>
auto ShuffleUp(const Site& site, unsigned mask, T value, unsigned delta, int width = 32) {
  return Shuffle(site, mask, value, width, [=](int lane, int first, int) {
    return delta <= static_cast<unsigned>(lane - first) ? lane - static_cast<int>(delta) : lane;
  });
}

template <class T>
auto ShuffleDown(const Site& site, unsigned mask, T value, unsigned delta, int width = 32) {
  return Shuffle(site, mask, value, width, [=](int lane, int, int last) {
    return delta <= static_cast<unsigned>(last - lane) ? lane + static_cast<int>(delta) : lane;
  });
}

template <class T>
auto ShuffleXor(const Site& site, unsigned mask, T value, int lane_mask, int width = 32) {
  return Shuffle(site, mask, value, width, [=](int lane, int, int last) {
    const int source = (lane ^ lane_mask) & 31;
    return source > last ? lane : source;
  });
}

template <class To, class From>
To Bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace mrl_emulator

inline unsigned __float_as_uint(float x) { return mrl_emulator::Bits<unsigned>(x); }
inline int __float_as_int(float x) { return mrl_emulator::Bits<int>(x); }
inline float __uint_as_float(unsigned x) { return mrl_emulator::Bits<float>(x); }
inline float __int_as_float(int x) { return mrl_emulator::Bits<float>(x); }
inline int64_t __double_as_longlong(double x) { return mrl_emulator::Bits<int64_t>(x); }
inline double __longlong_as_double(int64_t x) { return mrl_emulator::Bits<double>(x); }

inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
using std::max;
using std::min;

template <class T>
T __ldg(const T* address) {
  return *address;
}

inline void __threadfence() {}  // one thread runs at a time, so every store is seen at once
[[noreturn]] inline void __trap() {
  // On a GPU, too, only what was printed before the first trap is sure to be seen.
  const std::string said = mrl_emulator::grid ? mrl_emulator::grid->printed : "";
  mrl_emulator::Fail(said.empty() ? "__trap" : "__trap after: " + said);
}

// Only unsigned: an atomic sum of floats would depend on the order of threads.
inline unsigned atomicAdd(unsigned* address, unsigned value) {
  const unsigned before = *address;
  *address = before + value;
  return before;
}
template <class T, class U>
T atomicAdd(T*, U) = delete;

#pragma GCC visibility pop
