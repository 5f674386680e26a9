#include "cache/cache.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <limits>
#include <optional>
#include <set>
#include <thread>

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cache/cache_testing.hpp"

namespace wyvern::testing {
namespace {

void expect_same(const ArtifactRow& a, const ArtifactRow& b) {
  EXPECT_EQ(a.key, b.key);
  EXPECT_EQ(a.template_id, b.template_id);
  EXPECT_EQ(a.target, b.target);
  EXPECT_EQ(a.config, b.config);
  EXPECT_EQ(a.metadata, b.metadata);
  EXPECT_EQ(a.compile_ms, b.compile_ms);
}

TEST(Cache, CreatesPrivateDirectoryAndFile) {
  const TempDirectory temp;
  const auto directory = temp.path() / "a" / "b";
  const mode_t umask_before = ::umask(0);
  QuietCache cache(directory);
  ::umask(umask_before);
  EXPECT_EQ(cache->status(), "");
  EXPECT_EQ(cache->file(), directory / "wyvern.db");
  struct stat info{};
  ASSERT_EQ(::stat(directory.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777u, 0700u);
  ASSERT_EQ(::stat(cache->file().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777u, 0600u);
}

TEST(Cache, ArtifactsComeBackInAnotherConnection) {
  const TempDirectory temp;
  const ArtifactRow stored = artifact(1, 40000);
  {
    QuietCache cache(temp.path());
    ASSERT_TRUE(cache->store_artifact(stored));
  }
  QuietCache cache(temp.path());
  const auto found = cache->find_artifact(stored.key);
  ASSERT_TRUE(found);
  expect_same(*found, stored);
  EXPECT_EQ(found->code, stored.code);
  EXPECT_EQ(found->created.size(), std::string("2026-11-01T00:00:00.000Z").size());
  EXPECT_FALSE(cache->find_artifact(artifact(2).key));
  EXPECT_FALSE(cache->find_artifact(""));
}

TEST(Cache, StoringAnArtifactAgainReplacesIt) {
  const TempDirectory temp;
  QuietCache cache(temp.path());
  ArtifactRow row = artifact(1);
  ASSERT_TRUE(cache->store_artifact(row));
  row.code = random_bytes(77, 5000);
  row.compile_ms = 12;
  ASSERT_TRUE(cache->store_artifact(row));
  const auto found = cache->find_artifact(row.key);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->code, row.code);
  EXPECT_EQ(found->compile_ms, 12);
  EXPECT_EQ(cache->stats().artifacts, 1);
  EXPECT_EQ(cache->stats().code_bytes, 5000);
}

TEST(Cache, EmptyCodeIsCode) {
  const TempDirectory temp;
  QuietCache cache(temp.path());
  ArtifactRow row = artifact(1, 0);
  ASSERT_TRUE(cache->store_artifact(row));
  ASSERT_TRUE(cache->find_artifact(row.key));
}

TEST(Cache, AConfigMayHaveSeveralMeasurements) {
  const TempDirectory temp;
  QuietCache cache(temp.path());
  MeasurementRow first = measurement(1);
  first.created = "2026-11-01T00:00:00.000Z";
  MeasurementRow again = first;
  again.samples_us = {3.5, 1e-3, 1.0 / 3.0};
  again.median_us = 3.5;
  again.driver = "590.01";
  again.created = "2026-11-02T00:00:00.000Z";
  const MeasurementRow other = measurement(2);
  // The newest answers, whichever was stored last.
  ASSERT_TRUE(cache->store_measurement(again));
  ASSERT_TRUE(cache->store_measurement(other));
  ASSERT_TRUE(cache->store_measurement(first));
  ASSERT_TRUE(cache->store_measurement(first));  // the same row is one

  const auto found =
      cache->find_measurement(first.device, first.problem, first.template_id, first.config);
  ASSERT_TRUE(found);
  EXPECT_GT(found->id, 0);
  EXPECT_EQ(found->samples_us, again.samples_us);
  EXPECT_EQ(found->driver, "590.01");
  EXPECT_EQ(found->error, first.error);
  EXPECT_EQ(found->status, "ok");
  const auto both =
      cache->find_measurements(first.device, first.problem, first.template_id, first.config);
  ASSERT_EQ(both.size(), 2u);
  EXPECT_EQ(both[0].driver, "590.01");
  EXPECT_EQ(both[1].driver, first.driver);
  EXPECT_EQ(both[1].samples_us, first.samples_us);
  EXPECT_EQ(cache->measurements(first.device, first.problem).size(), 3u);
  EXPECT_TRUE(cache->measurements(first.device, "another problem").empty());
  EXPECT_FALSE(
      cache->find_measurement("another device", first.problem, first.template_id, first.config));
}

TEST(Cache, MeasurementsSayWhereAndHowExactly) {
  const TempDirectory temp;
  MeasurementRow row = measurement(1);
  row.setting = {.B = 1,
                 .T = 82,
                 .N = 3,
                 .lengths = {5, 0, 77},
                 .host = "node7",
                 .unit = "GPU-1b2c3d4e-0000-0000-0000-000000000001",
                 .clock_mhz = 1755.5,
                 .memory_clock_mhz = 3201,
                 .power_limit_w = 700,
                 .regime = "cold, 4 launches a sample"};
  row.clocks_mhz = {1755, 1770, std::numeric_limits<double>::quiet_NaN()};
  QuietCache(temp.path())->store_measurement(row);
  QuietCache cache(temp.path());
  const auto found = cache->find_measurement(row.device, row.problem, row.template_id, row.config);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->setting.B, 1);
  EXPECT_EQ(found->setting.T, 82);
  EXPECT_EQ(found->setting.N, 3);
  EXPECT_EQ(found->setting.lengths, row.setting.lengths);
  EXPECT_EQ(found->setting.host, "node7");
  EXPECT_EQ(found->setting.unit, row.setting.unit);
  EXPECT_EQ(found->setting.clock_mhz, 1755.5);
  EXPECT_EQ(found->setting.memory_clock_mhz, 3201);
  EXPECT_EQ(found->setting.power_limit_w, 700);
  EXPECT_EQ(found->setting.regime, row.setting.regime);
  ASSERT_EQ(found->clocks_mhz.size(), 3u);
  EXPECT_EQ(found->clocks_mhz[1], 1770);
  EXPECT_TRUE(std::isnan(found->clocks_mhz[2]));
}

TEST(Cache, WinnersSayWhereAndHowExactly) {
  const TempDirectory temp;
  WinnerRow row = winner(82, 3);
  row.samples_us = {1.5, 1.25}, row.default_samples_us = {2, 2.5};
  row.floor_us = 0.5, row.problem = R"({"op":"kda"})";
  row.setting.lengths = {5, 0, 77}, row.setting.host = "node7";
  QuietCache(temp.path())->store_winner(row);
  QuietCache cache(temp.path());
  const auto found = cache->list_winners();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].samples_us, row.samples_us);
  EXPECT_EQ(found[0].default_samples_us, row.default_samples_us);
  EXPECT_EQ(found[0].ratio, 0.625);  // the median of 1.5 / 2 and 1.25 / 2.5
  EXPECT_EQ(found[0].floor_us, 0.5);
  EXPECT_EQ(found[0].problem, row.problem);
  EXPECT_EQ(found[0].round, 1);
  EXPECT_EQ(found[0].setting.lengths, row.setting.lengths);
  EXPECT_EQ(found[0].setting.host, "node7");
  EXPECT_EQ(cache->find_winner(row.device, row.family, 82, 3)->ratio, 0.625);
}

TEST(Cache, FailedMeasurementsMayHoldNoNumbers) {
  const TempDirectory temp;
  QuietCache cache(temp.path());
  MeasurementRow row = measurement(1);
  row.status = "wrong";
  row.detail = "o differs from the reference by 0.3.";
  row.samples_us.clear();
  row.median_us = std::numeric_limits<double>::quiet_NaN();
  row.error = std::numeric_limits<double>::infinity();
  ASSERT_TRUE(cache->store_measurement(row));
  const auto found = cache->find_measurement(row.device, row.problem, row.template_id, row.config);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->detail, row.detail);
  EXPECT_TRUE(found->samples_us.empty());
  EXPECT_TRUE(std::isnan(found->median_us));
  EXPECT_TRUE(std::isinf(found->error));
}

TEST(Cache, WinnersAreFoundByExactBuckets) {
  const TempDirectory temp;
  QuietCache cache(temp.path());
  ASSERT_TRUE(cache->store_winner(winner(8192, 1)));
  WinnerRow better = winner(8192, 1);
  better.median_us = 1.5;
  ASSERT_TRUE(cache->store_winner(better));
  const auto found = cache->find_winner(better.device, "gdn", 8192, 1);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->median_us, 1.5);
  EXPECT_EQ(found->default_us, better.default_us);
  EXPECT_EQ(found->plan, better.plan);
  EXPECT_EQ(found->driver, better.driver);
  EXPECT_FALSE(cache->find_winner(better.device, "gdn", 8192, 2));
  EXPECT_FALSE(cache->find_winner(better.device, "gdn", 4096, 1));
  EXPECT_FALSE(cache->find_winner(better.device, "kda", 8192, 1));
  EXPECT_FALSE(cache->find_winner("cpu", "gdn", 8192, 1));
  EXPECT_EQ(cache->stats().winners, 1);
}

TEST(Cache, WinnersOfAProblemStandInTheOrderInWhichTheyAnswer) {
  const TempDirectory temp;
  QuietCache cache(temp.path());
  const std::string device = winner(1, 1).device;
  EXPECT_TRUE(cache->find_winners(device, "gdn", 8, 1).empty());
  for (const double median : {3.0, 1.0, 2.0}) {  // the last tuning answers, whatever its time
    WinnerRow row = winner(8, 1);
    row.median_us = median;
    ASSERT_TRUE(cache->store_winner(row));
  }
  ASSERT_TRUE(cache->store_winner(winner(8, 2)));
  const auto found = cache->find_winners(device, "gdn", 8, 1);
  ASSERT_EQ(found.size(), 3u);
  EXPECT_EQ(found[0].median_us, 2);
  EXPECT_EQ(found[1].median_us, 1);
  EXPECT_EQ(found[2].median_us, 3);
  EXPECT_EQ(cache->find_winner(device, "gdn", 8, 1)->id, found[0].id);
}

TEST(Cache, WinnersAreListedByHowTheirFamilyBegins) {
  const TempDirectory temp;
  QuietCache cache(temp.path());
  WinnerRow elsewhere = winner(4, 1, "kda/forward/H=1");
  elsewhere.device = "A";
  const std::vector<WinnerRow> rows{
      winner(8, 1, "kda/forward/H=2"),  winner(8, 2, "kda/forward/H=1"),
      winner(8, 1, "kda/forward/H=1"),  winner(8, 1, "kda/forward"),
      winner(8, 1, "kda/backward/H=1"), elsewhere};
  for (const WinnerRow& row : rows) ASSERT_TRUE(cache->store_winner(row));
  const auto found = cache->winners_of("kda/forward/");
  ASSERT_EQ(found.size(), 4u);
  EXPECT_EQ(found[0].device, "A");
  EXPECT_EQ(found[1].family, "kda/forward/H=1");
  EXPECT_EQ(found[1].sequences, 1);
  EXPECT_EQ(found[2].sequences, 2);
  EXPECT_EQ(found[3].family, "kda/forward/H=2");
  EXPECT_EQ(cache->winners_of("").size(), rows.size());
  EXPECT_TRUE(cache->winners_of("gdn2").empty());
}

TEST(Cache, ListsNewestFirstAndArtifactsWithoutCode) {
  const TempDirectory temp;
  QuietCache cache(temp.path());
  for (std::uint64_t i = 0; i < 5; ++i) {
    ASSERT_TRUE(cache->store_artifact(artifact(i)));
    ASSERT_TRUE(cache->store_measurement(measurement(i)));
    ASSERT_TRUE(cache->store_winner(winner(std::int64_t{1} << i, 1)));
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  ASSERT_TRUE(cache->store_artifact(artifact(2)));
  const auto artifacts = cache->list_artifacts();
  ASSERT_EQ(artifacts.size(), 5u);
  EXPECT_EQ(artifacts[0].key, artifact(2).key);
  EXPECT_EQ(artifacts[1].key, artifact(4).key);
  EXPECT_EQ(artifacts[4].key, artifact(0).key);
  EXPECT_TRUE(artifacts[0].code.empty());
  ASSERT_EQ(cache->list_measurements().size(), 5u);
  EXPECT_EQ(cache->list_measurements()[0].config, measurement(4).config);
  ASSERT_EQ(cache->list_winners().size(), 5u);
  EXPECT_EQ(cache->list_winners()[0].tokens, 16);
}

TEST(Cache, ClearEmptiesAndGivesSpaceBack) {
  const TempDirectory temp;
  QuietCache cache(temp.path());
  for (std::uint64_t i = 0; i < 50; ++i) ASSERT_TRUE(cache->store_artifact(artifact(i, 20000)));
  ASSERT_TRUE(cache->store_measurement(measurement(1)));
  ASSERT_TRUE(cache->store_winner(winner(1, 1)));
  const CacheStats before = cache->stats();
  EXPECT_EQ(before.artifacts, 50);
  EXPECT_EQ(before.code_bytes, 50 * 20000);
  EXPECT_GT(before.file_bytes, 50 * 20000);
  ASSERT_TRUE(cache->clear());
  const CacheStats after = cache->stats();
  EXPECT_EQ(after.artifacts + after.measurements + after.winners + after.code_bytes, 0);
  EXPECT_LT(after.file_bytes, 100000);
  EXPECT_TRUE(cache->list_artifacts().empty());
  EXPECT_TRUE(cache->store_artifact(artifact(1)));
  QuietCache other(temp.path());
  EXPECT_TRUE(other->find_artifact(artifact(1).key));
}

TEST(Cache, ThreadsShareOneCache) {
  const TempDirectory temp;
  QuietCache cache(temp.path());
  constexpr std::uint64_t kThreads = 8;
  constexpr std::uint64_t kEach = 25;
  std::atomic<int> failures = 0;
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (std::uint64_t i = 0; i < kEach; ++i) {
        const ArtifactRow row = artifact(t * kEach + i, 200);
        if (!cache->store_artifact(row)) ++failures;
        const auto found = cache->find_artifact(row.key);
        if (!found || found->code != row.code) ++failures;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
  EXPECT_EQ(cache->stats().artifacts, static_cast<std::int64_t>(kThreads * kEach));
}

class DefaultDirectory : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : kNames) {
      const char* value = std::getenv(name);
      saved_.push_back(value != nullptr ? std::optional<std::string>(value) : std::nullopt);
      ::unsetenv(name);
    }
  }
  void TearDown() override {
    for (std::size_t i = 0; i < saved_.size(); ++i) {
      if (saved_[i])
        ::setenv(kNames[i], saved_[i]->c_str(), 1);
      else
        ::unsetenv(kNames[i]);
    }
  }
  static constexpr const char* kNames[] = {"WYVERN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"};
  std::vector<std::optional<std::string>> saved_;
};

TEST_F(DefaultDirectory, FollowsItsThreeVariablesInOrder) {
  EXPECT_EQ(Cache::default_directory(), "");
  ::setenv("HOME", "/home/someone", 1);
  EXPECT_EQ(Cache::default_directory(), "/home/someone/.cache/wyvern");
  ::setenv("XDG_CACHE_HOME", "relative", 1);
  EXPECT_EQ(Cache::default_directory(), "/home/someone/.cache/wyvern");
  ::setenv("XDG_CACHE_HOME", "/var/xdg", 1);
  EXPECT_EQ(Cache::default_directory(), "/var/xdg/wyvern");
  ::setenv("WYVERN_CACHE_DIR", "/data/wyvern", 1);
  EXPECT_EQ(Cache::default_directory(), "/data/wyvern");
  ::setenv("WYVERN_CACHE_DIR", "", 1);
  EXPECT_EQ(Cache::default_directory(), "/var/xdg/wyvern");
}

TEST_F(DefaultDirectory, WithoutAnyTheCacheDoesNothing) {
  QuietCache cache(Cache::default_directory());
  EXPECT_EQ(cache->file(), "");
  EXPECT_FALSE(cache->store_artifact(artifact(1)));
  EXPECT_FALSE(cache->find_artifact(artifact(1).key));
  EXPECT_NE(cache->status().find("WYVERN_CACHE_DIR"), std::string::npos);
  EXPECT_EQ(cache.told, 1);
}

TEST(Cache, OfARelativeDirectoryStaysWhereItWas) {
  const TempDirectory temp;
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(temp.path());
  QuietCache cache("mine");
  std::filesystem::create_directory("elsewhere");
  std::filesystem::current_path("elsewhere");
  std::filesystem::remove_all(temp.path() / "mine");  // it has to be made anew
  EXPECT_TRUE(cache->store_artifact(artifact(1)));
  std::filesystem::current_path(before);
  EXPECT_EQ(cache->file(), temp.path() / "mine" / "wyvern.db");
  EXPECT_TRUE(std::filesystem::exists(temp.path() / "mine" / "wyvern.db"));
  EXPECT_FALSE(std::filesystem::exists(temp.path() / "elsewhere" / "mine"));
}

TEST(Claim, OneHasItAtATimeAndOthersWait) {
  const TempDirectory temp;
  QuietCache first(temp.path()), second(temp.path());
  std::optional<ArtifactClaim> held = first->claim_artifact("key", kFar);
  EXPECT_FALSE(held->waited());
  EXPECT_FALSE(second->claim_artifact("another key", kFar).waited());
  std::atomic<bool> has_it = false;
  std::thread other([&] {
    const ArtifactClaim claim = second->claim_artifact("key", kFar);
    has_it = true;
    EXPECT_TRUE(claim.waited());
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_FALSE(has_it);
  held.reset();
  other.join();
  EXPECT_TRUE(has_it);
  EXPECT_FALSE(first->claim_artifact("key", kFar).waited());
}

TEST(Claim, EndsWithItsProcess) {
  const TempDirectory temp;
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    QuietCache cache(temp.path());
    const ArtifactClaim claim = cache->claim_artifact("key", kFar);
    if (::write(ready[1], "x", 1) == 1) ::pause();
    ::_exit(1);
  }
  ASSERT_GT(child, 0);
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  QuietCache cache(temp.path());
  std::thread killer([child] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    ::kill(child, SIGKILL);
  });
  EXPECT_TRUE(cache->claim_artifact("key", kFar).waited());
  killer.join();
  ::waitpid(child, nullptr, 0);
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST(Claim, IsOfNothingWhereThereIsNoDirectory) {
  QuietCache cache("/dev/null/nowhere");
  const ArtifactClaim one = cache->claim_artifact("key", kFar);
  EXPECT_FALSE(one.waited());
  EXPECT_FALSE(cache->claim_artifact("key", kFar).waited());

  const TempDirectory elsewhere;
  const auto here = std::filesystem::current_path();
  std::filesystem::current_path(elsewhere.path());
  QuietCache none{std::filesystem::path()};  // as without a home directory
  EXPECT_FALSE(none->claim_artifact("key", kFar).waited());
  std::filesystem::current_path(here);
  EXPECT_TRUE(std::filesystem::is_empty(elsewhere.path()));
}

}  // namespace
}  // namespace wyvern::testing
