// Whole operators by the plans that a GPU gets, on the emulator, against the float64 oracle: how
// CUDA kernels are connected, and what their rounding adds up to.
#include <gtest/gtest.h>

#include "tests/emulator/device.hpp"
#include "tests/operators/fixture.hpp"

namespace wyvern::testing {
namespace {

class EmulatedOperator : public OperatorTest {
 protected:
  EmulatedOperator() { device_ = emulator::open_emulated_device(); }
  Operator prepare(const Problem& problem) override {
    return emulator::prepare(device(), problem);
  }
};

class EmulatedRandom : public EmulatedOperator, public ::testing::WithParamInterface<int> {};

TEST_P(EmulatedRandom, MatchesOracle) {
  const OperatorCase one = random_case(static_cast<std::uint64_t>(GetParam()));
  SCOPED_TRACE(one.name);
  check(make_data(one.problem, one.gate, 7, one.lengths));
}

const auto kSeed = [](const auto& each) { return "seed" + std::to_string(each.param); };

INSTANTIATE_TEST_SUITE_P(, EmulatedRandom, ::testing::Range(0, 20), kSeed);
// beta up to 2 and nothing that decays: rounding errors live as long as the state.
INSTANTIATE_TEST_SUITE_P(NoDecay, EmulatedRandom, ::testing::Values(105, 326), kSeed);

}  // namespace
}  // namespace wyvern::testing
