// Damaged and foreign files, and those of other versions: what is kept, what is repaired, what is
// left alone.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cache/cache.hpp"
#include "cache/cache_testing.hpp"
#include "cache/database.hpp"
#include "cache/schema.hpp"

namespace wyvern::testing {
namespace {

constexpr std::uint64_t kRows = 120;
constexpr std::size_t kPage = 4096;

/// A sound file of kRows artifacts, measurements and winners, as bytes.
const std::string& sound_file() {
  static const std::string bytes = [] {
    const TempDirectory temp;
    {
      Cache cache(temp.path());
      for (std::uint64_t i = 0; i < kRows; ++i) {
        // Sizes on both sides of a page, so that some rows need pages of their own.
        EXPECT_TRUE(cache.store_artifact(artifact(i, i % 4 == 0 ? 9000 : 300)));
        EXPECT_TRUE(cache.store_measurement(measurement(i)));
        EXPECT_TRUE(cache.store_winner(winner(static_cast<std::int64_t>(i) + 1, 1)));
      }
    }
    return read_file(temp.file());
  }();
  return bytes;
}

struct Found {
  int artifacts = 0, measurements = 0, winners = 0;
};

/// What can be found; anything found must be what was stored.
Found look_up_all(Cache& cache) {
  Found found;
  for (std::uint64_t i = 0; i < kRows; ++i) {
    const ArtifactRow a = artifact(i, i % 4 == 0 ? 9000 : 300);
    if (const auto row = cache.find_artifact(a.key)) {
      ++found.artifacts;
      EXPECT_EQ(row->code, a.code);
    }
    const MeasurementRow m = measurement(i);
    if (const auto row = cache.find_measurement(m.device, m.problem, m.template_id, m.config)) {
      ++found.measurements;
      EXPECT_EQ(row->samples_us.size(), m.samples_us.size());
    }
    if (cache.find_winner(m.device, "gdn", static_cast<std::int64_t>(i) + 1, 1)) ++found.winners;
  }
  return found;
}

std::vector<std::filesystem::path> kept_files(const std::filesystem::path& directory) {
  std::vector<std::filesystem::path> kept;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    if (entry.path().filename().string().starts_with("wyvern.db.corrupt-")) {
      kept.push_back(entry.path());
    }
  }
  return kept;
}

/// After damage the cache works in full again, alone and for the next process.
void expect_works(const std::filesystem::path& directory, QuietCache& cache) {
  const ArtifactRow row = artifact(999999);
  EXPECT_TRUE(cache->store_artifact(row));
  EXPECT_EQ(cache->status(), "");
  QuietCache other(directory);
  const auto found = other->find_artifact(row.key);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->code, row.code);
  EXPECT_EQ(other.told, 0);
  Database database(directory / "wyvern.db", Database::Mode::read_only);
  Query check(database, "PRAGMA integrity_check");
  EXPECT_TRUE(check.step());
  EXPECT_EQ(check.text(0), "ok");
}

TEST(CacheDamage, TruncatedFileKeepsItsReadableRows) {
  const TempDirectory temp;
  const std::string cut = sound_file().substr(0, sound_file().size() * 6 / 10);
  write_file(temp.file(), cut);
  QuietCache cache(temp.path());
  const Found found = look_up_all(cache.cache);
  EXPECT_EQ(cache.told, 1);
  EXPECT_NE(cache.said.find("damaged"), std::string::npos);
  // Rows were stored in order, so the first half of each table lies in the part that is left.
  EXPECT_GE(found.artifacts, static_cast<int>(kRows / 2));
  EXPECT_GE(found.measurements, static_cast<int>(kRows / 2));
  EXPECT_GE(found.winners, static_cast<int>(kRows / 2));
  EXPECT_LT(found.artifacts, static_cast<int>(kRows));
  const auto kept = kept_files(temp.path());
  ASSERT_EQ(kept.size(), 1u);
  EXPECT_EQ(read_file(kept[0]), cut);
  expect_works(temp.path(), cache);
}

TEST(CacheDamage, CutAnywhereItWorksAgain) {
  const std::size_t size = sound_file().size();
  for (const std::size_t length :
       {std::size_t{0}, std::size_t{1}, std::size_t{15}, std::size_t{16}, std::size_t{99},
        std::size_t{100}, std::size_t{512}, kPage - 1, kPage, kPage + 1, 2 * kPage, 5 * kPage + 7,
        size / 2, size - kPage, size - 1}) {
    SCOPED_TRACE(length);
    const TempDirectory temp;
    write_file(temp.file(), sound_file().substr(0, length));
    QuietCache cache(temp.path());
    look_up_all(cache.cache);
    // Too short to hold anything, or short of bytes that nothing uses: no reason to speak.
    if (length >= 16 && length <= size - kPage) {
      EXPECT_EQ(cache.told, 1);
    }
    expect_works(temp.path(), cache);
  }
}

/// Without the bytes that say whose the file is.
TEST(CacheDamage, CutInsideItsHeaderItWorksAgain) {
  for (std::size_t size = 1; size < 110; ++size) {
    SCOPED_TRACE(size);
    const TempDirectory temp;
    write_file(temp.file(), sound_file().substr(0, size));
    QuietCache cache(temp.path());
    expect_works(temp.path(), cache);
  }
}

TEST(CacheDamage, GarbageIsKeptAside) {
  const TempDirectory temp;
  const std::string garbage = random_bytes(std::random_device{}(), 100000);
  write_file(temp.file(), garbage);
  QuietCache cache(temp.path());
  EXPECT_EQ(look_up_all(cache.cache).artifacts, 0);
  EXPECT_EQ(cache.told, 1);
  const auto kept = kept_files(temp.path());
  ASSERT_EQ(kept.size(), 1u);
  EXPECT_EQ(read_file(kept[0]), garbage);
  expect_works(temp.path(), cache);
}

/// How many rows may be lost with a page of the sound file, from its kind (SQLite's file format,
/// section 1.6): a table's leaf takes the rows on it, a row's overflow page that row, an index
/// nothing, since it can be made anew; a table's inner page may take the whole table.
int rows_at_stake(std::size_t page) {
  const auto byte = [&](std::size_t at) {
    return static_cast<unsigned char>(sound_file()[page * kPage + at]);
  };
  switch (byte(0)) {
    case 2:
    case 10: return 0;
    case 13: return byte(3) << 8 | byte(4);
    case 5: return static_cast<int>(kRows);
    default: return 1;
  }
}

TEST(CacheDamage, OneDamagedPageCostsItsRowsOnly) {
  const std::size_t pages = sound_file().size() / kPage;
  const std::uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 24; ++round) {
    // Half of them from the first quarter, where the roots of all tables and indexes lie.
    const std::size_t page = 1 + random() % (round % 2 == 0 ? pages / 4 : pages - 1);
    SCOPED_TRACE(page);
    const TempDirectory temp;
    std::string bytes = sound_file();
    bytes.replace(page * kPage, kPage, random_bytes(random(), kPage));
    bytes[page * kPage] = 0x55;  // no kind of page, so that chance cannot make it look sound
    write_file(temp.file(), bytes);
    QuietCache cache(temp.path());
    look_up_all(cache.cache);  // meets the damage
    const Found found = look_up_all(cache.cache);
    const int rows = static_cast<int>(kRows);
    const int lost = 3 * rows - found.artifacts - found.measurements - found.winners;
    EXPECT_LE(lost, rows_at_stake(page));
    // The last page of a row's code is guarded by its digest alone: a miss, until stored again.
    for (std::uint64_t i = 0; i < kRows; ++i) {
      const ArtifactRow row = artifact(i, i % 4 == 0 ? 9000 : 300);
      EXPECT_TRUE(cache->find_artifact(row.key) || cache->store_artifact(row)) << i;
    }
    expect_works(temp.path(), cache);
  }
}

TEST(CacheDamage, DamageFoundWhileOpenIsRepaired) {
  const TempDirectory temp;
  write_file(temp.file(), sound_file());
  QuietCache cache(temp.path());
  EXPECT_EQ(look_up_all(cache.cache).artifacts, static_cast<int>(kRows));
  // Written over in place, as a failing disk would do it.
  std::fstream file(temp.file(), std::ios::in | std::ios::out | std::ios::binary);
  for (std::size_t page = 20; page < 30; ++page) {
    file.seekp(static_cast<std::streamoff>(page * kPage));
    file << random_bytes(page, kPage);
  }
  file.close();
  QuietCache other(temp.path());
  look_up_all(other.cache);
  expect_works(temp.path(), other);
  // This one still has the damaged file open; its next store goes to the new one.
  const ArtifactRow row = artifact(123456);
  EXPECT_TRUE(cache->store_artifact(row));
  EXPECT_TRUE(other->find_artifact(row.key));
}

TEST(CacheDamage, ManyWhoMeetItRepairItOnce) {
  const TempDirectory temp;
  write_file(temp.file(), sound_file().substr(0, sound_file().size() / 2));
  constexpr int kThreads = 8;
  std::atomic<int> told = 0;
  std::atomic<int> stored = 0;
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      QuietCache cache(temp.path());
      for (std::uint64_t i = 5 * t; i < 5 * t + 5; ++i) {
        stored += cache->store_artifact(artifact(5000 + i));
      }
      told += cache.told;
      EXPECT_EQ(cache->status(), "");
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(stored, kThreads * 5);
  EXPECT_EQ(told, 1);
  EXPECT_EQ(kept_files(temp.path()).size(), 1u);
  QuietCache cache(temp.path());
  for (std::uint64_t i = 0; i < kThreads * 5; ++i) {
    EXPECT_TRUE(cache->find_artifact(artifact(5000 + i).key)) << i;
  }
}

TEST(CacheDamage, FlippedBitInCodeIsAMissUntilStoredAgain) {
  const TempDirectory temp;
  write_file(temp.file(), sound_file());
  const ArtifactRow row = artifact(1, 300);
  std::string bytes = sound_file();
  const std::size_t at = bytes.find(row.code.substr(100, 50));
  ASSERT_NE(at, std::string::npos);
  bytes[at + 7] = static_cast<char>(bytes[at + 7] ^ 0x10);
  write_file(temp.file(), bytes);
  QuietCache cache(temp.path());
  EXPECT_FALSE(cache->find_artifact(row.key));
  EXPECT_TRUE(cache->find_artifact(artifact(2, 300).key));
  EXPECT_EQ(cache->status(), "");
  ASSERT_TRUE(cache->store_artifact(row));
  const auto found = cache->find_artifact(row.key);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->code, row.code);
  EXPECT_EQ(cache->stats().artifacts, static_cast<std::int64_t>(kRows));
}

// ---- No row is taken for another one

constexpr std::uint64_t kFewRows = 3;

/// A small file in pages of 512 bytes, so that few of its bits are of no use.
std::string small_file() {
  const TempDirectory temp;
  {
    Database database(temp.file(), Database::Mode::create);
    database.execute("PRAGMA page_size = 512");
    make_tables(database);
  }
  Cache cache(temp.path());
  for (std::uint64_t i = 0; i < kFewRows; ++i) {
    EXPECT_TRUE(cache.store_artifact(artifact(i, 100)));
  }
  EXPECT_TRUE(cache.store_measurement(measurement(1)));
  EXPECT_TRUE(cache.store_winner(winner(1, 1)));
  return read_file(temp.file());
}

bool is_same(const ArtifactRow& a, const ArtifactRow& b) {
  return a.key == b.key && a.template_id == b.template_id && a.target == b.target &&
         a.config == b.config && a.metadata == b.metadata && a.code == b.code;
}

/// Looks every row up in a damaged file: what was stored, or nothing; and nothing is repaired by
/// storing the row again, unless the file seems to be another program's or of another version.
/// Returns what is wrong.
std::string misled(const std::filesystem::path& directory) {
  QuietCache cache(directory);
  for (std::uint64_t i = 0; i < kFewRows; ++i) {
    const ArtifactRow stored = artifact(i, 100);
    const auto found = cache->find_artifact(stored.key);
    if (found && !is_same(*found, stored)) return "another row was found";
    if (found) continue;
    if (!cache->store_artifact(stored)) {
      const bool left_alone = cache->status().find("left alone") != std::string::npos;
      return left_alone ? "" : "not stored again: " + cache->status();
    }
    const auto repaired = cache->find_artifact(stored.key);
    if (!repaired || !is_same(*repaired, stored)) return "storing it again repaired nothing";
  }
  return {};
}

/// All bits of the pages in which keys are looked up, and of the others, which are many, every 29th
/// from one that chance picks; all of them where $WYVERN_ALL_BITS is set.
std::vector<std::size_t> bits_to_flip(const std::string& file) {
  constexpr std::size_t kSmallPage = 512, kStep = 29;
  const bool all = std::getenv("WYVERN_ALL_BITS") != nullptr;
  const std::size_t first = std::random_device{}() % kStep;
  std::vector<std::size_t> bits;
  for (std::size_t bit = 0; bit < 8 * file.size(); ++bit) {
    const std::size_t page = bit / 8 / kSmallPage * kSmallPage;
    const std::string_view text(file.data() + page, kSmallPage);
    const bool has_key =
        (text[0] == 2 || text[0] == 10) && (text.find(artifact(0, 100).key) != text.npos ||
                                            text.find(artifact(1, 100).key) != text.npos ||
                                            text.find(artifact(2, 100).key) != text.npos);
    if (all || has_key || bit % kStep == first) bits.push_back(bit);
  }
  return bits;
}

TEST(CacheDamage, NoFlippedBitLeadsToAnotherRow) {
  const std::string sound = small_file();
  const std::vector<std::size_t> bits = bits_to_flip(sound);
  RecordProperty("faults", static_cast<int>(bits.size()));
  constexpr std::size_t kThreads = 4;
  std::atomic<std::size_t> next = 0;
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      const TempDirectory temp;
      for (std::size_t i = next++; i < bits.size(); i = next++) {
        const std::size_t bit = bits[i];
        std::string bytes = sound;
        bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
        for (const auto& entry : std::filesystem::directory_iterator(temp.path())) {
          std::filesystem::remove(entry.path());
        }
        write_file(temp.file(), bytes);
        EXPECT_EQ(misled(temp.path()), "") << "bit " << bit % 8 << " of byte " << bit / 8;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(CacheDamage, AnIndexThatLeadsToAnotherRowIsAMissThatStoringRepairs) {
  const TempDirectory temp;
  const ArtifactRow row = artifact(0), other = artifact(1);
  {
    QuietCache cache(temp.path());
    ASSERT_TRUE(cache->store_artifact(row));
    ASSERT_TRUE(cache->store_artifact(other));
  }
  // The keys change places in the index alone.
  std::string bytes = read_file(temp.file());
  std::size_t index = 0;
  for (std::size_t p = 1; p < bytes.size() / kPage; ++p) {
    const std::string_view text = std::string_view(bytes).substr(p * kPage, kPage);
    if (text[0] == 10 && text.find(row.key) != text.npos) index = p;
  }
  ASSERT_NE(index, 0u);
  const std::size_t a = bytes.find(row.key, index * kPage),
                    b = bytes.find(other.key, index * kPage);
  bytes.replace(a, row.key.size(), other.key);
  bytes.replace(b, other.key.size(), row.key);
  write_file(temp.file(), bytes);

  QuietCache cache(temp.path());
  for (const ArtifactRow& wanted : {row, other}) {
    const auto found = cache->find_artifact(wanted.key);
    EXPECT_TRUE(!found || is_same(*found, wanted));
    EXPECT_TRUE(found || cache->store_artifact(wanted));
  }
  // Whether by the row or by a new file, for whoever comes next.
  QuietCache next(temp.path());
  for (const ArtifactRow& wanted : {row, other}) {
    const auto found = next->find_artifact(wanted.key);
    EXPECT_TRUE(found && is_same(*found, wanted));
  }
}

TEST(CacheDamage, ARowWhoseTextsWereChangedIsAMiss) {
  const TempDirectory temp;
  const ArtifactRow row = artifact(1);
  QuietCache cache(temp.path());
  for (const char* change :
       {"template_id = 'another'", "target = 'sm_80'", "config = 'BT=32'", "metadata = '{}'"}) {
    ASSERT_TRUE(cache->store_artifact(row));
    ASSERT_TRUE(cache->find_artifact(row.key));
    Database(temp.file(), Database::Mode::read_write)
        .execute(("UPDATE artifacts SET " + std::string(change)).c_str());
    EXPECT_FALSE(cache->find_artifact(row.key)) << change;
  }
  EXPECT_EQ(cache->status(), "");
}

// ---- Files that are not ours to touch

void expect_left_alone(const TempDirectory& temp, const char* said) {
  const std::string before = read_file(temp.file());
  {
    QuietCache cache(temp.path());
    EXPECT_FALSE(cache->find_artifact(artifact(1, 300).key));
    EXPECT_FALSE(cache->store_artifact(artifact(1)));
    EXPECT_FALSE(cache->store_winner(winner(1, 1)));
    EXPECT_FALSE(cache->clear());
    EXPECT_EQ(cache->stats().artifacts, 0);
    EXPECT_NE(cache->status().find(said), std::string::npos) << cache->status();
    EXPECT_EQ(cache.told, 1);
  }
  EXPECT_EQ(read_file(temp.file()), before);
  EXPECT_TRUE(kept_files(temp.path()).empty());
}

const char* const kNewer = "PRAGMA user_version = 1000";

void alter(const std::filesystem::path& file, const char* sql) {
  Database(file, Database::Mode::create).execute(sql);
}

TEST(CacheForeign, NewerFileIsLeftAlone) {
  const TempDirectory temp;
  write_file(temp.file(), sound_file());
  alter(temp.file(), kNewer);
  expect_left_alone(temp, "newer");
}

TEST(CacheForeign, NewerAndTruncatedFileIsLeftAlone) {
  const TempDirectory temp;
  write_file(temp.file(), sound_file());
  alter(temp.file(), kNewer);
  write_file(temp.file(), read_file(temp.file()).substr(0, 10 * kPage));
  expect_left_alone(temp, "newer");
}

/// A file as Wyvern had it before its first release.
void make_older(const TempDirectory& temp, int version) {
  write_file(temp.file(), sound_file());
  alter(temp.file(), ("ALTER TABLE artifacts RENAME COLUMN digest TO sha256;"
                      "PRAGMA user_version = " +
                      std::to_string(version))
                         .c_str());
}

TEST(CacheForeign, OlderFileIsLeftAlone) {
  for (const int version : {1, 2}) {
    SCOPED_TRACE(version);
    const TempDirectory temp;
    make_older(temp, version);
    expect_left_alone(temp, "before the first release");
  }
}

TEST(CacheForeign, OlderAndTruncatedFileIsLeftAlone) {
  const TempDirectory temp;
  make_older(temp, 2);
  write_file(temp.file(), read_file(temp.file()).substr(0, 10 * kPage));
  expect_left_alone(temp, "before the first release");
}

TEST(CacheForeign, AnotherProgramsDatabaseIsLeftAlone) {
  const TempDirectory temp;
  alter(temp.file(), "CREATE TABLE bookmarks (url TEXT); PRAGMA application_id = 12345");
  expect_left_alone(temp, "another program");
}

TEST(CacheForeign, UnmarkedDatabaseIsLeftAlone) {
  const TempDirectory temp;
  alter(temp.file(), "CREATE TABLE artifacts (url TEXT)");
  expect_left_alone(temp, "another program");
}

TEST(CacheForeign, DatabaseWithAViewOrATriggerIsLeftAlone) {
  for (const char* sql :
       {"CREATE TRIGGER t AFTER INSERT ON winners BEGIN DELETE FROM artifacts; END",
        "CREATE VIEW v AS SELECT * FROM winners",
        "DROP TABLE winners; CREATE VIEW winners AS SELECT * FROM measurements"}) {
    SCOPED_TRACE(sql);
    const TempDirectory temp;
    write_file(temp.file(), sound_file());
    alter(temp.file(), sql);
    expect_left_alone(temp, "another program");
  }
}

TEST(CacheForeign, FileThatBecomesNewerWhileOpenIsNotWritten) {
  const TempDirectory temp;
  QuietCache cache(temp.path());
  ASSERT_TRUE(cache->store_artifact(artifact(1)));
  alter(temp.file(), kNewer);
  const std::string before = read_file(temp.file());
  EXPECT_FALSE(cache->store_artifact(artifact(2)));
  EXPECT_FALSE(cache->store_artifact(artifact(3)));
  EXPECT_NE(cache->status().find("newer"), std::string::npos);
  EXPECT_EQ(cache.told, 1);
  EXPECT_EQ(read_file(temp.file()), before);
}

TEST(CacheForeign, EmptyDatabaseIsUsed) {
  const TempDirectory temp;
  alter(temp.file(), "CREATE TABLE t (x); DROP TABLE t");
  QuietCache cache(temp.path());
  EXPECT_TRUE(cache->store_artifact(artifact(1)));
  EXPECT_EQ(cache->status(), "");
}

}  // namespace
}  // namespace wyvern::testing
