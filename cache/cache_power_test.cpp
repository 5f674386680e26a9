// The power is lost after every write, sync and renaming of a cache's work, and what was not
// synchronized is lost in several ways. What the next process finds is compared with what was
// stored.
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "cache/cache_content_testing.hpp"
#include "cache/cache_testing.hpp"
#include "cache/database.hpp"
#include "cache/disk_testing.hpp"
#include "cache/schema.hpp"

namespace wyvern::testing {
namespace {

using Loss = Record::Loss;

/// One piece of work, and what the cache holds once it is done.
struct Step {
  std::function<bool(Cache&)> work;
  Content after;
};

/// Rows small and large, replaced and deleted.
std::vector<Step> steps() {
  std::vector<Step> all;
  Content content;
  const auto add = [&](auto row, auto store) {
    content.store(row);
    all.push_back({[=](Cache& cache) { return (cache.*store)(row); }, content});
  };
  for (std::uint64_t i = 0; i < 3; ++i) {
    add(artifact(i, i == 1 ? 30000 : 300), &Cache::store_artifact);
    add(measurement(i), &Cache::store_measurement);
    add(winner(static_cast<std::int64_t>(i) + 1, 1), &Cache::store_winner);
  }
  ArtifactRow again = artifact(1, 30000);
  again.config = "BT=16";
  add(again, &Cache::store_artifact);
  MeasurementRow measured = measurement(2);
  measured.status = "crashed";
  add(measured, &Cache::store_measurement);
  content = {};
  all.push_back({[](Cache& cache) { return cache.clear(); }, content});
  add(artifact(5, 9000), &Cache::store_artifact);
  add(winner(8, 4), &Cache::store_winner);
  return all;
}

/// Random losses differ, so each point has several.
constexpr std::array kLosses = {Loss::nothing, Loss::all,    Loss::torn,
                                Loss::random,  Loss::random, Loss::random};

const char* name_of(Loss loss) {
  switch (loss) {
    case Loss::nothing: return "nothing lost";
    case Loss::all: return "all lost";
    case Loss::torn: return "last write torn";
    case Loss::random: return "some lost";
  }
  return "";
}

/// Calls `check` for the disk after each loss of power at each point of the record.
void at_each_point(const Record& record,
                   const std::function<void(const TempDirectory&, int mark)>& check) {
  const std::uint32_t seed = std::random_device{}();
  std::mt19937 random(seed);
  for (std::size_t length = 0; length <= record.size(); ++length) {
    for (const Loss loss : kLosses) {
      SCOPED_TRACE(std::string(name_of(loss)) + " after event " + std::to_string(length) +
                   ", seed " + std::to_string(seed));
      const TempDirectory temp;
      record.lose_power(length, loss, random, temp.path());
      check(temp, record.mark_at(length));
      if (::testing::Test::HasFailure()) return;
    }
  }
}

std::string integrity(const std::filesystem::path& file) {
  Database database(file, Database::Mode::read_only);
  Query check(database, "PRAGMA integrity_check");
  return check.step() ? check.text(0) : "no answer";
}

TEST(CachePower, StoredRowsSurvive) {
  const std::vector<Step> all = steps();
  const TempDirectory temp;
  Record record;
  record.begin(temp.path());
  {
    QuietCache cache(temp.path());
    for (std::size_t i = 0; i < all.size(); ++i) {
      record.mark(static_cast<int>(i));  // steps that are done
      ASSERT_TRUE(all[i].work(cache.cache));
    }
    record.mark(static_cast<int>(all.size()));
  }
  record.end();
  EXPECT_GT(record.size(), 100u);
  at_each_point(record, [&](const TempDirectory& disk, int done) {
    QuietCache cache(disk.path());
    const Content content = content_of(cache.cache);
    EXPECT_EQ(cache.told, 0) << cache.said;
    // The one under way may have come through or not.
    bool is_state = false;
    for (int i = done; i <= done + 1 && i <= static_cast<int>(all.size()); ++i)
      is_state |= content == (i == 0 ? Content{} : all[static_cast<std::size_t>(i) - 1].after);
    EXPECT_TRUE(is_state) << done << " steps done, " << content.size() << " rows found";
    EXPECT_TRUE(cache->store_artifact(artifact(77)));
    EXPECT_EQ(integrity(disk.file()), "ok");
  });
}

TEST(CachePower, RepairingADamagedFileLosesNoMoreThanItWould) {
  const TempDirectory temp;
  {
    QuietCache cache(temp.path());
    for (std::uint64_t i = 0; i < 12; ++i) {
      ASSERT_TRUE(cache->store_artifact(artifact(i, 2000)));
      ASSERT_TRUE(cache->store_measurement(measurement(i)));
    }
  }
  std::filesystem::resize_file(temp.file(), std::filesystem::file_size(temp.file()) * 9 / 10);
  const std::string damaged = read_file(temp.file());
  Record record;
  record.begin(temp.path());
  Content repaired;
  {
    QuietCache cache(temp.path());
    repaired = content_of(cache.cache);
    EXPECT_EQ(cache.told, 1);
  }
  record.end();
  EXPECT_GT(repaired.size(), 5u);
  EXPECT_GT(record.size(), 5u);
  at_each_point(record, [&](const TempDirectory& disk, int) {
    QuietCache cache(disk.path());
    content_of(cache.cache);
    EXPECT_TRUE(content_of(cache.cache) == repaired);
    EXPECT_TRUE(cache->store_artifact(artifact(77)));
    EXPECT_EQ(integrity(disk.file()), "ok");
    bool is_kept = false;
    for (const auto& entry : std::filesystem::directory_iterator(disk.path())) {
      const std::string name = entry.path().filename();
      EXPECT_EQ(name.find(".new"), name.npos) << name;
      is_kept |= name.starts_with("wyvern.db.corrupt-") && read_file(entry.path()) == damaged;
    }
    EXPECT_TRUE(is_kept);
  });
}

}  // namespace
}  // namespace wyvern::testing
