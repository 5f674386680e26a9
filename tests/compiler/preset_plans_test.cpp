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

/// The kernels of the default plans, each once, by code_key().
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
          kernels.try_emplace(code_key(request), request);
        }
      }
  return kernels;
}

class PresetPlans : public ::testing::TestWithParam<std::string> {};

/// Every call has a plan, and its kernels compile; in the short suite some of them.
TEST_P(PresetPlans, Compile) {
  const std::string problem = compiler_problem(DeviceKind::cuda);
  if (!problem.empty()) GTEST_SKIP() << problem;
  constexpr std::size_t kInShort = 4;
  const auto kernels = kernels_of(cuda_target(GetParam()));
  ASSERT_GT(kernels.size(), kInShort);
  const std::size_t step = testing::full_suite() ? 1 : kernels.size() / kInShort;
  std::map<std::string, int> spilling;  // kernels, by template
  std::size_t index = 0;
  for (const auto& [key, request] : kernels) {
    if (index++ % step != 0) continue;
    SCOPED_TRACE(fmt::format("{} {}", request.source_template->id(), request.config.to_string()));
    const Emitted emitted = emit(request, Emit::ptx);
    EXPECT_GT(emitted.resources.code_bytes, 0);
    if (emitted.resources.spill_bytes > 0) ++spilling[request.source_template->id()];
  }
  fmt::print("{}: {} kernels, {} compiled\n", GetParam(), kernels.size(),
             (index + step - 1) / step);
  for (const auto& [id, count] : spilling) fmt::print("{} of {} spill registers\n", count, id);
}

INSTANTIATE_TEST_SUITE_P(, PresetPlans,
                         ::testing::Values("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a",
                                           "sm_120a"),
                         [](const auto& id) { return id.param; });

}  // namespace
}  // namespace wyvern
