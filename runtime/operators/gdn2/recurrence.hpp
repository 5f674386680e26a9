// gdn2's recurrence and its adjoint in float64.
#pragma once

#include "runtime/operators/chunked.hpp"

namespace wyvern::gdn2 {

/// S~ = a S; u = w v - S~^T (b k); S = S~ + k u^T, with a decay a and an erase gate b per key
/// channel and a write gate w per value channel.
std::unique_ptr<Recurrence> recurrence(const Problem& problem, const Arguments& host,
                                       std::int64_t sequence, std::int64_t head);

}  // namespace wyvern::gdn2
