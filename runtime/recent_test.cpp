// What prepare() costs where the thread asked a moment ago, and when it asks its plan source again.
#include <wyvern/runtime.hpp>

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <new>
#include <thread>

#include "cache/cache_testing.hpp"
#include "runtime/plan.hpp"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define WYVERN_COUNTED 0
#elif defined(__has_feature)
#define WYVERN_COUNTED !(__has_feature(address_sanitizer) || __has_feature(thread_sanitizer))
#else
#define WYVERN_COUNTED 1
#endif

namespace {
thread_local std::int64_t allocations = 0;
thread_local std::int64_t locks = 0;
}  // namespace

// A sanitizer has its own of these.
#if WYVERN_COUNTED
// Not inlined: GCC takes malloc for operator new's own and free for its mismatch.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++allocations;
  if (void* const memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

extern "C" int pthread_mutex_lock(pthread_mutex_t* mutex) noexcept {
  static const auto real =
      reinterpret_cast<int (*)(pthread_mutex_t*)>(dlsym(RTLD_NEXT, "pthread_mutex_lock"));
  ++locks;
  return real(mutex);
}
#endif

namespace wyvern {
namespace {

using namespace std::chrono_literals;

/// No plan; counts how often it is asked.
class Counting final : public PlanSource {
 public:
  std::optional<PlanChoice> find(const DeviceInfo&, const ProblemKey&, const PlanCheck&) override {
    ++asked;
    return {};
  }
  [[nodiscard]] std::optional<std::uint64_t> version() const noexcept override { return at; }

  std::atomic<int> asked = 0;
  std::optional<std::uint64_t> at = 0;
};

class RecentTest : public ::testing::Test {
 protected:
  Operator prepare(const Problem& problem) { return runtime_.prepare(device_, problem); }
  /// Calls in a row; at least one comes soon after the one before, however busy the
  /// machine.
  int asked_by(int calls, const Problem& problem) {
    const int before = source_->asked;
    for (int i = 0; i < calls; ++i) prepare(problem);
    return source_->asked - before;
  }

  static Problem problem(std::int64_t T) {
    Problem p;
    p.T = T;
    p.K = p.V = 16;
    return p;
  }

  const testing::TempDirectory temp_;
  const std::shared_ptr<Counting> source_ = std::make_shared<Counting>();
  Runtime runtime_{{.cache = std::make_shared<Cache>(temp_.path()), .plans = source_}};
  const Device device_ = Device::open("cpu");
};

TEST_F(RecentTest, AsksOnceForARepeatedProblem) {
  prepare(problem(64));
  prepare(problem(65));
  EXPECT_LT(asked_by(1000, problem(64)), 1000);
  EXPECT_LT(asked_by(1000, problem(65)), 1000);
}

TEST_F(RecentTest, AnotherProblemIsAnotherQuestion) {
  prepare(problem(64));
  EXPECT_EQ(asked_by(1, problem(128)), 1);
  Problem p = problem(64);
  p.scale = 0.5F;
  EXPECT_EQ(asked_by(1, p), 1);
}

TEST_F(RecentTest, AsksAgainWhenTheSourceChanges) {
  prepare(problem(64));
  source_->at = 1;
  EXPECT_GE(asked_by(1, problem(64)), 1);
}

TEST_F(RecentTest, AsksAgainAfterAWhile) {
  prepare(problem(64));
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(asked_by(1, problem(64)), 1);
}

TEST_F(RecentTest, ASourceWithoutVersionIsAlwaysAsked) {
  source_->at = std::optional<std::uint64_t>{};
  EXPECT_EQ(asked_by(20, problem(64)), 20);
}

TEST_F(RecentTest, AnotherThreadAsksForItself) {
  prepare(problem(64));
  int asked = 0;
  std::thread([&] { asked = asked_by(1, problem(64)); }).join();
  EXPECT_EQ(asked, 1);
}

TEST_F(RecentTest, AnotherRuntimeAsksForItself) {
  prepare(problem(64));
  const int before = source_->asked;
  Runtime other({.cache = std::make_shared<Cache>(temp_.path()), .plans = source_});
  other.prepare(device_, problem(64));
  EXPECT_EQ(source_->asked, before + 1);
}

TEST_F(RecentTest, AWinnerThatThisProcessStoresIsSeenAtOnce) {
  Runtime runtime({.cache = std::make_shared<Cache>(temp_.path()), .plans = nullptr});
  const Problem p = problem(64);
  EXPECT_EQ(runtime.prepare(device_, p).origin(), Origin::fallback);
  const ProblemKey key = problem_key(p);
  WinnerRow winner = testing::winner(key.tokens, key.sequences);
  winner.device = device_.info().key;
  winner.family = key.family;
  winner.driver = device_.info().driver;
  winner.plan = plan_to_json(runtime.prepare(device_, p).plan());
  EXPECT_TRUE(Cache(temp_.path()).store_winner(winner));
  EXPECT_EQ(runtime.prepare(device_, p).origin(), Origin::exact);
}

TEST_F(RecentTest, AllocatesNothingAndTakesNoLock) {
  if (!WYVERN_COUNTED) GTEST_SKIP() << "a sanitizer allocates and locks by itself";
  const Problem p = problem(64);
  allocations = locks = 0;
  prepare(p);
  EXPECT_GT(allocations, 0);
  EXPECT_GT(locks, 0);
  // A busy machine may let the 20 ms pass between two calls, not between any two of a thousand.
  bool free = false;
  for (int i = 0; i < 1000 && !free; ++i) {
    allocations = locks = 0;
    const Operator op = prepare(p);
    free = allocations == 0 && locks == 0;
  }
  EXPECT_TRUE(free);
}

}  // namespace
}  // namespace wyvern
