// The floating-point environment that everything here is computed in.
#pragma once

#include <cfenv>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace wyvern {

/// For a scope, of the calling thread: rounds to nearest, keeps subnormal numbers, traps nothing.
/// The caller's own modes, which some libraries change for a whole process, come back at the end.
/// Threads that are started within the scope have the default too.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() noexcept : changed_(!is_default()) {
    if (!changed_) return;
    std::fegetenv(&callers_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() {
    if (changed_) std::fesetenv(&callers_);
  }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  /// Changing it costs more than a small launch may, and mostly there is nothing to change.
  static bool is_default() noexcept {
#if defined(__x86_64__)
    constexpr unsigned kFlags = 0x3F, kDefault = 0x1F80;  // what happened; all traps masked
    return (_mm_getcsr() & ~kFlags) == kDefault;
#else
    return false;
#endif
  }

  bool changed_;
  std::fenv_t callers_{};
};

}  // namespace wyvern
