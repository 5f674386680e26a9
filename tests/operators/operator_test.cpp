// Every operator and pass by its default plan against the float64 oracle: shapes, dtypes, gates and
// options by name, and combinations of them at random. Cases are {Cpu,Gpu}/{OperatorListed,
// OperatorSaturated,OperatorNorm,OperatorRandom} and Emulated/{OperatorListed,OperatorRandom}.
#include <fmt/format.h>

#include "tests/operators/fixture.hpp"
#include "tests/support/full_suite.hpp"

namespace wyvern::testing {
namespace {

struct Listed {
  TestDevice where;
  OperatorPass which;
  OperatorCase one;
};

void PrintTo(const Listed& listed, std::ostream* out) { *out << listed.one.name; }

class OperatorListed : public OperatorTest, public ::testing::WithParamInterface<Listed> {};

TEST_P(OperatorListed, MatchesOracle) {
  const Listed& listed = GetParam();
  WYVERN_OPEN_OR_SKIP(listed.where);
  // Not by luck of the draw: a bound that single inputs break is broken by others of the same kind.
  const std::uint64_t seeds = listed.where == TestDevice::emulated && full_suite() ? 3 : 1;
  for (std::uint64_t seed = 1; seed <= seeds; ++seed)
    check(make_data(listed.one.problem, listed.one.gate, seed, listed.one.lengths));
}

std::vector<Listed> all_listed(TestDevice where) {
  const DeviceKind kind = where == TestDevice::cpu ? DeviceKind::cpu : DeviceKind::cuda;
  std::vector<Listed> all;
  for (const OperatorPass& which : all_passes())
    for (const OperatorCase& one : listed_cases(which, kind)) all.push_back({where, which, one});
  return all;
}

/// Of the emulator, which is slow: what rounding adds up to, by name.
std::vector<Listed> emulated_listed() {
  std::vector<Listed> all = all_listed(TestDevice::emulated);
  std::erase_if(all, [](const Listed& listed) {
    return listed.which.pass != Pass::forward || !listed.one.name.starts_with("FewKeys");
  });
  return all;
}

class OperatorRandom : public OperatorTest,
                       public ::testing::WithParamInterface<std::tuple<TestDevice, int>> {};

TEST_P(OperatorRandom, MatchesOracle) {
  const auto [where, shard] = GetParam();
  WYVERN_OPEN_OR_SKIP(where);
  const int count = where == TestDevice::cpu ? 2 : where == TestDevice::gpu ? 13 : 1;
  for (int i = 0; i < count; ++i) {
    const OperatorCase one = random_case(static_cast<std::uint64_t>(shard * count + i));
    SCOPED_TRACE(one.name);
    check(make_data(one.problem, one.gate, 7, one.lengths));
  }
}

struct PassCase {
  DeviceKind kind;
  OperatorPass which;
};

void PrintTo(const PassCase& one, std::ostream* out) { *out << name_of(one.which); }

class OperatorSaturated : public OperatorTest, public ::testing::WithParamInterface<PassCase> {};

TEST_P(OperatorSaturated, GatesMatchOracle) {
  WYVERN_OPEN_OR_SKIP(GetParam().kind);
  for (const DType dtype : {DType::bf16, DType::fp32})
    for (const OperatorData& data : saturated_gates(base(GetParam().which, dtype))) check(data);
}

class OperatorNorm : public OperatorTest, public ::testing::WithParamInterface<PassCase> {};

TEST_P(OperatorNorm, OfOutputsOfAnySize) {
  WYVERN_OPEN_OR_SKIP(GetParam().kind);
  for (const auto& [K, V] : {std::pair{128, 128}, {33, 100}, {256, 256}}) {
    for (const DType dtype : {DType::fp16, DType::bf16}) {
      if (dtype == DType::bf16 && GetParam().which.pass == Pass::recurrent) continue;
      Problem p = base(GetParam().which, dtype);
      p.K = K, p.V = V;
      for (const OperatorData& data : outputs_of_any_size(p)) check(data);
    }
  }
}

std::vector<PassCase> norm_cases(DeviceKind kind) {
  std::vector<PassCase> all;
  for (const OperatorPass& which : all_passes()) all.push_back({kind, which});
  return all;
}

std::vector<PassCase> saturated_cases(DeviceKind kind) {
  std::vector<PassCase> all;
  for (const OperatorPass& which : all_passes())
    if (gate_kind(base(which)) != GateKind::none) all.push_back({kind, which});
  return all;
}

using ::testing::Combine;
using ::testing::Range;
using ::testing::Values;
using ::testing::ValuesIn;

const auto kListed = [](const auto& each) {
  return name_of(each.param.which) + "_" + each.param.one.name;
};
const auto kPass = [](const auto& each) { return name_of(each.param.which); };
const auto kShard = [](const auto& each) {
  return fmt::format("shard{}", std::get<1>(each.param));
};

INSTANTIATE_TEST_SUITE_P(Cpu, OperatorListed, ValuesIn(all_listed(TestDevice::cpu)), kListed);
INSTANTIATE_TEST_SUITE_P(Gpu, OperatorListed, ValuesIn(all_listed(TestDevice::gpu)), kListed);
INSTANTIATE_TEST_SUITE_P(Emulated, OperatorListed, ValuesIn(emulated_listed()), kListed);
INSTANTIATE_TEST_SUITE_P(Cpu, OperatorSaturated, ValuesIn(saturated_cases(DeviceKind::cpu)), kPass);
INSTANTIATE_TEST_SUITE_P(Gpu, OperatorSaturated, ValuesIn(saturated_cases(DeviceKind::cuda)),
                         kPass);
INSTANTIATE_TEST_SUITE_P(Cpu, OperatorNorm, ValuesIn(norm_cases(DeviceKind::cpu)), kPass);
INSTANTIATE_TEST_SUITE_P(Gpu, OperatorNorm, ValuesIn(norm_cases(DeviceKind::cuda)), kPass);
INSTANTIATE_TEST_SUITE_P(Cpu, OperatorRandom, Combine(Values(TestDevice::cpu), Range(0, 20)),
                         kShard);
INSTANTIATE_TEST_SUITE_P(Gpu, OperatorRandom, Combine(Values(TestDevice::gpu), Range(0, 40)),
                         kShard);
INSTANTIATE_TEST_SUITE_P(Emulated, OperatorRandom,
                         Combine(Values(TestDevice::emulated), Range(0, 20)), kShard);
// beta up to 2 and nothing that decays: rounding errors live as long as the state. 290: resets,
// behind which decays are differences of sums of some hundred.
INSTANTIATE_TEST_SUITE_P(EmulatedNoDecay, OperatorRandom,
                         Combine(Values(TestDevice::emulated), Values(105, 326, 290)), kShard);

}  // namespace
}  // namespace wyvern::testing
