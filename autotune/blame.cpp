#include "autotune/blame.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace wyvern {
namespace {

// More than a worker or a compiler takes for one kernel.
constexpr std::size_t kDescriptors = 16;
constexpr std::size_t kBytes = std::size_t{64} << 20;

bool can_open_files() {
  std::array<int, kDescriptors> files{};
  for (int& file : files) file = open("/dev/null", O_RDONLY | O_CLOEXEC);
  const bool enough = std::none_of(files.begin(), files.end(), [](int file) { return file < 0; });
  for (const int file : files)
    if (file >= 0) close(file);
  return enough;
}

bool can_map_memory() {
  void* const memory =
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return false;
  munmap(memory, kBytes);
  return true;
}

}  // namespace

bool names_shortage(std::string_view text) {
  constexpr std::array kErrors{EMFILE, ENFILE, ENOMEM, ENOSPC, EDQUOT, EAGAIN};
  constexpr std::array<std::string_view, 2> kNames{"CUDA_ERROR_OUT_OF_MEMORY", "bad_alloc"};
  const auto has = [&](std::string_view name) { return text.find(name) != text.npos; };
  return std::any_of(kErrors.begin(), kErrors.end(),
                     [&](int e) { return has(std::strerror(e)); }) ||
         std::any_of(kNames.begin(), kNames.end(), has);
}

Status blame(const Error& error, bool on_cpu) {
  if (names_shortage(error.what())) return Status::unjudged;
  switch (error.kind()) {
    case ErrorKind::kCompile: return Status::failed;
    case ErrorKind::kIo: return Status::unjudged;
    case ErrorKind::kBadInput: return Status::illegal;
    case ErrorKind::kUnavailable: break;
  }
  return on_cpu ? Status::unjudged : Status::illegal;
}

bool own_fault(int signal) {
  constexpr std::array kFaults{SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGTRAP, SIGSYS};
  return std::find(kFaults.begin(), kFaults.end(), signal) != kFaults.end();
}

std::string shortage() {
  if (!can_open_files()) return "file descriptors";
  if (!can_map_memory()) return "memory";
  return {};
}

}  // namespace wyvern
