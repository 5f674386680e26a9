#include "runtime/plan.hpp"

#include <gtest/gtest.h>
#include <wyvern/error.hpp>

#include <algorithm>
#include <set>

#include "runtime/bind.hpp"
#include "templates/intra/stages.hpp"

namespace wyvern {
namespace {

Problem gated(bool packed = false) {
  Problem p;
  p.T = 300;
  p.H = 2;
  p.HV = 4;
  p.K = p.V = 64;
  p.packed = packed;
  p.N = packed ? 3 : 1;
  p.initial_state = p.output_final_state = true;
  return p;
}

std::vector<std::string> names(const Plan& plan) {
  std::vector<std::string> result;
  for (const PlanStep& step : plan) result.push_back(find_template(step.template_id)->name);
  return result;
}

TEST(Plans, CoverTheStagesStagedAndFused) {
  const std::vector<Plan> found = enumerate_plans(gated(), cuda_target("sm_90a"), 64);
  std::set<std::vector<std::string>> kinds;
  for (const Plan& plan : found) kinds.insert(names(plan));
  EXPECT_TRUE(kinds.contains(
      {"chunk_local_cumsum", "scaled_dot_kkt", "solve_tril", "recompute_w_u", "fwd_h", "fwd_o"}));
  EXPECT_TRUE(kinds.contains({"chunk_local_cumsum", "kkt_solve_wu", "fwd_h", "fwd_o"}));
  for (std::size_t i = 1; i < found.size(); ++i) EXPECT_LE(found[i - 1].size(), found[i].size());
  for (const Plan& plan : found) EXPECT_EQ(shape_of(plan).BT, 64);
}

TEST(Plans, KnowTwoTemplatesForOneStage) {
  const std::vector<StageUse> uses = stage_uses(gated());
  const auto kkt =
      std::ranges::find(uses, &stages::scaled_dot_kkt, &StageUse::stage) - uses.begin();
  const std::vector<Covering> found = covers(uses, static_cast<std::size_t>(kkt), DeviceKind::cuda);
  std::vector<std::string> alone;
  for (const Covering& c : found)
    if (c.count == 1) alone.push_back(c.source_template->id());
  EXPECT_EQ(alone, (std::vector<std::string>{"scaled_dot_kkt.hopper", "scaled_dot_kkt.portable"}));
  // A search for the best plan sees both, where the target has what the second needs.
  const auto plans_with = [&](const char* arch, std::string_view id) {
    std::vector<Plan> plans = enumerate_plans(gated(), cuda_target(arch), 64);
    return std::ranges::count_if(plans, [&](const Plan& plan) {
      return std::ranges::count(plan, id, &PlanStep::template_id) != 0;
    });
  };
  EXPECT_GT(plans_with("sm_90a", "scaled_dot_kkt.hopper"), 0);
  EXPECT_EQ(plans_with("sm_90a", "scaled_dot_kkt.hopper"),
            plans_with("sm_90a", "scaled_dot_kkt.portable"));
  EXPECT_EQ(plans_with("sm_90", "scaled_dot_kkt.hopper"), 0);
  EXPECT_EQ(plans_with("sm_100a", "scaled_dot_kkt.hopper"), 0);
}

TEST(Plans, TemplatesPassOverOptionalGroupsBeforeAndBetweenTheirStages) {
  const auto use = [](const StageDefinition& stage, std::size_t group = 0) {
    return StageUse{.stage = &stage, .rename = {}, .constants = {}, .optional_group = group};
  };
  const std::vector<StageUse> uses{use(stages::kda_intra, 1), use(stages::scaled_dot_kkt),
                                   use(stages::kda_intra, 2), use(stages::solve_tril),
                                   use(stages::solve_tril),   use(stages::recompute_w_u)};
  Template t;
  t.covers = {stages::scaled_dot_kkt, stages::solve_tril, stages::recompute_w_u};
  const auto whole = coverage(t, uses, 0);
  ASSERT_TRUE(whole);
  EXPECT_EQ(whole->count, 6U);
  EXPECT_EQ(whole->use_of, (std::vector<std::size_t>{1, 4, 5}));
  // A group behind the last covered stage is for the next step to cover or pass over.
  t.covers = {stages::scaled_dot_kkt};
  EXPECT_EQ(coverage(t, uses, 0)->count, 2U);
  t.covers = {stages::scaled_dot_kkt, stages::recompute_w_u};
  EXPECT_FALSE(coverage(t, uses, 0));
}

TEST(Plans, OptionsAddTheirStages) {
  Problem p = gated(true);
  p.use_qk_l2norm = p.use_gate_in_kernel = true;
  const Plan plan = enumerate_plans(p, host_target(), 32).back();
  EXPECT_EQ(names(plan), (std::vector<std::string>{"chunk_index", "l2norm_rstd", "l2norm_rstd",
                                                   "gate", "chunk_local_cumsum", "scaled_dot_kkt",
                                                   "solve_tril", "recompute_w_u", "fwd_h_segment",
                                                   "fwd_h_combine", "fwd_h_resume", "fwd_o"}));
}

/// Every forward plan is that of the problem without the norm, and a last step that alone writes
/// the caller's o.
TEST(Plans, NormalizeOBehindTheForwardPass) {
  Problem plain = gated(true);
  plain.inplace_state = plain.return_intermediate_states = plain.state_v_first = true;
  plain.output_final_state = false;
  Problem p = plain;
  p.output_norm = Activation::silu;
  for (const std::string_view op : operators()) {
    plain.op = p.op = op;
    plain.num_householder = p.num_householder = op == "gated_delta_product" ? 2 : 1;
    std::vector<Plan> wanted = enumerate_plans(plain, host_target(), 64);
    const std::vector<Plan> plans = enumerate_plans(p, host_target(), 64);
    ASSERT_EQ(plans.size(), wanted.size());
    for (std::size_t i = 0; i < plans.size(); ++i) {
      EXPECT_EQ(plans[i].back().template_id, "output_norm.cpu");
      wanted[i].push_back(plans[i].back());
      EXPECT_EQ(plans[i], wanted[i]);
    }
    const auto bound = bind_operator(Device::open("cpu"), p, plans.back());
    for (const BoundStep& step : bound->steps)
      for (std::size_t i = 0; i < step.argument_count; ++i)
        if (step.source_template->parameters[i].name == "o") {
          const bool last = &step == &bound->steps.back();
          const auto wanted_from = last ? Binding::From::caller : Binding::From::workspace;
          EXPECT_EQ(step.bindings[i].from, wanted_from);
        }
  }
}

/// Every plan but those of `fused` is that of the problem as q, k and v are given, behind a first
/// step that alone reads them.
void expect_convolved_in_front(Problem plain, std::string_view convolution,
                               std::string_view fused = {}) {
  const auto is_fused = [&](const Plan& plan) { return plan.front().template_id == fused; };
  const auto expect_behind = [&](const Plan& plan, Plan wanted) {
    ASSERT_FALSE(plan.empty());
    EXPECT_EQ(find_template(plan.front().template_id)->name, convolution);
    wanted.insert(wanted.begin(), plan.front());
    EXPECT_EQ(plan, wanted);
  };
  for (const std::string_view op : operators()) {
    plain.op = op;
    plain.num_householder = op == "gated_delta_product" ? 2 : 1;
    Problem p = plain;
    p.short_conv = 4;
    p.inplace_conv_state = p.inplace_state;
    p.initial_conv_state = p.output_conv_state = !p.inplace_state;
    for (const Target& target : {host_target(), cuda_target("sm_80"), cuda_target("sm_90a")}) {
      if (const Plan plan = default_plan(p, target); !is_fused(plan))
        expect_behind(plan, default_plan(plain, target));
      const std::vector<Plan> wanted = enumerate_plans(plain, target, 64);
      std::vector<Plan> plans = enumerate_plans(p, target, 64);
      const bool can_fuse = !fused.empty() && target.limits.tensor_copies;
      EXPECT_EQ(std::erase_if(plans, is_fused) > 0, can_fuse);
      ASSERT_EQ(plans.size(), wanted.size());
      for (std::size_t i = 0; i < plans.size(); ++i) expect_behind(plans[i], wanted[i]);
    }
    const auto bound =
        bind_operator(Device::open("cpu"), p, enumerate_plans(p, host_target(), 64).back());
    for (const BoundStep& step : bound->steps)
      for (std::size_t i = 0; i < step.argument_count; ++i) {
        const std::string_view name = step.source_template->parameters[i].name;
        if (name != "q" && name != "k" && name != "v") continue;
        const bool first = &step == &bound->steps.front();
        EXPECT_EQ(step.bindings[i].from == Binding::From::caller, first);
      }
  }
}

TEST(Plans, ConvolveInFrontOfTheForwardPass) {
  Problem plain = gated(true);
  expect_convolved_in_front(plain, "short_conv");
  plain.output_final_state = plain.initial_state = false;
  plain.inplace_state = plain.state_index = true;
  expect_convolved_in_front(plain, "short_conv");
}

TEST(Plans, ConvolveInFrontOfTheRecurrentPass) {
  Problem plain = gated(true);
  plain.pass = Pass::recurrent;
  expect_convolved_in_front(plain, "short_conv_step", "recurrent_conv.hopper");
  plain.output_final_state = plain.initial_state = false;
  plain.inplace_state = plain.state_index = true;
  expect_convolved_in_front(plain, "short_conv_step", "recurrent_conv.hopper");
}

/// What o is else is quantized by a last step, behind kernels that normalize it too; or by the step
/// that normalizes it.
TEST(Plans, QuantizeOBehindAllElse) {
  Problem plain = gated(true);
  plain.H = 16, plain.HV = 32, plain.K = plain.V = 128;
  plain.output_norm = Activation::silu;
  for (const Pass pass : {Pass::forward, Pass::recurrent}) {
    plain.pass = pass;
    Problem p = plain;
    p.output_dtype = DType::float8_e4m3;
    for (const Target& target : {host_target(), cuda_target("sm_90a")}) {
      std::vector<std::vector<std::string>> wanted, found;
      for (const Plan& plan : enumerate_plans(plain, target, 64)) {
        std::vector<std::string> steps = names(plan);
        wanted.push_back(steps);
        wanted.back().emplace_back("output_quantize");
        if (steps.back() != "output_norm") continue;
        steps.back() = "output_norm_quantize";
        wanted.push_back(steps);
      }
      for (const Plan& plan : enumerate_plans(p, target, 64)) found.push_back(names(plan));
      std::ranges::sort(wanted);
      std::ranges::sort(found);
      EXPECT_EQ(found, wanted);
    }
  }
  plain.pass = Pass::forward, plain.output_dtype = DType::float8_e4m3;
  EXPECT_EQ(names(default_plan(plain, host_target())).back(), "output_norm_quantize");
}

/// Blocks of whole rows of o normalize them, unless o before the norm is wanted too.
TEST(Plans, NormalizeOInTheForwardKernel) {
  Problem p = gated(true);
  p.H = 16, p.HV = 64, p.K = p.V = 128;
  p.T = 8192;
  p.packed = false;
  p.output_norm = Activation::silu;
  const Target target = cuda_target("sm_90a");
  EXPECT_EQ(names(default_plan(p, target)), (std::vector<std::string>{"delta_forward_norm"}));
  p.keep_output = true;
  EXPECT_EQ(names(default_plan(p, target)),
            (std::vector<std::string>{"delta_forward", "output_norm"}));
}

/// With a gate a channel too, where it costs less than a kernel of its own.
TEST(Plans, NormalizeOInTheForwardKernelOfAGateAChannel) {
  Problem p = gated(true);
  p.op = "kda";
  p.H = p.HV = 96, p.K = p.V = 128;
  p.T = 8192;
  p.packed = false;
  p.output_norm = Activation::sigmoid;
  const Target target = cuda_target("sm_90a");
  EXPECT_EQ(names(default_plan(p, target)), (std::vector<std::string>{"kda_forward_norm"}));
  p.keep_output = true;
  EXPECT_EQ(names(default_plan(p, target)),
            (std::vector<std::string>{"kda_forward", "output_norm"}));
  // Decayed rows need the range of bf16.
  p.keep_output = false;
  p.dtype = p.beta_dtype = DType::fp16;
  EXPECT_EQ(names(default_plan(p, target)).back(), "output_norm");
}

/// Every backward plan is that of the problem without the norm, between a first step that alone
/// reads the caller's do and a last one that sums the weight's gradient.
TEST(Plans, TakeTheGradientOfTheNormInFrontOfTheBackwardPass) {
  Problem plain = gated(true);
  plain.pass = Pass::backward;
  Problem p = plain;
  p.output_norm = Activation::silu;
  const auto expect_between = [](const Plan& plan, const Plan& wanted) {
    ASSERT_EQ(plan.size(), wanted.size() + 2);
    EXPECT_EQ(find_template(plan.front().template_id)->name, "output_norm_bwd");
    EXPECT_EQ(find_template(plan.back().template_id)->name, "layer_sum");
    EXPECT_EQ(Plan(plan.begin() + 1, plan.end() - 1), wanted);
  };
  for (const std::string_view op : operators()) {
    plain.op = p.op = op;
    plain.num_householder = p.num_householder = op == "gated_delta_product" ? 2 : 1;
    for (const Target& target : {host_target(), cuda_target("sm_90a")}) {
      expect_between(default_plan(p, target), default_plan(plain, target));
      const std::vector<Plan> wanted = enumerate_plans(plain, target, 64);
      const std::vector<Plan> plans = enumerate_plans(p, target, 64);
      ASSERT_EQ(plans.size(), wanted.size());
      for (std::size_t i = 0; i < plans.size(); ++i) expect_between(plans[i], wanted[i]);
    }
    const Plan plan = enumerate_plans(p, host_target(), 64).back();
    const auto bound = bind_operator(Device::open("cpu"), p, plan);
    for (const BoundStep& step : bound->steps)
      for (std::size_t i = 0; i < step.argument_count; ++i)
        if (step.source_template->parameters[i].name == "do") {
          const bool first = &step == &bound->steps.front();
          EXPECT_EQ(step.bindings[i].from,
                    first ? Binding::From::caller : Binding::From::workspace);
        }
  }
}

/// Every backward plan is that of the problem as q, k and v are given, between the convolution and
/// its gradients; the first alone of those before, and the last, read the caller's rows.
TEST(Plans, TakeTheGradientOfTheConvolutionBehindTheBackwardPass) {
  Problem plain = gated(true);
  plain.pass = Pass::backward;
  Problem p = plain;
  p.short_conv = 4;
  p.has_conv_bias = p.initial_conv_state = p.output_conv_state = true;
  const auto expect_between = [](const Plan& plan, const Plan& wanted) {
    ASSERT_EQ(plan.size(), wanted.size() + 3);
    const auto name = [&](std::size_t i) { return find_template(plan[i].template_id)->name; };
    EXPECT_EQ(name(0), "short_conv");
    EXPECT_EQ(name(plan.size() - 2), "short_conv_bwd");
    EXPECT_EQ(name(plan.size() - 1), "layer_sum");
    EXPECT_EQ(Plan(plan.begin() + 1, plan.end() - 2), wanted);
  };
  for (const std::string_view op : operators()) {
    plain.op = p.op = op;
    plain.num_householder = p.num_householder = op == "gated_delta_product" ? 2 : 1;
    for (const Target& target : {host_target(), cuda_target("sm_80"), cuda_target("sm_90a")}) {
      expect_between(default_plan(p, target), default_plan(plain, target));
      const std::vector<Plan> wanted = enumerate_plans(plain, target, 64);
      const std::vector<Plan> plans = enumerate_plans(p, target, 64);
      ASSERT_EQ(plans.size(), wanted.size());
      for (std::size_t i = 0; i < plans.size(); ++i) expect_between(plans[i], wanted[i]);
    }
    const auto bound =
        bind_operator(Device::open("cpu"), p, enumerate_plans(p, host_target(), 64).back());
    const BoundStep* const first = &bound->steps.front();
    const BoundStep* const gradients = &bound->steps[bound->steps.size() - 2];
    for (const BoundStep& step : bound->steps)
      for (std::size_t i = 0; i < step.argument_count; ++i) {
        const std::string_view name = step.source_template->parameters[i].name;
        const bool from_caller = step.bindings[i].from == Binding::From::caller;
        if (name == "q" || name == "k" || name == "v") {
          EXPECT_EQ(from_caller, &step == first || &step == gradients) << name;
        } else if (name == "dq" || name == "dk" || name == "dv") {
          EXPECT_EQ(from_caller, &step == gradients) << name;
        }
      }
  }
}

/// A kernel that computes norms and gates itself must not get inputs for which an earlier step has
/// already computed them.
TEST(Plans, MakeNormsAndGatesOnce) {
  for (const char* const op : {"gated_delta_rule", "kda"}) {
    Problem p = gated();
    p.op = op;
    p.use_qk_l2norm = p.use_gate_in_kernel = p.has_A_log = p.has_dt_bias = true;
    std::size_t in_one_kernel = 0;
    for (const Plan& plan : enumerate_plans(p, cuda_target("sm_90a"), 64)) {
      const bool whole = std::ranges::any_of(plan, [](const PlanStep& step) {
        return step.template_id == "delta_forward.hopper" ||
               step.template_id == "kda_forward.hopper";
      });
      if (!whole) continue;
      ++in_one_kernel;
      EXPECT_EQ(plan.size(), 1U) << plan_to_json(plan);
    }
    EXPECT_GT(in_one_kernel, 0U) << op;
  }
}

TEST(Plans, SplitEitherScanOfABackwardPassOrBoth) {
  Problem p = gated();
  p.pass = Pass::backward;
  const Target target = cuda_target("sm_80");
  std::set<std::pair<bool, bool>> split;
  for (const Plan& plan : enumerate_plans(p, target, 64)) {
    const std::vector<std::string> steps = names(plan);
    const auto has = [&](const std::string& name) {
      return std::find(steps.begin(), steps.end(), name) != steps.end();
    };
    for (const std::string scan : {"fwd_h", "bwd_dhu"})
      for (const char* part : {"_segment", "_combine", "_resume"})
        EXPECT_NE(has(scan), has(scan + part));
    split.emplace(has("fwd_h_resume"), has("bwd_dhu_resume"));
    EXPECT_EQ(shape_of(plan).SEG != 0, has("fwd_h_resume") || has("bwd_dhu_resume"));
  }
  EXPECT_EQ(split.size(), 4U);
}

/// Both scans at once, then all gradients; then the gate's parameters are summed over chunks.
TEST(Plans, HaveTwoKernelsForABackwardPassOnHopper) {
  Target target = cuda_target("sm_90a");
  Problem p = gated();
  p.pass = Pass::backward;
  p.dtype = DType::bf16;
  p.K = p.V = 128;
  const auto steps = [&](std::int64_t T, std::int64_t HV) {
    p.B = p.N = 1, p.T = T, p.H = p.HV = HV;
    return names(default_plan(p, target));
  };
  const std::vector<std::string> two{"delta_scans", "delta_gradient"};
  EXPECT_EQ(steps(8192, 64), two);
  target.limits.multiprocessors = 132;
  EXPECT_EQ(steps(64, 1), two);
  EXPECT_EQ(steps(8192, 64), two);
  EXPECT_EQ(steps(32768, 8),
            (std::vector<std::string>{"delta_scans_segment", "fwd_h_combine", "bwd_dhu_combine",
                                      "delta_scans_resume", "delta_gradient"}));
  const std::vector<std::string> two_of_kept{"delta_reverse", "delta_gradient_kept"};
  p.disable_recompute = true;
  EXPECT_EQ(steps(8192, 64), two_of_kept);
  EXPECT_EQ(steps(32768, 8),
            (std::vector<std::string>{"delta_scans_segment", "bwd_dhu_combine",
                                      "delta_reverse_resume", "delta_gradient_kept"}));
  p.K = 256, p.V = 512;
  p.chunk_size = 64;  // what is kept has 32 otherwise
  EXPECT_EQ(steps(8192, 16), two_of_kept);
  p.chunk_size.reset();
  p.disable_recompute = false;
  EXPECT_EQ(steps(8192, 6), two);
  EXPECT_EQ(steps(2048, 6), two);
  p.K = 128, p.V = 256;
  EXPECT_EQ(steps(8192, 32), two);
  p.K = p.V = 128;
  p.use_gate_in_kernel = p.has_A_log = true;
  EXPECT_EQ(steps(8192, 64),
            (std::vector<std::string>{"delta_scans", "delta_gradient", "gate_param_sum"}));
  // One head's scan would take longer than portable kernels that split it.
  EXPECT_GT(steps(131072, 1).size(), 3U);
  EXPECT_NE(shape_of(default_plan(p, target)).SEG, 0);
  p.dtype = DType::fp16;
  EXPECT_GT(steps(8192, 64).size(), 3U);
}

/// With the states of chunks too, whoever asks for them.
TEST(Plans, HaveOneKernelForAForwardPassThatKeepsStatesOnHopper) {
  Target target = cuda_target("sm_90a");
  target.limits.multiprocessors = 132;
  for (const bool kept : {false, true})
    for (const bool gate : {false, true}) {
      Problem p = gated();
      p.op = gate ? "gated_delta_rule" : "delta_rule";
      p.dtype = DType::bf16;
      p.K = p.V = 128;
      p.disable_recompute = kept;
      p.return_intermediate_states = !kept;
      p.B = p.N = 4, p.T = 4096, p.H = p.HV = 64;
      EXPECT_EQ(names(default_plan(p, target)), std::vector<std::string>{"delta_forward_keep"});
      p.B = p.N = 1, p.T = 131072, p.H = p.HV = 4;
      EXPECT_EQ(names(default_plan(p, target)),
                (std::vector<std::string>{"delta_segment", "fwd_h_combine", "delta_resume_keep"}));
    }
}

TEST(Plans, HaveThreeKernelsForABackwardPassOfADecayAChannelOnHopper) {
  Target target = cuda_target("sm_90a");
  Problem p = gated();
  p.op = "kda";
  p.pass = Pass::backward;
  p.dtype = DType::bf16;
  p.K = p.V = 128;
  const auto steps = [&](std::int64_t T, std::int64_t HV) {
    p.B = p.N = 1, p.T = T, p.H = p.HV = HV;
    return names(default_plan(p, target));
  };
  const std::vector<std::string> three{"kda_bwd_prepare", "kda_scans", "kda_gradient"};
  target.limits.multiprocessors = 132;
  for (const char* const op : {"gdn2", "kda"}) {
    p.op = op;
    EXPECT_EQ(steps(64, 1), three) << op;
    EXPECT_EQ(steps(8192, 64), three) << op;
  }
  // One head's scan would take longer than portable kernels that split it.
  EXPECT_GT(steps(131072, 1).size(), 3U);
  EXPECT_NE(shape_of(default_plan(p, target)).SEG, 0);
  p.use_gate_in_kernel = p.has_A_log = true;
  p.lower_bound = -5.0F;
  std::vector<std::string> with_parameters = three;
  with_parameters.emplace_back("gate_param_sum");
  EXPECT_EQ(steps(8192, 64), with_parameters);
  const auto is_portable = [&](auto change) {
    Problem other = p;
    change(other);
    const std::vector<std::string> found = names(default_plan(other, target));
    return std::count(found.begin(), found.end(), "kda_scans") == 0;
  };
  EXPECT_TRUE(is_portable([](Problem& o) { o.dtype = DType::fp16; }));
  EXPECT_TRUE(is_portable([](Problem& o) { o.HV = 2 * o.H; }));
  EXPECT_TRUE(is_portable([](Problem& o) { o.use_beta_sigmoid = o.allow_neg_eigval = true; }));
  EXPECT_TRUE(is_portable([](Problem& o) { o.V = 256; }));
  EXPECT_TRUE(is_portable([](Problem& o) { o.op = "gdn2", o.beta_dtype = DType::fp32; }));
}

/// Of a summary with a decay a channel the reverse scan is the whole, where portable kernels that
/// split a sequence are not faster.
TEST(Plans, HaveTwoKernelsForAReverseSummaryOfADecayAChannelOnHopper) {
  Target target = cuda_target("sm_90a");
  target.limits.multiprocessors = 132;
  Problem p = gated();
  p.pass = Pass::backward;
  p.summary = true;
  p.dtype = DType::bf16;
  p.K = p.V = 128;
  const std::vector<std::string> two{"kda_bwd_prepare", "kda_scans_summary"};
  const auto steps = [&](std::int64_t T, std::int64_t HV) {
    p.B = p.N = 1, p.T = T, p.H = p.HV = HV;
    return names(default_plan(p, target));
  };
  for (const char* const op : {"gdn2", "kda"}) {
    p.op = op;
    EXPECT_EQ(steps(64, 1), two) << op;
    EXPECT_EQ(steps(8192, 64), two) << op;
    EXPECT_EQ(steps(131072, 1).back(), "bwd_dhu_summary") << op;
  }
  p.dtype = DType::fp16;
  EXPECT_EQ(steps(8192, 64).back(), "bwd_dhu_summary");
  p.dtype = DType::bf16;
  steps(8192, 64);
  target = cuda_target("sm_80");
  target.limits.multiprocessors = 108;
  EXPECT_EQ(names(default_plan(p, target)).back(), "bwd_dhu_summary");
}

TEST(Plans, SplitScansByDefaultWhereFewChainsWouldLeaveAGpuIdle) {
  Target target = cuda_target("sm_90a");
  Problem p = gated();
  p.op = "kda";
  p.K = p.V = 128;
  const auto segment = [&](std::int64_t B, std::int64_t T, std::int64_t HV) {
    p.B = p.N = B, p.T = T, p.H = p.HV = HV;
    return shape_of(default_plan(p, target)).SEG;
  };
  EXPECT_EQ(segment(1, 8192, 8), 0);  // an architecture alone says nothing of how many wait
  target.limits.multiprocessors = 132;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    p.pass = pass;
    // Its backward pass has only portable kernels.
    p.dtype = pass == Pass::backward ? DType::fp16 : DType::bf16;
    EXPECT_GE(segment(1, 8192, 8), 8);
    EXPECT_GE(segment(1, 32768, 4), segment(1, 8192, 4));
    EXPECT_EQ(segment(1, 8192, 64), 0);
    EXPECT_EQ(segment(16, 8192, 8), 0);
    EXPECT_EQ(segment(1, 512, 8), 0);
    if (pass == Pass::forward) {
      EXPECT_EQ(segment(1, 2048, 12), 0);
    }
    EXPECT_EQ(segment(0, 8192, 8), 0);
    segment(1, 8192, 8);
    const std::vector<std::string> steps = names(default_plan(p, target));
    const std::size_t scans = pass == Pass::backward ? 2 : 1;
    EXPECT_EQ(std::count(steps.begin(), steps.end(), "fwd_h_combine") +
                  std::count(steps.begin(), steps.end(), "bwd_dhu_combine"),
              std::ptrdiff_t(scans));
    for (const char* whole : {"fwd_h", "bwd_dhu"})
      EXPECT_EQ(std::count(steps.begin(), steps.end(), whole), 0);
  }
  p.pass = Pass::forward;
  p.dtype = DType::bf16;
  segment(1, 32768, 8);
  EXPECT_EQ(names(default_plan(p, target)),
            (std::vector<std::string>{"kda_segment", "fwd_h_combine", "kda_resume"}));
  EXPECT_EQ(default_plan(p, target).back().config.integer("BV"), 128);
  p.return_intermediate_states = true;  // which whole passes do not keep
  EXPECT_EQ(names(default_plan(p, target)).front(), "chunk_local_cumsum");
  EXPECT_GE(shape_of(default_plan(p, target)).SEG, 8);
  p.return_intermediate_states = false;
  p.packed = true;
  p.B = 1, p.N = 2, p.T = 2 * 8192;
  p.H = p.HV = 4;
  EXPECT_GE(shape_of(default_plan(p, target)).SEG, 8);
  EXPECT_EQ(shape_of(default_plan(p, host_target())).SEG, 0);
}

TEST(Plans, ThatTakeSegmentsBeginWithThem) {
  Target target = cuda_target("sm_90a");
  target.limits.multiprocessors = 132;
  Problem p = gated();
  p.dtype = DType::bf16;
  p.K = p.V = 128, p.H = p.HV = 8, p.T = 8192;
  p.chunk_size = 64, p.segment_chunks = 16;
  for (const char* const op : {"gated_delta_rule", "kda", "gdn2", "gated_delta_product"})
    for (const Target& on : {target, host_target()}) {
      p.op = op;
      for (const std::int64_t length : {8, 16, 32}) {
        p.segment_chunks = length;
        const Plan plan = default_plan(p, on);
        EXPECT_EQ(shape_of(plan).BT, 64) << op;
        EXPECT_EQ(shape_of(plan).SEG, length) << op;
        EXPECT_EQ(shape_of(default_plan(summary_of(p), on)).SEG, length) << op;
        for (const std::string& name : names(plan)) EXPECT_FALSE(name.ends_with("_segment")) << op;
        for (const Plan& other : enumerate_plans(p, on, 64))
          EXPECT_EQ(shape_of(other).SEG, length) << op;
      }
    }
  p.op = "gated_delta_rule";
  Plan other = default_plan(p, target);
  for (PlanStep& step : other) step.config.set("SEG", std::int64_t{8});
  EXPECT_EQ(plan_problem(p, other, target),
            "the plan's SEG is 8; it must be 32, the problem's segment_chunks");
  Problem whole = p;
  whole.segment_chunks.reset();
  EXPECT_NE(plan_problem(p, default_plan(whole, target), target), "");
}

/// Also where one scan of a plan goes through segments and the other through whole sequences.
TEST(Plans, DefaultOnesAreTheCheapest) {
  Target target = cuda_target("sm_80");
  target.limits.multiprocessors = 108;
  Problem p = gated();
  p.dtype = p.beta_dtype = DType::bf16;
  p.K = p.V = 128;
  p.T = 8192;
  int half_split = 0;
  for (const Pass pass : {Pass::forward, Pass::backward})
    for (const std::int64_t HV : {8, 32, 64}) {
      p.pass = pass, p.H = p.HV = HV;
      const double least = plan_cost(p, default_plan(p, target), target);
      for (const std::int64_t BT : {64, 32})
        for (const Plan& plan : enumerate_plans(p, target, BT)) {
          EXPECT_GE(plan_cost(p, plan, target), least * (1 - 1e-9)) << plan_to_json(plan);
          const std::vector<std::string> kinds = names(plan);
          if (std::ranges::count(kinds, "fwd_h_segment") * std::ranges::count(kinds, "bwd_dhu") > 0)
            ++half_split;
        }
    }
  EXPECT_GT(half_split, 0);
}

/// Segments are shared where both plans then cost less than those of the summary and the pass.
TEST(Plans, ShareSegmentsWhereThatCostsLess) {
  Target target = cuda_target("sm_90a");
  target.limits.multiprocessors = 132;
  Problem p = gated();
  p.dtype = p.beta_dtype = DType::bf16;
  p.K = p.V = 128;
  p.initial_state = p.output_final_state = true;
  const auto cost = [&](const Problem& one) {
    return plan_cost(one, default_plan(one, target), target);
  };
  int shared = 0;
  for (const char* const op : {"gated_delta_rule", "kda"})
    for (const std::int64_t HV : {16, 64})
      for (const std::int64_t T : {256, 8192}) {
        p.op = op, p.H = p.HV = HV, p.T = T;
        Problem pass = p, summary = summary_of(p);
        summary.transition = true;
        const double apart = cost(pass) + cost(summary);
        const PlanShape shape = shared_segments(p, true, target);
        EXPECT_EQ(shape.SEG != 0, T == 8192) << op << HV;
        if (shape.SEG == 0) continue;
        ++shared;
        pass.chunk_size = summary.chunk_size = shape.BT;
        pass.segment_chunks = summary.segment_chunks = shape.SEG;
        EXPECT_LT(cost(pass) + cost(summary), apart) << op << HV;
      }
  EXPECT_EQ(shared, 4);
}

TEST(Plans, SplitPassesOfAGateAHeadByDefaultWhereThatIsFaster) {
  Target target = cuda_target("sm_90a");
  target.limits.multiprocessors = 132;
  Problem p = gated();
  p.dtype = DType::bf16;
  p.K = p.V = 128;
  const std::vector<std::string> whole{"delta_forward"};
  const std::vector<std::string> split{"delta_segment", "fwd_h_combine", "delta_resume"};
  for (const char* op : {"gated_delta_rule", "delta_rule"}) {
    p.op = op;
    p.T = 8192, p.H = p.HV = 8;
    EXPECT_EQ(names(default_plan(p, target)), split) << op;
    p.H = p.HV = 16;
    EXPECT_EQ(names(default_plan(p, target)), split) << op;
    p.H = p.HV = 32;
    if (p.op == "gated_delta_rule") {
      EXPECT_EQ(names(default_plan(p, target)), whole) << op;
    }
    p.H = p.HV = 64;
    EXPECT_EQ(names(default_plan(p, target)), whole) << op;
    p.T = 4096, p.H = p.HV = 8;
    EXPECT_EQ(names(default_plan(p, target)), split) << op;
    p.T = 2048, p.H = p.HV = 32;
    EXPECT_EQ(names(default_plan(p, target)), whole) << op;
    p.T = 65536, p.H = p.HV = 4, p.K = p.V = 256;
    EXPECT_EQ(names(default_plan(p, target)), split) << op;
    p.K = p.V = 128;
  }
}

TEST(Plans, SegmentsAreOfALengthThatFillsAWaveOfBlocks) {
  Target target = cuda_target("sm_90a");
  target.limits.multiprocessors = 132;
  Problem p = gated();
  p.dtype = DType::bf16;
  p.K = p.V = 128;
  for (const auto& [HV, T] : {std::pair{6, 16384}, {8, 32768}, {10, 16384}, {12, 32768}}) {
    p.H = p.HV = HV, p.T = T;
    const Plan plan = default_plan(p, target);
    const Config& pass = plan.back().config;
    const std::int64_t blocks =
        sizes_of(p, shape_of(plan), Rows::tokens).NS * p.HV * p.V / pass.integer("BV");
    EXPECT_GT(blocks, 120) << HV << " heads, " << pass.to_string();
    EXPECT_LE(blocks, 132) << HV << " heads, " << pass.to_string();
  }
}

Problem pooled_decoding() {
  Problem p = gated();
  p.pass = Pass::recurrent;
  p.dtype = DType::bf16;
  p.K = p.V = 128, p.H = 16, p.HV = 32;
  p.inplace_state = p.state_index = true;
  return p;
}

/// States go whole through shared memory where there are many, or several tokens of each.
TEST(Plans, DecodeManyStatesByTheKernelForThem) {
  Target hopper = cuda_target("sm_90a");
  hopper.limits.multiprocessors = 132;
  Problem p = pooled_decoding();
  const auto kernel_of = [&](std::int64_t sequences, std::int64_t tokens, const Target& target) {
    p.B = p.N = sequences, p.T = tokens, p.state_slots = 2 * sequences;
    return default_plan(p, target).front().template_id;
  };
  EXPECT_EQ(kernel_of(1, 1, hopper), "recurrent.portable");
  EXPECT_EQ(kernel_of(64, 1, hopper), "recurrent.hopper");
  EXPECT_EQ(kernel_of(8, 4, hopper), "recurrent.hopper");
  p.state_v_first = true, p.state_dtype = DType::bf16, p.output_final_state = false;
  EXPECT_EQ(kernel_of(1, 1, hopper), "recurrent.portable");
  for (const std::int64_t sequences : {8, 64, 256})
    EXPECT_EQ(kernel_of(sequences, 1, hopper), "recurrent.hopper") << sequences;
  p.state_v_first = false, p.state_dtype = DType::fp32, p.output_final_state = true;
  EXPECT_EQ(kernel_of(64, 1, cuda_target("sm_80")), "recurrent.portable");
  p.intermediate_rows = 64, p.draft_tokens = 4, p.disable_state_update = p.parent = true;
  EXPECT_EQ(kernel_of(64, 4, hopper), "recurrent.portable");
}

/// A row of o needs all columns: a block has them side by side where they fit, whatever the states'
/// layout, else in turn.
TEST(Plans, NormalizeRowsOfOInOneBlock) {
  Target hopper = cuda_target("sm_90a");
  hopper.limits.multiprocessors = 132;
  Problem p = pooled_decoding();
  p.output_norm = Activation::silu;
  const auto step_of = [&](std::int64_t sequences) {
    p.B = p.N = sequences, p.T = 1, p.state_slots = 2 * sequences;
    return default_plan(p, hopper).front();
  };
  for (const bool v_first : {false, true}) {
    p.state_v_first = v_first;
    const PlanStep step = step_of(1);
    ASSERT_EQ(step.template_id, "recurrent.portable");
    EXPECT_EQ(step.config.to_string(), "BV=128,num_warps=8");
    EXPECT_EQ(step_of(64).template_id, "recurrent.hopper");
  }
  p.K = 256, p.V = 512;
  EXPECT_EQ(step_of(1).template_id, "recurrent.portable");
}

/// Six sequences of 271 to 3063 tokens and 64 heads: more scans than multiprocessors; short ones
/// fill the waves of long ones, so wide blocks are faster (one H200, 2026-11-25: 0.373 ms, narrow
/// ones 0.516). With 16 heads narrow blocks are (0.194 ms, 0.255).
TEST(Plans, ShortSequencesFillWhatLongOnesLeave) {
  Target target = cuda_target("sm_90a");
  target.limits.multiprocessors = 132;
  Problem p = gated(true);
  p.op = "kda";
  p.dtype = DType::bf16;
  p.K = p.V = 128;
  p.T = 8192, p.N = 6;
  p.use_gate_in_kernel = p.has_A_log = p.use_qk_l2norm = p.use_beta_sigmoid = true;
  p.lower_bound = -5.0F;
  p.seqlens_hint = 3063;
  p.H = p.HV = 64;
  EXPECT_EQ(default_plan(p, target).back().config.integer("BV"), 128);
  p.H = p.HV = 16;
  EXPECT_EQ(default_plan(p, target).back().config.integer("BV"), 64);
}

/// A pack of 36864 tokens in 65 sequences, and what the caller says of the longest one.
TEST(Plans, SplitPacksByAHintOfTheirLongestSequence) {
  Target target = cuda_target("sm_90a");
  target.limits.multiprocessors = 132;
  Problem p = gated(true);
  p.dtype = DType::bf16;
  p.K = p.V = 128;
  p.H = 4, p.HV = 8, p.T = 32768 + 64 * 64, p.N = 65;
  for (const char* op : {"gated_delta_rule", "delta_rule", "kda"})
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      SCOPED_TRACE(fmt::format("{} {}", op, to_string(pass)));
      p.op = op, p.pass = pass;
      p.H = p.op == "kda" ? 8 : 4;
      p.seqlens_hint.reset();
      const Plan plain = default_plan(p, target);
      EXPECT_EQ(shape_of(plain).SEG, 0);
      for (const std::int64_t hint : {0, 64, 567}) {  // less than the mean
        p.seqlens_hint = hint;
        EXPECT_EQ(default_plan(p, target), plain);
      }
      p.seqlens_hint = 32768;
      // No backward pass of a gate a channel on Hopper has segments.
      EXPECT_EQ(shape_of(default_plan(p, target)).SEG != 0, p.op != "kda" || pass == Pass::forward);
      p.seqlens_hint = 36864;
      const Plan longest = default_plan(p, target);
      p.seqlens_hint = 1 << 30;
      EXPECT_EQ(default_plan(p, target), longest);
      p.seqlens_hint = 32768;
      if (pass == Pass::backward) continue;
      p.batch_invariant = true;
      const Plan invariant = default_plan(p, target);
      p.seqlens_hint.reset();
      EXPECT_EQ(default_plan(p, target), invariant);
      p.batch_invariant = false;
    }
}

TEST(Plans, FitTheirDefaultsToTheNumberOfSequences) {
  Target target = cuda_target("sm_90a");
  target.limits.multiprocessors = 132;
  Problem p = gated();
  p.op = "kda";
  p.dtype = DType::bf16;
  p.K = p.V = 128;
  p.T = 512, p.H = p.HV = 64;
  EXPECT_EQ(default_plan(p, target).back().config.integer("BV"), 64);
  p.B = p.N = 4;
  EXPECT_EQ(default_plan(p, target).back().config.integer("BV"), 128);
}

TEST(Plans, PrepareChunksInAKernelOfTheirOwnForFewHeads) {
  Target target = cuda_target("sm_90a");
  Problem p = gated();
  p.op = "kda";
  p.K = p.V = 128;
  const auto last = [&](std::int64_t T, std::int64_t HV) {
    p.T = T, p.H = p.HV = HV;
    return default_plan(p, target).back().template_id;
  };
  EXPECT_EQ(last(2048, 4), "kda_forward.hopper");  // an architecture alone: the fewest kernels
  target.limits.multiprocessors = 132;
  EXPECT_EQ(last(64, 4), "kda_forward.hopper");
  EXPECT_EQ(last(512, 4), "kda_fwd_h_o.hopper");
  EXPECT_EQ(last(2048, 16), "kda_fwd_h_o.hopper");
  EXPECT_EQ(last(2048, 64), "kda_forward.hopper");
  EXPECT_EQ(last(8192, 64), "kda_forward.hopper");
  EXPECT_EQ(last(4096, 4), "kda_fwd_h_o.hopper");
  EXPECT_EQ(last(8192, 4), "kda_fwd_h_o_resume.hopper");
  EXPECT_EQ(last(8192, 8), "kda_resume.hopper");
  EXPECT_EQ(last(32768, 8), "kda_resume.hopper");
  // For any number of heads: kda_forward would lose fp16's digits.
  p.dtype = DType::fp16;
  EXPECT_EQ(last(8192, 64), "kda_fwd_h_o.hopper");
  EXPECT_EQ(last(32768, 4), "kda_fwd_h_o_resume.hopper");
  // It has no room for more keys.
  p.dtype = DType::bf16;
  p.K = p.V = 256, p.T = 2048, p.H = p.HV = 8;
  EXPECT_EQ(names(default_plan(p, target)),
            (std::vector<std::string>{"kda_prepare", "kda_fwd_h_o"}));
  p.K = p.V = 128;
  // kda_forward has no gates in beta's place.
  p.op = "gdn2";
  p.dtype = p.beta_dtype = DType::bf16;
  p.T = 8192, p.H = p.HV = 32;
  EXPECT_EQ(names(default_plan(p, target)),
            (std::vector<std::string>{"kda_prepare", "kda_fwd_h_o"}));
}

TEST(Plans, SumTheGateInFp32WhateverItsInput) {
  Problem p = gated();
  p.use_gate_in_kernel = true;
  p.g_dtype = DType::bf16;
  const std::vector<StageUse> uses = stage_uses(p);
  const auto sum = std::find_if(uses.begin(), uses.end(), [](const StageUse& u) {
    return u.stage->name == "chunk_local_cumsum";
  });
  ASSERT_NE(sum, uses.end());
  const auto at = static_cast<std::size_t>(sum - uses.begin());
  EXPECT_EQ(step_constants(p, std::span(uses).subspan(at, 1)).G_DTYPE, DType::fp32);
  EXPECT_EQ(step_constants(p, std::span(uses).subspan(at - 1, 2)).G_DTYPE, DType::bf16);
}

TEST(Plans, RoundTripThroughJson) {
  const Plan plan = default_plan(gated(), cuda_target("sm_80"));
  const auto parsed = plan_from_json(plan_to_json(plan));
  ASSERT_TRUE(parsed.has_value());
  EXPECT_EQ(*parsed, plan);
  for (const char* text : {"", "{}", "[1]", "[{\"template\": \"fwd_h.portable\"}]",
                           "[{\"template\": \"no.such\", \"config\": \"\"}]",
                           "[{\"template\": \"fwd_h.portable\", \"config\": \"BT\"}]"})
    EXPECT_FALSE(plan_from_json(text).has_value()) << text;
}

/// The message of the Error that `call` throws.
template <class Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kBadInput);
    return error.what();
  }
  ADD_FAILURE() << "no Error was thrown";
  return {};
}

TEST(Plans, ThatDoNotFitAreRefusedWithAReason) {
  const Device cpu = Device::open("cpu");
  const Problem p = gated();
  const Plan good = default_plan(p, cpu.impl().target());
  const auto refused = [&](const Plan& plan) {
    return message_of([&] { bind_operator(cpu, p, plan); });
  };
  Plan shorter = good;
  shorter.pop_back();
  EXPECT_NE(refused(shorter).find("ends before stage fwd_o"), std::string::npos);
  Plan longer = good;
  longer.push_back(good.back());
  EXPECT_NE(refused(longer).find("the next stage, (none)"), std::string::npos);
  Plan twice = good;
  twice.insert(twice.begin(), twice.front());
  EXPECT_NE(refused(twice).find("does not carry out the next stage"), std::string::npos);
  Plan unknown = good;
  unknown[0].template_id = "no.such";
  EXPECT_NE(refused(unknown).find("'no.such'"), std::string::npos);
  Plan mixed = good;
  mixed.back().config.set("BT", std::int64_t{shape_of(good).BT == 16 ? 32 : 16});
  EXPECT_NE(refused(mixed).find("mixes BT="), std::string::npos);
  Plan incomplete = good;
  incomplete.back().config = Config{{"BT", good.back().config.integer("BT")}};
  EXPECT_NE(refused(incomplete).find("has no BV"), std::string::npos);
  const Plan foreign = default_plan(p, cuda_target("sm_90a"));
  EXPECT_NE(refused(foreign).find("the device is cpu"), std::string::npos);
}

TEST(Plans, OfBatchInvariantProblemsFollowFromHeadsAndOptionsAlone) {
  Target hopper = cuda_target("sm_90a");
  hopper.limits.multiprocessors = 132;
  struct Case {
    std::string_view op;
    Pass pass;
    std::int64_t heads;
  };
  std::vector<Case> cases;
  for (const std::string_view op : operators())
    for (const Pass pass : {Pass::forward, Pass::recurrent})
      for (const std::int64_t heads : {1, 2, 8, 32, 96}) cases.push_back({op, pass, heads});
  for (const Target& target : {host_target(), hopper})
    for (const auto& [op, pass, heads] : cases) {
      SCOPED_TRACE(fmt::format("{}, {} heads", op, heads));
      Problem p = gated();
      p.op = op, p.pass = pass, p.batch_invariant = true;
      p.H = p.HV = heads;
      if (target.device == DeviceKind::cuda) p.dtype = p.beta_dtype = DType::bf16, p.K = p.V = 128;
      const Plan plan = default_plan(p, target);
      for (const bool packed : {false, true})
        for (const bool states : {false, true})
          for (const std::int64_t N : {1, 300}) {
            Problem other = p;
            other.packed = packed, other.T = packed ? 70 * N : 70, other.N = N;
            other.B = packed ? 1 : N;
            other.initial_state = other.output_final_state = states;
            Plan own = default_plan(other, target);
            std::erase_if(own, [](const PlanStep& step) {  // which computes no bit of a sequence
              return step.template_id.starts_with("chunk_index.") ||
                     step.template_id.starts_with("step_seqlens.");
            });
            EXPECT_EQ(own, plan);
          }
      // Blocks of 64 columns, whose states decay chunk by chunk, and no two of a sequence.
      if (plan.front().template_id == "delta_forward.hopper") {
        EXPECT_EQ(plan.front().config.integer("BV"), 64);
      }
      for (const PlanStep& step : plan) {
        const Template& t = *find_template(step.template_id);
        const Extents e{.B = 1, .T = 65536, .N = 1, .NT = 1024};
        if (!t.name.ends_with("_forward")) continue;
        EXPECT_EQ(t.geometry(Spec(problem_constants(p), step.config), e, target.limits).grid[0],
                  p.HV * p.V / step.config.integer("BV"));
      }
      const std::int64_t BT = pass == Pass::forward ? 64 : 0;
      EXPECT_EQ(shape_of(plan).BT, BT);
      EXPECT_EQ(shape_of(plan).SEG, 0);
      EXPECT_EQ(enumerate_plans(p, target, 64), std::vector<Plan>{plan});
    }
}

/// The kernel for many states serves every batch, of however few, with drafts or without.
TEST(Plans, OfBatchInvariantDecodingAreThoseOfManySequences) {
  Target hopper = cuda_target("sm_90a");
  hopper.limits.multiprocessors = 132;
  for (const std::string_view op : operators()) {
    SCOPED_TRACE(op);
    Problem p = gated();
    p.op = op, p.pass = Pass::recurrent;
    p.dtype = DType::bf16;
    p.K = p.V = 128, p.H = p.HV = 16;
    p.batch_invariant = true;
    const Plan plan = default_plan(p, hopper);
    EXPECT_EQ(plan.front().template_id, "recurrent.hopper");
    EXPECT_EQ(default_plan(p, cuda_target("sm_80")).front().template_id, "recurrent.portable");
    // Any piece of a sequence, the first and the last one too.
    for (const bool initial : {false, true})
      for (const bool final : {false, true}) {
        p.initial_state = initial, p.output_final_state = final;
        EXPECT_EQ(default_plan(p, hopper), plan);
      }
    p.initial_state = p.output_final_state = false;
    p.inplace_state = p.state_index = true;
    for (const std::int64_t N : {1, 8, 500})
      for (const std::int64_t columns : {0, 4})
        for (const bool kept : {false, true}) {
          p.B = p.N = N, p.T = std::max<std::int64_t>(columns, 1);
          p.state_slots = 4 * N;
          p.index_columns = columns, p.disable_state_update = kept;
          EXPECT_EQ(default_plan(p, hopper), plan);
        }
  }
}

TEST(Plans, OfBatchInvariantProblemsHaveNoOther) {
  const Device cpu = Device::open("cpu");
  Problem p = gated();
  const Plan small = enumerate_plans(p, cpu.impl().target(), 16).front();
  p.batch_invariant = true;
  EXPECT_TRUE(enumerate_plans(p, cpu.impl().target(), 16).empty());
  EXPECT_NE(message_of([&] { bind_operator(cpu, p, small); }).find("not the default one"),
            std::string::npos);
  // prepare() says that its plan is the default one, so that it is not worked out again.
  EXPECT_NO_THROW(bind_operator(cpu, p, small, /*is_default=*/true));
}

TEST(Plans, WideHeadsHaveOneWithWrittenIntermediates) {
  for (const std::string_view op : operators())
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      Problem p;
      p.op = op, p.pass = pass;
      p.H = p.HV = 4, p.K = 256, p.V = 512;
      p.disable_recompute = true;
      for (const char* arch : {"sm_80", "sm_90a"})
        EXPECT_NO_THROW(default_plan(p, cuda_target(arch))) << op << " " << arch;
      p.dtype = p.beta_dtype = DType::fp32;
      EXPECT_NO_THROW(default_plan(p, cuda_target("sm_90a"))) << op;
    }
}

TEST(Binding, LaterStagesReadTheNormsBesideTheTensors) {
  Problem p = gated();
  p.use_qk_l2norm = true;
  const Device cpu = Device::open("cpu");
  std::vector<Plan> staged = enumerate_plans(p, cpu.impl().target(), 64);
  std::erase_if(staged, [](const Plan& plan) { return shape_of(plan).SEG != 0; });
  const auto op = bind_operator(cpu, p, staged.back());
  const auto binding = [&](std::string_view stage, std::string_view argument,
                           std::size_t nth = 0) -> const Binding& {
    for (const BoundStep& step : op->steps) {
      if (step.source_template->name != stage || nth-- != 0) continue;
      for (std::size_t i = 0; i < step.argument_count; ++i)
        if (step.source_template->parameters[i].name == argument) return step.bindings[i];
    }
    throw Error(ErrorKind::kBadInput, "no such argument");
  };
  const Binding& q_rstd = binding("l2norm_rstd", "rstd", 0);
  const Binding& k_rstd = binding("l2norm_rstd", "rstd", 1);
  EXPECT_EQ(q_rstd.from, Binding::From::workspace);
  EXPECT_NE(q_rstd.index, k_rstd.index);
  EXPECT_EQ(binding("fwd_o", "q_rstd").index, q_rstd.index);
  for (const char* stage : {"scaled_dot_kkt", "recompute_w_u", "fwd_h", "fwd_o"}) {
    EXPECT_EQ(binding(stage, "k_rstd").from, Binding::From::workspace) << stage;
    EXPECT_EQ(binding(stage, "k_rstd").index, k_rstd.index) << stage;
    EXPECT_EQ(binding(stage, "k").from, Binding::From::caller) << stage;
    EXPECT_EQ(binding(stage, "k").index, binding("l2norm_rstd", "x", 1).index) << stage;
  }
  EXPECT_EQ(binding("fwd_o", "o").from, Binding::From::caller);
  EXPECT_EQ(binding("fwd_h", "seq_offsets").from, Binding::From::absent);
  // A is dead once it is solved, so the workspace is smaller than the sum of its tensors.
  const std::size_t tokens = 300 * 4;
  const std::size_t largest = tokens * 64 * 4 /*A*/ + tokens * 64 * 2 /*Tinv*/;
  EXPECT_GT(op->workspace_bytes, largest);
}

TEST(Devices, UnknownAndMissingOnesAreNamed) {
  EXPECT_NE(message_of([] { Device::open("gpu"); }).find("'gpu'"), std::string::npos);
  const std::vector<DeviceInfo> devices = list_devices();
  ASSERT_FALSE(devices.empty());
  EXPECT_EQ(devices.front().name, "cpu");
  try {
    Device::open("cuda:99");
    FAIL() << "cuda:99 opened";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnavailable);
    EXPECT_GT(std::string_view(error.what()).size(), 20U);
  }
}

}  // namespace
}  // namespace wyvern
