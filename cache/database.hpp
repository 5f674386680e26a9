// A thin RAII layer over SQLite's C interface: connection, statement, transaction.
//
// Not thread-safe: one user at a time. Every call that SQLite fails throws DatabaseError, which
// never leaves this room.
#pragma once

#include <wyvern/error.hpp>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

struct sqlite3;
struct sqlite3_stmt;

namespace wyvern {

/// SQLite refused; `code` is its extended result code.
class DatabaseError : public Error {
 public:
  DatabaseError(int code, const std::string& message)
      : Error(ErrorKind::kIo, message), code_(code) {}
  int code() const noexcept { return code_; }
  /// The result code's class: SQLITE_BUSY, SQLITE_CORRUPT, ...
  int primary() const noexcept { return code_ & 0xff; }
  /// Whether it says that the file's content is not as SQLite or this program wrote it.
  bool is_damage() const noexcept { return is_damage(code_); }
  static bool is_damage(int code) noexcept;

 private:
  int code_;
};

/// Thrown when the file is healthy SQLite that this program must leave alone.
class ForeignDatabase : public Error {
 public:
  explicit ForeignDatabase(const std::string& message) : Error(ErrorKind::kIo, message) {}
};

class Database {
 public:
  static constexpr int kLongestWait = 12;
  enum class Mode {
    create,
    read_write,
    read_only,
    memory  ///< of no file; `file` is its name only
  };

  /// Opens `file`, which is created for its owner alone; touches no content until the first
  /// statement.
  Database(const std::filesystem::path& file, Mode mode);
  ~Database();
  Database(const Database&) = delete;
  Database& operator=(const Database&) = delete;

  sqlite3* handle() const noexcept { return handle_; }
  /// True also when read and write were asked for and the file's mode allows reading only.
  bool read_only() const noexcept;

  /// How long a call waits for a lock before it fails with SQLITE_BUSY, counted from the last write
  /// to the file by any process: with many writers on a slow disk waiting helps, with a lock whose
  /// holder does not write it does not. At most kLongestWait times as long in all.
  void set_patience(std::chrono::milliseconds patience) noexcept { patience_ = patience; }

  /// Runs statements that return nothing of interest.
  void execute(const char* sql);
  /// The first column of the first row, as an integer; 0 without a row.
  std::int64_t integer(const char* sql);
  /// Rows that the last statement inserted, changed or deleted.
  std::int64_t changes() const noexcept;

  /// The statement of `sql`, prepared once per connection. `sql` must be a literal: its address is
  /// the key.
  sqlite3_stmt* prepared(const char* sql);

 private:
  struct Finalize {
    void operator()(sqlite3_stmt* statement) const noexcept;
  };
  static int wait(void* self, int tries) noexcept;
  bool worth_waiting(int tries);

  const std::filesystem::path file_;
  sqlite3* handle_ = nullptr;
  std::chrono::milliseconds patience_;
  std::chrono::steady_clock::time_point give_up_;  ///< unless the file is written before
  std::chrono::steady_clock::time_point give_up_all_;
  std::filesystem::file_time_type written_;  ///< when give_up_ was set
  std::vector<std::pair<const char*, std::unique_ptr<sqlite3_stmt, Finalize>>> statements_;
};

/// One execution of a prepared statement: bind in order, step, read columns from 0. Ends (and lets
/// go of its read lock) with its scope. Bound texts must outlive it; read texts live until step().
class Query {
 public:
  Query(Database& database, const char* literal_sql);
  ~Query();
  Query(const Query&) = delete;
  Query& operator=(const Query&) = delete;

  Query& bind(std::string_view text);
  Query& bind(std::int64_t value);
  Query& bind(double value);  ///< NaN is stored as NULL
  Query& bind_blob(std::string_view bytes);

  /// True on a row, false at the end.
  bool step();

  std::string text(int column) const;
  std::string blob(int column) const { return text(column); }
  std::int64_t integer(int column) const;
  double real(int column) const;  ///< NULL reads as NaN

 private:
  void check(int code) const;

  Database& database_;
  sqlite3_stmt* statement_;
  int bound_ = 0;
};

/// A transaction that will write begins IMMEDIATE, so that it waits for its turn at the start: one
/// that reads first and then upgrades is refused at once with SQLITE_BUSY. Rolls back unless
/// committed.
class Transaction {
 public:
  enum class Kind { read, write };
  explicit Transaction(Database& database, Kind kind = Kind::write);
  ~Transaction();
  Transaction(const Transaction&) = delete;
  Transaction& operator=(const Transaction&) = delete;
  void commit();

 private:
  Database& database_;
};

/// While it lives, the rollback journal is in memory instead of on the disk.
class JournalInMemory {
 public:
  explicit JournalInMemory(Database& database);
  ~JournalInMemory();
  JournalInMemory(const JournalInMemory&) = delete;
  JournalInMemory& operator=(const JournalInMemory&) = delete;

 private:
  Database& database_;
};

}  // namespace wyvern
