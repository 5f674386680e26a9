#include "cache/disk_testing.hpp"

#include <sqlite3.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string_view>
#include <utility>

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

namespace wyvern::testing {
namespace {

Fault fault;
std::size_t calls = 0;
std::size_t met = 0;
std::string first;
std::map<std::string, std::size_t> counts;
Record* record = nullptr;
/// Within SQLite's own VFS, whose system calls are not counted again.
int depth = 0;

struct Inside {
  Inside() { ++depth; }
  ~Inside() { --depth; }
};

/// Whether the call that is about to be made fails.
bool fails(const char* name) {
  ++counts[name];
  // What is cut short is the system call and nothing else.
  const bool is_system_call = std::string_view(name).starts_with('p');
  if ((fault.kind == Fault::Kind::interrupted) != is_system_call) return false;
  ++calls;
  const bool now = fault.at != 0 && (calls == fault.at || (fault.lasting && calls > fault.at));
  if (now && met++ == 0) first = name;
  return now;
}

// ---- The VFS

sqlite3_vfs* real_vfs = nullptr;

struct File {
  sqlite3_file base;
  sqlite3_file* real;  ///< in the same block, after this
};

sqlite3_file* real(sqlite3_file* file) { return reinterpret_cast<File*>(file)->real; }

int close_file(sqlite3_file* file) {
  const Inside inside;
  return real(file)->pMethods->xClose(real(file));
}

int read_file(sqlite3_file* file, void* to, int bytes, sqlite3_int64 at) {
  const Inside inside;
  if (!fails("xRead")) return real(file)->pMethods->xRead(real(file), to, bytes, at);
  if (fault.kind == Fault::Kind::partial)
    real(file)->pMethods->xRead(real(file), to, bytes / 2, at);
  return SQLITE_IOERR_READ;
}

int write_file(sqlite3_file* file, const void* from, int bytes, sqlite3_int64 at) {
  const Inside inside;
  const auto& methods = *real(file)->pMethods;
  if (!fails("xWrite")) return methods.xWrite(real(file), from, bytes, at);
  if (fault.kind == Fault::Kind::partial) methods.xWrite(real(file), from, bytes / 2, at);
  return fault.kind == Fault::Kind::error ? SQLITE_IOERR_WRITE : SQLITE_FULL;
}

int truncate_file(sqlite3_file* file, sqlite3_int64 size) {
  const Inside inside;
  if (fails("xTruncate")) return SQLITE_IOERR_TRUNCATE;
  return real(file)->pMethods->xTruncate(real(file), size);
}

int sync_file(sqlite3_file* file, int flags) {
  const Inside inside;
  if (fails("xSync")) return SQLITE_IOERR_FSYNC;
  return real(file)->pMethods->xSync(real(file), flags);
}

int file_size(sqlite3_file* file, sqlite3_int64* size) {
  const Inside inside;
  if (fails("xFileSize")) return SQLITE_IOERR_FSTAT;
  return real(file)->pMethods->xFileSize(real(file), size);
}

int lock_file(sqlite3_file* file, int level) {
  const Inside inside;
  // A lock that another has for a moment, or a file system that has none.
  if (fails("xLock")) return fault.kind == Fault::Kind::full ? SQLITE_BUSY : SQLITE_IOERR_LOCK;
  return real(file)->pMethods->xLock(real(file), level);
}

int unlock_file(sqlite3_file* file, int level) {
  const Inside inside;
  const int code = real(file)->pMethods->xUnlock(real(file), level);
  return fails("xUnlock") ? SQLITE_IOERR_UNLOCK : code;
}

int check_reserved_lock(sqlite3_file* file, int* found) {
  const Inside inside;
  if (fails("xCheckReservedLock")) return SQLITE_IOERR_CHECKRESERVEDLOCK;
  return real(file)->pMethods->xCheckReservedLock(real(file), found);
}

int file_control(sqlite3_file* file, int what, void* argument) {
  const Inside inside;
  return real(file)->pMethods->xFileControl(real(file), what, argument);
}

int sector_size(sqlite3_file* file) { return real(file)->pMethods->xSectorSize(real(file)); }

int device_characteristics(sqlite3_file* file) {
  return real(file)->pMethods->xDeviceCharacteristics(real(file));
}

int map_shared(sqlite3_file* file, int page, int bytes, int extend, void volatile** to) {
  const Inside inside;
  if (fails("xShmMap")) return SQLITE_IOERR_SHMMAP;
  return real(file)->pMethods->xShmMap(real(file), page, bytes, extend, to);
}

int lock_shared(sqlite3_file* file, int offset, int n, int flags) {
  const Inside inside;
  if (fails("xShmLock")) return SQLITE_IOERR_SHMLOCK;
  return real(file)->pMethods->xShmLock(real(file), offset, n, flags);
}

void shared_barrier(sqlite3_file* file) { real(file)->pMethods->xShmBarrier(real(file)); }

int unmap_shared(sqlite3_file* file, int remove) {
  const Inside inside;
  return real(file)->pMethods->xShmUnmap(real(file), remove);
}

const sqlite3_io_methods kMethods = {
    .iVersion = 2,
    .xClose = close_file,
    .xRead = read_file,
    .xWrite = write_file,
    .xTruncate = truncate_file,
    .xSync = sync_file,
    .xFileSize = file_size,
    .xLock = lock_file,
    .xUnlock = unlock_file,
    .xCheckReservedLock = check_reserved_lock,
    .xFileControl = file_control,
    .xSectorSize = sector_size,
    .xDeviceCharacteristics = device_characteristics,
    .xShmMap = map_shared,
    .xShmLock = lock_shared,
    .xShmBarrier = shared_barrier,
    .xShmUnmap = unmap_shared,
    .xFetch = nullptr,
    .xUnfetch = nullptr,
};

int open_file(sqlite3_vfs*, const char* name, sqlite3_file* file, int flags, int* got) {
  const Inside inside;
  auto* opened = reinterpret_cast<File*>(file);
  opened->base.pMethods = nullptr;
  opened->real = reinterpret_cast<sqlite3_file*>(opened + 1);
  if (fails("xOpen")) return SQLITE_CANTOPEN;
  const int code = real_vfs->xOpen(real_vfs, name, opened->real, flags, got);
  if (record != nullptr) record->names_changed();
  if (opened->real->pMethods != nullptr) opened->base.pMethods = &kMethods;
  return code;
}

int remove_file(sqlite3_vfs*, const char* name, int sync) {
  const Inside inside;
  if (fails("xDelete")) return SQLITE_IOERR_DELETE;
  return real_vfs->xDelete(real_vfs, name, sync);
}

int access_file(sqlite3_vfs*, const char* name, int flags, int* result) {
  const Inside inside;
  if (fails("xAccess")) return SQLITE_IOERR_ACCESS;
  return real_vfs->xAccess(real_vfs, name, flags, result);
}

int full_path(sqlite3_vfs*, const char* name, int bytes, char* to) {
  const Inside inside;
  if (fails("xFullPathname")) return SQLITE_CANTOPEN_FULLPATH;
  return real_vfs->xFullPathname(real_vfs, name, bytes, to);
}

}  // namespace

void install_faulty_disk() {
  real_vfs = sqlite3_vfs_find(nullptr);
  static sqlite3_vfs faulty = *real_vfs;
  faulty.zName = "faulty";
  faulty.szOsFile = static_cast<int>(sizeof(File)) + real_vfs->szOsFile;
  faulty.pNext = nullptr;
  faulty.xOpen = open_file;
  faulty.xDelete = remove_file;
  faulty.xAccess = access_file;
  faulty.xFullPathname = full_path;
  if (sqlite3_vfs_register(&faulty, 1) != SQLITE_OK) std::abort();
}

void set_fault(const Fault& next) {
  fault = next;
  calls = met = 0;
  first.clear();
  counts.clear();
}

std::size_t faults_met() { return met; }
std::string first_fault() { return first; }
std::map<std::string, std::size_t> calls_made() { return counts; }

// ---- The record

void Record::begin(const std::filesystem::path& directory) {
  struct stat info{};
  if (::stat(directory.c_str(), &info) != 0) std::abort();
  directory_ = directory;
  directory_file_ = info.st_ino;
  device_ = info.st_dev;
  events_.clear();
  first_content_.clear();
  mark_ = 0;
  names_ = first_names_ = names_now();
  for (const auto& [name, file] : names_) {
    std::ifstream in(directory / name, std::ios::binary);
    first_content_[file].assign(std::istreambuf_iterator<char>(in), {});
  }
  record = this;
}

void Record::end() { record = nullptr; }

Record::Names Record::names_now() const {
  Names names;
  for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
    struct stat info{};
    if (::lstat(entry.path().c_str(), &info) == 0) names[entry.path().filename()] = info.st_ino;
  }
  return names;
}

bool Record::is_ours(int descriptor, std::uint64_t& file) const {
  struct stat info{};
  if (::fstat(descriptor, &info) != 0 || info.st_dev != device_) return false;
  file = info.st_ino;
  return true;
}

void Record::add(Event event) {
  event.mark = mark_;
  events_.push_back(std::move(event));
}

void Record::wrote(int descriptor, const void* data, std::size_t bytes, std::int64_t at) {
  names_changed();
  Event event{.kind = Event::Kind::write, .at = at, .data = {}, .names = {}};
  if (!is_ours(descriptor, event.file)) return;
  event.data.assign(static_cast<const char*>(data), bytes);
  add(std::move(event));
}

void Record::truncated(int descriptor, std::int64_t size) {
  names_changed();
  Event event{.kind = Event::Kind::truncate, .at = size, .data = {}, .names = {}};
  if (is_ours(descriptor, event.file)) add(std::move(event));
}

void Record::synchronized(int descriptor) {
  names_changed();
  Event event{.kind = Event::Kind::sync, .data = {}, .names = {}};
  if (!is_ours(descriptor, event.file)) return;
  if (event.file == directory_file_) event.kind = Event::Kind::sync_names;
  add(std::move(event));
}

void Record::names_changed() {
  Names now = names_now();
  if (now == names_) return;
  names_ = now;
  add({.kind = Event::Kind::names, .data = {}, .names = std::move(now)});
}

/// What is on the disk, and what has been asked for and is not there for sure.
struct Record::Image {
  static constexpr std::size_t kSector = 512;

  std::map<std::uint64_t, std::string> content;
  Names names;
  std::vector<const Event*> pending;

  static void write(std::string& file, std::size_t at, std::string_view data) {
    if (file.size() < at + data.size()) file.resize(at + data.size(), '\0');
    file.replace(at, data.size(), data);
  }

  void apply(const Event& event, Loss loss, std::mt19937& random) {
    if (event.kind == Event::Kind::names) names = event.names;
    std::string& file = content[event.file];
    const auto at = static_cast<std::size_t>(event.at);
    const auto kept = [&] { return loss != Loss::random || random() % 2 == 0; };
    if (event.kind == Event::Kind::truncate && kept()) file.resize(at, '\0');
    if (event.kind != Event::Kind::write) return;
    const std::string_view data = event.data;
    for (std::size_t begin = 0; begin < data.size();) {
      const std::size_t length = std::min(kSector - (at + begin) % kSector, data.size() - begin);
      if (kept()) write(file, at + begin, data.substr(begin, length));
      begin += length;
    }
  }

  /// What concerns one file, or the names, is now on the disk.
  void settle(std::mt19937& random, bool of_names, std::uint64_t file) {
    std::erase_if(pending, [&](const Event* event) {
      const bool is_names = event->kind == Event::Kind::names;
      if (is_names != of_names || (!of_names && event->file != file)) return false;
      apply(*event, Loss::nothing, random);
      return true;
    });
  }
};

void Record::lose_power(std::size_t length, Loss loss, std::mt19937& random,
                        const std::filesystem::path& directory) const {
  Image disk{.content = first_content_, .names = first_names_, .pending = {}};
  for (std::size_t i = 0; i < length; ++i) {
    const Event& event = events_[i];
    if (event.kind == Event::Kind::sync || event.kind == Event::Kind::sync_names) {
      disk.settle(random, event.kind == Event::Kind::sync_names, event.file);
    } else {
      disk.pending.push_back(&event);
    }
  }
  // Names change in order, so that some of the last changes are lost and no others.
  const auto changes = static_cast<std::size_t>(
      std::count_if(disk.pending.begin(), disk.pending.end(),
                    [](const Event* e) { return e->kind == Event::Kind::names; }));
  std::size_t changes_kept = loss == Loss::random ? random() % (changes + 1) : changes;
  for (const Event* event : disk.pending) {
    if (loss == Loss::all) break;
    if (event->kind == Event::Kind::names && changes_kept-- == 0)
      ++changes_kept;
    else if (loss == Loss::torn && event == disk.pending.back()) {
      Event half = *event;
      half.data.resize(half.data.size() / 2);
      disk.apply(half, loss, random);
    } else {
      disk.apply(*event, loss, random);
    }
  }
  std::filesystem::remove_all(directory);
  ::mkdir(directory.c_str(), 0700);
  for (const auto& [name, file] : disk.names) {
    const std::filesystem::path path = directory / name;
    std::ofstream(path, std::ios::binary) << disk.content[file];
    ::chmod(path.c_str(), 0600);
  }
}

namespace {

/// The C library's function of this name.
template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

/// Whether a system call that the cache makes itself fails now, with errno set.
bool call_fails(const char* name) {
  if (depth != 0 || !fails(name)) return false;
  errno = fault.kind == Fault::Kind::error ? EIO : ENOSPC;
  return true;
}

/// Whether a call of SQLite's VFS does half of what it was asked for now, which is no error.
bool call_is_short(const char* name) {
  return fault.kind == Fault::Kind::interrupted && fails(name);
}

}  // namespace
}  // namespace wyvern::testing

// ---- System calls, in place of the C library's

using namespace wyvern::testing;

extern "C" {

ssize_t pread64(int descriptor, void* to, size_t bytes, off64_t at) {
  static auto* const real_call = next<ssize_t(int, void*, size_t, off64_t)>("pread64");
  return real_call(descriptor, to, call_is_short("pread64") ? (bytes + 1) / 2 : bytes, at);
}

ssize_t pwrite64(int descriptor, const void* data, size_t bytes, off64_t at) {
  static auto* const real_call = next<ssize_t(int, const void*, size_t, off64_t)>("pwrite64");
  if (call_is_short("pwrite64")) bytes = (bytes + 1) / 2;
  const ssize_t result = real_call(descriptor, data, bytes, at);
  if (record != nullptr && result > 0)
    record->wrote(descriptor, data, static_cast<size_t>(result), at);
  return result;
}

int ftruncate64(int descriptor, off64_t size) noexcept {
  static auto* const real_call = next<int(int, off64_t)>("ftruncate64");
  const int result = real_call(descriptor, size);
  if (record != nullptr && result == 0) record->truncated(descriptor, size);
  return result;
}

int fsync(int descriptor) {
  static auto* const real_call = next<int(int)>("fsync");
  if (call_fails("fsync")) return -1;
  const int result = real_call(descriptor);
  if (record != nullptr && result == 0) record->synchronized(descriptor);
  return result;
}

int fdatasync(int descriptor) {
  static auto* const real_call = next<int(int)>("fdatasync");
  const int result = real_call(descriptor);
  if (record != nullptr && result == 0) record->synchronized(descriptor);
  return result;
}

int link(const char* from, const char* to) noexcept {
  static auto* const real_call = next<int(const char*, const char*)>("link");
  if (call_fails("link")) return -1;
  const int result = real_call(from, to);
  if (record != nullptr) record->names_changed();
  return result;
}

int rename(const char* from, const char* to) noexcept {
  static auto* const real_call = next<int(const char*, const char*)>("rename");
  if (call_fails("rename")) return -1;
  const int result = real_call(from, to);
  if (record != nullptr) record->names_changed();
  return result;
}

int unlink(const char* path) noexcept {
  static auto* const real_call = next<int(const char*)>("unlink");
  if (call_fails("unlink")) return -1;
  const int result = real_call(path);
  if (record != nullptr) record->names_changed();
  return result;
}

int mknod(const char* path, mode_t mode, dev_t device) noexcept {
  static auto* const real_call = next<int(const char*, mode_t, dev_t)>("mknod");
  if (call_fails("mknod")) return -1;
  const int result = real_call(path, mode, device);
  if (record != nullptr) record->names_changed();
  return result;
}

int mkdir(const char* path, mode_t mode) noexcept {
  static auto* const real_call = next<int(const char*, mode_t)>("mkdir");
  return call_fails("mkdir") ? -1 : real_call(path, mode);
}

int open(const char* path, int flags, ...) {
  static auto* const real_call = next<int(const char*, int, ...)>("open");
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  if (call_fails("open")) return -1;
  const int descriptor = real_call(path, flags, mode);
  if (record != nullptr) record->names_changed();
  return descriptor;
}

int flock(int descriptor, int operation) noexcept {
  static auto* const real_call = next<int(int, int)>("flock");
  return call_fails("flock") ? -1 : real_call(descriptor, operation);
}

int fcntl(int descriptor, int command, ...) {
  static auto* const real_call = next<int(int, int, ...)>("fcntl");
  va_list rest;
  va_start(rest, command);
  void* argument = va_arg(rest, void*);
  va_end(rest);
  return call_fails("fcntl") ? -1 : real_call(descriptor, command, argument);
}

int fstatat(int descriptor, const char* path, struct stat* info, int flags) noexcept {
  static auto* const real_call = next<int(int, const char*, struct stat*, int)>("fstatat");
  return call_fails("fstatat") ? -1 : real_call(descriptor, path, info, flags);
}

}  // extern "C"
