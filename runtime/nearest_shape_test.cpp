#include "runtime/nearest_shape.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/problem_fields.hpp"

namespace wyvern {
namespace {

Problem shape(std::int64_t B, std::int64_t T, std::int64_t H, std::int64_t HV) {
  Problem problem;
  problem.B = problem.N = B;
  problem.T = T;
  problem.H = H;
  problem.HV = HV;
  return problem;
}

/// Below 0: the plan of `found` never serves `wanted`.
double apart(const Problem& wanted, const Problem& found) {
  return tuning_distance(problem_key(wanted), problem_key(found)).value_or(-1);
}

TEST(TuningDistance, CountsChainsAndTheirLength) {
  const Problem whole = shape(1, 8192, 16, 64);
  EXPECT_DOUBLE_EQ(apart(whole, whole), 0);
  EXPECT_DOUBLE_EQ(apart(whole, shape(1, 8192, 8, 32)), 1);  // a half of its heads
  EXPECT_DOUBLE_EQ(apart(whole, shape(2, 8192, 8, 32)), 0);  // at twice the batch
  EXPECT_DOUBLE_EQ(apart(whole, shape(1, 16384, 16, 64)), 1);
  EXPECT_DOUBLE_EQ(apart(whole, shape(1, 8192, 32, 64)), 0.5);
  EXPECT_DOUBLE_EQ(apart(shape(1, 8192, 8, 32), whole), apart(whole, shape(1, 8192, 8, 32)));
  EXPECT_EQ(tuning_distance(problem_key(whole), {"no/family", 8192, 1}), std::nullopt);
}

TEST(TuningDistance, NeverCrossesWhatDecidesTheKernels) {
  const Problem one = shape(1, 8192, 16, 64);
  const auto with = [&](auto change) {
    Problem other = one;
    change(other);
    return other;
  };
  for (const Problem& stranger :
       {with([](Problem& p) { p.op = "delta_rule"; }),
        with([](Problem& p) { p.pass = Pass::backward; }),
        with([](Problem& p) { p.dtype = p.beta_dtype = DType::fp16; }),
        with([](Problem& p) { p.K = 64; }), with([](Problem& p) { p.V = 64; }),
        with([](Problem& p) { p.num_householder = 2; }),
        with([](Problem& p) { p.precision = Precision::ieee; })}) {
    EXPECT_EQ(apart(one, stranger), -1) << problem_key(stranger).family;
    EXPECT_EQ(apart(stranger, one), -1) << problem_key(stranger).family;
  }
  // Whether there is a gate and whether it is bounded; not what bounds it.
  Problem kda = one, raw = one, promised = one;
  kda.op = raw.op = promised.op = "kda";
  raw.use_gate_in_kernel = true;
  raw.lower_bound = promised.lower_bound = -5.0F;
  promised.safe_gate = true;
  EXPECT_EQ(apart(kda, raw), -1);
  EXPECT_EQ(apart(promised, kda), -1);
  EXPECT_DOUBLE_EQ(apart(promised, raw), 0.5);
}

struct Crossing {
  std::string_view option;
  std::string_view op;
  Pass pass;
  void (*set)(Problem&);
};

const Crossing kCrossings[] = {
    {"initial_state", "kda", Pass::forward, [](Problem& p) { p.initial_state = true; }},
    {"final_state", "kda", Pass::forward, [](Problem& p) { p.output_final_state = true; }},
    {"inplace", "kda", Pass::recurrent, [](Problem& p) { p.inplace_state = true; }},
    {"output_state_index", "kda", Pass::forward, [](Problem& p) { p.output_state_index = true; }},
    {"has_initial_state", "kda", Pass::forward, [](Problem& p) { p.has_initial_state = true; }},
    {"checkpoint_every", "kda", Pass::forward, [](Problem& p) { p.checkpoint_every = 64; }},
    {"checkpoint_offsets", "kda", Pass::forward, [](Problem& p) { p.checkpoint_offsets = true; }},
    {"index_columns", "kda", Pass::recurrent, [](Problem& p) { p.index_columns = 4; }},
    {"token_states", "kda", Pass::recurrent, [](Problem& p) { p.intermediate_rows = 4; }},
    {"parent", "kda", Pass::recurrent, [](Problem& p) { p.parent = true; }},
    {"disable_state_update", "kda", Pass::recurrent,
     [](Problem& p) { p.disable_state_update = true; }},
    {"output_norm", "kda", Pass::recurrent, [](Problem& p) { p.output_norm = Activation::silu; }},
    {"short_conv", "kda", Pass::forward, [](Problem& p) { p.short_conv = 4; }},
    {"qk_l2norm", "kda", Pass::backward, [](Problem& p) { p.use_qk_l2norm = true; }},
    {"gate", "kda", Pass::forward, [](Problem& p) { p.use_gate_in_kernel = true; }},
    {"beta_sigmoid", "kda", Pass::forward, [](Problem& p) { p.use_beta_sigmoid = true; }},
    {"beta", "kda", Pass::forward, [](Problem& p) { p.beta_dtype = DType::fp32; }},
    {"g", "kda", Pass::forward, [](Problem& p) { p.g_dtype = DType::bf16; }},
    {"packed", "kda", Pass::forward, [](Problem& p) { p.packed = true; }},
    {"chunk_size", "kda", Pass::forward, [](Problem& p) { p.chunk_size = 64; }},
    {"kept", "kda", Pass::forward, [](Problem& p) { p.disable_recompute = true; }},
    {"intermediate_states", "kda", Pass::forward,
     [](Problem& p) { p.return_intermediate_states = true; }},
};

TEST(TuningDistance, CrossesOptionsByTheirStatedDistances) {
  for (const auto& [name, op, pass, set] : kCrossings) {
    SCOPED_TRACE(name);
    const auto field = std::ranges::find(problem_fields(), name,
                                         [](const ProblemField& each) { return each.key.name; });
    ASSERT_NE(field, problem_fields().end());
    ASSERT_TRUE(field->distance);
    Problem without = shape(1, 4096, 8, 8);
    without.op = op;
    without.pass = pass;
    Problem with = without;
    set(with);
    EXPECT_DOUBLE_EQ(apart(with, without), *field->distance);
    // What narrows the plans of the tuned problem may have cost it the best one.
    EXPECT_DOUBLE_EQ(apart(without, with), field->narrows ? -1 : *field->distance);
  }
}

TEST(TuningDistance, AddsWhatDiffersAlone) {
  Problem without = shape(1, 4096, 8, 8), with = without;
  without.op = with.op = "kda";
  // Pieces of the key that only occur with others.
  without.use_gate_in_kernel = with.use_gate_in_kernel = with.has_dt_bias = true;
  EXPECT_DOUBLE_EQ(apart(without, with), 0.5);
  without.lower_bound = with.lower_bound = -5.0F;
  with.has_A_log = false;
  EXPECT_DOUBLE_EQ(apart(without, with), 1);
  without.use_beta_sigmoid = with.use_beta_sigmoid = with.allow_neg_eigval = true;
  EXPECT_DOUBLE_EQ(apart(without, with), 1.5);
  without.output_final_state = with.output_final_state = with.state_v_first = true;
  EXPECT_DOUBLE_EQ(apart(without, with), 1.75);
  with.initial_state = true;
  EXPECT_DOUBLE_EQ(apart(without, with), 2);
  with.state_dtype = DType::bf16;  // of a state that the other has not
  EXPECT_DOUBLE_EQ(apart(without, with), 2);
  without.initial_state = true;  // in fp32
  EXPECT_DOUBLE_EQ(apart(without, with), 2);
  with.HV = 16;
  EXPECT_DOUBLE_EQ(apart(without, with), 3.5);
  without.output_norm = with.output_norm = Activation::silu, with.keep_output = true;
  EXPECT_DOUBLE_EQ(apart(without, with), 3.75);
  without.short_conv = with.short_conv = 4, with.has_conv_bias = with.output_conv_state = true;
  EXPECT_DOUBLE_EQ(apart(without, with), 4.5);
  with.chunk_size = 64, without.chunk_size = 32;
  EXPECT_EQ(apart(without, with), -1);

  Problem pool = shape(4, 1, 8, 8);
  pool.pass = Pass::recurrent;
  pool.inplace_state = true;
  Problem paged = pool;
  paged.state_index = true;
  EXPECT_DOUBLE_EQ(apart(pool, paged), 0.25);
}

TEST(TuningDistance, CountsDoublingsOfTheLongestSequence) {
  Problem even = shape(1, 65536, 8, 8);
  even.packed = true, even.N = 64;
  Problem uneven = even, shorter = even;
  uneven.seqlens_hint = 32768, shorter.seqlens_hint = 16384;
  EXPECT_DOUBLE_EQ(apart(uneven, even), 5);
  EXPECT_DOUBLE_EQ(apart(uneven, shorter), 1);
  even.seqlens_hint = 1024;
  EXPECT_DOUBLE_EQ(apart(shorter, even), 4);
}

TEST(TuningDistance, CountsDoublingsOfThreads) {
  const ProblemKey key = problem_key(shape(1, 4096, 8, 8));
  const auto on = [&](std::string_view wanted, std::string_view found) {
    return tuning_distance(TunedFor(wanted, key), TunedFor(found, key)).value_or(-1);
  };
  EXPECT_DOUBLE_EQ(on("EPYC, 8 threads", "EPYC, 8 threads"), 0);
  EXPECT_DOUBLE_EQ(on("EPYC, 8 threads", "EPYC, 2 threads"), 2);
  EXPECT_EQ(on("EPYC, 8 threads", "Xeon, 8 threads"), -1);
  EXPECT_EQ(on("EPYC, 8 threads", "EPYC"), -1);
}

TEST(TuningDistance, PlansCarryOverThatGainedEnoughForIt) {
  EXPECT_TRUE(carries_over(0.9, 1));
  EXPECT_FALSE(carries_over(0.99, 0));
  EXPECT_FALSE(carries_over(0.95, 2));
  EXPECT_FALSE(carries_over(0.5, 4));
  EXPECT_FALSE(carries_over(0, 0));  // not known
}

}  // namespace
}  // namespace wyvern
