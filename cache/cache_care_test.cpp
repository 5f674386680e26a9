// Care of a cache: verification, size, diagnosis.
#include <wyvern/error.hpp>

#include <gtest/gtest.h>
#include <linux/magic.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cache/cache.hpp"
#include "cache/cache_testing.hpp"
#include "cache/care.hpp"
#include "cache/database.hpp"
#include "cache/schema.hpp"

namespace wyvern::testing {
namespace {

void alter(const TempDirectory& temp, const char* sql) {
  Database(temp.file(), Database::Mode::read_write).execute(sql);
}

TEST(Verify, FindsEveryRowThatIsNotAsItWasStored) {
  const TempDirectory temp;
  QuietCache cache(temp.path());
  for (std::uint64_t i = 0; i < 5; ++i) {
    ASSERT_TRUE(cache->store_artifact(artifact(i)));
    ASSERT_TRUE(cache->store_measurement(measurement(i)));
    ASSERT_TRUE(cache->store_winner(winner(std::int64_t{1} << i, 1)));
  }
  MeasurementRow odd = measurement(9);  // what numbers there are in rows that failed
  odd.samples_us = {std::nan(""), 1e300, -0.0, 1.0 / 3.0};
  odd.error = std::numeric_limits<double>::infinity();
  odd.median_us = std::nan("");
  odd.detail = "not UTF-8: \xff";
  ASSERT_TRUE(cache->store_measurement(odd));
  Verification result = verify_rows(cache.cache);
  EXPECT_EQ(result.artifacts, 5);
  EXPECT_EQ(result.measurements, 6);
  EXPECT_EQ(result.winners, 5);
  EXPECT_EQ(result.damage, std::vector<std::string>());

  // A problem that was tuned again has one winner, as stats() says.
  ASSERT_TRUE(cache->store_winner(winner(1, 1)));
  EXPECT_EQ(verify_rows(cache.cache).winners, cache->stats().winners);
  EXPECT_EQ(verify_rows(cache.cache).superseded, 1);

  alter(temp, "UPDATE measurements SET median_us = 1 WHERE id = 2");
  alter(temp, "UPDATE measurements SET more = '{\"B\":7}' WHERE id = 3");
  alter(temp, "UPDATE winners SET plan = '[]' WHERE id = 4");
  alter(temp, "UPDATE artifacts SET config = 'BT=1' WHERE id = 5");
  result = verify_rows(cache.cache);
  ASSERT_EQ(result.damage.size(), 4u);
  EXPECT_NE(result.damage[0].find(artifact(4).key), std::string::npos);
  EXPECT_NE(result.damage[1].find("m2"), std::string::npos);
  EXPECT_NE(result.damage[2].find("m3"), std::string::npos);
  EXPECT_NE(result.damage[3].find("w4"), std::string::npos);
}

TEST(Verify, ACacheThatCannotBeReadIsAnError) {
  QuietCache cache("/dev/null/nowhere");
  EXPECT_THROW(verify_rows(cache.cache), Error);
  EXPECT_THROW(collect(cache.cache, 1), Error);
}

TEST(Collect, TheLeastRecentlyUsedGoFirstAndWinnersStay) {
  const TempDirectory temp;
  constexpr std::size_t kSize = 50000;
  {
    QuietCache cache(temp.path());
    for (std::uint64_t i = 0; i < 10; ++i) {
      ArtifactRow row = artifact(i, kSize);
      if (i == 0) row.config = "BT=64";  // the winner's plan names it
      ASSERT_TRUE(cache->store_artifact(row));
      ASSERT_TRUE(cache->store_measurement(measurement(i)));
    }
    ASSERT_TRUE(cache->store_winner(winner(8, 1)));
  }
  // All were made long ago; 1 was used in November, 2 to 9 in October, on later and later days.
  alter(temp,
        "UPDATE artifacts SET created = '2026-09-01T00:00:00.000Z';"
        "INSERT INTO uses SELECT key, '2026-10-1' || (id - 1) || 'T00:00:00.000Z' FROM artifacts;"
        "UPDATE uses SET used = '2026-11-01T00:00:00.000Z'"
        " WHERE key = (SELECT key FROM artifacts WHERE id = 2)");
  QuietCache cache(temp.path());
  const Collection done = collect(cache.cache, 5 * kSize);
  EXPECT_LE(done.bytes, 5 * static_cast<std::int64_t>(kSize));
  EXPECT_GT(done.bytes_before, 10 * static_cast<std::int64_t>(kSize));
  EXPECT_GE(done.deleted, 5);
  EXPECT_LE(done.deleted, 7);
  for (std::uint64_t i = 2; i < 10; ++i)
    EXPECT_EQ(cache->find_artifact(artifact(i, kSize).key).has_value(),
              static_cast<std::int64_t>(i) >= 2 + done.deleted)
        << i;
  EXPECT_TRUE(cache->find_artifact(artifact(1, kSize).key));
  EXPECT_TRUE(cache->find_artifact(artifact(0, kSize).key));  // by far the oldest
  EXPECT_EQ(cache->stats().measurements, 10);

  const Collection again = collect(cache.cache, 5 * kSize);
  EXPECT_EQ(again.deleted, 0);
  const Collection all = collect(cache.cache, 0);
  EXPECT_EQ(cache->stats().artifacts, 0);
  EXPECT_GT(all.bytes, 0);  // what stays
  EXPECT_EQ(cache->stats().measurements, 10);
  EXPECT_TRUE(cache->find_winner(winner(8, 1).device, "gdn", 8, 1));
  EXPECT_EQ(verify_rows(cache.cache).damage, std::vector<std::string>());
}

TEST(Collect, AUseCountsFromTheDayAfter) {
  const TempDirectory temp;
  {
    QuietCache cache(temp.path());
    ASSERT_TRUE(cache->store_artifact(artifact(1)));
    ASSERT_TRUE(cache->find_artifact(artifact(1).key));
  }
  const auto uses = [&] {
    return Database(temp.file(), Database::Mode::read_only).integer("SELECT count(*) FROM uses");
  };
  EXPECT_EQ(uses(), 0);  // made today
  alter(temp, "UPDATE artifacts SET created = '2026-01-01T00:00:00.000Z'");
  {
    QuietCache cache(temp.path());
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(cache->find_artifact(artifact(1).key));
    EXPECT_EQ(uses(), 0);  // a look-up writes nothing
  }
  EXPECT_EQ(uses(), 1);
  const std::string before = read_file(temp.file());
  {
    EXPECT_TRUE(QuietCache(temp.path())->find_artifact(artifact(1).key));
  }
  EXPECT_EQ(read_file(temp.file()), before);  // known already
}

std::vector<std::string> checks(const std::vector<Finding>& findings, Finding::Weight least) {
  std::vector<std::string> names;
  for (const Finding& finding : findings)
    if (finding.weight >= least) names.push_back(finding.check);
  return names;
}

using Names = std::vector<std::string>;
using Weight = Finding::Weight;

TEST(Diagnose, FindsNothingWrongWithASoundCache) {
  const TempDirectory temp;
  QuietCache(temp.path())->store_winner(winner(1, 1));
  EXPECT_EQ(checks(diagnose(temp.path(), {{winner(1, 1).device, "580.65"}}), Weight::note),
            Names());
  EXPECT_EQ(checks(diagnose(temp.path() / "later", {}), Weight::warning), Names());
  EXPECT_EQ(checks(diagnose("", {}), Weight::error), Names{"directory"});
}

TEST(Diagnose, CountsProblemsWhoseFirstWinnerIsAnotherBuilds) {
  const TempDirectory temp;
  const std::string device = winner(1, 1).device;
  const auto store = [&](std::int64_t tokens, std::string plan, std::string on = "") {
    WinnerRow row = winner(tokens, 1);
    row.plan = "[\"" + plan + "\"]";
    row.problem = R"({"op":"gdn"})";
    if (!on.empty()) row.device = on;
    ASSERT_TRUE(QuietCache(temp.path())->store_winner(row));
  };
  const auto findings = [&] {
    return diagnose(temp.path(), {{device, "580.65"}}, [](const WinnerRow& row) -> std::string {
      EXPECT_FALSE(row.problem.empty());  // the check may need it
      return row.plan == "[\"theirs\"]" ? "it has a template that this build has not" : "";
    });
  };
  store(8, "theirs");
  store(8, "ours");  // tuned again: theirs is history
  store(16, "theirs", "another machine's");
  EXPECT_EQ(checks(findings(), Weight::warning), Names());
  store(32, "ours");
  store(32, "theirs");
  store(64, "theirs");
  store(64, "theirs");
  const auto found = findings();
  EXPECT_EQ(checks(found, Weight::warning), Names{"plans"});
  EXPECT_NE(found.back().message.find("2 problems, 1 of which with another"), std::string::npos)
      << found.back().message;
  EXPECT_NE(found.back().message.find("has a template that this build has not"), std::string::npos);
  EXPECT_NE(found.back().fix.find("tune"), std::string::npos);
}

TEST(Diagnose, FindsWrongOwnersDamageStaleRowsAndForeignFiles) {
  const TempDirectory temp;
  {
    QuietCache cache(temp.path());
    ASSERT_TRUE(cache->store_winner(winner(1, 1)));
    ASSERT_TRUE(cache->store_measurement(measurement(1)));
  }
  const auto stale = diagnose(temp.path(), {{winner(1, 1).device, "590.00"}});
  EXPECT_EQ(checks(stale, Weight::warning), Names{"driver"});
  EXPECT_NE(stale.back().message.find("1 winner and 1 measurement of"), std::string::npos);
  EXPECT_NE(stale.back().fix.find("tune"), std::string::npos);

  alter(temp, "UPDATE winners SET plan = '[]'");
  EXPECT_EQ(checks(diagnose(temp.path(), {}), Weight::warning), Names{"damage"});

  const std::string sound = read_file(temp.file());
  write_file(temp.file(), sound.substr(0, 3 * 4096));
  EXPECT_EQ(checks(diagnose(temp.path(), {}), Weight::warning), Names{"damage"});
  EXPECT_EQ(read_file(temp.file()), sound.substr(0, 3 * 4096));  // read, not repaired

  write_file(temp.file(), sound);
  for (const char* version : {"PRAGMA user_version = 1000", "PRAGMA user_version = 2"}) {
    alter(temp, version);
    EXPECT_EQ(checks(diagnose(temp.path(), {}), Weight::warning), Names{"version"});
  }

  write_file(temp.file(), sound);
  write_file(temp.path() / "wyvern.db.corrupt-20261101T000000Z", "old");
  const auto kept = diagnose(temp.path(), {});
  EXPECT_TRUE(std::any_of(kept.begin(), kept.end(), [](const Finding& finding) {
    return finding.weight == Weight::note && finding.fix.find("rm ") == 0;
  }));

  std::filesystem::permissions(temp.file(), std::filesystem::perms::others_write,
                               std::filesystem::perm_options::add);
  const auto open = diagnose(temp.path(), {});
  EXPECT_EQ(checks(open, Weight::warning), Names{"owner"});
  EXPECT_NE(open.back().fix.find("chmod go-w"), std::string::npos);
}

TEST(Doctor, WarnsOfDisksOverANetwork) {
  const TempDirectory temp;
  QuietCache(temp.path())->store_winner(winner(1, 1));
  const auto found_on = [&](long type) {
    for (const Finding& finding : diagnose(temp.path(), {}, nullptr, [&](const auto&) {
           return static_cast<std::uint32_t>(type);
         }))
      if (finding.check == "file system") return finding;
    return Finding();
  };
  for (const auto& [type, name] : {std::pair{long{NFS_SUPER_MAGIC}, "NFS"},
                                   {long{SMB2_SUPER_MAGIC}, "SMB"},
                                   {long{CEPH_SUPER_MAGIC}, "Ceph"},
                                   {long{AFS_SUPER_MAGIC}, "AFS"},
                                   {long{AFS_FS_MAGIC}, "AFS"},
                                   {long{V9FS_MAGIC}, "9P"}}) {
    const Finding finding = found_on(type);
    EXPECT_EQ(finding.weight, Weight::warning) << name;
    EXPECT_NE(finding.message.find(std::string(" ") + name + ","), std::string::npos)
        << finding.message;
    EXPECT_NE(finding.fix.find("WYVERN_CACHE_DIR"), std::string::npos);
  }
  EXPECT_EQ(found_on(FUSE_SUPER_MAGIC).weight, Weight::note);
  for (const long type : {long{EXT4_SUPER_MAGIC}, long{TMPFS_MAGIC}, 0L})
    EXPECT_EQ(found_on(type).weight, Weight::good) << type;
  EXPECT_NE(file_system_type(temp.path()), 0u);
  EXPECT_EQ(file_system_type("/nowhere"), 0u);
}

}  // namespace
}  // namespace wyvern::testing
