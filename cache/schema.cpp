#include "cache/schema.hpp"

#include <wyvern/sha256.hpp>

#include <fmt/format.h>
#include <sqlite3.h>

#include <array>
#include <utility>
#include <vector>

#include "cache/cache.hpp"
#include "cache/rows.hpp"
#include "cache/tables.hpp"

namespace wyvern {
namespace {

// STRICT: SQLite's types bind. `code` stands last so that listing rows never walks its pages.
// NULL in a REAL column is a NaN, which SQLite cannot store.
void to_version_1(Database& database) {
  database.execute(R"sql(
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
  )sql");
}

// The digest covers the row and not the code alone, so that no row is taken for another one. What
// was stored before is taken as it stands; code that did not match its digest still does not.
void to_version_2(Database& database) {
  database.execute("ALTER TABLE artifacts RENAME COLUMN sha256 TO digest");
  std::vector<std::pair<std::int64_t, std::string>> digests;
  Query rows(database,
             "SELECT id, key, template_id, target, config, metadata, digest FROM artifacts");
  while (rows.step()) {
    ArtifactRow row;
    row.key = rows.text(1);
    row.template_id = rows.text(2);
    row.target = rows.text(3);
    row.config = rows.text(4);
    row.metadata = rows.text(5);
    digests.emplace_back(rows.integer(0), artifact_digest(row, rows.text(6)));
  }
  for (const auto& [id, digest] : digests) {
    Query(database, "UPDATE artifacts SET digest = ? WHERE id = ?").bind(digest).bind(id).step();
  }
}

// Measurements are no longer one of a config: those of other extents, hosts and drivers stand
// beside it, known by the digest of all that they say. So do winners; the first of a problem in the
// order of their index answers. `used` has a table of its own, because a row of artifacts is
// written as a whole, with its code. What no look-up needs is JSON and stands last, so that a
// look-up never walks its pages and a new fact needs no new schema. The statements are short
// because all of them must fit into the first page: where sqlite_schema has more, damage to one of
// them costs every table.
void create_tables_of_version_3(Database& database) {
  database.execute(R"sql(
ALTER TABLE measurements RENAME TO measurements_2;
ALTER TABLE winners RENAME TO winners_2;
CREATE TABLE uses (key TEXT PRIMARY KEY, used TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE measurements (
 id INTEGER PRIMARY KEY,
 digest TEXT NOT NULL,
 device TEXT NOT NULL,
 problem TEXT NOT NULL,
 template_id TEXT NOT NULL,
 config TEXT NOT NULL,
 artifact_key TEXT NOT NULL,
 driver TEXT NOT NULL,
 status TEXT NOT NULL,
 detail TEXT NOT NULL,
 median_us REAL,
 error REAL,
 created TEXT NOT NULL,
 samples_us TEXT NOT NULL CHECK (json_valid(samples_us)),
 more TEXT NOT NULL CHECK (json_valid(more)),
 UNIQUE (device, problem, template_id, config, digest)
) STRICT;
CREATE TABLE winners (
 id INTEGER PRIMARY KEY,
 digest TEXT NOT NULL,
 rank REAL NOT NULL,
 device TEXT NOT NULL,
 family TEXT NOT NULL,
 tokens INTEGER NOT NULL,
 sequences INTEGER NOT NULL,
 plan TEXT NOT NULL CHECK (json_valid(plan)),
 median_us REAL,
 default_us REAL,
 ratio REAL,
 floor_us REAL,
 driver TEXT NOT NULL,
 round INTEGER NOT NULL,
 created TEXT NOT NULL,
 more TEXT NOT NULL CHECK (json_valid(more))
) STRICT;
CREATE UNIQUE INDEX winners_by_rank ON winners
 (device, family, tokens, sequences, round DESC, rank, created DESC, digest);
)sql");
}

std::vector<MeasurementRow> measurements_of_version_2(Database& database) {
  std::vector<MeasurementRow> rows;
  Query query(database,
              "SELECT device, problem, template_id, config, artifact_key, driver, status, detail,"
              " samples_us, median_us, error, created FROM measurements_2 ORDER BY id");
  while (query.step()) {
    MeasurementRow row;
    row.device = query.text(0);
    row.problem = query.text(1);
    row.template_id = query.text(2);
    row.config = query.text(3);
    row.artifact_key = query.text(4);
    row.driver = query.text(5);
    row.status = query.text(6);
    row.detail = query.text(7);
    read_samples(query.text(8), row);
    row.median_us = query.real(9);
    row.error = query.real(10);
    row.created = query.text(11);
    rows.push_back(std::move(row));
  }
  return rows;
}

std::vector<WinnerRow> winners_of_version_2(Database& database) {
  std::vector<WinnerRow> rows;
  Query query(database,
              "SELECT device, family, tokens, sequences, plan, median_us, default_us, driver,"
              " created FROM winners_2 ORDER BY id");
  while (query.step()) {
    WinnerRow row;
    row.device = query.text(0);
    row.family = query.text(1);
    row.tokens = query.integer(2);
    row.sequences = query.integer(3);
    row.plan = query.text(4);
    row.median_us = query.real(5);
    row.default_us = query.real(6);
    row.driver = query.text(7);
    row.round = 1;
    row.created = query.text(8);
    rows.push_back(std::move(row));
  }
  return rows;
}

// What the rows did not say stays unknown: their extents were buckets, and their driver CUDA's
// version on a GPU, so that a tuning with a driver that says its own measures anew.
void to_version_3(Database& database) {
  create_tables_of_version_3(database);
  for (const MeasurementRow& row : measurements_of_version_2(database)) tables::add(database, row);
  for (const WinnerRow& row : winners_of_version_2(database)) tables::add(database, row);
  database.execute("DROP TABLE measurements_2; DROP TABLE winners_2");
}

// The step at i leads from version i to version i + 1.
constexpr std::array<void (*)(Database&), kSchemaVersion> kSteps = {to_version_1, to_version_2,
                                                                    to_version_3};

// Settings of the connection; none of them changes the file.
//
// A rollback journal and not a write-ahead log: SQLite 3.7.0 to 3.51.2 can corrupt a WAL database
// under concurrent writers and checkpoints, and a WAL does not work on network file systems, which
// many home directories are. TRUNCATE spares a directory update per commit. synchronous=FULL: with
// NORMAL a loss of power in the middle of a commit can leave a journal whose header is on the disk
// and whose pages are not, and playing it back spoils the file (cache_power_test shows it).
void configure(Database& database) {
  database.execute(
      "PRAGMA synchronous = FULL; PRAGMA temp_store = MEMORY;"
      "PRAGMA cell_size_check = ON");
  if (database.read_only()) return;
  Query mode(database, "PRAGMA journal_mode = TRUNCATE");
  if (!mode.step() || mode.text(0) != "truncate") {
    throw DatabaseError(SQLITE_BUSY, "the rollback journal cannot be chosen now");
  }
}

}  // namespace

std::string artifact_digest(const ArtifactRow& row, std::string_view code_digest) {
  std::string text;
  // With their sizes, so that no byte can pass from one field to the next.
  for (const std::string_view field :
       {std::string_view(row.key), std::string_view(row.template_id), std::string_view(row.target),
        std::string_view(row.config), std::string_view(row.metadata), code_digest}) {
    text += fmt::format("{}:{}\n", field.size(), field);
  }
  return sha256_hex(text);
}

Identity identify(Database& database) {
  const std::int64_t application = database.integer("PRAGMA application_id");
  const std::int64_t version = database.integer("PRAGMA user_version");
  if (application == kApplicationId) {
    if (version > kSchemaVersion) return Identity::newer;
    // A file gets both at once, so one of them is damaged.
    if (version <= 0) throw DatabaseError(SQLITE_CORRUPT, "it has no version");
    // No Wyvern made these. They would run statements of somebody else's with ours, and a view
    // under a table's name is no table.
    if (database.integer("SELECT count(*) FROM sqlite_schema"
                         " WHERE type IN ('view', 'trigger')") != 0)
      return Identity::foreign;
    if (version == kSchemaVersion) return Identity::current;
    return Identity::older;
  }
  // Of a damaged file this throws: what was cut off may have said that it is ours.
  const bool has_tables = database.integer("SELECT count(*) FROM sqlite_schema") != 0;
  return application == 0 && version == 0 && !has_tables ? Identity::empty : Identity::foreign;
}

Identity migrate(Database& database, std::int64_t version) {
  Transaction transaction(database);
  const Identity identity = identify(database);
  if (identity == Identity::empty || identity == Identity::older) {
    for (std::int64_t at = database.integer("PRAGMA user_version"); at < version; ++at) {
      kSteps[static_cast<std::size_t>(at)](database);
    }
    database.execute(
        fmt::format("PRAGMA application_id = {}; PRAGMA user_version = {}", kApplicationId, version)
            .c_str());
  }
  const Identity now = identify(database);
  transaction.commit();
  return now;
}

bool has_current_tables(Database& database) {
  const auto text_of = [](Database& of) {
    std::string text;
    Query query(of,
                "SELECT type || ' ' || name || ' ' || tbl_name || coalesce(sql, '')"
                " FROM sqlite_schema ORDER BY name");
    while (query.step()) text += query.text(0) + '\n';
    return text;
  };
  Database expected("expected", Database::Mode::memory);
  migrate(expected);
  return text_of(database) == text_of(expected);
}

void require_ours(Identity identity, const std::filesystem::path& file) {
  if (identity == Identity::newer) {
    throw ForeignDatabase(
        fmt::format("the cache {} was written by a newer Wyvern, so it is left alone and nothing "
                    "is cached: update this Wyvern or set WYVERN_CACHE_DIR to another directory",
                    file.string()));
  }
  if (identity == Identity::foreign) {
    throw ForeignDatabase(
        fmt::format("{} is another program's database, so it is left alone and nothing is cached: "
                    "move it away or set WYVERN_CACHE_DIR to another directory",
                    file.string()));
  }
}

std::unique_ptr<Database> open_wyvern(const std::filesystem::path& file, Database::Mode mode,
                                      std::chrono::milliseconds patience) {
  auto database = std::make_unique<Database>(file, mode);
  database->set_patience(patience);
  Transaction look(*database, Transaction::Kind::read);
  const Identity identity = identify(*database);
  look.commit();
  require_ours(identity, file);
  configure(*database);
  if (identity != Identity::current) require_ours(migrate(*database), file);
  return database;
}

}  // namespace wyvern
