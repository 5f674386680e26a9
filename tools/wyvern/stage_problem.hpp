// The default problem, for whose constants a template is shown and compiled.
#pragma once

#include <wyvern/problem.hpp>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "compiler/compiler.hpp"
#include "runtime/operators/operator.hpp"
#include "runtime/plan.hpp"
#include "templates/template.hpp"

namespace wyvern::cli {

/// bf16, H=16, HV=32, K=V=128, T=2048, with initial and final state; every option set that adds a
/// stage. Pass by pass and operator by operator, Problem's own operator first; summaries come last.
inline std::vector<Problem> stage_problems() {
  std::vector<std::string> names{Problem{}.op};
  for (const std::string_view op : operators())
    if (op != names.front()) names.emplace_back(op);
  // Not every template has gates in beta's place.
  std::stable_partition(names.begin(), names.end(),
                        [](const std::string& op) { return find_operator(op)->facts().beta; });
  const auto sized = [](const std::string& op, Pass pass) {
    Problem p;
    p.op = op;
    p.pass = pass;
    p.T = 2048;
    p.H = 16;
    p.HV = 32;
    return p;
  };
  std::vector<Problem> problems;
  for (const Pass pass : {Pass::forward, Pass::backward, Pass::recurrent})
    for (const std::string& op : names)
      for (const bool everything : {false, true}) {
        Problem p = sized(op, pass);
        p.initial_state = p.output_final_state = true;
        p.packed = p.use_qk_l2norm = everything;
        if (everything && definition_of(p).facts().householder) p.num_householder = 2;
        p.use_gate_in_kernel = p.has_dt_bias = everything && gate_kind(p) != GateKind::none;
        p.return_intermediate_states = p.state_v_first = everything && pass == Pass::forward;
        if (everything) p.short_conv = 4;
        problems.push_back(p);
      }
  for (const Pass pass : {Pass::forward, Pass::backward})
    for (const std::string& op : names) {
      Problem p = sized(op, pass);
      p.summary = true;
      p.transition = p.initial_state = pass == Pass::forward;
      p.output_final_state = pass == Pass::backward;
      problems.push_back(p);
    }
  return problems;
}

/// Whether the problem's pass has all stages of the template, and the tensors it has maps of.
inline bool has_stages(const Problem& problem, const Template& t) {
  const std::vector<StageUse> uses = stage_uses(problem);
  const Constants constants = problem_constants(problem);
  if (!std::ranges::all_of(t.tensor_maps,
                           [&](const TensorMapUse& map) { return map.when.holds(constants); }))
    return false;
  return std::all_of(t.covers.begin(), t.covers.end(), [&](const Cover& cover) {
    return std::any_of(uses.begin(), uses.end(),
                       [&](const StageUse& use) { return use.stage == cover.stage; });
  });
}

/// The first of them whose pass has all stages of the template, without the options that these
/// stages do not need, and without grouped heads where the template has none; the first of all for
/// a stage that no pass uses.
inline Problem stage_problem(const Template& t) {
  const std::vector<Problem> problems = stage_problems();
  const auto found = std::find_if(problems.begin(), problems.end(),
                                  [&](const Problem& problem) { return has_stages(problem, t); });
  if (found == problems.end()) return problems.front();
  Problem chosen = *found;
  const auto drop = [&](auto Problem::* option, auto Problem::* with) {
    Problem without = chosen;
    without.*option = {}, without.*with = {};
    if (has_stages(without, t)) chosen = without;
  };
  drop(&Problem::use_gate_in_kernel, &Problem::has_dt_bias);
  drop(&Problem::packed, &Problem::packed);
  drop(&Problem::return_intermediate_states, &Problem::state_v_first);
  drop(&Problem::short_conv, &Problem::conv_activation);
  chosen.use_qk_l2norm = false;
  const Limits limits = usual_target(t.device).limits;
  // Some have no grouped heads.
  if (space(t, problem_constants(chosen), limits).empty()) chosen.HV = chosen.H;
  return chosen;
}

}  // namespace wyvern::cli
