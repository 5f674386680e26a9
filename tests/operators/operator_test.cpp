// Every operator and pass by its default plan against the float64 oracle: shapes, dtypes, gates and
// options by name, and combinations of them at random. Cases are {Cpu,Gpu}/{OperatorListed,
// OperatorSaturated,OperatorRates,OperatorNorm,OperatorRandom} and Emulated/{OperatorListed,
// OperatorRandom}.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "runtime/operators/operator.hpp"
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

/// Where beta is 0, or next to it, the state stays as it is, and beta has a gradient as elsewhere.
class OperatorRates : public OperatorTest, public ::testing::WithParamInterface<PassCase> {};

TEST_P(OperatorRates, ThatAreClosedMatchOracle) {
  const OperatorPass which = GetParam().which;
  WYVERN_OPEN_OR_SKIP(GetParam().kind);
  for (const DType dtype : {DType::bf16, DType::fp32})
    for (const bool kept : {false, true})
      for (const bool sigmoid : {false, true}) {
        if (kept && which.pass != Pass::backward) continue;
        Problem p = base(which, dtype);
        p.K = p.V = 128;
        if (which.pass != Pass::recurrent) p.T = 200;
        p.disable_recompute = kept;
        p.use_beta_sigmoid = sigmoid;
        p.initial_state = p.output_final_state = true;
        OperatorData data = make_data(p, Gate::typical, 6);
        close_rates(data);
        check(data);
      }
}

std::vector<PassCase> rate_cases(DeviceKind kind) {
  std::vector<PassCase> all;
  for (const OperatorPass& which : all_passes())
    if (find_operator(which.op)->facts().beta) all.push_back({kind, which});
  return all;
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

class OperatorQuantized
    : public OperatorTest,
      public ::testing::WithParamInterface<std::tuple<TestDevice, OperatorPass>> {
 protected:
  /// The plan of the same problem but for output_dtype.
  static Plan without_quantization(Plan plan) {
    constexpr std::string_view kAlone = "output_quantize.", kBehindNorm = "output_norm_quantize.";
    std::string& last = plan.back().template_id;
    if (last.starts_with(kAlone))
      plan.pop_back();
    else if (last.starts_with(kBehindNorm))
      last = "output_norm." + last.substr(kBehindNorm.size());
    else
      ADD_FAILURE() << last;
    return plan;
  }
};

/// o is what it is else, each 128 columns divided by their largest over 448 and rounded.
TEST_P(OperatorQuantized, HasTheBitsOfQuantizingO) {
  const auto& [where, which] = GetParam();
  WYVERN_OPEN_OR_SKIP(where);
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32}) {
    Problem p = base(which, dtype);
    p.H = 1, p.HV = 2, p.K = 64, p.V = dtype == DType::bf16 ? 384 : 128;
    p.output_norm = dtype == DType::fp16 ? Activation::sigmoid : Activation::silu;
    p.packed = p.inplace_state = p.state_index = true, p.state_slots = 9;
    p.output_final_state = false;
    p.output_dtype = DType::float8_e4m3;
    p.output_scale_tokens_last = dtype != DType::fp32;
    const bool recurrent = which.pass == Pass::recurrent;
    OperatorData data = make_data(p, Gate::mixed, 51, {recurrent ? 3 : 70, 0, 1, 5, 2});
    const Operator op = prepare(data.problem);
    const HostTensors outputs = run_operator(device(), op, data);
    data.problem.output_dtype.reset();
    data.problem.output_scale_tokens_last = false;
    const Operator plain = prepare(data.problem, without_quantization(op.plan()));
    const HostTensors unquantized = run_operator(device(), plain, data);
    if (is_listing()) continue;
    const HostTensor &o = outputs.at("o"), &scales = outputs.at("o_scale"),
                     &y = unquantized.at("o");
    const std::int64_t tokens = data.problem.T, groups = p.HV * p.V / 128;
    HostTensor wanted(DType::float8_e4m3, o.shape());
    HostTensor wanted_scales(DType::fp32, scales.shape());  // zeros: columns of no token
    for (std::int64_t i = 0; i < tokens * groups; ++i) {
      float most = 1e-10F;
      for (std::int64_t j = i * 128; j < (i + 1) * 128; ++j)
        most = std::max(most, std::fabs(static_cast<float>(y.at(j))));
      const float scale = most / 448;
      for (std::int64_t j = i * 128; j < (i + 1) * 128; ++j)
        wanted.set(j, static_cast<double>(static_cast<float>(y.at(j)) / scale));
      const std::int64_t at =
          p.output_scale_tokens_last ? i % groups * scales.shape()[1] + i / groups : i;
      wanted_scales.set(at, static_cast<double>(scale));
    }
    EXPECT_TRUE(same_bytes(o, wanted)) << to_string(dtype);
    EXPECT_TRUE(same_bytes(scales, wanted_scales)) << to_string(dtype);
  }
}

std::vector<OperatorPass> quantized_passes() {
  std::vector<OperatorPass> passes = all_passes();
  std::erase_if(passes, [](const OperatorPass& one) { return one.pass == Pass::backward; });
  return passes;
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
INSTANTIATE_TEST_SUITE_P(Cpu, OperatorRates, ValuesIn(rate_cases(DeviceKind::cpu)), kPass);
INSTANTIATE_TEST_SUITE_P(Gpu, OperatorRates, ValuesIn(rate_cases(DeviceKind::cuda)), kPass);
INSTANTIATE_TEST_SUITE_P(Cpu, OperatorNorm, ValuesIn(norm_cases(DeviceKind::cpu)), kPass);
INSTANTIATE_TEST_SUITE_P(Gpu, OperatorNorm, ValuesIn(norm_cases(DeviceKind::cuda)), kPass);
const auto kQuantized = [](const auto& each) { return name_of(std::get<1>(each.param)); };
INSTANTIATE_TEST_SUITE_P(Cpu, OperatorQuantized,
                         Combine(Values(TestDevice::cpu), ValuesIn(quantized_passes())),
                         kQuantized);
INSTANTIATE_TEST_SUITE_P(Gpu, OperatorQuantized,
                         Combine(Values(TestDevice::gpu), ValuesIn(quantized_passes())),
                         kQuantized);
INSTANTIATE_TEST_SUITE_P(Emulated, OperatorQuantized,
                         Combine(Values(TestDevice::emulated), ValuesIn(quantized_passes())),
                         kQuantized);
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
