// The float64 oracle against arithmetic done by hand and against what must not change it.
#include <wyvern/error.hpp>
#include <wyvern/reference.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/support/operator_data.hpp"

namespace wyvern::testing {
namespace {

using Doubles = std::vector<double>;

Problem fp32_problem(std::int64_t T, std::int64_t K, std::int64_t V) {
  Problem p;
  p.T = T, p.K = K, p.V = V;
  p.dtype = p.beta_dtype = DType::fp32;
  p.scale = 1.0F;
  p.output_final_state = true;
  return p;
}

void expect_near(const Doubles& actual, const Doubles& expected, double tolerance = 1e-12) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i)
    EXPECT_NEAR(actual[i], expected[i], tolerance * std::max(1.0, std::fabs(expected[i])))
        << "element " << i;
}

/// Host tensors with given values; every number used below is exact in fp32.
OperatorData by_hand(const Problem& p, const Doubles& q, const Doubles& k, const Doubles& v,
                     const Doubles& beta, const Doubles& g) {
  OperatorData data;
  data.problem = p;
  data.q = HostTensor(p.dtype, {p.B, p.T, p.H, p.K}, q);
  data.k = HostTensor(p.dtype, {p.B, p.T, p.H, p.K}, k);
  data.v = HostTensor(p.dtype, {p.B, p.T, p.HV, p.V}, v);
  data.beta = HostTensor(p.beta_dtype, {p.B, p.T, p.HV}, beta);
  data.g = HostTensor(p.g_dtype, {p.B, p.T, p.HV}, g);
  return data;
}

Reference oracle(const OperatorData& data) {
  return reference_forward(data.problem, data.arguments(), 2);
}

TEST(Oracle, OneToken) {
  Problem p = fp32_problem(1, 2, 2);
  p.scale = 2.0F;
  const Reference r = oracle(by_hand(p, {1, 3}, {2, 1}, {4, -2}, {0.5}, {-1}));
  // u = 0.5 v = (2, -1); S = k u^T; o = 2 (q.k) u with q.k = 5.
  expect_near(r.o, {20, -10});
  expect_near(r.final_state, {4, -2, 2, -1});
}

TEST(Oracle, ScalarsOverThreeTokens) {
  Problem p = fp32_problem(3, 1, 1);
  p.use_gate_in_kernel = true;  // A_log = 0, g = 0: the decay is exactly exp(-ln 2) = 1/2
  OperatorData data = by_hand(p, {1, 1, 2}, {1, 2, 1}, {8, 4, 1}, {1, 0.5, 0.25}, {0, 0, 0});
  data.A_log = HostTensor(DType::fp32, {1}, {0});
  // t=0: u = 8, S = 8, o = 8.  t=1: S~ = 4, u = 0.5 (4 - 8) = -2, S = 4 - 4 = 0, o = 0.
  // t=2: S~ = 0, u = 0.25, S = 0.25, o = 0.5.
  const Reference r = oracle(data);
  expect_near(r.o, {8, 0, 0.5});
  expect_near(r.final_state, {0.25});
}

TEST(Oracle, DecayToNothingForgetsThePast) {
  const OperatorData data =
      by_hand(fp32_problem(2, 2, 1), {1, 1, 1, 2}, {1, 0, 3, 1}, {5, 7}, {1, 0.5},
              {-1000, -1e30});
  const Reference r = oracle(data);
  expect_near(r.o, {5, 5 * 3.5});  // the second token sees only itself: (q.k) beta v
  expect_near(r.final_state, {3 * 3.5, 3.5});
}

TEST(Oracle, ZeroBetaOnlyDecaysTheState) {
  Problem p = fp32_problem(2, 2, 1);
  p.initial_state = true;
  OperatorData data = by_hand(p, {1, 0, 1, 1}, {1, 2, 3, 4}, {9, 9}, {0, 0}, {-0.5, -1});
  data.initial_state = HostTensor(DType::fp32, {1, 1, 2, 1}, {2, 6});
  const Reference r = oracle(data);
  expect_near(r.o, {2 * std::exp(-0.5), 8 * std::exp(-1.5)});
  expect_near(r.final_state, {2 * std::exp(-1.5), 6 * std::exp(-1.5)});
}

TEST(Oracle, UnitBetaAndUnitKeyOverwrite) {
  // The delta rule's point: writing v under the same unit key twice leaves the second v alone.
  const OperatorData data = by_hand(fp32_problem(2, 2, 2), {1, 0, 1, 0}, {1, 0, 1, 0},
                                    {3, 4, -1, 2}, {1, 1}, {0, 0});
  const Reference r = oracle(data);
  expect_near(r.o, {3, 4, -1, 2});
  expect_near(r.final_state, {-1, 2, 0, 0});
}

TEST(Oracle, BetaLogits) {
  Problem p = fp32_problem(1, 1, 1);
  p.use_beta_sigmoid = true;
  const OperatorData logits = by_hand(p, {1}, {1}, {8}, {0}, {0});
  expect_near(oracle(logits).o, {4});
  OperatorData doubled = logits;
  doubled.problem.allow_neg_eigval = true;
  expect_near(oracle(doubled).o, {8});
  const OperatorData extreme = by_hand(p, {1}, {1}, {8}, {-1000}, {0});
  expect_near(oracle(extreme).o, {0});
}

TEST(Oracle, NormalizesQueriesAndKeys) {
  Problem p = fp32_problem(1, 2, 1);
  p.use_qk_l2norm = true;
  const double norm = 1 / std::sqrt(25 + 1e-6);
  const Reference r = oracle(by_hand(p, {3, 4}, {4, 3}, {10}, {1}, {0}));
  expect_near(r.o, {24 * 10 * norm * norm});
  expect_near(r.final_state, {40 * norm, 30 * norm});
}

TEST(Oracle, GateWithBias) {
  Problem p = fp32_problem(1, 1, 1);
  p.use_gate_in_kernel = p.has_dt_bias = p.initial_state = true;
  OperatorData data = by_hand(p, {1}, {1}, {0}, {0}, {1});
  data.initial_state = HostTensor(DType::fp32, {1, 1, 1, 1}, {1});
  data.A_log = HostTensor(DType::fp32, {1}, {0.5});
  data.dt_bias = HostTensor(DType::fp32, {1}, {-3});
  const double decay = std::exp(-std::exp(0.5) * std::log1p(std::exp(-2.0)));
  expect_near(oracle(data).o, {decay});
}

TEST(Oracle, DefaultScale) {
  Problem p = fp32_problem(1, 4, 1);
  p.scale.reset();
  expect_near(oracle(by_hand(p, {1, 1, 1, 1}, {1, 1, 1, 1}, {1}, {1}, {0})).o, {2});
}

TEST(Oracle, ValueHeadsReadTheirGroupsKeyHead) {
  Problem p = fp32_problem(1, 1, 1);
  p.H = 2, p.HV = 4;
  const Reference r = oracle(by_hand(p, {1, 10}, {2, 3}, {1, 1, 1, 1}, {1, 1, 1, 1},
                                     {0, 0, 0, 0}));
  expect_near(r.o, {2, 2, 30, 30});
}

TEST(Oracle, StateVFirstIsTheTranspose) {
  Problem p = fp32_problem(5, 3, 2);
  p.HV = 2, p.initial_state = true;
  const OperatorData a = make_data(p, Gate::typical, 11);
  OperatorData b = a;
  b.problem.state_v_first = true;
  b.initial_state = HostTensor(DType::fp32, {1, 2, 2, 3});
  for (std::int64_t head = 0; head < 2; ++head)
    for (std::int64_t i = 0; i < 3; ++i)
      for (std::int64_t j = 0; j < 2; ++j)
        b.initial_state.set(head * 6 + j * 3 + i, a.initial_state.at(head * 6 + i * 2 + j));
  const Reference x = oracle(a), y = oracle(b);
  EXPECT_EQ(x.o, y.o);
  for (std::size_t head = 0; head < 2; ++head)
    for (std::size_t i = 0; i < 3; ++i)
      for (std::size_t j = 0; j < 2; ++j)
        EXPECT_EQ(x.final_state[head * 6 + i * 2 + j], y.final_state[head * 6 + j * 3 + i]);
}

/// Elements [first, first + count) of the T dimension of a [1, T, heads, dim] tensor.
HostTensor tokens_of(const HostTensor& x, std::int64_t first, std::int64_t count) {
  Shape shape = x.shape();
  const std::int64_t width = shape[1] == 0 ? 0 : x.elements() / shape[1];
  shape[1] = count;
  HostTensor part(x.dtype(), shape);
  for (std::int64_t i = 0; i < part.elements(); ++i) part.set(i, x.at(first * width + i));
  return part;
}

OperatorData slice(const OperatorData& data, std::int64_t first, std::int64_t count) {
  OperatorData part = data;
  part.problem.packed = false;
  part.problem.T = count;
  part.problem.N = 1;
  part.q = tokens_of(data.q, first, count);
  part.k = tokens_of(data.k, first, count);
  part.v = tokens_of(data.v, first, count);
  part.beta = tokens_of(data.beta, first, count);
  part.g = tokens_of(data.g, first, count);
  return part;
}

TEST(Oracle, SplittingASequenceAndPassingTheStateChangesNothing) {
  Problem p = fp32_problem(37, 12, 10);
  p.H = 2, p.HV = 4, p.use_qk_l2norm = true;
  const OperatorData whole = make_data(p, Gate::typical, 5);
  const Reference expected = oracle(whole);
  const OperatorData head = slice(whole, 0, 20);
  OperatorData tail = slice(whole, 20, 17);
  const Reference first = oracle(head);
  tail.problem.initial_state = true;
  // The state passes through fp32, so the tail agrees to fp32's resolution only.
  tail.initial_state = HostTensor(DType::fp32, {1, 4, 12, 10}, first.final_state);
  const Reference second = oracle(tail);
  Doubles joined = first.o;
  joined.insert(joined.end(), second.o.begin(), second.o.end());
  expect_near(joined, expected.o, 1e-6);
  expect_near(second.final_state, expected.final_state, 1e-6);
}

TEST(Oracle, PackedEqualsSeparate) {
  const std::vector<std::int64_t> lengths{0, 7, 1, 0, 19};
  Problem p = fp32_problem(0, 8, 6);
  p.HV = 2, p.packed = p.initial_state = true;
  const OperatorData batch = make_data(p, Gate::mixed, 3, lengths);
  const Reference all = oracle(batch);
  ASSERT_EQ(all.final_state.size(), 5U * 2 * 8 * 6);
  for (std::size_t n = 0; n < lengths.size(); ++n) {
    OperatorData one = slice(batch, batch.cu_seqlens[n], lengths[n]);
    one.initial_state = HostTensor(DType::fp32, {1, 2, 8, 6});
    const std::size_t start = n * 96;
    for (std::int64_t i = 0; i < 96; ++i)
      one.initial_state.set(i, batch.initial_state.at(static_cast<std::int64_t>(start) + i));
    const Reference alone = oracle(one);
    for (std::size_t i = 0; i < alone.o.size(); ++i)
      EXPECT_EQ(alone.o[i], all.o[static_cast<std::size_t>(batch.cu_seqlens[n]) * 12 + i]);
    for (std::size_t i = 0; i < 96; ++i)
      EXPECT_EQ(alone.final_state[i], all.final_state[start + i]);
  }
}

TEST(Oracle, BatchEqualsSeparateAndThreadsDoNotMatter) {
  Problem p = fp32_problem(9, 5, 4);
  p.B = p.N = 3;
  const OperatorData data = make_data(p, Gate::typical, 8);
  const Reference one = reference_forward(p, data.arguments(), 1);
  const Reference many = reference_forward(p, data.arguments(), 7);
  EXPECT_EQ(one.o, many.o);
  EXPECT_EQ(one.final_state, many.final_state);
}

TEST(Oracle, NoTokensGiveTheInitialStateBack) {
  Problem p = fp32_problem(0, 3, 2);
  p.initial_state = true;
  p.state_dtype = DType::bf16;
  const OperatorData data = make_data(p, Gate::typical, 2);
  const Reference r = oracle(data);
  EXPECT_TRUE(r.o.empty());
  EXPECT_EQ(r.final_state, data.initial_state.values());
  OperatorData without = data;
  without.problem.initial_state = false;
  EXPECT_EQ(oracle(without).final_state, Doubles(6, 0.0));
}

TEST(Oracle, SequenceLengthsAreChecked) {
  Problem p = fp32_problem(0, 2, 2);
  p.packed = true;
  OperatorData data = make_data(p, Gate::zero, 1, {3, 4});
  data.seqlens.set(1, 8);
  EXPECT_THROW(oracle(data), Error);
}

TEST(Oracle, MissingInputsAreNamed) {
  Problem p = fp32_problem(2, 2, 2);
  p.use_gate_in_kernel = true;
  OperatorData data = make_data(p, Gate::zero, 1);
  data.A_log = {};
  try {
    oracle(data);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("A_log"), std::string::npos) << error.what();
  }
}

TEST(RelativeError, IsTheRatioOfRms) {
  HostTensor x(DType::fp32, {4}, {1, 2, 2, 4});
  EXPECT_NEAR(relative_error(x.view(), {1, 2, 2, 3}), 1 / std::sqrt(18.0), 1e-15);
  EXPECT_EQ(relative_error(x.view(), {1, 2, 2, 4}), 0);
  EXPECT_EQ(relative_error(x.view(), {0, 0, 0, 0}), 2.5);
  for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    x.set(2, bad);
    EXPECT_EQ(relative_error(x.view(), {1, 2, 2, 4}), std::numeric_limits<double>::infinity());
  }
}

TEST(RelativeError, ReadsEveryDType) {
  for (const DType type : {DType::bf16, DType::fp16, DType::fp32}) {
    const HostTensor x(type, {3}, {0.5, -2, 1024});
    EXPECT_EQ(relative_error(x.view(), {0.5, -2, 1024}), 0) << to_string(type);
  }
}

TEST(ErrorBound, FollowsTheSpecification) {
  Problem p;
  EXPECT_EQ(error_bound(p, "o"), 5e-3);
  p.dtype = DType::fp16;
  EXPECT_EQ(error_bound(p, "final_state"), 5e-3);
  p.dtype = DType::fp32;
  EXPECT_EQ(error_bound(p, "o"), 1e-5);
  p.precision = Precision::ieee;
  EXPECT_EQ(error_bound(p, "o"), 1e-5);
  p.precision = Precision::tf32;
  EXPECT_EQ(error_bound(p, "final_state"), 1e-3);
  EXPECT_THROW(error_bound(p, "dq"), Error);
}

}  // namespace
}  // namespace wyvern::testing
