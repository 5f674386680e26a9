#include "autotune/worker_process.hpp"

#include <wyvern/error.hpp>

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "autotune/protocol.hpp"
#include "runtime/spawn_setup.hpp"

extern char** environ;

namespace wyvern {
namespace {

using Clock = std::chrono::steady_clock;

/// How often a wait checks for an interruption.
constexpr int kGlanceMs = 100;

/// The last line of a file of messages, shortened.
std::string last_line(int file) {
  constexpr off_t kTail = 512;
  const off_t size = lseek(file, 0, SEEK_END);
  if (size <= 0) return {};
  std::array<char, kTail> text{};
  const ssize_t got = pread(file, text.data(), text.size(), std::max<off_t>(size - kTail, 0));
  std::string tail(text.data(), got > 0 ? static_cast<std::size_t>(got) : 0);
  while (!tail.empty() && std::isspace(static_cast<unsigned char>(tail.back())) != 0)
    tail.pop_back();
  return tail.substr(tail.rfind('\n') + 1);
}

}  // namespace

void WorkerProcess::start() {
  kill();
  int ends[2] = {-1, -1};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    throw Error(ErrorKind::kUnavailable,
                fmt::format("a socket pair for the tuning worker cannot be made: {}",
                            std::strerror(errno)));
  errors_ = memfd_create("wyvern-worker-errors", MFD_CLOEXEC);
  SpawnSetup setup;
  posix_spawn_file_actions_adddup2(&setup.actions, ends[1], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&setup.actions, ends[1], STDOUT_FILENO);
  if (errors_ >= 0) posix_spawn_file_actions_adddup2(&setup.actions, errors_, STDERR_FILENO);
  posix_spawnattr_setflags(&setup.attributes, POSIX_SPAWN_SETPGROUP);
  posix_spawnattr_setpgroup(&setup.attributes, 0);
  std::vector<char*> arguments;
  for (std::string& argument : command_) arguments.push_back(argument.data());
  arguments.push_back(nullptr);
  const int failure = posix_spawnp(&pid_, arguments.front(), &setup.actions, &setup.attributes,
                                   arguments.data(), environ);
  close(ends[1]);
  socket_ = ends[0];
  if (failure == 0) return;
  pid_ = -1;
  kill();
  throw Error(ErrorKind::kUnavailable, fmt::format("the tuning worker '{}' cannot be started: {}",
                                                   command_.front(), std::strerror(failure)));
}

void WorkerProcess::kill() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  pid_ = -1;
  if (socket_ >= 0) close(socket_);
  if (errors_ >= 0) close(errors_);
  socket_ = errors_ = -1;
  pending_.clear();
}

Reply WorkerProcess::ask(const nlohmann::json& request, double timeout_s,
                         const std::function<bool()>& interrupted) {
  if (!request.is_null() && !send(request.dump() + '\n')) return end(Reply::Kind::ended, {});
  const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_s);
  for (;;) {
    if (const std::size_t newline = pending_.find('\n'); newline != std::string::npos) {
      const std::string line = pending_.substr(0, newline);
      pending_.erase(0, newline + 1);
      if (auto value = message_from(line)) return {Reply::Kind::answer, *std::move(value), {}, 0};
      return end(
          Reply::Kind::garbage,
          fmt::format("the worker answered '{}', which is no JSON object", line.substr(0, 80)));
    }
    if (interrupted && interrupted()) return end(Reply::Kind::interrupted, "interrupted");
    if (Clock::now() >= deadline)
      return end(Reply::Kind::timeout, fmt::format("no answer in {:.1f} s", timeout_s));
    pollfd ready{socket_, POLLIN, 0};
    if (poll(&ready, 1, kGlanceMs) <= 0) continue;
    std::array<char, 4096> buffer;
    const ssize_t got = recv(socket_, buffer.data(), buffer.size(), 0);
    if (got > 0)
      pending_.append(buffer.data(), static_cast<std::size_t>(got));
    else if (got == 0 || errno != EINTR)
      return end(Reply::Kind::ended, {});
  }
}

bool WorkerProcess::send(const std::string& text) {
  std::size_t sent = 0;
  while (sent < text.size()) {
    const ssize_t count = ::send(socket_, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
    if (count > 0)
      sent += static_cast<std::size_t>(count);
    else if (errno != EINTR)
      return false;
  }
  return true;
}

Reply WorkerProcess::end(Reply::Kind kind, std::string detail) {
  int signal = 0;
  if (kind == Reply::Kind::ended) {
    // Its end of the socket is closed, so it has ended or is about to; a second is ample.
    int status = 0;
    pid_t ended = 0;
    for (int i = 0; i < 100 && ended == 0; ++i) {
      ended = waitpid(pid_, &status, WNOHANG);
      if (ended == 0) usleep(10'000);
    }
    detail = ended == pid_ ? how_it_ended(status) : "the worker closed its output";
    if (ended == pid_) {
      pid_ = -1;
      if (WIFSIGNALED(status)) signal = WTERMSIG(status);
    }
  }
  kill();
  return {kind, {}, std::move(detail), signal};
}

std::string WorkerProcess::how_it_ended(int status) const {
  std::string text = WIFSIGNALED(status)
                         ? fmt::format("the worker was killed by signal {} ({})", WTERMSIG(status),
                                       strsignal(WTERMSIG(status)))
                         : fmt::format("the worker exited with {}", WEXITSTATUS(status));
  if (const std::string said = errors_ >= 0 ? last_line(errors_) : ""; !said.empty())
    text += ": " + said;
  return text;
}

}  // namespace wyvern
