// The files that the command reads and writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace wyvern::cli {

/// An open file, closed when this goes.
class FileDescriptor {
 public:
  explicit FileDescriptor(int number = -1) noexcept : number_(number) {}
  ~FileDescriptor();
  FileDescriptor(FileDescriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }

  int number() const noexcept { return number_; }  ///< below 0: none

 private:
  int number_;
};

/// A regular file that is read. Thread-safe.
class InputFile {
 public:
  /// Throws Error(kIo); for a FIFO or device too, which it never waits for.
  explicit InputFile(std::string path);

  const std::string& path() const noexcept { return path_; }
  std::uint64_t bytes() const noexcept { return bytes_; }  ///< when it was opened
  /// Copies `bytes` bytes from byte `at` on. Throws Error(kIo), also where the file ends before.
  void read(std::uint64_t at, void* to, std::size_t bytes) const;

 private:
  std::string path_;
  FileDescriptor file_;
  std::uint64_t bytes_ = 0;
};

/// Makes `path` a file of these pieces, one after the other. A file of that name stays whole until
/// the new one is on the disk: the pieces go to a file beside it, which takes the name at the end,
/// with the old one's permissions and, where that is allowed, its owner. A link is followed. A path
/// that is not a regular file, and the file that stdout is, are written in place; a FIFO without a
/// reader is an error at once. Throws Error(kIo); the file beside is removed then, and stays behind
/// only where the process is killed.
void write_file(const std::string& path, std::span<const std::string_view> pieces);

}  // namespace wyvern::cli
