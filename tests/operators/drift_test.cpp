// What rounding a state at every token adds up to: decoding beside the float64 recurrence.
#include <gtest/gtest.h>
#include <wyvern/reference.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "runtime/operators/operator.hpp"
#include "tests/operators/fixture.hpp"
#include "tests/support/full_suite.hpp"

namespace wyvern::testing {
namespace {

constexpr float kScale = 1.0F / 16;  // of float8 states, whose elements come to about 3

constexpr double kMargin = 2;

double square(double x) { return x * x; }

/// A state dtype, the bits of its mantissa and half its least number.
struct StateType {
  DType dtype;
  int mantissa;
  double least;

  /// The relative error of rounding, by rms, of numbers a little above powers of two.
  double rounding() const { return std::ldexp(1.0, -mantissa) / std::sqrt(12.0); }
};

/// A point of the table: errors of o over the last tokens, and of the state, by rms; their bounds.
struct Drift {
  std::int64_t tokens;
  double o, state, o_bound, state_bound;
};

class StateDrift : public OperatorTest,
                   public ::testing::WithParamInterface<std::tuple<StateType, double>> {
 protected:
  static constexpr std::int64_t kD = 128, kWindow = 64;

  void SetUp() override { WYVERN_OPEN_OR_SKIP(DeviceKind::cpu); }

  static Problem step_problem(DType state) {
    Problem p = base({"gated_delta_rule", Pass::recurrent}, DType::fp32);
    p.B = p.N = p.T = p.H = p.HV = 1, p.K = p.V = kD;
    p.inplace_state = true, p.output_final_state = false, p.state_dtype = state;
    return p;
  }

  /// Decodes tokens of a decay between `decay`^2 and 1; a row for each of `points`.
  ///
  /// By independent rounding errors and keys and queries of length 1 in any direction: a step makes
  /// the square of a state's error a^2 (1 - beta (2 - beta) / K) times what it was, storing adds
  /// that of rounding, and o has the K-th part of it. Twice the root of that is the bound: errors
  /// are not quite independent where a step changes numbers by less than their last place.
  std::vector<Drift> measure(const StateType& type, double decay,
                             const std::vector<std::int64_t>& points) {
    const Problem p = step_problem(type.dtype);
    Problem whole = p;
    whole.T = points.back();
    OperatorData data = make_data(whole, Gate::zero, 61);
    Engine engine(62);
    std::uniform_real_distribution<double> part(0, 2);
    data.tensors["g"].fill([&] { return part(engine) * std::log(decay); });
    HostTensor& state = data.tensors.at("state");
    state.fill([] { return 0.0; });
    const double scale = has_state_scale(p) ? kScale : 1;
    if (has_state_scale(p)) data.tensors.at("state_scale").fill([&] { return scale; });
    HostTensor o(DType::fp32, {1, whole.T, 1, kD});
    HostTensor beta(DType::fp32, {1, 1, 1}), g(DType::fp32, {1, 1, 1});  // aligned, of a token
    o.poison(kNanPoison);

    const Operator op = prepare(p);
    const Arguments all = data.arguments();
    const auto recurrence = definition_of(whole).recurrence(whole, all, 0, 0);
    std::vector<double> S(kD * kD), out(kD);
    std::vector<double> difference(1), exact(1), most(1);  // squares of o up to a token
    std::vector<Drift> table;
    const HostTensor &all_g = data.tensors.at("g"), &all_beta = data.tensors.at("beta");
    double error = 0;                              // of the state, its square
    const double sums = 4 * std::ldexp(1.0, -24);  // of fp32 products and sums
    for (std::int64_t t = 0; t < whole.T; ++t) {
      const auto row = [t](const TensorView& view) {
        TensorView one = view;
        one.shape[1] = 1;
        one.data = static_cast<char*>(one.data) + t * one.strides[1] * 4;
        return one;
      };
      Arguments a = all;
      for (TensorView* view : {&a.q, &a.k, &a.v}) *view = row(*view);
      beta.set(0, all_beta.at(t)), g.set(0, all_g.at(t));
      a.beta = beta.view(), a.g = g.view();
      a.o = row(o.view());
      op.launch(a, nullptr);

      const double entering = norm(S);
      recurrence->step(t, S, out);
      const double a_t = std::exp(g.at(0)), b_t = beta.at(0);
      const double before = a_t * a_t * (1 - b_t * (2 - b_t) / kD) * error;
      const double computed = before + square(sums * (entering + norm(S)));
      error = computed + square(type.rounding()) * (square(norm(S)) + computed) +
              square(type.least * scale * kD);
      double wrong = 0, right = 0;
      for (std::int64_t v = 0; v < kD; ++v) {
        const double wanted = out[static_cast<std::size_t>(v)] * scale_of(p);
        wrong += square(o.at(t * kD + v) - wanted);
        right += square(wanted);
      }
      difference.push_back(difference.back() + wrong);
      exact.push_back(exact.back() + right);
      most.push_back(most.back() + square(kMargin * scale_of(p)) * computed / kD);
      if (std::find(points.begin(), points.end(), t + 1) == points.end()) continue;
      const auto over = [&](const std::vector<double>& squares) {
        return squares.back() - squares[squares.size() - 1 - kWindow];
      };
      std::vector<double> stored = state.values();
      for (std::size_t i = 0; i < stored.size(); ++i) stored[i] = stored[i] * scale - S[i];
      table.push_back({t + 1, std::sqrt(over(difference) / over(exact)), norm(stored) / norm(S),
                       std::sqrt(over(most) / over(exact)), kMargin * std::sqrt(error) / norm(S)});
    }
    return table;
  }

 private:
  static double norm(const std::vector<double>& x) {
    double sum = 0;
    for (const double value : x) sum += value * value;
    return std::sqrt(sum);
  }
};

TEST_P(StateDrift, KeepsToItsBound) {
  const auto& [type, decay] = GetParam();
  if (is_listing()) {
    prepare(step_problem(type.dtype));
    return;
  }
  const std::vector<std::int64_t> points =
      full_suite() ? std::vector<std::int64_t>{64, 512, 4096} : std::vector<std::int64_t>{64, 256};
  for (const Drift& at : measure(type, decay, points)) {
    EXPECT_LE(at.o, at.o_bound) << at.tokens;
    EXPECT_LE(at.state, at.state_bound) << at.tokens;
    if (full_suite())
      fmt::print("| {} | {} | {} | {:.1e} | {:.1e} |\n", decay, to_string(type.dtype), at.tokens,
                 at.o, at.state);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cpu, StateDrift,
    ::testing::Combine(::testing::Values(StateType{DType::fp32, 23, std::ldexp(1.0, -150)},
                                         StateType{DType::bf16, 7, std::ldexp(1.0, -134)},
                                         StateType{DType::fp16, 10, std::ldexp(1.0, -25)},
                                         StateType{DType::float8_e4m3, 3, std::ldexp(1.0, -10)},
                                         StateType{DType::float8_e5m2, 2, std::ldexp(1.0, -17)}),
                       ::testing::Values(0.5, 0.999)),
    [](const auto& each) {
      return fmt::format("{}_{}Decay", to_string(std::get<0>(each.param).dtype),
                         std::get<1>(each.param) < 0.9 ? "fast" : "slow");
    });

}  // namespace
}  // namespace wyvern::testing
