#include "cache/schema.hpp"

#include <wyvern/sha256.hpp>

#include <fmt/format.h>
#include <sqlite3.h>

#include "cache/cache.hpp"

namespace wyvern {
namespace {

// STRICT: SQLite's types bind. NULL in a REAL column is a NaN, which SQLite cannot store. Code, and
// the JSON of values that no look-up needs, are the last columns: a look-up and a list never read
// their pages, and a new value needs no new schema. An artifact's digest covers its whole row, so
// that no row can be mistaken for another one; `uses` is a table of its own, because a row of
// artifacts is written as a whole, with its code. A config has several measurements, of other
// extents, hosts and drivers, each identified by the digest of its content. So do winners; the
// first of a problem in the order of their index answers. The statements are short because all of
// them must fit into the first page: where sqlite_schema has more, damage to one of them costs
// every table.
constexpr const char* kTables = R"sql(
CREATE TABLE artifacts (
      id          INTEGER PRIMARY KEY,
      key         TEXT NOT NULL UNIQUE,
      template_id TEXT NOT NULL,
      target      TEXT NOT NULL,
      config      TEXT NOT NULL,
      metadata    TEXT NOT NULL CHECK (json_valid(metadata)),
      compile_ms  REAL,
      created     TEXT NOT NULL,
      digest      TEXT NOT NULL,
      code        BLOB NOT NULL
    ) STRICT;
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
)sql";

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
  // Throws for a damaged file: the part that was cut off may have said that it is ours.
  const bool has_tables = database.integer("SELECT count(*) FROM sqlite_schema") != 0;
  return application == 0 && version == 0 && !has_tables ? Identity::empty : Identity::foreign;
}

Identity make_tables(Database& database) {
  Transaction transaction(database);
  if (identify(database) == Identity::empty) {
    database.execute(kTables);
    database.execute(fmt::format("PRAGMA application_id = {}; PRAGMA user_version = {}",
                                 kApplicationId, kSchemaVersion)
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
  make_tables(expected);
  return text_of(database) == text_of(expected);
}

void require_ours(Identity identity, const std::filesystem::path& file) {
  if (identity == Identity::newer) {
    throw ForeignDatabase(
        fmt::format("the cache {} was written by a newer Wyvern, so it is left alone and nothing "
                    "is cached: update this Wyvern or set WYVERN_CACHE_DIR to another directory",
                    file.string()));
  }
  if (identity == Identity::older) {
    throw ForeignDatabase(
        fmt::format("the cache {} was written by a Wyvern from before the first release, so it is "
                    "left alone and nothing is cached: move it away or set WYVERN_CACHE_DIR to "
                    "another directory",
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
  if (identity != Identity::current) require_ours(make_tables(*database), file);
  return database;
}

}  // namespace wyvern
