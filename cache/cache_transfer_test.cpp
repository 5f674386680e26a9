// Rows from one cache to another: merging, packs, and the layers that packs are asked in.
#include <wyvern/error.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cache/cache.hpp"
#include "cache/cache_testing.hpp"
#include "cache/database.hpp"
#include "cache/packs.hpp"
#include "cache/rows.hpp"
#include "cache/schema.hpp"
#include "cache/shipped_code.hpp"
#include "cache/transfer.hpp"

namespace wyvern::testing {
namespace {

// ---- Merging

/// A row of a small pool, so that two caches often have the same one.
struct Pool {
  std::mt19937 random;

  std::int64_t pick(std::int64_t below) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(below));
  }
  std::string created() { return "2026-11-0" + std::to_string(1 + pick(5)) + "T00:00:00.000Z"; }

  MeasurementRow a_measurement() {
    MeasurementRow row = measurement(static_cast<std::uint64_t>(pick(6)));
    row.created = created();
    row.setting.host = "node" + std::to_string(pick(3));
    row.setting.T = 1024 + pick(2);
    if (pick(4) == 0) row.status = "crashed", row.samples_us.clear();
    if (pick(4) == 0) row.error = std::numeric_limits<double>::infinity();
    return row;
  }
  WinnerRow a_winner() {
    WinnerRow row = winner(1 << pick(4), 1 + pick(2));
    row.created = created();
    row.round = 1 + pick(3);
    row.median_us = 1 + static_cast<double>(pick(4));
    row.default_us = 4;
    row.setting.host = "node" + std::to_string(pick(3));
    return row;
  }
};

/// Fills a cache with rows that differ in what decides: as they would come from another cache, in
/// a pack.
void fill(Cache& cache, Pool& pool) {
  std::string pack = R"({"row":"pack","version":1})";
  for (std::int64_t i = pool.pick(12); i > 0; --i) pack += '\n' + to_line(pool.a_measurement());
  for (std::int64_t i = pool.pick(12); i > 0; --i) pack += '\n' + to_line(pool.a_winner());
  import_pack(cache, pack, "pack");
  for (std::int64_t i = pool.pick(8); i > 0; --i) {
    ArtifactRow row = artifact(static_cast<std::uint64_t>(pool.pick(6)), 200);
    // One key may have been compiled twice, to other code.
    row.code += std::string(static_cast<std::size_t>(pool.pick(2)), 'x');
    ASSERT_TRUE(cache.store_artifact(row));
  }
}

/// All that a cache holds and answers, as text.
std::string image(Cache& cache) {
  std::string text = export_pack(cache, /*all=*/true, "");
  for (const WinnerRow& row : cache.list_winners()) text += "answers " + to_line(row) + '\n';
  std::vector<std::string> artifacts;
  for (const ArtifactRow& row : cache.list_artifacts()) {
    const auto found = cache.find_artifact(row.key);
    artifacts.push_back(row.key + row.config + row.created + (found ? found->code : "damaged"));
  }
  std::sort(artifacts.begin(), artifacts.end());
  for (const std::string& artifact : artifacts) text += artifact + '\n';
  return text;
}

/// As image(), the answers sorted: equal for equal rows in any order.
std::string sorted_image(Cache& cache) {
  std::vector<std::string> lines;
  std::string text = image(cache), line;
  for (const char c : text) {
    line += c;
    if (c != '\n') continue;
    lines.push_back(std::exchange(line, {}));
  }
  std::sort(lines.begin(), lines.end());
  for (const std::string& one : lines) line += one;
  return line;
}

class Merging : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    Pool pool{std::mt19937(static_cast<std::mt19937::result_type>(GetParam()))};
    for (auto& directory : directories_) {
      Cache cache(directory.path());
      fill(cache, pool);
    }
  }
  /// The image of a new cache into which caches are merged in this order.
  std::string merged(const std::vector<int>& order) {
    const TempDirectory into;
    Cache cache(into.path());
    for (const int i : order) merge(cache, directories_[static_cast<std::size_t>(i)].path());
    return sorted_image(cache);
  }
  TempDirectory directories_[3];
};

TEST_P(Merging, OrderAndRepetitionMakeNoDifference) {
  const std::string image = merged({0, 1, 2});
  EXPECT_EQ(merged({2, 1, 0}), image);
  EXPECT_EQ(merged({1, 0, 2, 1, 1, 0}), image);
}

TEST_P(Merging, IntoOneAnotherIsTheSame) {
  Cache a(directories_[0].path()), b(directories_[1].path());
  merge(a, directories_[1].path());
  merge(b, directories_[0].path());
  EXPECT_EQ(sorted_image(a), sorted_image(b));
}

TEST_P(Merging, GroupingMakesNoDifference) {
  const std::string image = merged({0, 1, 2});
  Cache one(directories_[1].path());
  merge(one, directories_[2].path());
  EXPECT_EQ(merged({0, 1}), image);
}

TEST_P(Merging, LosesNothing) {
  std::set<std::string> lines;
  for (auto& directory : directories_) {
    const Contents contents = read_contents(directory.path());
    for (const auto& row : contents.measurements) lines.insert(to_line(row));
    for (const auto& row : contents.winners) lines.insert(to_line(row));
    for (const auto& row : contents.artifacts) lines.insert(row.key);
  }
  const TempDirectory into;
  Cache cache(into.path());
  for (auto& directory : directories_) merge(cache, directory.path());
  const std::string all = image(cache);
  for (const std::string& line : lines) EXPECT_NE(all.find(line), all.npos) << line;
  for (const ArtifactRow& row : cache.list_artifacts()) EXPECT_TRUE(cache.find_artifact(row.key));
}

TEST_P(Merging, IntoItselfChangesNothing) {
  Cache cache(directories_[0].path());
  const std::string before = image(cache);
  const Added added = merge(cache, directories_[0].path());
  EXPECT_EQ(added.artifacts + added.measurements + added.winners + added.known, 0);
  EXPECT_EQ(image(cache), before);
}

INSTANTIATE_TEST_SUITE_P(Random, Merging, ::testing::Range(0, 12));

TEST(Merge, ATuningAfterwardsAnswersWhateverWasMerged) {
  const TempDirectory temp, other;
  WinnerRow row = winner(8, 1);
  row.median_us = 1, row.default_us = 10;
  for (int i = 0; i < 3; ++i) QuietCache(other.path())->store_winner(row);
  QuietCache cache(temp.path());
  merge(cache.cache, other.path());
  EXPECT_EQ(cache->find_winner(row.device, row.family, 8, 1)->median_us, 1);
  row.median_us = 9;  // a far worse ratio, but tuned here and knowing the other
  ASSERT_TRUE(cache->store_winner(row));
  EXPECT_EQ(cache->find_winner(row.device, row.family, 8, 1)->median_us, 9);
}

TEST(Merge, OfTwoThatKnewNothingOfEachOtherTheBetterRatioAnswers) {
  const TempDirectory temp, other;
  WinnerRow fast = winner(8, 1), slow = winner(8, 1);
  fast.median_us = 9, fast.default_us = 10;    // a fast machine, hardly better than the default
  slow.median_us = 50, slow.default_us = 100;  // a slow one, twice as fast as the default
  QuietCache(other.path())->store_winner(slow);
  QuietCache cache(temp.path());
  ASSERT_TRUE(cache->store_winner(fast));
  merge(cache.cache, other.path());
  EXPECT_EQ(cache->find_winner(fast.device, fast.family, 8, 1)->median_us, 50);
  EXPECT_EQ(cache->stats().winners, 1);
}

TEST(Merge, NeverMixesArtifactKeys) {
  const TempDirectory temp, other;
  MeasurementRow mine = measurement(1), theirs = measurement(1);
  theirs.artifact_key = "another kernel";
  theirs.samples_us = {1, 2, 3};
  QuietCache(other.path())->store_measurement(theirs);
  QuietCache cache(temp.path());
  ASSERT_TRUE(cache->store_measurement(mine));
  merge(cache.cache, other.path());
  const auto rows =
      cache->find_measurements(mine.device, mine.problem, mine.template_id, mine.config);
  ASSERT_EQ(rows.size(), 2u);
  for (const MeasurementRow& row : rows)
    EXPECT_EQ(row.samples_us,
              row.artifact_key == mine.artifact_key ? mine.samples_us : theirs.samples_us);
}

TEST(Merge, LeavesDamagedArtifactsBehind) {
  const TempDirectory temp, other;
  const ArtifactRow row = artifact(1, 300);
  QuietCache(other.path())->store_artifact(row);
  Database(other.file(), Database::Mode::read_write)
      .execute("UPDATE artifacts SET config = 'BT=32'");
  QuietCache cache(temp.path());
  EXPECT_EQ(merge(cache.cache, other.path()).damaged, 1);
  EXPECT_FALSE(cache->find_artifact(row.key));
  // A sound one takes the place of one's own that is damaged.
  ASSERT_TRUE(cache->store_artifact(row));
  const TempDirectory into;
  std::filesystem::copy(other.file(), into.file());
  QuietCache spoilt(into.path());
  EXPECT_EQ(merge(spoilt.cache, temp.file()).artifacts, 1);
  EXPECT_TRUE(spoilt->find_artifact(row.key));
}

template <class Work>
void expect_refused(ErrorKind kind, const char* said, const Work& work) {
  try {
    work();
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind);
    EXPECT_NE(std::string(error.what()).find(said), std::string::npos) << error.what();
  }
}

TEST(Merge, RefusesOtherFilesAndUntrustedCaches) {
  const TempDirectory temp, other;
  QuietCache cache(temp.path());
  expect_refused(ErrorKind::kBadInput, "no database", [&] { merge(cache.cache, "/nowhere"); });
  write_file(other.path() / "text", "this is no database, but it is longer than a header");
  expect_refused(ErrorKind::kIo, "cannot be read",
                 [&] { merge(cache.cache, other.path() / "text"); });
  QuietCache(other.path())->store_winner(winner(1, 1));
  const auto set_version = [&](std::int64_t version) {
    Database(other.file(), Database::Mode::read_write)
        .execute(("PRAGMA user_version = " + std::to_string(version)).c_str());
  };
  set_version(kSchemaVersion - 1);
  expect_refused(ErrorKind::kIo, "before the first release",
                 [&] { merge(cache.cache, other.path()); });
  set_version(kSchemaVersion);
  std::filesystem::permissions(other.file(), std::filesystem::perms::others_write,
                               std::filesystem::perm_options::add);
  expect_refused(ErrorKind::kIo, "written by its group or by others",
                 [&] { merge(cache.cache, other.path()); });
  EXPECT_EQ(cache->stats().winners, 0);
}

TEST(Merge, AllOrNone) {
  const TempDirectory temp, good, bad;
  QuietCache(good.path())->store_winner(winner(1, 1));
  QuietCache(bad.path())->store_artifact(artifact(1, 9000));
  QuietCache cache(temp.path());
  expect_refused(ErrorKind::kBadInput, "no database",
                 [&] { merge(cache.cache, {good.path(), "/nowhere"}); });
  EXPECT_EQ(cache->stats().winners, 0);
  // What is damaged in the other, found only when its artifacts are read, is not taken for damage
  // of this one.
  std::int64_t page = 0;
  {
    Database database(bad.file(), Database::Mode::read_only);
    page = database.integer("SELECT rootpage FROM sqlite_schema WHERE name = 'artifacts'");
  }
  std::string bytes = read_file(bad.file());
  bytes.replace(static_cast<std::size_t>(page - 1) * 4096, 4096, std::string(4096, 'U'));
  write_file(bad.file(), bytes);
  expect_refused(ErrorKind::kIo, bad.file().c_str(),
                 [&] { merge(cache.cache, {good.path(), bad.path()}); });
  EXPECT_EQ(cache->stats().winners, 0);
  EXPECT_EQ(cache->status(), "");
  EXPECT_EQ(cache.told, 0);
  EXPECT_EQ(read_file(bad.file()), bytes);
  const std::vector<Added> added = merge(cache.cache, {good.path(), temp.path(), good.path()});
  ASSERT_EQ(added.size(), 3u);
  EXPECT_EQ(added[0].winners, 1);
  EXPECT_EQ(added[1].known, 0);
  EXPECT_EQ(added[2].known, 1);
}

// ---- Packs

TEST(Pack, ComesBackAsItWent) {
  Pool pool{std::mt19937(7)};
  const TempDirectory temp, other;
  QuietCache cache(temp.path()), back(other.path());
  fill(cache.cache, pool);
  const std::string pack = export_pack(cache.cache, true, "");
  EXPECT_EQ(pack.substr(0, 12), R"({"devices":[)");
  const Added added = import_pack(back.cache, pack, "pack");
  EXPECT_GT(added.winners + added.measurements, 0);
  EXPECT_EQ(export_pack(back.cache, true, ""), pack);
  EXPECT_EQ(import_pack(back.cache, pack, "pack").known, added.winners + added.measurements);
  EXPECT_EQ(import_pack(back.cache, export_pack(cache.cache, false, ""), "pack").winners, 0);
}

TEST(Pack, HasTheRowsOfOneDeviceWhereThatIsAskedFor) {
  const TempDirectory temp;
  QuietCache cache(temp.path());
  WinnerRow row = winner(1, 1);
  cache->store_winner(row);
  row.device = "another";
  cache->store_winner(row);
  EXPECT_EQ(parse_pack(export_pack(cache.cache, false, ""), "pack").devices.size(), 2u);
  const PackRows rows = parse_pack(export_pack(cache.cache, false, "another"), "pack");
  EXPECT_EQ(rows.devices, std::vector<std::string>{"another"});
  EXPECT_EQ(rows.winners.size(), 1u);
}

TEST(Pack, MalformedIsRefusedByTheLineAndNothingIsAdded) {
  const TempDirectory temp;
  QuietCache cache(temp.path());
  const std::string header = R"({"devices":[],"row":"pack","version":1})"
                             "\n";
  const std::string good = to_line(winner(1, 1)) + '\n';
  struct Bad {
    std::string text;
    const char* said;
  };
  for (const Bad& bad :
       {Bad{"", "empty"},
        {"no json", "no pack"},
        {R"({"row":"pack","version":2})", "version 2"},
        {R"({"row":"pack","version":"x"})", "malformed"},
        {good, "no pack"},
        {header + good + "{", "line 3"},
        {header + good + "\n\n[]", "line 5"},
        {header + good + R"({"row":"other"})", "other"},
        {header + good + R"({"row":"winner","device":"x","family":"f"})", "plan"},
        {header + good + R"({"row":"winner","device":3})", "type"},
        {header + good.substr(0, good.size() - 2) + R"(,"round":99999999999})", "round"}}) {
    expect_refused(ErrorKind::kBadInput, bad.said,
                   [&] { import_pack(cache.cache, bad.text, "the pack"); });
  }
  EXPECT_EQ(cache->stats().winners, 0);
}

TEST(Pack, ATuningAnswersAfterTheMostRounds) {
  const TempDirectory temp;
  QuietCache cache(temp.path());
  WinnerRow row = winner(8, 1);
  row.round = kMostRounds;
  row.median_us = 1, row.default_us = 1000;
  import_pack(cache.cache,
              R"({"devices":[],"row":"pack","version":1})"
              "\n" +
                  to_line(row),
              "the pack");
  row.median_us = 900;
  ASSERT_TRUE(cache->store_winner(row));
  EXPECT_EQ(cache->find_winner(row.device, row.family, 8, 1)->median_us, 900);
}

TEST(Pack, NestedTooDeepIsRefused) {
  const TempDirectory temp;
  QuietCache cache(temp.path());
  const std::string header = R"({"devices":[],"row":"pack","version":1})"
                             "\n";
  const auto lists = [](std::size_t n) { return std::string(n, '[') + std::string(n, ']'); };
  for (const std::size_t depth : {std::size_t{64}, std::size_t{1'000'000}}) {
    const std::string line =
        R"({"row":"winner","device":"d","family":"f","plan":)" + lists(depth) + "}";
    expect_refused(ErrorKind::kBadInput, "line 2 of the pack is no row: its lists and objects are",
                   [&] { import_pack(cache.cache, header + line, "the pack"); });
  }
  expect_refused(ErrorKind::kBadInput, "no pack",
                 [&] { import_pack(cache.cache, lists(1'000'000), "the pack"); });
  // What is a text in a row is none of its levels.
  std::string problem;
  EXPECT_TRUE(from_line(R"({"row":"winner","device":"d","family":"\"[[","plan":)" + lists(63) + "}",
                        problem))
      << problem;
  EXPECT_TRUE(from_line(
      R"({"row":"winner","device":"[","family":")" + std::string(99, '[') + R"(","plan":[]})",
      problem))
      << problem;
}

TEST(Pack, ThatIsNoFileIsRefusedWithoutWaiting) {
  const TempDirectory temp;
  const auto fifo = temp.path() / "a.jsonl";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  const std::function<void()> readers[] = {
      [&] { (void)read_text(fifo); },
      [&] { (void)read_contents(fifo); },
      [&] { (void)read_text(temp.path()); },
  };
  for (const auto& reader : readers) {
    auto done = std::async(std::launch::async, [&] {
      expect_refused(ErrorKind::kBadInput, temp.path().c_str(), reader);
    });
    while (done.wait_for(std::chrono::seconds(20)) != std::future_status::ready) {
      ADD_FAILURE() << "it waits for a writer";
      ::close(::open(fifo.c_str(), O_WRONLY | O_NONBLOCK));
    }
  }
  std::vector<std::string> told;
  Packs packs({{"one", {temp.path()}}},
              [&](const std::string& sentence) { told.push_back(sentence); });
  EXPECT_TRUE(packs.winners_of(winner(1, 1).device, "gdn")->empty());
  ASSERT_EQ(told.size(), 1u);
  EXPECT_NE(told[0].find("a.jsonl cannot be read: it is no file"), std::string::npos) << told[0];
}

// ---- Layers

std::string pack_of(const std::vector<WinnerRow>& rows) {
  std::string text = R"({"devices":[")" + winner(1, 1).device +
                     R"(","cpu"],"row":"pack","version":1})"
                     "\n";
  for (const WinnerRow& row : rows) text += to_line(row) + '\n';
  return text;
}

WinnerRow ranked(std::int64_t tokens, double median, double standard) {
  WinnerRow row = winner(tokens, 1);
  row.median_us = median, row.default_us = standard;
  return row;
}

TEST(PackLayers, StandInOrderAndInThemTheBestRatioInFront) {
  const TempDirectory first, second;
  write_file(first.path() / "a.jsonl", pack_of({ranked(16, 1, 2), ranked(8, 5, 10)}));
  write_file(first.path() / "b.jsonl", pack_of({ranked(8, 400, 1000)}));  // a slow machine's
  write_file(first.path() / "c.txt", "no pack, and not looked at");
  write_file(second.path() / "a.jsonl", pack_of({ranked(8, 1, 10), ranked(64, 1, 2)}));
  int told = 0;
  Packs packs({{"one", {first.path()}}, {"two", {second.path() / "a.jsonl"}}},
              [&](const std::string&) { ++told; });
  const std::string device = winner(1, 1).device;
  const Packs::Winners found = packs.winners_of(device, "gd");
  ASSERT_EQ(found->size(), 5u);
  EXPECT_EQ((*found)[0].row.median_us, 400);
  EXPECT_EQ((*found)[0].layer, 0u);
  EXPECT_EQ((*found)[0].file, first.path() / "b.jsonl");
  EXPECT_EQ((*found)[1].row.median_us, 5);  // answers where the plan before it cannot be used
  EXPECT_EQ((*found)[2].row.tokens, 16);
  EXPECT_EQ((*found)[3].layer, 1u);
  EXPECT_EQ((*found)[4].row.tokens, 64);
  EXPECT_EQ(packs.winners_of(device, "gd"), found);
  EXPECT_EQ(packs.winners_of(device, "gdn")->size(), 5u);
  EXPECT_TRUE(packs.winners_of(device, "gdn/")->empty());
  EXPECT_TRUE(packs.winners_of(device, "kda")->empty());
  EXPECT_TRUE(packs.winners_of("cpu", "gdn")->empty());
  EXPECT_TRUE(packs.winners_of("another device", "gdn")->empty());
  EXPECT_EQ(told, 0);
}

TEST(PackLayers, ServeProcessorsThatDifferInThreads) {
  const TempDirectory temp;
  WinnerRow row = ranked(8, 1, 2);
  row.device = "EPYC, native, 8 threads";
  write_file(temp.path() / "a.jsonl",
             R"({"devices":["EPYC, native, 8 threads"],"row":"pack","version":1})"
             "\n" +
                 to_line(row) + '\n');
  Packs packs({{"one", {temp.path()}}});
  EXPECT_EQ(packs.winners_of("EPYC, native, 2 threads", "gdn")->size(), 1u);
  EXPECT_TRUE(packs.winners_of("Xeon, native, 8 threads", "gdn")->empty());

  EXPECT_EQ(device_text("EPYC, native, 1 threads"), "EPYC, native, 1 thread");
  for (const char* key : {"EPYC, native, 11 threads", "NVIDIA H200, 132 SMs", "1 threads", ""})
    EXPECT_EQ(device_text(key), key);
  for (const char* key : {"EPYC, native", "EPYC, x threads", "EPYC, 0 threads", " threads",
                          "EPYC, 2x threads", "2 threads", ""}) {
    EXPECT_EQ(device_parts(key).model, key);
    EXPECT_EQ(device_parts(key).threads, 0);
  }
  EXPECT_EQ(device_parts(row.device).threads, 8);
  EXPECT_EQ(device_parts(row.device).model, "EPYC, native");
}

TEST(PackLayers, ServeAGpuThatNoPackNamesByTheNearestOfItsArchitecture) {
  const TempDirectory temp;
  const char* const h200 = "NVIDIA H200, 132 SMs, 1980 MHz, memory 3201 MHz x 6016 bit, 139 GiB";
  const char* const h20 = "NVIDIA H20, 78 SMs, 1980 MHz, memory 2619 MHz x 6144 bit, 95 GiB";
  const char* const h100 =
      "NVIDIA H100 80GB HBM3, 132 SMs, 1980 MHz, memory 2619 MHz x 5120 bit, 79 GiB";
  const char* const gh200 =
      "NVIDIA GH200 480GB, 132 SMs, 1980 MHz, memory 2619 MHz x 6144 bit, 95 GiB";
  int name = 0;
  for (const char* const device : {h20, h200}) {
    WinnerRow row = ranked(8, 1, 2);
    row.device = device;
    write_file(temp.path() / (std::to_string(name++) + ".jsonl"),
               fmt::format(R"({{"devices":["{}"],"row":"pack","version":1}})"
                           "\n{}\n",
                           device, to_line(row)));
  }
  Packs packs({{"one", {temp.path()}}});
  for (const char* const device : {h100, gh200}) {
    const Packs::Winners found = packs.winners_of(device, "gdn");
    ASSERT_EQ(found->size(), 1u) << device;
    EXPECT_EQ(found->front().row.device, h200);
    EXPECT_TRUE(found->front().stand_in);
  }
  for (const char* const device : {h20, h200}) {
    const Packs::Winners found = packs.winners_of(device, "gdn");
    ASSERT_EQ(found->size(), 1u) << device;
    EXPECT_EQ(found->front().row.device, device);
    EXPECT_FALSE(found->front().stand_in);
  }
  for (const char* const device :
       {"NVIDIA B200, 148 SMs, 1965 MHz, memory 3996 MHz x 7680 bit, 178 GiB", "NVIDIA H2000",
        "cpu"})
    EXPECT_TRUE(packs.winners_of(device, "gdn")->empty()) << device;
}

TEST(ShippedCodeFolders, AreThoseOfThePythonDistributionsToo) {
  const TempDirectory temp;
  const auto site = temp.path() / "packages";  // pip install --target: any name
  for (const char* const name :
       {"wyvern/lib", "wyvern_kernels_sm90", "wyvern_kernels_sm80", "wyvern_kernels_cpu", "other"})
    std::filesystem::create_directories(site / name);
  const auto without = ShippedCode::default_folders(site / "wyvern" / "lib");
  EXPECT_EQ(without, ShippedCode::default_folders(temp.path()));
  write_file(site / "wyvern" / "__init__.py", "");
  std::vector<std::filesystem::path> found = ShippedCode::default_folders(site / "wyvern" / "lib");
  ASSERT_GE(found.size(), 2u);
  found.erase(found.begin(), found.end() - 2);
  EXPECT_EQ(found, (std::vector{site / "wyvern_kernels_sm80", site / "wyvern_kernels_sm90"}));
}

TEST(PackLayers, UnreadableFilesAreSkippedAndReportedOnce) {
  const TempDirectory temp;
  write_file(temp.path() / "a.jsonl", "no pack");
  write_file(temp.path() / "b.jsonl", pack_of({ranked(8, 1, 2)}) + R"({"family":"gdn","row":1})");
  std::vector<std::string> told;
  Packs packs({{"one", {temp.path(), "/nowhere.jsonl"}}},
              [&](const std::string& sentence) { told.push_back(sentence); });
  for (int i = 0; i < 3; ++i) EXPECT_EQ(packs.winners_of(winner(1, 1).device, "gdn")->size(), 1u);
  ASSERT_EQ(told.size(), 3u);
  EXPECT_NE(told[0].find("a.jsonl is no pack"), std::string::npos);
  EXPECT_NE(told[1].find("/nowhere.jsonl"), std::string::npos);
  EXPECT_NE(told[2].find("1 lines"), std::string::npos);
}

TEST(PackLayers, RowsAreReadButForHowTheyWereMeasured) {
  const TempDirectory temp;
  WinnerRow row = ranked(8, 1, 2);
  row.setting.host = R"(a "host", {of [brackets\)";
  row.problem = R"({"op":"gdn","list":[1,{"text":"} ] \" , "}],"problem":{}})";
  row.samples_us = {1, 2.5}, row.default_samples_us = {3}, row.clocks_mhz = {1980};
  std::string lines;
  for (const std::size_t left : {0, 1, 2, 30}) {
    const std::string line = to_line(row);
    lines += line.substr(0, line.size() - left) + '\n';
  }
  write_file(temp.path() / "a.jsonl", pack_of({}) + lines);
  std::vector<std::string> told;
  Packs packs({{"one", {temp.path()}}},
              [&](const std::string& sentence) { told.push_back(sentence); });
  const Packs::Winners found = packs.winners_of(row.device, "gdn");
  ASSERT_EQ(found->size(), 1u);
  WinnerRow expected = row;
  expected.problem.clear();
  expected.samples_us.clear();
  expected.default_samples_us.clear();
  expected.clocks_mhz.clear();
  EXPECT_EQ(to_line(found->front().row), to_line(expected));
  ASSERT_EQ(told.size(), 1u);
  EXPECT_NE(told[0].find("3 lines"), std::string::npos) << told[0];
}

TEST(PackLayers, AreNamedByTheEnvironment) {
  const TempDirectory temp;
  write_file(temp.path() / "a.jsonl", pack_of({ranked(8, 1, 2)}));
  ::setenv("WYVERN_PACKS", ("/nowhere::" + temp.path().string()).c_str(), 1);
  const auto layers = Packs::default_layers();
  ::unsetenv("WYVERN_PACKS");
  ASSERT_EQ(layers.size(), 2u);
  EXPECT_EQ(layers[0].name, "WYVERN_PACKS");
  EXPECT_EQ(layers[0].paths, (std::vector<std::filesystem::path>{"/nowhere", temp.path()}));
  EXPECT_EQ(layers[1].name, "shipped");
  // The build tree is laid out as an installation.
  ASSERT_EQ(layers[1].paths.size(), 1u);
  EXPECT_TRUE(std::filesystem::exists(layers[1].paths[0] / "README.md"));
}

}  // namespace
}  // namespace wyvern::testing
