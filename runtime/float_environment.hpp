// The floating-point environment of all computations on the host.
#pragma once

#include <cfenv>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace wyvern {

/// Within its scope the calling thread rounds to nearest, keeps subnormal numbers and traps
/// nothing. The destructor restores the caller's modes, which some libraries change for a whole
/// process. Threads that start within the scope inherit the default.
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
  /// Setting the environment is slow for a small launch, and it is mostly the default already.
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
