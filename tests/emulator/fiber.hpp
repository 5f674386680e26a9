// A stack of its own for each emulated CUDA thread, and switching between them.
#pragma once

#include <cstddef>
#include <memory>

namespace wyvern::emulator {

/// A suspended computation. Not thread-safe; a fiber that has not ended may be dropped, then
/// nothing on its stack is destroyed.
class Fiber {
 public:
  using Body = void (*)(void* argument);

  Fiber();  ///< an empty one, to save the computation that switches away
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// Makes this fiber run body(argument) when it is switched to next. The body must not return: it
  /// ends by switching to another fiber for good.
  void start(Body body, void* argument);

  /// Suspends `from`, the running one, and resumes `to`.
  static void switch_to(Fiber& from, Fiber& to);

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

}  // namespace wyvern::emulator
