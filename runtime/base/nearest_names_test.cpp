#include <gtest/gtest.h>

#include <array>
#include <set>
#include <string>

#include "runtime/base/nearest_names.hpp"

namespace wyvern {
namespace {

using Names = std::vector<std::string_view>;

TEST(NearestNames, ListsUpToEightInTheirOrder) {
  EXPECT_EQ(nearest_names("x", Names{}), "");
  EXPECT_EQ(nearest_names("c", Names{"b", "a", "c"}), "b, a, c");
  EXPECT_EQ(nearest_names("h", Names{"a", "b", "c", "d", "e", "f", "g", "h"}),
            "a, b, c, d, e, f, g, h");
}

const Names kMany{"alpha", "beta", "gamma", "delta", "epsilon",
                  "zeta",  "eta",  "theta", "iota",  "kappa"};

TEST(NearestNames, ListsTheEightNearestOfMore) {
  const std::string listed = nearest_names("thteta", kMany);
  EXPECT_EQ(listed.find("theta, "), 0u) << listed;
  EXPECT_NE(listed.find(" and 2 more"), std::string::npos) << listed;
  EXPECT_EQ(listed.find("epsilon"), std::string::npos) << listed;
}

TEST(NearestNames, PutsNamesThatContainTheTextFirst) {
  // By edit distance alone "eta" is nearer to "psi" than "epsilon" is.
  EXPECT_EQ(nearest_names("psi", kMany).find("epsilon, "), 0u);
  EXPECT_EQ(nearest_names("", kMany),
            "alpha, beta, gamma, delta, epsilon, zeta, eta, theta and 2 more");
}

TEST(NearestNames, AsksWhatWasMeant) {
  const Names verbs{"run", "tune", "bench"};
  EXPECT_EQ(nearest_names("tnue", verbs), "run, tune, bench (did you mean tune?)");
  EXPECT_EQ(nearest_names("tun", verbs), "run, tune, bench (did you mean tune?)");
  EXPECT_EQ(nearest_names("bnech", verbs), "run, tune, bench (did you mean bench?)");
  EXPECT_EQ(nearest_names("verify", verbs), "run, tune, bench");
  EXPECT_EQ(nearest_names("do", Names{"dq", "dk"}), "dq, dk");
  const std::string many = nearest_names("thteta", kMany);
  EXPECT_TRUE(many.ends_with(" and 2 more (did you mean theta?)")) << many;
}

TEST(NearestNames, TakesAnyListOfNames) {
  const std::set<std::string> names{"b", "a"};
  EXPECT_EQ(nearest_names("", names), "a, b");
  EXPECT_EQ(nearest_names("", std::array<std::string_view, 1>{"one"}), "one");
}

}  // namespace
}  // namespace wyvern
