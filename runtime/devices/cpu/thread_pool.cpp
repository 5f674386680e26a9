#include "runtime/devices/cpu/thread_pool.hpp"

#include <sched.h>

#include <atomic>
#include <chrono>
#include <new>
#include <thread>
#include <vector>

#include "runtime/base/mutex.hpp"
#include "runtime/float_environment.hpp"
#include "runtime/thread_owned.hpp"

namespace wyvern {
namespace {

struct Scratch {
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(void* p) const { ::operator delete(p, kAlignment); }
  };
  std::unique_ptr<void, Free> memory;
  std::size_t capacity = 0;
};

/// The calling thread's scratch, grown to the largest size requested so far; null without memory.
void* thread_scratch(std::size_t bytes) {
  Scratch* scratch = ThreadOwned<Scratch>::find();
  if (scratch == nullptr) {
    if (bytes == 0) return nullptr;
    try {
      scratch = &ThreadOwned<Scratch>::get();
    } catch (const std::bad_alloc&) {
      return nullptr;
    }
  }
  if (bytes > scratch->capacity) {
    scratch->memory.reset();
    scratch->memory.reset(::operator new(bytes, Scratch::kAlignment, std::nothrow));
    scratch->capacity = scratch->memory != nullptr ? bytes : 0;
  }
  return scratch->memory.get();
}

// A waiting thread spins this long before it sleeps: the gap between two stages of one launch is
// shorter, a sleeper's wake-up longer.
constexpr std::chrono::microseconds kSpin{30};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

// The loop's state is one word: a generation and how many blocks are not yet claimed. A thread
// claims a block by decrementing the count of the generation it saw; a late thread finds no block
// left, so the caller waits for blocks, never for threads. The job's fields are read only after a
// claim, which keeps the job alive until that block is done. Scratch is allocated before the claim,
// so that a thread without memory leaves the blocks to others.
class ThreadPool::Impl {
 public:
  explicit Impl(unsigned threads) {
    try {
      workers_.reserve(threads);
      for (unsigned i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
    } catch (const std::exception&) {  // the system starts no more; these do
    }
  }
  ~Impl() {
    stop_.store(true);
    state_.fetch_add(kGeneration);
    state_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  unsigned threads() const { return static_cast<unsigned>(workers_.size()) + 1; }

  void run(std::int64_t count, std::size_t scratch_bytes, Body body, const void* context) {
    const DefaultFloatEnvironment plain;
    void* scratch = thread_scratch(scratch_bytes);
    if (scratch == nullptr && scratch_bytes > 0) throw std::bad_alloc();
    // The word does not count past kCount.
    const bool countable = static_cast<std::uint64_t>(count) <= kCount;
    if (workers_.empty() || count == 1 || !countable || !busy_.try_lock()) {
      for (std::int64_t i = 0; i < count; ++i) body(context, i, scratch);
      return;
    }
    const Lock lock(busy_, std::adopt_lock);
    count_ = count;
    scratch_bytes_ = scratch_bytes;
    if (scratch_bytes > most_scratch_.load(std::memory_order_relaxed))
      most_scratch_.store(scratch_bytes, std::memory_order_relaxed);
    body_ = body;
    context_ = context;
    left_.store(count, std::memory_order_relaxed);
    const std::uint64_t generation = (state_.load() & ~kCount) + kGeneration;
    state_.store(generation | static_cast<std::uint64_t>(count));
    state_.notify_all();
    while (claim_and_run(/*has_scratch=*/true)) {
    }
    while (left_.load(std::memory_order_acquire) != 0) pause();
  }

 private:
  static constexpr std::uint64_t kGeneration = std::uint64_t{1} << 40;
  static constexpr std::uint64_t kCount = kGeneration - 1;

  bool claim_and_run(bool has_scratch) {
    std::uint64_t seen = state_.load(std::memory_order_acquire);
    do {
      if ((seen & kCount) == 0) return false;
      // Set before the generation that was seen, and never decreased.
      const std::size_t scratch = most_scratch_.load(std::memory_order_relaxed);
      if (!has_scratch && scratch > 0 && thread_scratch(scratch) == nullptr) return false;
    } while (!state_.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel));
    const std::int64_t index = count_ - static_cast<std::int64_t>(seen & kCount);
    body_(context_, index, thread_scratch(scratch_bytes_));
    left_.fetch_sub(1, std::memory_order_release);
    return true;
  }

  void work() {
    const DefaultFloatEnvironment
        plain;  // not the environment of the thread that opened the device
    std::uint64_t seen = 0;
    while (!stop_.load(std::memory_order_relaxed)) {
      while (claim_and_run(/*has_scratch=*/false)) {
      }
      seen = state_.load();
      if ((seen & kCount) != 0) continue;
      const auto end = std::chrono::steady_clock::now() + kSpin;
      while (state_.load(std::memory_order_relaxed) == seen &&
             std::chrono::steady_clock::now() < end)
        pause();
      if (!stop_.load(std::memory_order_relaxed)) state_.wait(seen);
    }
  }

  // Held by the one caller whose loop the job's fields describe; workers read these without it.
  Mutex busy_;
  std::atomic<std::uint64_t> state_{0};
  std::atomic<std::int64_t> left_{0};
  std::atomic<bool> stop_{false};
  std::atomic<std::size_t> most_scratch_{0};  ///< of all jobs so far
  std::int64_t count_ = 0;
  std::size_t scratch_bytes_ = 0;
  Body body_ = nullptr;
  const void* context_ = nullptr;
  std::vector<std::thread> workers_;
};

ThreadPool::ThreadPool(unsigned threads) : impl_(std::make_unique<Impl>(threads)) {}
ThreadPool::~ThreadPool() = default;

unsigned ThreadPool::threads() const noexcept { return impl_->threads(); }

void ThreadPool::run(std::int64_t count, std::size_t scratch_bytes, Body body,
                     const void* context) {
  if (count > 0) impl_->run(count, scratch_bytes, body, context);
}

unsigned ThreadPool::available_threads() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0)
    return static_cast<unsigned>(CPU_COUNT(&set));
  const unsigned cores = std::thread::hardware_concurrency();
  return cores == 0 ? 1 : cores;
}

}  // namespace wyvern
