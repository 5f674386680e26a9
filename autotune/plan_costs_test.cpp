// The one cost by which default plans are chosen, against whole plans that a device timed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "autotune/gzip.hpp"
#include "autotune/protocol.hpp"
#include "runtime/plan.hpp"

namespace wyvern {
namespace {

Target target_of(const nlohmann::json& head) {
  Target target = cuda_target(head.at("arch").get<std::string>());
  target.limits.multiprocessors = head.at("multiprocessors").get<int>();
  target.limits.bytes_per_us = head.at("bytes_per_us").get<double>();
  return target;
}

struct Timed {
  double us = 0, cost = 0;
};

TEST(PlanCosts, ChooseAmongTimedPlansOneNearTheFastest) {
  constexpr double kOne = 1.12, kMean = 1.02;  // of the fastest's time
  std::size_t files = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::filesystem::path(WYVERN_RECORDINGS) / "plans")) {
    SCOPED_TRACE(entry.path().filename());
    std::ostringstream data;
    data << std::ifstream(entry.path(), std::ios::binary).rdbuf();
    std::istringstream lines(gunzip(data.str()));
    std::string line;
    ASSERT_TRUE(std::getline(lines, line));
    const Target target = target_of(nlohmann::json::parse(line));
    double logs = 0;
    std::size_t problems = 0;
    while (std::getline(lines, line)) {
      const auto row = nlohmann::json::parse(line);
      const Problem problem = problem_from(row.at("problem"));
      SCOPED_TRACE(problem_key(problem).to_string());
      std::vector<Timed> plans;
      for (const auto& timed : row.at("plans")) {
        if (!timed.contains("us")) continue;
        const Plan plan = plan_from(timed.at("plan"));
        if (!plan_problem(problem, plan, target).empty()) continue;  // no longer legal
        plans.push_back({timed.at("us").get<double>(), plan_cost(problem, plan, target)});
      }
      ASSERT_GT(plans.size(), 1U);
      const double fastest = std::ranges::min(plans, {}, &Timed::us).us;
      const double chosen = std::ranges::min(plans, {}, &Timed::cost).us;
      EXPECT_LE(chosen, kOne * fastest);
      logs += std::log(chosen / fastest);
      ++problems;
    }
    ASSERT_GT(problems, 0U);
    EXPECT_LE(std::exp(logs / static_cast<double>(problems)), kMean);
    ++files;
  }
  EXPECT_GT(files, 0U);
}

}  // namespace
}  // namespace wyvern
