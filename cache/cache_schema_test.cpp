// Files of every schema that has landed, built from the statements of their day, and what becomes
// of their rows.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "cache/cache.hpp"
#include "cache/cache_testing.hpp"
#include "cache/database.hpp"
#include "cache/schema.hpp"

namespace wyvern::testing {
namespace {

// As version 1 made its tables, to the letter.
constexpr const char* kTablesOf1 = R"sql(
    CREATE TABLE artifacts (
      id          INTEGER PRIMARY KEY,
      key         TEXT NOT NULL UNIQUE,
      template_id TEXT NOT NULL,
      target      TEXT NOT NULL,
      config      TEXT NOT NULL,
      metadata    TEXT NOT NULL CHECK (json_valid(metadata)),
      compile_ms  REAL,
      created     TEXT NOT NULL,
      sha256      TEXT NOT NULL,
      code        BLOB NOT NULL
    ) STRICT;
    CREATE TABLE measurements (
      id           INTEGER PRIMARY KEY,
      device       TEXT NOT NULL,
      problem      TEXT NOT NULL,
      template_id  TEXT NOT NULL,
      config       TEXT NOT NULL,
      artifact_key TEXT NOT NULL,
      driver       TEXT NOT NULL,
      status       TEXT NOT NULL,
      detail       TEXT NOT NULL,
      samples_us   TEXT NOT NULL CHECK (json_valid(samples_us)),
      median_us    REAL,
      error        REAL,
      created      TEXT NOT NULL,
      UNIQUE (device, problem, template_id, config)
    ) STRICT;
    CREATE TABLE winners (
      id         INTEGER PRIMARY KEY,
      device     TEXT NOT NULL,
      family     TEXT NOT NULL,
      tokens     INTEGER NOT NULL,
      sequences  INTEGER NOT NULL,
      plan       TEXT NOT NULL CHECK (json_valid(plan)),
      median_us  REAL,
      default_us REAL,
      driver     TEXT NOT NULL,
      created    TEXT NOT NULL,
      UNIQUE (device, family, tokens, sequences)
    ) STRICT;
  )sql";

// What version 2 changed of them.
constexpr const char* kStepTo2 = "ALTER TABLE artifacts RENAME COLUMN sha256 TO digest";

constexpr std::int64_t kRows = 20;

void make_tables(Database& database, std::int64_t version) {
  database.execute(kTablesOf1);
  if (version >= 2) database.execute(kStepTo2);
  database.execute(
      ("PRAGMA application_id = 1465472590; PRAGMA user_version = " + std::to_string(version))
          .c_str());
}

void add_artifacts(Database& database, std::int64_t version) {
  const std::string column = version >= 2 ? "digest" : "sha256";
  const std::string sql =
      "INSERT INTO artifacts (key, template_id, target, config, metadata, compile_ms, created, " +
      column + ", code) VALUES (?, ?, ?, ?, ?, 2.5, '2026-11-01T00:00:00.000Z', ?, ?)";
  for (std::uint64_t i = 0; i < kRows; ++i) {
    const ArtifactRow row = artifact(i, 500);
    const std::string code_digest = sha256_hex(row.code);
    const std::string digest = version >= 2 ? artifact_digest(row, code_digest) : code_digest;
    Query(database, sql.c_str())
        .bind(row.key)
        .bind(row.template_id)
        .bind(row.target)
        .bind(row.config)
        .bind(row.metadata)
        .bind(digest)
        .bind_blob(row.code)
        .step();
  }
}

/// Of the kinds that tunings left: times, and failures without any.
void add_measurements(Database& database) {
  for (std::int64_t i = 0; i < kRows; ++i) {
    const std::string config = "BT=64,BV=" + std::to_string(i);
    const bool failed = i % 5 == 4;
    const std::string samples = failed ? "[]" : "[3.5,1e-3,null," + std::to_string(i) + ".25]";
    Query query(database,
                "INSERT INTO measurements (device, problem, template_id, config, artifact_key,"
                " driver, status, detail, samples_us, median_us, error, created)"
                " VALUES ('cpu', 'family/tokens=2048/sequences=1', 'fwd_h.cpu', ?, 'key', '13.0',"
                " ?, ?, ?, ?, 9e999, '2026-11-02T00:00:00.000Z')");
    query.bind(config)
        .bind(std::string_view(failed ? "crashed" : "ok"))
        .bind(std::string_view(failed ? "its worker ended" : ""))
        .bind(samples)
        .bind(failed ? std::nan("") : 3.5)
        .step();
  }
}

void add_winners(Database& database) {
  for (std::int64_t i = 0; i < kRows; ++i) {
    Query(database,
          "INSERT INTO winners (device, family, tokens, sequences, plan, median_us, default_us,"
          " driver, created) VALUES ('cpu', 'family', ?, 1, ?, 2.0, 4.0, '13.0',"
          " '2026-11-03T00:00:00.000Z')")
        .bind(std::int64_t{1} << i)
        .bind(std::string_view(R"([{"template":"fwd_h.cpu","config":"BT=64"}])"))
        .step();
  }
}

void make_file(const std::filesystem::path& file, std::int64_t version) {
  Database database(file, Database::Mode::create);
  const Transaction at_once(database);
  make_tables(database, version);
  add_artifacts(database, version);
  add_measurements(database);
  add_winners(database);
  Query(database, "COMMIT").step();
}

void expect_all_rows(Cache& cache) {
  for (std::uint64_t i = 0; i < kRows; ++i) {
    const auto found = cache.find_artifact(artifact(i, 500).key);
    ASSERT_TRUE(found) << i;
    EXPECT_EQ(found->code, artifact(i, 500).code);
    EXPECT_EQ(found->created, "2026-11-01T00:00:00.000Z");
  }
  for (std::int64_t i = 0; i < kRows; ++i) {
    const auto row = cache.find_measurement("cpu", "family/tokens=2048/sequences=1", "fwd_h.cpu",
                                            "BT=64,BV=" + std::to_string(i));
    ASSERT_TRUE(row) << i;
    EXPECT_EQ(row->status, i % 5 == 4 ? "crashed" : "ok");
    EXPECT_EQ(row->samples_us.size(), i % 5 == 4 ? 0u : 4u);
    EXPECT_EQ(std::isnan(row->median_us), i % 5 == 4);
    EXPECT_TRUE(std::isinf(row->error));
    EXPECT_EQ(row->setting.B, 0);  // not known
    EXPECT_EQ(row->created, "2026-11-02T00:00:00.000Z");
    const auto winner = cache.find_winner("cpu", "family", std::int64_t{1} << i, 1);
    ASSERT_TRUE(winner) << i;
    EXPECT_EQ(winner->median_us, 2.0);
    EXPECT_EQ(winner->round, 1);
    EXPECT_EQ(winner->created, "2026-11-03T00:00:00.000Z");
  }
  EXPECT_EQ(cache.nearest_winner("cpu", "family", 5, 1)->tokens, 4);
  const CacheStats stats = cache.stats();
  EXPECT_EQ(stats.artifacts, kRows);
  EXPECT_EQ(stats.measurements, kRows);
  EXPECT_EQ(stats.winners, kRows);
}

class OldFile : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(OldFile, KeepsEveryRow) {
  const TempDirectory temp;
  make_file(temp.file(), GetParam());
  {
    QuietCache cache(temp.path());
    EXPECT_EQ(cache->status(), "");
    expect_all_rows(cache.cache);
    EXPECT_EQ(cache.told, 0);
  }
  Database database(temp.file(), Database::Mode::read_only);
  EXPECT_TRUE(has_current_tables(database));
  EXPECT_EQ(database.integer("PRAGMA user_version"), kSchemaVersion);
  Query check(database, "PRAGMA integrity_check");
  ASSERT_TRUE(check.step());
  EXPECT_EQ(check.text(0), "ok");
}

TEST_P(OldFile, TakesNewRowsBesideTheOldOnes) {
  const TempDirectory temp;
  make_file(temp.file(), GetParam());
  QuietCache cache(temp.path());
  WinnerRow winner;
  winner.device = "cpu", winner.family = "family", winner.tokens = 4, winner.sequences = 1;
  winner.plan = "[]", winner.median_us = 3.9, winner.default_us = 4;  // a worse ratio, and newer
  ASSERT_TRUE(cache->store_winner(winner));
  EXPECT_EQ(cache->find_winner("cpu", "family", 4, 1)->median_us, 3.9);
  MeasurementRow row;
  row.device = "cpu", row.problem = "family/tokens=2048/sequences=1";
  row.template_id = "fwd_h.cpu", row.config = "BT=64,BV=3", row.status = "ok";
  row.samples_us = {1}, row.median_us = 1;
  ASSERT_TRUE(cache->store_measurement(row));
  EXPECT_EQ(cache->find_measurements(row.device, row.problem, row.template_id, row.config).size(),
            2u);
  EXPECT_EQ(
      cache->find_measurement(row.device, row.problem, row.template_id, row.config)->median_us, 1);
}

TEST_P(OldFile, IsBroughtUpOnceByMany) {
  const TempDirectory temp;
  make_file(temp.file(), GetParam());
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      QuietCache cache(temp.path());
      expect_all_rows(cache.cache);
      EXPECT_EQ(cache.told, 0) << cache.said;
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_P(OldFile, DamagedIsSalvagedAndBroughtUp) {
  const TempDirectory temp;
  make_file(temp.file(), GetParam());
  std::string bytes = read_file(temp.file());
  write_file(temp.file(), bytes.substr(0, bytes.size() - 3 * 4096));
  QuietCache cache(temp.path());
  EXPECT_EQ(cache.told, 1);
  EXPECT_NE(cache.said.find("damaged"), std::string::npos);
  EXPECT_EQ(cache->status(), "");
  // The tables' rows were written one after another, so the first ones are there.
  EXPECT_TRUE(cache->find_artifact(artifact(0, 500).key));
  EXPECT_EQ(cache->stats().measurements, kRows);
  Database database(temp.file(), Database::Mode::read_only);
  EXPECT_TRUE(has_current_tables(database));
}

INSTANTIATE_TEST_SUITE_P(Schema, OldFile, ::testing::Range<std::int64_t>(1, kSchemaVersion));

TEST(Schema, FitsIntoTheFirstPage) {
  const TempDirectory temp;
  QuietCache(temp.path())->store_winner(winner(1, 1));
  // Behind the file's header of 100 bytes stands the kind of the page: 13, a leaf with the rows of
  // sqlite_schema themselves. Were it an inner page, damage to another one could cost all tables.
  EXPECT_EQ(read_file(temp.file())[100], 13);
}

TEST(Schema, TheTablesOfThePastAreThoseThatStepsMake) {
  for (std::int64_t version = 1; version <= 2; ++version) {
    Database historic("historic", Database::Mode::memory),
        stepped("stepped", Database::Mode::memory);
    make_tables(historic, version);
    migrate(stepped, version);
    const auto text_of = [](Database& database) {
      std::string text;
      Query query(database, "SELECT name, sql FROM sqlite_schema ORDER BY name");
      while (query.step()) text += query.text(0) + query.text(1) + '\n';
      return text;
    };
    EXPECT_EQ(text_of(historic), text_of(stepped)) << version;
  }
}

}  // namespace
}  // namespace wyvern::testing
