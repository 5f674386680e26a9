// One block of an emulated launch: its threads as fibers, their barriers, warps and copies.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tests/emulator/emulator.hpp"
#include "tests/emulator/fiber.hpp"
#include "tests/emulator/machine.hpp"

namespace wyvern::emulator {

/// Memory that ends (to within 15 bytes) where an unmapped page begins, with another in front.
class GuardedMemory {
 public:
  explicit GuardedMemory(std::size_t bytes);
  ~GuardedMemory();
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;

  /// Aligned to 16 bytes.
  unsigned char* data() const { return data_; }

 private:
  void* mapping_ = nullptr;
  std::size_t mapped_bytes_ = 0;
  unsigned char* data_ = nullptr;
};

/// Runs the blocks of one launch, one at a time. Lives on one host thread.
class Block {
 public:
  Block(int threads, std::int64_t shared_bytes, Schedule schedule);

  Machine& machine() { return machine_; }

  /// Runs body() once as every thread of block `index`; throws std::runtime_error on misuse.
  void run(std::int64_t index, const std::function<void()>& body);

 private:
  enum class State : std::uint8_t { ready, at_barrier, in_warp, ended };
  struct Copy {
    void* destination;
    const void* source;
    int bytes;
    bool valid;
  };
  struct Thread {
    Fiber fiber;
    State state = State::ready;
    std::vector<std::vector<Copy>> copies;  ///< one a group; the last is not committed yet
  };
  struct Warp {
    std::array<LaneOperands*, 32> operands{};
    int arrived = 0;
    Collective operation{};
  };

  static void enter(void* block);
  static void sync_block();
  static void collective(Collective operation, LaneOperands& operands);
  static void copy_async(void* destination, const void* source, int bytes, bool valid);
  static void copy_async_commit();
  static void copy_async_wait(int pending);

  Thread& current() { return *threads_[static_cast<std::size_t>(machine_.thread)]; }
  /// Suspends the running thread, now in `state`, until it is ready again.
  void suspend(State state);
  /// A thread that can run, lanes of the running thread's warp first; -1 if there is none.
  int next_ready() const;
  void switch_to(int thread);
  /// Leaves the block for good, with a reason.
  [[noreturn]] void fail(std::string reason);
  std::string deadlock() const;

  Machine machine_;
  Schedule schedule_;
  std::size_t shared_bytes_;
  GuardedMemory shared_;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<Warp> warps_;
  Fiber host_;
  const std::function<void()>* body_ = nullptr;
  int at_barrier_ = 0;
  int ended_ = 0;
  std::string failure_;
};

}  // namespace wyvern::emulator
