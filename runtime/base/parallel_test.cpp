#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <vector>

#include "runtime/base/parallel.hpp"

namespace wyvern {
namespace {

TEST(InParallel, DoesEachOnce) {
  for (const unsigned threads : {0U, 1U, 3U, 100U}) {
    std::vector<std::atomic<int>> done(57);
    in_parallel(done.size(), threads, [&](std::size_t i) { ++done[i]; });
    for (const auto& times : done) EXPECT_EQ(times, 1);
  }
  in_parallel(0, 4, [](std::size_t) { FAIL(); });
}

TEST(InParallel, ThrowsTheExceptionOfACall) {
  std::atomic<int> done = 0;
  EXPECT_THROW(in_parallel(1000, 4,
                           [&](std::size_t i) {
                             if (i >= 3) throw std::runtime_error("no memory");
                             ++done;
                           }),
               std::runtime_error);
  EXPECT_LE(done, 3);
}

}  // namespace
}  // namespace wyvern
