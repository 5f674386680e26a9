#include "tools/wyvern/file.hpp"

#include <wyvern/error.hpp>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>

namespace wyvern::cli {
namespace {

[[noreturn]] void cannot_read(std::string_view path, std::string_view reason) {
  throw Error(ErrorKind::kIo, fmt::format("cannot read '{}': {}", path, reason));
}

[[noreturn]] void cannot_write(std::string_view path, std::string_view reason) {
  throw Error(ErrorKind::kIo, fmt::format("cannot write '{}': {}", path, reason));
}

/// `path` is for the message.
void write_all(int file, std::string_view path, std::span<const std::string_view> pieces) {
  for (std::string_view piece : pieces)
    while (!piece.empty()) {
      const ssize_t written = write(file, piece.data(), piece.size());
      if (written < 0 && errno != EINTR) cannot_write(path, std::strerror(errno));
      if (written > 0) piece.remove_prefix(static_cast<std::size_t>(written));
    }
}

bool same_file(const struct stat& a, const struct stat& b) {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

/// Where `path` leads. A file that is not there yet is one, at the end of a link too.
std::filesystem::path follow_links(std::filesystem::path path) {
  constexpr int kMost = 40;  // as the system's own limit
  std::error_code error;
  for (int i = 0; i < kMost && std::filesystem::is_symlink(path, error); ++i)
    path = path.parent_path() / std::filesystem::read_symlink(path, error);
  return path;
}

/// A file without a name that matters, which is removed unless it is renamed.
class FileBeside {
 public:
  /// In the folder of `target`, with the permissions of a new file.
  FileBeside(const std::filesystem::path& target, std::string_view path) {
    static std::atomic<unsigned> count{0};
    const std::filesystem::path folder = target.parent_path();
    do {
      name_ = (folder / fmt::format(".wyvern-{}-{}.tmp", getpid(), count++)).string();
      file_ = FileDescriptor(open(name_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    } while (file_.number() < 0 && errno == EEXIST);
    if (file_.number() < 0)
      cannot_write(path, fmt::format("a file beside it cannot be made: {}", std::strerror(errno)));
  }
  ~FileBeside() {
    if (!name_.empty()) unlink(name_.c_str());
  }
  FileBeside(const FileBeside&) = delete;
  FileBeside& operator=(const FileBeside&) = delete;

  int number() const { return file_.number(); }

  void rename_to(const std::filesystem::path& target, std::string_view path) {
    if (std::rename(name_.c_str(), target.c_str()) != 0) cannot_write(path, std::strerror(errno));
    name_.clear();
  }

 private:
  std::string name_;
  FileDescriptor file_;
};

/// `old` is the file of that name, null where there is none.
void replace(const std::string& path, const struct stat* old,
             std::span<const std::string_view> pieces) {
  if (old != nullptr && faccessat(AT_FDCWD, path.c_str(), W_OK, AT_EACCESS) != 0)
    cannot_write(path, std::strerror(errno));
  const std::filesystem::path target = follow_links(path);
  FileBeside beside(target, path);
  write_all(beside.number(), path, pieces);
  if (old != nullptr) {
    // A user who may not change the owner becomes the owner of the new file.
    if (old->st_uid != geteuid() || old->st_gid != getegid())
      static_cast<void>(fchown(beside.number(), old->st_uid, old->st_gid) == 0);
    fchmod(beside.number(), old->st_mode & 0777U);
  }
  // A full disk may be reported only now. A file that cannot be synchronized has no disk to be
  // full.
  if (fsync(beside.number()) != 0 && errno != EINVAL && errno != ENOTSUP)
    cannot_write(path, std::strerror(errno));
  beside.rename_to(target, path);
  // The name is to last too; where the folder cannot be synchronized it does as soon as it can.
  const std::filesystem::path folder = target.parent_path();
  const FileDescriptor entries(
      open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (entries.number() >= 0) fsync(entries.number());
}

/// For files without content to lose. Without O_NONBLOCK the open of a FIFO waits for a reader.
void write_in_place(const std::string& path, std::span<const std::string_view> pieces) {
  const FileDescriptor file(open(path.c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  if (file.number() < 0)
    cannot_write(path, errno == ENXIO ? "nothing reads from it" : std::strerror(errno));
  fcntl(file.number(), F_SETFL, fcntl(file.number(), F_GETFL) & ~O_NONBLOCK);
  write_all(file.number(), path, pieces);
}

}  // namespace

FileDescriptor::~FileDescriptor() {
  if (number_ >= 0) close(number_);
}

// Without O_NONBLOCK the open of a FIFO waits for somebody to write to it.
InputFile::InputFile(std::string path)
    : path_(std::move(path)), file_(open(path_.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC)) {
  struct stat status{};
  if (file_.number() < 0 || fstat(file_.number(), &status) != 0)
    cannot_read(path_, std::strerror(errno));
  if (S_ISDIR(status.st_mode)) cannot_read(path_, "it is a directory");
  if (!S_ISREG(status.st_mode)) cannot_read(path_, "it must be a regular file");
  bytes_ = static_cast<std::uint64_t>(status.st_size);
}

void InputFile::read(std::uint64_t at, void* to, std::size_t bytes) const {
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t got = pread(file_.number(), static_cast<char*>(to) + done, bytes - done,
                              static_cast<off_t>(at + done));
    if (got == 0) cannot_read(path_, "it ends too early");
    if (got < 0 && errno != EINTR) cannot_read(path_, std::strerror(errno));
    if (got > 0) done += static_cast<std::size_t>(got);
  }
}

void write_file(const std::string& path, std::span<const std::string_view> pieces) {
  struct stat found{}, output{};
  if (stat(path.c_str(), &found) != 0) {
    if (errno != ENOENT) cannot_write(path, std::strerror(errno));
    return replace(path, nullptr, pieces);
  }
  if (S_ISDIR(found.st_mode)) cannot_write(path, "it is a directory");
  // The file that is stdout (/dev/stdout, say) has a current offset; a descriptor of its own would
  // begin at the first byte and overwrite what stdout has printed.
  const bool stdout_too =
      !S_ISCHR(found.st_mode) && fstat(STDOUT_FILENO, &output) == 0 && same_file(found, output);
  if (stdout_too) {
    std::fflush(stdout);
    write_all(STDOUT_FILENO, path, pieces);
  } else if (S_ISREG(found.st_mode)) {
    replace(path, &found, pieces);
  } else {
    write_in_place(path, pieces);
  }
}

}  // namespace wyvern::cli
