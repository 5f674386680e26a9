#include "runtime/nearest_shape.hpp"

#include <gtest/gtest.h>

#include <memory>

#include "cache/cache_testing.hpp"
#include "runtime/plan_source.hpp"

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

double apart(const Problem& a, const Problem& b) {
  return shape_distance(problem_key(a), problem_key(b)).value_or(-1);
}

WinnerRow winner(const Problem& problem, double ratio) {
  const ProblemKey key = problem_key(problem);
  WinnerRow row;
  row.device = "H200";
  row.family = key.family;
  row.tokens = key.tokens;
  row.sequences = key.sequences;
  row.plan = "[]";
  row.median_us = 100 * ratio;
  row.default_us = 100;
  return row;
}

TEST(NearestShape, CountsChainsAndTheirLength) {
  const Problem whole = shape(1, 8192, 16, 64);
  EXPECT_DOUBLE_EQ(apart(whole, whole), 0);
  EXPECT_DOUBLE_EQ(apart(whole, shape(1, 8192, 8, 32)), 1);  // a half of its heads
  EXPECT_DOUBLE_EQ(apart(whole, shape(2, 8192, 8, 32)), 0);  // at twice the batch
  EXPECT_DOUBLE_EQ(apart(whole, shape(1, 16384, 16, 64)), 1);
  EXPECT_DOUBLE_EQ(apart(whole, shape(1, 8192, 32, 64)), 0.5);
  EXPECT_DOUBLE_EQ(apart(shape(1, 8192, 8, 32), whole), apart(whole, shape(1, 8192, 8, 32)));
  Problem backward = whole, wide = whole, other = whole, kda = whole;
  backward.pass = Pass::backward;
  wide.K = 256;
  other.dtype = other.beta_dtype = DType::fp16;
  kda.op = "kda";
  for (const Problem& stranger : {backward, wide, other, kda})
    EXPECT_EQ(apart(whole, stranger), -1);
}

TEST(NearestShape, TakesPlansThatGainedEnoughForTheDistance) {
  EXPECT_TRUE(carries_over(0.9, 1));
  EXPECT_FALSE(carries_over(0.99, 0));
  EXPECT_FALSE(carries_over(0.95, 2));
  EXPECT_FALSE(carries_over(0.5, 4));
  EXPECT_FALSE(carries_over(0, 0));  // not known
}

TEST(NearestShape, FindsTheNearestOfItsDevice) {
  DeviceInfo device;
  device.key = "H200";
  const ProblemKey key = problem_key(shape(1, 8192, 8, 32));
  const std::vector<WinnerRow> rows{winner(shape(1, 8192, 4, 16), 0.99),
                                    winner(shape(1, 8192, 16, 64), 0.8),
                                    winner(shape(1, 32768, 16, 64), 0.5)};
  const auto found = nearest_shape(rows, device, key);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->family, rows[1].family);
  EXPECT_EQ(found->tokens, rows[1].tokens);
  device.key = "another";
  EXPECT_FALSE(nearest_shape(rows, device, key).has_value());
  EXPECT_FALSE(nearest_shape({}, device, key).has_value());
}

TEST(NearestShape, AnswersWhereNothingOfTheFamilyDoes) {
  constexpr const char* kUsable = R"([{"template": "fwd_h.portable", "config": "BT=64"}])";
  constexpr const char* kUnknown = R"([{"template": "fwd_h.abacus", "config": "BT=64"}])";
  const testing::TempDirectory directory;
  const auto cache = std::make_shared<Cache>(directory.path());
  const auto packs = std::make_shared<Packs>(std::vector<PackLayer>{});
  DeviceInfo device;
  device.key = "H200";
  const Problem half = shape(2, 8192, 8, 32);
  const auto store = [&](const Problem& problem, double ratio, const char* plan) {
    WinnerRow row = winner(problem, ratio);
    row.plan = plan;
    ASSERT_TRUE(cache->store_winner(row));
  };
  const auto asked = [&] {  // anew, since a source may answer by what it saw a second ago
    return CachePlanSource(cache, packs).contenders(device, problem_key(half));
  };
  EXPECT_TRUE(asked().empty());

  // Twice the heads at half the batch: no distance apart, and yet not what was tuned for it.
  store(shape(1, 8192, 16, 64), 0.5, kUsable);
  ASSERT_EQ(asked().size(), 1U);
  EXPECT_TRUE(asked().front().other_shape);
  EXPECT_EQ(asked().front().distance, 0);
  EXPECT_FALSE(asked().front().exact());
  const auto choice = CachePlanSource(cache, packs).find(device, problem_key(half));
  ASSERT_TRUE(choice.has_value());
  EXPECT_EQ(choice->origin, Origin::nearest);
  EXPECT_EQ(choice->plan.size(), 1U);

  // Its own family goes first, be it farther.
  store(shape(2, 16384, 8, 32), 0.9, kUsable);
  ASSERT_EQ(asked().size(), 1U);
  EXPECT_FALSE(asked().front().other_shape);

  // What names templates that this build does not have gives way, of whatever shape.
  store(half, 0.4, kUnknown);
  store(shape(1, 8192, 16, 32), 0.1, kUnknown);
  ASSERT_EQ(asked().size(), 2U);
  EXPECT_FALSE(asked().front().usable);
  EXPECT_TRUE(asked().back().other_shape);
  EXPECT_TRUE(asked().back().usable);
}

}  // namespace
}  // namespace wyvern
