// What a launch promises besides its numbers: it repeats bit by bit, from any thread, from several
// and from a capture, and keeps its bounds at the sizes models have. Cases are
// {Cpu,Gpu}/Operator{Promise, Split}.
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <thread>

#include "runtime/devices/device_impl.hpp"
#include "tests/operators/fixture.hpp"
#include "tests/support/full_suite.hpp"

namespace wyvern::testing {
namespace {

struct PassCase {
  DeviceKind kind;
  OperatorPass which;
};

void PrintTo(const PassCase& c, std::ostream* out) { *out << name_of(c.which); }

void expect_same(const HostTensors& a, const HostTensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, tensor] : a) EXPECT_TRUE(same_bytes(tensor, b.at(name))) << name;
}

/// Launches by replaying a capture three times, on a stream of its own.
Launcher replayed(const Device& device, const Operator& op) {
  return [&device, &op, stream = device.impl().make_stream()](const Arguments& arguments,
                                                              void* workspace) {
    const auto graph = device.impl().capture(
        [&](Stream recording) { op.launch(arguments, workspace, recording); });
    for (int i = 0; i < 3; ++i) graph->launch(stream.get());
    device.synchronize(stream.get());
  };
}

/// Every operator and pass.
class OperatorPromise : public OperatorTest, public ::testing::WithParamInterface<PassCase> {
 protected:
  const OperatorPass& which() const { return GetParam().which; }
  bool recurrent() const { return which().pass == Pass::recurrent; }

  /// Packed, with every option that takes part in a sum over tokens or heads; `normalized`: of a
  /// backward pass that of the norm too, in place of whose `do` its operator reads another.
  OperatorData rich_data(std::uint64_t seed, bool normalized = false) {
    Problem p = base(which());
    p.packed = p.initial_state = p.use_qk_l2norm = true;
    if (normalized && p.pass == Pass::backward) p.output_norm = Activation::silu;
    p.use_gate_in_kernel = p.has_dt_bias = gate_kind(p) != GateKind::none;
    return make_data(p, Gate::typical, seed,
                     recurrent() ? Lengths{1, 8, 0, 3} : Lengths{150, 0, 33, 200});
  }
};

TEST_P(OperatorPromise, BitwiseRepeat) {
  WYVERN_OPEN_OR_SKIP(GetParam().kind);
  constexpr int kRuns = 20;
  const OperatorData data = rich_data(31, /*normalized=*/true);
  run_operator(device(), prepare(data.problem), data, Guards::bands, {}, kRuns);
}

TEST_P(OperatorPromise, ReplaysFromACapture) {
  WYVERN_OPEN_OR_SKIP(GetParam().kind);
  const OperatorData data = rich_data(14, /*normalized=*/true);
  const Operator op = prepare(data.problem);
  const HostTensors direct = run_operator(device(), op, data);
  expect_same(run_operator(device(), op, data, Guards::bands, replayed(device(), op)), direct);
}

/// Launches put addresses into tensor maps: each its own, a replay those of its capture.
class GpuTma : public OperatorTest {};

TEST_F(GpuTma, RepeatAndReplayBitByBit) {
  WYVERN_OPEN_OR_SKIP(DeviceKind::cuda);
  Problem p = base({"gated_delta_rule", Pass::forward});
  p.K = 128;
  p.packed = p.initial_state = p.use_qk_l2norm = true;
  const OperatorData data = make_data(p, Gate::typical, 17, {150, 0, 33, 200});
  const auto plan = plan_with(device(), data.problem, "scaled_dot_kkt.hopper");
  if (!plan) GTEST_SKIP() << "this GPU has no wgmma";
  const Operator op = test_runtime().prepare(device(), data.problem, *plan);
  const HostTensors direct = run_operator(device(), op, data, Guards::bands, {}, 20);
  expect_matches_oracle(data, direct);
  expect_same(run_operator(device(), op, data, Guards::bands, replayed(device(), op)), direct);
}

/// Templates with tensor maps, which a launch encodes again for strided rows.
TEST_F(GpuTma, TakeStridedRows) {
  WYVERN_OPEN_OR_SKIP(DeviceKind::cuda);
  for (const auto& [op, id] : {std::pair{"gated_delta_rule", "delta_forward.hopper"},
                               std::pair{"kda", "kda_forward.hopper"}}) {
    Problem p = base({op, Pass::forward});
    p.K = p.V = 128;
    p.packed = p.initial_state = p.use_qk_l2norm = true;
    const OperatorData data = make_data(p, Gate::typical, 18, {150, 0, 33, 200});
    const auto plan = plan_with(device(), data.problem, id);
    if (!plan) GTEST_SKIP() << "this GPU has no wgmma";
    check_strided_rows(test_runtime().prepare(device(), data.problem, *plan), data);
  }
}

/// Passes that walk from segment to segment, whatever the gates: fast decay within a segment and
/// slow decay, by blocks of 64 columns and of 128.
class GpuSegmentPasses
    : public GpuTma,
      public ::testing::WithParamInterface<std::tuple<OperatorPass, Gate, bool>> {};

TEST_P(GpuSegmentPasses, MatchOracleAndReplay) {
  WYVERN_OPEN_OR_SKIP(DeviceKind::cuda);
  const auto& [which, gate, all] = GetParam();
  const auto& [op, pass] = which;
  const bool channels = op == "kda";
  const bool backward = pass == Pass::backward;
  Problem p = base(which);
  if (backward) p.dtype = p.beta_dtype = DType::bf16;
  p.H = 1, p.HV = 3, p.K = p.V = 128;
  p.packed = p.initial_state = p.output_final_state = true;
  p.use_qk_l2norm = all;
  p.use_gate_in_kernel = p.has_A_log = p.has_dt_bias = all && op != "delta_rule";
  if (all && channels) p.lower_bound = -5.0F;
  const OperatorData data = make_data(p, gate, 21, {3000, 0, 33, 512, 1025});
  const auto plan = plan_with(device(), data.problem,
                              channels   ? "kda_resume.hopper"
                              : backward ? "delta_scans_resume.hopper"
                                         : "delta_resume.hopper");
  if (!plan) GTEST_SKIP() << "this GPU has no wgmma";
  for (const std::int64_t BV : {64, 128}) {
    Plan split = *plan;
    for (PlanStep& step : split) {
      if (!step.config.contains("SEG")) continue;
      step.config.set("SEG", std::int64_t{8});
      if (!step.config.contains("num_stages")) continue;
      step.config.set("BV", BV);
      if (channels) step.config.set("num_stages", std::int64_t{9});
    }
    const Operator segments = test_runtime().prepare(device(), data.problem, split);
    const HostTensors direct = run_operator(device(), segments, data, Guards::bands, {}, 20);
    expect_matches_oracle(data, direct);
    expect_same(run_operator(device(), segments, data, Guards::bands, replayed(device(), segments)),
                direct);
  }
}

INSTANTIATE_TEST_SUITE_P(
    , GpuSegmentPasses,
    ::testing::Combine(::testing::Values(OperatorPass{"kda", Pass::forward},
                                         OperatorPass{"gated_delta_rule", Pass::forward},
                                         OperatorPass{"delta_rule", Pass::forward},
                                         OperatorPass{"gated_delta_rule", Pass::backward},
                                         OperatorPass{"delta_rule", Pass::backward}),
                       ::testing::Values(Gate::typical, Gate::mixed, Gate::zero),
                       ::testing::Bool()));

TEST_P(OperatorPromise, TakesStridedRows) {
  WYVERN_OPEN_OR_SKIP(GetParam().kind);
  const OperatorData data = rich_data(19);
  check_strided_rows(prepare(data.problem), data);
  // Rows that are no multiples of 16 bytes; on the CPU by kernels that a listed case compiles.
  const std::string name = GetParam().kind == DeviceKind::cpu ? "NormalizedEqualHeads" : "K33V100";
  const std::vector<OperatorCase> cases = listed_cases(which(), GetParam().kind);
  const auto listed =
      std::ranges::find_if(cases, [&](const OperatorCase& one) { return one.name == name; });
  ASSERT_NE(listed, cases.end());
  Problem p = listed->problem;
  ASSERT_EQ(p.K, 33);
  p.B = p.N = 3, p.T = recurrent() ? 1 : 70;
  const OperatorData other = make_data(p, Gate::typical, 20);
  check_strided_rows(prepare(other.problem), other);
  if (p.pass != Pass::backward) return;
  p.output_norm = Activation::sigmoid;
  const OperatorData normalized = make_data(p, Gate::typical, 21);
  check_strided_rows(prepare(normalized.problem), normalized);
}

/// Whatever the templates of a plan.
TEST_P(OperatorPromise, EveryPlanTakesStridedRows) {
  WYVERN_OPEN_OR_SKIP(GetParam().kind);
  if (recurrent()) GTEST_SKIP() << "there is one plan";
  const OperatorData data = rich_data(22);
  for (const Plan& plan : plans_with_all(device(), data.problem, 64))
    check_strided_rows(test_runtime().prepare(device(), data.problem, plan), data);
}

TEST_P(OperatorPromise, HostLengthsAreAcceptedBesideTheDevices) {
  WYVERN_OPEN_OR_SKIP(GetParam().kind);
  const OperatorData data = rich_data(3);
  const Operator op = prepare(data.problem);
  const auto launch = [&](Arguments arguments, void* workspace) {
    arguments.cu_seqlens_host = data.cu_seqlens;
    op.launch(arguments, workspace);
  };
  expect_matches_oracle(data, run_operator(device(), op, data, Guards::bands, launch));
}

/// On the CPU, where compiling takes most of the time, in the short suite by one operator of each
/// kind of gate.
TEST_P(OperatorPromise, TwoThreadsShareOneRuntime) {
  WYVERN_OPEN_OR_SKIP(GetParam().kind);
  if (GetParam().kind == DeviceKind::cpu && !full_suite() &&
      (which().op == "gdn2" || which().op == "gated_delta_product"))
    GTEST_SKIP() << "in the full suite";
  Problem p = base(which());
  p.K = 48;  // kernels that no other test compiles: both threads ask for them at once
  const OperatorData data = make_data(p, Gate::typical, 21);
  RuntimeOptions options;
  options.cache = test_cache();
  Runtime runtime(options);
  std::vector<HostTensors> outputs(2);
  std::vector<std::jthread> threads;
  for (HostTensors& out : outputs)
    threads.emplace_back([&, &result = out] {
      result = run_operator(device(), runtime.prepare(device(), p), data);
    });
  threads.clear();
  expect_matches_oracle(data, outputs[0]);
  expect_same(outputs[0], outputs[1]);
}

/// Launches on a stream of its own.
Launcher apart(const Device& device, const Operator& op) {
  return [&device, &op, stream = device.impl().make_stream()](const Arguments& arguments,
                                                              void* workspace) {
    op.launch(arguments, workspace, stream.get());
    device.synchronize(stream.get());
  };
}

TEST_P(OperatorPromise, SeveralThreadsLaunchOneOperator) {
  WYVERN_OPEN_OR_SKIP(GetParam().kind);
  constexpr std::size_t kThreads = 4;
  const Operator op = prepare(rich_data(0).problem);
  std::vector<OperatorData> data;
  std::vector<HostTensors> alone, together(kThreads);
  for (std::size_t i = 0; i < kThreads; ++i) {
    data.push_back(rich_data(40 + i));
    alone.push_back(run_operator(device(), op, data[i]));
  }
  std::vector<std::jthread> threads;
  for (std::size_t i = 0; i < kThreads; ++i)
    threads.emplace_back([&, i] {
      together[i] = run_operator(device(), op, data[i], Guards::bands, apart(device(), op), 10);
    });
  threads.clear();
  for (std::size_t i = 0; i < kThreads; ++i) expect_same(together[i], alone[i]);
}

TEST_P(OperatorPromise, TrainedShapesInSmall) {
  WYVERN_OPEN_OR_SKIP(GetParam().kind);
  for (const std::string_view name :
       {"qwen3-next-80b", "kimi-linear-48b", "fla-gdn-1.3b", "fla-deltanet-1.3b"}) {
    const Preset& preset = find_preset(name);
    if (preset.op != which().op) continue;
    Problem p = base(which());
    p.H = preset.H / 2, p.HV = preset.HV / 2, p.K = preset.K, p.V = preset.V;
    if (!recurrent()) p.T = 300;
    p.use_qk_l2norm = p.use_beta_sigmoid = true;
    p.use_gate_in_kernel = p.has_dt_bias = gate_kind(p) != GateKind::none;
    if (gate_kind(p) == GateKind::vector) p.lower_bound = -5.0F;
    check(make_data(p, Gate::typical, 6));
  }
}

TEST_P(OperatorPromise, LongSequencesKeepTheBound) {
  WYVERN_OPEN_OR_SKIP(GetParam().kind);
  if (recurrent()) GTEST_SKIP() << "a few tokens a sequence";
  for (const Gate gate : {Gate::zero, Gate::typical}) {
    Problem p = base(which());
    p.H = p.HV = 1, p.T = 4000;
    check(make_data(p, gate, 12));
  }
}

TEST_P(OperatorPromise, EmptySequencesPassStatesOnExactly) {
  WYVERN_OPEN_OR_SKIP(GetParam().kind);
  const bool backward = which().pass == Pass::backward;
  for (const bool v_first : {false, true})
    for (const bool packed : {false, true}) {
      // On the CPU by kernels that listed cases compile (StatesVFirst, Packed).
      const bool cpu = GetParam().kind == DeviceKind::cpu;
      if (cpu && v_first == packed) continue;
      Problem p = base(which());
      p.T = 0, p.B = p.N = 2, p.V = cpu && packed ? 64 : 40;
      p.initial_state = true, p.state_v_first = v_first, p.packed = packed;
      const OperatorData data = make_data(p, Gate::zero, 5, {0, 0, 0});
      const HostTensors out = run_operator(device(), prepare(data.problem), data);
      EXPECT_EQ(out.at(backward ? "dinitial_state" : "final_state").values(),
                data.tensors.at(backward ? "dht" : "initial_state").values());
    }
}

/// One sequence in two parts, the state handed over, gives what the whole does.
class OperatorSplit
    : public OperatorTest,
      public ::testing::WithParamInterface<std::tuple<DeviceKind, std::string_view>> {};

TEST_P(OperatorSplit, ChangesLittle) {
  WYVERN_OPEN_OR_SKIP(std::get<0>(GetParam()));
  const OperatorPass which{std::string(std::get<1>(GetParam())), Pass::forward};
  const OperatorData whole = make_data(base(which, DType::fp32), Gate::typical, 9);
  const auto run = [&](const OperatorData& data) {
    return run_operator(device(), prepare(data.problem), data);
  };
  const HostTensors expected = run(whole);
  const HostTensors first = run(tokens_of(whole, 0, 70));
  OperatorData tail = tokens_of(whole, 70, 60);
  tail.problem.initial_state = true;
  tail.tensors["initial_state"] = first.at("final_state");
  EXPECT_LE(rms_error(run(tail).at("final_state"), expected.at("final_state").values()), 2e-5);
  // The same sixty tokens by the recurrent pass.
  OperatorData decoded = tail;
  decoded.problem.pass = Pass::recurrent;
  EXPECT_LE(rms_error(run(decoded).at("final_state"), expected.at("final_state").values()), 2e-5);
}

TEST_P(OperatorSplit, ChangesGradientsLittle) {
  WYVERN_OPEN_OR_SKIP(std::get<0>(GetParam()));
  Problem p = base({std::string(std::get<1>(GetParam())), Pass::backward}, DType::fp32);
  p.initial_state = true;
  const OperatorData whole = make_data(p, Gate::typical, 10);
  const auto run = [&](const OperatorData& data) {
    return run_operator(device(), prepare(data.problem), data);
  };
  OperatorData entering = tokens_of(whole, 0, 70);
  entering.problem.pass = Pass::forward;
  OperatorData tail = tokens_of(whole, 70, 60);
  tail.tensors["initial_state"] = run(entering).at("final_state");
  OperatorData head = tokens_of(whole, 0, 70);
  head.tensors["dht"] = run(tail).at("dinitial_state");
  EXPECT_LE(rms_error(run(head).at("dinitial_state"), run(whole).at("dinitial_state").values()),
            2e-5);
}

std::vector<PassCase> pass_cases(DeviceKind kind) {
  std::vector<PassCase> all;
  for (const OperatorPass& which : all_passes()) all.push_back({kind, which});
  return all;
}

const auto kPass = [](const auto& each) { return name_of(each.param.which); };
const auto kOperator = [](const auto& each) { return std::string(std::get<1>(each.param)); };

using ::testing::Combine;
using ::testing::Values;
using ::testing::ValuesIn;

const auto kOperators = ValuesIn(operators());

INSTANTIATE_TEST_SUITE_P(Cpu, OperatorPromise, ValuesIn(pass_cases(DeviceKind::cpu)), kPass);
INSTANTIATE_TEST_SUITE_P(Gpu, OperatorPromise, ValuesIn(pass_cases(DeviceKind::cuda)), kPass);
INSTANTIATE_TEST_SUITE_P(Cpu, OperatorSplit, Combine(Values(DeviceKind::cpu), kOperators),
                         kOperator);
INSTANTIATE_TEST_SUITE_P(Gpu, OperatorSplit, Combine(Values(DeviceKind::cuda), kOperators),
                         kOperator);

}  // namespace
}  // namespace wyvern::testing
