// Which plans are legal: exactly those whose configs are in their templates' spaces, whatever a
// caller or a damaged cache gives.
#include <wyvern/error.hpp>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <random>
#include <set>

#include "runtime/bind.hpp"
#include "runtime/operators/operator.hpp"
#include "runtime/plan.hpp"

namespace wyvern {
namespace {

Problem problem_of(const OperatorFacts& op, Pass pass) {
  Problem p;
  p.op = op.name, p.pass = pass;
  p.T = 300, p.H = 2, p.HV = 4, p.K = p.V = 64;
  p.initial_state = p.output_final_state = p.use_qk_l2norm = p.packed = true;
  p.use_gate_in_kernel = p.has_dt_bias = op.gated();
  if (op.householder) p.num_householder = 2;
  return p;
}

/// The reason why a plan is refused; empty for a legal one.
std::string refusal(const Problem& problem, const Plan& plan, const Target& target) {
  const std::vector<StageUse> uses = stage_uses(problem);
  try {
    (void)check_plan(problem, uses, plan, target);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kBadInput);
    return error.what();
  }
  return {};
}

/// Whether a plan is legal by its templates' spaces, which are listed in full.
class Spaces {
 public:
  Spaces(const Problem& problem, const Target& target)
      : problem_(problem), target_(target), uses_(stage_uses(problem)) {}

  bool hold(const Plan& plan) {
    const std::vector<std::size_t> starts = match(uses_, plan);
    std::set<Value> BT, SEG;
    for (std::size_t i = 0; i < plan.size(); ++i) {
      const Config& config = plan[i].config;
      if (!space_of(plan[i].template_id, starts[i], starts[i + 1]).contains(config)) return false;
      if (const Value* value = config.find("BT")) BT.insert(*value);
      if (const Value* value = config.find("SEG")) SEG.insert(*value);
    }
    return BT.size() <= 1 && SEG.size() <= 1;
  }

 private:
  const std::set<Config>& space_of(const std::string& id, std::size_t first, std::size_t last) {
    const auto [at, added] = spaces_.try_emplace({id, first});
    if (!added) return at->second;
    Template t = *find_template(id);
    t.redundant = nullptr;  // such configs are legal, only not worth measuring
    const auto covered = std::span(uses_).subspan(first, last - first);
    for (Config& config :
         space(t, step_constants(problem_, covered), target_.limits, precision_floor(problem_)))
      at->second.insert(std::move(config));
    return at->second;
  }

  Problem problem_;
  Target target_;
  std::vector<StageUse> uses_;
  std::map<std::pair<std::string, std::size_t>, std::set<Config>> spaces_;
};

Config without(const Config& config, std::string_view name) {
  Config rest;
  for (const auto& [each, value] : config.items())
    if (each != name) rest.set(each, value);
  return rest;
}

/// Small changes to plans, repeatable from the seed.
class Mutations {
 public:
  explicit Mutations(unsigned seed) : random_(seed) {}

  Plan of(Plan plan) {
    for (std::size_t n = 1 + below(3); n > 0; --n) {
      if (below(4) == 0) {
        set_everywhere(plan, below(2) == 0 ? "BT" : "SEG");
        continue;
      }
      PlanStep& step = plan[below(plan.size())];
      change(step.config, *find_template(step.template_id));
    }
    return plan;
  }

 private:
  std::size_t below(std::size_t bound) { return random_() % bound; }

  template <class T>
  const T& one_of(const std::vector<T>& all) {
    return all[below(all.size())];
  }

  Value any_value() {
    constexpr auto kLeast = std::numeric_limits<std::int64_t>::min();
    constexpr auto kMost = std::numeric_limits<std::int64_t>::max();
    static const std::vector<Value> all{0,
                                        -1,
                                        1,
                                        2,
                                        4,
                                        8,
                                        15,
                                        16,
                                        32,
                                        48,
                                        64,
                                        128,
                                        256,
                                        kLeast,
                                        kMost,
                                        true,
                                        false,
                                        DType::bf16,
                                        Precision::tf32,
                                        Precision::ieee};
    return one_of(all);
  }

  void set_everywhere(Plan& plan, std::string_view name) {
    const Value value = below(3) == 0 ? any_value() : Value{std::int64_t{16} << below(4)};
    for (PlanStep& step : plan)
      if (step.config.contains(name)) step.config.set(std::string(name), value);
  }

  void change(Config& config, const Template& t) {
    static const std::vector<std::string> others{"BT", "BK", "num_warps", "SEG", "bt", "K", ""};
    const std::size_t what = t.tunables.empty() ? 0 : below(8);
    if (what == 0) {
      config.set(one_of(others), any_value());
      return;
    }
    const Tunable& tunable = one_of(t.tunables);
    if (what == 1)
      config = without(config, tunable.name);
    else
      config.set(tunable.name, what == 2 ? any_value() : one_of(tunable.values));
  }

  std::mt19937 random_;
};

struct LegalityCase {
  const OperatorDefinition* op;
  Pass pass;
  bool cuda;
};

class PlanLegality : public ::testing::TestWithParam<LegalityCase> {};

TEST_P(PlanLegality, IsMembershipInTheSpaces) {
  const auto& [op, pass, cuda] = GetParam();
  const Target target = cuda ? cuda_target("sm_90a") : host_target();
  const Problem problem = problem_of(op->facts(), pass);
  Spaces spaces(problem, target);
  std::vector<Plan> all = enumerate_plans(problem, target, 64);
  ASSERT_FALSE(all.empty());
  // The most fused, the most staged, and what is split.
  const std::vector<Plan> plans{all.front(), all[all.size() / 2], all.back()};
  Mutations mutations(7);
  std::size_t legal = 0, illegal = 0;
  for (const Plan& plan : plans) {
    EXPECT_EQ(refusal(problem, plan, target), "") << plan_to_json(plan);
    for (int i = 0; i < 300; ++i) {
      const Plan mutant = mutations.of(plan);
      const std::string reason = refusal(problem, mutant, target);
      const bool expected = spaces.hold(mutant);
      ASSERT_EQ(reason.empty(), expected) << plan_to_json(mutant) << "\n" << reason;
      ++(expected ? legal : illegal);
    }
  }
  EXPECT_GT(legal, 20U);
  EXPECT_GT(illegal, 200U);
}

std::vector<LegalityCase> legality_cases() {
  std::vector<LegalityCase> all;
  for (const OperatorDefinition* op : operator_definitions())
    for (const Pass pass : {Pass::forward, Pass::backward, Pass::recurrent})
      for (const bool cuda : {false, true}) all.push_back({op, pass, cuda});
  return all;
}

INSTANTIATE_TEST_SUITE_P(, PlanLegality, ::testing::ValuesIn(legality_cases()),
                         [](const auto& each) {
                           return fmt::format("{}_{}_{}", each.param.op->facts().name,
                                              to_string(each.param.pass),
                                              each.param.cuda ? "cuda" : "cpu");
                         });

/// The message of the Error with which the CPU refuses a plan that one step of another was changed
/// in.
std::string refused_on_cpu(const Problem& problem, Plan plan, std::string_view id,
                           const std::string& tunable, Value value) {
  const auto step = std::ranges::find(plan, id, &PlanStep::template_id);
  if (step == plan.end()) return "the plan has no such step";
  step->config.set(tunable, value);
  try {
    (void)bind_operator(Device::open("cpu"), problem, plan);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kBadInput);
    return error.what();
  }
  return "accepted";
}

TEST(Plans, WithValuesThatNoTunableHasAreRefused) {
  const Problem p = problem_of(definition_of(Problem{}).facts(), Pass::forward);
  const Target target = host_target();
  const Plan plan = default_plan(p, target);
  const auto expect = [&](std::string_view id, const std::string& tunable, Value value,
                          std::string_view words) {
    const std::string message = refused_on_cpu(p, plan, id, tunable, value);
    EXPECT_NE(message.find(words), std::string::npos) << message;
    EXPECT_NE(message.find(id), std::string::npos) << message;
    EXPECT_NE(message.find("step "), std::string::npos) << message;
  };
  // These ran with wrong results, divided by zero, or never ended.
  expect("fwd_h.cpu", "BV", -1, "BV is -1; it must be one of 128, 64, 32");
  expect("fwd_h.cpu", "BV", 0, "BV is 0;");
  expect("kkt_solve_wu.cpu", "BV", 0, "BV is 0;");
  expect("kkt_solve_wu.cpu", "BT", 0, "BT is 0;");
  expect("kkt_solve_wu.cpu", "BT", true, "BT is true;");
  expect("kkt_solve_wu.cpu", "num_warps", 4, "'num_warps' is not one of the template's tunables");
}

TEST(Plans, MustHaveTheChunkSizeOfTheProblemsTensors) {
  const Target target = host_target();
  Problem p = problem_of(definition_of(Problem{}).facts(), Pass::forward);
  const auto refused = [&](std::int64_t BT) {
    return refusal(p, enumerate_plans(p, target, BT).front(), target);
  };
  EXPECT_EQ(refused(32), "");
  // Tinv and h of 64 rows a chunk have other shapes than those of 32.
  p.disable_recompute = true;
  EXPECT_EQ(refused(64), "");
  EXPECT_NE(refused(32).find("BT is 32; it must be 64"), std::string::npos) << refused(32);
  p.chunk_size = 32;
  EXPECT_EQ(refused(32), "");
}

TEST(Plans, BelowTheProblemsPrecisionAreRefused) {
  const Target target = cuda_target("sm_90a");
  Problem p = problem_of(definition_of(Problem{}).facts(), Pass::forward);
  p.dtype = p.beta_dtype = DType::fp32;
  Plan plan = default_plan(p, target);
  EXPECT_EQ(refusal(p, plan, target), "");
  for (PlanStep& step : plan)
    if (step.config.contains("precision")) step.config.set("precision", Precision::tf32);
  EXPECT_NE(refusal(p, plan, target).find("precision is tf32; it must be at least tf32x3"),
            std::string::npos);
  p.precision = Precision::tf32;
  EXPECT_EQ(refusal(p, plan, target), "");
}

}  // namespace
}  // namespace wyvern
