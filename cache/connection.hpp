// One process's connection to wyvern.db: opening, falling back, repairing, surviving fork().
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include <sys/types.h>

#include "cache/database.hpp"
#include "runtime/base/mutex.hpp"

namespace wyvern {

/// Runs pieces of work on the database and turns every failure into "false" and a sentence in
/// status(). Thread-safe: one piece of work runs at a time.
class Connection {
 public:
  enum class Access {
    read,
    write,  ///< inside one transaction
    /// deletes rows inside one transaction, then gives their space back (VACUUM); on a disk without
    /// room for a journal too
    shrink
  };
  using Work = std::function<void(Database&)>;

  explicit Connection(const std::filesystem::path& directory);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  /// Runs `work`; false when there is no database for this access or it failed. `work` may run
  /// twice: again after the file was found moved or damaged and has been replaced, or had no room.
  /// An Error that `work` itself throws undoes it and is the caller's.
  bool run(Access access, const Work& work) WYVERN_EXCLUDES(mutex_);
  /// Writes rows that may be lost: waits for no lock, opens and repairs nothing, reports nothing.
  void attempt(const Work& work) noexcept WYVERN_EXCLUDES(mutex_);

  /// Grows with every run() of this process that wrote, in whatever database, and with
  /// note_change(). Takes no lock.
  static std::uint64_t changes() noexcept;
  /// Another process has written, as far as this one knows.
  static void note_change() noexcept;

  const std::filesystem::path& file() const noexcept { return file_; }
  [[nodiscard]] std::string status() const WYVERN_EXCLUDES(mutex_);
  void on_degraded(std::function<void(const std::string&)> report) WYVERN_EXCLUDES(mutex_);

 private:
  bool usable(Access access) WYVERN_REQUIRES(mutex_);
  void open() WYVERN_REQUIRES(mutex_);
  void open_or_repair() WYVERN_REQUIRES(mutex_);
  void drop_if_forked() WYVERN_REQUIRES(mutex_);
  void perform(Access access, const Work& work) WYVERN_REQUIRES(mutex_);
  void commit(const Work& work) WYVERN_REQUIRES(mutex_);
  void without_room(const std::function<void()>& step) WYVERN_REQUIRES(mutex_);
  bool recover(const DatabaseError& error, Access access) WYVERN_REQUIRES(mutex_);
  void repair() WYVERN_REQUIRES(mutex_);
  void degrade(Access access, const std::string& sentence) WYVERN_REQUIRES(mutex_);
  void recovered(Access access) WYVERN_REQUIRES(mutex_);
  void be_patient(std::chrono::milliseconds patience) WYVERN_REQUIRES(mutex_);
  void notice(const std::string& sentence) WYVERN_REQUIRES(mutex_);
  void tell() WYVERN_EXCLUDES(mutex_);

  const std::filesystem::path file_;
  mutable Mutex mutex_;
  std::unique_ptr<Database> database_ WYVERN_GUARDED_BY(mutex_);
  /// The process that opened database_.
  pid_t owner_ WYVERN_GUARDED_BY(mutex_) = 0;
  std::chrono::steady_clock::time_point retry_at_ WYVERN_GUARDED_BY(mutex_){};
  std::chrono::milliseconds patience_ WYVERN_GUARDED_BY(mutex_);
  int repairs_left_ WYVERN_GUARDED_BY(mutex_);
  /// Why the file is not open, or open for reading only.
  std::string limits_ WYVERN_GUARDED_BY(mutex_);
  /// Why the last work failed.
  std::string trouble_ WYVERN_GUARDED_BY(mutex_);
  Access trouble_in_ WYVERN_GUARDED_BY(mutex_) = Access::read;
  /// First sentence of this cache's life, until it is told.
  std::string notice_ WYVERN_GUARDED_BY(mutex_);
  bool told_ WYVERN_GUARDED_BY(mutex_) = false;
  std::function<void(const std::string&)> report_ WYVERN_GUARDED_BY(mutex_);
};

}  // namespace wyvern
