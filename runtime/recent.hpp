// The operators that a thread prepared last.
#pragma once

#include <cstdint>
#include <memory>

#include "runtime/operator_impl.hpp"

namespace wyvern {

/// Of the calling thread: the operators that it prepared last, by runtime, device and problem.
/// Neither looking up nor hitting allocates or takes a lock. Operators are held weakly: they live
/// as long as their runtime or whoever has them.
class RecentOperators {
 public:
  /// The operator that remember() was given for the same runtime, device and problem at the same
  /// version less than 20 ms ago, if it still exists.
  [[nodiscard]] static std::shared_ptr<const OperatorImpl> find(std::uint64_t runtime,
                                                                const DeviceImpl& device,
                                                                const Problem& problem,
                                                                std::uint64_t version) noexcept;
  /// `runtime` is a number that no other runtime of the process has or had. `version` was read
  /// before the operator's plan was looked for.
  static void remember(std::uint64_t runtime, std::uint64_t version,
                       const std::shared_ptr<const OperatorImpl>& op);
};

}  // namespace wyvern
