// Runs a grid of CUDA threads on one CPU thread: each thread of a block is a fiber that runs until
// it waits for others, and blocks run one after another. So a kernel that spins until another block
// writes may never end; nothing here can tell.
//
// What cannot work on a GPU ends the launch with std::runtime_error, which names the kernel, the
// block, the thread and the line: __syncthreads at different lines, a shuffle that not every lane
// of the warp takes part in, an address that is not mapped, a trap.
//
// MRL_EMULATOR_ORDER is forward (the default), reverse or shuffled (by MRL_EMULATOR_SEED): the
// order of blocks, of the warps of a block and of the threads of a warp. Each warp runs as far as
// it can before the next one starts, so a missing barrier changes results in one of the orders.
#pragma once

#include <signal.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "shared_memory.h"

#pragma GCC visibility push(hidden)  // two libraries in one process share none of this

struct dim3 {
  unsigned x = 0, y = 1, z = 1;
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

namespace mrl_emulator {

constexpr unsigned kWarp = 32;
constexpr size_t kStackBytes = 64 * 1024;

// Where a thread waits. Two threads wait for each other if all fields agree.
struct Site {
  const char* what = "";
  const char* file = "";
  int line = 0;
  size_t num_bytes = 0;  // of the value of a shuffle

  bool operator==(const Site& other) const {
    return line == other.line && num_bytes == other.num_bytes && !std::strcmp(what, other.what) &&
           !std::strcmp(file, other.file);
  }
  std::string Name() const {
    return std::string(what) + " at " + file + ":" + std::to_string(line);
  }
};

enum class State { kReady, kAtBarrier, kAtExchange, kExited };

struct Thread {
  ucontext_t context;
  std::unique_ptr<unsigned char[]> stack;
  State state = State::kExited;
  Site site;
  uint64_t sent = 0;
};

enum class Order { kForward, kReverse, kShuffled };

inline Order ReadOrder() {
  const char* given = std::getenv("MRL_EMULATOR_ORDER");
  const std::string name = given ? given : "forward";
  if (name == "forward") return Order::kForward;
  if (name == "reverse") return Order::kReverse;
  if (name == "shuffled") return Order::kShuffled;
  throw std::runtime_error("MRL_EMULATOR_ORDER: got " + name +
                           ", expected forward, reverse or shuffled");
}

inline unsigned ReadSeed() {
  const char* given = std::getenv("MRL_EMULATOR_SEED");
  return given ? static_cast<unsigned>(std::strtoul(given, nullptr, 10)) : 0;
}

class Grid {
 public:
  Grid(const char* kernel, unsigned num_blocks, unsigned block_size, std::function<void()> body)
      : kernel_(kernel),
        body_(std::move(body)),
        order_(ReadOrder()),
        random_(ReadSeed()),
        num_blocks_(num_blocks),
        threads_(block_size),
        delivered_((block_size + kWarp - 1) / kWarp) {
    gridDim.x = num_blocks;
    blockDim.x = block_size;
    for (Thread& thread : threads_) Prepare(thread);
  }
  Grid(const Grid&) = delete;
  Grid& operator=(const Grid&) = delete;

  void Run() {
    for (unsigned block : Ordered(0, num_blocks_)) {
      blockIdx.x = block;
      PoisonShared();
      RunBlock();
    }
  }

  bool InThread() const { return in_thread_; }
  std::string printed;  // by printf, in this launch

  // The functions below are called from inside a thread.

  void Barrier(const Site& site) { Wait(State::kAtBarrier, site); }

  // Hands `value` to the warp; returns what each of its 32 lanes handed over.
  const std::array<uint64_t, kWarp>& Exchange(const Site& site, uint64_t value) {
    threads_[current_].sent = value;
    Wait(State::kAtExchange, site);
    return delivered_[current_ / kWarp];
  }

  // Ends the launch. The thread is left behind as it is: its stack is never unwound, so this works
  // from functions that must not throw.
  [[noreturn]] void Fail(const std::string& message) {
    error_ = Where(current_) + ": " + message;
    in_thread_ = false;
    setcontext(&scheduler_);
    std::abort();
  }

 private:
  static Grid*& Entering() {
    static Grid* grid = nullptr;
    return grid;
  }

  static void Enter() {
    Grid* grid = Entering();
    for (;;) {  // once for each block
      try {
        grid->body_();
      } catch (...) {  // cannot pass through the bottom of this stack: Resume throws it again
        grid->thrown_ = std::current_exception();
      }
      grid->Wait(State::kExited, {});
    }
  }

  void Prepare(Thread& thread) {
    thread.stack.reset(new unsigned char[kStackBytes]);
    std::memset(thread.stack.get(), kPoison, 64);  // overwritten when the stack is too small
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = kStackBytes;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, Enter, 0);
  }

  void Wait(State state, const Site& site) {
    Thread& thread = threads_[current_];
    thread.state = state;
    thread.site = site;
    in_thread_ = false;
    swapcontext(&thread.context, &scheduler_);
  }

  void Resume(unsigned thread) {
    current_ = threadIdx.x = thread;
    in_thread_ = true;
    Entering() = this;
    swapcontext(&scheduler_, &threads_[thread].context);
    const unsigned char* low = threads_[thread].stack.get();
    if (!std::all_of(low, low + 64, [](unsigned char byte) { return byte == kPoison; })) {
      error_ = Where(thread) + ": used more than the emulator's stack";
    }
    if (thrown_) std::rethrow_exception(thrown_);
    if (!error_.empty()) throw std::runtime_error(error_);
  }

  void RunBlock() {
    for (Thread& thread : threads_) thread.state = State::kReady;
    const auto num_warps = static_cast<unsigned>(delivered_.size());
    do {
      std::vector<unsigned> running = Ordered(0, num_warps);
      for (size_t next = 0; !running.empty();) {
        if (order_ == Order::kShuffled) next = random_() % running.size();
        if (!StepWarp(running[next])) running.erase(running.begin() + static_cast<long>(next));
      }
    } while (ReleaseBarrier());
  }

  // Runs the threads of a warp until each waits. True if they had a shuffle, and so can go on.
  bool StepWarp(unsigned warp) {
    const unsigned first = warp * kWarp;
    const unsigned end = std::min<unsigned>(first + kWarp, threads_.size());
    for (unsigned thread : Ordered(first, end)) {
      if (threads_[thread].state == State::kReady) Resume(thread);
    }
    unsigned one = first;
    while (one < end && threads_[one].state != State::kAtExchange) ++one;
    if (one == end) return false;
    const Site& site = threads_[one].site;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      const unsigned thread = first + lane;
      const bool joins = thread < end && threads_[thread].state == State::kAtExchange &&
                         threads_[thread].site == site;
      if (!joins) {
        throw std::runtime_error(Where(one) + ": " + site.Name() + " needs all 32 lanes, but " +
                                 Describe(thread));
      }
    }
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      delivered_[warp][lane] = threads_[first + lane].sent;
      threads_[first + lane].state = State::kReady;
    }
    return true;
  }

  // True if threads waited at a barrier. Threads that have exited do not count, as on a GPU.
  bool ReleaseBarrier() {
    const Thread* one = nullptr;
    for (Thread& thread : threads_) {
      if (thread.state == State::kExited) continue;
      if (!one) one = &thread;
      if (!(thread.site == one->site)) {
        const auto index = static_cast<unsigned>(&thread - threads_.data());
        throw std::runtime_error(Where(static_cast<unsigned>(one - threads_.data())) + ": " +
                                 one->site.Name() + ", but " + Describe(index));
      }
      thread.state = State::kReady;
    }
    return one != nullptr;
  }

  std::vector<unsigned> Ordered(unsigned begin, unsigned end) {
    std::vector<unsigned> order(end - begin);
    std::iota(order.begin(), order.end(), begin);
    if (order_ == Order::kReverse) std::reverse(order.begin(), order.end());
    if (order_ == Order::kShuffled) std::shuffle(order.begin(), order.end(), random_);
    return order;
  }

  std::string Where(unsigned thread) const {
    return kernel_ + ": block " + std::to_string(blockIdx.x) + ", thread " + std::to_string(thread);
  }

  std::string Describe(unsigned thread) const {
    const std::string name = "thread " + std::to_string(thread);
    if (thread >= threads_.size()) return name + " does not exist";
    if (threads_[thread].state == State::kExited) return name + " has exited";
    return name + " waits in " + threads_[thread].site.Name();
  }

  std::string kernel_, error_;
  std::exception_ptr thrown_;
  std::function<void()> body_;
  Order order_;
  std::mt19937 random_;
  unsigned num_blocks_, current_ = 0;
  bool in_thread_ = false;
  ucontext_t scheduler_;
  std::vector<Thread> threads_;
  std::vector<std::array<uint64_t, kWarp>> delivered_;  // for each warp, by its last shuffle
};

inline Grid* grid = nullptr;  // the one that runs now

}  // namespace mrl_emulator

#pragma GCC visibility pop
