#include "runtime/devices/cpu/thread_pool.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace wyvern {
namespace {

struct Counts {
  std::vector<std::atomic<int>> calls;
  explicit Counts(std::size_t size) : calls(size) {}
  static void count(const void* context, std::int64_t index, void*) {
    auto& self = *const_cast<Counts*>(static_cast<const Counts*>(context));
    self.calls[static_cast<std::size_t>(index)].fetch_add(1);
  }
};

TEST(ThreadPool, RunsEveryBlockOnce) {
  ThreadPool pool(4);
  EXPECT_EQ(pool.threads(), 4U);
  for (const std::int64_t size : {0, 1, 2, 3, 7, 1000}) {
    Counts counts(static_cast<std::size_t>(size));
    pool.run(size, 0, &Counts::count, &counts);
    for (const auto& calls : counts.calls) EXPECT_EQ(calls.load(), 1);
  }
}

TEST(ThreadPool, ManyShortLoopsInARow) {
  ThreadPool pool(3);
  for (int round = 0; round < 20000; ++round) {
    Counts counts(5);
    pool.run(5, 0, &Counts::count, &counts);
    for (const auto& calls : counts.calls) ASSERT_EQ(calls.load(), 1) << "round " << round;
  }
}

TEST(ThreadPool, CallersFromSeveralThreadsDoNotMixTheirLoops) {
  ThreadPool pool(2);
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int c = 0; c < 4; ++c)
    callers.emplace_back([&] {
      for (int round = 0; round < 500; ++round) {
        Counts counts(17);
        pool.run(17, 0, &Counts::count, &counts);
        for (const auto& calls : counts.calls) wrong += calls.load() != 1;
      }
    });
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong.load(), 0);
}

TEST(ThreadPool, ScratchIsLargeEnoughAlignedAndPrivate) {
  ThreadPool pool(4);
  struct Check {
    std::size_t bytes;
    std::atomic<int> wrong{0};
    static void run(const void* context, std::int64_t index, void* scratch) {
      auto& self = *const_cast<Check*>(static_cast<const Check*>(context));
      if (reinterpret_cast<std::uintptr_t>(scratch) % 64 != 0) ++self.wrong;
      auto* bytes = static_cast<unsigned char*>(scratch);
      std::memset(bytes, static_cast<int>(index % 251), self.bytes);
      std::this_thread::yield();
      for (std::size_t i = 0; i < self.bytes; ++i)
        if (bytes[i] != index % 251) ++self.wrong;
    }
  };
  for (const std::size_t bytes : {std::size_t{64}, std::size_t{1} << 20, std::size_t{4096}}) {
    Check check{bytes};
    pool.run(64, bytes, &Check::run, &check);
    EXPECT_EQ(check.wrong.load(), 0) << bytes << " bytes";
  }
}

/// More blocks than the loop's state counts: one thread runs them in order, and none is lost.
TEST(ThreadPool, BlocksBeyondItsCounterAreTheCallersAlone) {
  struct Enough {};
  struct Check {
    std::int64_t next = 0;
    static void run(const void* context, std::int64_t index, void*) {
      auto& self = *const_cast<Check*>(static_cast<const Check*>(context));
      if (index != self.next++) std::abort();
      if (index == 1000) throw Enough();
    }
  };
  ThreadPool pool(3);
  Check check;
  EXPECT_THROW(pool.run((std::int64_t{1} << 40) + 1, 0, &Check::run, &check), Enough);
  EXPECT_EQ(check.next, 1001);
}

}  // namespace
}  // namespace wyvern
