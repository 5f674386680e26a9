// The gated delta rule, forward, against the float64 recurrence: every plan, every option, shapes
// people run in small, and what a launch promises besides its numbers. Cases are grouped as
// {Cpu,Gpu}/{OperatorPlan,OperatorRandom,OperatorPromise,OperatorSanitize}.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <algorithm>
#include <thread>

#include "runtime/device_impl.hpp"
#include "runtime/plan.hpp"
#include "tests/support/runner.hpp"

namespace wyvern::testing {
namespace {

using Lengths = std::vector<std::int64_t>;
using Guards = DeviceTensor::Guards;

class OperatorTest : public ::testing::Test {
 protected:
  void open(DeviceKind kind) { device_ = test_device(kind, &skip_reason_); }
  const Device& device() const { return *device_; }

  void check(const Operator& op, const OperatorData& data, Guards guards = Guards::bands) {
    SCOPED_TRACE(describe(data.problem));
    SCOPED_TRACE(plan_to_json(op.plan()));
    expect_matches_oracle(data, run_operator(device(), op, data, guards));
  }

  void check(const OperatorData& data) {
    check(test_runtime().prepare(device(), data.problem), data);
  }

  std::optional<Device> device_;
  std::string skip_reason_;
};

#define WYVERN_OPEN_OR_SKIP(kind) \
  open(kind);                     \
  if (!device_) GTEST_SKIP() << skip_reason_

Problem base(DType dtype, std::int64_t T = 130) {
  Problem p;
  p.dtype = p.beta_dtype = dtype;
  p.T = T, p.H = 2, p.HV = 4, p.K = 64, p.V = 64;
  p.output_final_state = true;
  return p;
}

// --- Every plan ----------------------------------------------------------------------------------

class OperatorPlan
    : public OperatorTest,
      public ::testing::WithParamInterface<std::tuple<DeviceKind, DType, std::int64_t>> {};

TEST_P(OperatorPlan, MatchesOracle) {
  const auto [kind, dtype, BT] = GetParam();
  WYVERN_OPEN_OR_SKIP(kind);
  Problem p = base(dtype);
  p.use_gate_in_kernel = p.has_dt_bias = p.use_qk_l2norm = p.initial_state = true;
  p.packed = true;
  const OperatorData data = make_data(p, Gate::mixed, 1, {65, 0, 1, 64});
  for (const Precision floor : {Precision::tf32, Precision::tf32x3, Precision::ieee}) {
    if (dtype != DType::fp32 && floor != Precision::tf32) continue;
    OperatorData floored = data;
    floored.problem.precision = floor;
    const std::vector<Plan> all = plans(device(), floored.problem, BT);
    if (BT <= 64) {
      EXPECT_GE(all.size(), 2U) << "a plan is a real choice";
    }
    for (Plan plan : all) {
      // Default configs may be more accurate than the floor; here its own products are on trial,
      // wherever a template admits them.
      for (PlanStep& step : plan) {
        if (dtype != DType::fp32 || !step.config.contains("precision")) continue;
        Config exact = step.config;
        exact.set("precision", floor);
        const std::string reason = find_template(step.template_id)
                                       ->illegal(problem_constants(floored.problem), exact,
                                                 device().impl().target().limits);
        if (reason.empty()) step.config = exact;
      }
      check(test_runtime().prepare(device(), floored.problem, plan), floored);
    }
  }
}

// --- Random option combinations -------------------------------------------------------------------

/// Small shapes over every option, repeatable from the seed. Few values for what kernels are
/// specialized on, so that compiled kernels are met again.
OperatorData random_case(std::uint64_t seed) {
  Engine engine(seed * 7919 + 13);
  const auto draw = [&](std::int64_t count) {
    return std::uniform_int_distribution<std::int64_t>(0, count - 1)(engine);
  };
  const auto flip = [&] { return draw(2) == 1; };
  constexpr DType kDTypes[] = {DType::bf16, DType::fp16, DType::fp32};
  constexpr std::int64_t kHeads[][2] = {{2, 4}, {1, 1}};
  constexpr std::int64_t kDims[][2] = {{64, 64}, {60, 100}, {33, 16}, {128, 128}};
  constexpr std::int64_t kTokens[] = {0, 1, 15, 16, 17, 63, 64, 65, 100, 130};
  Problem p;
  p.dtype = kDTypes[draw(3)];
  p.beta_dtype = flip() ? DType::fp32 : p.dtype;
  p.g_dtype = flip() ? DType::fp32 : p.dtype;
  const auto heads = draw(2), dims = draw(4);
  p.H = kHeads[heads][0], p.HV = kHeads[heads][1];
  p.K = kDims[dims][0], p.V = kDims[dims][1];
  if (p.dtype == DType::fp32 && flip()) p.precision = flip() ? Precision::tf32 : Precision::ieee;
  if (flip()) p.scale = 0.5F;
  p.use_qk_l2norm = flip();
  p.use_gate_in_kernel = flip();
  p.has_dt_bias = p.use_gate_in_kernel && flip();
  p.use_beta_sigmoid = flip();
  p.allow_neg_eigval = flip();
  p.initial_state = flip();
  p.state_dtype = flip() ? DType::bf16 : DType::fp32;
  p.output_final_state = flip();
  p.state_v_first = flip();
  p.packed = flip();
  p.seqlens_dtype = flip() ? DType::int64 : DType::int32;
  Lengths lengths;
  if (p.packed)
    for (std::int64_t n = draw(6); n > 0; --n) lengths.push_back(kTokens[draw(10)]);
  else
    p.T = kTokens[draw(10)], p.B = p.N = draw(4);
  return make_data(p, static_cast<Gate>(draw(4)), seed, lengths);
}

class OperatorRandom : public OperatorTest,
                       public ::testing::WithParamInterface<std::tuple<DeviceKind, int>> {};

TEST_P(OperatorRandom, MatchesOracle) {
  constexpr int kCases = 10;
  const auto [kind, shard] = GetParam();
  WYVERN_OPEN_OR_SKIP(kind);
  for (int i = 0; i < kCases; ++i) {
    SCOPED_TRACE(fmt::format("seed {}", shard * kCases + i));
    check(random_case(static_cast<std::uint64_t>(shard * kCases + i)));
  }
}

// --- Promises -------------------------------------------------------------------------------------

class OperatorPromise : public OperatorTest, public ::testing::WithParamInterface<DeviceKind> {};

TEST_P(OperatorPromise, EveryGateAndDType) {
  WYVERN_OPEN_OR_SKIP(GetParam());
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
    for (const Gate gate : {Gate::zero, Gate::typical, Gate::very_negative, Gate::mixed}) {
      SCOPED_TRACE(to_string(gate));
      Problem p = base(dtype, 200);
      p.initial_state = true;
      check(make_data(p, gate, 4));
    }
}

TEST_P(OperatorPromise, TrainedShapesInSmall) {
  WYVERN_OPEN_OR_SKIP(GetParam());
  for (const std::string_view name : {"qwen3-next-80b", "fla-gdn-1.3b"}) {
    const Preset& preset = find_preset(name);
    Problem p = base(DType::bf16, 300);
    p.H = preset.H / 2, p.HV = preset.HV / 2, p.K = preset.K, p.V = preset.V;
    p.use_qk_l2norm = p.use_gate_in_kernel = p.has_dt_bias = p.use_beta_sigmoid = true;
    check(make_data(p, Gate::typical, 6));
  }
}

TEST_P(OperatorPromise, LongSequencesKeepTheBound) {
  WYVERN_OPEN_OR_SKIP(GetParam());
  for (const Gate gate : {Gate::zero, Gate::typical}) {
    Problem p = base(DType::bf16, 4000);
    p.H = p.HV = 1;
    check(make_data(p, gate, 12));
  }
}

TEST_P(OperatorPromise, EmptyProblemsGiveTheInitialStateBack) {
  WYVERN_OPEN_OR_SKIP(GetParam());
  for (const bool v_first : {false, true}) {
    Problem p = base(DType::bf16, 0);
    p.initial_state = true, p.state_v_first = v_first, p.V = 40;
    p.B = p.N = 2;
    for (const DType state : {DType::fp32, DType::bf16}) {
      p.state_dtype = state;
      const OperatorData data = make_data(p, Gate::zero, 5);
      const Operator op = test_runtime().prepare(device(), p);
      const OperatorOutputs out = run_operator(device(), op, data);
      EXPECT_EQ(out.final_state.values(), data.initial_state.values());
    }
    Problem ragged = p;
    ragged.packed = true;
    const OperatorData data = make_data(ragged, Gate::zero, 5, {0, 0, 0});
    const Operator op = test_runtime().prepare(device(), data.problem);
    EXPECT_EQ(run_operator(device(), op, data).final_state.values(),
              data.initial_state.values());
    check(make_data(ragged, Gate::zero, 5, {}));  // N = 0
  }
}

TEST_P(OperatorPromise, SplittingASequenceChangesLittle) {
  WYVERN_OPEN_OR_SKIP(GetParam());
  const OperatorData whole = make_data(base(DType::fp32, 130), Gate::typical, 9);
  const OperatorOutputs expected =
      run_operator(device(), test_runtime().prepare(device(), whole.problem), whole);
  // Tokens are the outer dimension: the first 70 and the last 60 are plain slices.
  const auto part = [&](std::int64_t first, std::int64_t count) {
    OperatorData data = whole;
    data.problem.T = count;
    for (HostTensor* tensor : {&data.q, &data.k, &data.v, &data.beta, &data.g}) {
      Shape shape = tensor->shape();
      const std::int64_t width = tensor->elements() / shape[1];
      shape[1] = count;
      HostTensor slice(tensor->dtype(), shape);
      for (std::int64_t i = 0; i < slice.elements(); ++i) slice.set(i, tensor->at(first * width + i));
      *tensor = slice;
    }
    return data;
  };
  const OperatorData head = part(0, 70);
  const OperatorOutputs first =
      run_operator(device(), test_runtime().prepare(device(), head.problem), head);
  OperatorData tail = part(70, 60);
  tail.problem.initial_state = true;
  tail.initial_state = first.final_state;
  const OperatorOutputs second =
      run_operator(device(), test_runtime().prepare(device(), tail.problem), tail);
  EXPECT_LE(rms_error(second.final_state, expected.final_state.values()), 2e-5);
}

TEST_P(OperatorPromise, TwoThreadsShareOneRuntime) {
  WYVERN_OPEN_OR_SKIP(GetParam());
  Problem p = base(DType::bf16, 100);
  p.K = 48;  // kernels that no other test compiles: both threads ask for them at once
  const OperatorData data = make_data(p, Gate::typical, 21);
  RuntimeOptions options;
  options.cache = test_cache();
  Runtime runtime(options);
  std::vector<OperatorOutputs> outputs(4);
  std::vector<std::jthread> threads;
  for (OperatorOutputs& out : outputs)
    threads.emplace_back([&, &result = out] {
      result = run_operator(device(), runtime.prepare(device(), p), data);
    });
  threads.clear();
  expect_matches_oracle(data, outputs[0]);
  for (const OperatorOutputs& out : outputs) {
    EXPECT_TRUE(same_bytes(out.o, outputs[0].o));
    EXPECT_TRUE(same_bytes(out.final_state, outputs[0].final_state));
  }
}

TEST_P(OperatorPromise, ReplaysFromACapture) {
  WYVERN_OPEN_OR_SKIP(GetParam());
  Problem p = base(DType::bf16);
  p.packed = p.use_qk_l2norm = p.use_gate_in_kernel = true;
  const OperatorData data = make_data(p, Gate::typical, 14, {70, 0, 60});
  const Operator op = test_runtime().prepare(device(), data.problem);
  const OperatorOutputs direct = run_operator(device(), op, data);
  const std::shared_ptr<void> stream = device().impl().make_stream();
  const OperatorOutputs replayed = run_operator(
      device(), op, data, Guards::bands, [&](const Arguments& arguments, void* workspace) {
        const auto graph = device().impl().capture(
            [&](Stream recording) { op.launch(arguments, workspace, recording); });
        for (int i = 0; i < 3; ++i) graph->launch(stream.get());
        device().synchronize(stream.get());
      });
  EXPECT_TRUE(same_bytes(replayed.o, direct.o));
  EXPECT_TRUE(same_bytes(replayed.final_state, direct.final_state));
}

TEST_P(OperatorPromise, HostLengthsAreAcceptedBesideTheDevices) {
  WYVERN_OPEN_OR_SKIP(GetParam());
  Problem p = base(DType::bf16, 0);
  p.packed = true;
  const OperatorData data = make_data(p, Gate::typical, 3, {40, 0, 30});
  const Operator op = test_runtime().prepare(device(), data.problem);
  const auto launch = [&](Arguments arguments, void* workspace) {
    arguments.cu_seqlens_host = data.cu_seqlens;
    op.launch(arguments, workspace);
  };
  expect_matches_oracle(data, run_operator(device(), op, data, Guards::bands, launch));
}

// --- The subset for compute-sanitizer -------------------------------------------------------------

class OperatorSanitize
    : public OperatorTest,
      public ::testing::WithParamInterface<std::tuple<DeviceKind, DType, std::int64_t>> {};

TEST_P(OperatorSanitize, SmallPlans) {
  const auto [kind, dtype, BT] = GetParam();
  WYVERN_OPEN_OR_SKIP(kind);
  Problem p = base(dtype);
  p.K = 60, p.V = 33, p.H = 1, p.HV = 2;
  p.use_qk_l2norm = p.use_gate_in_kernel = p.has_dt_bias = p.use_beta_sigmoid = true;
  p.initial_state = p.packed = true;
  const OperatorData data = make_data(p, Gate::mixed, 8, {33, 0, 1, 36});
  for (const Plan& plan : plans(device(), data.problem, BT))
    check(test_runtime().prepare(device(), data.problem, plan), data, Guards::none);
}

// --- Instances ------------------------------------------------------------------------------------

using ::testing::Combine;
using ::testing::Range;
using ::testing::Values;

const auto kDTypes = Values(DType::bf16, DType::fp16, DType::fp32);
const auto kChunks = Values(16, 32, 64, 128);
const auto kName = [](const auto& each) {
  return fmt::format("{}_BT{}", to_string(std::get<1>(each.param)), std::get<2>(each.param));
};
const auto kShard = [](const auto& each) {
  return fmt::format("shard{}", std::get<1>(each.param));
};
const auto kDevice = [](const auto& each) { return std::string(to_string(each.param)); };

INSTANTIATE_TEST_SUITE_P(Cpu, OperatorPlan, Combine(Values(DeviceKind::cpu), kDTypes, kChunks),
                         kName);
INSTANTIATE_TEST_SUITE_P(Gpu, OperatorPlan, Combine(Values(DeviceKind::cuda), kDTypes, kChunks),
                         kName);
INSTANTIATE_TEST_SUITE_P(Cpu, OperatorRandom, Combine(Values(DeviceKind::cpu), Range(0, 20)),
                         kShard);
INSTANTIATE_TEST_SUITE_P(Gpu, OperatorRandom, Combine(Values(DeviceKind::cuda), Range(0, 60)),
                         kShard);
INSTANTIATE_TEST_SUITE_P(Cpu, OperatorPromise, Values(DeviceKind::cpu), kDevice);
INSTANTIATE_TEST_SUITE_P(Gpu, OperatorPromise, Values(DeviceKind::cuda), kDevice);
INSTANTIATE_TEST_SUITE_P(Cpu, OperatorSanitize,
                         Combine(Values(DeviceKind::cpu), kDTypes, Values(16, 64)), kName);
INSTANTIATE_TEST_SUITE_P(Gpu, OperatorSanitize,
                         Combine(Values(DeviceKind::cuda), kDTypes, Values(16, 64)), kName);

}  // namespace
}  // namespace wyvern::testing
