// The problem whose constants a template is shown and compiled for when nobody names another.
#pragma once

#include <wyvern/problem.hpp>

#include <algorithm>
#include <string>
#include <vector>

#include "runtime/plan.hpp"
#include "templates/template.hpp"

namespace wyvern::cli {

/// bf16, H=16, HV=32, K=V=128, T=2048, with initial and final state; every option set that brings a
/// stage of its own. Pass by pass and operator by operator, the gated delta rule first.
inline std::vector<Problem> stage_problems() {
  std::vector<Problem> problems;
  for (const Pass pass : {Pass::forward, Pass::backward, Pass::recurrent})
    for (const char* op : {"gated_delta_rule", "kda", "delta_rule"})
      for (const bool everything : {false, true}) {
        Problem p;
        p.op = op;
        p.pass = pass;
        p.T = 2048;
        p.H = 16;
        p.HV = 32;
        p.initial_state = p.output_final_state = true;
        p.packed = p.use_qk_l2norm = everything;
        p.use_gate_in_kernel = p.has_dt_bias = everything && gate_kind(p) != GateKind::none;
        p.return_intermediate_states = p.state_v_first = everything && pass == Pass::forward;
        problems.push_back(p);
      }
  return problems;
}

/// The first of them whose pass has all stages of the template, without the options that these
/// stages do not need; the first of all for a stage that no pass uses.
inline Problem stage_problem(const Template& t) {
  const std::vector<Problem> problems = stage_problems();
  for (const Problem& problem : problems) {
    const std::vector<StageUse> uses = stage_uses(problem);
    const auto used = [&](const Cover& cover) {
      return std::any_of(uses.begin(), uses.end(),
                         [&](const StageUse& use) { return use.stage == cover.stage->name; });
    };
    if (!std::all_of(t.covers.begin(), t.covers.end(), used)) continue;
    Problem chosen = problem;
    const bool gate = t.carries_out("gate") || t.carries_out("kda_gate") || t.carries_out("gate_bwd") ||
                      t.carries_out("kda_gate_bwd") || t.carries_out("gate_param_sum");
    chosen.use_gate_in_kernel = chosen.has_dt_bias = gate;
    chosen.packed = t.carries_out("chunk_index");
    chosen.use_qk_l2norm = false;
    chosen.return_intermediate_states = chosen.state_v_first = t.carries_out("transpose_states");
    return chosen;
  }
  return problems.front();
}

}  // namespace wyvern::cli
