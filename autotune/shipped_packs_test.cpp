// The packs that are shipped hold nothing that this build would pass over.
#include <wyvern/problem.hpp>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <vector>

#include "autotune/protocol.hpp"
#include "cache/cache_testing.hpp"
#include "cache/packs.hpp"
#include "cache/transfer.hpp"
#include "runtime/bind.hpp"
#include "runtime/plan.hpp"
#include "runtime/plan_source.hpp"

namespace wyvern {
namespace {

TEST(ShippedPacks, HoldLegalPlansThatAreFound) {
  std::size_t rows = 0;
  const std::filesystem::path folder = WYVERN_SHIPPED_PACKS;
  Packs packs({{"shipped", {folder}}},
              [](const std::string& sentence) { ADD_FAILURE() << sentence; });
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".jsonl") continue;
    SCOPED_TRACE(entry.path().filename());
    const Contents pack = read_contents(entry.path());
    EXPECT_TRUE(pack.measurements.empty());
    for (const WinnerRow& row : pack.winners) {
      SCOPED_TRACE(row.problem + " " + row.plan);
      ASSERT_TRUE(row.device.starts_with("NVIDIA H200,"))
          << "a winner of another chip: " << row.device;
      const Problem problem = problem_from(nlohmann::json::parse(row.problem));
      EXPECT_EQ(problem_key(problem).family, row.family);
      const std::optional<Plan> plan = plan_from_json(row.plan);
      ASSERT_TRUE(plan.has_value());
      EXPECT_NO_THROW(check_plan(problem, stage_uses(problem), *plan, cuda_target("sm_90a")));
      EXPECT_GT(row.ratio, 0);
      EXPECT_LE(row.ratio, 1) << "slower than the default plan";
      const Packs::Winners known = packs.winners_of(row.device, row.family);
      const auto found = std::ranges::find_if(*known, [&](const PackWinner& of) {
        return of.row.family == row.family && of.row.tokens == row.tokens &&
               of.row.sequences == row.sequences;
      });
      ASSERT_NE(found, known->end());
      EXPECT_EQ(found->row.plan, row.plan);
      ++rows;
    }
  }
  EXPECT_GT(rows, 0U);
}

// The first prefill of a prompt, without an initial state and with a final one, was never tuned.
TEST(ShippedPacks, ServeAFirstPrefill) {
  const std::filesystem::path folder = WYVERN_SHIPPED_PACKS;
  const testing::TempDirectory directory;
  CachePlanSource source(std::make_shared<Cache>(directory.path()),
                         std::make_shared<Packs>(std::vector<PackLayer>{{"shipped", {folder}}}));
  const Target target = cuda_target("sm_90a");
  std::size_t served = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".jsonl") continue;
    for (const WinnerRow& row : read_contents(entry.path()).winners) {
      Problem problem = problem_from(nlohmann::json::parse(row.problem));
      if (problem.pass != Pass::forward || !problem.initial_state || row.ratio > 0.97) continue;
      SCOPED_TRACE(row.family);
      problem.initial_state = false;
      DeviceInfo device;
      device.key = row.device;
      const auto choice = source.find(device, problem_key(problem), [&](const Plan& plan) {
        return plan_problem(problem, plan, target);
      });
      ASSERT_TRUE(choice.has_value());
      EXPECT_EQ(choice->origin, Origin::nearest) << choice->passed_over;
      ++served;
    }
  }
  EXPECT_GT(served, 0U);
}

}  // namespace
}  // namespace wyvern
