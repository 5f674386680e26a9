// The default plans of all presets' calls on GPUs that nobody here has run, compiled without one.

#include <gtest/gtest.h>
#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "compiler/compiler.hpp"
#include "runtime/operators/preset_calls.hpp"
#include "runtime/plan.hpp"
#include "tests/support/full_suite.hpp"

namespace wyvern {
namespace {

/// A call of a preset, with as many tokens as a training step or a prefill has.
Problem problem_of(const PresetCall& call) {
  Problem p = call.problem;
  if (p.T == 0) p.T = p.pass == Pass::recurrent ? 1 : 8192;
  if (call.finish != nullptr) call.finish(p);
  return p;
}

/// The kernels of the default plans, each once, by what it is made of.
std::map<std::string, CompileRequest> kernels_of(const Target& target) {
  std::map<std::string, CompileRequest> kernels;
  for (const Preset& preset : presets())
    for (const DType dtype : {DType::bf16, DType::fp16})
      for (const PresetCall& call : preset_calls(preset.name, dtype)) {
        const Problem p = problem_of(call);
        const Plan plan = default_plan(p, target);
        const CheckedPlan checked = check_plan(p, stage_uses(p), plan, target, true);
        for (std::size_t i = 0; i < plan.size(); ++i) {
          const CompileRequest request{find_template(plan[i].template_id), checked.constants[i],
                                       plan[i].config, target};
          kernels.try_emplace(
              fmt::format("{} {} {}", plan[i].template_id, request.config.to_string(),
                          request.constants.values().to_string()),
              request);
        }
      }
  return kernels;
}

class PresetPlans : public ::testing::TestWithParam<std::string> {};

/// Every call has a plan, and every kernel of it compiles to code that a multiprocessor can run.
TEST_P(PresetPlans, Compile) {
  const std::string problem = compiler_problem(DeviceKind::cuda);
  if (!problem.empty()) GTEST_SKIP() << problem;
  const Target target = cuda_target(GetParam());
  int spilling = 0;
  int compiled = 0;
  std::uint64_t index = 0;
  const auto kernels = kernels_of(target);
  for (const auto& [name, request] : kernels) {
    if (!testing::full_suite() && index++ % 32 != 0) continue;
    SCOPED_TRACE(name);
    const Emitted emitted = emit(request, Emit::ptx);
    ++compiled;
    if (emitted.resources.spill_bytes > 0) {
      ++spilling;
      fmt::print("{}: {} bytes spilled\n", name, emitted.resources.spill_bytes);
    }
    EXPECT_GT(emitted.resources.code_bytes, 0);
  }
  fmt::print("{}: {} kernels of default plans, {} compiled, {} spill\n", GetParam(), kernels.size(),
             compiled, spilling);
}

INSTANTIATE_TEST_SUITE_P(, PresetPlans,
                         ::testing::Values("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a",
                                           "sm_120a"),
                         [](const auto& id) { return id.param; });

}  // namespace
}  // namespace wyvern
