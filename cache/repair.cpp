#include "cache/repair.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sqlite3.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <string>
#include <system_error>
#include <thread>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include "cache/database.hpp"
#include "cache/schema.hpp"

namespace wyvern {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail_io(const char* what, const fs::path& path, int error) {
  throw DatabaseError(error == ENOSPC ? SQLITE_FULL : SQLITE_IOERR,
                      fmt::format("{} {}: {}", what, path.string(), std::strerror(error)));
}

fs::path with_suffix(fs::path path, const std::string& suffix) { return path += suffix; }

/// Syncs a file or a directory to the disk. Not for a database that this process has open: closing
/// a second descriptor of one drops the locks of the first.
void sync(const fs::path& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
  if (descriptor < 0) fail_io("cannot open", path, errno);
  const int result = ::fsync(descriptor);
  const int error = errno;
  ::close(descriptor);
  if (result != 0 && error != EINVAL) fail_io("cannot sync", path, error);
}

/// The right to repair, among processes: an advisory lock on wyvern.db.repair, which stays behind
/// empty, because removing a lock file lets two processes lock two files of one name.
class RepairLock {
 public:
  RepairLock(const fs::path& file, std::chrono::milliseconds patience) {
    const fs::path path = with_suffix(file, ".repair");
    descriptor_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (descriptor_ < 0) fail_io("cannot open", path, errno);
    const auto give_up = std::chrono::steady_clock::now() + patience;
    while (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
      const int error = errno;
      const bool waiting = error == EWOULDBLOCK || error == EINTR;
      if (waiting && std::chrono::steady_clock::now() < give_up) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        continue;
      }
      ::close(descriptor_);
      if (waiting) throw DatabaseError(SQLITE_BUSY, "another process repairs it");
      fail_io("cannot lock", path, error);
    }
  }
  ~RepairLock() { ::close(descriptor_); }
  RepairLock(const RepairLock&) = delete;
  RepairLock& operator=(const RepairLock&) = delete;

 private:
  int descriptor_;
};

bool is_healthy(const fs::path& file, std::chrono::milliseconds patience) {
  try {
    const auto database = open_wyvern(file, Database::Mode::create, patience);
    // Not quick_check, which does not see an index that leads to another row.
    Query check(*database, "PRAGMA integrity_check(1)");
    return check.step() && check.text(0) == "ok" && has_current_tables(*database);
  } catch (const DatabaseError& error) {
    if (error.is_damage()) return false;
    throw;
  }
}

/// Runs `step` and says whether the damaged file allowed it; errors that are not damage are thrown.
template <class Step>
bool readable(const Step& step) {
  try {
    step();
    return true;
  } catch (const DatabaseError& error) {
    if (error.is_damage()) return false;
    throw;
  }
}

/// Copies one table's rows from a damaged database into a sound one with the same columns.
class TableCopy {
 public:
  TableCopy(Database& from, Database& to, const char* table)
      : to_(to), from_(from), table_(table) {}

  /// Forward to the first unreadable row, backward to the last one, and one by one in between.
  /// Returns the number of rows copied.
  std::int64_t run() {
    if (!prepare()) return 0;
    std::int64_t low = 0;
    std::int64_t high = 0;
    if (scan(ascending_.get(), low) || scan(descending_.get(), high)) return rows_;
    // If the last rows are unreadable the largest id is unknown; ids are dense.
    constexpr std::int64_t kGap = 5000;
    std::int64_t last = low;
    for (std::int64_t id = low + 1; high == 0 ? id <= last + kGap : id < high; ++id) {
      if (copy_one(id)) last = id;
    }
    return rows_;
  }

 private:
  struct Finalize {
    void operator()(sqlite3_stmt* statement) const noexcept { sqlite3_finalize(statement); }
  };
  using Statement = std::unique_ptr<sqlite3_stmt, Finalize>;

  static Statement make(Database& database, const std::string& sql) {
    sqlite3_stmt* statement = nullptr;
    const int code = sqlite3_prepare_v2(database.handle(), sql.c_str(), -1, &statement, nullptr);
    // A table that the damaged schema does not show is reported as SQLITE_ERROR.
    if (code == SQLITE_ERROR) throw DatabaseError(SQLITE_CORRUPT, "no such table");
    if (code != SQLITE_OK) throw DatabaseError(code, sqlite3_errmsg(database.handle()));
    return Statement(statement);
  }

  bool prepare() {
    const Statement columns = make(to_, fmt::format("SELECT * FROM {} LIMIT 0", table_));
    std::string names;
    std::string marks;
    for (int i = 0; i < sqlite3_column_count(columns.get()); ++i) {
      names += fmt::format("{}{}", i == 0 ? "" : ", ", sqlite3_column_name(columns.get(), i));
      marks += i == 0 ? "?" : ", ?";
    }
    insert_ =
        make(to_, fmt::format("INSERT OR IGNORE INTO {} ({}) VALUES ({})", table_, names, marks));
    return readable([&] {
      const std::string select = fmt::format("SELECT {} FROM {} NOT INDEXED ", names, table_);
      ascending_ = make(from_, select + "ORDER BY id");
      descending_ = make(from_, select + "ORDER BY id DESC");
      single_ = make(from_, select + "WHERE id = ?");
    });
  }

  /// True when the scan reached its end; else `last_good` is the last id it could read.
  bool scan(sqlite3_stmt* select, std::int64_t& last_good) {
    int code = SQLITE_OK;
    while ((code = sqlite3_step(select)) == SQLITE_ROW) {
      insert(select);
      last_good = sqlite3_column_int64(select, 0);
    }
    if (code != SQLITE_DONE && !DatabaseError::is_damage(code)) {
      throw DatabaseError(code, sqlite3_errmsg(from_.handle()));
    }
    return code == SQLITE_DONE;
  }

  /// Whether the row could be read. Most cannot, so this does without exceptions for damage.
  bool copy_one(std::int64_t id) {
    sqlite3_bind_int64(single_.get(), 1, id);
    const int code = sqlite3_step(single_.get());
    if (code == SQLITE_ROW) insert(single_.get());
    sqlite3_reset(single_.get());
    if (code != SQLITE_ROW && code != SQLITE_DONE && !DatabaseError::is_damage(code)) {
      throw DatabaseError(code, sqlite3_errmsg(from_.handle()));
    }
    return code == SQLITE_ROW;
  }

  /// A row that breaks a constraint was damaged where SQLite could not see it, and is left out.
  void insert(sqlite3_stmt* select) {
    for (int i = 0; i < sqlite3_column_count(select); ++i) {
      sqlite3_bind_value(insert_.get(), i + 1, sqlite3_column_value(select, i));
    }
    const int code = sqlite3_step(insert_.get());
    sqlite3_reset(insert_.get());
    if (code == SQLITE_DONE) {
      rows_ += sqlite3_changes64(to_.handle());
    } else if ((code & 0xff) != SQLITE_CONSTRAINT) {
      throw DatabaseError(code, sqlite3_errmsg(to_.handle()));
    }
  }

  Database& to_;
  Database& from_;
  const char* table_;
  Statement insert_, ascending_, descending_, single_;
  std::int64_t rows_ = 0;
};

/// Keeps every writer out of the damaged file and sees that it is ours. Changes nothing in it, so
/// that closing it has nothing to roll back.
void seize(Database& damaged, const fs::path& file) {
  if (!readable([&] { damaged.execute("BEGIN EXCLUSIVE"); })) {
    // Nobody else can begin to write it either. writable_schema lets a file be read that is shorter
    // than it says; a transaction for writing would then correct its header, so this one only
    // reads.
    damaged.execute("PRAGMA writable_schema = ON; BEGIN");
  }
  // A truncated header does not say whose file it is; the file is moved aside.
  constexpr std::uintmax_t kHeaderBytes = 100;
  std::error_code unknown;
  if (fs::file_size(file, unknown) < kHeaderBytes) return;
  readable([&] {
    const std::int64_t application = damaged.integer("PRAGMA application_id");
    const std::int64_t found = damaged.integer("PRAGMA user_version");
    if (application != kApplicationId) require_ours(Identity::foreign, file);
    if (found > kSchemaVersion) require_ours(Identity::newer, file);
    if (found > 0 && found < kSchemaVersion) require_ours(Identity::older, file);
  });
}

/// Makes the new file. No process uses it until it has its name, so it is synced once, when
/// complete.
std::int64_t salvage(Database& damaged, const fs::path& into) {
  std::int64_t rows = 0;
  {
    Database fresh(into, Database::Mode::create);
    fresh.execute("PRAGMA synchronous = OFF; PRAGMA journal_mode = MEMORY");
    make_tables(fresh);
    Transaction transaction(fresh);
    // `uses` is left out: when an artifact was used is no loss.
    for (const char* table : {"winners", "measurements", "artifacts"}) {
      rows += TableCopy(damaged, fresh, table).run();
    }
    transaction.commit();
  }
  sync(into);
  return rows;
}

/// An unused name for the damaged file.
fs::path keeping_name(const fs::path& file) {
  const std::string base =
      fmt::format("{}.corrupt-{:%Y%m%dT%H%M%SZ}", file.string(), fmt::gmtime(std::time(nullptr)));
  fs::path name = base;
  for (int i = 2; fs::exists(fs::symlink_status(name)); ++i) name = fmt::format("{}-{}", base, i);
  return name;
}

/// `fresh` becomes `file`, and `file` stays as the result.
fs::path swap_files(const fs::path& file, const fs::path& fresh) {
  const fs::path kept = keeping_name(file);
  // A second name and then a replacing rename: at no moment is there no `file`, which another
  // process would take for a missing cache and create. Without hard links there is such a moment.
  const bool linked = ::link(file.c_str(), kept.c_str()) == 0;
  if (!linked && ::rename(file.c_str(), kept.c_str()) != 0) {
    fail_io("cannot keep the damaged file as", kept, errno);
  }
  // A journal that could not be played back belongs to the damaged file and would ruin the new one.
  // A finished transaction leaves an empty one.
  std::error_code absent;
  const fs::path journal = with_suffix(file, "-journal");
  const fs::path kept_journal = with_suffix(kept, "-journal");
  const bool has_journal = fs::file_size(journal, absent) > 0 && !absent;
  if ((has_journal && ::rename(journal.c_str(), kept_journal.c_str()) != 0) ||
      ::rename(fresh.c_str(), file.c_str()) != 0) {
    const int error = errno;
    // As it was, so that the next try does not keep the same file twice.
    if (has_journal) ::rename(kept_journal.c_str(), journal.c_str());
    linked ? ::unlink(kept.c_str()) : ::rename(kept.c_str(), file.c_str());
    fail_io("cannot replace", file, error);
  }
  sync(file.parent_path());
  return kept;
}

/// The file that is being made. Only the holder of the right to repair uses it, so an existing file
/// is left over from a killed process or a loss of power. It is removed when the work ends early.
class Scratch {
 public:
  explicit Scratch(const fs::path& file) : path_(with_suffix(file, ".new")) { remove(); }
  ~Scratch() { remove(); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  const fs::path& path() const { return path_; }

 private:
  void remove() const {
    std::error_code ignored;
    fs::remove(path_, ignored);
  }

  fs::path path_;
};

}  // namespace

std::optional<Repair> repair_database(const fs::path& file, std::chrono::milliseconds patience) {
  const RepairLock lock(file, patience);
  if (is_healthy(file, patience)) return std::nullopt;

  // Open until the files have changed places: its lock keeps writers out. Writers that wait for it
  // then find the file moved, and open the new one.
  Database damaged(file, Database::Mode::read_write);
  damaged.set_patience(patience);
  seize(damaged, file);
  const Scratch scratch(file);
  Repair repair;
  repair.rows = salvage(damaged, scratch.path());
  repair.kept = swap_files(file, scratch.path());
  return repair;
}

}  // namespace wyvern
