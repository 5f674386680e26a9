// One object per thread, created on first use.
#pragma once

#include <utility>

namespace wyvern {

/// The calling thread's T, created on first use and destroyed when the thread ends.
///
/// The thread that ends the process destroys its T before static objects, whose destructors may use
/// it again, as may handlers of atexit(). A plain thread_local would give them a destroyed object;
/// here find() returns null, and an object that get() creates then is never destroyed.
template <class T>
class ThreadOwned {
 public:
  /// Null before the first get() and after the thread's end.
  static T* find() noexcept { return object_; }
  /// Throws what T's constructor throws.
  static T& get() {
    if (object_ == nullptr) {
      object_ = new T();
      thread_local const Owner owner;  // not constructed again after its destruction
    }
    return *object_;
  }

 private:
  struct Owner {
    Owner() = default;
    ~Owner() { delete std::exchange(object_, nullptr); }
    Owner(const Owner&) = delete;
    Owner& operator=(const Owner&) = delete;
  };
  static inline thread_local T* object_ = nullptr;
};

}  // namespace wyvern
