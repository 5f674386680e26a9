// Mutexes whose use Clang checks: each member names the lock that it needs, and -Wthread-safety
// (the test `thread_safety`) fails where a member is used without its lock. Other compilers see
// plain mutexes. Every other room uses these.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define WYVERN_THREAD_ATTRIBUTE(attribute) __attribute__((attribute))
#else
#define WYVERN_THREAD_ATTRIBUTE(attribute)
#endif

/// On a member: it is read and written only while the mutex is held.
#define WYVERN_GUARDED_BY(mutex) WYVERN_THREAD_ATTRIBUTE(guarded_by(mutex))
/// On a function or lambda: its caller holds the mutex; or does not, since the function takes it.
#define WYVERN_REQUIRES(mutex) WYVERN_THREAD_ATTRIBUTE(requires_capability(mutex))
#define WYVERN_EXCLUDES(mutex) WYVERN_THREAD_ATTRIBUTE(locks_excluded(mutex))
/// On a function whose locking is not known at compile time; say why beside it.
#define WYVERN_UNCHECKED_LOCKING WYVERN_THREAD_ATTRIBUTE(no_thread_safety_analysis)

namespace wyvern {

class WYVERN_THREAD_ATTRIBUTE(capability("mutex")) Mutex {
 public:
  void lock() WYVERN_THREAD_ATTRIBUTE(acquire_capability()) { mutex_.lock(); }
  void unlock() WYVERN_THREAD_ATTRIBUTE(release_capability()) { mutex_.unlock(); }
  [[nodiscard]] bool try_lock() WYVERN_THREAD_ATTRIBUTE(try_acquire_capability(true)) {
    return mutex_.try_lock();
  }

 private:
  friend class Lock;
  std::mutex mutex_;
};

/// Holds a mutex for a scope. unlock() releases it in between, lock() locks it again.
class WYVERN_THREAD_ATTRIBUTE(scoped_lockable) Lock {
 public:
  explicit Lock(Mutex& mutex) WYVERN_THREAD_ATTRIBUTE(acquire_capability(mutex))
      : lock_(mutex.mutex_) {}
  /// For a mutex that the caller already holds.
  Lock(Mutex& mutex, std::adopt_lock_t adopt) WYVERN_REQUIRES(mutex) : lock_(mutex.mutex_, adopt) {}
  ~Lock() WYVERN_THREAD_ATTRIBUTE(release_capability()) = default;
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  void lock() WYVERN_THREAD_ATTRIBUTE(acquire_capability()) { lock_.lock(); }
  void unlock() WYVERN_THREAD_ATTRIBUTE(release_capability()) { lock_.unlock(); }

 private:
  friend class Condition;
  std::unique_lock<std::mutex> lock_;
};

/// A condition variable. A wait may end spuriously: test the condition in a loop.
class Condition {
 public:
  void wait(Lock& lock) { variable_.wait(lock.lock_); }
  void wait_for(Lock& lock, std::chrono::milliseconds longest) {
    variable_.wait_for(lock.lock_, longest);
  }
  void notify_all() noexcept { variable_.notify_all(); }

 private:
  std::condition_variable variable_;
};

}  // namespace wyvern
