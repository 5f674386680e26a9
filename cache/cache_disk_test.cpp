// Every call to the disk that a cache's verb makes fails in turn, and what the verb answers and
// what is in the file afterwards is compared with what must be there.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cache/cache.hpp"
#include "cache/cache_content_testing.hpp"
#include "cache/cache_testing.hpp"
#include "cache/care.hpp"
#include "cache/database.hpp"
#include "cache/disk_testing.hpp"
#include "cache/transfer.hpp"

namespace wyvern::testing {
namespace {

/// What a verb says of itself: a look-up found what is right, nothing, or what is wrong; a store
/// says that it stored, or that it did not; an operation on a whole cache threw an error.
enum class Answer { right, nothing, wrong, stored, not_stored, refused };

/// A verb and what it works on.
struct Verb {
  std::string name;
  std::function<void(const TempDirectory&)> prepare;
  std::function<Answer(Cache&)> act;
  Content before, after;
  bool damaged = false;  ///< the file is, so that it is replaced by what can be read
  /// After an error SQLite may keep its lock on the file until the connection is closed.
  bool keeps_lock = false;
};

template <class Row>
Answer found_is(const std::optional<Row>& found, const Row& wanted) {
  if (!found) return Answer::nothing;
  return Content::text(*found) == Content::text(wanted) ? Answer::right : Answer::wrong;
}

template <class Row>
Answer found_are(const std::vector<Row>& found, std::size_t wanted) {
  return found.empty() ? Answer::nothing : found.size() == wanted ? Answer::right : Answer::wrong;
}

Answer stored(bool done) { return done ? Answer::stored : Answer::not_stored; }

constexpr std::uint64_t kRows = 24;    ///< so that listing them takes several pages
constexpr std::size_t kLarge = 20000;  ///< of several pages

ArtifactRow row(std::uint64_t i) { return artifact(i, i == 0 ? kLarge : 300); }

void fill(Cache& cache) {
  for (std::uint64_t i = 0; i < kRows; ++i) {
    ASSERT_TRUE(cache.store_artifact(row(i)));
    ASSERT_TRUE(cache.store_measurement(measurement(i)));
    ASSERT_TRUE(cache.store_winner(winner(static_cast<std::int64_t>(1) << i, 1)));
  }
}

Content filled() {
  Content content;
  for (std::uint64_t i = 0; i < kRows; ++i) {
    content.store(row(i));
    content.store(measurement(i));
    content.store(winner(static_cast<std::int64_t>(1) << i, 1));
  }
  return content;
}

/// Made once, then copied: the bytes of files by name.
using Files = std::map<std::string, std::string>;

Files files_of(const std::filesystem::path& directory) {
  Files files;
  for (const auto& entry : std::filesystem::directory_iterator(directory))
    files[entry.path().filename()] = read_file(entry.path());
  return files;
}

void put(const TempDirectory& temp, const Files& files) {
  for (const auto& [name, bytes] : files) write_file(temp.path() / name, bytes);
}

const Files& sound_files() {
  static const Files files = [] {
    const TempDirectory temp;
    {
      QuietCache cache(temp.path());
      fill(cache.cache);
    }
    return files_of(temp.path());
  }();
  return files;
}

Files database_only(const std::string& bytes) { return {{"wyvern.db", bytes}}; }

/// A writer was killed after part of its transaction had come to the disk.
Files with_hot_journal() {
  const TempDirectory temp;
  put(temp, sound_files());
  Database database(temp.file(), Database::Mode::read_write);
  database.execute(
      "PRAGMA journal_mode = TRUNCATE; PRAGMA cache_size = 2; BEGIN IMMEDIATE;"
      "UPDATE artifacts SET code = zeroblob(30000), target = 'none';"
      "UPDATE measurements SET detail = 'half', status = 'none'; DELETE FROM winners");
  Files files = files_of(temp.path());
  EXPECT_NE(files["wyvern.db"], sound_files().at("wyvern.db"));
  EXPECT_GT(files["wyvern.db-journal"].size(), 512u);
  return files;
}

/// Another program has switched the file to a write-ahead log.
Files with_write_ahead_log() {
  const TempDirectory temp;
  put(temp, sound_files());
  Database database(temp.file(), Database::Mode::read_write);
  database.execute("PRAGMA journal_mode = WAL; UPDATE winners SET created = 'now'");
  Files files = files_of(temp.path());
  files.erase("wyvern.db-shm");
  EXPECT_GT(files["wyvern.db-wal"].size(), 0u);
  return files;
}

/// The file with an index that lacks its root, which costs no row.
Files damaged() {
  const TempDirectory temp;
  put(temp, sound_files());
  std::int64_t page = 0;
  {
    Database database(temp.file(), Database::Mode::read_only);
    page = database.integer(
        "SELECT rootpage FROM sqlite_schema WHERE type = 'index' AND tbl_name = 'artifacts'");
  }
  std::string bytes = sound_files().at("wyvern.db");
  bytes.replace(static_cast<std::size_t>(page - 1) * 4096, 4096, std::string(4096, 'U'));
  return database_only(bytes);
}

Verb on(std::string name, Files files, Content content, std::function<Answer(Cache&)> act) {
  return {.name = std::move(name),
          .prepare = [files = std::move(files)](const TempDirectory& temp) { put(temp, files); },
          .act = std::move(act),
          .before = content,
          .after = content};
}

template <class Row>
Verb storing(std::string name, const Row& next, bool (Cache::*store)(const Row&)) {
  Verb verb = on(std::move(name), sound_files(), filled(),
                 [=](Cache& cache) { return stored((cache.*store)(next)); });
  verb.after.store(next);
  return verb;
}

Answer find_first(Cache& cache) { return found_is(cache.find_artifact(row(0).key), row(0)); }

std::vector<Verb> look_ups() {
  const MeasurementRow m = measurement(3);
  const WinnerRow w = winner(8, 1);
  const auto sound = [](std::string name, std::function<Answer(Cache&)> act) {
    return on(std::move(name), sound_files(), filled(), std::move(act));
  };
  return {
      sound("find_artifact", find_first),
      sound("find_measurement",
            [=](Cache& cache) {
              return found_is(cache.find_measurement(m.device, m.problem, m.template_id, m.config),
                              m);
            }),
      sound(
          "measurements",
          [=](Cache& cache) { return found_are(cache.measurements(m.device, m.problem), kRows); }),
      sound("find_winner",
            [=](Cache& cache) { return found_is(cache.find_winner(w.device, "gdn", 8, 1), w); }),
      sound("find_winners",
            [=](Cache& cache) { return found_are(cache.find_winners(w.device, "gdn", 8, 1), 1); }),
      sound("winners_of", [=](Cache& cache) { return found_are(cache.winners_of("gd"), kRows); }),
      sound("list_artifacts",
            [](Cache& cache) { return found_are(cache.list_artifacts(), kRows); }),
      sound("list_measurements",
            [](Cache& cache) { return found_are(cache.list_measurements(), kRows); }),
      sound("list_winners", [](Cache& cache) { return found_are(cache.list_winners(), kRows); }),
      sound("stats",
            [](Cache& cache) {
              const CacheStats s = cache.stats();
              const auto n = static_cast<std::int64_t>(kRows);
              if (s.artifacts == 0 && s.measurements == 0 && s.winners == 0 && s.code_bytes == 0)
                return Answer::nothing;
              return s.artifacts == n && s.measurements == n && s.winners == n && s.code_bytes > 0
                         ? Answer::right
                         : Answer::wrong;
            }),
      sound("claim",
            [](Cache& cache) {
              const auto claim = cache.claim_artifact(row(0).key, kFar);
              return claim.waited() ? Answer::wrong : find_first(cache);
            }),
  };
}

std::vector<Verb> stores() {
  ArtifactRow again = row(0);
  again.config = "BT=32";
  MeasurementRow measured = measurement(1);
  measured.status = "wrong";
  WinnerRow won = winner(4, 1);
  won.plan = R"([{"template":"fwd_h.portable","config":"BT=16"}])";
  Verb clear =
      on("clear", sound_files(), filled(), [](Cache& cache) { return stored(cache.clear()); });
  clear.after = {};
  Verb first = storing("store_first", row(7), &Cache::store_artifact);
  first.prepare = [](const TempDirectory& temp) { std::filesystem::remove_all(temp.path()); };
  first.before = first.after = {};
  first.after.store(row(7));
  return {storing("store_artifact", artifact(9, kLarge), &Cache::store_artifact),
          storing("replace_artifact", again, &Cache::store_artifact),
          storing("store_measurement", measurement(99), &Cache::store_measurement),
          storing("store_measurement_again", measured, &Cache::store_measurement),
          storing("store_winner", winner(64, 2), &Cache::store_winner),
          storing("replace_winner", won, &Cache::store_winner),
          first,
          clear};
}

/// A cache that others are made of, and the pack of it.
const TempDirectory& other_cache() {
  static const TempDirectory other;
  static const bool filled = [] {
    QuietCache cache(other.path());
    return cache->store_artifact(artifact(50, 9000)) && cache->store_measurement(measurement(50)) &&
           cache->store_winner(winner(3, 3));
  }();
  EXPECT_TRUE(filled);
  return other;
}

/// An operation on a whole cache, which throws where it fails.
Verb care(std::string name, Content after, std::function<bool(Cache&)> act) {
  Verb verb = on(std::move(name), sound_files(), filled(), [=](Cache& cache) {
    try {
      return act(cache) ? Answer::stored : Answer::wrong;
    } catch (const Error&) {
      return Answer::refused;
    }
  });
  verb.after = std::move(after);
  return verb;
}

std::vector<Verb> cares() {
  Content collected = filled(), merged = filled(), imported;
  collected.artifacts.clear();
  merged.store(measurement(50));
  merged.store(winner(3, 3));
  merged.store(artifact(50, 9000));
  const std::string pack = export_pack(Cache(other_cache().path()), /*all=*/true, "");
  {
    const TempDirectory temp;  // a pack writes the plan's JSON in its own way
    put(temp, sound_files());
    QuietCache cache(temp.path());
    import_pack(cache.cache, pack, "pack");
    imported = content_of(cache.cache);
    EXPECT_EQ(imported.size(), 3 * kRows + 2);
  }
  const auto rows = static_cast<std::int64_t>(kRows);
  return {
      care("collect", collected, [=](Cache& cache) { return collect(cache, 0).deleted == rows; }),
      care("verify", filled(),
           [=](Cache& cache) {
             const Verification found = verify_rows(cache);
             EXPECT_EQ(found.damage, std::vector<std::string>());
             return found.damage.empty() && found.artifacts == rows && found.winners == rows;
           }),
      care("merge", merged,
           [](Cache& cache) { return merge(cache, other_cache().path()).artifacts == 1; }),
      care("import_pack", imported,
           [=](Cache& cache) { return import_pack(cache, pack, "pack").winners == 1; }),
      care("export_pack", filled(), [=](Cache& cache) {
        return parse_pack(export_pack(cache, true, ""), "pack").measurements.size() == kRows;
      })};
}

std::vector<Verb> openings() {
  Verb repair = on("repair", damaged(), filled(), find_first);
  repair.damaged = true;
  Verb end_log = on("end_write_ahead_log", with_write_ahead_log(), filled(), find_first);
  end_log.keeps_lock = true;
  return {on("roll_back", with_hot_journal(), filled(), find_first), end_log, repair};
}

std::vector<Verb> all_verbs() {
  std::vector<Verb> verbs;
  for (auto& some : {look_ups(), stores(), cares(), openings()})
    verbs.insert(verbs.end(), some.begin(), some.end());
  return verbs;
}

std::size_t left_behind(const std::filesystem::path& directory, const char* kind) {
  std::error_code absent;
  const std::filesystem::directory_iterator files(directory, absent);
  return static_cast<std::size_t>(std::count_if(begin(files), end(files), [&](const auto& entry) {
    return entry.path().filename().string().starts_with(kind);
  }));
}

/// What is wrong with the file that a verb left, whose disk is sound again.
std::string wrong_with_file(const TempDirectory& temp, const Verb& verb, const Fault& fault,
                            Answer answer) {
  QuietCache cache(temp.path());
  const Content content = content_of(cache.cache);
  const bool told = cache.told != 0;
  if (answer == Answer::stored && content != verb.after) return "it said stored, and it is not";
  if (content != verb.before && content != verb.after)
    return (is_part(content, verb.after) ? "rows are lost: "
                                         : "rows are not as they were stored: ") +
           cache.said;
  if (told && !verb.damaged) return "the next to open is told: " + cache.said;
  if (!cache->store_artifact(artifact(77)) || !cache->find_artifact(artifact(77).key))
    return "it does not work afterwards: " + cache->status();
  // Where nothing can be undone, the next repair keeps the file once more.
  const std::size_t kept = !verb.damaged ? 0 : fault.lasting ? 2 : 1;
  if (left_behind(temp.path(), "wyvern.db.corrupt-") > kept)
    return "a sound file was taken for a damaged one";
  if (left_behind(temp.path(), "wyvern.db.new") != 0) return "a half-made file is left";
  Database database(temp.file(), Database::Mode::read_only);
  Query check(database, "PRAGMA integrity_check");
  if (!check.step() || check.text(0) != "ok") return "not sound: " + check.text(0);
  return {};
}

/// Runs the verb with one fault. Returns what is wrong; sets whether the fault was met.
std::string tried(const Verb& verb, const Fault& fault, bool& was_met) {
  const TempDirectory temp;
  verb.prepare(temp);
  set_fault(fault);
  auto cache = std::make_unique<QuietCache>(temp.path());
  const Answer answer = verb.act(cache->cache);
  was_met = faults_met() != 0;
  const std::string call = first_fault();
  const bool said = cache->told == 1;
  set_fault({});
  std::string wrong;
  if (answer == Answer::wrong) wrong = "the answer is wrong";
  if (cache->told > 1) wrong = "told more than once";
  if (answer == Answer::not_stored && !said) wrong = "not stored, and nobody was told";
  if (was_met && fault.kind == Fault::Kind::interrupted && !verb.damaged &&
      (said || answer == Answer::nothing || answer == Answer::not_stored ||
       answer == Answer::refused))
    wrong = "what is no error was taken for one";
  // Whatever the connection went through, it finds what is right or nothing.
  const Content content = content_of(cache->cache);
  if (!is_part(content, verb.after) && !is_part(content, verb.before))
    wrong = "the same cache finds what is wrong";
  if (verb.keeps_lock) cache.reset();
  if (wrong.empty()) wrong = wrong_with_file(temp, verb, fault, answer);
  return wrong.empty() ? wrong : call + ": " + wrong;
}

class CacheDisk : public ::testing::TestWithParam<std::size_t> {};

const std::vector<Verb>& verbs() {
  static const std::vector<Verb> all = all_verbs();
  return all;
}

/// In the short suite every third, others with another fault.
TEST_P(CacheDisk, EveryCallFailsInTurn) {
  const Verb& verb = verbs()[GetParam()];
  const std::size_t step = std::getenv("WYVERN_TESTS_FULL") == nullptr ? 3 : 1;
  bool was_met = false;
  ASSERT_EQ(tried(verb, {}, was_met), "");
  std::size_t faults = 0, turn = 0;
  for (const auto kind :
       {Fault::Kind::error, Fault::Kind::full, Fault::Kind::partial, Fault::Kind::interrupted}) {
    for (const bool lasting : {false, true}) {
      // A lock that lasts is waited for, which other tests do.
      if (lasting && kind != Fault::Kind::error && kind != Fault::Kind::partial) continue;
      was_met = true;
      for (std::size_t at = 1 + turn++ % step; was_met; at += step) {
        EXPECT_EQ(tried(verb, {.at = at, .kind = kind, .lasting = lasting}, was_met), "")
            << "call " << at << ", kind " << static_cast<int>(kind) << (lasting ? ", lasting" : "");
        faults += was_met;
      }
    }
  }
  RecordProperty("faults", static_cast<int>(faults));
  EXPECT_GT(faults, 20 / step);
}

std::string name_of(const ::testing::TestParamInfo<std::size_t>& info) {
  return verbs()[info.param].name;
}

INSTANTIATE_TEST_SUITE_P(, CacheDisk, ::testing::Range(std::size_t{0}, verbs().size()), name_of);

TEST(CacheDiskLayer, EveryKindOfCallIsMade) {
  std::map<std::string, std::size_t> made;
  for (const Verb& verb : verbs()) {
    const TempDirectory temp;
    verb.prepare(temp);
    set_fault({});
    QuietCache cache(temp.path());
    verb.act(cache.cache);
    for (const auto& [name, count] : calls_made()) made[name] += count;
  }
  for (const char* name : {"xOpen",     "xRead",    "xWrite",
                           "xTruncate", "xSync",    "xFileSize",
                           "xLock",     "xUnlock",  "xCheckReservedLock",
                           "xDelete",   "xAccess",  "xFullPathname",
                           "xShmMap",   "xShmLock", "open",
                           "flock",     "fcntl",    "fsync",
                           "link",      "rename",   "mkdir",
                           "mknod",     "fstatat"})
    EXPECT_GT(made[name], 0u) << name;
}

}  // namespace
}  // namespace wyvern::testing

int main(int argc, char** argv) {
  wyvern::testing::install_faulty_disk();
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
