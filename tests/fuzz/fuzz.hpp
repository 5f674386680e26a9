// What fuzz targets share. A target defines LLVMFuzzerTestOneInput, which calls what Wyvern reads
// its input with and ends the process where something that must hold does not.
#pragma once

#include <wyvern/error.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>

/// Called by libFuzzer, or by replay.cpp for each file of a corpus. Always 0.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace wyvern::fuzz {

/// Ends the process as a sanitizer does, so that the input is kept.
inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", what);
  std::abort();
}

inline std::string_view text_of(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

/// Whether the call took its input: false when it threw an Error about bad input that says
/// something. Whatever else it throws ends the process.
template <class Call>
bool accepts(Call&& call) {
  try {
    std::forward<Call>(call)();
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::kBadInput, "an input's fault is an error of bad input");
    require(!std::string_view(error.what()).empty(), "an error says something");
    return false;
  }
  return true;
}

/// A file of memory, which goes with this object.
class MemoryFile {
 public:
  explicit MemoryFile(std::string_view content = {}) : number_(memfd_create("fuzz", MFD_CLOEXEC)) {
    require(number_ >= 0, "there is memory for a file");
    while (!content.empty()) {
      const ssize_t written = write(number_, content.data(), content.size());
      require(written > 0, "there is memory for a file's content");
      content.remove_prefix(static_cast<std::size_t>(written));
    }
    lseek(number_, 0, SEEK_SET);
  }
  ~MemoryFile() { close(number_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  int number() const { return number_; }
  std::string path() const { return "/proc/self/fd/" + std::to_string(number_); }
  std::string content() const {
    std::string bytes(static_cast<std::size_t>(lseek(number_, 0, SEEK_END)), '\0');
    require(pread(number_, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()),
            "a file of memory can be read");
    return bytes;
  }

 private:
  int number_;
};

/// A folder, in memory where there is such a file system, which goes with this object.
class Folder {
 public:
  Folder() {
    const bool memory = access("/dev/shm", W_OK | X_OK) == 0;
    path_ = memory ? "/dev/shm/wyvern-fuzz-XXXXXX" : "/tmp/wyvern-fuzz-XXXXXX";
    require(mkdtemp(path_.data()) != nullptr, "a folder can be made");
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace wyvern::fuzz
