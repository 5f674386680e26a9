// The kernel of folds on the emulator: every config in both directions, with M and without it, and
// an order that is wrong.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "compiler/compiler.hpp"
#include "tests/emulator/block.hpp"
#include "tests/emulator/emulator.hpp"
#include "tests/support/host_tensor.hpp"
#include "tests/support/stage_reference.hpp"

namespace wyvern {
namespace {

using emulator::GuardedMemory;
using emulator::Schedule;
using testing::HostTensor;

struct Sizes {
  std::int64_t ranges, HV, K, V;
};

Constants constants_of(const Sizes& sizes, bool transition, bool backwards) {
  Constants c;
  c.H = c.HV = sizes.HV;
  c.K = sizes.K;
  c.V = sizes.V;
  c.TRANSITION = transition;
  c.BACKWARDS = backwards;
  c.SUMMARY_COLUMNS = sizes.V + (transition ? sizes.K : 0);
  return c;
}

const Template& fold() { return *find_template("fold.portable"); }

/// The states of one launch, each tensor at the end of its own mapping.
HostTensor launch(const Sizes& sizes, const Constants& constants, const Config& config,
                  const HostTensor& summaries, const HostTensor& order, Schedule schedule,
                  unsigned char poison) {
  HostTensor states(DType::fp32, {sizes.ranges, sizes.HV, sizes.K, sizes.V});
  states.poison(poison);
  std::vector<std::unique_ptr<GuardedMemory>> memory;
  std::vector<void*> pointers;
  for (const HostTensor* tensor : {&summaries, &order, &std::as_const(states)}) {
    memory.push_back(std::make_unique<GuardedMemory>(tensor->bytes()));
    pointers.push_back(memory.back()->data());
    std::memcpy(pointers.back(), tensor->data(), tensor->bytes());
  }
  Extents extents;
  extents.N = sizes.ranges;
  extents.H = extents.HV = static_cast<int>(sizes.HV);
  emulator::emulate(fold(), constants, config, extents, pointers, schedule);
  std::memcpy(states.data(), pointers.back(), states.bytes());
  return states;
}

/// The same, written in full whatever was there and whichever warps come first.
HostTensor checked_launch(const Sizes& sizes, const Constants& constants, const Config& config,
                          const HostTensor& summaries, const HostTensor& order) {
  HostTensor states =
      launch(sizes, constants, config, summaries, order, Schedule::first_warp, testing::kNanPoison);
  EXPECT_TRUE(same_bytes(states, launch(sizes, constants, config, summaries, order,
                                        Schedule::last_warp, testing::kFinitePoison)));
  return states;
}

HostTensor random_order(testing::Engine& engine, std::int64_t ranges) {
  std::vector<double> order(static_cast<std::size_t>(ranges));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), engine);
  return {DType::int32, {ranges}, order};
}

/// The float64 reference is what the config has no part in, and so are the bits.
TEST(FoldKernel, EveryConfigMatchesFloat64WithTheSameBits) {
  testing::Engine engine(1);
  const Limits limits = cuda_target("sm_90a").limits;
  for (const Sizes& sizes : {Sizes{4, 2, 128, 40}, Sizes{3, 1, 33, 17}})
    for (const bool backwards : {false, true}) {
      const Constants constants = constants_of(sizes, true, backwards);
      const std::int64_t columns = constants.SUMMARY_COLUMNS;
      HostTensor summaries =
          testing::normal(engine, DType::fp32, {sizes.ranges, sizes.HV, sizes.K, columns});
      const double length = 1 / std::sqrt(static_cast<double>(sizes.K));
      for (std::int64_t i = 0; i < summaries.elements(); ++i)
        if (i % columns >= sizes.V) summaries.set(i, length * summaries.at(i));
      const HostTensor order = random_order(engine, sizes.ranges);
      testing::StageContext context;
      context.dims = {.H = sizes.HV, .HV = sizes.HV, .K = sizes.K, .V = sizes.V};
      context.backwards = backwards;
      testing::TensorMap tensors{{"summaries", summaries.values()}, {"order", order.values()}};
      testing::run_reference("fold", context, tensors);

      std::vector<HostTensor> all;
      for (const Config& config : space(fold(), constants, limits)) {
        SCOPED_TRACE(config.to_string());
        all.push_back(checked_launch(sizes, constants, config, summaries, order));
        EXPECT_LE(rms_error(all.back(), tensors.at("range_states")), 1e-6);
        EXPECT_TRUE(same_bytes(all.back(), all.front()));
      }
      EXPECT_EQ(all.size(), 4U);
    }
}

TEST(FoldKernel, WithoutMEachStateIsTheROfTheRangeBefore) {
  testing::Engine engine(2);
  const Sizes sizes{5, 2, 24, 20};
  for (const bool backwards : {false, true}) {
    const Constants constants = constants_of(sizes, false, backwards);
    const HostTensor R = testing::normal(engine, DType::fp32, {5, 2, 24, 20});
    const HostTensor order = random_order(engine, sizes.ranges);
    const HostTensor states = checked_launch(
        sizes, constants, {{"BV", std::int64_t{16}}, {"num_warps", std::int64_t{4}}}, R, order);
    constexpr std::int64_t kRange = 2 * 24 * 20;
    const auto range_at = [&](std::int64_t i) {
      return static_cast<std::int64_t>(order.at(backwards ? 4 - i : i));
    };
    for (std::int64_t i = 0; i < 5; ++i)
      for (std::int64_t j = 0; j < kRange; ++j)
        ASSERT_EQ(states.at(range_at(i) * kRange + j),
                  i == 0 ? 0 : R.at(range_at(i - 1) * kRange + j));
  }
}

/// Nothing but the tensors is read or written: their mappings end with them.
TEST(FoldKernel, AWrongOrderLeadsNowhereElse) {
  testing::Engine engine(3);
  const Sizes sizes{3, 2, 16, 8};
  const HostTensor summaries = testing::normal(engine, DType::fp32, {3, 2, 16, 24});
  const HostTensor order(DType::int32, {3}, {-1, 1 << 30, 7});
  for (const bool backwards : {false, true})
    EXPECT_NO_THROW(launch(sizes, constants_of(sizes, true, backwards),
                           {{"BV", std::int64_t{16}}, {"num_warps", std::int64_t{4}}}, summaries,
                           order, Schedule::first_warp, testing::kNanPoison));
}

}  // namespace
}  // namespace wyvern
