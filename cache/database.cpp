#include "cache/database.hpp"

#include <fmt/format.h>
#include <sqlite3.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <system_error>
#include <thread>

#include <sys/stat.h>

namespace wyvern {
namespace {

constexpr std::chrono::milliseconds kPatience{5000};

/// errno of the last failed call; SQLite keeps it for the file, and not on every path for the
/// handle.
int system_error(sqlite3* handle) {
  int of_file = 0;
  sqlite3_file_control(handle, "main", SQLITE_FCNTL_LAST_ERRNO, &of_file);
  return of_file != 0 ? of_file : sqlite3_system_errno(handle);
}

[[noreturn]] void fail(sqlite3* handle, int code) {
  std::string message = handle != nullptr ? sqlite3_errmsg(handle) : sqlite3_errstr(code);
  const int primary = code & 0xff;
  if (handle != nullptr && (primary == SQLITE_IOERR || primary == SQLITE_CANTOPEN)) {
    const int error = primary == SQLITE_IOERR ? system_error(handle) : sqlite3_system_errno(handle);
    message += fmt::format(" ({})", std::strerror(error));
    // A disk that is full, a quota and a limit of file sizes are one thing to the user.
    const bool no_room = error == ENOSPC || error == EDQUOT || error == EFBIG;
    if (code == SQLITE_IOERR_WRITE && no_room) code = SQLITE_FULL;
  }
  throw DatabaseError(code, message);
}

int open_flags(Database::Mode mode) {
  // Every connection has one user at a time, so SQLite's own mutexes would only cost time.
  const int common = SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_EXRESCODE | SQLITE_OPEN_PRIVATECACHE;
  switch (mode) {
    case Database::Mode::create: return common | SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE;
    case Database::Mode::read_write: return common | SQLITE_OPEN_READWRITE;
    case Database::Mode::read_only: return common | SQLITE_OPEN_READONLY;
    case Database::Mode::memory:
      return common | SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_MEMORY;
  }
  return common;
}

}  // namespace

// This room's SQL is right for its own tables, so where SQLite finds an error in it (a table or a
// column is missing) or does not know the format of the schema, the schema is damaged.
bool DatabaseError::is_damage(int code) noexcept {
  const int primary = code & 0xff;
  return primary == SQLITE_CORRUPT || primary == SQLITE_NOTADB || primary == SQLITE_ERROR;
}

Database::Database(const std::filesystem::path& file, Mode mode)
    : file_(file), patience_(kPatience) {
  // SQLite would let others read the file. It is not opened here: closing a second descriptor of a
  // database drops the locks of the first. Where this fails SQLite reports the error.
  if (mode == Mode::create) ::mknod(file.c_str(), S_IFREG | S_IRUSR | S_IWUSR, 0);
  if (const int code = sqlite3_open_v2(file.c_str(), &handle_, open_flags(mode), nullptr);
      code != SQLITE_OK) {
    const std::unique_ptr<sqlite3, decltype(&sqlite3_close)> owner(handle_, sqlite3_close);
    fail(handle_, code);
  }
  sqlite3_busy_handler(handle_, &Database::wait, this);
}

Database::~Database() {
  statements_.clear();
  sqlite3_close(handle_);
}

void Database::Finalize::operator()(sqlite3_stmt* statement) const noexcept {
  sqlite3_finalize(statement);
}

bool Database::read_only() const noexcept { return sqlite3_db_readonly(handle_, "main") == 1; }

bool Database::worth_waiting(int tries) {
  const auto now = std::chrono::steady_clock::now();
  std::error_code ignored;
  if (tries == 0) {
    give_up_ = now + patience_;
    give_up_all_ = now + kLongestWait * patience_;
    written_ = std::filesystem::last_write_time(file_, ignored);
  }
  if (now < give_up_) return true;
  const auto written = std::filesystem::last_write_time(file_, ignored);
  if (written == written_ || now >= give_up_all_) return false;
  written_ = written;
  give_up_ = now + patience_;
  return true;
}

// SQLite's own busy timeout soon sleeps 100 ms between tries, and a process that polls so rarely
// starves among others that write without pause. Short random sleeps share the lock fairly.
int Database::wait(void* self, int tries) noexcept {
  if (!static_cast<Database*>(self)->worth_waiting(tries)) return 0;
  thread_local std::minstd_rand random{static_cast<std::minstd_rand::result_type>(
      std::chrono::steady_clock::now().time_since_epoch().count() ^
      std::hash<std::thread::id>{}(std::this_thread::get_id()))};
  const int ceiling_us = std::min(100 << std::min(tries, 5), 2000);
  std::this_thread::sleep_for(std::chrono::microseconds(
      std::uniform_int_distribution<int>(ceiling_us / 4, ceiling_us)(random)));
  return 1;
}

void Database::execute(const char* sql) {
  if (const int code = sqlite3_exec(handle_, sql, nullptr, nullptr, nullptr); code != SQLITE_OK) {
    fail(handle_, code);
  }
}

std::int64_t Database::integer(const char* sql) {
  Query query(*this, sql);
  return query.step() ? query.integer(0) : 0;
}

std::int64_t Database::changes() const noexcept { return sqlite3_changes64(handle_); }

sqlite3_stmt* Database::prepared(const char* sql) {
  for (const auto& [text, statement] : statements_) {
    if (text == sql) return statement.get();
  }
  sqlite3_stmt* statement = nullptr;
  if (const int code =
          sqlite3_prepare_v3(handle_, sql, -1, SQLITE_PREPARE_PERSISTENT, &statement, nullptr);
      code != SQLITE_OK) {
    fail(handle_, code);
  }
  statements_.emplace_back(sql, statement);
  return statement;
}

Query::Query(Database& database, const char* literal_sql)
    : database_(database), statement_(database.prepared(literal_sql)) {}

Query::~Query() {
  sqlite3_reset(statement_);
  sqlite3_clear_bindings(statement_);
}

void Query::check(int code) const {
  if (code != SQLITE_OK) fail(database_.handle(), code);
}

Query& Query::bind(std::string_view text) {
  // A null pointer would bind NULL; an empty view may hold one.
  const char* data = text.empty() ? "" : text.data();
  check(sqlite3_bind_text64(statement_, ++bound_, data, text.size(), SQLITE_STATIC, SQLITE_UTF8));
  return *this;
}

Query& Query::bind(std::int64_t value) {
  check(sqlite3_bind_int64(statement_, ++bound_, value));
  return *this;
}

Query& Query::bind(double value) {
  check(sqlite3_bind_double(statement_, ++bound_, value));
  return *this;
}

Query& Query::bind_blob(std::string_view bytes) {
  const char* data = bytes.empty() ? "" : bytes.data();
  check(sqlite3_bind_blob64(statement_, ++bound_, data, bytes.size(), SQLITE_STATIC));
  return *this;
}

bool Query::step() {
  const int code = sqlite3_step(statement_);
  if (code == SQLITE_ROW) return true;
  if (code == SQLITE_DONE) return false;
  fail(database_.handle(), code);
}

std::string Query::text(int column) const {
  const void* data = sqlite3_column_blob(statement_, column);
  const int size = sqlite3_column_bytes(statement_, column);
  return size > 0 ? std::string(static_cast<const char*>(data), static_cast<std::size_t>(size))
                  : std::string();
}

std::int64_t Query::integer(int column) const { return sqlite3_column_int64(statement_, column); }

double Query::real(int column) const {
  return sqlite3_column_type(statement_, column) == SQLITE_NULL
             ? std::numeric_limits<double>::quiet_NaN()
             : sqlite3_column_double(statement_, column);
}

Transaction::Transaction(Database& database, Kind kind) : database_(database) {
  Query(database_, kind == Kind::write ? "BEGIN IMMEDIATE" : "BEGIN").step();
}

Transaction::~Transaction() {
  // SQLite has already rolled back by itself after some errors (disk full, I/O).
  if (sqlite3_get_autocommit(database_.handle()) == 0) {
    sqlite3_exec(database_.handle(), "ROLLBACK", nullptr, nullptr, nullptr);
  }
}

void Transaction::commit() { Query(database_, "COMMIT").step(); }

JournalInMemory::JournalInMemory(Database& database) : database_(database) {
  database_.execute("PRAGMA journal_mode = MEMORY");
}

JournalInMemory::~JournalInMemory() {
  sqlite3_exec(database_.handle(), "PRAGMA journal_mode = TRUNCATE", nullptr, nullptr, nullptr);
}

}  // namespace wyvern
