// Reports what a GPU reports as a fault, and what passes silently on x86 or on both: an address
// that is not mapped, a misaligned vector load, an index past the end of an array.
#pragma once

#include <cstdarg>
#include <cstdio>

#include "grid.h"

#pragma GCC visibility push(hidden)

namespace mrl_emulator {

[[noreturn]] inline void Fail(const std::string& message) {
  if (grid && grid->InThread()) grid->Fail(message);
  std::fprintf(stderr, "emulator, in host code: %s\n", message.c_str());
  std::abort();
}

// Device printf: shown, and kept for the message of a __trap that follows.
__attribute__((format(printf, 1, 2))) inline int Print(const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  const int length = std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::fputs(text, stdout);
  if (grid) grid->printed += text;
  return length;
}

// Turns SIGSEGV, SIGBUS and SIGFPE of a thread of the grid into its error while this object lives.
class FaultHandlers {
 public:
  FaultHandlers() {
    struct sigaction action{};
    action.sa_sigaction = OnSignal;
    action.sa_flags = SA_SIGINFO;
    for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &action, &Before()[i]);
  }
  ~FaultHandlers() { Restore(); }
  FaultHandlers(const FaultHandlers&) = delete;
  FaultHandlers& operator=(const FaultHandlers&) = delete;

 private:
  static constexpr int kSignals[3] = {SIGSEGV, SIGBUS, SIGFPE};

  static struct sigaction* Before() {
    static struct sigaction before[3];
    return before;
  }
  static void Restore() {
    for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &Before()[i], nullptr);
  }

  static void OnSignal(int number, siginfo_t* info, void*) {
    if (!grid || !grid->InThread()) {
      Restore();  // not of a kernel: it comes again on return, to whoever handled it before
      return;
    }
    char text[80];
    std::snprintf(text, sizeof text, number == SIGFPE ? "bad arithmetic at %p" : "bad address %p",
                  info->si_addr);
    grid->Fail(text);
  }
};

// The head of what GCC hands to each of the functions below.
struct SourceLocation {
  const char* file;
  uint32_t line, column;
};

inline void FailAt(const SourceLocation* at, const std::string& what) {
  Fail(what + " at " + at->file + ":" + std::to_string(at->line));
}

}  // namespace mrl_emulator

// With -fsanitize=..., GCC inserts calls of these functions. They are here instead of in libubsan,
// which would print and go on.
extern "C" {
#define MRL_UBSAN(name, what, ...)                                                                \
  __attribute__((used)) inline void __ubsan_handle_##name(const mrl_emulator::SourceLocation* at, \
                                                          __VA_ARGS__) {                          \
    mrl_emulator::FailAt(at, what);                                                               \
  }
MRL_UBSAN(type_mismatch_v1, "misaligned address", uintptr_t)
MRL_UBSAN(out_of_bounds, "index out of bounds", uintptr_t)
MRL_UBSAN(shift_out_of_bounds, "shift by too much", uintptr_t, uintptr_t)
MRL_UBSAN(add_overflow, "signed overflow of +", uintptr_t, uintptr_t)
MRL_UBSAN(sub_overflow, "signed overflow of -", uintptr_t, uintptr_t)
MRL_UBSAN(mul_overflow, "signed overflow of *", uintptr_t, uintptr_t)
MRL_UBSAN(negate_overflow, "signed overflow of unary -", uintptr_t)
MRL_UBSAN(divrem_overflow, "integer division by 0 or overflow", uintptr_t, uintptr_t)
#undef MRL_UBSAN
}

#pragma GCC visibility pop
