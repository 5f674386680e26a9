// How much of a sweep a test tries.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace wyvern::testing {

/// Whether sweeps try all of their points, as tools/test --full asks, or a fixed part of them.
inline bool full_suite() { return std::getenv("WYVERN_TESTS_FULL") != nullptr; }

/// Whether a sweep tries its point number `index`: `of_seven` of every seven in the short suite.
/// Values that go round in other periods than seven are all met, where there are points enough.
inline bool is_tried(std::uint64_t index, std::uint64_t of_seven) {
  return full_suite() || index % 7 < of_seven;
}

}  // namespace wyvern::testing
