// The whole forward passes for every state that a problem may give and ask for, compiled for
// sm_90a. Where few registers are left a kernel spills, or ptxas serializes its products: a
// compilation error.

#include <gtest/gtest.h>
#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <vector>

#include "compiler/compiler.hpp"
#include "runtime/plan.hpp"
#include "tests/support/full_suite.hpp"

namespace wyvern {
namespace {

struct Size {
  std::int64_t K, BV;
};

enum class States { slots_or_fresh, slots, initial };

/// A problem of these states. Checkpoints (none, every 256 tokens, by offsets) and other options
/// (few or many) follow from `turn`.
Problem problem_of(const Size& size, DType dtype, DType state, States states, std::uint64_t turn) {
  Problem p;
  p.H = 1, p.HV = 3, p.K = size.K, p.V = 128;
  p.dtype = p.beta_dtype = p.g_dtype = dtype;
  p.state_dtype = state;
  p.inplace_state = p.state_index = states != States::initial;
  p.has_initial_state = states == States::slots_or_fresh;
  p.initial_state = p.output_final_state = states == States::initial;
  const std::uint64_t checkpoints = (turn + turn / 3 + turn / 9) % 3;
  if (checkpoints == 1) p.checkpoint_every = 256;
  p.checkpoint_offsets = checkpoints == 2;
  p.packed = p.use_qk_l2norm = p.use_beta_sigmoid = p.state_v_first = turn % 2 != 0;
  p.use_gate_in_kernel = p.has_A_log = p.has_dt_bias = turn % 2 != 0;
  return p;
}

void expect_few_spills(std::string_view id, std::int64_t BV, const Problem& p) {
  const Template& t = *find_template(id);
  const Target target = cuda_target("sm_90a");
  const Constants constants = problem_constants(p);
  const std::vector<Config> configs = space(t, constants, target.limits);
  const auto config =
      std::ranges::find_if(configs, [BV](const Config& each) { return each.integer("BV") == BV; });
  if (config == configs.end()) return;
  SCOPED_TRACE(fmt::format("{} {} {} {} {}", id, config->to_string(), to_string(p.dtype),
                           to_string(p.state_dtype), constants.values().to_string()));
  try {
    const Artifact artifact = compile({&t, constants, *config, target});
    EXPECT_LE(artifact.resources.spill_bytes, p.K == 256 ? 120 : 64);
  } catch (const Error& error) {
    FAIL() << error.what();
  }
}

TEST(PoolKernels, CompileForEveryStateAndDtype) {
  if (const std::string missing = compiler_problem(DeviceKind::cuda); !missing.empty())
    GTEST_SKIP() << missing;
  std::uint64_t point = 0;
  for (const Size size : {Size{256, 64}, {64, 64}, {64, 128}, {128, 64}, {128, 128}})
    for (const DType dtype : {DType::bf16, DType::fp16})
      for (const DType state : {DType::fp32, DType::bf16, DType::fp16})
        for (const States states : {States::slots_or_fresh, States::slots, States::initial})
          for (const char* const id : {"delta_forward.hopper", "delta_resume.hopper",
                                       "kda_forward.hopper", "kda_fwd_h_o.hopper"}) {
            // 13 has no factor of these sweeps, so that the short suite meets every value.
            const std::uint64_t turn = point++ / 4;
            if (!testing::full_suite() && (point - 1) % 13 != 0) continue;
            Problem p = problem_of(size, dtype, state, states, turn);
            p.op = std::string_view(id).starts_with("kda") ? "kda" : "gated_delta_rule";
            expect_few_spills(id, size.BV, p);
          }
}

}  // namespace
}  // namespace wyvern
