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
  data.tensors["q"] = HostTensor(p.dtype, {p.B, p.T, p.H, p.K}, q);
  data.tensors["k"] = HostTensor(p.dtype, {p.B, p.T, p.H, p.K}, k);
  data.tensors["v"] = HostTensor(p.dtype, {p.B, p.T, p.HV, p.V}, v);
  data.tensors["beta"] = HostTensor(p.beta_dtype, {p.B, p.T, p.HV}, beta);
  data.tensors["g"] = HostTensor(p.g_dtype, {p.B, p.T, p.HV}, g);
  return data;
}

Reference oracle(const OperatorData& data) { return reference(data.problem, data.arguments(), 2); }

TEST(Oracle, OneToken) {
  Problem p = fp32_problem(1, 2, 2);
  p.scale = 2.0F;
  const Reference r = oracle(by_hand(p, {1, 3}, {2, 1}, {4, -2}, {0.5}, {-1}));
  // u = 0.5 v = (2, -1); S = k u^T; o = 2 (q.k) u with q.k = 5.
  expect_near(r.at("o"), {20, -10});
  expect_near(r.at("final_state"), {4, -2, 2, -1});
}

TEST(Oracle, ScalarsOverThreeTokens) {
  Problem p = fp32_problem(3, 1, 1);
  p.use_gate_in_kernel = true;  // A_log = 0, g = 0: the decay is exactly exp(-ln 2) = 1/2
  OperatorData data = by_hand(p, {1, 1, 2}, {1, 2, 1}, {8, 4, 1}, {1, 0.5, 0.25}, {0, 0, 0});
  data.tensors["A_log"] = HostTensor(DType::fp32, {1}, {0});
  // t=0: u = 8, S = 8, o = 8.  t=1: S~ = 4, u = 0.5 (4 - 8) = -2, S = 4 - 4 = 0, o = 0.
  // t=2: S~ = 0, u = 0.25, S = 0.25, o = 0.5.
  const Reference r = oracle(data);
  expect_near(r.at("o"), {8, 0, 0.5});
  expect_near(r.at("final_state"), {0.25});
}

TEST(Oracle, DecayToNothingForgetsThePast) {
  const OperatorData data =
      by_hand(fp32_problem(2, 2, 1), {1, 1, 1, 2}, {1, 0, 3, 1}, {5, 7}, {1, 0.5}, {-1000, -1e30});
  const Reference r = oracle(data);
  expect_near(r.at("o"), {5, 5 * 3.5});  // the second token sees only itself: (q.k) beta v
  expect_near(r.at("final_state"), {3 * 3.5, 3.5});
}

TEST(Oracle, ZeroBetaOnlyDecaysTheState) {
  Problem p = fp32_problem(2, 2, 1);
  p.initial_state = true;
  OperatorData data = by_hand(p, {1, 0, 1, 1}, {1, 2, 3, 4}, {9, 9}, {0, 0}, {-0.5, -1});
  data.tensors["initial_state"] = HostTensor(DType::fp32, {1, 1, 2, 1}, {2, 6});
  const Reference r = oracle(data);
  expect_near(r.at("o"), {2 * std::exp(-0.5), 8 * std::exp(-1.5)});
  expect_near(r.at("final_state"), {2 * std::exp(-1.5), 6 * std::exp(-1.5)});
}

TEST(Oracle, NormOfOutputs) {
  for (const Pass pass : {Pass::forward, Pass::recurrent}) {
    Problem p = fp32_problem(1, 1, 2);
    p.pass = pass;
    p.output_norm = Activation::sigmoid, p.norm_eps = 3.5F;
    OperatorData data = by_hand(p, {1}, {1}, {3, 4}, {1}, {0});
    data.tensors["norm_weight"] = HostTensor(DType::fp32, {2}, {2, -1});
    data.tensors["norm_gate"] = HostTensor(DType::fp32, {1, 1, 1, 2}, {0, 2});
    // o = (3, 4) before it is divided by sqrt((9 + 16) / 2 + 3.5) = 4.
    const double gate = 1 / (1 + std::exp(-2.0));
    expect_near(oracle(data).at("o"), {0.75 * 2 * 0.5, -1 * gate});
    data.problem.output_norm = Activation::silu;
    expect_near(oracle(data).at("o"), {0, -2 * gate});
  }
}

TEST(Oracle, ConvolvesRows) {
  Problem p = fp32_problem(2, 1, 1);
  p.short_conv = 3, p.conv_activation = Activation::none;
  p.has_conv_bias = p.initial_conv_state = p.output_conv_state = true;
  OperatorData data = by_hand(p, {1, 2}, {2, 1}, {4, 8}, {1, 1}, {0, 0});
  data.tensors["conv_weight"] = HostTensor(DType::fp32, {3, 3}, {1, 0, 1, 0, 1, 0, 0.5, 0, 1});
  data.tensors["conv_bias"] = HostTensor(DType::fp32, {3}, {0, 0, 1});
  data.tensors["initial_conv_state"] = HostTensor(DType::fp32, {1, 3, 2}, {1, 2, 0, 1, 3, -1});
  const Reference r = oracle(data);
  const Reference plain =
      oracle(by_hand(fp32_problem(2, 1, 1), {2, 4}, {1, 2}, {6.5, 8.5}, {1, 1}, {0, 0}));
  expect_near(r.at("o"), plain.at("o"));
  expect_near(r.at("final_state"), plain.at("final_state"));
  EXPECT_EQ(r.at("final_conv_state"), (Doubles{1, 2, 2, 1, 4, 8}));
}

/// From a slot to another one, with room for more columns than are in use.
TEST(Oracle, ConvolvesRowsOfAPool) {
  Problem p = fp32_problem(2, 1, 1);
  p.pass = Pass::recurrent, p.output_final_state = false;
  p.short_conv = 3, p.conv_activation = Activation::none, p.has_conv_bias = true;
  p.inplace_state = p.inplace_conv_state = p.state_index = p.output_state_index = true;
  p.conv_tokens_first = true, p.conv_columns = 3, p.state_slots = 3;
  OperatorData data = by_hand(p, {1, 2}, {2, 1}, {4, 8}, {1, 1}, {0, 0});
  data.tensors["conv_weight"] = HostTensor(DType::fp32, {3, 3}, {1, 0, 1, 0, 1, 0, 0.5, 0, 1});
  data.tensors["conv_bias"] = HostTensor(DType::fp32, {3}, {0, 0, 1});
  data.tensors["conv_state"] = HostTensor(
      DType::fp32, {3, 3, 3},
      {5, 5, 5, 5, 5, 5, 5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 1, 0, 3, 2, 1, -1, 9, 9, 9});
  data.tensors["state"] = HostTensor(DType::fp32, {3, 1, 1, 1}, {7, 7, 0});
  data.tensors["state_index"] = HostTensor(p.index_dtype, {1}, {2});
  data.tensors["output_state_index"] = HostTensor(p.index_dtype, {1}, {0});
  Reference r = oracle(data);
  const Reference plain =
      oracle(by_hand(fp32_problem(2, 1, 1), {2, 4}, {1, 2}, {6.5, 8.5}, {1, 1}, {0, 0}));
  expect_near(r.at("o"), plain.at("o"));
  expect_near(r.at("state"), {plain.at("final_state")[0], 7, 0});
  EXPECT_EQ(r.at("conv_state"), (Doubles{1, 2, 4, 2, 1, 8, 5, 5, 5, 6,  6, 6, 6, 6,
                                         6, 6, 6, 6, 1, 0, 3, 2, 1, -1, 9, 9, 9}));
  // From zeros; and of a null sequence nothing is computed.
  data.problem.has_initial_state = true;
  data.tensors["has_initial_state"] = HostTensor(DType::boolean, {1}, {0});
  expect_near(oracle(data).at("conv_state"),
              {1, 2, 4, 2, 1, 8, 5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 1, 0, 3, 2, 1, -1, 9, 9, 9});
  data.tensors["state_index"].set(0, 3);
  r = oracle(data);
  EXPECT_EQ(r.at("conv_state"), data.tensors.at("conv_state").values());
  expect_near(r.at("o"), {0, 0});
}

/// In front of a draft that was accepted: from the column behind it, to the first ones.
TEST(Oracle, ConvolvesDrafts) {
  Problem p = fp32_problem(2, 1, 1);
  p.pass = Pass::recurrent, p.output_final_state = false;
  p.short_conv = 3, p.conv_activation = Activation::none, p.has_conv_bias = true;
  p.inplace_state = p.inplace_conv_state = p.state_index = true;
  p.conv_columns = 5, p.state_slots = 4, p.index_columns = 3;
  OperatorData data = by_hand(p, {1, 2}, {2, 1}, {4, 8}, {1, 1}, {0, 0});
  data.tensors["conv_weight"] = HostTensor(DType::fp32, {3, 3}, {1, 0, 1, 0, 1, 0, 0.5, 0, 1});
  data.tensors["conv_bias"] = HostTensor(DType::fp32, {3}, {0, 0, 1});
  HostTensor pool(DType::fp32, {4, 3, 5});
  for (std::int64_t i = 0; i < pool.elements(); ++i) pool.set(i, 7);
  const std::int64_t slot = 2 * 3 * 5;
  const auto put = [&](std::int64_t column, const Doubles& row) {
    for (std::int64_t c = 0; c < 3; ++c)
      pool.set(slot + c * 5 + column, row[static_cast<std::size_t>(c)]);
  };
  put(1, {1, 0, 3}), put(2, {2, 1, -1});
  data.tensors["conv_state"] = pool;
  data.tensors["state"] = HostTensor(DType::fp32, {4, 1, 1, 1}, {7, 0, 7, 7});
  data.tensors["state_index"] = HostTensor(p.index_dtype, {1, 3}, {2, 1, 0});
  data.tensors["num_accepted"] = HostTensor(p.index_dtype, {1}, {2});
  Reference r = oracle(data);
  const Reference plain =
      oracle(by_hand(fp32_problem(2, 1, 1), {2, 4}, {1, 2}, {6.5, 8.5}, {1, 1}, {0, 0}));
  expect_near(r.at("o"), plain.at("o"));
  put(0, {2, 1, -1}), put(1, {1, 2, 4}), put(2, {2, 1, 8});
  EXPECT_EQ(r.at("conv_state"), pool.values());
  // Without a slot in column 0 from zeros, which leaves no window, though it has a state.
  data.tensors["state_index"].set(0, 4);
  r = oracle(data);
  const Reference zeros =
      oracle(by_hand(fp32_problem(2, 1, 1), {1, 2}, {0, 2}, {5, 9}, {1, 1}, {0, 0}));
  expect_near(r.at("o"), zeros.at("o"));
  EXPECT_EQ(r.at("conv_state"), data.tensors.at("conv_state").values());
  data.tensors["num_accepted"].set(0, 4);
  EXPECT_EQ(oracle(data).at("o"), (Doubles{0, 0}));
}

/// Along the parents of each token, and then into the window.
TEST(Oracle, ConvolvesTrees) {
  Problem p = fp32_problem(4, 1, 1);
  p.pass = Pass::recurrent, p.output_final_state = false;
  p.intermediate_rows = 1, p.parent = true;
  const auto with_tree = [&](const Doubles& q, const Doubles& k, const Doubles& v) {
    OperatorData data = by_hand(p, q, k, v, {1, 1, 1, 1}, {0, 0, 0, 0});
    data.tensors["intermediate_index"] = HostTensor(p.index_dtype, {1}, {0});
    data.tensors["parent"] = HostTensor(p.index_dtype, {1, 4}, {-1, 0, 3, 0});
    data.tensors["intermediate_states"] = HostTensor(DType::fp32, {1, 4, 1, 1, 1});
    return data;
  };
  // q takes the oldest of its three rows too: the window's, or of a token behind it the newest.
  const Reference plain = oracle(with_tree({1 + 1, 2 + 2, 0, 3 + 2}, {1, 1, 0, 1}, {4, 5, 0, 7}));
  p.short_conv = 3, p.conv_activation = Activation::none, p.initial_conv_state = true;
  OperatorData data = with_tree({1, 2, 9, 3}, {1, 1, 9, 1}, {4, 5, 9, 7});
  data.tensors["conv_weight"] = HostTensor(DType::fp32, {3, 3}, {1, 0, 1, 0, 0, 1, 0, 0, 1});
  data.tensors["initial_conv_state"] = HostTensor(DType::fp32, {1, 3, 2}, {1, 2, 0, 0, 0, 0});
  data.tensors["intermediate_conv_states"] = HostTensor(DType::fp32, {1, 4, 3, 2}, Doubles(24, 6));
  const Reference r = oracle(data);
  expect_near(r.at("o"), plain.at("o"));
  expect_near(r.at("intermediate_states"), plain.at("intermediate_states"));
  EXPECT_EQ(r.at("intermediate_conv_states"),
            (Doubles{2, 1, 0, 1, 0, 4, 1, 2, 1, 1, 4, 5, 6, 6, 6, 6, 6, 6, 1, 3, 1, 1, 4, 7}));
}

/// Rows after silu are rounded; of several steps a token each follows its own.
TEST(Oracle, ConvolvesStepsAndRounds) {
  Problem p = fp32_problem(2, 1, 1);
  p.op = "gated_delta_product", p.num_householder = 2;
  const auto with_rows = [&](const Doubles& q, const Doubles& k, const Doubles& v) {
    OperatorData data = by_hand(p, q, q, q, {0, 0}, {0, -1});
    for (const auto& [name, rows] : {std::pair("k", k), std::pair("v", v)})
      data.tensors[name] = HostTensor(p.dtype, {1, 4, 1, 1}, rows);
    data.tensors["beta"] = HostTensor(p.dtype, {1, 4, 1}, {1, 0.5, 0.25, 1});
    return data;
  };
  const auto silu = [](double x) {
    return static_cast<double>(static_cast<float>(x / (1 + std::exp(-x))));
  };
  const OperatorData plain =
      with_rows({0, silu(1)}, {0, 0, silu(2), silu(3)}, {0, 0, silu(-1), silu(5)});
  p.short_conv = 2;
  OperatorData data = with_rows({1, 7}, {2, 3, 8, 9}, {-1, 5, 8, 9});
  data.problem = p;
  data.tensors["conv_weight"] = HostTensor(DType::fp32, {5, 2}, {1, 0, 1, 0, 1, 0, 1, 0, 1, 0});
  expect_near(oracle(data).at("o"), oracle(plain).at("o"));
  expect_near(oracle(data).at("final_state"), oracle(plain).at("final_state"));
}

TEST(Oracle, UnitBetaAndUnitKeyOverwrite) {
  // The delta rule's point: writing v under the same unit key twice leaves the second v alone.
  const OperatorData data =
      by_hand(fp32_problem(2, 2, 2), {1, 0, 1, 0}, {1, 0, 1, 0}, {3, 4, -1, 2}, {1, 1}, {0, 0});
  const Reference r = oracle(data);
  expect_near(r.at("o"), {3, 4, -1, 2});
  expect_near(r.at("final_state"), {-1, 2, 0, 0});
}

TEST(Oracle, BetaLogits) {
  Problem p = fp32_problem(1, 1, 1);
  p.use_beta_sigmoid = true;
  const OperatorData logits = by_hand(p, {1}, {1}, {8}, {0}, {0});
  expect_near(oracle(logits).at("o"), {4});
  OperatorData doubled = logits;
  doubled.problem.allow_neg_eigval = true;
  expect_near(oracle(doubled).at("o"), {8});
  const OperatorData extreme = by_hand(p, {1}, {1}, {8}, {-1000}, {0});
  expect_near(oracle(extreme).at("o"), {0});
}

TEST(Oracle, NormalizesQueriesAndKeys) {
  Problem p = fp32_problem(1, 2, 1);
  p.use_qk_l2norm = true;
  const double norm = 1 / std::sqrt(25 + 1e-6);
  const Reference r = oracle(by_hand(p, {3, 4}, {4, 3}, {10}, {1}, {0}));
  expect_near(r.at("o"), {24 * 10 * norm * norm});
  expect_near(r.at("final_state"), {40 * norm, 30 * norm});
}

TEST(Oracle, GateWithBias) {
  Problem p = fp32_problem(1, 1, 1);
  p.use_gate_in_kernel = p.has_dt_bias = p.initial_state = true;
  OperatorData data = by_hand(p, {1}, {1}, {0}, {0}, {1});
  data.tensors["initial_state"] = HostTensor(DType::fp32, {1, 1, 1, 1}, {1});
  data.tensors["A_log"] = HostTensor(DType::fp32, {1}, {0.5});
  data.tensors["dt_bias"] = HostTensor(DType::fp32, {1}, {-3});
  const double decay = std::exp(-std::exp(0.5) * std::log1p(std::exp(-2.0)));
  expect_near(oracle(data).at("o"), {decay});
}

TEST(Oracle, DefaultScale) {
  Problem p = fp32_problem(1, 4, 1);
  p.scale.reset();
  expect_near(oracle(by_hand(p, {1, 1, 1, 1}, {1, 1, 1, 1}, {1}, {1}, {0})).at("o"), {2});
}

TEST(Oracle, ValueHeadsReadTheirGroupsKeyHead) {
  Problem p = fp32_problem(1, 1, 1);
  p.H = 2, p.HV = 4;
  const Reference r = oracle(by_hand(p, {1, 10}, {2, 3}, {1, 1, 1, 1}, {1, 1, 1, 1}, {0, 0, 0, 0}));
  expect_near(r.at("o"), {2, 2, 30, 30});
}

TEST(Oracle, StateVFirstIsTheTranspose) {
  Problem p = fp32_problem(5, 3, 2);
  p.HV = 2, p.initial_state = true;
  const OperatorData a = make_data(p, Gate::typical, 11);
  OperatorData b = a;
  b.problem.state_v_first = true;
  b.tensors["initial_state"] = HostTensor(DType::fp32, {1, 2, 2, 3});
  for (std::int64_t head = 0; head < 2; ++head)
    for (std::int64_t i = 0; i < 3; ++i)
      for (std::int64_t j = 0; j < 2; ++j)
        b.tensors["initial_state"].set(head * 6 + j * 3 + i,
                                       a.tensors.at("initial_state").at(head * 6 + i * 2 + j));
  const Reference x = oracle(a), y = oracle(b);
  EXPECT_EQ(x.at("o"), y.at("o"));
  for (std::size_t head = 0; head < 2; ++head)
    for (std::size_t i = 0; i < 3; ++i)
      for (std::size_t j = 0; j < 2; ++j)
        EXPECT_EQ(x.at("final_state")[head * 6 + i * 2 + j],
                  y.at("final_state")[head * 6 + j * 3 + i]);
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
  for (const char* name : {"q", "k", "v", "beta", "g"})
    part.tensors[name] = tokens_of(data.tensors.at(name), first, count);
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
  tail.tensors["initial_state"] = HostTensor(DType::fp32, {1, 4, 12, 10}, first.at("final_state"));
  const Reference second = oracle(tail);
  Doubles joined = first.at("o");
  joined.insert(joined.end(), second.at("o").begin(), second.at("o").end());
  expect_near(joined, expected.at("o"), 1e-6);
  expect_near(second.at("final_state"), expected.at("final_state"), 1e-6);
}

TEST(Oracle, PackedEqualsSeparate) {
  const std::vector<std::int64_t> lengths{0, 7, 1, 0, 19};
  Problem p = fp32_problem(0, 8, 6);
  p.HV = 2, p.packed = p.initial_state = true;
  const OperatorData batch = make_data(p, Gate::mixed, 3, lengths);
  const Reference all = oracle(batch);
  ASSERT_EQ(all.at("final_state").size(), 5U * 2 * 8 * 6);
  for (std::size_t n = 0; n < lengths.size(); ++n) {
    OperatorData one = slice(batch, batch.cu_seqlens[n], lengths[n]);
    one.tensors["initial_state"] = HostTensor(DType::fp32, {1, 2, 8, 6});
    const std::size_t start = n * 96;
    for (std::int64_t i = 0; i < 96; ++i)
      one.tensors["initial_state"].set(
          i, batch.tensors.at("initial_state").at(static_cast<std::int64_t>(start) + i));
    const Reference alone = oracle(one);
    for (std::size_t i = 0; i < alone.at("o").size(); ++i)
      EXPECT_EQ(alone.at("o")[i],
                all.at("o")[static_cast<std::size_t>(batch.cu_seqlens[n]) * 12 + i]);
    for (std::size_t i = 0; i < 96; ++i)
      EXPECT_EQ(alone.at("final_state")[i], all.at("final_state")[start + i]);
  }
}

TEST(Oracle, BatchEqualsSeparateAndThreadsDoNotMatter) {
  Problem p = fp32_problem(9, 5, 4);
  p.B = p.N = 3;
  const OperatorData data = make_data(p, Gate::typical, 8);
  const Reference one = reference(p, data.arguments(), 1);
  const Reference many = reference(p, data.arguments(), 7);
  EXPECT_EQ(one.at("o"), many.at("o"));
  EXPECT_EQ(one.at("final_state"), many.at("final_state"));
}

TEST(Oracle, NoTokensGiveTheInitialStateBack) {
  Problem p = fp32_problem(0, 3, 2);
  p.initial_state = true;
  p.state_dtype = DType::bf16;
  const OperatorData data = make_data(p, Gate::typical, 2);
  const Reference r = oracle(data);
  EXPECT_TRUE(r.at("o").empty());
  EXPECT_EQ(r.at("final_state"), data.tensors.at("initial_state").values());
  OperatorData without = data;
  without.problem.initial_state = false;
  EXPECT_EQ(oracle(without).at("final_state"), Doubles(6, 0.0));
}

TEST(Oracle, DecayPerChannelActsOnRowsOfTheState) {
  Problem p = fp32_problem(1, 2, 2);
  p.op = "kda", p.initial_state = true;
  OperatorData data = by_hand(p, {1, 1}, {0, 0}, {0, 0}, {0}, {0});
  data.tensors["g"] = HostTensor(DType::fp32, {1, 1, 1, 2}, {-1, -2});
  data.tensors["initial_state"] = HostTensor(DType::fp32, {1, 1, 2, 2}, {1, 2, 3, 4});
  const double a = std::exp(-1), b = std::exp(-2);
  expect_near(oracle(data).at("final_state"), {a, 2 * a, 3 * b, 4 * b});
}

TEST(Oracle, BoundedGateWithAndWithoutItsRate) {
  Problem p = fp32_problem(1, 1, 1);
  p.op = "kda", p.lower_bound = -4.0F;
  p.use_gate_in_kernel = p.has_dt_bias = p.initial_state = true;
  OperatorData data = by_hand(p, {1}, {1}, {0}, {0}, {3});
  data.tensors["g"] = HostTensor(DType::fp32, {1, 1, 1, 1}, {3});
  data.tensors["dt_bias"] = HostTensor(DType::fp32, {1, 1}, {-1});
  data.tensors["A_log"] = HostTensor(DType::fp32, {1}, {0.5});
  data.tensors["initial_state"] = HostTensor(DType::fp32, {1, 1, 1, 1}, {1});
  expect_near(oracle(data).at("o"), {std::exp(-4 / (1 + std::exp(-2 * std::exp(0.5))))});
  data.problem.has_A_log = false;
  expect_near(oracle(data).at("o"), {std::exp(-4 / (1 + std::exp(-2.0)))});
}

TEST(Oracle, WithoutAGateNothingDecays) {
  Problem p = fp32_problem(2, 1, 1);
  p.op = "delta_rule";
  OperatorData data = by_hand(p, {1, 1}, {1, 1}, {8, 4}, {0.5, 0.5}, {0, 0});
  data.tensors.erase("g");
  expect_near(oracle(data).at("o"), {4, 4});
}

TEST(Oracle, StatesEnterEveryChunk) {
  Problem p = fp32_problem(0, 3, 2);
  p.packed = p.return_intermediate_states = p.initial_state = true;
  p.HV = 2, p.chunk_size = 16;
  for (const bool v_first : {false, true}) {
    p.state_v_first = v_first;
    const OperatorData data = make_data(p, Gate::typical, 31, {20, 0, 16, 1});
    const Doubles states = oracle(data).at("intermediate_states");
    const std::size_t one = 2 * 3 * 2;
    // Slots: two of the first sequence, one each of the third and fourth; 37 / 16 + 4 in all.
    ASSERT_EQ(states.size(), 6 * one);
    const auto slot = [&](std::size_t c) {
      return Doubles(states.begin() + static_cast<std::ptrdiff_t>(c * one),
                     states.begin() + static_cast<std::ptrdiff_t>((c + 1) * one));
    };
    const Doubles initial = data.tensors.at("initial_state").values();
    EXPECT_EQ(slot(0), Doubles(initial.begin(), initial.begin() + one));
    EXPECT_EQ(slot(2), Doubles(initial.begin() + 2 * one, initial.begin() + 3 * one));
    EXPECT_EQ(slot(3), Doubles(initial.begin() + 3 * one, initial.end()));
    EXPECT_EQ(slot(4), Doubles(one, 0.0));
    EXPECT_EQ(slot(5), Doubles(one, 0.0));
    OperatorData head = slice(data, 0, 16);
    head.tensors["initial_state"] =
        HostTensor(DType::fp32, {1, 2, 3, 2}, Doubles(initial.begin(), initial.begin() + one));
    EXPECT_EQ(oracle(head).at("final_state"), slot(1));
  }
}

/// Two steps of a token are two tokens of which the second keeps all and only it is asked.
TEST(Oracle, StepsAreTokensOfWhichTheFirstDecays) {
  Problem p = fp32_problem(0, 3, 2);
  p.op = "gated_delta_product", p.num_householder = 2;
  p.packed = p.return_intermediate_states = p.initial_state = true;
  p.HV = 2, p.chunk_size = 16;
  const OperatorData steps = make_data(p, Gate::typical, 51, {11, 0, 4});
  OperatorData tokens = steps;
  tokens.problem.op = "gated_delta_rule", tokens.problem.num_householder = 1;
  tokens.problem.T = 30;
  for (std::int64_t n = 0; n <= 3; ++n)
    tokens.tensors["cu_seqlens"].set(n, 2 * steps.tensors.at("cu_seqlens").at(n));
  HostTensor q(DType::fp32, {1, 30, 1, 3}), g(DType::fp32, {1, 30, 2});
  for (std::int64_t t = 0; t < 15; ++t) {
    for (std::int64_t i = 0; i < 3; ++i)
      q.set((2 * t + 1) * 3 + i, steps.tensors.at("q").at(t * 3 + i));
    for (std::int64_t i = 0; i < 2; ++i) g.set(2 * t * 2 + i, steps.tensors.at("g").at(t * 2 + i));
  }
  tokens.tensors["q"] = q, tokens.tensors["g"] = g;
  const Reference expected = oracle(tokens), r = oracle(steps);
  for (std::size_t t = 0; t < 15; ++t)
    for (std::size_t i = 0; i < 4; ++i)
      EXPECT_EQ(r.at("o")[t * 4 + i], expected.at("o")[(2 * t + 1) * 4 + i]);
  EXPECT_EQ(r.at("final_state"), expected.at("final_state"));
  EXPECT_EQ(r.at("intermediate_states"), expected.at("intermediate_states"));
}

/// Two heads, three sequences of two tokens, a pool of four states.
Problem decode_problem() {
  Problem p = fp32_problem(2, 3, 2);
  p.pass = Pass::recurrent;
  p.B = p.N = 3, p.HV = 2;
  p.state_index = p.initial_state = true;
  p.state_slots = 4;
  return p;
}

TEST(Oracle, RecurrentTakesStatesThroughTheIndexAndSkips) {
  OperatorData pool = make_data(decode_problem(), Gate::typical, 41);
  pool.tensors["state_index"] = HostTensor(DType::int32, {3}, {3, -1, 0});
  const Reference indexed = oracle(pool);
  OperatorData plain = pool;
  plain.problem.state_index = false;
  const Doubles states = pool.tensors.at("initial_state").values();
  Doubles gathered(states.begin() + 36, states.end());
  gathered.insert(gathered.end(), 12, 0.0);
  gathered.insert(gathered.end(), states.begin(), states.begin() + 12);
  plain.tensors["initial_state"] = HostTensor(DType::fp32, {3, 2, 3, 2}, gathered);
  const Reference direct = oracle(plain);
  for (std::size_t i = 0; i < 24; ++i)
    EXPECT_EQ(indexed.at("o")[i], i / 8 == 1 ? 0 : direct.at("o")[i]);
  for (std::size_t i = 0; i < 36; ++i)
    EXPECT_EQ(indexed.at("final_state")[i], i / 12 == 1 ? 0 : direct.at("final_state")[i]);
}

TEST(Oracle, RecurrentUpdatesThePoolInPlace) {
  OperatorData outside = make_data(decode_problem(), Gate::typical, 42);
  outside.tensors["state_index"] = HostTensor(DType::int32, {3}, {2, 4, 1});
  OperatorData inplace = outside;
  inplace.problem.inplace_state = true;
  inplace.problem.output_final_state = false;
  inplace.tensors["state"] = outside.tensors.at("initial_state");
  inplace.tensors.erase("initial_state");
  const Reference expected = oracle(outside), r = oracle(inplace);
  EXPECT_EQ(r.at("o"), expected.at("o"));
  EXPECT_FALSE(r.contains("final_state"));
  const Doubles before = outside.tensors.at("initial_state").values();
  for (std::size_t i = 0; i < 12; ++i) {
    EXPECT_EQ(r.at("state")[i], before[i]);
    EXPECT_EQ(r.at("state")[36 + i], before[36 + i]);
    EXPECT_EQ(r.at("state")[24 + i], expected.at("final_state")[i]);
    EXPECT_EQ(r.at("state")[12 + i], expected.at("final_state")[24 + i]);
  }
}

/// A slot for input and one for output, a start from zeros, and null sequences: by an index of 0,
/// and by an output past the slots.
TEST(Oracle, StatesInPlaceAreThoseOfTheirSlots) {
  for (const Pass pass : {Pass::forward, Pass::recurrent}) {
    Problem p = decode_problem();
    p.pass = pass;
    p.B = p.N = 5;
    p.state_slots = 6;
    p.inplace_state = p.output_state_index = p.has_initial_state = p.null_slot_zero = true;
    p.initial_state = p.output_final_state = false;
    OperatorData pool = make_data(p, Gate::typical, 43);
    pool.tensors["state_index"] = HostTensor(DType::int32, {5}, {3, 0, 5, 2, 1});
    pool.tensors["output_state_index"] = HostTensor(DType::int32, {5}, {3, 2, 4, 6, 0});
    pool.tensors["has_initial_state"] = HostTensor(DType::boolean, {5}, {1, 1, 0, 1, 1});
    const Reference r = oracle(pool);
    const Doubles before = pool.tensors.at("state").values();
    const auto slot = [](const Doubles& states, std::int64_t which) {
      return Doubles(states.begin() + which * 12, states.begin() + (which + 1) * 12);
    };

    OperatorData plain = pool;
    plain.problem.inplace_state = plain.problem.state_index = plain.problem.output_state_index =
        plain.problem.has_initial_state = plain.problem.null_slot_zero = false;
    plain.problem.initial_state = plain.problem.output_final_state = true;
    Doubles states(60);
    std::copy_n(before.begin() + 36, 12, states.begin());
    plain.tensors["initial_state"] = HostTensor(DType::fp32, {5, 2, 3, 2}, states);
    const Reference direct = oracle(plain);
    for (std::size_t i = 0; i < 40; ++i) {
      const std::size_t n = i / 8;
      EXPECT_EQ(r.at("o")[i], n == 0 || n == 2 ? direct.at("o")[i] : 0) << i;
    }
    for (const std::int64_t kept : {0, 1, 2, 5})
      EXPECT_EQ(slot(r.at("state"), kept), slot(before, kept)) << kept;
    EXPECT_EQ(slot(r.at("state"), 3), slot(direct.at("final_state"), 0));
    EXPECT_EQ(slot(r.at("state"), 4), slot(direct.at("final_state"), 2));
  }
}

/// Elements count times the scale of their slot and head, and end in units of the slot that they go
/// to, cut off at the largest number.
TEST(Oracle, Float8StatesHaveScales) {
  Problem p = fp32_problem(1, 2, 1);
  p.pass = Pass::recurrent;
  p.inplace_state = p.state_index = p.output_state_index = true;
  p.initial_state = p.output_final_state = false;
  p.state_slots = 2, p.state_dtype = DType::float8_e4m3;
  OperatorData data = by_hand(p, {1, 0}, {0, 1}, {0}, {0}, {0});
  data.tensors["state"] = HostTensor(p.state_dtype, {2, 1, 2, 1}, {3, -1.5, 7, 8});
  data.tensors["state_scale"] = HostTensor(DType::fp32, {2, 1}, {2, 1.0 / 128});
  data.tensors["state_index"] = HostTensor(p.index_dtype, {1}, {0});
  data.tensors["output_state_index"] = HostTensor(p.index_dtype, {1}, {1});
  const Reference r = oracle(data);
  expect_near(r.at("o"), {6});
  expect_near(r.at("state"), {3, -1.5, 448, -384});
}

/// The state after each token of a tree is the final state of its path from the root.
TEST(Oracle, TreesOfDraftsAreTheirPaths) {
  for (const bool v_first : {false, true}) {
    Problem p = fp32_problem(5, 2, 2);
    p.pass = Pass::recurrent;
    p.B = p.N = 2, p.initial_state = p.parent = true, p.output_final_state = false;
    p.state_v_first = v_first, p.intermediate_rows = 3;
    OperatorData data = make_data(p, Gate::typical, 45);
    data.tensors["intermediate_index"] = HostTensor(p.index_dtype, {2}, {2, 3});
    // Token 3 of the first sequence is null, and so is the last one, which goes on from it.
    data.tensors["parent"] = HostTensor(p.index_dtype, {2, 5}, {-1, 0, 0, 5, 3, -1, 0, 1, 2, 3});
    const Reference r = oracle(data);
    const std::vector<std::vector<std::int64_t>> paths{{0}, {0, 1}, {0, 2}, {}, {}};
    const HostTensor& before = data.tensors.at("intermediate_states");
    const Doubles kept = before.values(), &states = r.at("intermediate_states"), &o = r.at("o");
    const std::int64_t one = before.elements() / 15, row = std::ssize(o) / 10;
    // Rows 0 and 1 are nobody's, of the second sequence there is none.
    EXPECT_EQ(Doubles(kept.begin(), kept.begin() + 10 * one),
              Doubles(states.begin(), states.begin() + 10 * one));
    EXPECT_EQ(Doubles(o.begin() + 5 * row, o.end()), Doubles(static_cast<std::size_t>(5 * row)));
    for (std::int64_t t = 0; t < 5; ++t) {
      SCOPED_TRACE(t);
      const auto& path = paths[static_cast<std::size_t>(t)];
      const std::int64_t at = (10 + t) * one;
      Doubles wanted(kept.begin() + at, kept.begin() + at + one);
      Doubles out(static_cast<std::size_t>(row));
      if (!path.empty()) {
        OperatorData chain = tokens_of(data, 0, 1);
        Problem& q = chain.problem;
        q.B = q.N = 1, q.parent = false, q.intermediate_rows.reset();
        q.T = std::ssize(path), q.output_final_state = true;
        for (const char* name : {"q", "k", "v", "beta", "g"}) {
          const HostTensor& all = data.tensors.at(name);
          const std::int64_t width = all.elements() / 10;
          Shape shape = all.shape();
          shape[0] = 1, shape[1] = q.T;
          HostTensor rows(all.dtype(), shape);
          for (std::int64_t i = 0; i < rows.elements(); ++i)
            rows.set(i, all.at(path[static_cast<std::size_t>(i / width)] * width + i % width));
          chain.tensors[name] = rows;
        }
        HostTensor start(DType::fp32, {1, p.HV, v_first ? p.V : p.K, v_first ? p.K : p.V});
        for (std::int64_t i = 0; i < one; ++i) start.set(i, data.tensors.at("initial_state").at(i));
        chain.tensors["initial_state"] = start;
        const Reference exact = oracle(chain);
        wanted = exact.at("final_state");
        const Doubles& rows = exact.at("o");
        out = Doubles(rows.end() - row, rows.end());
      }
      EXPECT_EQ(wanted, Doubles(states.begin() + at, states.begin() + at + one));
      EXPECT_EQ(out, Doubles(o.begin() + t * row, o.begin() + (t + 1) * row));
    }
  }
}

/// Columns of state_index: where each sequence starts, and where each token's state goes.
TEST(Oracle, TokensHaveSlotsOfTheirOwn) {
  Problem p = fp32_problem(2, 2, 2);
  p.pass = Pass::recurrent;
  p.B = p.N = 3, p.initial_state = p.output_final_state = false;
  p.inplace_state = p.state_index = true, p.index_columns = 3, p.state_slots = 6;
  OperatorData data = make_data(p, Gate::typical, 46);
  data.tensors["state_index"] = HostTensor(p.index_dtype, {3, 3}, {0, 1, 2, 3, -1, 6, 4, 5, 4});
  data.tensors["num_accepted"] = HostTensor(p.index_dtype, {3}, {3, 1, 4});  // the last one: null
  const Reference r = oracle(data);
  const Doubles before = data.tensors.at("state").values(), &after = r.at("state");
  const std::int64_t one = std::ssize(before) / 6, row = std::ssize(r.at("o")) / 6;
  const auto slot = [&](const Doubles& states, std::int64_t at) {
    return Doubles(states.begin() + at * one, states.begin() + (at + 1) * one);
  };
  for (const std::int64_t at : {2, 4, 5}) EXPECT_EQ(slot(after, at), slot(before, at)) << at;
  const Doubles& o = r.at("o");
  EXPECT_EQ(Doubles(o.begin() + 4 * row, o.end()), Doubles(static_cast<std::size_t>(2 * row)));
  for (const auto& [n, from, to] : {std::tuple{0, 2, 0}, {1, 3, 3}}) {
    OperatorData first = tokens_of(data, 2 * n, 1);
    Problem& q = first.problem;
    q.B = q.N = 1, q.index_columns = 0, q.state_index = q.inplace_state = false;
    q.initial_state = q.output_final_state = true;
    for (const char* name : {"q", "k", "v", "beta", "g"}) {
      HostTensor& token = first.tensors.at(name);
      const HostTensor& all = data.tensors.at(name);
      const std::int64_t width = all.elements() / 6;
      Shape shape = all.shape();
      shape[0] = shape[1] = 1;
      token = HostTensor(all.dtype(), shape);
      for (std::int64_t i = 0; i < width; ++i) token.set(i, all.at(2 * n * width + i));
    }
    first.tensors["initial_state"] =
        HostTensor(DType::fp32, {1, p.HV, p.K, p.V}, slot(before, from));
    EXPECT_EQ(oracle(first).at("final_state"), slot(after, to)) << n;
  }
}

/// Each is the final state of the tokens in front of it; rows of none keep what they held.
TEST(Oracle, CheckpointsAreFinalStatesOfWhatIsInFront) {
  for (const bool v_first : {false, true})
    for (const bool offsets : {false, true}) {
      Problem p = fp32_problem(0, 2, 2);
      p.packed = p.initial_state = true, p.state_v_first = v_first;
      p.checkpoint_offsets = offsets;
      p.checkpoint_every = offsets ? 0 : 64;
      const std::vector<std::int64_t> lengths{130, 0, 63, 64, 50, 200};
      OperatorData data = make_data(p, Gate::typical, 44, lengths);
      if (offsets)
        data.tensors["checkpoint_offsets"] =
            HostTensor(p.index_dtype, {6}, {16, 0, 8, 64, 64, -16});
      const Reference r = oracle(data);
      struct Wanted {
        std::int64_t n, tokens;
      };
      const std::vector<Wanted> wanted =
          offsets ? std::vector<Wanted>{{0, 16}, {0, 0}, {0, 0}, {3, 64}, {0, 0}, {0, 0}}
                  : std::vector<Wanted>{{0, 64},  {0, 128}, {3, 64}, {5, 64},
                                        {5, 128}, {5, 192}, {0, 0}};
      const HostTensor& before = data.tensors.at("checkpoints");
      ASSERT_EQ(before.shape()[0], std::ssize(wanted));
      const std::int64_t one = before.elements() / std::ssize(wanted);
      for (std::size_t row = 0; row < wanted.size(); ++row) {
        SCOPED_TRACE(row);
        const auto& [n, tokens] = wanted[row];
        const auto at = static_cast<std::int64_t>(row) * one;
        const Doubles kept = before.values();
        Doubles state(kept.begin() + at, kept.begin() + at + one);
        if (tokens != 0) {
          OperatorData part = tokens_of(data, data.cu_seqlens[static_cast<std::size_t>(n)], tokens);
          Problem& front = part.problem;
          front.packed = front.checkpoint_offsets = false, front.checkpoint_every = 0;
          front.N = 1, front.output_final_state = true;
          HostTensor start(DType::fp32, {1, p.HV, p.K, p.V});
          for (std::int64_t i = 0; i < one; ++i)
            start.set(i, data.tensors.at("initial_state").at(n * one + i));
          part.tensors["initial_state"] = start;
          state = oracle(part).at("final_state");
        }
        const Doubles& all = r.at("checkpoints");
        EXPECT_EQ(state, Doubles(all.begin() + at, all.begin() + at + one));
      }
    }
}

TEST(Oracle, SequenceLengthsAreChecked) {
  Problem p = fp32_problem(0, 2, 2);
  p.packed = true;
  OperatorData data = make_data(p, Gate::zero, 1, {3, 4});
  data.tensors["cu_seqlens"].set(1, 8);
  EXPECT_THROW(oracle(data), Error);
}

TEST(Oracle, MissingInputsAreNamed) {
  Problem p = fp32_problem(2, 2, 2);
  p.use_gate_in_kernel = true;
  OperatorData data = make_data(p, Gate::zero, 1);
  data.tensors.erase("A_log");
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

TEST(RelativeError, ValuesTooSmallForTheDTypeAreZero) {
  const HostTensor fp32(DType::fp32, {2}, {0, 0}), fp16(DType::fp16, {2}, {0, 0});
  EXPECT_EQ(relative_error(fp32.view(), {1e-60, -1e-60}), 0);
  EXPECT_NEAR(relative_error(fp32.view(), {1e-40, -1e-40}), 1, 1e-5);
  EXPECT_EQ(relative_error(fp16.view(), {2e-8, 2e-8}), 0);
  EXPECT_NEAR(relative_error(fp16.view(), {1e-5, 1e-5}), 1, 1e-2);
}

TEST(RelativeError, ReadsEveryDType) {
  for (const DType type :
       {DType::bf16, DType::fp16, DType::fp32, DType::float8_e4m3, DType::float8_e5m2}) {
    const HostTensor x(type, {3}, {0.5, -2, 256});
    EXPECT_EQ(relative_error(x.view(), {0.5, -2, 256}), 0) << to_string(type);
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
  EXPECT_EQ(error_bound(p, "dinitial_state"), 2e-3);
  EXPECT_EQ(error_bound(p, "ddt_bias"), 4e-3);
  EXPECT_EQ(error_bound(p, "state"), 1e-3);
  p.state_dtype = DType::bf16;
  EXPECT_EQ(error_bound(p, "state"), 5e-3);
  p.state_dtype = DType::float8_e4m3;
  EXPECT_NEAR(error_bound(p, "state"), 5e-3 + 3.61e-2, 1e-4);
  p.state_dtype = DType::float8_e5m2;
  EXPECT_NEAR(error_bound(p, "state"), 5e-3 + 7.22e-2, 1e-4);
  p.state_dtype = DType::bf16;
  EXPECT_EQ(error_bound(p, "intermediate_states"), 1e-3);
  p.precision.reset();
  EXPECT_EQ(error_bound(p, "dk"), 2e-5);
  EXPECT_EQ(error_bound(p, "dA_log"), 5e-5);
  EXPECT_EQ(error_bound(p, "dg"), 5e-5);
  p.g_dtype = DType::bf16;
  EXPECT_EQ(error_bound(p, "dg"), 2e-2);
  p.dtype = DType::bf16;
  EXPECT_EQ(error_bound(p, "dq"), 8e-3);
  EXPECT_EQ(error_bound(p, "dbeta"), 2e-2);
  EXPECT_THROW((void)error_bound(p, "Tinv"), Error);
}

}  // namespace
}  // namespace wyvern::testing
