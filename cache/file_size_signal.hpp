// Writing beyond the limit of file sizes without being killed for it.
#pragma once

#include <cerrno>
#include <csignal>
#include <ctime>

namespace wyvern {

/// While it lives, a write of this thread beyond RLIMIT_FSIZE fails with EFBIG and nothing else:
/// the kernel sends SIGXFSZ to the thread that wrote, where it is blocked, and the destructor
/// removes it. No handler changes; a signal that was blocked or pending before stays so.
class NoFileSizeSignal {
 public:
  NoFileSizeSignal() noexcept {
    sigset_t waiting;
    sigemptyset(&waiting);
    ::sigpending(&waiting);
    waited_ = sigismember(&waiting, SIGXFSZ) == 1;
    sigemptyset(&signal_);
    sigaddset(&signal_, SIGXFSZ);
    sigset_t before;
    sigemptyset(&before);
    ::pthread_sigmask(SIG_BLOCK, &signal_, &before);
    was_blocked_ = sigismember(&before, SIGXFSZ) == 1;
  }
  ~NoFileSizeSignal() {
    const int error = errno;
    const timespec now{};
    if (!waited_) {
      while (::sigtimedwait(&signal_, nullptr, &now) < 0 && errno == EINTR) continue;
    }
    if (!was_blocked_) ::pthread_sigmask(SIG_UNBLOCK, &signal_, nullptr);
    errno = error;
  }
  NoFileSizeSignal(const NoFileSizeSignal&) = delete;
  NoFileSizeSignal& operator=(const NoFileSizeSignal&) = delete;

 private:
  sigset_t signal_{};
  bool waited_ = false;
  bool was_blocked_ = false;
};

}  // namespace wyvern
