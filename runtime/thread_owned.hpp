// An object of each thread, made on first use.
#pragma once

#include <utility>

namespace wyvern {

/// The calling thread's T: made when it is first asked for, destroyed when the thread ends.
///
/// The thread that ends the process loses its T before static objects are destroyed, and their
/// destructors may come here again, as may handlers of atexit(). A plain thread_local would hand
/// them a destroyed object; here they find none, and an object that they make is never destroyed.
template <class T>
class ThreadOwned {
 public:
  /// Null where there is none.
  static T* find() noexcept { return object_; }
  /// Throws what T's constructor throws.
  static T& get() {
    if (object_ == nullptr) {
      object_ = new T();
      thread_local const Owner owner;  // after its end it is not made again
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
