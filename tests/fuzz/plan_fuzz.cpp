// Any text as a plan's JSON: no plan, or one that is written and read back the same and that every
// problem takes only if each value of its configs is one of its template's.
#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "runtime/operators/operator.hpp"
#include "runtime/plan.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace wyvern::fuzz {
namespace {

struct Asked {
  Problem problem;
  std::vector<StageUse> uses;
};

/// Every operator and pass, plain and with the options that add stages.
std::vector<Asked> all_problems() {
  std::vector<Asked> all;
  for (const std::string_view op : operators())
    for (const Pass pass : {Pass::forward, Pass::backward, Pass::recurrent})
      for (const bool everything : {false, true}) {
        Problem p;
        p.op = op;
        p.pass = pass;
        p.T = 300;
        p.H = p.HV = 2;
        p.K = p.V = 64;
        p.initial_state = p.output_final_state = p.use_qk_l2norm = everything;
        p.use_gate_in_kernel = p.has_dt_bias = everything && gate_kind(p) != GateKind::none;
        validate(p);
        all.push_back({p, stage_uses(p)});
      }
  return all;
}

void check_values(const PlanStep& step) {
  const Template* const t = find_template(step.template_id);
  require(t != nullptr && t->tunables.size() == step.config.items().size(),
          "a legal config has the tunables of its template");
  for (const Tunable& tunable : t->tunables) {
    const Value* const value = step.config.find(tunable.name);
    require(value != nullptr && std::ranges::find(tunable.values, *value) != tunable.values.end(),
            "a legal value is one of its tunable's");
  }
}

void check_legality(const Plan& plan) {
  static const std::vector<Asked> problems = all_problems();
  static const std::array targets{usual_target(DeviceKind::cpu), usual_target(DeviceKind::cuda)};
  for (const Target& target : targets)
    for (const Asked& asked : problems)
      if (accepts([&] { (void)check_plan(asked.problem, asked.uses, plan, target); }))
        std::ranges::for_each(plan, check_values);
}

}  // namespace
}  // namespace wyvern::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace wyvern;
  const auto plan = plan_from_json(fuzz::text_of(data, size));
  if (!plan) return 0;
  const std::string text = plan_to_json(*plan);
  const auto again = plan_from_json(text);
  fuzz::require(again && *again == *plan, "a plan is read as it was written");
  fuzz::require(plan_to_json(*again) == text, "a plan has one text");
  fuzz::check_legality(*plan);
  return 0;
}
