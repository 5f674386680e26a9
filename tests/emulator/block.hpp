// One block of an emulated launch: its threads as fibers, their barriers, warps and copies.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tests/emulator/barrier.hpp"
#include "tests/emulator/emulator.hpp"
#include "tests/emulator/fiber.hpp"
#include "tests/emulator/machine.hpp"
#include "tests/emulator/proxies.hpp"
#include "tests/emulator/tensor.hpp"
#include "tests/emulator/warpgroup.hpp"

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
  enum class State : std::uint8_t { ready, at_barrier, at_named, at_mbarrier, in_warp, ended };
  struct Copy {
    void* destination;
    const void* source;
    int bytes;
    bool valid;
  };
  struct Thread {
    Fiber fiber;
    State state = State::ready;
    std::vector<std::vector<Copy>> copies;     ///< one a group; the last is not committed yet
    std::vector<std::vector<TmaCopy>> stores;  ///< the same
    long barrier = 0;                          ///< the name or mbarrier that it waits at
    unsigned parity = 0;                       ///< of the mbarrier's phase
  };
  /// A TMA copy to shared memory, and the mbarrier that gets its bytes.
  struct Load {
    TmaCopy copy;
    long barrier;
  };
  struct NamedBarrier {
    int threads = 0;
    int arrived = 0;
  };
  struct Warp {
    std::array<LaneOperands*, 32> operands{};
    int arrived = 0;
    Collective operation{};
  };

  static thread_local Block* running;  ///< the block whose fibers run on this host thread

  static void enter(void* block);
  static void sync_block();
  static void collective(Collective operation, LaneOperands& operands);
  static void copy_async(void* destination, const void* source, int bytes, bool valid);
  static void copy_async_commit();
  static void copy_async_wait(int pending);
  // block_hopper.cpp
  static void barrier_init(void* barrier, unsigned arrivals);
  static void fence_barrier_init();
  static void barrier_arrive(void* barrier, unsigned expected_bytes);
  static void barrier_wait(void* barrier, unsigned parity);
  static void tensor_load(void* to, const void* map, const int* at, int rank, void* barrier);
  static void tensor_store(const void* map, const int* at, int rank, const void* from);
  static void bulk_load(void* to, const void* from, unsigned bytes, void* barrier);
  static void bulk_store(void* to, const void* from, unsigned bytes);
  static void bulk_commit();
  static void bulk_wait(int pending);
  static void sync_named(int name, int threads, bool wait);
  static void touch(const void* pointer);
  static void fence_proxy_async();
  void start_load(TmaCopy copy, void* to, void* barrier);
  void start_store(TmaCopy copy, const void* from);
  HopperMachine hopper_machine();
  void start_hopper();
  /// Lets one TMA copy arrive; false where none is under way.
  bool land();
  /// Readies what waits for a phase of `barrier` that is complete now.
  void wake(long barrier);
  /// What a block must not leave behind when it ends, or nothing.
  std::string unfinished() const;
  std::string describe_waiting() const;
  long shared_offset(const void* pointer) const {
    return static_cast<const unsigned char*>(pointer) - shared_.data();
  }
  /// fail(problem) unless there is none.
  void require(std::string problem);

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
  std::vector<WarpProducts> products_;  ///< one a warp
  Barriers barriers_;
  ProxyOrder proxies_;
  std::deque<Load> loads_;  ///< under way
  std::array<NamedBarrier, 16> named_{};
  Fiber host_;
  const std::function<void()>* body_ = nullptr;
  int at_barrier_ = 0;
  int ended_ = 0;
  std::string failure_;
};

}  // namespace wyvern::emulator
