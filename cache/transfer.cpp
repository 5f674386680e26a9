#include "cache/transfer.hpp"

#include <wyvern/error.hpp>
#include <wyvern/sha256.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <deque>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <tuple>
#include <type_traits>
#include <utility>

#include "cache/access.hpp"
#include "cache/rows.hpp"
#include "cache/schema.hpp"
#include "cache/tables.hpp"
#include "cache/trust.hpp"
#include "runtime/base/json_text.hpp"

namespace wyvern {
namespace {

namespace fs = std::filesystem;

constexpr int kPackVersion = 1;
constexpr std::chrono::milliseconds kPatience{5000};

template <class... Args>
[[noreturn]] void reject(ErrorKind kind, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(kind, fmt::format(format, std::forward<Args>(args)...));
}

// ---- Another database

fs::path database_at(const fs::path& path) {
  std::error_code error;
  const fs::path file = fs::is_directory(path, error) ? path / "wyvern.db" : path;
  if (!fs::is_regular_file(file, error))
    reject(ErrorKind::kBadInput, "{} is no cache: there is no database of that name",
           path.string());
  return file;
}

/// Opens a database to read it; nothing where it is empty.
std::unique_ptr<Database> open_other(const fs::path& file) {
  // For writing, where that is allowed, since a transaction of a process that was killed may have
  // to be rolled back before it can be read.
  auto database = std::make_unique<Database>(file, Database::Mode::read_write);
  database->set_patience(kPatience);
  Identity identity = Identity::empty;
  {
    const Transaction look(*database, Transaction::Kind::read);
    identity = identify(*database);
  }
  require_ours(identity, file);
  if (identity == Identity::empty) return {};
  return database;
}

[[noreturn]] void fail_reading(const fs::path& file, const DatabaseError& error) {
  reject(ErrorKind::kIo, "the cache {} cannot be read ({}); `wyvern cache doctor` says more of it",
         file.string(), error.what());
}

// ---- Artifacts

struct StoredArtifact {
  ArtifactRow row;
  std::string digest, used;
  bool sound() const { return artifact_digest(row, sha256_hex(row.code)) == digest; }
  /// Decides between two rows of one key: the lesser stays.
  auto rank() const { return std::tie(digest, row.created, row.compile_ms); }
};

#define WYVERN_ARTIFACT             \
  "SELECT " WYVERN_ARTIFACT_COLUMNS \
  ", digest,"                       \
  " coalesce((SELECT used FROM uses WHERE uses.key = artifacts.key), ''), code FROM artifacts "

StoredArtifact read_artifact(const Query& query) {
  StoredArtifact stored{tables::read_artifact(query), {}, {}};
  stored.digest = query.text(7);
  stored.used = query.text(8);
  stored.row.code = query.blob(9);
  return stored;
}

void put(Database& database, const StoredArtifact& stored) {
  const ArtifactRow& row = stored.row;
  Query(database,
        "REPLACE INTO artifacts (key, template_id, target, config, metadata, compile_ms, created,"
        " digest, code) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)")
      .bind(row.key)
      .bind(row.template_id)
      .bind(row.target)
      .bind(row.config)
      .bind(row.metadata)
      .bind(row.compile_ms)
      .bind(row.created)
      .bind(stored.digest)
      .bind_blob(row.code)
      .step();
}

void merge_artifact(Database& database, const StoredArtifact& theirs, Added& added) {
  if (!theirs.sound()) {
    ++added.damaged;
    return;
  }
  std::optional<StoredArtifact> ours;
  {
    Query query(database, WYVERN_ARTIFACT "WHERE key = ?");
    if (query.bind(theirs.row.key).step()) ours = read_artifact(query);
  }
  const bool known = ours && ours->row.key == theirs.row.key && ours->sound();
  if (!known || theirs.rank() < ours->rank()) put(database, theirs);
  ++(known ? added.known : added.artifacts);
  if (theirs.used.empty()) return;
  Query(database,
        "INSERT INTO uses (key, used) VALUES (?, ?)"
        " ON CONFLICT (key) DO UPDATE SET used = max(used, excluded.used)")
      .bind(theirs.row.key)
      .bind(theirs.used)
      .step();
}

template <class Row>
void add_all(Database& database, const std::vector<Row>& rows, std::int64_t& fresh,
             std::int64_t& known) {
  for (const Row& row : rows) ++(tables::add(database, row) ? fresh : known);
}

/// Runs the work in one transaction of the cache; throws the cache's status where it failed.
void store(Cache& cache, const Connection::Work& work) {
  if (!CacheAccess::run(cache, Connection::Access::write, work))
    reject(ErrorKind::kIo, "nothing was added: {}", cache.status());
}

/// A cache that is merged into another, in a snapshot that lasts as long as this object. Its errors
/// are Error(kIo) that names it, so that they are not mistaken for the other's.
class OtherCache {
 public:
  OtherCache(fs::path file, std::size_t place) : file_(std::move(file)), place_(place) {
    if (const Trust trust = trust_in(fs::absolute(file_)); !trust.refusal.empty())
      reject(ErrorKind::kIo, "{} is not merged: {}", file_.string(), trust.refusal);
    try {
      database_ = open_other(file_);
      if (database_ == nullptr) return;
      snapshot_.emplace(*database_, Transaction::Kind::read);
      measurements_ = tables::measurements(*database_);
      winners_ = tables::winners(*database_, tables::Winners::all);
    } catch (const DatabaseError& error) {
      fail_reading(file_, error);
    }
  }

  std::size_t place() const { return place_; }  ///< among those that are merged

  Added add_to(Database& database) {
    Added added;
    if (database_ == nullptr) return added;
    add_all(database, measurements_, added.measurements, added.known);
    add_all(database, winners_, added.winners, added.known);
    try {
      artifacts_.emplace(*database_, WYVERN_ARTIFACT "ORDER BY id");
    } catch (const DatabaseError& error) {
      fail_reading(file_, error);
    }
    while (const auto next = next_artifact()) merge_artifact(database, *next, added);
    return added;
  }

 private:
  std::optional<StoredArtifact> next_artifact() {
    try {
      if (artifacts_->step()) return read_artifact(*artifacts_);
    } catch (const DatabaseError& error) {
      fail_reading(file_, error);
    }
    return {};
  }

  const fs::path file_;
  const std::size_t place_;
  std::unique_ptr<Database> database_;  ///< null: nothing is in it
  std::optional<Transaction> snapshot_;
  std::optional<Query> artifacts_;
  std::vector<MeasurementRow> measurements_;
  std::vector<WinnerRow> winners_;
};

bool is_same_file(const fs::path& a, const fs::path& b) {
  std::error_code error;
  return fs::equivalent(a, b, error) && !error;
}

// ---- Packs

/// Calls use(line, number) for each line that is not blank.
template <class Use>
void for_each_line(std::string_view text, const Use& use) {
  std::size_t number = 0;
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    text.remove_prefix(end == text.npos ? text.size() : end + 1);
    ++number;
    if (line.find_first_not_of(" \t\r") != line.npos) use(line, number);
  }
}

template <class Row>
void sort_lines(const std::vector<Row>& rows, std::vector<std::string>& lines) {
  const std::size_t first = lines.size();
  for (const Row& row : rows) lines.push_back(to_line(row));
  std::sort(lines.begin() + static_cast<std::ptrdiff_t>(first), lines.end());
}

}  // namespace

std::vector<Added> merge(Cache& into, const std::vector<fs::path>& others) {
  std::deque<OtherCache> theirs;
  std::vector<Added> added(others.size());
  for (std::size_t i = 0; i < others.size(); ++i)
    if (const fs::path file = database_at(others[i]); !is_same_file(file, into.file()))
      theirs.emplace_back(file, i);
  if (theirs.empty()) return added;
  store(into, [&](Database& database) {
    for (OtherCache& other : theirs) added[other.place()] = other.add_to(database);
  });
  return added;
}

Added merge(Cache& into, const fs::path& other) {
  return merge(into, std::vector<fs::path>{other}).front();
}

std::string export_pack(const Cache& cache, bool all, std::string_view device) {
  std::vector<WinnerRow> winners;
  std::vector<MeasurementRow> measurements;
  const bool done = CacheAccess::read(cache, [&](Database& database) {
    const Transaction snapshot(database, Transaction::Kind::read);
    winners = tables::winners(database, all ? tables::Winners::all : tables::Winners::that_answer);
    measurements = all ? tables::measurements(database) : std::vector<MeasurementRow>();
  });
  if (!done) reject(ErrorKind::kIo, "nothing was exported: {}", cache.status());
  const auto other = [&](const auto& row) { return !device.empty() && row.device != device; };
  std::erase_if(winners, other);
  std::erase_if(measurements, other);
  std::set<std::string> devices;
  for (const WinnerRow& row : winners) devices.insert(row.device);
  for (const MeasurementRow& row : measurements) devices.insert(row.device);
  std::vector<std::string> lines{
      nlohmann::json{{"row", "pack"}, {"version", kPackVersion}, {"devices", devices}}.dump(
          -1, ' ', false, nlohmann::json::error_handler_t::replace)};
  sort_lines(winners, lines);
  sort_lines(measurements, lines);
  std::string text;
  for (const std::string& line : lines) text += line + '\n';
  return text;
}

std::vector<std::string> pack_devices(std::string_view first_line, std::string_view name) {
  const auto header = parse_json(first_line);
  std::vector<std::string> devices;
  try {
    if (!header.is_object() || header.value("row", "") != "pack")
      reject(ErrorKind::kBadInput, "{} is no pack of Wyvern: its first line does not say so", name);
    if (const double version = header.value("version", 0.0); version != kPackVersion)
      reject(ErrorKind::kBadInput, "{} is a pack of version {}; this Wyvern reads version {}", name,
             version, kPackVersion);
    devices = header.value("devices", devices);
  } catch (const nlohmann::json::exception&) {
    reject(ErrorKind::kBadInput, "{} is no pack of Wyvern: its first line is malformed", name);
  }
  return devices;
}

PackRows parse_pack(std::string_view text, std::string_view name) {
  PackRows rows;
  bool header = false;
  for_each_line(text, [&](std::string_view line, std::size_t number) {
    if (!header) {
      rows.devices = pack_devices(line, name);
      header = true;
      return;
    }
    std::string problem;
    const auto row = from_line(line, problem);
    if (!row) reject(ErrorKind::kBadInput, "line {} of {} is no row: {}", number, name, problem);
    if (const auto* winner = std::get_if<WinnerRow>(&*row)) rows.winners.push_back(*winner);
    if (const auto* measured = std::get_if<MeasurementRow>(&*row))
      rows.measurements.push_back(*measured);
  });
  if (!header) reject(ErrorKind::kBadInput, "{} is no pack of Wyvern: it is empty", name);
  return rows;
}

Added import_pack(Cache& into, std::string_view text, std::string_view name) {
  const PackRows rows = parse_pack(text, name);
  Added added;
  store(into, [&](Database& database) {
    added = {};
    add_all(database, rows.measurements, added.measurements, added.known);
    add_all(database, rows.winners, added.winners, added.known);
  });
  return added;
}

std::string read_text(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  // Opening a FIFO would wait for somebody to write it.
  if (fs::exists(status) && !fs::is_regular_file(status))
    reject(ErrorKind::kBadInput, "{} cannot be read: it is no file", path.string());
  std::ifstream in(path, std::ios::binary);
  if (!in)
    reject(ErrorKind::kBadInput, "{} cannot be read: there is no such file, or it may not be read",
           path.string());
  std::string text;
  std::array<char, 1 << 16> piece{};
  while (in.read(piece.data(), piece.size()), in.gcount() > 0)
    text.append(piece.data(), static_cast<std::size_t>(in.gcount()));
  if (in.bad()) reject(ErrorKind::kIo, "{} cannot be read: a read of it fails", path.string());
  return text;
}

Contents read_contents(const fs::path& path) {
  std::error_code error;
  Contents contents;
  if (fs::is_regular_file(path, error)) {
    std::string start(16, '\0');
    std::ifstream(path, std::ios::binary).read(start.data(), 15);
    if (start.front() == '{') {
      PackRows rows = parse_pack(read_text(path), path.string());
      contents.winners = std::move(rows.winners);
      contents.measurements = std::move(rows.measurements);
      return contents;
    }
  }
  const fs::path file = database_at(path);
  try {
    const std::unique_ptr<Database> database = open_other(file);
    if (database == nullptr) return contents;
    const Transaction snapshot(*database, Transaction::Kind::read);
    contents.winners = tables::winners(*database, tables::Winners::that_answer);
    contents.measurements = tables::measurements(*database);
    Query query(*database, "SELECT " WYVERN_ARTIFACT_COLUMNS " FROM artifacts ORDER BY key");
    while (query.step()) contents.artifacts.push_back(tables::read_artifact(query));
  } catch (const DatabaseError& failed) {
    fail_reading(file, failed);
  }
  return contents;
}

}  // namespace wyvern
