// One process's connection to wyvern.db: opening, falling back, mending, surviving fork().
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include <sys/types.h>

#include "cache/database.hpp"

namespace wyvern {

/// Runs pieces of work on the database and turns every failure into "false" and a sentence in
/// status(). Thread-safe: one piece of work runs at a time.
class Connection {
 public:
  enum class Access {
    read,
    write,  ///< inside one transaction
    alone   ///< writes, outside any transaction (VACUUM)
  };
  using Work = std::function<void(Database&)>;

  explicit Connection(std::filesystem::path directory);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  /// Runs `work`; false when there is no database for this access or it failed. `work` may run
  /// twice: again after the file was found moved or damaged and has been replaced.
  bool run(Access access, const Work& work);

  const std::filesystem::path& file() const noexcept { return file_; }
  std::string status() const;
  void on_degraded(std::function<void(const std::string&)> report);

 private:
  friend class ForkGuard;

  bool usable(Access access);
  void open();
  void open_or_repair();
  void drop_if_forked();
  void perform(Access access, const Work& work);
  bool mend(const DatabaseError& error, Access access);
  void repair();
  void degrade(Access access, const std::string& sentence);
  void recovered(Access access);
  void be_patient(std::chrono::milliseconds patience);
  void notice(const std::string& sentence);
  void tell();

  const std::filesystem::path file_;
  mutable std::mutex mutex_;  ///< guards everything below
  std::unique_ptr<Database> database_;
  pid_t owner_ = 0;  ///< the process that opened database_
  std::chrono::steady_clock::time_point retry_at_{};
  std::chrono::milliseconds patience_;
  int repairs_left_;
  std::string limits_;   ///< why the file is not open, or open for reading only
  std::string trouble_;  ///< why the last work failed
  Access trouble_in_ = Access::read;
  std::string notice_;  ///< first sentence of this cache's life, until it is told
  bool told_ = false;
  std::function<void(const std::string&)> report_;
};

}  // namespace wyvern
