#include "runtime/base/fork_guard.hpp"

#include <chrono>
#include <thread>

#include <pthread.h>

namespace wyvern {
namespace {

using namespace std::chrono_literals;

/// NoForks of this thread, one inside the other.
thread_local int depth = 0;

/// New work lets waiting forks go first, so that back-to-back work cannot starve them; not for
/// ever, since the work that a fork waits for may itself wait for this.
constexpr auto kNap = 1ms;
constexpr int kNaps = 100;

}  // namespace

NoFork::NoFork() {
  if (depth++ == 0) ForkGuard::instance().enter();
}

NoFork::~NoFork() {
  if (--depth == 0) ForkGuard::instance().leave();
}

ForkGuard& ForkGuard::instance() {
  static ForkGuard* const guard = new ForkGuard;
  return *guard;
}

ForkGuard::ForkGuard() {
  ::pthread_atfork([] { instance().hold(); }, [] { instance().let_go(false); },
                   [] { instance().let_go(true); });
}

void ForkGuard::add(Mutex& mutex) {
  const Lock lock(members_mutex_);
  members_.push_back(&mutex);
}

void ForkGuard::remove(Mutex& mutex) {
  const Lock lock(members_mutex_);
  std::erase(members_, &mutex);
}

void ForkGuard::enter() {
  for (int i = 0; i < kNaps && waiting_ != 0; ++i) std::this_thread::sleep_for(kNap);
  const Lock lock(gate_);
  ++working_;
}

void ForkGuard::leave() {
  const Lock lock(gate_);
  --working_;
}

// How many mutexes these take is known only when they run. It cannot wait on a condition variable:
// the child would inherit it with waiters that no longer exist.
void ForkGuard::hold() WYVERN_UNCHECKED_LOCKING {
  ++waiting_;
  gate_.lock();
  // If this thread itself holds a guard, it does not wait for others, which may do the same.
  while (depth == 0 && working_ != 0) {
    gate_.unlock();
    std::this_thread::sleep_for(kNap);
    gate_.lock();
  }
  --waiting_;
  members_mutex_.lock();
  for (Mutex* mutex : members_) mutex->lock();
}

void ForkGuard::let_go(bool in_child) WYVERN_UNCHECKED_LOCKING {
  for (Mutex* mutex : members_) mutex->unlock();
  members_mutex_.unlock();
  if (in_child) {
    working_ = depth == 0 ? 0 : 1;
    waiting_ = 0;
  }
  gate_.unlock();
}

}  // namespace wyvern
