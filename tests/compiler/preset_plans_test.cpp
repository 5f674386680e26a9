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

/// The kernels of default plans, each once, by code_key().
class Kernels {
 public:
  explicit Kernels(Target target) : target_(std::move(target)) {}

  /// Of all presets' calls with their heads shared out over so many devices, in the presets whose
  /// heads stay whole, and with so many tokens where a call does not say how many.
  void add_presets(DType dtype, std::int64_t split, std::int64_t tokens) {
    for (const Preset& preset : presets()) {
      if (preset.H % split != 0 || preset.HV % split != 0) continue;
      for (const PresetCall& call : preset_calls(preset.name, dtype)) {
        Problem p = call.problem;
        p.H /= split, p.HV /= split;
        if (p.T == 0) p.T = p.pass == Pass::recurrent ? 1 : tokens;
        if (call.finish != nullptr) call.finish(p);
        add(p);
      }
    }
  }

  const std::map<std::string, CompileRequest>& by_key() const { return by_key_; }

 private:
  void add(const Problem& p) {
    const Plan plan = default_plan(p, target_);
    const CheckedPlan checked = check_plan(p, stage_uses(p), plan, target_, true);
    for (std::size_t i = 0; i < plan.size(); ++i) {
      const CompileRequest request{find_template(plan[i].template_id), checked.constants[i],
                                   plan[i].config, target_};
      by_key_.try_emplace(code_key(request), request);
    }
  }

  Target target_;
  std::map<std::string, CompileRequest> by_key_;
};

class PresetPlans : public ::testing::TestWithParam<std::string> {};

/// Bytes that a kernel of a template spills at most, on any of the architectures.
std::int64_t known_spill(const std::string& id) {
  static const std::map<std::string, std::int64_t>& known =
      *new std::map<std::string, std::int64_t>{
          {"bwd_dhu_combine.portable", 112}, {"bwd_dhu_resume.portable", 128},
          {"bwd_dhu_segment.portable", 32},  {"bwd_dv_local.portable", 32},
          {"delta_forward.hopper", 212},     {"delta_gradient.hopper", 16},
          {"delta_resume.hopper", 120},      {"delta_scans.hopper", 72},
          {"delta_scans_resume.hopper", 56}, {"delta_scans_segment.hopper", 104},
          {"delta_segment.hopper", 24},      {"fwd_h.portable", 104},
          {"fwd_h_combine.portable", 64},    {"fwd_h_resume.portable", 276},
          {"fwd_h_segment.portable", 24},    {"fwd_o.portable", 92},
          {"kda_bwd_dv_local.portable", 16}, {"kda_bwd_prepare.hopper", 272},
          {"kda_forward.hopper", 8},         {"kda_intra_solve_wu.portable", 16},
          {"kda_prepare.hopper", 360},       {"kda_wy_dqkg.portable", 44},
          {"short_conv.portable", 44},       {"wy_dqkg.portable", 16}};
  const auto found = known.find(id);
  return found == known.end() ? 0 : found->second;
}

/// Every call has a plan, by the rates of the architecture's usual GPU, and its kernels compile and
/// spill no more than is known; in the short suite some of them.
TEST_P(PresetPlans, Compile) {
  const std::string problem = compiler_problem(DeviceKind::cuda);
  if (!problem.empty()) GTEST_SKIP() << problem;
  constexpr std::size_t kInShort = 4;
  Kernels all(on_usual_gpu(cuda_target(GetParam())));
  for (const DType dtype : {DType::bf16, DType::fp16}) all.add_presets(dtype, 1, 8192);
  const auto& kernels = all.by_key();
  ASSERT_GT(kernels.size(), kInShort);
  const std::size_t step = testing::full_suite() ? 1 : kernels.size() / kInShort;
  std::map<std::string, int> spilling;  // kernels, by template
  std::size_t index = 0;
  for (const auto& [key, request] : kernels) {
    if (index++ % step != 0) continue;
    SCOPED_TRACE(fmt::format("{} {}", request.source_template->id(), request.config.to_string()));
    const Emitted emitted = emit(request, Emit::ptx);
    EXPECT_GT(emitted.resources.code_bytes, 0);
    const std::int64_t spilled = emitted.resources.spill_bytes;
    EXPECT_LE(spilled, known_spill(request.source_template->id()));
    if (spilled > 0) ++spilling[request.source_template->id()];
  }
  fmt::print("{}: {} kernels, {} compiled\n", GetParam(), kernels.size(),
             (index + step - 1) / step);
  for (const auto& [id, count] : spilling) fmt::print("{} of {} spill registers\n", count, id);
}

INSTANTIATE_TEST_SUITE_P(, PresetPlans,
                         ::testing::Values("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a",
                                           "sm_120a"),
                         [](const auto& id) { return id.param; });

/// A sentence for each template: how many kernels it has, and the constants that its kernels of
/// equal configs differ in.
std::string differing_constants(const Kernels& kernels) {
  std::map<std::string, std::map<std::string, std::vector<const Constants*>>> groups;
  for (const auto& [key, request] : kernels.by_key())
    groups[request.source_template->id()][request.config.to_string()].push_back(&request.constants);
  std::string text;
  for (const auto& [id, by_config] : groups) {
    std::size_t count = 0;
    std::string names;
    for (const auto& [config, each] : by_config) count += each.size();
    for (const AnyConstant& constant : find_template(id)->constants)
      if (std::ranges::any_of(by_config, [&](const auto& group) {
            return std::ranges::any_of(group.second, [&](const Constants* c) {
              return value_of(constant, *c) != value_of(constant, *group.second.front());
            });
          }))
        names += fmt::format(" {}", name_of(constant));
    text += fmt::format("{} has {} kernels, which differ in:{}\n", id, count, names);
  }
  return text;
}

/// All that a model needs on an H200, whatever the model, the devices that share its heads and what
/// is served, operators or layers: a constant that only multiplies compiles shows here.
TEST(PresetKernels, AreFew) {
  Kernels kernels(on_usual_gpu(cuda_target("sm_90a")));
  for (const std::int64_t split : {1, 2, 4, 8})
    for (const std::int64_t tokens : {16, 512, 1024, 2048, 4096, 8192, 16384, 32768})
      kernels.add_presets(DType::bf16, split, tokens);
  const std::string differing = differing_constants(kernels);
  fmt::print("{} kernels\n{}", kernels.by_key().size(), differing);
  EXPECT_LE(kernels.by_key().size(), 520U) << differing;
}

}  // namespace
}  // namespace wyvern
