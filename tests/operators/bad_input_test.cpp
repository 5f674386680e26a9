// Bad input (specification, section 6): one Error(kBadInput) that names the argument, before
// anything is written.
#include <wyvern/error.hpp>

#include <gtest/gtest.h>

#include <functional>

#include "tests/support/runner.hpp"

namespace wyvern::testing {
namespace {

/// Good arguments of one launch, which a case then spoils.
struct Launch {
  Arguments arguments;
  void* workspace = nullptr;
};

struct BadCase {
  const char* name;
  std::function<void(Launch&)> spoil;
  std::vector<std::string> words;  // the argument, and what the message says of it
};

void* shifted(void* pointer, std::ptrdiff_t bytes) { return static_cast<char*>(pointer) + bytes; }

const std::vector<BadCase>& bad_cases() {
  static const std::vector<BadCase> cases{
      {"MissingQ", [](Launch& l) { l.arguments.q = {}; }, {"q ", "missing"}},
      {"MissingV", [](Launch& l) { l.arguments.v = {}; }, {"v ", "missing"}},
      {"MissingBeta", [](Launch& l) { l.arguments.beta = {}; }, {"beta ", "missing"}},
      {"MissingG", [](Launch& l) { l.arguments.g = {}; }, {"g ", "missing"}},
      {"MissingALog", [](Launch& l) { l.arguments.A_log = {}; }, {"A_log ", "missing", "fp32"}},
      {"MissingDtBias", [](Launch& l) { l.arguments.dt_bias = {}; }, {"dt_bias ", "missing"}},
      {"MissingState", [](Launch& l) { l.arguments.initial_state = {}; },
       {"initial_state ", "missing"}},
      {"MissingSeqlens", [](Launch& l) { l.arguments.cu_seqlens = {}; },
       {"cu_seqlens ", "missing"}},
      {"MissingO", [](Launch& l) { l.arguments.o = {}; }, {"o ", "missing"}},
      {"MissingFinalState", [](Launch& l) { l.arguments.final_state = {}; },
       {"final_state ", "missing"}},
      {"Rank",
       [](Launch& l) {
         TensorView& q = l.arguments.q;
         q.rank = 3;
         q.shape = {50, 2, 32, 0, 0};
         q.strides = {64, 32, 1, 0, 0};
       },
       {"q ", "[50, 2, 32]", "[1, 50, 2, 32]"}},
      {"Shape", [](Launch& l) { l.arguments.k.shape[1] = 49; },
       {"k ", "[1, 49, 2, 32]", "[1, 50, 2, 32]"}},
      {"HeadsOfV", [](Launch& l) { l.arguments.v.shape[2] = 2; },
       {"v ", "[1, 50, 2, 24]", "[1, 50, 4, 24]"}},
      {"StateShape", [](Launch& l) { l.arguments.initial_state.shape[0] = 3; },
       {"initial_state ", "[3, 4, 32, 24]", "[2, 4, 32, 24]"}},
      {"SeqlensLength", [](Launch& l) { l.arguments.cu_seqlens.shape[0] = 2; },
       {"cu_seqlens ", "[2]", "[3]"}},
      {"DType", [](Launch& l) { l.arguments.v.dtype = DType::fp32; }, {"v ", "fp32", "bf16"}},
      {"BetaDType", [](Launch& l) { l.arguments.beta.dtype = DType::fp16; },
       {"beta ", "fp16", "bf16"}},
      {"FinalStateDType", [](Launch& l) { l.arguments.final_state.dtype = DType::bf16; },
       {"final_state ", "bf16", "fp32"}},
      {"Strides", [](Launch& l) { l.arguments.q.strides[1] = 128; },
       {"q ", "strides", "contiguous"}},
      {"TransposedHeads",
       [](Launch& l) { std::swap(l.arguments.v.strides[1], l.arguments.v.strides[2]); },
       {"v ", "strides", "contiguous"}},
      {"Alignment", [](Launch& l) { l.arguments.g.data = shifted(l.arguments.g.data, 4); },
       {"g ", "aligned to 16"}},
      {"OutputAlignment", [](Launch& l) { l.arguments.o.data = shifted(l.arguments.o.data, 2); },
       {"o ", "aligned to 16"}},
      {"NoWorkspace", [](Launch& l) { l.workspace = nullptr; }, {"workspace", "bytes"}},
      {"WorkspaceAlignment", [](Launch& l) { l.workspace = shifted(l.workspace, 64); },
       {"workspace", "aligned to 256"}},
      {"UnaskedState",
       [](Launch& l) { l.arguments.initial_state = {}; },
       {"initial_state"}},
  };
  return cases;
}

class BadInput : public ::testing::TestWithParam<DeviceKind> {
 protected:
  static Problem problem() {
    Problem p;
    p.H = 2, p.HV = 4, p.K = 32, p.V = 24;
    p.packed = p.initial_state = p.output_final_state = true;
    p.use_gate_in_kernel = p.has_dt_bias = true;
    return p;
  }
};

/// Device copies of everything a launch takes, outputs poisoned.
class Prepared {
 public:
  Prepared(const Device& device, const Problem& problem,
           const std::vector<std::int64_t>& lengths)
      : data_(make_data(problem, Gate::typical, 1, lengths)),
        op_(test_runtime().prepare(device, data_.problem)) {
    const Problem& p = data_.problem;
    Arguments& a = good_.arguments;
    a.q = upload(device, data_.q);
    a.k = upload(device, data_.k);
    a.v = upload(device, data_.v);
    a.beta = upload(device, data_.beta);
    a.g = upload(device, data_.g);
    a.initial_state = upload(device, data_.initial_state);
    a.cu_seqlens = upload(device, data_.seqlens);
    a.A_log = upload(device, data_.A_log);
    a.dt_bias = upload(device, data_.dt_bias);
    HostTensor o(p.dtype, {p.B, p.T, p.HV, p.V}), state(DType::fp32, {p.N, p.HV, p.K, p.V});
    HostTensor workspace(DType::int64, {static_cast<std::int64_t>(op_.workspace_bytes() / 8)});
    for (HostTensor* output : {&o, &state, &workspace}) output->poison(kNanPoison);
    a.o = upload(device, o);
    a.final_state = upload(device, state);
    good_.workspace = upload(device, workspace).data;
    outputs_ = {{memory_.size() - 3, o}, {memory_.size() - 2, state},
                {memory_.size() - 1, workspace}};
  }

  Launch good() const { return good_; }
  const Operator& op() const { return op_; }

  void expect_nothing_written() const {
    for (const auto& [index, before] : outputs_)
      EXPECT_TRUE(same_bytes(memory_[index].download(), before)) << "an output was written";
  }

 private:
  TensorView upload(const Device& device, const HostTensor& host) {
    if (host.shape().empty()) return {};
    memory_.emplace_back(device, host, DeviceTensor::Guards::bands, kGuardByte);
    return memory_.back().view();
  }

  OperatorData data_;
  Operator op_;
  std::vector<DeviceTensor> memory_;
  Launch good_;
  std::vector<std::pair<std::size_t, HostTensor>> outputs_;
};

void expect_rejected(const Prepared& prepared, const Launch& launch, const std::string& name,
                     const std::vector<std::string>& words) {
  SCOPED_TRACE(name);
  try {
    prepared.op().launch(launch.arguments, launch.workspace);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kBadInput);
    for (const std::string& word : words)
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos)
          << "'" << word << "' is not in: " << error.what();
  }
  prepared.expect_nothing_written();
}

#define WYVERN_OPEN_OR_SKIP()                                     \
  std::string why;                                                \
  const std::optional<Device> device = test_device(GetParam(), &why); \
  if (!device) GTEST_SKIP() << why

TEST_P(BadInput, IsNamedAndNothingIsWritten) {
  WYVERN_OPEN_OR_SKIP();
  const Prepared prepared(*device, problem(), {20, 30});
  for (const BadCase& bad : bad_cases()) {
    Launch launch = prepared.good();
    bad.spoil(launch);
    expect_rejected(prepared, launch, bad.name, bad.words);
  }
  device->synchronize();
  EXPECT_NO_THROW(prepared.op().launch(prepared.good().arguments, prepared.good().workspace));
  device->synchronize();
}

TEST_P(BadInput, WhatTheOperatorWasPreparedWithoutIsRejected) {
  WYVERN_OPEN_OR_SKIP();
  Problem plain = problem();
  plain.use_gate_in_kernel = plain.has_dt_bias = plain.initial_state = false;
  const Prepared prepared(*device, plain, {20, 30});
  const Launch good = prepared.good();
  const TensorView spare(good.arguments.q.data, DType::fp32, {4});
  Launch launch = good;
  launch.arguments.A_log = spare;
  expect_rejected(prepared, launch, "A_log", {"A_log"});
  launch = good;
  launch.arguments.initial_state = good.arguments.final_state;
  expect_rejected(prepared, launch, "initial_state", {"initial_state"});
}

TEST_P(BadInput, HostLengthsAreCheckedInFull) {
  WYVERN_OPEN_OR_SKIP();
  const Prepared prepared(*device, problem(), {20, 30});
  const std::vector<std::pair<std::vector<std::int64_t>, std::string>> bad{
      {{0, 50}, "cu_seqlens"},       {{1, 20, 50}, "cu_seqlens[0]"},
      {{0, 60, 50}, "cu_seqlens[2]"}, {{0, 20, 51}, "cu_seqlens[2]"},
      {{0, -1, 50}, "cu_seqlens[1]"}};
  for (const auto& [seqlens, word] : bad) {
    Launch launch = prepared.good();
    launch.arguments.cu_seqlens_host = seqlens;
    expect_rejected(prepared, launch, word, {word});
  }
}

/// Lengths that only the device holds: the CPU checks them; a GPU cannot without waiting, so its
/// kernels clamp them and stay within their tensors.
TEST_P(BadInput, LengthsInDeviceMemoryCannotLeadAstray) {
  WYVERN_OPEN_OR_SKIP();
  const std::vector<std::vector<std::int64_t>> bad{
      {0, 60, 50}, {0, 20, 1000000}, {-40, 20, 50}, {7, 3, 9}};
  for (const auto& seqlens : bad) {
    OperatorData data = make_data(problem(), Gate::typical, 1, {20, 30});
    data.seqlens = HostTensor(DType::int32, {3}, {seqlens.begin(), seqlens.end()});
    const Operator op = test_runtime().prepare(*device, data.problem);
    const Prepared prepared(*device, problem(), {20, 30});
    Launch launch = prepared.good();
    const DeviceTensor lengths(*device, data.seqlens, DeviceTensor::Guards::bands, kGuardByte);
    launch.arguments.cu_seqlens = lengths.view();
    if (device->info().cuda) {
      EXPECT_NO_THROW(prepared.op().launch(launch.arguments, launch.workspace));
      EXPECT_NO_THROW(device->synchronize());
      continue;
    }
    expect_rejected(prepared, launch, "cu_seqlens", {"cu_seqlens["});
    // A good host copy does not excuse bad lengths that the kernels will read.
    const std::vector<std::int64_t> host{0, 20, 50};
    launch.arguments.cu_seqlens_host = host;
    expect_rejected(prepared, launch, "cu_seqlens", {"cu_seqlens["});
  }
}

TEST_P(BadInput, BadProblemsAreNotPrepared) {
  WYVERN_OPEN_OR_SKIP();
  const std::vector<std::pair<std::function<void(Problem&)>, std::string>> bad{
      {[](Problem& p) { p.HV = 3; }, "HV"},
      {[](Problem& p) { p.K = 257; }, "K is 257"},
      {[](Problem& p) { p.lower_bound = -6.0F; }, "lower_bound is -6"},
      {[](Problem& p) { p.op = "softmax"; }, "softmax"},
      {[](Problem& p) { p.g_dtype = DType::fp16; }, "g_dtype"},
  };
  for (const auto& [spoil, word] : bad) {
    Problem p = problem();
    p.packed = false;
    p.T = 8;
    spoil(p);
    try {
      test_runtime().prepare(*device, p);
      ADD_FAILURE() << "accepted: " << word;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kBadInput);
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  }
}

TEST_P(BadInput, PlansThatDoNotFitAreNotPrepared) {
  WYVERN_OPEN_OR_SKIP();
  Problem p = problem();
  p.packed = false;
  p.T = 64;
  const std::vector<Plan> all = plans(*device, p, 64);
  ASSERT_FALSE(all.empty());
  const auto expect_bad = [&](Plan plan, const std::string& word) {
    try {
      test_runtime().prepare(*device, p, plan);
      ADD_FAILURE() << "accepted: " << word;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kBadInput);
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  };
  Plan plan = all.front();
  plan.pop_back();
  expect_bad(plan, "stage");
  plan = all.front();
  plan.front().template_id = "no_such.template";
  expect_bad(plan, "no_such.template");
  plan = all.front();
  for (PlanStep& step : plan)
    if (step.config.contains("BT")) {
      step.config.set("BT", std::int64_t{32});
      break;
    }
  expect_bad(plan, "BT=");
  plan = all.front();
  plan.back().config = Config{};
  expect_bad(plan, plan.back().template_id);
  expect_bad({}, "");
}

INSTANTIATE_TEST_SUITE_P(Cpu, BadInput, ::testing::Values(DeviceKind::cpu),
                         [](const auto&) { return "cpu"; });
INSTANTIATE_TEST_SUITE_P(Gpu, BadInput, ::testing::Values(DeviceKind::cuda),
                         [](const auto&) { return "cuda"; });

}  // namespace
}  // namespace wyvern::testing
