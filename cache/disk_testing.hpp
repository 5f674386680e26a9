// A disk that fails when it is told to, for tests only: under SQLite, as a VFS around its own, and
// under the system calls that the cache makes itself (links, renames, locks, syncs), which a
// program that links this file has in place of the C library's. It also keeps a record of what was
// written, so that a loss of power can be played at every point of it.
//
// Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace wyvern::testing {

/// The fault that comes: the call with the number `at`, counted from 1 over all calls, fails.
struct Fault {
  enum class Kind {
    error,        ///< an I/O error; a file that cannot be opened
    full,         ///< a write that finds no space; a lock that another has
    partial,      ///< half is written before there is no space; half is read before an error
    interrupted,  ///< a system call reads or writes half, which is no error: the rest follows
  };
  std::size_t at = 0;  ///< 0: none
  Kind kind = Kind::error;
  bool lasting = false;  ///< every call after it fails too
};

/// Puts the VFS under every database that is opened from now on. Once per program.
void install_faulty_disk();

/// Calls are counted from here on.
void set_fault(const Fault& fault);
/// How often a call has failed since.
std::size_t faults_met();
/// The first call that failed, by name; empty if none has.
std::string first_fault();
/// How often each call was made since set_fault(), by name.
std::map<std::string, std::size_t> calls_made();

/// The events of the files of one directory, in order.
class Record {
 public:
  /// The disk's possible contents after a loss of power.
  enum class Loss {
    nothing,  ///< all that was written, synchronized or not
    all,      ///< nothing that was not synchronized
    torn,     ///< all, but of the last write its first half
    random,   ///< of every write that was not synchronized some sectors; some changes of names
  };

  /// From here on, until end(). The directory must be there.
  void begin(const std::filesystem::path& directory);
  void end();
  /// A mark at this point, for the test's own use; at(i) says which was the last.
  void mark(int value) { mark_ = value; }

  std::size_t size() const { return events_.size(); }
  int mark_at(std::size_t length) const { return length == 0 ? 0 : events_[length - 1].mark; }
  /// Writes into `directory`, which is emptied, what the disk has after the first `length` events.
  void lose_power(std::size_t length, Loss loss, std::mt19937& random,
                  const std::filesystem::path& directory) const;

  // For the calls that are recorded.
  void wrote(int descriptor, const void* data, std::size_t bytes, std::int64_t at);
  void truncated(int descriptor, std::int64_t size);
  void synchronized(int descriptor);
  void names_changed();

 private:
  using Names = std::map<std::string, std::uint64_t>;  ///< of files, by name
  struct Event {
    enum class Kind { write, truncate, sync, names, sync_names } kind;
    std::uint64_t file = 0;
    std::int64_t at = 0;  ///< of a write; the size of a truncation
    std::string data;
    Names names;
    int mark = 0;
  };
  struct Image;

  bool is_ours(int descriptor, std::uint64_t& file) const;
  void add(Event event);
  Names names_now() const;

  std::filesystem::path directory_;
  std::uint64_t directory_file_ = 0, device_ = 0;
  Names first_names_;
  std::map<std::uint64_t, std::string> first_content_;
  Names names_;
  std::vector<Event> events_;
  int mark_ = 0;
};

}  // namespace wyvern::testing
