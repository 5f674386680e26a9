// The adjoint of the float64 oracle against central differences of its forward pass, every element
// of every input and every option, and against arithmetic done by hand.
#include <wyvern/reference.hpp>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "runtime/operators/operator.hpp"
#include "tests/support/operator_data.hpp"

namespace wyvern::testing {
namespace {

using Doubles = std::vector<double>;

Problem tiny(const std::string& op, std::int64_t T = 5) {
  Problem p;
  p.op = op, p.pass = Pass::backward;
  p.T = T, p.H = 1, p.HV = 2, p.K = 3, p.V = 2;
  p.dtype = p.beta_dtype = DType::fp32;
  return p;
}

/// Inputs on a grid coarse enough that every step away from them is exact in fp32.
OperatorData on_grid(const Problem& problem, Gate gate, std::uint64_t seed,
                     const std::vector<std::int64_t>& lengths = {}) {
  OperatorData data = make_data(problem, gate, seed, lengths);
  for (auto& [name, tensor] : data.tensors)
    for (std::int64_t i = 0; i < tensor.elements(); ++i)
      tensor.set(i, std::nearbyint(tensor.at(i) * 4096) / 4096);
  if (problem.output_norm) {  // what it normalizes is what the forward pass gives
    Problem p = data.problem;
    p.pass = Pass::forward, p.keep_output = true;
    HostTensor& o_raw = data.tensors.at("o_raw");
    o_raw = HostTensor(o_raw.dtype(), o_raw.shape(), reference(p, data.arguments()).at("o_raw"));
  }
  return data;
}

/// sum(o * do) + sum(final_state * dht), and the same of final windows: what the backward pass
/// differentiates.
double loss(const OperatorData& data) {
  Problem p = data.problem;
  p.pass = Pass::forward;
  const Reference r = reference(p, data.arguments(), 1);
  double sum = 0;
  const auto add = [&](const char* output, const char* gradient) {
    const HostTensor& weights = data.tensors.at(gradient);
    for (std::int64_t i = 0; i < weights.elements(); ++i)
      sum += r.at(output)[static_cast<std::size_t>(i)] * weights.at(i);
  };
  add("o", "do");
  if (p.output_final_state) add("final_state", "dht");
  if (p.output_conv_state) add("final_conv_state", "dfinal_conv_state");
  return sum;
}

/// The derivative by element i of a tensor: two central differences whose leading errors cancel.
double difference(OperatorData& data, const std::string& name, std::int64_t i) {
  HostTensor& tensor = data.tensors.at(name);
  const double x = tensor.at(i);
  const auto central = [&](double h) {
    tensor.set(i, x + h);
    const double above = loss(data);
    tensor.set(i, x - h);
    const double below = loss(data);
    tensor.set(i, x);
    return (above - below) / (2 * h);
  };
  // Convolved rows are rounded to fp32, of which a longer step sees less.
  const double step = data.problem.short_conv ? 1.0 / 32 : 1.0 / 256;
  return (4 * central(step / 2) - central(step)) / 3;
}

void expect_differences(OperatorData data) {
  SCOPED_TRACE(describe(data.problem));
  const Reference r = reference(data.problem, data.arguments(), 2);
  for (const TensorSpec& spec : tensor_specs(data.problem)) {
    if (!spec.present || spec.access != TensorAccess::out) continue;
    const std::string gradient(spec.name), input = gradient.substr(1);
    const Doubles& actual = r.at(gradient);
    ASSERT_EQ(std::ssize(actual), data.tensors.at(input).elements()) << gradient;
    double worst = 0, largest = 1e-3;
    for (std::size_t i = 0; i < actual.size(); ++i) {
      const double expected = difference(data, input, static_cast<std::int64_t>(i));
      worst = std::max(worst, std::fabs(actual[i] - expected));
      largest = std::max(largest, std::fabs(expected));
    }
    // o_raw is rounded to fp32, and so are convolved rows.
    const double bound = data.problem.short_conv ? 2e-5 : data.problem.output_norm ? 1e-6 : 1e-7;
    EXPECT_LE(worst, bound * largest) << gradient;
  }
}

struct Case {
  const char* name;
  const char* op;
  std::function<void(Problem&)> options;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class AdjointOption : public ::testing::TestWithParam<Case> {};

TEST_P(AdjointOption, EqualsCentralDifferences) {
  for (const Gate gate : {Gate::typical, Gate::zero}) {
    Problem p = tiny(GetParam().op);
    GetParam().options(p);
    expect_differences(on_grid(p, gate, 17));
  }
}

const auto kNothing = [](Problem&) {};
const auto kStates = [](Problem& p) { p.initial_state = p.output_final_state = true; };
const auto kGate = [](Problem& p) { p.use_gate_in_kernel = true; };
const auto kGateBias = [](Problem& p) { p.use_gate_in_kernel = p.has_dt_bias = true; };
// With a norm_eps that large the norm is smooth at the steps of differences.
const auto kNorm = [](Problem& p) { p.output_norm = Activation::silu, p.norm_eps = 1.0F; };
const auto kSteps = [](Problem& p) { p.num_householder = 3; };
const auto kConv = [](Problem& p) {
  p.short_conv = 4, p.has_conv_bias = p.initial_conv_state = p.output_conv_state = true;
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all{
      {"DeltaRule", "delta_rule", kNothing},
      {"Gated", "gated_delta_rule", kNothing},
      {"Kda", "kda", kNothing},
      {"Gdn2", "gdn2", kNothing},
      {"DeltaRuleStates", "delta_rule", kStates},
      {"GatedStates", "gated_delta_rule", kStates},
      {"KdaStates", "kda", kStates},
      {"Gdn2States", "gdn2", kStates},
      {"StatesVFirst", "kda",
       [](Problem& p) { p.initial_state = p.output_final_state = p.state_v_first = true; }},
      {"OnlyInitialState", "gated_delta_rule", [](Problem& p) { p.initial_state = true; }},
      {"OnlyFinalState", "kda", [](Problem& p) { p.output_final_state = true; }},
      {"Normalized", "gated_delta_rule", [](Problem& p) { p.use_qk_l2norm = true; }},
      {"KdaNormalized", "kda", [](Problem& p) { p.use_qk_l2norm = true; }},
      {"BetaLogits", "delta_rule", [](Problem& p) { p.use_beta_sigmoid = true; }},
      {"BetaLogitsDoubled", "gated_delta_rule",
       [](Problem& p) { p.use_beta_sigmoid = p.allow_neg_eigval = true; }},
      {"GatedGate", "gated_delta_rule", kGate},
      {"GatedGateBias", "gated_delta_rule", kGateBias},
      {"KdaGate", "kda", kGate},
      {"KdaGateBias", "kda", kGateBias},
      {"KdaBoundedGate", "kda",
       [](Problem& p) { p.use_gate_in_kernel = p.has_dt_bias = true, p.lower_bound = -5.0F; }},
      {"KdaBoundedGateWithoutRate", "kda",
       [](Problem& p) {
         p.use_gate_in_kernel = p.has_dt_bias = true, p.has_A_log = false, p.lower_bound = -2.5F;
       }},
      {"KdaPromise", "kda", [](Problem& p) { p.safe_gate = true, p.lower_bound = -1.0F; }},
      {"Groups", "kda", [](Problem& p) { p.H = 2, p.HV = 6, p.use_qk_l2norm = true; }},
      {"Batch", "gated_delta_rule", [](Problem& p) { p.B = p.N = 3, p.initial_state = true; }},
      {"Scale", "gated_delta_rule", [](Problem& p) { p.scale = 0.75F; }},
      {"OneToken", "kda", [](Problem& p) { p.T = 1, p.initial_state = true; }},
      {"Everything", "gated_delta_rule",
       [](Problem& p) {
         p.use_qk_l2norm = p.use_beta_sigmoid = p.allow_neg_eigval = true;
         p.use_gate_in_kernel = p.has_dt_bias = true;
         p.initial_state = p.output_final_state = p.state_v_first = true;
         p.T = 17, p.H = 2, p.HV = 4;
       }},
      {"Norm", "gated_delta_rule", kNorm},
      {"NormSigmoid", "kda",
       [](Problem& p) { kNorm(p), kStates(p), p.output_norm = Activation::sigmoid; }},
      {"NormOfSteps", "gated_delta_product",
       [](Problem& p) { kNorm(p), kSteps(p), p.B = p.N = 2, p.H = 2, p.HV = 4; }},
      {"Conv", "gated_delta_rule", kConv},
      {"ConvWithoutActivation", "kda",
       [](Problem& p) {
         kConv(p), kStates(p), p.short_conv = 3, p.conv_activation = Activation::none;
       }},
      {"ConvFromZeros", "delta_rule", [](Problem& p) { p.short_conv = 2, p.H = 2, p.HV = 4; }},
      {"ConvOfSteps", "gated_delta_product", [](Problem& p) { kConv(p), kSteps(p); }},
      {"ConvShorterThanWindows", "gdn2", [](Problem& p) { kConv(p), p.T = 2, p.B = p.N = 2; }},
      {"ConvAndNorm", "gated_delta_rule", [](Problem& p) { kConv(p), kNorm(p); }},
      {"Steps", "gated_delta_product", kSteps},
      {"StepsWithoutGate", "gated_delta_product", [](Problem& p) { kSteps(p), p.has_g = false; }},
      {"EverythingInSteps", "gated_delta_product",
       [](Problem& p) {
         kSteps(p);
         p.use_qk_l2norm = p.use_beta_sigmoid = p.allow_neg_eigval = true;
         p.use_gate_in_kernel = p.has_dt_bias = true;
         p.initial_state = p.output_final_state = p.state_v_first = true;
         p.T = 9, p.H = 2, p.HV = 4;
       }},
      {"EverythingKda", "kda",
       [](Problem& p) {
         p.use_qk_l2norm = p.use_beta_sigmoid = p.allow_neg_eigval = true;
         p.use_gate_in_kernel = p.has_dt_bias = true, p.lower_bound = -5.0F;
         p.initial_state = p.output_final_state = p.state_v_first = true;
         p.T = 17;
       }},
      {"EverythingGdn2", "gdn2",
       [](Problem& p) {
         p.use_qk_l2norm = p.use_gate_in_kernel = p.has_dt_bias = true, p.lower_bound = -5.0F;
         p.initial_state = p.output_final_state = p.state_v_first = true;
         p.T = 17, p.H = 2, p.HV = 4;
       }},
  };
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, AdjointOption, ::testing::ValuesIn(cases()),
                         [](const auto& each) { return each.param.name; });

TEST(Adjoint, HoldsForAPackedBatch) {
  for (const std::string_view op : operators()) {
    Problem p = tiny(std::string(op));
    p.packed = p.initial_state = p.output_final_state = true;
    p.use_gate_in_kernel = p.has_dt_bias = gate_kind(p) != GateKind::none;
    if (definition_of(p).facts().householder) p.num_householder = 2;
    expect_differences(on_grid(p, Gate::typical, 23, {0, 4, 1, 0, 6}));
    kConv(p);
    expect_differences(on_grid(p, Gate::typical, 23, {0, 4, 1, 0, 6}));
  }
}

TEST(Adjoint, EmptySequencesPassTheGradientOfTheStateOn) {
  Problem p = tiny("kda", 0);
  p.initial_state = p.output_final_state = true;
  OperatorData data = make_data(p, Gate::typical, 3);
  const Reference r = reference(p, data.arguments());
  EXPECT_EQ(r.at("dinitial_state"), data.tensors.at("dht").values());
  EXPECT_TRUE(r.at("dq").empty());
  data.problem.output_final_state = false;
  EXPECT_EQ(reference(data.problem, data.arguments()).at("dinitial_state"), Doubles(12, 0.0));
}

TEST(Adjoint, OneTokenByHand) {
  Problem p = tiny("gated_delta_rule", 1);
  p.H = p.HV = p.K = p.V = 1;
  p.scale = 2.0F, p.initial_state = p.output_final_state = true;
  OperatorData data = make_data(p, Gate::zero, 1);
  const auto set = [&](const char* name, double x) { data.tensors.at(name).set(0, x); };
  set("q", 3), set("k", 2), set("v", 5), set("beta", 0.5), set("g", 0);
  set("initial_state", 4), set("do", 1), set("dht", 10);
  // S~ = 4, v - S~ k = -3, u = -1.5, S = 4 - 3 = 1; dS = 10 + 2 * 3 = 16, du = 32.
  const Reference r = reference(p, data.arguments());
  const auto expect = [&](const char* name, double x) {
    EXPECT_EQ(r.at(name), Doubles{x}) << name;
  };
  expect("dq", 2);
  expect("dk", 16 * -1.5 - 0.5 * 4 * 32);
  expect("dv", 16);
  expect("dbeta", 32 * -3);
  expect("dg", (16 - 0.5 * 2 * 32) * 4);
  expect("dinitial_state", 16 - 0.5 * 2 * 32);
}

TEST(Adjoint, TwoStepsByHand) {
  Problem p = tiny("gated_delta_product", 1);
  p.num_householder = 2;
  p.H = p.HV = p.K = p.V = 1;
  p.scale = 1.0F, p.initial_state = true;
  OperatorData data = make_data(p, Gate::zero, 1);
  const auto set = [&](const char* name, std::initializer_list<double> values) {
    std::int64_t i = 0;
    for (const double x : values) data.tensors.at(name).set(i++, x);
  };
  set("q", {3}), set("k", {2, 1}), set("v", {5, 7}), set("beta", {0.5, 0.25}), set("g", {0});
  set("initial_state", {4}), set("do", {1});
  // S = 4 + 2 * 0.5 (5 - 8) = 1; then S = 1 + 0.25 (7 - 1) = 2.5. dS = 3, du = 3 after the last
  // step, dS = 3 - 0.25 * 3 = 2.25 between the steps, du = 4.5, and 2.25 - 0.5 * 2 * 4.5 = -2.25.
  const Reference r = reference(p, data.arguments());
  const auto expect = [&](const char* name, const Doubles& x) { EXPECT_EQ(r.at(name), x) << name; };
  expect("dq", {2.5});
  expect("dk", {2.25 * -1.5 - 0.5 * 4 * 4.5, 3 * 1.5 - 0.25 * 1 * 3});
  expect("dv", {0.5 * 4.5, 0.25 * 3});
  expect("dbeta", {4.5 * -3, 3 * 6});
  expect("dg", {-2.25 * 4});
  expect("dinitial_state", {-2.25});
}

TEST(Adjoint, VeryNegativeGatesGiveFiniteGradients) {
  for (const char* op : {"gated_delta_rule", "kda", "gdn2"})
    for (const bool in_kernel : {false, true}) {
      Problem p = tiny(op, 40);
      p.use_gate_in_kernel = p.has_dt_bias = in_kernel;
      p.initial_state = p.output_final_state = true;
      const OperatorData data = make_data(p, Gate::very_negative, 5);
      const Reference r = reference(p, data.arguments());
      for (const auto& [name, values] : r)
        for (const double x : values) ASSERT_TRUE(std::isfinite(x)) << name;
      for (const double x : r.at("dg")) EXPECT_EQ(x, 0);
    }
}

TEST(Adjoint, ThreadsDoNotMatter) {
  Problem p = tiny("kda", 30);
  p.B = p.N = 2, p.H = 2, p.HV = 4;
  p.use_gate_in_kernel = p.has_dt_bias = p.use_qk_l2norm = true;
  const OperatorData data = make_data(p, Gate::mixed, 8);
  EXPECT_EQ(reference(p, data.arguments(), 1), reference(p, data.arguments(), 7));
}

TEST(Adjoint, MissingGradientsAreNamed) {
  Problem p = tiny("kda");
  p.output_final_state = true;
  for (const char* name : {"do", "dht"}) {
    OperatorData data = make_data(p, Gate::typical, 8);
    data.tensors.erase(name);
    try {
      (void)reference(p, data.arguments());
      ADD_FAILURE() << "accepted";
    } catch (const std::exception& error) {
      EXPECT_EQ(std::string(error.what()).find(name), 0U) << error.what();
    }
  }
}

}  // namespace
}  // namespace wyvern::testing
