// fork() and threads. The child has only the thread that called fork(), and every lock, promise and
// library in the middle of another thread's work: a lock that is never unlocked, a result that
// never comes. So fork() waits until such work has ended.
#pragma once

#include <atomic>
#include <vector>

#include "runtime/base/mutex.hpp"

namespace wyvern {

/// While it lives, a fork() by another thread waits. For work of seconds at most that calls no code
/// of users', in any thread; the thread itself may nest it, and may fork().
class [[nodiscard]] NoFork {
 public:
  NoFork();
  ~NoFork();
  NoFork(const NoFork&) = delete;
  NoFork& operator=(const NoFork&) = delete;
};

/// The process's one guard, which never ends: fork() may come at any time. Thread-safe.
class ForkGuard {
 public:
  static ForkGuard& instance();

  /// fork() holds `mutex` from now on. A thread that holds one of these locks no other.
  void add(Mutex& mutex) WYVERN_EXCLUDES(members_mutex_);
  void remove(Mutex& mutex) WYVERN_EXCLUDES(members_mutex_);

 private:
  friend class NoFork;

  ForkGuard();
  void enter() WYVERN_EXCLUDES(gate_);
  void leave() WYVERN_EXCLUDES(gate_);
  void hold();
  void let_go(bool in_child);

  // fork() takes them in this order: work may wait for members, members never wait for work.
  Mutex gate_;
  int working_ WYVERN_GUARDED_BY(gate_) = 0;  ///< threads with a NoFork
  std::atomic<int> waiting_{0};               ///< forks
  Mutex members_mutex_;
  std::vector<Mutex*> members_ WYVERN_GUARDED_BY(members_mutex_);
};

}  // namespace wyvern
