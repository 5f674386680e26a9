#include "cache/connection.hpp"

#include <fmt/format.h>
#include <sqlite3.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>
#include <vector>

#include <sys/stat.h>
#include <unistd.h>

#include "cache/file_size_signal.hpp"
#include "cache/repair.hpp"
#include "cache/schema.hpp"
#include "cache/trust.hpp"
#include "runtime/base/fork_guard.hpp"
#include "runtime/base/printable.hpp"

namespace wyvern {
namespace {

using namespace std::chrono_literals;

/// How long work waits for other processes' locks, and how long once that has been in vain: one
/// stopped process must not make each look-up of this one slow.
constexpr std::chrono::milliseconds kPatience = 5s;
constexpr std::chrono::milliseconds kShortPatience = 20ms;
/// Between two attempts to open a file that could not be opened, or not for writing.
constexpr auto kRetryEvery = 5s;
/// A disk that damages the file again and again is not worth repairing.
constexpr int kRepairs = 3;

/// Absolute, so that it stays the same file where the process changes its working directory.
std::filesystem::path database_file(const std::filesystem::path& directory) {
  if (directory.empty()) return directory;
  std::error_code error;
  const std::filesystem::path absolute = std::filesystem::absolute(directory, error);
  return (error ? directory : absolute) / "wyvern.db";
}

/// Creates `directory` and its missing parents, for its owner only.
std::error_code make_private_directory(const std::filesystem::path& directory) {
  std::error_code error;
  if (std::filesystem::is_directory(directory, error)) return {};
  // So are all but a few of its parents, and checking each takes time that grows with its length.
  if (error == std::errc::filename_too_long) return error;
  const std::filesystem::path parent = directory.parent_path();
  if (!parent.empty() && parent != directory) {
    if (error = make_private_directory(parent); error) return error;
  }
  if (::mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) {
    return std::error_code(errno, std::generic_category());
  }
  return {};
}

constexpr const char* kElsewhere = "or set WYVERN_CACHE_DIR to another directory";

/// An error's meaning for a user, as one sentence without its full stop.
std::string explain(const DatabaseError& error, const std::filesystem::path& file) {
  const std::string name = file.string();
  switch (error.primary()) {
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
    case SQLITE_PROTOCOL:
      return fmt::format(
          "the cache {} is locked by another process, so the work goes on without "
          "it: end the process that holds it {}",
          name, kElsewhere);
    case SQLITE_FULL:
      return fmt::format(
          "there is no space for the cache {} ({}), so nothing is added to it: free some "
          "space, or raise the limit that ends it, {}",
          name, error.what(), kElsewhere);
    case SQLITE_READONLY:
    case SQLITE_PERM:
    case SQLITE_AUTH:
    case SQLITE_CANTOPEN:
      return fmt::format(
          "the cache {} cannot be opened or written ({}), so the work goes on "
          "without it: make it and its directory readable and writable {}",
          name, error.what(), kElsewhere);
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
    case SQLITE_ERROR:
      return fmt::format(
          "the cache {} is damaged ({}) and cannot be repaired here, so the work goes "
          "on without it: delete it {}",
          name, error.what(), kElsewhere);
    case SQLITE_CONSTRAINT:
      return fmt::format("a row was not stored in the cache {}: it is malformed ({})", name,
                         error.what());
    default:
      return fmt::format(
          "the cache {} fails ({}), so the work goes on without it: see to its file "
          "system {}",
          name, error.what(), kElsewhere);
  }
}

}  // namespace

// fork() copies a connection into the child, where using or even closing it would harm the parent's
// locks; so the child leaves it alone and opens its own. ForkGuard ensures that no connection, nor
// SQLite's own records, is in use when it is copied.
namespace {

/// Connections of the parent process, kept for the life of this one. Its mutex is locked only while
/// a connection's is held, so that no fork() finds it locked.
struct Abandoned {
  void add(std::unique_ptr<Database> database) WYVERN_EXCLUDES(mutex) {
    const Lock lock(mutex);
    databases.push_back(database.release());
  }
  Mutex mutex;
  std::vector<Database*> databases WYVERN_GUARDED_BY(mutex);
};

Abandoned& abandoned() {
  static Abandoned* const all = new Abandoned;  // never destroyed, like its elements
  return *all;
}

}  // namespace

Connection::Connection(const std::filesystem::path& directory)
    : file_(database_file(directory)),
      patience_(kPatience),
      repairs_left_(kRepairs),
      report_(warn) {
  ForkGuard::instance().add(mutex_);
  const Lock lock(mutex_);
  const NoFileSizeSignal guard;
  open();
}

Connection::~Connection() {
  {
    const Lock lock(mutex_);
    drop_if_forked();
    database_.reset();
  }
  ForkGuard::instance().remove(mutex_);
}

namespace {

std::atomic<std::uint64_t>& change_count() noexcept {
  static std::atomic<std::uint64_t> count = 0;
  return count;
}

}  // namespace

std::uint64_t Connection::changes() noexcept {
  return change_count().load(std::memory_order_acquire);
}

void Connection::note_change() noexcept { change_count().fetch_add(1, std::memory_order_release); }

bool Connection::run(Access access, const Work& work) {
  bool done = false;
  {
    const Lock lock(mutex_);
    const NoFileSizeSignal guard;
    for (int attempt = 0; attempt < 2 && !done; ++attempt) {
      if (!usable(access)) break;
      try {
        perform(access, work);
        recovered(access);
        done = true;
      } catch (const DatabaseError& error) {
        if (attempt > 0 || !recover(error, access)) {
          if (error.primary() == SQLITE_BUSY) be_patient(kShortPatience);
          degrade(access, explain(error, file_));
          break;
        }
      } catch (const ForeignDatabase& error) {
        database_.reset();
        retry_at_ = std::chrono::steady_clock::now() + kRetryEvery;
        notice(limits_ = error.what());
        break;
      } catch (const Error&) {
        throw;
      } catch (const std::exception& error) {
        degrade(access, fmt::format("the cache {} fails ({}), so the work goes on without it: set "
                                    "WYVERN_CACHE_DIR to another directory",
                                    file_.string(), error.what()));
        break;
      }
    }
  }
  if (done && access != Access::read) note_change();
  tell();
  return done;
}

void Connection::attempt(const Work& work) noexcept {
  const Lock lock(mutex_);
  const NoFileSizeSignal guard;
  drop_if_forked();
  if (database_ == nullptr || !limits_.empty()) return;
  database_->set_patience(0ms);
  try {
    commit(work);
  } catch (const std::exception&) {  // lost, as it may be
  }
  database_->set_patience(patience_);
}

void Connection::perform(Access access, const Work& work) {
  switch (access) {
    case Access::read: work(*database_); break;
    case Access::write: commit(work); break;
    case Access::shrink:
      without_room([&]() WYVERN_REQUIRES(mutex_) { commit(work); });
      without_room([&]() WYVERN_REQUIRES(mutex_) { database_->execute("VACUUM"); });
      break;
  }
}

// Rows may be deleted because the disk is full, and then it has no room for the rollback journal.
// Then the journal is in memory: errors are rolled back as usual, but a process that is killed in
// the middle of these writes leaves a damaged file, which the next one repairs.
void Connection::without_room(const std::function<void()>& step) {
  try {
    step();
  } catch (const DatabaseError& error) {
    if (error.primary() != SQLITE_FULL) throw;
    const JournalInMemory journal(*database_);
    step();
  }
}

void Connection::commit(const Work& work) {
  Transaction transaction(*database_);
  // A newer Wyvern may have changed the file since it was opened.
  if (database_->integer("PRAGMA user_version") != kSchemaVersion) {
    require_ours(identify(*database_), file_);
  }
  work(*database_);
  transaction.commit();
}

// Whether there is a database for this access; (re)opens it when it is time to try.
bool Connection::usable(Access access) {
  drop_if_forked();
  const auto good = [&]() WYVERN_REQUIRES(mutex_) {
    return database_ != nullptr && (access == Access::read || limits_.empty());
  };
  if (!good() && std::chrono::steady_clock::now() >= retry_at_) {
    database_.reset();
    open();
  }
  return good();
}

void Connection::drop_if_forked() {
  if (database_ == nullptr || owner_ == ::getpid()) return;
  abandoned().add(std::move(database_));
  retry_at_ = {};
}

// Leaves database_ open or null, and in limits_ what is wrong while that lasts.
void Connection::open() {
  owner_ = ::getpid();
  limits_.clear();
  try {
    open_or_repair();
  } catch (const DatabaseError& error) {
    database_.reset();
    if (error.primary() == SQLITE_BUSY) be_patient(kShortPatience);
    limits_ = explain(error, file_);
  } catch (const std::bad_alloc&) {
    database_.reset();
    limits_ = fmt::format("there is no memory for the cache {}, so the work goes on without it",
                          file_.string());
  } catch (const std::exception& error) {
    database_.reset();
    limits_ = error.what();
  }
  if (database_ != nullptr) be_patient(kPatience);
  if (limits_.empty()) return;
  retry_at_ = std::chrono::steady_clock::now() + kRetryEvery;
  notice(limits_);
}

void Connection::open_or_repair() {
  if (file_.empty()) {
    throw Error(ErrorKind::kIo,
                "no directory for the cache is known, so nothing is cached: set "
                "WYVERN_CACHE_DIR, or HOME");
  }
  const std::filesystem::path directory = file_.parent_path();
  if (const std::error_code error = make_private_directory(directory); error) {
    throw Error(ErrorKind::kIo,
                fmt::format("the cache's directory {} cannot be created ({}), so nothing is "
                            "cached: fix that {}",
                            directory.string(), error.message(), kElsewhere));
  }
  const Trust trust = trust_in(file_);
  if (!trust.refusal.empty()) throw Error(ErrorKind::kIo, trust.refusal);
  // Without writing to the directory there is no journal, so the file can only be read.
  const bool writable = !trust.read_only && ::access(directory.c_str(), W_OK | X_OK) == 0;
  const auto open_file = [&]() WYVERN_REQUIRES(mutex_) {
    return open_wyvern(file_, writable ? Database::Mode::create : Database::Mode::read_only,
                       patience_);
  };
  try {
    database_ = open_file();
  } catch (const DatabaseError& error) {
    if (!error.is_damage() || !writable) throw;
    repair();
    database_ = open_file();
  }
  if (database_->read_only()) {
    limits_ = fmt::format(
        "the cache {} is read-only, so its rows are used and nothing is "
        "added: make it and its directory writable {}",
        file_.string(), kElsewhere);
  }
}

void Connection::repair() {
  if (repairs_left_ == 0) {
    throw DatabaseError(SQLITE_CORRUPT, "repaired several times already");
  }
  --repairs_left_;
  if (const auto repaired = repair_database(file_, patience_)) {
    notice(
        fmt::format("the cache {} was damaged: {} of its rows were saved into a new file, and "
                    "the damaged one is kept as {}, which you may delete",
                    file_.string(), repaired->rows, repaired->kept.string()));
  }
}

// After `error`: true when the work should be tried once more.
bool Connection::recover(const DatabaseError& error, Access access) {
  const bool moved = error.code() == SQLITE_READONLY_DBMOVED;
  const bool unreadable = error.primary() == SQLITE_IOERR && access == Access::read;
  if (!moved && !unreadable && !(error.is_damage() && limits_.empty())) return false;
  database_.reset();
  retry_at_ = {};
  if (error.is_damage()) {
    try {
      repair();
    } catch (const std::exception&) {
      return false;
    }
  }
  return true;
}

void Connection::degrade(Access access, const std::string& sentence) {
  trouble_ = sentence;
  trouble_in_ = access;
  notice(sentence);
  if (database_ == nullptr) retry_at_ = std::chrono::steady_clock::now() + kRetryEvery;
}

// A success proves that work of its own kind is possible again; a read proves nothing of writes.
void Connection::recovered(Access access) {
  if (trouble_.empty() || (access == Access::read && trouble_in_ != Access::read)) return;
  trouble_.clear();
  be_patient(kPatience);
}

void Connection::be_patient(std::chrono::milliseconds patience) {
  patience_ = patience;
  if (database_ != nullptr) database_->set_patience(patience);
}

std::string Connection::status() const {
  const Lock lock(mutex_);
  return limits_.empty() ? trouble_ : limits_;
}

void Connection::on_degraded(std::function<void(const std::string&)> report) {
  {
    const Lock lock(mutex_);
    report_ = std::move(report);
  }
  tell();
}

void Connection::notice(const std::string& sentence) {
  if (!told_ && notice_.empty()) notice_ = sentence;
}

// Outside the lock: the report is the caller's code, and may use this cache.
void Connection::tell() {
  std::function<void(const std::string&)> report;
  std::string sentence;
  {
    const Lock lock(mutex_);
    if (told_ || notice_.empty()) return;
    told_ = true;
    sentence = std::exchange(notice_, {});
    report = report_;
  }
  if (report) report(sentence);
}

}  // namespace wyvern
