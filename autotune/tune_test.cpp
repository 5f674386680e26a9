// A real tuning of a small problem on the CPU, end to end.
#include <gtest/gtest.h>

#include <wyvern/error.hpp>
#include <wyvern/reference.hpp>

#include <fmt/format.h>
#include <unistd.h>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <new>
#include <set>

#include "autotune/bench.hpp"
#include "autotune/floor.hpp"
#include "autotune/inputs.hpp"
#include "autotune/policy.hpp"
#include "autotune/protocol.hpp"
#include "autotune/space.hpp"
#include "autotune/tuner.hpp"
#include "cache/cache.hpp"
#include "compiler/compiler.hpp"
#include "runtime/devices/device_impl.hpp"
#include "runtime/kernel_store.hpp"
#include "runtime/plan.hpp"

namespace wyvern {
namespace {

Problem small_problem() {
  Problem problem;
  problem.T = 100;
  problem.H = 1;
  problem.HV = 2;
  problem.K = 32;
  problem.V = 32;
  problem.use_qk_l2norm = true;
  problem.output_final_state = true;
  return problem;
}

/// Bytes that the caches hold move at their rate, unless they are cold.
TEST(FloorTest, CountsTensorsInCachesAtTheirRates) {
  Problem decode = small_problem();
  decode.pass = Pass::recurrent;
  decode.T = 1;
  const double bytes = work_of(decode).bytes;
  Rates rates;
  rates.bytes_per_s = 1;
  rates.scalar_flops_per_s = 1e30;
  rates.cached = {{bytes / 8, 1000}, {bytes / 4, 100}, {bytes, 10}};
  const auto seconds = [&](const Problem& problem, bool cold) {
    return floor_time(work_of(problem), peak_of(rates, problem, cold));
  };
  EXPECT_DOUBLE_EQ(seconds(decode, true), bytes);
  EXPECT_DOUBLE_EQ(seconds(decode, false), bytes / 100);  // half of it, where all is updated
  Problem prefill = small_problem();
  prefill.T = 5000;
  EXPECT_DOUBLE_EQ(seconds(prefill, false), work_of(prefill).bytes / 10);
  rates.bytes_per_s = 20;
  EXPECT_DOUBLE_EQ(seconds(prefill, false), work_of(prefill).bytes / 20);
  rates.cached.clear();
  EXPECT_DOUBLE_EQ(seconds(decode, false), bytes / 20);
}

class TuneTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string problem = compiler_problem(DeviceKind::cpu); !problem.empty())
      GTEST_SKIP() << problem;
    std::filesystem::create_directories(directory_);
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  TuneOptions options(double budget_s) const {
    TuneOptions options;
    options.budget = std::chrono::duration<double>(budget_s);
    options.worker_command = {WYVERN_TEST_WORKER};
    return options;
  }
  Runtime runtime() const {
    RuntimeOptions options;
    options.cache = std::make_shared<Cache>(directory_);
    return Runtime(std::move(options));
  }

  std::filesystem::path directory_ =
      std::filesystem::path(testing::TempDir()) /
      fmt::format("wyvern-tune-{}-{}", getpid(),
                  testing::UnitTest::GetInstance()->current_test_info()->name());
};

TEST_F(TuneTest, FindsStoresAndReusesAWinner) {
  const Problem problem = small_problem();
  const Device device = Device::open("cpu");
  Runtime first = runtime();
  const TuneResult tuned = tune(first, device, problem, options(600));
  EXPECT_TRUE(tuned.complete);
  EXPECT_TRUE(tuned.stored);
  EXPECT_FALSE(tuned.interrupted);
  EXPECT_GT(tuned.counts.ok, 0);
  EXPECT_EQ(tuned.counts.reused, 0);
  EXPECT_EQ(tuned.counts.wrong + tuned.counts.crashed + tuned.counts.timeout, 0);
  EXPECT_GT(tuned.counts.compiled, 0);
  EXPECT_GT(tuned.tuned_us, 0);
  EXPECT_GT(tuned.default_us, 0);

  Runtime second = runtime();
  const TuneResult again = tune(second, device, problem, options(600));
  EXPECT_EQ(again.plan, tuned.plan);
  EXPECT_EQ(again.counts.measured, 0);
  EXPECT_EQ(again.counts.compiled, 0);
  EXPECT_EQ(again.counts.reused, tuned.counts.measured + tuned.counts.failed +
                                     tuned.counts.illegal - tuned.counts.reused);
  EXPECT_DOUBLE_EQ(again.tuned_us, tuned.tuned_us);

  const Operator op = second.prepare(device, problem);
  EXPECT_EQ(op.origin(), Origin::exact);
  EXPECT_EQ(op.plan(), tuned.plan);
  EXPECT_EQ(second.compiled(), 0);

  const ProblemTensors tensors(device, problem, 7, true);
  const auto workspace = device.allocate(op.workspace_bytes());
  tensors.poison();
  op.launch(tensors.device(), workspace.get());
  tensors.fetch();
  for (const auto& [name, wanted] : reference(problem, tensors.host()))
    EXPECT_LE(relative_error(tensors.host().tensor(name), wanted), error_bound(problem, name))
        << name;
}

/// A winner that was measured with fast decay alone is in use until it is measured anew.
TEST_F(TuneTest, WinnersThatWereMeasuredOtherwiseAreMeasuredAnew) {
  Problem problem = small_problem();
  const Device device = Device::open("cpu");
  Runtime own = runtime();
  ASSERT_TRUE(tune(own, device, problem, options(600)).complete);
  const std::string regime =
      "whole operators in turn, means of gates that fade and that last, warm";
  WinnerRow row = own.cache().list_winners().at(0);
  EXPECT_EQ(row.setting.regime, regime);
  row.setting.regime = "whole operators in turn, warm";
  row.median_us = 1e9;
  ASSERT_TRUE(own.cache().store_winner(row));
  EXPECT_EQ(runtime().prepare(device, problem).origin(), Origin::exact);
  EXPECT_LT(tune(own, device, problem, options(600)).tuned_us, 1e9);
  EXPECT_EQ(own.cache().list_winners().at(0).setting.regime, regime);

  // Without a gate there is but one way.
  problem.op = "delta_rule";
  tune(own, device, problem, options(0.01));
  std::multiset<std::string> regimes;
  for (const WinnerRow& each : own.cache().list_winners()) regimes.insert(each.setting.regime);
  EXPECT_EQ(regimes, (std::multiset<std::string>{regime, "whole operators in turn, warm"}));
}

TEST_F(TuneTest, RowsSayWhatWasMeasured) {
  Problem problem = small_problem();
  problem.packed = true;
  problem.N = 3;
  const Device device = Device::open("cpu");
  Runtime own = runtime();
  TuneOptions brief = options(11);  // with room for a floor
  brief.cu_seqlens = {0, 70, 70, 100};
  const TuneResult tuned = tune(own, device, problem, brief);
  EXPECT_TRUE(tuned.stored);
  EXPECT_GT(tuned.floor_us, 0);
  const std::vector<std::int64_t> lengths{70, 0, 30};
  const WinnerRow winner = own.cache().list_winners().at(0);
  EXPECT_EQ(winner.floor_us, tuned.floor_us);
  EXPECT_EQ(winner.setting.lengths, lengths);
  EXPECT_EQ(winner.setting.T, 100);
  EXPECT_FALSE(winner.setting.host.empty());
  EXPECT_FALSE(winner.setting.regime.empty());
  EXPECT_EQ(winner.samples_us.size(), winner.default_samples_us.size());
  for (const MeasurementRow& row : own.cache().list_measurements()) {
    EXPECT_EQ(row.setting.lengths, lengths);
    EXPECT_EQ(row.setting.N, 3);
    EXPECT_EQ(row.setting.regime.empty(), row.samples_us.empty());
  }

  // Rows of other lengths under the same key are not reused; rows of the same lengths are.
  brief.interrupted = [&] { return true; };
  EXPECT_GT(tune(own, device, problem, brief).counts.reused, 0);
  brief.cu_seqlens = {0, 30, 60, 100};
  EXPECT_EQ(tune(own, device, problem, brief).counts.reused, 0);
  brief.cu_seqlens = {0, 30, 60, 99};
  EXPECT_THROW(tune(own, device, problem, brief), Error);
}

TEST_F(TuneTest, ResumesAfterAnInterruption) {
  const Problem problem = small_problem();
  const Device device = Device::open("cpu");
  int measured = 0;
  TuneOptions stopped = options(600);
  stopped.progress = [&](const TuneProgress&) { ++measured; };
  stopped.interrupted = [&] { return measured >= 3; };
  Runtime first = runtime();
  const TuneResult cut = tune(first, device, problem, stopped);
  EXPECT_TRUE(cut.interrupted);
  EXPECT_FALSE(cut.stored);
  EXPECT_FALSE(cut.complete);
  EXPECT_FALSE(cut.plan.empty());
  EXPECT_NE(first.prepare(device, problem).origin(), Origin::exact);

  Runtime second = runtime();
  const TuneResult rest = tune(second, device, problem, options(600));
  EXPECT_EQ(rest.counts.reused, 3);
  EXPECT_TRUE(rest.stored);
}

TEST_F(TuneTest, ASpentBudgetStillStoresAWinner) {
  const Problem problem = small_problem();
  const Device device = Device::open("cpu");
  Runtime own = runtime();
  const TuneResult result = tune(own, device, problem, options(0.01));
  EXPECT_FALSE(result.complete);
  EXPECT_TRUE(result.stored);
  EXPECT_GT(result.default_us, 0);
  EXPECT_EQ(own.prepare(device, problem).origin(), Origin::exact);
}

TEST_F(TuneTest, PoliciesSayWhenAProblemIsTuned) {
  const Problem problem = small_problem();
  const Device device = Device::open("cpu");
  Runtime own = runtime();
  {
    TuningRuntime cached(own, TuningPolicy::cached, {});
    EXPECT_EQ(cached.prepare(device, problem).origin(), Origin::fallback);
  }
  {
    TuningRuntime meanwhile(own, TuningPolicy::background, options(0.01));
    EXPECT_EQ(meanwhile.prepare(device, problem).origin(), Origin::fallback);
    meanwhile.wait();
    EXPECT_EQ(meanwhile.prepare(device, problem).origin(), Origin::exact);
    EXPECT_EQ(meanwhile.last_failure(), "");
  }
  Problem other = problem;
  other.T = 700;
  {
    TuningRuntime first(own, TuningPolicy::on_miss, options(0.01));
    EXPECT_EQ(first.prepare(device, other).origin(), Origin::exact);
    Problem again = other;
    again.V = 48;
    TuneOptions broken = options(1);
    broken.worker_command = {"/nonexistent/worker"};
    TuningRuntime failing(own, TuningPolicy::on_miss, broken);
    EXPECT_NE(failing.prepare(device, again).origin(), Origin::exact);
    EXPECT_NE(failing.last_failure().find("/nonexistent/worker"), std::string::npos);
  }
  {
    Problem invariant = problem;
    invariant.batch_invariant = true;
    EXPECT_THROW((void)tune(own, device, invariant, options(0.01)), Error);
    TuningRuntime first(own, TuningPolicy::on_miss, options(0.01));
    EXPECT_EQ(first.prepare(device, invariant).origin(), Origin::fallback);
    EXPECT_EQ(first.last_failure(), "");
  }
  TuningRuntime off(own, TuningPolicy::off, {});
  const Operator plain = off.prepare(device, problem);
  EXPECT_EQ(plain.plan(), default_plan(problem, device.impl().target()));
}

// A worker that may open as many files as it has open soon after its start loads few kernels.
TEST_F(TuneTest, FailuresWithoutDescriptorsAreNotStored) {
  const Device device = Device::open("cpu");
  Runtime own = runtime();
  TuneOptions starved = options(600);
  starved.worker_command = {"/bin/sh", "-c", "ulimit -n 10; exec \"$0\"", WYVERN_TEST_WORKER};
  int decided = 0;
  starved.progress = [&](const TuneProgress&) { ++decided; };
  starved.interrupted = [&] { return decided >= 8; };
  try {
    tune(own, device, small_problem(), starved);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnavailable) << error.what();
  }
  for (const MeasurementRow& row : own.cache().list_measurements())
    EXPECT_TRUE(row.status == "ok" || row.status == "rejected") << row.status << ": " << row.detail;
}

TEST_F(TuneTest, RefusesProblemsThatCannotBeTuned) {
  const Device device = Device::open("cpu");
  Runtime own = runtime();
  Problem empty = small_problem();
  empty.T = 0;
  EXPECT_THROW(tune(own, device, empty, options(1)), Error);
  TuneOptions without = options(1);
  without.worker_command.clear();
  EXPECT_THROW(tune(own, device, small_problem(), without), Error);
}

TEST(Space, CoversEveryStageWithItsDefaultsIncluded) {
  for (const bool packed : {false, true}) {
    Problem problem = small_problem();
    problem.packed = packed;
    problem.use_gate_in_kernel = true;
    for (const Target& target : {host_target(), cuda_target("sm_90a")}) {
      const SearchSpace space = build_space(problem, target);
      ASSERT_FALSE(space.layers.empty());
      for (const Group& group : space.groups) {
        ASSERT_FALSE(group.configs.empty());
        ASSERT_LT(group.default_config, group.configs.size());
        ASSERT_LT(group.step, group.context.size());
        EXPECT_EQ(space.groups[group.context[group.step]].template_id, group.template_id);
        for (const std::size_t other : group.context) {
          const std::int64_t BT = space.groups[other].BT;
          EXPECT_TRUE(BT == 0 || group.BT == 0 || BT == group.BT);
        }
      }
    }
  }
}

TEST(Space, SplitsEitherScanOfABackwardPassOrBoth) {
  Problem problem = small_problem();
  problem.pass = Pass::backward;
  problem.T = 16384;
  const SearchSpace space = build_space(problem, cuda_target("sm_90a"));
  std::map<std::pair<std::int64_t, std::int64_t>, std::multiset<std::pair<bool, bool>>> layers;
  for (const Layer& layer : space.layers) {
    std::set<std::string> names;
    for (const Edge& edge : layer.edges) names.insert(space.groups[edge.group].template_id);
    for (const std::string scan : {"fwd_h", "bwd_dhu"})
      for (const char* part : {"_segment.portable", "_combine.portable", "_resume.portable"})
        EXPECT_NE(names.contains(scan + ".portable"), names.contains(scan + part));
    layers[{layer.BT, layer.SEG}].emplace(names.contains("fwd_h_resume.portable"),
                                          names.contains("bwd_dhu_resume.portable"));
  }
  for (const auto& [shape, split] : layers) {
    const std::multiset<std::pair<bool, bool>> unsplit{{false, false}};
    const std::multiset<std::pair<bool, bool>> every{{false, true}, {true, false}, {true, true}};
    EXPECT_EQ(split, shape.second == 0 ? unsplit : every);
  }
  EXPECT_TRUE((layers.contains({64, 8})));
}

/// A problem with a split plan; the reduced problem fills only one segment of it.
std::pair<Problem, Plan> split_problem(const Device& device) {
  Problem problem = small_problem();
  problem.T = 5000;
  std::vector<Plan> plans = enumerate_plans(problem, device.impl().target(), 64);
  std::erase_if(plans, [](const Plan& plan) { return shape_of(plan).SEG == 0; });
  return {problem, plans.at(0)};
}

TEST_F(TuneTest, SplitPlansAreCheckedOnSeveralSegments) {
  const Device device = Device::open("cpu");
  const auto [problem, plan] = split_problem(device);
  Bench bench(device, problem, std::make_shared<Cache>(directory_), 5);
  const Outcome outcome = bench.compare({plan}, 0.01, [](std::size_t) {}).front();
  EXPECT_EQ(outcome.status, Status::ok) << outcome.detail;
  EXPECT_FALSE(outcome.samples.empty());
}

// The cache hands out, as the kernel that carries states from segment to segment, the one that
// carries their gradients in the opposite direction: right for one segment, wrong for several.
TEST_F(TuneTest, SplitPlansThatAreWrongOnSeveralSegmentsDoNotPass) {
  const Device device = Device::open("cpu");
  const auto [problem, plan] = split_problem(device);
  const auto combine = std::find_if(plan.begin(), plan.end(), [](const PlanStep& step) {
    return step.template_id == "fwd_h_combine.cpu";
  });
  ASSERT_NE(combine, plan.end());
  CompileRequest request{find_template(combine->template_id), problem_constants(problem),
                         combine->config, device.impl().target()};
  const std::string key = artifact_key(request);
  // It takes chunks, and so segments, for twice as long as they are, and finds no state for every
  // second one.
  request.config.set("BT", 2 * request.config.integer("BT"));
  Artifact misled = compile(request);
  misled.key = key;
  const auto cache = std::make_shared<Cache>(directory_);
  ASSERT_TRUE(cache->store_artifact(to_row(misled)));

  Bench bench(device, problem, cache, 5);
  const auto step = static_cast<std::size_t>(combine - plan.begin());
  EXPECT_EQ(bench.measure(plan, step, 1e9, 0).status, Status::ok) << "not on one segment";
  const Outcome outcome = bench.compare({plan}, 0.01, [](std::size_t) {}).front();
  EXPECT_EQ(outcome.status, Status::wrong);
  EXPECT_NE(outcome.detail.find("is off by"), std::string::npos) << outcome.detail;
}

std::vector<unsigned char> content(const Device& device, const TensorView& view) {
  std::vector<unsigned char> bytes(static_cast<std::size_t>(view.elements()) * size_of(view.dtype));
  device.copy_out(bytes.data(), view.data, bytes.size());
  return bytes;
}

TEST_F(TuneTest, PlansAreComparedWithFastAndSlowDecay) {
  const Device device = Device::open("cpu");
  const Problem problem = small_problem();
  const auto cache = std::make_shared<Cache>(directory_);
  Bench bench(device, problem, cache, 5);
  ASSERT_EQ(bench.compared().size(), 2U);
  const Arguments& fast = bench.compared()[0];
  const Arguments& slow = bench.compared()[1];
  const Operator op = runtime().prepare(device, problem);
  const Outcome outcome = bench.compare({op.plan()}, 0.01, [](std::size_t) {}).front();
  ASSERT_EQ(outcome.status, Status::ok) << outcome.detail;
  // The last launch was one with slow decay.
  const auto compared = content(device, slow.o);
  const auto workspace = device.allocate(op.workspace_bytes());
  op.launch(slow, workspace.get());
  EXPECT_EQ(compared, content(device, slow.o));
  op.launch(fast, workspace.get());
  EXPECT_NE(compared, content(device, fast.o));

  Problem other = problem;
  other.op = "delta_rule";
  EXPECT_EQ(Bench(device, other, cache, 5).compared().size(), 1U);
  other = problem;
  other.pass = Pass::recurrent;
  EXPECT_EQ(Bench(device, other, cache, 5).compared().size(), 1U);
}

/// Gates in every form: log decays, inputs of a softplus, and inputs of a bounded sigmoid.
TEST(Inputs, SlowDecayIsSlowForEveryKindOfGate) {
  const Device device = Device::open("cpu");
  for (const int form : {0, 1, 2}) {
    Problem problem = small_problem();
    if (form == 2) problem.op = "kda";
    problem.use_gate_in_kernel = problem.has_A_log = form > 0;
    if (form == 2) problem.lower_bound = -5.0F;
    problem.g_dtype = DType::fp32;
    ProblemTensors tensors(device, problem, 3, true);
    const Arguments slow_tensors = tensors.with_gates(kSlowDecay, 4);
    EXPECT_NE(slow_tensors.g.data, tensors.device().g.data);
    EXPECT_EQ(slow_tensors.q.data, tensors.device().q.data);
    const auto decays = [&](const TensorView& g) {
      const std::vector<unsigned char> bytes = content(device, g);
      std::vector<float> values(bytes.size() / sizeof(float));
      std::memcpy(values.data(), bytes.data(), bytes.size());
      // Rates go from exp(-3) to 1: the slowest sigmoid, the steepest softplus.
      for (float& x : values)
        if (form > 0)
          x = form == 1 ? -std::log1p(std::exp(x)) : -5 / (1 + std::exp(-x * std::exp(-3.0F)));
      return values;
    };
    const std::vector<float> slow = decays(slow_tensors.g);
    const auto [least, most] = std::ranges::minmax(slow);
    EXPECT_LE(most, 0) << form;
    EXPECT_LT(least, 0) << form;
    EXPECT_GT(least, -0.05F) << form;
    EXPECT_LT(std::ranges::min(decays(tensors.device().g)), -0.4F) << form;
  }
}

TEST(Inputs, SequencesHaveTheGivenLengths) {
  Problem problem = small_problem();
  problem.packed = true;
  problem.N = 4;
  const Device device = Device::open("cpu");
  const std::vector<std::int64_t> asked{0, 0, 90, 91, 100};
  const ProblemTensors given(device, problem, 3, true, 1, asked);
  EXPECT_TRUE(std::ranges::equal(given.host().cu_seqlens_host, asked));
  const auto drawn = uneven_offsets(problem, 3);
  const ProblemTensors uneven(device, problem, 3, true);
  EXPECT_TRUE(std::ranges::equal(uneven.host().cu_seqlens_host, drawn));
  validate_seqlens(problem, drawn);
  EXPECT_EQ(drawn[1], drawn[2]);
  for (const std::int64_t N : {1, 2, 4}) {
    problem.N = N, problem.seqlens_hint = 70;
    const auto hinted = uneven_offsets(problem, 3);
    validate_seqlens(problem, hinted);
    EXPECT_EQ(hinted[1], N == 1 ? 100 : 70);
  }
  EXPECT_FALSE(reduced(problem).seqlens_hint);
}

TEST(Inputs, TooLargeForTheHostAreRefusedBeforeAnythingIsMade) {
  Problem problem = small_problem();
  problem.T = 2'000'000'000;
  problem.H = problem.HV = 16;
  problem.K = problem.V = 128;
  validate(problem);
  for (const bool keep_host : {false, true}) {
    try {
      const ProblemTensors tensors(Device::open("cpu"), problem, 3, keep_host);
      ADD_FAILURE() << "it was made";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUnavailable);
      EXPECT_NE(std::string(error.what()).find("T = 2000000000, N = 1, H = 16"), std::string::npos)
          << error.what();
    } catch (const std::bad_alloc&) {
      ADD_FAILURE() << "memory was asked for";
    }
  }
}

TEST(Inputs, TheReducedProblemHasAnEmptySequenceAndARemainder) {
  Problem problem = small_problem();
  problem.packed = true;
  problem.T = 5000;
  problem.N = 9;
  const Problem small = reduced(problem);
  validate(small);
  const ProblemTensors tensors(Device::open("cpu"), small, 3, true);
  const auto offsets = tensors.host().cu_seqlens_host;
  ASSERT_EQ(offsets.size(), 4U);
  validate_seqlens(small, offsets);
  EXPECT_EQ(offsets[1], offsets[2]);
  EXPECT_NE((offsets[3] - offsets[2]) % 16, 0);
}

TEST(Inputs, TheReducedProblemHasSegmentsWhereScansAreSplit) {
  Problem problem = small_problem();
  problem.T = 50000;
  EXPECT_GT(reduced(problem, 1024).T, 2 * 1024);
  EXPECT_EQ(reduced(problem, 8).T, reduced(problem).T);
  problem.packed = true;
  problem.N = 9;
  const ProblemTensors tensors(Device::open("cpu"), reduced(problem, 1024), 3, true);
  const auto offsets = tensors.host().cu_seqlens_host;
  EXPECT_GT(std::max(offsets[1] - offsets[0], offsets[3] - offsets[2]), 1024);
}

TEST(Protocol, ProblemsSurviveTheTrip) {
  Problem problem = small_problem();
  problem.B = 1;
  problem.N = 4;
  problem.packed = true;
  problem.dtype = DType::fp16;
  problem.beta_dtype = DType::fp32;
  problem.g_dtype = DType::fp16;
  problem.state_dtype = DType::bf16;
  problem.seqlens_dtype = DType::int64;
  problem.scale = 0.3F;
  problem.precision = Precision::tf32x3;
  problem.lower_bound = -5.0F;
  problem.use_gate_in_kernel = problem.has_dt_bias = problem.use_beta_sigmoid = true;
  problem.allow_neg_eigval = problem.initial_state = problem.state_v_first = true;
  const Problem back = problem_from(nlohmann::json::parse(to_json(problem).dump()));
  EXPECT_EQ(problem_key(back).to_string(), problem_key(problem).to_string());
  EXPECT_EQ(back.T, problem.T);
  EXPECT_EQ(back.N, problem.N);
  EXPECT_EQ(back.scale, problem.scale);
  EXPECT_EQ(back.precision, problem.precision);
  EXPECT_EQ(back.lower_bound, problem.lower_bound);
  EXPECT_EQ(back.seqlens_dtype, problem.seqlens_dtype);
  EXPECT_EQ(to_json(back), to_json(problem));
  EXPECT_THROW(problem_from(nlohmann::json{{"op", 3}}), Error);
  nlohmann::json older = to_json(problem);  // of a build without the option
  for (const char* const option : {"batch_invariant", "checkpoint_every", "index_columns"})
    older.erase(option);
  EXPECT_EQ(to_json(problem_from(older)), to_json(problem));
  older.erase("T");
  EXPECT_THROW(problem_from(older), Error);
}

TEST(Protocol, PassesAndTheirOptionsSurviveTheTrip) {
  Problem backward = small_problem();
  backward.op = "kda";
  backward.pass = Pass::backward;
  backward.lower_bound = -5.0F;
  backward.use_gate_in_kernel = backward.safe_gate = backward.disable_recompute = true;
  backward.has_A_log = false;
  backward.chunk_size = 32;
  Problem decode = small_problem();
  decode.pass = Pass::recurrent;
  decode.output_final_state = false;
  decode.inplace_state = decode.state_index = true;
  decode.state_slots = 7;
  decode.index_dtype = DType::int64;
  Problem forward = small_problem();
  forward.return_intermediate_states = true;
  for (const Problem& problem : {backward, decode, forward}) {
    const Problem back = problem_from(nlohmann::json::parse(to_json(problem).dump()));
    EXPECT_EQ(problem_key(back).to_string(), problem_key(problem).to_string());
    EXPECT_EQ(back.safe_gate, problem.safe_gate);
    EXPECT_EQ(back.state_slots, problem.state_slots);
  }
  nlohmann::json unknown = to_json(forward);
  unknown["pass"] = "sideways";
  EXPECT_THROW(problem_from(unknown), Error);
}

}  // namespace
}  // namespace wyvern
