// The problem whose constants a template is shown and compiled for when nobody names another.
#pragma once

#include <wyvern/problem.hpp>

#include "templates/template.hpp"

namespace wyvern::cli {

/// gated_delta_rule, bf16, H=16, HV=32, K=V=128, T=2048, with initial and final state.
inline Problem stage_problem(const Template& t) {
  Problem problem;
  problem.T = 2048;
  problem.H = 16;
  problem.HV = 32;
  problem.initial_state = problem.output_final_state = true;
  problem.use_gate_in_kernel = problem.has_dt_bias = t.covers("gate");
  problem.packed = t.covers("chunk_index");  // which only packed batches have
  return problem;
}

}  // namespace wyvern::cli
