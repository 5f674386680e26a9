// Whole operators on the emulator, against the float64 oracle, where a plan of Hopper's kernels or
// inputs of their own are the subject: how these are connected, and what their rounding adds up to.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numbers>

#include "tests/emulator/device.hpp"
#include "tests/operators/invariance.hpp"
#include "tests/support/full_suite.hpp"

namespace wyvern::testing {
namespace {

class EmulatedOperator : public OperatorTest {
 protected:
  EmulatedOperator() { device_ = emulator::open_emulated_device(); }
};

class EmulatedSegments : public EmulatedOperator,
                         public ::testing::WithParamInterface<OperatorPass> {};

/// A plan's scans, all of them split, meet at the right states.
TEST_P(EmulatedSegments, MatchesOracle) {
  Problem p = base(GetParam());
  p.H = p.HV = 1, p.K = 40, p.V = 48;
  p.packed = p.initial_state = true;
  constexpr std::int64_t kLength = 12;
  const OperatorData data = make_data(p, Gate::mixed, 3, {460, 0, kLength * 16, 17});
  const auto parts = [](const Plan& plan) {
    return std::count_if(plan.begin(), plan.end(),
                         [](const PlanStep& step) { return step.config.contains("SEG"); });
  };
  const std::vector<Plan> all = plans(device(), data.problem, 16);
  Plan plan = *std::max_element(all.begin(), all.end(),
                                [&](const Plan& a, const Plan& b) { return parts(a) < parts(b); });
  ASSERT_EQ(parts(plan), p.pass == Pass::backward ? 6 : 3);
  for (PlanStep& step : plan)
    if (step.config.contains("SEG")) step.config.set("SEG", kLength);
  check(prepare(data.problem, plan), data);
}

/// What sequences of several segments, of one and of none do to a state, or to a gradient.
class EmulatedSummaries : public EmulatedOperator,
                          public ::testing::WithParamInterface<OperatorPass> {
 protected:
  static Problem problem() {
    Problem p = base(GetParam());
    const bool forward = p.pass == Pass::forward;
    p.H = 1, p.HV = 2;
    p.packed = p.summary = true, p.transition = forward;
    p.initial_state = forward, p.output_final_state = !forward;
    return p;
  }
  /// By segments of eight chunks, with the tensors that may have strided rows.
  void check_split(Plan plan, const OperatorData& data) {
    for (PlanStep& step : plan)
      if (step.config.contains("SEG")) step.config.set("SEG", std::int64_t{8});
    check_strided_rows(prepare(data.problem, plan), data);
  }
};

TEST_P(EmulatedSummaries, OfPortablePlans) {
  Problem p = problem();
  p.K = 36, p.V = 41;
  p.state_v_first = p.use_qk_l2norm = true;
  const OperatorData data = make_data(p, Gate::mixed, 3, {300, 0, 128, 17});
  for (const Plan& plan : plans_with_all(device(), data.problem, 16)) check_split(plan, data);
}

INSTANTIATE_TEST_SUITE_P(, EmulatedSummaries, ::testing::ValuesIn(chunked_passes()),
                         [](const auto& each) { return name_of(each.param); });

/// The same by Hopper's kernels of segments, or of the reverse scan. With fast decay M is 0.
class EmulatedHopperSummaries : public EmulatedSummaries {};

TEST_P(EmulatedHopperSummaries, MatchOracle) {
  Problem p = problem();
  const bool channels = gate_kind(p) == GateKind::vector;
  if (channels && p.pass == Pass::backward) {  // whose kernels have no shared key heads
    p.H = p.HV;
    p.use_qk_l2norm = p.state_v_first = true;
  }
  const char* const id = p.pass == Pass::backward ? (channels ? "kda_scans_summary.hopper"
                                                              : "delta_scans_segment.hopper")
                         : p.op == "kda"          ? "kda_segment.hopper"
                         : p.op == "gdn2"         ? "fwd_h_segment.hopper"
                                                  : "delta_segment.hopper";
  for (const Gate gate : {Gate::typical, Gate::fast}) {
    const OperatorData data = make_data(p, gate, 4, {560, 0, 512, 17, 1030});
    const auto plan = plan_with(device(), data.problem, id);
    ASSERT_TRUE(plan.has_value());
    check_split(*plan, data);
  }
}

INSTANTIATE_TEST_SUITE_P(, EmulatedHopperSummaries,
                         ::testing::Values(OperatorPass{"delta_rule", Pass::forward},
                                           OperatorPass{"gated_delta_rule", Pass::forward},
                                           OperatorPass{"kda", Pass::forward},
                                           OperatorPass{"gdn2", Pass::forward},
                                           OperatorPass{"delta_rule", Pass::backward},
                                           OperatorPass{"gated_delta_rule", Pass::backward},
                                           OperatorPass{"kda", Pass::backward},
                                           OperatorPass{"gdn2", Pass::backward}),
                         [](const auto& each) { return name_of(each.param); });

/// The pass that goes on from segments which a summary returned, portable and by Hopper's kernels.
class EmulatedSegmentsGiven : public EmulatedOperator,
                              public ::testing::WithParamInterface<const char*> {
 protected:
  static Problem problem() {
    Problem p = base({GetParam(), Pass::forward});
    p.H = 1, p.HV = 2;
    p.initial_state = p.output_final_state = p.use_qk_l2norm = true;
    p.segment_chunks = 8;
    return p;
  }
};

TEST_P(EmulatedSegmentsGiven, ByPortablePlansMatchOracle) {
  Problem p = problem();
  p.B = p.N = 2, p.T = 300;
  p.K = 36, p.V = 41, p.chunk_size = 16;
  const OperatorData data = make_data(p, Gate::mixed, 3);
  for (const Plan& plan : plans_with_all(device(), data.problem, 16)) {
    EXPECT_TRUE(std::ranges::none_of(plan, [](const PlanStep& step) {
      return step.template_id.find("_segment.") != std::string::npos;
    }));
    check(prepare(data.problem, plan), data);
  }
}

TEST_P(EmulatedSegmentsGiven, ByHopperPlansMatchOracle) {
  Problem p = problem();
  p.T = 1030, p.chunk_size = 64;
  const std::string id = p.op == "kda"    ? "kda_resume.hopper"
                         : p.op == "gdn2" ? "kda_fwd_h_o_resume.hopper"
                                          : "delta_resume.hopper";
  for (const Gate gate : {Gate::typical, Gate::fast}) {
    const OperatorData data = make_data(p, gate, 4);
    const auto plan = plan_with(device(), data.problem, id.c_str());
    if (p.op == "gated_delta_product") {
      EXPECT_FALSE(plan.has_value());
      return;
    }
    ASSERT_TRUE(plan.has_value());
    check(prepare(data.problem, *plan), data);
  }
}

INSTANTIATE_TEST_SUITE_P(, EmulatedSegmentsGiven,
                         ::testing::Values("delta_rule", "gated_delta_rule", "kda", "gdn2",
                                           "gated_delta_product"),
                         [](const auto& each) { return each.param; });

/// A long sequence beside many short ones: a hint of it has the default plan go by segments, and
/// neither it nor a hint that is wrong makes a result wrong.
class EmulatedHints : public EmulatedOperator {
 protected:
  EmulatedHints() { device_ = emulator::open_emulated_device(132); }
};

TEST_F(EmulatedHints, OfALongSequenceSplitItAndMatchOracle) {
  Lengths lengths(14, 30);
  lengths[1] = 0, lengths[3] = 4000;
  for (const char* const op : {"gated_delta_rule", "kda"}) {
    SCOPED_TRACE(op);
    Problem p = base({op, Pass::forward});
    p.H = 1, p.HV = 1, p.K = p.V = 64;
    p.packed = p.initial_state = true;
    OperatorData data = make_data(p, Gate::mixed, 5, lengths);
    const auto segment = [&] {
      return shape_of(default_plan(data.problem, device().impl().target())).SEG;
    };
    EXPECT_EQ(segment(), 0);
    for (const std::int64_t hint : {4000, 1 << 20}) {
      data.problem.seqlens_hint = hint;
      EXPECT_GT(segment(), 0);
      check(prepare(data.problem), data);
    }
  }
}

class EmulatedInvariance : public BatchInvariance<EmulatedOperator>,
                           public ::testing::WithParamInterface<OperatorPass> {
 protected:
  EmulatedInvariance() { device_ = emulator::open_emulated_device(132); }
};

/// By the kernels of a whole pass for Hopper, and by those of any GPU.
TEST_P(EmulatedInvariance, AloneInABatchAndInPieces) {
  const bool forward = GetParam().pass == Pass::forward;
  for (const Options options : {Options::wide, Options::few, Options::many}) {
    const Problem p = problem(GetParam(), options);
    const Lengths lengths =
        forward ? Lengths{37, 3, 64, 1, 100, 2, 65} : Lengths{3, 0, 1, 8, 2, 4, 1};
    expect_the_same_anywhere(p, lengths, full_suite() ? Order{0, 2, 4} : Order{2},
                             /*many=*/false);
    expect_the_same_in_pieces(p);
  }
}

std::vector<OperatorPass> invariant_passes() {
  std::vector<OperatorPass> all;
  for (const char* const op : {"delta_rule", "gated_delta_rule", "kda"})
    for (const Pass pass : {Pass::forward, Pass::recurrent}) all.push_back({op, pass});
  return all;
}

INSTANTIATE_TEST_SUITE_P(, EmulatedInvariance, ::testing::ValuesIn(invariant_passes()),
                         [](const auto& each) { return name_of(each.param); });

/// By the kernel for many states, of which each block takes several.
class EmulatedManyInvariance : public BatchInvariance<EmulatedOperator>,
                               public ::testing::WithParamInterface<std::string_view> {
 protected:
  EmulatedManyInvariance() { device_ = emulator::open_emulated_device(/*multiprocessors=*/3); }

  Operator prepare(const Problem& asked) override {
    Problem problem = asked;
    problem.batch_invariant = false;  // with it no plan may be named; the kernel does not know it
    return OperatorTest::prepare(problem, plan_with(device(), problem, "recurrent.hopper").value());
  }
};

TEST_P(EmulatedManyInvariance, AloneInABatchAndInPieces) {
  for (const Options options : {Options::wide, Options::many}) {
    Problem p = problem({std::string(GetParam()), Pass::recurrent}, options);
    p.H = 1, p.HV = 2, p.K = p.V = 64;
    expect_the_same_anywhere(p, {3, 0, 1, 8, 2, 4, 1}, {0, 2, 4}, /*many=*/true);
    expect_the_same_in_pieces(p);
  }
}

INSTANTIATE_TEST_SUITE_P(, EmulatedManyInvariance,
                         ::testing::Values("delta_rule", "gated_delta_rule", "kda", "gdn2"),
                         [](const auto& each) { return std::string(each.param); });

/// A stage's kernel for Hopper finds its tensors, the one behind its tensor map too, in the
/// workspace and among the caller's.
TEST_F(EmulatedOperator, PlansMayHaveKernelsOfTensorCopies) {
  Problem p = base({"gated_delta_rule", Pass::forward});
  p.H = 1, p.HV = 2, p.K = 64, p.V = 32;
  p.packed = p.use_qk_l2norm = true;
  const OperatorData data = make_data(p, Gate::typical, 4, {70, 0, 33});
  const auto plan = plan_with(device(), data.problem, "scaled_dot_kkt.hopper");
  ASSERT_TRUE(plan.has_value());
  check_strided_rows(prepare(data.problem, *plan), data);
}

/// The template that has the whole forward pass of a problem in one kernel for Hopper; of gdn2, and
/// of kda in fp16 or with wide keys, that for prepared chunks.
std::string_view one_kernel_of(const Problem& p) {
  if (p.op == "gdn2" || (p.op == "kda" && (p.dtype == DType::fp16 || p.K > 128)))
    return "kda_fwd_h_o.hopper";
  return p.op == "kda" ? "kda_forward.hopper" : "delta_forward.hopper";
}

/// Whole forward passes in one kernel for Hopper, by name.
std::vector<OperatorCase> one_kernel_cases() {
  std::vector<OperatorCase> all;
  const auto add = [&](std::string name, std::string op, Gate gate, const Lengths& lengths,
                       const std::function<void(Problem&)>& change, DType dtype = DType::bf16) {
    OperatorCase one{std::move(name), base({std::move(op), Pass::forward}, dtype), gate, lengths};
    one.problem.packed = !lengths.empty();
    change(one.problem);
    all.push_back(std::move(one));
  };
  for (const std::int64_t T : {1, 64, 100, 330})
    add(fmt::format("Tokens{}", T), "gated_delta_rule", Gate::typical, {}, [&](Problem& p) {
      p.T = T, p.K = 128;
      p.initial_state = T != 64;
      p.state_v_first = T == 100;
    });
  add("EveryOption", "gated_delta_rule", Gate::typical, {130, 0, 33, 64, 1}, [](Problem& p) {
    p.H = 1, p.HV = 3, p.K = 128, p.V = 128;
    p.use_qk_l2norm = p.use_beta_sigmoid = p.use_gate_in_kernel = true;
    p.has_A_log = p.has_dt_bias = p.initial_state = true;
  });
  add(
      "Fp16", "gated_delta_rule", Gate::mixed, {},
      [](Problem& p) {
        p.T = 200;
        p.use_qk_l2norm = true;
      },
      DType::fp16);
  for (const std::int64_t T : {1, 130})
    add(fmt::format("WideKeysTokens{}", T), "gated_delta_rule", Gate::typical, {}, [&](Problem& p) {
      p.T = T, p.K = 256;
      p.initial_state = T != 64;
    });
  add(
      "WideKeysEveryOption", "gated_delta_rule", Gate::mixed, {130, 0, 33, 64, 1},
      [](Problem& p) {
        p.H = 1, p.HV = 2, p.K = 256, p.V = 128;
        p.use_qk_l2norm = p.use_beta_sigmoid = p.use_gate_in_kernel = true;
        p.has_A_log = p.has_dt_bias = p.initial_state = p.state_v_first = true;
      },
      DType::fp16);
  add("WideKeysNoGate", "delta_rule", Gate::typical, {90, 128}, [](Problem& p) {
    p.K = 256;
    p.initial_state = true;
  });
  add("TwoStates", "gated_delta_rule", Gate::typical, {200, 64}, [](Problem& p) {
    p.K = 64, p.V = 128;
    p.initial_state = true;
  });
  add("NoDecay", "gated_delta_rule", Gate::zero, {}, [](Problem& p) { p.T = 700, p.K = 128; });
  add("NoGate", "delta_rule", Gate::typical, {90, 128}, [](Problem& p) {
    p.K = 128;
    p.use_qk_l2norm = p.initial_state = p.state_v_first = true;
  });
  for (const std::int64_t T : {1, 16, 330})
    add(fmt::format("KdaTokens{}", T), "kda", Gate::typical, {}, [&](Problem& p) {
      p.T = T, p.K = 128;
      p.initial_state = T != 16;
      p.state_v_first = T == 1;
    });
  add("KdaBounded", "kda", Gate::typical, {130, 0, 33, 64, 1}, [](Problem& p) {
    p.H = 1, p.HV = 3, p.K = 128, p.V = 128;
    p.use_qk_l2norm = p.use_beta_sigmoid = p.use_gate_in_kernel = true;
    p.has_A_log = p.has_dt_bias = p.initial_state = true;
    p.lower_bound = -5.0F;
    p.g_dtype = DType::bf16;
  });
  add("KdaGateInKernel", "kda", Gate::typical, {},
      [](Problem& p) { p.T = 100, p.use_gate_in_kernel = p.has_A_log = true; });
  add("KdaSteep", "kda", Gate::very_negative, {90, 128},
      [](Problem& p) { p.K = 128, p.initial_state = p.use_qk_l2norm = true; });
  add("KdaMixed", "kda", Gate::mixed, {70, 33}, [](Problem& p) {
    p.use_qk_l2norm = true;
    p.g_dtype = DType::fp16;
  });
  add("Gdn2", "gdn2", Gate::mixed, {70, 0, 130},
      [](Problem& p) { p.K = 128, p.initial_state = p.output_final_state = true; });
  add("Gdn2Bounded", "gdn2", Gate::typical, {130, 0, 33, 64, 1}, [](Problem& p) {
    p.H = 1, p.HV = 3, p.K = 128, p.V = 128;
    p.use_qk_l2norm = p.use_gate_in_kernel = p.has_A_log = p.has_dt_bias = true;
    p.initial_state = true;
    p.lower_bound = -5.0F;
    p.g_dtype = DType::bf16;
  });
  add("Gdn2Steep", "gdn2", Gate::very_negative, {90, 128},
      [](Problem& p) { p.K = 128, p.initial_state = p.use_qk_l2norm = true; });
  add(
      "Gdn2Fp16", "gdn2", Gate::mixed, {70, 33}, [](Problem& p) { p.use_qk_l2norm = true; },
      DType::fp16);
  add(
      "KdaMixedFp16", "kda", Gate::mixed, {70, 33},
      [](Problem& p) {
        p.use_qk_l2norm = true;
        p.g_dtype = DType::fp16;
      },
      DType::fp16);
  add("KdaNoDecay", "kda", Gate::zero, {}, [](Problem& p) { p.T = 500, p.K = 128; });
  for (const std::int64_t T : {1, 330})
    add(fmt::format("KdaWideKeysTokens{}", T), "kda", Gate::typical, {}, [&](Problem& p) {
      p.T = T, p.K = 256;
      p.initial_state = T != 1;
    });
  add("KdaWideKeysBounded", "kda", Gate::typical, {130, 0, 33, 64, 1}, [](Problem& p) {
    p.H = 1, p.HV = 2, p.K = 256, p.V = 128;
    p.use_qk_l2norm = p.use_beta_sigmoid = p.use_gate_in_kernel = true;
    p.has_A_log = p.has_dt_bias = p.initial_state = p.state_v_first = true;
    p.lower_bound = -5.0F;
    p.g_dtype = DType::bf16;
  });
  add(
      "KdaWideKeysMixedFp16", "kda", Gate::mixed, {70, 33},
      [](Problem& p) { p.K = 256, p.use_qk_l2norm = p.initial_state = true; }, DType::fp16);
  add("Gdn2WideKeys", "gdn2", Gate::mixed, {70, 0, 130},
      [](Problem& p) { p.K = 256, p.initial_state = p.output_final_state = true; });
  return all;
}

/// The plan with two states of 64 columns in one block.
Plan in_wide_blocks(Plan plan) {
  for (PlanStep& step : plan) {
    if (!step.config.contains("num_stages")) continue;
    step.config.set("BV", std::int64_t{128});
    step.config.set("num_stages", std::int64_t{step.template_id == "kda_forward.hopper" ? 9 : 2});
  }
  return plan;
}

class EmulatedOneKernel : public EmulatedOperator,
                          public ::testing::WithParamInterface<OperatorCase> {};

TEST_P(EmulatedOneKernel, MatchesOracle) {
  const OperatorCase& one = GetParam();
  const OperatorData data = make_data(one.problem, one.gate, 5, one.lengths);
  const auto plan = plan_with(device(), data.problem, one_kernel_of(one.problem));
  ASSERT_TRUE(plan.has_value());
  check(prepare(data.problem, *plan), data);
  if (one.problem.op == "kda" || one.problem.op == "gdn2" || one.problem.V % 128 != 0 ||
      one.problem.K > 128)
    return;
  check(prepare(data.problem, in_wide_blocks(*plan)), data);
}

/// log2 of the decay of token `t` in a packed sequence of its own kind.
double log2_decay(std::size_t sequence, std::int64_t t) {
  const std::int64_t chunk = t / 64;
  switch (sequence) {
    case 0: return -12.0 / 64;                              // two chunks owe exactly the bound
    case 1: return t == 129 ? -0.5 : -12.0 / 64;            // and a little more
    case 2: return chunk % 3 == 2 ? -7.5 : -0.18;           // nothing is left of steep chunks
    case 3: return t % 97 == 63 ? -1443.0 : -0.01;          // weak gates with one of -1000
    case 4: return chunk < 2 ? -0.18 : t == 128 ? -90 : 0;  // a debt, a jump, and no decay
    case 5: return -0.35;                                   // one chunk owes nearly the bound
    default: return chunk % 2 == 0 ? 0.0 : -0.05;           // of which little is ever owed
  }
}

/// A state of a block of 128 columns decays when 2^24 is owed, and at the end: every way to get
/// there, in one chunk, at its bound, past all floats, and never.
TEST_F(EmulatedOperator, OneKernelPaysDecayThatItOwes) {
  const Lengths lengths = {330, 384, 450, 400, 330, 63, 640, 128};
  for (const DType dtype : {DType::bf16, DType::fp16}) {
    for (const bool norms : {false, true}) {
      Problem p = base({"gated_delta_rule", Pass::forward}, dtype);
      p.H = p.HV = 1, p.V = 128;
      p.packed = p.initial_state = true;
      p.use_qk_l2norm = norms;
      OperatorData data = make_data(p, Gate::zero, 11, lengths);
      HostTensor& g = data.tensors.at("g");
      std::int64_t token = 0;
      for (std::size_t i = 0; i < lengths.size(); ++i)
        for (std::int64_t t = 0; t < lengths[i]; ++t)
          g.set(token++, log2_decay(i, t) * std::numbers::ln2);
      ASSERT_EQ(token, g.elements());
      const auto plan = plan_with(device(), data.problem, one_kernel_of(data.problem));
      ASSERT_TRUE(plan.has_value());
      // Wide blocks have no registers for fp16 rows with norms.
      const bool wide = dtype == DType::bf16 || !norms;
      check(prepare(data.problem, wide ? in_wide_blocks(*plan) : *plan), data);
    }
  }
}

/// The norm of o in the forward kernel: blocks that split sequences, sequences that end inside a
/// chunk, empty ones, strided rows of the gate.
TEST_F(EmulatedOperator, OneKernelNormalizesOutputs) {
  for (const Activation activation : {Activation::silu, Activation::sigmoid})
    for (const Gate gate : {Gate::typical, Gate::very_negative}) {
      const bool all = (activation == Activation::silu) == (gate == Gate::typical);
      SCOPED_TRACE(to_string(gate) + (all ? " all" : ""));
      Problem p = base({all ? "gated_delta_rule" : "delta_rule", Pass::forward});
      p.K = all ? 128 : 64, p.V = 128;
      p.use_qk_l2norm = p.initial_state = p.output_final_state = p.packed = all;
      p.T = 70;
      p.output_norm = activation;
      const OperatorData data =
          make_data(p, gate, 19, all ? Lengths{330, 0, 64, 2100, 1} : Lengths{});
      const auto plan = plan_with(device(), data.problem, "delta_forward_norm.hopper");
      ASSERT_TRUE(plan.has_value());
      check_strided_rows(prepare(data.problem, *plan), data);
    }
}

/// The same with a gate a channel, bounded and not: shares of sequences and their overlaps, a last
/// slice of one token.
TEST_F(EmulatedOperator, OneKernelOfAGateAChannelNormalizesOutputs) {
  for (const Activation activation : {Activation::silu, Activation::sigmoid})
    for (const Gate gate : {Gate::typical, Gate::very_negative, Gate::zero}) {
      const bool bounded = (activation == Activation::silu) == (gate == Gate::typical);
      SCOPED_TRACE(to_string(gate) + " " + std::string(to_string(activation)));
      Problem p = base({"kda", Pass::forward});
      p.K = bounded ? 128 : 64, p.V = 128;
      p.use_qk_l2norm = p.use_beta_sigmoid = p.use_gate_in_kernel = p.has_A_log = bounded;
      if (bounded) p.lower_bound = -5.0F;
      p.initial_state = p.output_final_state = p.packed = bounded;
      p.T = 81;
      p.output_norm = activation;
      const OperatorData data =
          make_data(p, gate, 21, bounded ? Lengths{330, 0, 64, 1100, 1} : Lengths{});
      const auto plan = plan_with(device(), data.problem, "kda_forward_norm.hopper");
      ASSERT_TRUE(plan.has_value());
      check_strided_rows(prepare(data.problem, *plan), data);
    }
}

/// Null slots of a pool among them: their rows are 0 whatever their gates hold.
TEST_F(EmulatedOperator, OneKernelOfAGateAChannelNormalizesOutputsOfAPool) {
  for (const bool checkpoints : {false, true}) {
    SCOPED_TRACE(checkpoints);
    Problem p = base({"kda", Pass::forward});
    p.H = 1, p.HV = 2, p.K = p.V = 128;
    p.g_dtype = DType::bf16;
    p.output_norm = Activation::sigmoid;
    if (checkpoints) p.checkpoint_every = 64;
    const OperatorData data = pool_data(p, Gate::typical, 34, {70, 3, 130, 17, 1, 64, 0, 33});
    const auto plan = plan_with(device(), data.problem, "kda_forward_norm.hopper");
    ASSERT_TRUE(plan.has_value());
    check_strided_rows(prepare(data.problem, *plan), data);
  }
}

/// Strided rows of tokens, as slices of a projection have them: one sequence after the other of a
/// batch, sequences that end inside a chunk.
TEST_F(EmulatedOperator, OneKernelTakesStridedRows) {
  for (const char* const op : {"gated_delta_rule", "delta_rule", "kda", "gdn2"}) {
    Problem p = base({op, Pass::forward});
    p.B = p.N = 2, p.T = 70;
    p.K = 128, p.V = 128;
    p.use_qk_l2norm = p.initial_state = true;
    for (const Lengths& lengths : {Lengths{}, Lengths{90, 0, 33}}) {
      p.packed = !lengths.empty();
      const OperatorData data = make_data(p, Gate::typical, 6, lengths);
      const auto plan = plan_with(device(), data.problem, one_kernel_of(data.problem));
      ASSERT_TRUE(plan.has_value());
      check_strided_rows(prepare(data.problem, *plan), data);
    }
  }
}

/// States in place, in strided slots, by every template of a plan for Hopper.
class EmulatedPool : public EmulatedOperator,
                     public ::testing::WithParamInterface<std::string_view> {};

TEST_P(EmulatedPool, OfHopperPlans) {
  Problem p = base({std::string(GetParam()), Pass::forward});
  p.H = 1, p.HV = 2;
  // In the short suite operators take turns with the states of 16 bits.
  const auto op = std::find(operators().begin(), operators().end(), GetParam());
  const bool odd = (op - operators().begin()) % 2 != 0;
  for (const DType states : {DType::fp32, DType::bf16, DType::fp16}) {
    if (!full_suite() && states == (odd ? DType::bf16 : DType::fp16)) continue;
    const bool v_first = states != DType::fp32;
    p.state_v_first = v_first;
    p.state_dtype = states;
    p.index_dtype = v_first ? DType::int64 : DType::int32;
    const OperatorData data = pool_data(p, Gate::typical, 32, {70, 3, 130, 17, 1, 64, 0, 33});
    for (const Plan& plan : plans_with_all(device(), data.problem, 64))
      check_strided_rows(prepare(data.problem, plan), data);
  }
}

TEST_P(EmulatedPool, OfDecoding) {
  const Problem p = base({std::string(GetParam()), Pass::recurrent});
  const OperatorData data = pool_data(p, Gate::typical, 33, {2, 1, 3, 1, 1, 4, 0, 1});
  check_strided_rows(prepare(data.problem), data);
}

INSTANTIATE_TEST_SUITE_P(, EmulatedPool, ::testing::ValuesIn(operators()),
                         [](const auto& each) { return std::string(each.param); });

/// States of 8 bits with their scales, in a slot for each token.
class EmulatedFloat8 : public EmulatedOperator,
                       public ::testing::WithParamInterface<std::string_view> {};

TEST_P(EmulatedFloat8, OfEachToken) {
  Problem p = base({std::string(GetParam()), Pass::recurrent});
  p.H = 1, p.HV = 2, p.K = 36, p.V = 40;
  p.output_final_state = false;
  p.inplace_state = p.state_index = p.has_initial_state = p.packed = true;
  p.state_slots = 60, p.index_columns = 6, p.state_dtype = DType::float8_e4m3;
  const OperatorData data = make_data(p, Gate::typical, 40, {2, 8, 1, 0, 5, 3, 7, 6});
  check_strided_rows(prepare(data.problem), data);
}

INSTANTIATE_TEST_SUITE_P(, EmulatedFloat8,
                         ::testing::Values("delta_rule", "gated_delta_rule", "kda"),
                         [](const auto& each) { return std::string(each.param); });

/// Drafts to verify by the portable kernel: a slot for each token, then a tree; counts, indices and
/// parents out of range among them.
class EmulatedDrafts : public EmulatedOperator,
                       public ::testing::WithParamInterface<std::string_view> {};

TEST_P(EmulatedDrafts, AreVerified) {
  for (const bool tree : {false, true})
    for (const bool v_first : {false, true})
      for (const std::uint64_t seed : {37U, 38U, 39U}) {
        SCOPED_TRACE(fmt::format("tree={} v_first={} seed={}", tree, v_first, seed));
        Problem p = base({std::string(GetParam()), Pass::recurrent});
        p.H = 1, p.HV = 2, p.K = 36, p.V = 40;
        p.initial_state = p.output_final_state = false;
        p.inplace_state = p.state_index = p.has_initial_state = p.packed = true;
        p.state_slots = 60, p.index_columns = 6;
        p.state_v_first = p.null_slot_zero = v_first;
        p.state_dtype = v_first ? DType::bf16 : DType::fp32;
        p.index_dtype = v_first ? DType::int64 : DType::int32;
        if (tree) {
          p.intermediate_rows = 8, p.draft_tokens = 7;
          p.disable_state_update = p.parent = true;
        }
        const OperatorData data = make_data(p, Gate::typical, seed, {2, 8, 1, 0, 5, 3, 7, 6});
        check_strided_rows(prepare(data.problem), data);
      }
}

/// Rows of o are normalized over several blocks of columns, those of null tokens stay 0.
TEST_P(EmulatedDrafts, HaveNormalizedOutputs) {
  for (const bool tree : {false, true}) {
    SCOPED_TRACE(tree);
    Problem p = base({std::string(GetParam()), Pass::recurrent}, tree ? DType::bf16 : DType::fp32);
    p.H = 1, p.HV = 2, p.K = 36, p.V = 300;
    p.initial_state = p.output_final_state = false;
    p.inplace_state = p.state_index = p.has_initial_state = p.packed = true;
    p.state_slots = 60, p.index_columns = 6;
    p.output_norm = tree ? Activation::silu : Activation::sigmoid;
    if (tree) {
      p.intermediate_rows = 8, p.draft_tokens = 7;
      p.disable_state_update = p.parent = p.state_v_first = true;
    }
    const OperatorData data = make_data(p, Gate::typical, 44, {2, 8, 1, 0, 5, 3, 7, 6});
    check_strided_rows(prepare(data.problem), data);
  }
}

/// A null token between two others, whose rows of o are normalized with all columns in a block.
TEST_P(EmulatedDrafts, NormalizeOutputsBesideNullTokens) {
  Problem p = base({std::string(GetParam()), Pass::recurrent});
  p.H = 1, p.HV = 2, p.K = 32, p.V = 64, p.B = p.N = 2, p.T = 6;
  p.initial_state = p.output_final_state = false;
  p.inplace_state = p.state_index = p.parent = p.disable_state_update = true;
  p.state_slots = 4, p.intermediate_rows = 2;
  p.output_norm = Activation::silu;
  OperatorData data = make_data(p, Gate::typical, 44);
  data.tensors["intermediate_index"] = HostTensor(p.index_dtype, {2}, {0, 1});
  data.tensors["state_index"] = HostTensor(p.index_dtype, {2}, {1, 2});
  // 99 is no token's number: the row is a null token.
  data.tensors["parent"] =
      HostTensor(p.index_dtype, {2, 6}, {-1, 99, 0, 99, 2, 4, -1, 99, -1, 99, 0, 0});
  for (const Plan& plan : plans_with_all(device(), data.problem, 64))
    check(prepare(data.problem, plan), data);
}

/// With all columns of a state in a block at once, by either kernel, and with some after the
/// others, of a sequence that is longer than what two walks are for.
TEST_P(EmulatedDrafts, NormalizeOutputsOfAnySize) {
  for (const auto& [V, T] : {std::pair{64, 3}, {300, 3}, {300, 260}}) {
    Problem p = base({std::string(GetParam()), Pass::recurrent}, DType::fp16);
    p.B = p.N = p.H = 1, p.HV = 2, p.K = 36, p.V = V, p.T = T;
    for (const OperatorData& data : outputs_of_any_size(p))
      for (const Plan& plan : plans_with_all(device(), data.problem, 64))
        check(prepare(data.problem, plan), data);
  }
}

INSTANTIATE_TEST_SUITE_P(, EmulatedDrafts,
                         ::testing::Values("delta_rule", "gated_delta_rule", "kda"),
                         [](const auto& each) { return std::string(each.param); });

class EmulatedNorms : public EmulatedOperator,
                      public ::testing::WithParamInterface<std::string_view> {};

/// The gradients, by any kernel, with empty sequences.
TEST_P(EmulatedNorms, HaveGradients) {
  Problem p = base({std::string(GetParam()), Pass::backward});
  p.H = 1, p.HV = 2, p.K = p.V = 64;
  p.output_norm = Activation::silu;
  p.initial_state = p.packed = true;
  const OperatorData data = make_data(p, Gate::mixed, 45, {5, 70, 1, 0, 64, 3, 0, 30});
  for (const Plan& plan : plans_with_all(device(), data.problem, 64))
    check_strided_rows(emulator::prepare(device(), data.problem, plan), data);
}

/// By any kernel, with null sequences.
TEST_P(EmulatedNorms, AreOfEveryOperator) {
  for (const Pass pass : {Pass::forward, Pass::recurrent}) {
    SCOPED_TRACE(to_string(pass));
    Problem p = base({std::string(GetParam()), pass});
    p.H = 1, p.HV = 2, p.K = p.V = 64;
    p.output_norm = pass == Pass::forward ? Activation::silu : Activation::sigmoid;
    const Lengths lengths = pass == Pass::forward ? Lengths{5, 70, 1, 0, 64, 3, 7, 30}
                                                  : Lengths{2, 8, 1, 0, 5, 3, 7, 6};
    const OperatorData data = pool_data(p, Gate::mixed, 45, lengths);
    for (const Plan& plan : plans_with_all(device(), data.problem, 64))
      check_strided_rows(emulator::prepare(device(), data.problem, plan), data);
  }
}

/// Quantized behind any kernel, with null sequences.
TEST_P(EmulatedNorms, AreQuantized) {
  for (const Pass pass : {Pass::forward, Pass::recurrent}) {
    Problem p = base({std::string(GetParam()), pass});
    p.H = 1, p.HV = 2, p.K = 64, p.V = 128;
    p.output_norm = Activation::silu;
    p.output_dtype = DType::float8_e4m3;
    p.output_scale_tokens_last = pass == Pass::forward;
    const Lengths lengths = pass == Pass::forward ? Lengths{5, 70, 1, 0, 64, 3, 7, 30}
                                                  : Lengths{2, 8, 1, 0, 5, 3, 7, 6};
    const OperatorData data = pool_data(p, Gate::mixed, 47, lengths);
    for (const Plan& plan : plans_with_all(device(), data.problem, 64))
      check_strided_rows(emulator::prepare(device(), data.problem, plan), data);
  }
}

/// Rows convolved in front of any kernel, and their gradients behind it, with sequences shorter
/// than the window.
TEST_P(EmulatedNorms, BehindConvolvedRows) {
  for (const Pass pass : {Pass::forward, Pass::backward, Pass::recurrent}) {
    Problem p = base({std::string(GetParam()), pass});
    p.H = 1, p.HV = 2, p.K = p.V = 64;
    p.output_norm = Activation::silu;
    p.short_conv = 4;
    p.packed = p.has_conv_bias = p.initial_conv_state = p.output_conv_state = true;
    const OperatorData data =
        make_data(p, Gate::mixed, 46,
                  pass == Pass::recurrent ? Lengths{2, 8, 1, 0, 5, 3, 0, 6}
                                          : Lengths{5, 70, 1, 0, 64, 3, 0, 30});
    for (const Plan& plan : plans_with_all(device(), data.problem, 64))
      check_strided_rows(emulator::prepare(device(), data.problem, plan), data);
  }
}

/// The same with windows in slots of a pool that are strided.
TEST_P(EmulatedNorms, BehindRowsConvolvedFromAPool) {
  for (const Pass pass : {Pass::forward, Pass::recurrent}) {
    Problem p = base({std::string(GetParam()), pass});
    p.H = 1, p.HV = 2, p.K = p.V = 64;
    p.short_conv = 4;
    p.inplace_conv_state = true;
    p.conv_tokens_first = pass == Pass::recurrent;
    const OperatorData data =
        pool_data(p, Gate::mixed, 48,
                  pass == Pass::recurrent ? Lengths{2, 8, 1, 0, 5, 3, 0, 6}
                                          : Lengths{5, 56, 2, 0, 64, 3, 0, 30});
    for (const Plan& plan : plans_with_all(device(), data.problem, 64))
      check_strided_rows(emulator::prepare(device(), data.problem, plan), data);
  }
}

/// Windows in front of drafts, in both layouts and each dtype of rows.
TEST_P(EmulatedNorms, BehindConvolvedDrafts) {
  const Problem plain = base({std::string(GetParam()), Pass::recurrent});
  const OperatorFacts& facts = find_operator(GetParam())->facts();
  if (!facts.beta || facts.householder) GTEST_SKIP() << "it verifies no drafts";
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32}) {
    Problem p = plain;
    p.H = 1, p.HV = 2, p.K = 36, p.V = 64;
    p.dtype = p.beta_dtype = dtype;
    p.initial_state = p.output_final_state = false;
    p.short_conv = dtype == DType::fp16 ? 3 : 4;
    p.inplace_state = p.inplace_conv_state = p.state_index = p.packed = true;
    p.has_initial_state = dtype == DType::fp32;
    p.conv_tokens_first = dtype != DType::bf16;
    p.index_columns = 6, p.state_slots = 60;
    if (dtype == DType::fp16) p.conv_columns = 9;
    const auto check = [&] {
      const OperatorData data = make_data(p, Gate::mixed, 49, {2, 8, 1, 0, 5, 3, 7, 6});
      for (const Plan& plan : plans_with_all(device(), data.problem, 64))
        check_strided_rows(emulator::prepare(device(), data.problem, plan), data);
    };
    check();
    p.intermediate_rows = 8, p.draft_tokens = 7;
    check();
    p.parent = p.disable_state_update = true;
    check();
  }
}

INSTANTIATE_TEST_SUITE_P(, EmulatedNorms,
                         ::testing::ValuesIn(operators().begin(), operators().end()),
                         [](const auto& each) { return std::string(each.param); });

/// Pools by the kernel for many states, of which each block takes several: in float8 with scales,
/// with a slot or a row of intermediate_states for each token.
class EmulatedManyStates : public EmulatedOperator,
                           public ::testing::WithParamInterface<std::string_view> {
 protected:
  EmulatedManyStates() { device_ = emulator::open_emulated_device(/*multiprocessors=*/3); }

  Problem pool() const {
    Problem p = base({std::string(GetParam()), Pass::recurrent});
    p.H = 1, p.HV = 2, p.K = p.V = 64;
    p.initial_state = p.output_final_state = false;
    p.inplace_state = p.state_index = p.has_initial_state = p.packed = true;
    p.state_slots = 60;
    return p;
  }
  void check_with_plan(const OperatorData& data) {
    const auto plan = plan_with(device(), data.problem, "recurrent.hopper");
    ASSERT_TRUE(plan.has_value());
    check_strided_rows(prepare(data.problem, *plan), data);
  }
};

TEST_P(EmulatedManyStates, InFloat8) {
  for (const DType type : {DType::float8_e4m3, DType::float8_e5m2}) {
    Problem p = pool();
    p.state_dtype = type;
    p.state_v_first = type == DType::float8_e5m2;
    check_with_plan(make_data(p, Gate::typical, 41, {2, 8, 1, 0, 5, 3, 7, 6}));
  }
}

TEST_P(EmulatedManyStates, OfEachToken) {
  for (const bool columns : {false, true}) {
    Problem p = pool();
    p.state_dtype = columns ? DType::bf16 : DType::fp32;
    p.state_v_first = p.null_slot_zero = columns;
    if (columns)
      p.index_columns = 6;
    else
      p.intermediate_rows = 8, p.draft_tokens = 7;
    check_with_plan(make_data(p, Gate::typical, 42, {2, 8, 1, 0, 5, 3, 7, 6}));
  }
}

TEST_P(EmulatedManyStates, WithNormalizedOutputs) {
  for (const bool columns : {false, true}) {
    Problem p = pool();
    p.dtype = p.beta_dtype = columns ? DType::bf16 : DType::fp32;
    p.K = 36, p.V = columns ? 128 : 64;
    p.state_v_first = columns;
    p.output_norm = columns ? Activation::silu : Activation::sigmoid;
    if (columns) p.index_columns = 6;
    check_with_plan(make_data(p, Gate::typical, 45, {2, 8, 1, 0, 5, 3, 7, 6}));
  }
}

/// Rows that the same launch convolves, from windows outside of a pool and in its slots, and with
/// the bits of two launches.
TEST_P(EmulatedManyStates, BehindConvolvedRows) {
  for (const std::int64_t width : {2, 3, 4})
    for (const bool in_place : {false, true}) {
      SCOPED_TRACE(fmt::format("width={} in_place={}", width, in_place));
      Problem p = pool();
      p.dtype = p.beta_dtype = width == 3 ? DType::fp16 : DType::bf16;
      p.HV = 4, p.V = 128;
      p.short_conv = width;
      p.has_conv_bias = width != 3;
      p.conv_activation = width == 2 ? Activation::none : Activation::silu;
      if (width != 2) p.output_norm = Activation::silu;
      if (in_place) {
        p.inplace_conv_state = true;
        p.conv_tokens_first = width != 3;
        if (width != 2) p.conv_columns = 6;
      } else {
        p.inplace_state = p.state_index = p.has_initial_state = false;
        p.state_slots = 0;
        p.initial_state = p.initial_conv_state = width != 3;
        p.output_final_state = p.output_conv_state = true;
      }
      const OperatorData data = make_data(p, Gate::typical, 47, {2, 8, 1, 0, 5, 3, 1, 6});
      const auto one = plan_with(device(), data.problem, "recurrent_conv.hopper");
      ASSERT_TRUE(one.has_value());
      check_strided_rows(prepare(data.problem, *one), data);
      const auto two = plan_with(device(), data.problem, "recurrent.hopper");
      ASSERT_TRUE(two.has_value());
      const HostTensors outputs = run_operator(device(), prepare(data.problem, *one), data);
      const HostTensors wanted = run_operator(device(), prepare(data.problem, *two), data);
      for (const auto& [name, tensor] : wanted)
        EXPECT_TRUE(same_bytes(outputs.at(name), tensor)) << name;
    }
}

/// Whatever V is, the kernel is right or not legal.
TEST_P(EmulatedManyStates, OfAnyWidth) {
  int served = 0;
  for (const std::int64_t V : {8, 16, 32, 40, 48, 96, 192})
    for (const bool v_first : {false, true}) {
      SCOPED_TRACE(fmt::format("V={} v_first={}", V, v_first));
      Problem p = pool();
      p.V = V, p.state_v_first = v_first;
      const OperatorData data = make_data(p, Gate::typical, 46, {2, 1, 0, 3});
      const auto plan = plan_with(device(), data.problem, "recurrent.hopper");
      if (!plan) continue;
      ++served;
      check_strided_rows(prepare(data.problem, *plan), data);
    }
  EXPECT_GE(served, 2);
}

INSTANTIATE_TEST_SUITE_P(, EmulatedManyStates,
                         ::testing::Values("delta_rule", "gated_delta_rule", "kda"),
                         [](const auto& each) { return std::string(each.param); });

/// States inside sequences, by every template of a plan: at every 64 tokens, and of a pool's
/// sequences after so many tokens of each, most of them inside a chunk. Both meet both kinds of
/// gates and both orders of states; in the short suite those of one gate a head and of none, which
/// have the kernels in common, share these out.
class EmulatedCheckpoints : public EmulatedOperator,
                            public ::testing::WithParamInterface<std::string_view> {
 protected:
  void check_plans(Problem p, std::int64_t chunk_size, const Lengths& lengths) {
    p.packed = p.initial_state = p.use_qk_l2norm = true;
    for (const bool offsets : {false, true}) {
      p.checkpoint_offsets = offsets;
      p.checkpoint_every = offsets ? 0 : 64;
      p.state_dtype = offsets ? DType::bf16 : DType::fp32;
      for (const Gate gate : {Gate::typical, Gate::very_negative}) {
        p.fp32_checkpoints = offsets && gate == Gate::typical;
        p.state_v_first = offsets == (gate == Gate::typical);
        const bool scalar = gate_kind(p) == GateKind::scalar;
        if (!full_suite() && gate_kind(p) != GateKind::vector &&
            p.state_v_first != (scalar == (chunk_size == 64)))
          continue;
        const OperatorData data =
            offsets ? pool_data(p, gate, 35, lengths) : make_data(p, gate, 36, lengths);
        for (Plan plan : plans_with_all(device(), data.problem, chunk_size)) {
          for (PlanStep& step : plan)
            if (step.config.contains("SEG")) step.config.set("SEG", std::int64_t{8});
          check_strided_rows(prepare(data.problem, plan), data);
        }
      }
    }
  }
};

TEST_P(EmulatedCheckpoints, OfPortablePlans) {
  Problem p = base({std::string(GetParam()), Pass::forward});
  p.H = 1, p.HV = 2, p.K = 36, p.V = 40;
  check_plans(p, 32, {290, 3, 133, 17, 1, 64, 0, 96});
}

TEST_P(EmulatedCheckpoints, OfHopperPlans) {
  Problem p = base({std::string(GetParam()), Pass::forward});
  p.H = 1, p.HV = 2;
  check_plans(p, 64, {530, 3, 130, 17, 1, 64, 0, 96});
}

INSTANTIATE_TEST_SUITE_P(, EmulatedCheckpoints,
                         ::testing::Values("delta_rule", "gated_delta_rule", "kda"),
                         [](const auto& each) { return std::string(each.param); });

/// Gradients of gates that are as small as fp32's resolution beside terms of their sums that
/// cancel: of rows of one token, and of what a chunk's last token tells the state that leaves it.
TEST_F(EmulatedOperator, GradientsOfGatesOfFastDecay) {
  for (const auto& [op, steps] : {std::pair{"gated_delta_rule", 1},
                                  {"gated_delta_product", 2},
                                  {"gated_delta_product", 3},
                                  {"kda", 1},
                                  {"gdn2", 1}})
    for (const DType dtype : {DType::bf16, DType::fp32})
      for (const std::int64_t chunk_size : {16, 64}) {
        if (!full_suite() && (chunk_size == 64) != (dtype == DType::bf16)) continue;
        Problem p = base({op, Pass::backward}, dtype);
        p.H = 1, p.HV = 2, p.num_householder = steps;
        p.packed = p.initial_state = true;
        p.use_qk_l2norm = chunk_size == 64;
        p.use_beta_sigmoid = steps == 2;
        const OperatorData data = make_data(p, Gate::fast, 6, {70, 0, 33, 1});
        for (const Plan& plan : plans_with_all(device(), data.problem, chunk_size))
          check(prepare(data.problem, plan), data);
      }
}

/// By every template there is for a pass.
TEST_F(EmulatedOperator, SaturatedGates) {
  for (const char* const op : {"gated_delta_rule", "kda"})
    for (const Pass pass : {Pass::forward, Pass::backward, Pass::recurrent}) {
      Problem p = base({op, pass});
      p.H = 1, p.HV = 2, p.has_dt_bias = true;
      if (pass != Pass::recurrent) p.T = 70;
      for (const OperatorData& data : saturated_gates(p))
        for (const Plan& plan : plans_with_all(device(), data.problem, 64))
          check(prepare(data.problem, plan), data);
    }
}

class EmulatedPasses : public EmulatedOperator,
                       public ::testing::WithParamInterface<OperatorPass> {};

TEST_P(EmulatedPasses, TakeStridedRows) {
  Problem p = base(GetParam());
  p.V = 40;
  p.B = p.N = 2, p.T = 20;
  const OperatorData batch = make_data(p, Gate::typical, 8);
  check_strided_rows(prepare(batch.problem), batch);
}

/// By every template there is for a pass.
TEST_P(EmulatedPasses, TakeStridedRowsByEveryPlan) {
  Problem p = base(GetParam());
  p.K = 36, p.V = 40;
  p.packed = p.initial_state = p.use_qk_l2norm = true;
  p.use_gate_in_kernel = p.has_dt_bias = gate_kind(p) != GateKind::none;
  const OperatorData data = make_data(p, Gate::typical, 7, {20, 0, 17});
  for (const Plan& plan : plans_with_all(device(), data.problem, 16))
    check_strided_rows(prepare(data.problem, plan), data);
}

/// The same of chunks that Hopper's templates take.
class EmulatedHopperPlans : public EmulatedOperator,
                            public ::testing::WithParamInterface<std::string_view> {};

TEST_P(EmulatedHopperPlans, MatchOracle) {
  Problem p = base({std::string(GetParam()), Pass::forward});
  p.H = 1, p.HV = 2;
  p.packed = p.initial_state = p.use_qk_l2norm = true;
  p.use_gate_in_kernel = p.has_dt_bias = gate_kind(p) != GateKind::none;
  const OperatorData data = make_data(p, Gate::typical, 12, {70, 0, 33});
  for (const Plan& plan : plans_with_all(device(), data.problem, 64))
    check(prepare(data.problem, plan), data);
}

INSTANTIATE_TEST_SUITE_P(, EmulatedHopperPlans,
                         ::testing::Values("delta_rule", "gated_delta_rule", "kda"),
                         [](const auto& test) { return std::string(test.param); });

class EmulatedDecode : public EmulatedOperator,
                       public ::testing::WithParamInterface<std::string_view> {};

TEST_P(EmulatedDecode, TakesStridedRows) {
  for (const bool packed : {false, true}) {
    Problem p = base({std::string(GetParam()), Pass::recurrent});
    p.packed = packed;
    if (!packed) p.T = 1;
    const OperatorData data = make_data(p, Gate::typical, 6, packed ? Lengths{2, 0, 3} : Lengths{});
    check_strided_rows(prepare(data.problem), data);
  }
}

/// Blocks that share a sequence out walk on from where older states no longer count: after a few
/// tokens, after many, or, where gates are weak or states grow, from the sequence's start.
class EmulatedShares : public EmulatedOperator {
 protected:
  EmulatedShares() { device_ = emulator::open_emulated_device(/*multiprocessors=*/6); }

  void expect_correct(Problem p, Gate gate, const Lengths& lengths = {}) {
    p.H = p.HV = 1;
    p.packed = !lengths.empty();
    p.initial_state = true;
    const OperatorData data = make_data(p, gate, 9, lengths);
    const auto plan = plan_with(device(), data.problem, one_kernel_of(p));
    ASSERT_TRUE(plan.has_value());
    const Operator op = prepare(data.problem, *plan);
    p.packed ? check_strided_rows(op, data) : check(op, data);
  }
};

TEST_F(EmulatedShares, OfOneDecayAHeadMatchOracle) {
  Problem p = base({"gated_delta_rule", Pass::forward});
  p.T = 6 * 32 * 64 + 70;
  for (const Gate gate : {Gate::typical, Gate::zero, Gate::very_negative}) {
    SCOPED_TRACE(to_string(gate));
    expect_correct(p, gate);
  }
  p.use_qk_l2norm = p.use_beta_sigmoid = true;
  expect_correct(p, Gate::mixed, {9000, 70});
}

TEST_F(EmulatedShares, OfOneDecayAChannelMatchOracle) {
  Problem p = base({"kda", Pass::forward});
  p.T = 3 * 16 * 64 + 70;
  for (const Gate gate : {Gate::typical, Gate::zero}) {
    SCOPED_TRACE(to_string(gate));
    expect_correct(p, gate);
  }
  p.T = 6 * 4 * 64 + 70;  // six shares of few chunks
  for (const Gate gate : {Gate::typical, Gate::mixed, Gate::very_negative, Gate::zero}) {
    SCOPED_TRACE("short shares, " + to_string(gate));
    expect_correct(p, gate);
  }
  p.use_qk_l2norm = p.use_beta_sigmoid = p.use_gate_in_kernel = p.has_A_log = true;
  p.lower_bound = -5.0F;
  expect_correct(p, Gate::typical, {2000, 70});
}

/// Walks whose blocks share sequences out.
constexpr std::string_view kSharedWalks[] = {"delta_forward.hopper", "kda_forward.hopper",
                                             "kda_fwd_h_o.hopper"};

Problem problem_of_walk(std::string_view walk) {
  Problem p = base({walk.starts_with("kda") ? "kda" : "gated_delta_rule", Pass::forward});
  p.H = p.HV = 1, p.V = 128;
  return p;
}

/// A head that does not decay gives each of two blocks half of the columns, and its others nothing;
/// a head beside it splits its tokens, with overlaps of different lengths.
TEST_F(EmulatedShares, OfWideBlocksMatchOracle) {
  for (const std::int64_t heads : {1, 2, 3}) {
    SCOPED_TRACE(heads);
    Problem p = problem_of_walk("delta_forward.hopper");
    p.H = p.HV = heads;
    p.T = 6 / heads * 16 * 64 + 70;
    p.initial_state = p.output_final_state = true;
    OperatorData data = make_data(p, Gate::typical, 15);
    HostTensor& g = data.tensors.at("g");
    for (std::int64_t i = 0; i < p.T; ++i) {
      g.set(i * heads, 0);  // of the first head; of the second slow first, then fast
      if (heads > 1 && 5 * i < 2 * p.T) g.set(i * heads + 1, 0.02 * g.at(i * heads + 1));
    }
    const auto plan = plan_with(device(), data.problem, "delta_forward.hopper");
    ASSERT_TRUE(plan.has_value());
    check(prepare(data.problem, in_wide_blocks(*plan)), data);
  }
}

/// Slots that sequences start from are where their final states go: the blocks of a sequence's
/// first share read what that of its last one overwrites.
TEST_F(EmulatedShares, UpdateStatesInPlace) {
  for (const std::string_view walk : kSharedWalks) {
    SCOPED_TRACE(walk);
    Problem p = problem_of_walk(walk);
    p.inplace_state = p.state_index = p.has_initial_state = true;
    p.output_final_state = false;
    p.packed = true;
    p.state_slots = 8;
    for (const Gate gate : {Gate::typical, Gate::zero, Gate::very_negative}) {
      SCOPED_TRACE(to_string(gate));
      for (const Lengths& lengths : {Lengths{6000}, Lengths{4100, 37}}) {
        // In the short suite each number of columns meets both gates and both lengths.
        const bool wide = (lengths.size() > 1) == (gate == Gate::zero);
        OperatorData data = make_data(p, gate, 14, lengths);
        for (std::int64_t n = 0; n < data.problem.N; ++n) {
          data.tensors.at("state_index").set(n, static_cast<double>(7 - n));
          data.tensors.at("has_initial_state").set(n, n == 0 ? 1 : 0);
        }
        const auto plan = plan_with(device(), data.problem, walk);
        ASSERT_TRUE(plan.has_value());
        if (full_suite() || !wide) check(prepare(data.problem, *plan), data);
        if (full_suite() || wide) check(prepare(data.problem, in_wide_blocks(*plan)), data);
      }
    }
  }
}

/// Each of the blocks of a sequence keeps the states inside its own share.
TEST_F(EmulatedShares, KeepStatesInsideSequences) {
  for (const std::string_view walk : kSharedWalks)
    for (const bool offsets : {false, true}) {
      SCOPED_TRACE(walk);
      Problem p = problem_of_walk(walk);
      p.packed = p.initial_state = true;
      p.checkpoint_offsets = offsets;
      p.checkpoint_every = offsets ? 0 : 192;
      for (const Gate gate : {Gate::typical, Gate::zero, Gate::very_negative}) {
        SCOPED_TRACE(to_string(gate));
        // In the short suite each number of columns meets both gates and both kinds of checkpoints.
        const bool wide = offsets == (gate == Gate::zero);
        OperatorData data = make_data(p, gate, 16, {4100, 37});
        if (offsets) data.tensors.at("checkpoint_offsets").set(0, 3056);
        const auto plan = plan_with(device(), data.problem, walk);
        ASSERT_TRUE(plan.has_value());
        if (full_suite() || !wide) check(prepare(data.problem, *plan), data);
        if (full_suite() || wide) check(prepare(data.problem, in_wide_blocks(*plan)), data);
      }
    }
}

/// Blocks that walk through prepared chunks begin one or two chunks in front of their shares where
/// nothing of older states can be left, and there alone: what is no number shows how far it went.
class EmulatedPreparedShares : public EmulatedShares,
                               public ::testing::WithParamInterface<std::int64_t> {
 protected:
  static constexpr std::int64_t kShare = 4 * 64;  ///< tokens

  /// gates are `steep` times as far from 0 as typical ones.
  OperatorData data_of(Problem p, double steep, const Lengths& lengths = {}) {
    p.H = p.HV = 1, p.K = GetParam();
    p.T = 6 * kShare;
    p.packed = !lengths.empty();
    p.initial_state = p.use_qk_l2norm = true;
    OperatorData data = make_data(p, Gate::typical, 17, lengths);
    HostTensor& g = data.tensors.at("g");
    for (std::int64_t i = 0; i < g.elements(); ++i) g.set(i, steep * g.at(i));
    return data;
  }
  Operator prepare_walk(const OperatorData& data, bool wide = false) {
    const Plan plan = plan_with(device(), data.problem, "kda_fwd_h_o.hopper").value();
    return prepare(data.problem, wide ? in_wide_blocks(plan) : plan);
  }
};

TEST_P(EmulatedPreparedShares, MatchOracle) {
  for (const double steep : {1.0, 6.0, 30.0})
    for (const DType dtype : {DType::bf16, DType::fp16}) {
      SCOPED_TRACE(fmt::format("{}, {}", steep, to_string(dtype)));
      const Problem p = base({"kda", Pass::forward}, dtype);
      OperatorData data = data_of(p, steep);
      check(prepare_walk(data), data);
      data = data_of(p, steep, {1500, 0, 70});
      check_strided_rows(prepare_walk(data), data);
    }
  if (GetParam() > 128) return;
  Problem p = base({"kda", Pass::forward});
  p.V = 128;
  const OperatorData data = data_of(p, 30.0);
  check(prepare_walk(data, /*wide=*/true), data);
}

TEST_P(EmulatedPreparedShares, BeginWhereNoOlderStateIsLeft) {
  for (const double steep : {1.0, 6.0, 30.0}) {
    SCOPED_TRACE(steep);
    OperatorData data = data_of(base({"kda", Pass::forward}), steep);
    HostTensor& state = data.tensors.at("initial_state");
    for (std::int64_t i = 0; i < state.elements(); ++i) state.set(i, std::nan(""));
    const HostTensors outputs = run_operator(device(), prepare_walk(data), data);
    const HostTensor& o = outputs.at("o");
    const std::int64_t reached = (steep > 1 ? kShare : data.problem.T) * data.problem.V;
    for (std::int64_t i = 0; i < o.elements(); ++i)
      ASSERT_EQ(std::isnan(o.at(i)), i < reached) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(, EmulatedPreparedShares, ::testing::Values(64, 128, 256),
                         [](const auto& each) { return fmt::format("{}Keys", each.param); });

/// Blocks of 128 columns share out a sequence's tokens where its gates let them, or else its
/// columns.
TEST_F(EmulatedShares, OfTokensOrOfColumnsMatchOracle) {
  for (const char* const op : {"gated_delta_rule", "kda"}) {
    SCOPED_TRACE(op);
    Problem p = base({op, Pass::forward});
    p.H = p.HV = 1, p.V = 128;
    p.T = 2 * 32 * 64 + 70;
    p.initial_state = p.output_final_state = true;
    const auto expect_correct_in_wide_blocks = [&](Gate gate, const Lengths& lengths) {
      SCOPED_TRACE(to_string(gate));
      p.packed = !lengths.empty();
      const OperatorData data = make_data(p, gate, 10, lengths);
      auto plan = plan_with(device(), data.problem, one_kernel_of(p));
      ASSERT_TRUE(plan.has_value());
      const Operator wide = prepare(data.problem, in_wide_blocks(*plan));
      p.packed ? check_strided_rows(wide, data) : check(wide, data);
    };
    expect_correct_in_wide_blocks(Gate::typical, {});
    expect_correct_in_wide_blocks(Gate::zero, {});
    expect_correct_in_wide_blocks(Gate::mixed, {4100, 0, 37});
  }
}

/// Whole passes that walk from segment to segment, of 512 tokens: where the gates erase a state
/// within one, in some heads and not in others, and where they never do.
class EmulatedSegmentPasses : public EmulatedOperator,
                              public ::testing::WithParamInterface<OperatorCase> {};

std::vector<OperatorCase> pass_cases() {
  std::vector<OperatorCase> all;
  const auto add = [&](std::string name, Gate gate, const Lengths& lengths,
                       const std::function<void(Problem&)>& change) {
    OperatorCase one{std::move(name), base({"kda", Pass::forward}), gate, lengths};
    one.problem.H = one.problem.HV = 1;
    one.problem.packed = !lengths.empty();
    one.problem.T = 3 * 512 + 37;
    one.problem.initial_state = one.problem.output_final_state = true;
    change(one.problem);
    all.push_back(std::move(one));
  };
  const auto everything = [](Problem& p) {
    p.K = p.V = 128;
    p.use_qk_l2norm = p.use_beta_sigmoid = p.use_gate_in_kernel = true;
    p.has_A_log = p.has_dt_bias = true;
    if (p.op == "kda") p.lower_bound = -5.0F;
  };
  const auto no_decay = [](Problem& p) {
    p.K = 128, p.V = 64;
    p.initial_state = false;
  };
  add("Typical", Gate::typical, {}, [](Problem& p) { p.K = p.V = 64; });
  add("NoDecay", Gate::zero, {}, no_decay);
  add("Steep", Gate::very_negative, {}, [](Problem& p) { p.K = 64, p.V = 128; });
  add("Batch", Gate::mixed, {}, [](Problem& p) {
    p.B = p.N = 2, p.T = 640, p.K = p.V = 64;
    p.state_v_first = true;
  });
  add("Bounded", Gate::typical, {1100, 0, 512, 70, 513, 1}, [&](Problem& p) {
    everything(p);
    p.H = 1, p.HV = 3;
    p.g_dtype = DType::bf16;
  });
  add("BoundedNoDecay", Gate::zero, {1100, 30}, everything);

  const auto add_scalar = [&](const std::string& name, Gate gate, const Lengths& lengths,
                              const std::function<void(Problem&)>& change) {
    add("Scalar" + name, gate, lengths, [&](Problem& p) {
      p.op = "gated_delta_rule";
      change(p);
    });
  };
  add_scalar("Typical", Gate::typical, {}, [](Problem& p) { p.K = p.V = 64; });
  add_scalar("NoDecay", Gate::zero, {}, no_decay);
  add_scalar("Steep", Gate::very_negative, {}, [](Problem& p) { p.K = p.V = 128; });
  add_scalar("WideKeys", Gate::mixed, {600, 513}, [](Problem& p) {
    p.K = 256, p.V = 64;
    p.H = 1, p.HV = 2;
  });
  add_scalar("Everything", Gate::typical, {1100, 0, 512, 70, 513, 1}, [&](Problem& p) {
    everything(p);
    p.H = 1, p.HV = 3;
    p.g_dtype = DType::bf16;
    p.state_v_first = true;
  });
  const auto in_place = [](Problem& p) {
    p.K = p.V = 64;
    p.initial_state = p.output_final_state = false;
    p.inplace_state = p.state_index = p.output_state_index = p.has_initial_state = true;
    p.state_slots = 10;
  };
  add("InPlace", Gate::mixed, {700, 0, 512, 70, 513, 1}, in_place);
  add_scalar("InPlace", Gate::mixed, {700, 0, 512, 70, 513, 1}, in_place);
  add("WideKeys", Gate::zero, {600, 513}, [](Problem& p) {
    p.K = 256, p.V = 64;
    p.H = 1, p.HV = 2;
  });
  add("InPlaceWideKeys", Gate::mixed, {700, 0, 512, 1}, [&](Problem& p) {
    in_place(p);
    p.K = 256, p.state_v_first = true;
  });
  add_scalar("None", Gate::zero, {1100, 30}, [](Problem& p) {
    p.op = "delta_rule";
    p.K = p.V = 128;
    p.use_qk_l2norm = true;
  });
  const auto add_backward = [&](const char* name, Gate gate,
                                const std::vector<std::int64_t>& lengths, const auto& change) {
    add_scalar(std::string("Backward") + name, gate, lengths, [&](Problem& p) {
      p.pass = Pass::backward;
      p.dtype = p.beta_dtype = DType::bf16;
      p.K = p.V = 64;
      change(p);
    });
  };
  add_backward("Typical", Gate::typical, {}, [](Problem& p) { p.K = p.V = 128; });
  add_backward("NoDecay", Gate::zero, {}, no_decay);
  add_backward("Steep", Gate::very_negative, {1030}, [](Problem& p) { p.H = p.HV = 1; });
  add_backward("WideKeys", Gate::mixed, {600, 513}, [](Problem& p) {
    p.K = 256;
    p.H = 1, p.HV = 2;
  });
  add_backward("Everything", Gate::typical, {1100, 0, 512, 70, 513, 1}, [&](Problem& p) {
    everything(p);
    p.H = 1, p.HV = 3;
    p.K = p.V = 128;
    p.g_dtype = DType::bf16;
    p.state_v_first = true;
  });
  return all;
}

TEST_P(EmulatedSegmentPasses, MatchOracle) {
  const OperatorCase& one = GetParam();
  const OperatorData data = make_data(one.problem, one.gate, 15, one.lengths);
  const bool channels = one.problem.op == "kda";
  const bool backward = one.problem.pass == Pass::backward;
  const auto plan =
      plan_with(device(), data.problem,
                channels   ? one.problem.K > 128 ? "kda_fwd_h_o_resume.hopper" : "kda_resume.hopper"
                : backward ? "delta_scans_resume.hopper"
                           : "delta_resume.hopper");
  ASSERT_TRUE(plan.has_value());
  Plan split = *plan;
  for (PlanStep& step : split) {
    if (!step.config.contains("SEG")) continue;
    step.config.set("SEG", std::int64_t{8});
    if (!data.problem.packed || !step.config.contains("num_stages") || one.problem.V < 128)
      continue;
    step.config.set("BV", std::int64_t{128});
    if (channels) step.config.set("num_stages", std::int64_t{9});
  }
  const Operator op = prepare(data.problem, split);
  data.problem.packed ? check_strided_rows(op, data) : check(op, data);
}

/// What disable_recompute keeps, of any forward plan, serves any backward plan: by Hopper's kernels
/// of whole sequences and of segments, and by portable ones.
class EmulatedKept : public EmulatedOperator, public ::testing::WithParamInterface<OperatorCase> {
 protected:
  Operator prepare_with(const Problem& problem, const char* id) {
    Plan plan = plan_with(device(), problem, id).value();
    for (PlanStep& step : plan)
      if (step.config.contains("SEG")) step.config.set("SEG", std::int64_t{8});
    return prepare(problem, plan);
  }
};

constexpr const char* kClosed = "ClosedRates";

std::vector<OperatorCase> kept_cases() {
  std::vector<OperatorCase> all;
  const auto add = [&](std::string name, std::string op, Gate gate, const Lengths& lengths,
                       const std::function<void(Problem&)>& change) {
    OperatorCase one{std::move(name), base({std::move(op), Pass::backward}, DType::bf16), gate,
                     lengths};
    one.problem.packed = !lengths.empty();
    one.problem.disable_recompute = true;
    one.problem.H = 1, one.problem.HV = 2, one.problem.K = one.problem.V = 64;
    change(one.problem);
    all.push_back(std::move(one));
  };
  add("Wide", "gated_delta_rule", Gate::mixed, {}, [](Problem& p) {
    p.HV = 1, p.T = 600, p.K = p.V = 128;
    p.initial_state = p.output_final_state = true;
  });
  add("Pack", "gated_delta_rule", Gate::typical, {560, 0, 1, 64, 70},
      [](Problem& p) { p.initial_state = p.output_final_state = p.state_v_first = true; });
  add("Options", "gated_delta_rule", Gate::typical, {65, 520}, [](Problem& p) {
    p.V = 128;
    p.use_qk_l2norm = p.use_beta_sigmoid = p.use_gate_in_kernel = p.has_dt_bias = true;
  });
  add("NoGate", "delta_rule", Gate::typical, {530}, [](Problem& p) { p.K = 128; });
  add("Bands", "gated_delta_rule", Gate::mixed, {65, 130}, [](Problem& p) {
    p.V = 192;
    p.use_qk_l2norm = p.initial_state = p.output_final_state = true;
  });
  // With beta of 0 or next to it, whose gradient is found by division.
  add(kClosed, "gated_delta_rule", Gate::typical, {1, 1, 1, 1, 1, 1, 1, 200, 65}, [](Problem& p) {
    p.K = p.V = 128;
    p.initial_state = p.output_final_state = true;
  });
  return all;
}

TEST_P(EmulatedKept, OfAnyForwardPlanServesAnyBackwardPlan) {
  const OperatorCase& one = GetParam();
  OperatorData data = make_data(one.problem, one.gate, 21, one.lengths);
  if (one.name == kClosed) close_rates(data);
  poison_unread(data);
  Problem forward = data.problem;
  forward.pass = Pass::forward;
  for (const char* keeps :
       {"delta_forward_keep.hopper", "delta_resume_keep.hopper", "fwd_h.portable"}) {
    SCOPED_TRACE(keeps);
    const OperatorData kept =
        with_kept(device(), prepare_with(forward, keeps), data, Guards::bands);
    for (const char* reads :
         {"delta_reverse.hopper", "delta_reverse_resume.hopper", "bwd_dhu.portable"}) {
      SCOPED_TRACE(reads);
      const Operator backward = prepare_with(data.problem, reads);
      expect_matches_oracle(kept, run_operator(device(), backward, kept, Guards::bands));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, EmulatedKept, ::testing::ValuesIn(kept_cases()),
                         [](const auto& each) { return each.param.name; });

/// The same without kept states, and of kda.
TEST_F(EmulatedOperator, BackwardOfClosedRates) {
  for (const auto& [op, id] : {std::pair{"gated_delta_rule", "delta_scans.hopper"},
                               {"gated_delta_rule", "delta_scans_resume.hopper"},
                               {"delta_rule", "delta_scans.hopper"},
                               {"kda", "kda_gradient.hopper"}})
    for (const bool options : {false, true}) {
      SCOPED_TRACE(id);
      Problem p = base({op, Pass::backward}, DType::bf16);
      p.H = p.HV = 2, p.K = 128, p.V = options ? 64 : 128;
      p.T = 200;
      p.initial_state = p.output_final_state = true;
      p.use_qk_l2norm = p.use_beta_sigmoid = options;
      OperatorData data = make_data(p, Gate::typical, 22);
      close_rates(data);
      Plan plan = plan_with(device(), p, id).value();
      for (PlanStep& step : plan)
        if (step.config.contains("SEG")) step.config.set("SEG", std::int64_t{8});
      check(prepare(p, plan), data);
    }
}

/// The backward pass of kda, and of gdn2, in three kernels: gates that keep everything, that keep a
/// little, and that keep nothing.
class EmulatedKdaBackward : public EmulatedOperator,
                            public ::testing::WithParamInterface<OperatorCase> {};

std::vector<OperatorCase> kda_backward_cases() {
  std::vector<OperatorCase> all;
  const auto add = [&](std::string name, Gate gate, const Lengths& lengths,
                       const std::function<void(Problem&)>& change) {
    OperatorCase one{std::move(name), base({"kda", Pass::backward}, DType::bf16), gate, lengths};
    one.problem.H = one.problem.HV = 2;
    one.problem.packed = !lengths.empty();
    one.problem.K = one.problem.V = 128;
    one.problem.T = 200;
    one.problem.initial_state = one.problem.output_final_state = true;
    change(one.problem);
    all.push_back(std::move(one));
  };
  add("Typical", Gate::typical, {}, [](Problem& p) { p.state_v_first = true; });
  add("NoDecay", Gate::zero, {}, [](Problem& p) { p.T = 330; });
  add("Steep", Gate::very_negative, {}, [](Problem& p) { p.use_qk_l2norm = true; });
  add("Mixed", Gate::mixed, {130, 0, 33, 64, 1}, [](Problem& p) { p.use_qk_l2norm = true; });
  add("Unbounded", Gate::typical, {130, 33}, [](Problem& p) {
    p.use_gate_in_kernel = p.has_A_log = true;
    p.g_dtype = DType::bf16;
  });
  add("Bounded", Gate::typical, {130, 0, 33, 64, 1}, [](Problem& p) {
    p.use_qk_l2norm = p.use_beta_sigmoid = p.use_gate_in_kernel = true;
    p.has_A_log = p.has_dt_bias = true;
    p.lower_bound = -5.0F;
    p.g_dtype = DType::bf16;
  });
  add("FewChannels", Gate::mixed, {}, [](Problem& p) {
    p.B = p.N = 2;
    p.K = p.V = 64;
    p.initial_state = p.output_final_state = false;
  });
  // The same with gates in beta's place.
  const std::vector<OperatorCase> of_kda = all;
  for (OperatorCase one : of_kda) {
    one.name = "Gdn2" + one.name;
    one.problem.op = "gdn2";
    one.problem.use_beta_sigmoid = false;
    all.push_back(std::move(one));
  }
  return all;
}

TEST_P(EmulatedKdaBackward, MatchesOracle) {
  const OperatorCase& one = GetParam();
  const OperatorData data = make_data(one.problem, one.gate, 18, one.lengths);
  const auto plan = plan_with(device(), data.problem, "kda_gradient.hopper");
  ASSERT_TRUE(plan.has_value());
  const Operator op = prepare(data.problem, *plan);
  data.problem.packed ? check_strided_rows(op, data) : check(op, data);
}

/// The same gate everywhere: where next to nothing decays, where most does, at a bound of -5, and
/// where nothing is left.
TEST_F(EmulatedOperator, KdaBackwardOfGatesAllAlike) {
  for (const double gate : {-0.005, -2.5, -5.0, -1000.0}) {
    SCOPED_TRACE(gate);
    Problem p = base({"kda", Pass::backward}, DType::bf16);
    p.H = p.HV = 1, p.K = p.V = 128;
    p.T = 150;
    p.initial_state = p.output_final_state = p.use_qk_l2norm = true;
    OperatorData data = make_data(p, Gate::zero, 17);
    HostTensor& g = data.tensors.at("g");
    for (std::int64_t i = 0; i < g.elements(); ++i) g.set(i, gate);
    const auto plan = plan_with(device(), data.problem, "kda_gradient.hopper");
    ASSERT_TRUE(plan.has_value());
    check(prepare(data.problem, *plan), data);
  }
}

INSTANTIATE_TEST_SUITE_P(, EmulatedKdaBackward, ::testing::ValuesIn(kda_backward_cases()),
                         [](const auto& each) { return each.param.name; });

INSTANTIATE_TEST_SUITE_P(, EmulatedSegmentPasses, ::testing::ValuesIn(pass_cases()),
                         [](const auto& each) { return each.param.name; });

INSTANTIATE_TEST_SUITE_P(, EmulatedOneKernel, ::testing::ValuesIn(one_kernel_cases()),
                         [](const auto& each) { return each.param.name; });

INSTANTIATE_TEST_SUITE_P(, EmulatedDecode, ::testing::ValuesIn(operators()),
                         [](const auto& each) { return std::string(each.param); });

INSTANTIATE_TEST_SUITE_P(, EmulatedPasses, ::testing::ValuesIn(chunked_passes()),
                         [](const auto& each) { return name_of(each.param); });

INSTANTIATE_TEST_SUITE_P(, EmulatedSegments, ::testing::ValuesIn(chunked_passes()),
                         [](const auto& each) { return name_of(each.param); });

}  // namespace
}  // namespace wyvern::testing
