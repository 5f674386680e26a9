// The stages of gated_delta_product: those of the gated delta rule over steps.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "runtime/operators/operator.hpp"

namespace wyvern {
namespace {

Problem problem(Pass pass, std::int64_t steps) {
  Problem p;
  p.op = "gated_delta_product", p.pass = pass, p.num_householder = steps;
  p.T = 100, p.H = 2, p.HV = 4;
  p.packed = p.initial_state = p.output_final_state = p.use_qk_l2norm = true;
  p.use_gate_in_kernel = p.has_dt_bias = true;
  return p;
}

std::vector<std::string> names(const Problem& p) {
  std::vector<std::string> found;
  for (const StageUse& use : stage_uses(p)) found.push_back(std::string(use.stage->name));
  return found;
}

/// One step a token is the gated delta rule: nothing is moved.
TEST(GatedDeltaProduct, OneStepTakesTheStagesOfTheGatedDeltaRule) {
  for (const Pass pass : {Pass::forward, Pass::backward, Pass::recurrent}) {
    const Problem p = problem(pass, 1);
    Problem rule = p;
    rule.op = "gated_delta_rule";
    EXPECT_EQ(names(p), names(rule));
    for (const StageUse& use : stage_uses(p)) EXPECT_EQ(use.rows, Rows::tokens);
  }
}

/// Several add stages that move rows and leave the others as they are, over steps.
TEST(GatedDeltaProduct, SeveralStepsTakeThemOverSteps) {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    std::vector<std::string> wanted = names(problem(pass, 1)), found;
    for (const StageUse& use : stage_uses(problem(pass, 2))) {
      const bool of_tokens = use.stage->name == "step_seqlens" ||
                             use.stage->name == "expand_steps" ||
                             use.stage->name == "compress_steps";
      if (!of_tokens) found.push_back(std::string(use.stage->name));
      if (of_tokens || use.stage->name.starts_with("gate")) {
        EXPECT_EQ(use.rows, Rows::tokens) << use.stage->name;
      }
      if (use.stage->name == "fwd_h" || use.stage->name == "scaled_dot_kkt") {
        EXPECT_EQ(use.rows, Rows::steps) << use.stage->name;
      }
    }
    // Only a pass of one step has the optional groups in front.
    const std::vector<const char*> groups =
        pass == Pass::forward
            ? std::vector<const char*>{"delta_segment", "fwd_h_combine", "delta_resume"}
            : std::vector<const char*>{"delta_scans_segment", "fwd_h_combine", "bwd_dhu_combine",
                                       "delta_scans_resume",  "delta_scans",   "delta_gradient"};
    for (const char* const name : groups) wanted.erase(std::ranges::find(wanted, name));
    // The raw gate's gradient takes tables of tokens' chunks.
    if (pass == Pass::backward) wanted.emplace_back("chunk_index");
    std::ranges::sort(wanted), std::ranges::sort(found);
    EXPECT_EQ(found, wanted);
  }
}

/// Without g there is no stage of the gate, and nothing of it is moved.
TEST(GatedDeltaProduct, WithoutGateNothingDecays) {
  Problem p = problem(Pass::backward, 2);
  p.use_gate_in_kernel = p.has_dt_bias = p.has_g = false;
  for (const StageUse& use : stage_uses(p)) {
    EXPECT_EQ(use.stage->name.find("cumsum"), std::string::npos);
    const auto moved = use.rename.find("x");
    EXPECT_TRUE(moved == use.rename.end() || moved->second != "g") << use.stage->name;
  }
}

}  // namespace
}  // namespace wyvern
