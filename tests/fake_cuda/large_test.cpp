// Problems of more elements than 32 bits count, bound for the CPU and for a GPU that runs nothing.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <wyvern/error.hpp>
#include <wyvern/runtime.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "runtime/bind.hpp"
#include "runtime/operator_impl.hpp"
#include "runtime/operators/operator.hpp"
#include "runtime/plan.hpp"
#include "tests/fake_cuda/fake_cuda.hpp"

namespace wyvern {
namespace {

constexpr std::int64_t kMost32 = (std::int64_t{1} << 31) - 1;

using Case = std::tuple<std::string_view, Pass, std::string_view>;

class LargeProblem : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override { fake_cuda::reset(); }

  static Problem problem() {
    Problem p;
    p.op = std::get<0>(GetParam());
    p.pass = std::get<1>(GetParam());
    p.H = 16, p.HV = 64, p.K = p.V = 128;
    p.output_final_state = true;
    return p;
  }

  const Device device_ = Device::open(std::get<2>(GetParam()));
};

/// The product, or nothing where 63 bits do not hold it.
std::optional<std::int64_t> product(const std::int64_t* first, const std::int64_t* last) {
  std::int64_t result = 1;
  for (; first != last; ++first)
    if (__builtin_mul_overflow(result, *first, &result)) return {};
  return result;
}

std::optional<std::int64_t> elements_of(const TensorSpec& tensor) {
  return product(tensor.shape.data(), tensor.shape.data() + tensor.rank);
}

double blocks_of(const BoundStep& step) {
  const auto& grid = step.geometry.grid;
  return static_cast<double>(grid[0]) * static_cast<double>(grid[1]) * static_cast<double>(grid[2]);
}

/// What any bound operator must hold to, whatever its size.
void expect_sound(const OperatorImpl& op) {
  for (const TensorSpec& tensor : op.expected()) {
    if (!tensor.present) continue;
    const auto elements = elements_of(tensor);
    ASSERT_TRUE(elements.has_value()) << tensor.name;
    EXPECT_EQ(bytes_of(tensor), static_cast<std::size_t>(*elements) * size_of(tensor.dtype))
        << tensor.name;
  }
  for (const BoundStep& step : op.steps) {
    SCOPED_TRACE(step.step.template_id);
    const auto& most = op.device.impl().target().max_grid;
    for (std::size_t i = 0; i < most.size(); ++i) {
      EXPECT_GE(step.geometry.grid[i], 0);
      EXPECT_TRUE(most[i] == 0 || step.geometry.grid[i] <= most[i]);
    }
    for (const Binding& binding : step.bindings)
      EXPECT_TRUE(binding.from != Binding::From::workspace || binding.index <= op.workspace_bytes);
  }
}

/// Sizes grow with the tokens and none wraps on the way: 1024 times the tokens take 1024 times the
/// workspace and blocks, but for what does not depend on tokens at all.
TEST_P(LargeProblem, GrowsAsItsTokensDo) {
  constexpr std::int64_t kTimes = 1024;
  Problem small = problem();
  const bool recurrent = small.pass == Pass::recurrent;
  if (recurrent)
    small.B = small.N = 1 << 10, small.T = 4;
  else
    small.T = 1 << 15;  // many segments: of each sequence's last some kernels have no block
  Problem large = small;
  (recurrent ? large.B : large.T) *= kTimes;
  large.N = large.B;
  const std::vector<Plan> all = plans(device_, large, 64);
  ASSERT_FALSE(all.empty());
  for (const Plan& plan : all) {
    SCOPED_TRACE(plan_to_json(plan));
    const auto few = bind_operator(device_, small, plan),
               many = bind_operator(device_, large, plan);
    expect_sound(*many);
    std::int64_t largest = 0;
    for (const TensorSpec& tensor : many->expected())
      if (tensor.present) largest = std::max(largest, elements_of(tensor).value_or(0));
    EXPECT_GT(largest, std::int64_t{1} << 32);
    if (few->workspace_bytes != 0) {
      const double times =
          static_cast<double>(many->workspace_bytes) / static_cast<double>(few->workspace_bytes);
      EXPECT_NEAR(times, kTimes, 0.25 * kTimes) << few->workspace_bytes << " bytes before";
    }
    ASSERT_EQ(few->steps.size(), many->steps.size());
    for (std::size_t i = 0; i < few->steps.size(); ++i) {
      const double times = blocks_of(many->steps[i]) / blocks_of(few->steps[i]);
      EXPECT_TRUE(std::abs(times - 1) < 0.01 || std::abs(times - kTimes) < 0.25 * kTimes)
          << many->steps[i].step.template_id << " has " << times << " times the blocks";
    }
  }
}

/// Numbers at the ends of what a problem's fields may hold.
std::int64_t draw(std::mt19937_64& engine, std::int64_t most) {
  const std::int64_t values[] = {1, 2, 255, 65535, 1 << 20, most / 2 + 1, most};
  return std::min(values[engine() % std::size(values)], most);
}

/// Whatever validate() takes is bound soundly or refused: by an error, not by what wraps.
TEST_P(LargeProblem, IsBoundSoundlyOrRefused) {
  std::mt19937_64 engine(2026);
  int bound = 0, refused = 0;
  for (int i = 0; i < 4000 && bound + refused < 300; ++i) {
    Problem p = problem();
    p.packed = engine() % 2 != 0;
    p.T = engine() % 4 == 0 ? 0 : draw(engine, kMost32);
    p.B = p.N = draw(engine, kMost32);
    if (p.packed) p.B = 1;
    p.H = p.HV = draw(engine, 65535);
    p.K = draw(engine, 256), p.V = draw(engine, kMost32);
    p.initial_state = engine() % 2 != 0;
    p.output_final_state = engine() % 2 != 0;
    if (p.pass == Pass::recurrent && p.initial_state && engine() % 2 != 0)
      p.state_index = true, p.state_slots = draw(engine, kMost32);
    try {
      validate(p);
    } catch (const Error&) {
      continue;
    }
    SCOPED_TRACE(fmt::format("B {} T {} N {} HV {} K {} V {} slots {}", p.B, p.T, p.N, p.HV, p.K,
                             p.V, p.state_slots));
    try {
      const std::vector<Plan> all = plans(device_, p, 64);
      if (all.empty()) continue;
      expect_sound(*bind_operator(device_, p, all[engine() % all.size()]));
      ++bound;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kBadInput) << error.what();
      ++refused;
    }
  }
  EXPECT_GT(bound, 10);
  EXPECT_GT(refused, 10);
}

INSTANTIATE_TEST_SUITE_P(, LargeProblem,
                         testing::Combine(testing::ValuesIn(operators()),
                                          testing::Values(Pass::forward, Pass::backward,
                                                          Pass::recurrent),
                                          testing::Values("cpu", "cuda:0")),
                         [](const auto& each) {
                           return fmt::format("{}_{}_{}", std::get<0>(each.param),
                                              to_string(std::get<1>(each.param)),
                                              std::get<2>(each.param) == "cpu" ? "cpu" : "cuda");
                         });

}  // namespace
}  // namespace wyvern
