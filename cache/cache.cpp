#include "cache/cache.hpp"

#include <wyvern/sha256.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <system_error>
#include <utility>

#include "cache/connection.hpp"
#include "cache/schema.hpp"

namespace wyvern {
namespace {

using Access = Connection::Access;

// %f: seconds with milliseconds, so that "newest first" is not a tie.
#define WYVERN_NOW "strftime('%Y-%m-%dT%H:%M:%fZ', 'now')"

// REPLACE deletes the old row first. An update in place would write into the old row's pages and
// keep the links between them, which may be what is damaged.
constexpr const char* kStoreArtifact =
    "REPLACE INTO artifacts"
    " (key, template_id, target, config, metadata, compile_ms, digest, code, created)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, " WYVERN_NOW ")";
constexpr const char* kFindArtifact =
    "SELECT key, template_id, target, config, metadata, compile_ms, created, digest, code"
    " FROM artifacts WHERE key = ?";
constexpr const char* kListArtifacts =
    "SELECT key, template_id, target, config, metadata, compile_ms, created"
    " FROM artifacts ORDER BY created DESC, id DESC";

#define WYVERN_MEASUREMENT                                                          \
  "SELECT id, device, problem, template_id, config, artifact_key, driver, status, " \
  "detail, samples_us, median_us, error, created FROM measurements "
constexpr const char* kStoreMeasurement =
    "INSERT INTO measurements (device, problem, template_id, config, artifact_key, driver, status,"
    " detail, samples_us, median_us, error, created)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, " WYVERN_NOW
    ")"
    " ON CONFLICT (device, problem, template_id, config) DO UPDATE SET"
    " artifact_key = excluded.artifact_key, driver = excluded.driver, status = excluded.status,"
    " detail = excluded.detail, samples_us = excluded.samples_us, median_us = excluded.median_us,"
    " error = excluded.error, created = excluded.created";
constexpr const char* kFindMeasurement =
    WYVERN_MEASUREMENT "WHERE device = ? AND problem = ? AND template_id = ? AND config = ?";
constexpr const char* kMeasurementsOf =
    WYVERN_MEASUREMENT "WHERE device = ? AND problem = ? ORDER BY template_id, config";
constexpr const char* kListMeasurements = WYVERN_MEASUREMENT "ORDER BY created DESC, id DESC";

#define WYVERN_WINNER                                                                   \
  "SELECT id, device, family, tokens, sequences, plan, median_us, default_us, driver, " \
  "created FROM winners "
constexpr const char* kStoreWinner =
    "INSERT INTO winners"
    " (device, family, tokens, sequences, plan, median_us, default_us, driver, created)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, " WYVERN_NOW
    ")"
    " ON CONFLICT (device, family, tokens, sequences) DO UPDATE SET plan = excluded.plan,"
    " median_us = excluded.median_us, default_us = excluded.default_us, driver = excluded.driver,"
    " created = excluded.created";
constexpr const char* kFindWinner =
    WYVERN_WINNER "WHERE device = ? AND family = ? AND tokens = ? AND sequences = ?";
constexpr const char* kWinnerById = WYVERN_WINNER "WHERE id = ?";
constexpr const char* kListWinners = WYVERN_WINNER "ORDER BY created DESC, id DESC";
// Answered from the unique index alone, in the order in which ties are broken.
constexpr const char* kBucketsOf =
    "SELECT id, tokens, sequences FROM winners WHERE device = ? AND family = ?"
    " ORDER BY tokens, sequences";

ArtifactRow read_artifact(const Query& query) {
  ArtifactRow row;
  row.key = query.text(0);
  row.template_id = query.text(1);
  row.target = query.text(2);
  row.config = query.text(3);
  row.metadata = query.text(4);
  row.compile_ms = query.real(5);
  row.created = query.text(6);
  return row;
}

// JSON has no NaN and no infinity; nlohmann writes both as null, read back as NaN.
std::vector<double> parse_samples(const std::string& text) {
  std::vector<double> samples;
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_array()) return samples;
  samples.reserve(json.size());
  for (const nlohmann::json& value : json) {
    samples.push_back(value.is_number() ? value.get<double>()
                                        : std::numeric_limits<double>::quiet_NaN());
  }
  return samples;
}

MeasurementRow read_measurement(const Query& query) {
  MeasurementRow row;
  row.id = query.integer(0);
  row.device = query.text(1);
  row.problem = query.text(2);
  row.template_id = query.text(3);
  row.config = query.text(4);
  row.artifact_key = query.text(5);
  row.driver = query.text(6);
  row.status = query.text(7);
  row.detail = query.text(8);
  row.samples_us = parse_samples(query.text(9));
  row.median_us = query.real(10);
  row.error = query.real(11);
  row.created = query.text(12);
  return row;
}

WinnerRow read_winner(const Query& query) {
  WinnerRow row;
  row.id = query.integer(0);
  row.device = query.text(1);
  row.family = query.text(2);
  row.tokens = query.integer(3);
  row.sequences = query.integer(4);
  row.plan = query.text(5);
  row.median_us = query.real(6);
  row.default_us = query.real(7);
  row.driver = query.text(8);
  row.created = query.text(9);
  return row;
}

/// All rows of a query.
template <class Row>
std::vector<Row> read_all(Query& query, Row (*read)(const Query&)) {
  std::vector<Row> rows;
  while (query.step()) rows.push_back(read(query));
  return rows;
}

double bucket_distance(std::int64_t a, std::int64_t b) {
  const auto log = [](std::int64_t n) {
    return std::log2(static_cast<double>(std::max<std::int64_t>(n, 1)));
  };
  return std::abs(log(a) - log(b));
}

/// The id of the nearest winner, or 0. Distances within rounding of each other are ties.
std::int64_t nearest_id(Query& buckets, std::int64_t tokens, std::int64_t sequences) {
  std::int64_t best = 0;
  double least = std::numeric_limits<double>::infinity();
  while (buckets.step()) {
    const double distance = bucket_distance(buckets.integer(1), tokens) +
                            bucket_distance(buckets.integer(2), sequences);
    if (distance < least - 1e-9) {
      least = distance;
      best = buckets.integer(0);
    }
  }
  return best;
}

}  // namespace

class Cache::Impl {
 public:
  explicit Impl(const std::filesystem::path& directory) : connection(directory) {}
  Connection connection;
};

std::filesystem::path Cache::default_directory() {
  const auto variable = [](const char* name) -> std::filesystem::path {
    // Not what another user's environment says, where this program has more rights than its caller.
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
    found = read_artifact(query);
    digest = query.text(7);
    found->code = query.blob(8);
  });
  // SQLite may take the key from the index that led to the row, which may be another key's. The
  // digest is of the row alone, so it is compared for the key that was asked for.
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
  std::optional<MeasurementRow> found;
  impl_->connection.run(Access::read, [&](Database& database) {
    found.reset();
    Query query(database, kFindMeasurement);
    if (query.bind(device).bind(problem).bind(template_id).bind(config).step()) {
      found = read_measurement(query);
    }
  });
  return found;
}

bool Cache::store_measurement(const MeasurementRow& row) {
  const std::string samples = nlohmann::json(row.samples_us).dump();
  return impl_->connection.run(Access::write, [&](Database& database) {
    Query(database, kStoreMeasurement)
        .bind(row.device)
        .bind(row.problem)
        .bind(row.template_id)
        .bind(row.config)
        .bind(row.artifact_key)
        .bind(row.driver)
        .bind(row.status)
        .bind(row.detail)
        .bind(samples)
        .bind(row.median_us)
        .bind(row.error)
        .step();
  });
}

std::vector<MeasurementRow> Cache::measurements(std::string_view device,
                                                std::string_view problem) const {
  std::vector<MeasurementRow> rows;
  impl_->connection.run(Access::read, [&](Database& database) {
    Query query(database, kMeasurementsOf);
    query.bind(device).bind(problem);
    rows = read_all(query, read_measurement);
  });
  return rows;
}

std::optional<WinnerRow> Cache::find_winner(std::string_view device, std::string_view family,
                                            std::int64_t tokens, std::int64_t sequences) const {
  std::optional<WinnerRow> found;
  impl_->connection.run(Access::read, [&](Database& database) {
    found.reset();
    Query query(database, kFindWinner);
    if (query.bind(device).bind(family).bind(tokens).bind(sequences).step()) {
      found = read_winner(query);
    }
  });
  return found;
}

std::optional<WinnerRow> Cache::nearest_winner(std::string_view device, std::string_view family,
                                               std::int64_t tokens, std::int64_t sequences) const {
  std::optional<WinnerRow> found;
  impl_->connection.run(Access::read, [&](Database& database) {
    found.reset();
    Transaction snapshot(database, Transaction::Kind::read);
    Query buckets(database, kBucketsOf);
    const std::int64_t id = nearest_id(buckets.bind(device).bind(family), tokens, sequences);
    Query query(database, kWinnerById);
    if (query.bind(id).step()) found = read_winner(query);
  });
  return found;
}

bool Cache::store_winner(const WinnerRow& row) {
  return impl_->connection.run(Access::write, [&](Database& database) {
    Query(database, kStoreWinner)
        .bind(row.device)
        .bind(row.family)
        .bind(row.tokens)
        .bind(row.sequences)
        .bind(row.plan)
        .bind(row.median_us)
        .bind(row.default_us)
        .bind(row.driver)
        .step();
  });
}

std::vector<ArtifactRow> Cache::list_artifacts() const {
  std::vector<ArtifactRow> rows;
  impl_->connection.run(Access::read, [&](Database& database) {
    Query query(database, kListArtifacts);
    rows = read_all(query, read_artifact);
  });
  return rows;
}

std::vector<MeasurementRow> Cache::list_measurements() const {
  std::vector<MeasurementRow> rows;
  impl_->connection.run(Access::read, [&](Database& database) {
    Query query(database, kListMeasurements);
    rows = read_all(query, read_measurement);
  });
  return rows;
}

std::vector<WinnerRow> Cache::list_winners() const {
  std::vector<WinnerRow> rows;
  impl_->connection.run(Access::read, [&](Database& database) {
    Query query(database, kListWinners);
    rows = read_all(query, read_winner);
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
    counted.winners = database.integer("SELECT count(*) FROM winners");
    counted.code_bytes = database.integer("SELECT sum(length(code)) FROM artifacts");
    std::error_code error;
    const std::uintmax_t bytes = std::filesystem::file_size(file(), error);
    counted.file_bytes = error ? 0 : static_cast<std::int64_t>(bytes);
    stats = counted;
  });
  return stats;
}

bool Cache::clear() {
  const bool deleted = impl_->connection.run(Access::write, [](Database& database) {
    database.execute("DELETE FROM artifacts; DELETE FROM measurements; DELETE FROM winners");
  });
  return deleted && impl_->connection.run(Access::alone,
                                          [](Database& database) { database.execute("VACUUM"); });
}

}  // namespace wyvern
