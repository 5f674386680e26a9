// Every operator and pass by its default plan against the float64 oracle: shapes, dtypes, gates and
// options by name, and combinations of them at random. Cases are {Cpu,Gpu}/{OperatorListed,
// OperatorSaturated,OperatorNorm,OperatorRandom}.
#include <fmt/format.h>

#include "tests/operators/fixture.hpp"

namespace wyvern::testing {
namespace {

struct Listed {
  DeviceKind kind;
  OperatorPass which;
  OperatorCase one;
};

void PrintTo(const Listed& listed, std::ostream* out) { *out << listed.one.name; }

class OperatorListed : public OperatorTest, public ::testing::WithParamInterface<Listed> {};

TEST_P(OperatorListed, MatchesOracle) {
  const Listed& listed = GetParam();
  WYVERN_OPEN_OR_SKIP(listed.kind);
  check(make_data(listed.one.problem, listed.one.gate, 1, listed.one.lengths));
}

std::vector<Listed> all_listed(DeviceKind kind) {
  std::vector<Listed> all;
  for (const OperatorPass& which : all_passes())
    for (const OperatorCase& one : listed_cases(which, kind)) all.push_back({kind, which, one});
  return all;
}

class OperatorRandom : public OperatorTest,
                       public ::testing::WithParamInterface<std::tuple<DeviceKind, int>> {};

TEST_P(OperatorRandom, MatchesOracle) {
  const auto [kind, shard] = GetParam();
  WYVERN_OPEN_OR_SKIP(kind);
  const int count = kind == DeviceKind::cpu ? 2 : 13;
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
  for (const OperatorPass& which : all_passes())
    if (which.pass != Pass::backward) all.push_back({kind, which});
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

INSTANTIATE_TEST_SUITE_P(Cpu, OperatorListed, ValuesIn(all_listed(DeviceKind::cpu)), kListed);
INSTANTIATE_TEST_SUITE_P(Gpu, OperatorListed, ValuesIn(all_listed(DeviceKind::cuda)), kListed);
INSTANTIATE_TEST_SUITE_P(Cpu, OperatorSaturated, ValuesIn(saturated_cases(DeviceKind::cpu)), kPass);
INSTANTIATE_TEST_SUITE_P(Gpu, OperatorSaturated, ValuesIn(saturated_cases(DeviceKind::cuda)),
                         kPass);
INSTANTIATE_TEST_SUITE_P(Cpu, OperatorNorm, ValuesIn(norm_cases(DeviceKind::cpu)), kPass);
INSTANTIATE_TEST_SUITE_P(Gpu, OperatorNorm, ValuesIn(norm_cases(DeviceKind::cuda)), kPass);
INSTANTIATE_TEST_SUITE_P(Cpu, OperatorRandom, Combine(Values(DeviceKind::cpu), Range(0, 20)),
                         kShard);
INSTANTIATE_TEST_SUITE_P(Gpu, OperatorRandom, Combine(Values(DeviceKind::cuda), Range(0, 40)),
                         kShard);

}  // namespace
}  // namespace wyvern::testing
