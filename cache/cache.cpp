#include "cache/cache.hpp"

#include <wyvern/sha256.hpp>

#include <algorithm>
#include <cstdlib>
#include <system_error>
#include <utility>

#include "cache/access.hpp"
#include "cache/connection.hpp"
#include "cache/rows.hpp"
#include "cache/schema.hpp"
#include "cache/tables.hpp"

namespace wyvern {
namespace {

using Access = Connection::Access;

// %f: seconds with milliseconds, so that "newest first" is not a tie.
#define WYVERN_NOW "strftime('%Y-%m-%dT%H:%M:%fZ', 'now')"

// REPLACE deletes the old row first. An update in place would write into the old row's pages and
// keep the links between them, which may be damaged.
constexpr const char* kStoreArtifact =
    "REPLACE INTO artifacts"
    " (key, template_id, target, config, metadata, compile_ms, digest, code, created)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, " WYVERN_NOW ")";
constexpr const char* kFindArtifact =
    "SELECT " WYVERN_ARTIFACT_COLUMNS
    ", digest,"
    " (SELECT used FROM uses WHERE uses.key = artifacts.key), code FROM artifacts WHERE key = ?";
constexpr const char* kStoreUse =
    "INSERT INTO uses (key, used) VALUES (?, ?)"
    " ON CONFLICT (key) DO UPDATE SET used = max(used, excluded.used)";
constexpr const char* kListArtifacts =
    "SELECT " WYVERN_ARTIFACT_COLUMNS " FROM artifacts ORDER BY created DESC, id DESC";

/// All rows of a query.
template <class Row>
std::vector<Row> read_all(Query& query, Row (*read)(const Query&)) {
  std::vector<Row> rows;
  while (query.step()) rows.push_back(read(query));
  return rows;
}

/// The row with a time in it.
template <class Row>
Row dated(Row row) {
  if (row.created.empty()) row.created = timestamp();
  return row;
}

}  // namespace

Cache::Impl::~Impl() {
  if (uses.empty()) return;
  connection.attempt([this](Database& database) {
    for (const auto& [key, used] : uses) Query(database, kStoreUse).bind(key).bind(used).step();
  });
}

void Cache::Impl::note_use(const std::string& key, std::string_view last) {
  constexpr std::size_t kDay = 10;  // "2026-11-22"
  std::string now = timestamp();
  if (last.substr(0, kDay) < std::string_view(now).substr(0, kDay)) uses[key] = std::move(now);
}

bool CacheAccess::run(Cache& cache, Connection::Access access, const Connection::Work& work) {
  return cache.impl_->connection.run(access, work);
}

bool CacheAccess::read(const Cache& cache, const Connection::Work& work) {
  return cache.impl_->connection.run(Access::read, work);
}

std::filesystem::path Cache::default_directory() {
  const auto variable = [](const char* name) -> std::filesystem::path {
    // Ignores another user's environment where this program has more rights than its caller.
    const char* value = ::secure_getenv(name);
    return value != nullptr ? value : "";
  };
  if (auto path = variable("WYVERN_CACHE_DIR"); !path.empty()) return path;
  // A relative path there is invalid by the XDG specification and has to be ignored.
  if (auto path = variable("XDG_CACHE_HOME"); path.is_absolute()) return path / "wyvern";
  if (auto path = variable("HOME"); !path.empty()) return path / ".cache" / "wyvern";
  return {};
}

Cache::Cache(const std::filesystem::path& directory) : impl_(std::make_unique<Impl>(directory)) {}
Cache::~Cache() = default;

std::uint64_t Cache::changes() noexcept { return Connection::changes(); }
void Cache::note_change() noexcept { Connection::note_change(); }

std::filesystem::path Cache::file() const { return impl_->connection.file(); }
std::string Cache::status() const { return impl_->connection.status(); }

void Cache::on_degraded(std::function<void(const std::string&)> report) {
  impl_->connection.on_degraded(std::move(report));
}

std::optional<ArtifactRow> Cache::find_artifact(std::string_view key) const {
  std::optional<ArtifactRow> found;
  std::string digest;
  impl_->connection.run(Access::read, [&](Database& database) {
    found.reset();
    Query query(database, kFindArtifact);
    if (!query.bind(key).step()) return;
    found = tables::read_artifact(query);
    digest = query.text(7);
    impl_->note_use(found->key, std::max(query.text(8), found->created));
    found->code = query.blob(9);
  });
  // SQLite may take the key from the index that led to the row, which may be another key's. The
  // digest covers the row alone, so the key is compared with the requested one too.
  if (found && (found->key != key || artifact_digest(*found, sha256_hex(found->code)) != digest))
    found.reset();
  return found;
}

bool Cache::store_artifact(const ArtifactRow& row) {
  const std::string digest = artifact_digest(row, sha256_hex(row.code));
  return impl_->connection.run(Access::write, [&](Database& database) {
    Query(database, kStoreArtifact)
        .bind(row.key)
        .bind(row.template_id)
        .bind(row.target)
        .bind(row.config)
        .bind(row.metadata)
        .bind(row.compile_ms)
        .bind(digest)
        .bind_blob(row.code)
        .step();
  });
}

std::optional<MeasurementRow> Cache::find_measurement(std::string_view device,
                                                      std::string_view problem,
                                                      std::string_view template_id,
                                                      std::string_view config) const {
  std::vector<MeasurementRow> rows;
  impl_->connection.run(Access::read, [&](Database& database) {
    rows = tables::measurements_of(database, device, problem, template_id, config, 1);
  });
  if (rows.empty()) return {};
  return std::move(rows.front());
}

std::vector<MeasurementRow> Cache::find_measurements(std::string_view device,
                                                     std::string_view problem,
                                                     std::string_view template_id,
                                                     std::string_view config) const {
  std::vector<MeasurementRow> rows;
  impl_->connection.run(Access::read, [&](Database& database) {
    rows = tables::measurements_of(database, device, problem, template_id, config, -1);
  });
  return rows;
}

bool Cache::store_measurement(const MeasurementRow& row) {
  const MeasurementRow whole = dated(row);
  return impl_->connection.run(Access::write,
                               [&](Database& database) { tables::add(database, whole); });
}

std::vector<MeasurementRow> Cache::measurements(std::string_view device,
                                                std::string_view problem) const {
  std::vector<MeasurementRow> rows;
  impl_->connection.run(Access::read, [&](Database& database) {
    rows = tables::measurements_of(database, device, problem);
  });
  return rows;
}

std::optional<WinnerRow> Cache::find_winner(std::string_view device, std::string_view family,
                                            std::int64_t tokens, std::int64_t sequences) const {
  std::vector<WinnerRow> rows;
  impl_->connection.run(Access::read, [&](Database& database) {
    rows = tables::winners_of(database, device, family, tokens, sequences, 1);
  });
  if (rows.empty()) return {};
  return std::move(rows.front());
}

std::vector<WinnerRow> Cache::find_winners(std::string_view device, std::string_view family,
                                           std::int64_t tokens, std::int64_t sequences) const {
  std::vector<WinnerRow> rows;
  impl_->connection.run(Access::read, [&](Database& database) {
    rows = tables::winners_of(database, device, family, tokens, sequences, -1);
  });
  return rows;
}

std::vector<WinnerRow> Cache::winners_of(std::string_view family_prefix) const {
  std::vector<WinnerRow> rows;
  impl_->connection.run(Access::read, [&](Database& database) {
    rows = tables::winners_of(database, family_prefix);
  });
  return rows;
}

bool Cache::store_winner(const WinnerRow& row) {
  const WinnerRow whole = dated(row);
  return impl_->connection.run(Access::write,
                               [&](Database& database) { tables::crown(database, whole); });
}

std::vector<ArtifactRow> Cache::list_artifacts() const {
  std::vector<ArtifactRow> rows;
  impl_->connection.run(Access::read, [&](Database& database) {
    Query query(database, kListArtifacts);
    rows = read_all(query, tables::read_artifact);
  });
  return rows;
}

std::vector<MeasurementRow> Cache::list_measurements() const {
  std::vector<MeasurementRow> rows;
  impl_->connection.run(Access::read,
                        [&](Database& database) { rows = tables::measurements(database); });
  return rows;
}

std::vector<WinnerRow> Cache::list_winners() const {
  std::vector<WinnerRow> rows;
  impl_->connection.run(Access::read, [&](Database& database) {
    rows = tables::winners(database, tables::Winners::that_answer);
  });
  return rows;
}

CacheStats Cache::stats() const {
  CacheStats stats;
  impl_->connection.run(Access::read, [&](Database& database) {
    const Transaction snapshot(database, Transaction::Kind::read);
    CacheStats counted;
    counted.artifacts = database.integer("SELECT count(*) FROM artifacts");
    counted.measurements = database.integer("SELECT count(*) FROM measurements");
    counted.winners = tables::problems_won(database);
    counted.code_bytes = database.integer("SELECT sum(length(code)) FROM artifacts");
    std::error_code error;
    const std::uintmax_t bytes = std::filesystem::file_size(file(), error);
    counted.file_bytes = error ? 0 : static_cast<std::int64_t>(bytes);
    stats = counted;
  });
  return stats;
}

bool Cache::clear() {
  return impl_->connection.run(Access::shrink, [](Database& database) {
    database.execute(
        "DELETE FROM artifacts; DELETE FROM measurements; DELETE FROM winners; DELETE FROM uses");
  });
}

}  // namespace wyvern
