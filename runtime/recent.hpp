// The operators that a thread prepared last.
#pragma once

#include <cstdint>
#include <memory>

#include "runtime/operator_impl.hpp"

namespace wyvern {

/// The operators that the calling thread prepared last, by runtime, device and problem. A look-up
/// neither allocates nor takes a lock. It holds weak references: operators live as long as others
/// hold them.
class RecentOperators {
 public:
  /// The operator of the last remember() for the same runtime, device, problem and version, if that
  /// was less than 20 ms ago and the operator still exists.
  [[nodiscard]] static std::shared_ptr<const OperatorImpl> find(std::uint64_t runtime,
                                                                const DeviceImpl& device,
                                                                const Problem& problem,
                                                                std::uint64_t version) noexcept;
  /// `runtime` is a number that no other runtime of the process has or had. The caller reads
  /// `version` before it searches for the operator's plan.
  static void remember(std::uint64_t runtime, std::uint64_t version,
                       const std::shared_ptr<const OperatorImpl>& op);
};

}  // namespace wyvern
