// Every way to carry out an operator's pass by templates of the build, at every chunk size and
// precision. Cases are {Cpu,Gpu}/{OperatorPlan,OperatorSegments} and Gpu/OperatorSanitize.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "runtime/devices/device_impl.hpp"
#include "runtime/operators/operator.hpp"
#include "tests/operators/fixture.hpp"
#include "tests/support/full_suite.hpp"

namespace wyvern::testing {
namespace {

/// Plans among `all` that hold every template beside every neighbour it has in any of them.
std::vector<Plan> neighbourhoods(const std::vector<Plan>& all) {
  std::set<std::pair<std::string, std::string>> seen;
  std::vector<Plan> chosen;
  for (const Plan& plan : all) {
    bool is_new = false;
    std::string before;
    for (const PlanStep& step : plan) {
      is_new |= seen.emplace(before, step.template_id).second;
      before = step.template_id;
    }
    if (is_new) chosen.push_back(plan);
  }
  return chosen;
}

class PlanTest : public OperatorTest {
 protected:
  /// Default configs may be more accurate than the floor; here its own products are on trial,
  /// wherever a template admits them.
  Plan at_floor(Plan plan, const Problem& p) {
    const std::vector<StageUse> uses = stage_uses(p);
    const std::vector<std::size_t> starts = match(uses, plan);
    for (std::size_t i = 0; i < plan.size(); ++i) {
      if (p.dtype != DType::fp32 || !plan[i].config.contains("precision")) continue;
      Config exact = plan[i].config;
      exact.set("precision", precision_floor(p));
      const Constants constants =
          step_constants(p, std::span(uses).subspan(starts[i], starts[i + 1] - starts[i]));
      const std::string reason =
          find_template(plan[i].template_id)
              ->illegal(Spec(constants, exact), device().impl().target().limits);
      if (reason.empty()) plan[i].config = exact;
    }
    return plan;
  }

  void check_plans(const OperatorData& data, std::int64_t BT, Guards guards = Guards::bands) {
    const std::vector<Plan> all = plans(device(), data.problem, BT);
    if (BT <= 64) {
      EXPECT_FALSE(all.empty()) << describe(data.problem);
    }
    for (const Plan& plan : neighbourhoods(all))
      check(test_runtime().prepare(device(), data.problem, at_floor(plan, data.problem)), data,
            guards);
  }
};

Problem with_all_options(const OperatorPass& which, DType dtype) {
  Problem p = base(which, dtype);
  p.use_qk_l2norm = p.initial_state = p.packed = true;
  p.use_gate_in_kernel = p.has_dt_bias = gate_kind(p) != GateKind::none;
  return p;
}

struct PlanCase {
  DeviceKind kind;
  OperatorPass which;
  DType dtype;
  std::int64_t BT;
};

void PrintTo(const PlanCase& c, std::ostream* out) { *out << name_of(c.which); }

class OperatorPlan : public PlanTest, public ::testing::WithParamInterface<PlanCase> {
 protected:
  void check_precisions(OperatorData data) {
    const auto [kind, which, dtype, BT] = GetParam();
    for (const Precision floor : {Precision::tf32, Precision::tf32x3, Precision::ieee}) {
      // The CPU computes all in fp32: its templates have one precision.
      if ((dtype != DType::fp32 || kind == DeviceKind::cpu) && floor != Precision::tf32) continue;
      data.problem.precision = floor;
      check_plans(data, BT);
    }
  }
};

TEST_P(OperatorPlan, MatchesOracle) {
  const OperatorPass& which = GetParam().which;
  WYVERN_OPEN_OR_SKIP(GetParam().kind);
  const Lengths lengths =
      which.pass == Pass::recurrent ? Lengths{2, 0, 1, 5} : Lengths{65, 0, 1, 64};
  Problem p = with_all_options(which, GetParam().dtype);
  check_precisions(make_data(p, Gate::mixed, 1, lengths));
  if (which.pass != Pass::backward || gate_kind(p) == GateKind::none) return;
  // A gate's gradient is as small as fp32's resolution where decay is fast.
  p.use_gate_in_kernel = p.has_dt_bias = false;
  if (definition_of(p).facts().householder) p.num_householder = 3;
  check_precisions(make_data(p, Gate::fast, 2, lengths));
}

/// Splitting long sequences into segments is exact: the bounds hold at any gate, however weak, and
/// for sequences of one segment, of several, and of none.
class OperatorSegments : public PlanTest, public ::testing::WithParamInterface<PlanCase> {};

/// The scans that a plan splits.
std::set<std::string> split_scans(const Plan& plan) {
  std::set<std::string> scans;
  for (const PlanStep& step : plan)
    if (const std::string name = find_template(step.template_id)->name; name.ends_with("_resume"))
      scans.insert(name);
  return scans;
}

/// Plans among `all` for every choice of scans to split, with the neighbours each template has
/// there.
std::vector<Plan> split_plans(const std::vector<Plan>& all) {
  std::map<std::set<std::string>, std::vector<Plan>> by_choice;
  for (const Plan& plan : all)
    if (shape_of(plan).SEG != 0) by_choice[split_scans(plan)].push_back(plan);
  std::vector<Plan> chosen;
  for (const auto& [scans, plans] : by_choice)
    for (Plan& plan : neighbourhoods(plans)) chosen.push_back(std::move(plan));
  return chosen;
}

TEST_P(OperatorSegments, MatchesOracle) {
  const auto [kind, which, dtype, BT] = GetParam();
  WYVERN_OPEN_OR_SKIP(kind);
  Problem p = base(which, dtype);
  p.H = p.HV = 1;
  p.packed = p.initial_state = true;
  for (const Gate gate : {Gate::zero, Gate::typical, Gate::mixed}) {
    const OperatorData data = make_data(p, gate, 77, {1500, 0, 17, 600});
    std::set<std::set<std::string>> choices;
    for (const Plan& plan : split_plans(plans(device(), data.problem, BT))) {
      choices.insert(split_scans(plan));
      check(test_runtime().prepare(device(), data.problem, plan), data);
    }
    // The forward scan, the backward scan, or both.
    EXPECT_EQ(choices.size(), which.pass == Pass::backward ? 3U : 1U);
    if (gate_kind(p) == GateKind::none) break;
  }
}

/// The same over the states that operators may begin and end with, and equal sequences.
TEST_P(OperatorSegments, StatesAtTheEnds) {
  const auto [kind, which, dtype, BT] = GetParam();
  WYVERN_OPEN_OR_SKIP(kind);
  for (const unsigned options : {0U, 1U, 2U, 3U}) {
    Problem p = base(which, dtype);
    p.H = 1, p.HV = 2, p.K = 40, p.V = 33;
    p.initial_state = (options & 1U) != 0;
    p.output_final_state = (options & 2U) != 0;
    p.state_v_first = options == 3;
    p.use_qk_l2norm = options == 1;
    p.disable_recompute = options == 2;
    p.B = p.N = p.disable_recompute ? 1 : 2;
    p.T = p.disable_recompute ? 1300
                              : 700;  // what the forward pass keeps has a chunk size of its own
    const OperatorData data = make_data(p, Gate::typical, 5 + options);
    const std::int64_t size = p.disable_recompute ? kept_chunk_size(p) : BT;
    const std::vector<Plan> all = split_plans(plans(device(), data.problem, size));
    ASSERT_FALSE(all.empty());
    for (const bool last : {false, true}) {
      // In the short suite each plan meets a state and none at either end.
      if (kind == DeviceKind::cpu && !full_suite() && last != (options == 1 || options == 2))
        continue;
      check(test_runtime().prepare(device(), data.problem, last ? all.back() : all.front()), data);
    }
  }
}

TEST_P(OperatorSegments, EmptySequencesPassStatesOnExactly) {
  const auto [kind, which, dtype, BT] = GetParam();
  WYVERN_OPEN_OR_SKIP(kind);
  const bool backward = which.pass == Pass::backward;
  for (const bool v_first : {false, true})
    for (const bool packed : {false, true}) {
      Problem p = base(which, dtype);
      p.T = 0, p.B = p.N = 2, p.V = 40;
      p.initial_state = true, p.state_v_first = v_first, p.packed = packed;
      if (kind == DeviceKind::cpu) {  // by kernels that the two tests above compile
        if (v_first == packed) continue;
        p.H = 1, p.HV = packed ? 1 : 2, p.K = packed ? 64 : 40, p.V = packed ? 64 : 33;
      }
      const OperatorData data = make_data(p, Gate::zero, 5, {0, 0, 0});
      const std::vector<Plan> all = split_plans(plans(device(), data.problem, BT));
      ASSERT_FALSE(all.empty());
      for (const Plan& plan : {all.front(), all.back()}) {
        const HostTensors out =
            run_operator(device(), test_runtime().prepare(device(), data.problem, plan), data);
        EXPECT_EQ(out.at(backward ? "dinitial_state" : "final_state").values(),
                  data.tensors.at(backward ? "dht" : "initial_state").values());
      }
    }
}

TEST_P(OperatorSegments, BitwiseRepeat) {
  const auto [kind, which, dtype, BT] = GetParam();
  WYVERN_OPEN_OR_SKIP(kind);
  constexpr int kRuns = 5;
  Problem p = base(which, dtype);
  p.packed = p.initial_state = true;
  if (kind == DeviceKind::cpu) p.H = p.HV = 1;  // as in MatchesOracle, to share its kernels
  const OperatorData data = make_data(p, Gate::typical, 31, {700, 0, 33});
  const std::vector<Plan> all = split_plans(plans(device(), data.problem, BT));
  const auto every = std::find_if(all.begin(), all.end(), [&](const Plan& plan) {
    return split_scans(plan).size() == (which.pass == Pass::backward ? 2U : 1U);
  });
  ASSERT_NE(every, all.end());
  run_operator(device(), test_runtime().prepare(device(), data.problem, *every), data,
               Guards::bands, {}, kRuns);
}

class OperatorSanitize : public PlanTest, public ::testing::WithParamInterface<PlanCase> {};

TEST_P(OperatorSanitize, SmallPlans) {
  const auto [kind, which, dtype, BT] = GetParam();
  WYVERN_OPEN_OR_SKIP(kind);
  Problem p = with_all_options(which, dtype);
  p.K = 60, p.V = 33, p.H = 1, p.HV = 2;
  p.use_beta_sigmoid = definition_of(p).facts().beta;
  Lengths lengths{33, 0, 1, 36};
  if (which.pass == Pass::recurrent) {
    p.state_index = true, p.state_slots = 5;
    lengths = {2, 0, 1, 5};
  }
  check_plans(make_data(p, Gate::mixed, 8, lengths), BT, Guards::none);
}

std::vector<PlanCase> plan_cases(DeviceKind kind, const std::vector<DType>& dtypes,
                                 const std::vector<std::int64_t>& chunks) {
  std::vector<PlanCase> all;
  for (const DType dtype : dtypes) {
    for (const OperatorPass& which : all_passes()) {
      if (which.pass == Pass::recurrent) {
        all.push_back({kind, which, dtype, 64});
        continue;
      }
      for (const std::int64_t BT : chunks) all.push_back({kind, which, dtype, BT});
    }
  }
  return all;
}

std::vector<PlanCase> chunked_cases(DeviceKind kind, const std::vector<DType>& dtypes,
                                    std::int64_t BT) {
  std::vector<PlanCase> all = plan_cases(kind, dtypes, {BT});
  std::erase_if(all, [](const PlanCase& c) { return c.which.pass == Pass::recurrent; });
  return all;
}

/// The CPU computes all in fp32, and compiling takes most of the time there, so its cases are split
/// among element types: chunk sizes of plans, and passes of split plans.
std::vector<PlanCase> cpu_plan_cases() {
  std::vector<PlanCase> all;
  for (const auto& [dtype, chunks] : {std::pair{DType::bf16, std::vector<std::int64_t>{16, 128}},
                                      {DType::fp16, {32}},
                                      {DType::fp32, {64}}})
    for (const PlanCase& c : plan_cases(DeviceKind::cpu, {dtype}, chunks)) all.push_back(c);
  return all;
}

std::vector<PlanCase> cpu_segment_cases() {
  std::vector<PlanCase> all = chunked_cases(DeviceKind::cpu, {DType::bf16, DType::fp32}, /*BT=*/16);
  std::erase_if(all, [](const PlanCase& c) {
    return (c.which.pass == Pass::forward) != (c.dtype == DType::bf16);
  });
  return all;
}

const std::vector<DType> kDTypes{DType::bf16, DType::fp16, DType::fp32};

const auto kName = [](const auto& each) {
  const PlanCase& c = each.param;
  return fmt::format("{}_{}_BT{}", name_of(c.which), to_string(c.dtype), c.BT);
};

using ::testing::ValuesIn;

INSTANTIATE_TEST_SUITE_P(Cpu, OperatorPlan, ValuesIn(cpu_plan_cases()), kName);
INSTANTIATE_TEST_SUITE_P(Gpu, OperatorPlan,
                         ValuesIn(plan_cases(DeviceKind::cuda, kDTypes, {16, 32, 64, 128})), kName);
INSTANTIATE_TEST_SUITE_P(Cpu, OperatorSegments, ValuesIn(cpu_segment_cases()), kName);
INSTANTIATE_TEST_SUITE_P(Gpu, OperatorSegments,
                         ValuesIn(chunked_cases(DeviceKind::cuda, {DType::bf16, DType::fp32}, 16)),
                         kName);
INSTANTIATE_TEST_SUITE_P(Gpu, OperatorSanitize,
                         ValuesIn(plan_cases(DeviceKind::cuda, {DType::bf16, DType::fp32},
                                             {16, 64})),
                         kName);

}  // namespace
}  // namespace wyvern::testing
