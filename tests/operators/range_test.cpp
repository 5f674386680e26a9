// Passes in fp16 whose states or values leave fp16 while what they return does not: every template
// keeps such numbers in a unit (templates/device/state_unit.hpp). Cases are
// {Cpu,Gpu,Emulated}/OperatorRange.
#include "tests/operators/fixture.hpp"
#include "tests/support/full_suite.hpp"

namespace wyvern::testing {
namespace {

struct RangeCase {
  TestDevice where;
  OperatorPass which;
  bool values;
};

void PrintTo(const RangeCase& c, std::ostream* out) {
  *out << name_of(c.which) << (c.values ? "_values" : "_states");
}

class OperatorRange : public OperatorTest, public ::testing::WithParamInterface<RangeCase> {};

TEST_P(OperatorRange, MatchesOracle) {
  const auto& [where, which, values] = GetParam();
  WYVERN_OPEN_OR_SKIP(where);
  // The emulator, which wide heads take long, tries small chunks too.
  using Size = std::pair<std::int64_t, std::int64_t>;  // a chunk, a head
  const bool emulated = where == TestDevice::emulated;
  for (const auto& [chunk, size] : emulated
                                       ? std::vector<Size>{{16, 32}, {64, full_suite() ? 128 : 64}}
                                       : std::vector<Size>{{64, 64}}) {
    const OperatorData data = beyond_fp16(which, values, size, 5);
    for (const Plan& plan : plans_with_all(device(), data.problem, chunk))
      check(prepare(data.problem, plan), data);
  }
}

std::vector<RangeCase> cases(TestDevice where) {
  std::vector<RangeCase> all;
  for (const OperatorPass& which : chunked_passes())
    for (const bool values : {false, true}) all.push_back({where, which, values});
  return all;
}

const auto kName = [](const auto& info) { return ::testing::PrintToString(info.param); };

INSTANTIATE_TEST_SUITE_P(Cpu, OperatorRange, ::testing::ValuesIn(cases(TestDevice::cpu)), kName);
INSTANTIATE_TEST_SUITE_P(Gpu, OperatorRange, ::testing::ValuesIn(cases(TestDevice::gpu)), kName);
INSTANTIATE_TEST_SUITE_P(Emulated, OperatorRange, ::testing::ValuesIn(cases(TestDevice::emulated)),
                         kName);

}  // namespace
}  // namespace wyvern::testing
