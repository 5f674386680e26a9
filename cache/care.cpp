#include "cache/care.hpp"

#include <wyvern/error.hpp>
#include <wyvern/sha256.hpp>

#include <fmt/format.h>
#include <sqlite3.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <system_error>
#include <tuple>
#include <utility>

#include <sys/vfs.h>

#include "cache/access.hpp"
#include "cache/rows.hpp"
#include "cache/schema.hpp"
#include "cache/tables.hpp"
#include "cache/trust.hpp"
#include "runtime/base/json_text.hpp"
#include "runtime/base/printable.hpp"

namespace wyvern {
namespace {

namespace fs = std::filesystem;
using Weight = Finding::Weight;

// ---- Rows

/// The digests that rows were stored with, in the order of their ids.
std::vector<std::string> digests_of(Database& database, const char* sql) {
  std::vector<std::string> digests;
  Query query(database, sql);
  while (query.step()) digests.push_back(query.text(0));
  return digests;
}

template <class Row>
void compare(std::vector<Row> rows, const std::vector<std::string>& digests, char kind,
             std::vector<std::string>& damage) {
  std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.id < b.id; });
  for (std::size_t i = 0; i < std::min(rows.size(), digests.size()); ++i)
    if (digest_of(rows[i]) != digests[i])
      damage.push_back(fmt::format("{}{} is not as it was stored", kind, rows[i].id));
}

/// Adds SQLite's findings about the pages. It reports pages that cannot be read, which the next
/// attempt may read, as damaged.
void check_pages(Database& database, std::vector<std::string>& damage) {
  Query check(database, "PRAGMA integrity_check(10)");
  while (check.step()) {
    const std::string text = check.text(0);
    for (const char* unreadable : {"unable to get the page", "failed to get page"})
      if (text.find(unreadable) != text.npos) throw DatabaseError(SQLITE_IOERR, text);
    if (text != "ok") damage.push_back(text);
  }
}

Verification verify_rows(Database& database) {
  Verification result;
  check_pages(database, result.damage);
  if (!has_current_tables(database))
    result.damage.emplace_back("its tables do not match its version");
  Query artifacts(database,
                  "SELECT key, template_id, target, config, metadata, digest, code FROM artifacts");
  for (; artifacts.step(); ++result.artifacts) {
    ArtifactRow row;
    row.key = artifacts.text(0);
    row.template_id = artifacts.text(1);
    row.target = artifacts.text(2);
    row.config = artifacts.text(3);
    row.metadata = artifacts.text(4);
    if (artifact_digest(row, sha256_hex(artifacts.blob(6))) != artifacts.text(5))
      result.damage.push_back(fmt::format("artifact {} is not as it was stored", row.key));
  }
  auto measurements = tables::measurements(database);
  auto winners = tables::winners(database, tables::Winners::all);
  result.measurements = static_cast<std::int64_t>(measurements.size());
  result.winners = tables::problems_won(database);
  result.superseded = static_cast<std::int64_t>(winners.size()) - result.winners;
  compare(std::move(measurements),
          digests_of(database, "SELECT digest FROM measurements ORDER BY id"), 'm', result.damage);
  compare(std::move(winners), digests_of(database, "SELECT digest FROM winners ORDER BY id"), 'w',
          result.damage);
  return result;
}

// ---- Size

struct Candidate {
  std::int64_t id = 0, bytes = 0;
  std::string name;  ///< template and config
  std::string used;
  bool wanted = false;  ///< a winner's plan has it
};

/// Template and config of every step of every plan that answers.
std::set<std::string> wanted_kernels(Database& database) {
  std::set<std::string> names;
  for (const WinnerRow& row : tables::winners(database, tables::Winners::that_answer)) {
    const auto plan = parse_json(row.plan);
    if (!plan.is_array()) continue;
    for (const auto& step : plan)
      if (step.is_object() && step.contains("template") && step.contains("config") &&
          step["template"].is_string() && step["config"].is_string())
        names.insert(step["template"].get<std::string>() + ' ' + step["config"].get<std::string>());
  }
  return names;
}

/// Artifacts in the order in which they are deleted.
std::vector<Candidate> candidates(Database& database) {
  const std::set<std::string> wanted = wanted_kernels(database);
  std::vector<Candidate> found;
  Query query(database,
              "SELECT id, length(code) + length(metadata), template_id || ' ' || config,"
              " max(created, coalesce((SELECT used FROM uses WHERE uses.key = artifacts.key), ''))"
              " FROM artifacts");
  while (query.step()) {
    Candidate& one = found.emplace_back();
    one.id = query.integer(0);
    one.bytes = query.integer(1);
    one.name = query.text(2);
    one.used = query.text(3).substr(0, 10);
    one.wanted = wanted.contains(one.name);
  }
  std::sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) {
    return std::tie(a.wanted, a.used, a.id) < std::tie(b.wanted, b.used, b.id);
  });
  return found;
}

std::int64_t size_of(const fs::path& file) {
  std::error_code error;
  const std::uintmax_t bytes = fs::file_size(file, error);
  return error ? 0 : static_cast<std::int64_t>(bytes);
}

/// Deletes artifacts of at least `excess` bytes, as far as there are any.
void give_up(Database& database, std::int64_t excess, Collection& done) {
  for (const Candidate& one : candidates(database)) {
    if (excess <= 0) break;
    Query(database, "DELETE FROM artifacts WHERE id = ?").bind(one.id).step();
    excess -= one.bytes;
    ++done.deleted;
    done.deleted_bytes += one.bytes;
  }
  database.execute("DELETE FROM uses WHERE key NOT IN (SELECT key FROM artifacts)");
}

[[noreturn]] void fail(const Cache& cache) {
  throw Error(ErrorKind::kIo, cache.status().empty() ? fmt::format("the cache {} cannot be used",
                                                                   cache.file().string())
                                                     : cache.status());
}

// ---- Diagnosis

/// statfs's magic numbers of file systems over a network.
std::string name_of_network(std::uint32_t type) {
  static constexpr std::array<std::pair<std::uint32_t, const char*>, 11> kNames{{
      {0x6969, "NFS"},
      {0xFF534D42, "CIFS"},
      {0xFE534D42, "SMB"},
      {0x517B, "SMB"},
      {0x0BD00BD0, "Lustre"},
      {0x47504653, "GPFS"},
      {0x00C36400, "Ceph"},
      {0x5346414F, "AFS"},
      {0x6B414653, "AFS"},
      {0x19830326, "BeeGFS"},
      {0x01021997, "9P"},
  }};
  const auto found = std::find_if(kNames.begin(), kNames.end(),
                                  [&](const auto& name) { return name.first == type; });
  return found == kNames.end() ? "" : found->second;
}

class Diagnosis {
 public:
  Diagnosis(fs::path directory, const std::map<std::string, std::string>& drivers,
            const WinnerCheck& check, std::uint32_t type)
      : directory_(std::move(directory)),
        file_(directory_ / "wyvern.db"),
        drivers_(drivers),
        check_(check),
        type_(type) {}

  std::vector<Finding> run() {
    if (!check_directory()) return std::move(findings_);
    check_file_system();
    check_room();
    check_leftovers();
    check_database();
    return std::move(findings_);
  }

 private:
  void add(Weight weight, const char* check, std::string message, std::string fix = "") {
    findings_.push_back({weight, check, std::move(message), std::move(fix)});
  }

  /// False when nothing more can be said.
  bool check_directory() {
    std::error_code error;
    if (directory_.empty()) {
      add(Weight::error, "directory", "no directory for the cache is known",
          "set WYVERN_CACHE_DIR, or HOME");
      return false;
    }
    if (!fs::is_directory(directory_, error)) {
      add(Weight::note, "directory",
          fmt::format("{} does not exist yet; it is made when first used", directory_.string()));
      return false;
    }
    const Trust trust = trust_in(file_);
    if (!trust.refusal.empty()) {
      const std::size_t colon = trust.refusal.rfind(": ");
      add(Weight::error, "owner", trust.refusal.substr(0, colon),
          colon == std::string::npos ? "" : trust.refusal.substr(colon + 2));
      return false;
    }
    if (trust.read_only)
      add(Weight::note, "owner",
          "the cache belongs to the user of WYVERN_CACHE_OWNER, so it is "
          "read and never written");
    else
      add(Weight::good, "owner", "only this user and root may write it");
    return true;
  }

  void check_file_system() {
    constexpr std::uint32_t kFuse = 0x65735546;
    if (const std::string name = name_of_network(type_); !name.empty())
      add(Weight::warning, "file system",
          fmt::format("{} lies on {}, over a network, where locks are slow and may not hold",
                      directory_.string(), name),
          "set WYVERN_CACHE_DIR to a directory on a disk of this machine, and copy results with "
          "`wyvern cache merge`");
    else if (type_ == kFuse)
      add(Weight::note, "file system",
          fmt::format("{} lies on a FUSE file system, which may be over a network",
                      directory_.string()),
          "where it is, set WYVERN_CACHE_DIR to a directory on a disk of this machine");
    else
      add(Weight::good, "file system", "it lies on a file system of this machine");
  }

  void check_room() {
    constexpr std::uintmax_t kLittle = 100 << 20;
    std::error_code error;
    const fs::space_info room = fs::space(directory_, error);
    if (!error && room.available < kLittle)
      add(Weight::warning, "room",
          fmt::format("{} MiB are left for {}", room.available >> 20, directory_.string()),
          "free some space, or `wyvern cache gc --max-bytes N`");
  }

  void check_leftovers() {
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(directory_, error)) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with("wyvern.db.corrupt-") && !name.ends_with("-journal"))
        add(Weight::note, "damage",
            fmt::format("{} is a damaged file kept aside; its readable rows were saved",
                        entry.path().string()),
            fmt::format("rm '{}'", entry.path().string()));
    }
  }

  void check_database() {
    std::error_code error;
    if (!fs::exists(file_, error)) {
      add(Weight::note, "database", "there is no database yet; it is made when first used");
      return;
    }
    try {
      Database database(file_, Database::Mode::read_only);
      const Transaction snapshot(database, Transaction::Kind::read);
      const Identity identity = identify(database);
      require_ours(identity, file_);
      if (identity == Identity::current) {
        check_rows(database);
        check_drivers(database);
        if (check_) check_plans(database);
      }
    } catch (const DatabaseError& failed) {
      check_failure(failed);
    } catch (const Error& foreign) {
      add(Weight::error, "version", foreign.what());
    }
  }

  void check_failure(const DatabaseError& failed) {
    if (failed.is_damage())
      add(Weight::error, "damage", fmt::format("{} is damaged ({})", file_.string(), failed.what()),
          "`wyvern cache stats` repairs it: readable rows move to a new file, the damaged one "
          "stays");
    else
      add(Weight::error, "database",
          fmt::format("{} cannot be read ({})", file_.string(), failed.what()),
          failed.primary() == SQLITE_BUSY ? "end the process that holds it"
                                          : "see to its permissions and its disk");
  }

  void check_rows(Database& database) {
    const Verification result = verify_rows(database);
    if (result.damage.empty()) {
      add(Weight::good, "damage",
          fmt::format(
              "{}, {}, {} and {} are as they were stored", count_text(result.artifacts, "artifact"),
              count_text(result.measurements, "measurement"), count_text(result.winners, "winner"),
              count_text(result.superseded, "superseded winner")));
      return;
    }
    add(Weight::error, "damage",
        result.damage.size() == 1
            ? result.damage.front()
            : fmt::format("{} things are not as they were stored; the first: {}",
                          result.damage.size(), result.damage.front()),
        "damaged artifacts are compiled again when asked for; for the rest move the file away and "
        "`wyvern cache merge` it into a new one");
  }

  /// Rows of this machine's devices that were measured with another driver than they have now.
  void check_drivers(Database& database) {
    std::int64_t winners = 0, measurements = 0;
    for (const WinnerRow& row : tables::winners(database, tables::Winners::that_answer))
      winners += is_stale(row.device, row.driver);
    Query query(database, "SELECT device, driver, count(*) FROM measurements GROUP BY 1, 2");
    while (query.step())
      if (is_stale(query.text(0), query.text(1))) measurements += query.integer(2);
    if (winners == 0 && measurements == 0)
      add(Weight::good, "driver", "no row of this machine's devices is of another driver");
    else
      add(Weight::warning, "driver",
          fmt::format("{} and {} of this machine's devices are of another driver; the winners are "
                      "used as the nearest that is known",
                      count_text(winners, "winner"), count_text(measurements, "measurement")),
          "`wyvern tune` the problems again");
  }

  /// Problems of this machine's devices whose first winner this build cannot use.
  void check_plans(Database& database) {
    std::map<std::int64_t, WinnerRow> whole;  // by id: the problem is among the long members
    for (WinnerRow& row : tables::winners(database, tables::Winners::all))
      if (drivers_.contains(row.device)) whole.emplace(row.id, std::move(row));
    std::int64_t replaced = 0, lost = 0;
    std::string first, problem;
    const std::vector<WinnerRow> rows = tables::winners_of(database, "");
    for (auto row = rows.begin(); row != rows.end();) {
      const auto next = std::find_if(row, rows.end(), [&](const WinnerRow& of) {
        return std::tie(of.device, of.family, of.tokens, of.sequences) !=
               std::tie(row->device, row->family, row->tokens, row->sequences);
      });
      const auto cannot = [&](const WinnerRow& of) {
        const auto found = whole.find(of.id);
        if (found != whole.end()) problem = check_(found->second);
        return found != whole.end() && !problem.empty();
      };
      if (cannot(*row)) {
        if (first.empty()) first = fmt::format("w{}: {}", row->id, problem);
        ++(std::all_of(row + 1, next, cannot) ? lost : replaced);
      }
      row = next;
    }
    if (replaced == 0 && lost == 0)
      add(Weight::good, "plans", "this build can use the winners of this machine's devices");
    else
      add(Weight::warning, "plans",
          fmt::format("this build cannot use the first winner of {}, {} of which with another that "
                      "it can use (the first is {})",
                      count_text(replaced + lost, "problem"), replaced, first),
          "`wyvern tune` the problems again, or use the build that tuned them");
  }

  bool is_stale(const std::string& device, const std::string& driver) const {
    const auto found = drivers_.find(device);
    return found != drivers_.end() && found->second != driver;
  }

  const fs::path directory_, file_;
  const std::map<std::string, std::string>& drivers_;
  const WinnerCheck& check_;
  const std::uint32_t type_;  ///< of the file system
  std::vector<Finding> findings_;
};

}  // namespace

Verification verify_rows(const Cache& cache) {
  Verification result;
  const bool done = CacheAccess::read(cache, [&](Database& database) {
    const Transaction snapshot(database, Transaction::Kind::read);
    result = verify_rows(database);
  });
  if (!done) fail(cache);
  return result;
}

Collection collect(Cache& cache, std::int64_t max_bytes) {
  using Access = Connection::Access;
  if (!CacheAccess::read(cache, [](Database&) {})) fail(cache);
  Collection done;
  done.bytes_before = done.bytes = size_of(cache.file());
  // A row's size beside its code is known only when the file has been written anew.
  constexpr int kRounds = 8;
  for (int round = 0; round < kRounds && done.bytes > max_bytes; ++round) {
    const std::int64_t deleted = done.deleted;
    Collection next = done;
    const bool written = CacheAccess::run(cache, Access::shrink, [&](Database& database) {
      next = done;
      // Only VACUUM frees pages; the first round may need nothing else.
      const std::int64_t free =
          database.integer("PRAGMA freelist_count") * database.integer("PRAGMA page_size");
      give_up(database, done.bytes - free - max_bytes, next);
    });
    if (!written) fail(cache);
    done = next;
    done.bytes = size_of(cache.file());
    if (done.deleted == deleted && round > 0) break;
  }
  return done;
}

std::string_view to_string(Weight weight) noexcept {
  switch (weight) {
    case Weight::good: return "good";
    case Weight::note: return "note";
    case Weight::warning: return "warning";
    case Weight::error: return "error";
  }
  return "?";
}

std::uint32_t file_system_type(const fs::path& path) {
  struct statfs info{};
  return ::statfs(path.c_str(), &info) == 0 ? static_cast<std::uint32_t>(info.f_type) : 0;
}

std::vector<Finding> diagnose(const fs::path& directory,
                              const std::map<std::string, std::string>& drivers,
                              const WinnerCheck& check,
                              const std::function<std::uint32_t(const fs::path&)>& type_of) {
  return Diagnosis(directory, drivers, check, type_of(directory)).run();
}

}  // namespace wyvern
