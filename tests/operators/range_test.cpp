// Passes in fp16 whose states or values leave fp16 while what they return does not: every template
// keeps such numbers in a unit (templates/device/state_unit.hpp). Cases are
// {Cpu,Gpu}/OperatorRange.
#include "tests/operators/fixture.hpp"

namespace wyvern::testing {
namespace {

struct RangeCase {
  DeviceKind kind;
  OperatorPass which;
  bool values;
};

void PrintTo(const RangeCase& c, std::ostream* out) {
  *out << name_of(c.which) << (c.values ? "_values" : "_states");
}

class OperatorRange : public OperatorTest, public ::testing::WithParamInterface<RangeCase> {};

TEST_P(OperatorRange, MatchesOracle) {
  const auto& [kind, which, values] = GetParam();
  WYVERN_OPEN_OR_SKIP(kind);
  const OperatorData data = beyond_fp16(which, values, 64, 5);
  for (const Plan& plan : plans_with_all(device(), data.problem, 64))
    check(test_runtime().prepare(device(), data.problem, plan), data);
}

std::vector<RangeCase> cases(DeviceKind kind) {
  std::vector<RangeCase> all;
  for (const OperatorPass& which : chunked_passes())
    for (const bool values : {false, true}) all.push_back({kind, which, values});
  return all;
}

const auto kName = [](const auto& info) { return ::testing::PrintToString(info.param); };

INSTANTIATE_TEST_SUITE_P(Cpu, OperatorRange, ::testing::ValuesIn(cases(DeviceKind::cpu)), kName);
INSTANTIATE_TEST_SUITE_P(Gpu, OperatorRange, ::testing::ValuesIn(cases(DeviceKind::cuda)), kName);

}  // namespace
}  // namespace wyvern::testing
