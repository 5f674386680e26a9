#include "runtime/tuner_command.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "runtime/base/fork_guard.hpp"
#include "runtime/base/json_text.hpp"
#include "runtime/base/own_folder.hpp"
#include "runtime/problem_fields.hpp"
#include "runtime/spawn_setup.hpp"

extern char** environ;

namespace wyvern {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

/// How often a wait checks whether to stop, and how long a process may take to stop.
constexpr int kGlanceMs = 50;
constexpr std::chrono::seconds kGrace{2};

std::string program_beside_the_library() {
  for (const char* const place : {"../bin", ".", "../../bin"}) {
    const fs::path program = (own_folder() / place / "wyvern").lexically_normal();
    std::error_code error;
    if (fs::is_regular_file(program, error) && ::access(program.c_str(), X_OK) == 0)
      return program.string();
  }
  return "wyvern";
}

/// The folder of this process's NVRTC, which the loader need not search; empty without NVRTC.
std::string folder_of_nvrtc() {
  for (const char* const name : {"libnvrtc.so.13", "libnvrtc.so.12"}) {
    void* const library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) continue;
    Dl_info info{};
    void* const symbol = dlsym(library, "nvrtcVersion");
    const bool found = symbol != nullptr && dladdr(symbol, &info) != 0;
    const std::string folder = found ? fs::path(info.dli_fname).parent_path().string() : "";
    dlclose(library);
    return folder;
  }
  return {};
}

/// This process's environment, with the paths of its cache and its NVRTC.
std::vector<std::string> environment(const fs::path& cache_folder) {
  std::vector<std::string> variables;
  const std::string nvrtc = folder_of_nvrtc();
  std::string libraries = nvrtc.empty() ? "" : "LD_LIBRARY_PATH=" + nvrtc;
  for (char** at = environ; *at != nullptr; ++at) {
    const std::string_view variable = *at;
    if (variable.starts_with("WYVERN_CACHE_DIR=")) continue;
    if (!libraries.empty() && variable.starts_with("LD_LIBRARY_PATH=")) {
      libraries += fmt::format(":{}", variable.substr(variable.find('=') + 1));
      continue;
    }
    variables.emplace_back(variable);
  }
  if (!libraries.empty()) variables.push_back(libraries);
  variables.push_back("WYVERN_CACHE_DIR=" + cache_folder.string());
  return variables;
}

std::string problem_text(const Problem& problem) {
  std::string text;
  for (const ProblemField& field : problem_fields()) {
    const std::string value = field_text(field, problem);
    if (field.name == "op" || value.empty()) continue;
    text += fmt::format("{}{}={}", text.empty() ? "" : ",", field.name, value);
  }
  return text;
}

/// The null-terminated array that exec takes.
std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> all;
  for (std::string& text : texts) all.push_back(text.data());
  all.push_back(nullptr);
  return all;
}

/// Standard input is /dev/null, and so is standard error unless `aloud`; the process has the
/// default signals and, where it is `apart`, a process group of its own.
void set_up(SpawnSetup& setup, int output, bool aloud, bool apart) {
  posix_spawn_file_actions_addopen(&setup.actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&setup.actions, output, STDOUT_FILENO);
  if (!aloud)
    posix_spawn_file_actions_addopen(&setup.actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  sigset_t none, usual;
  sigemptyset(&none);
  sigemptyset(&usual);
  for (const int signal : {SIGINT, SIGPIPE, SIGTERM}) sigaddset(&usual, signal);
  posix_spawnattr_setsigmask(&setup.attributes, &none);
  posix_spawnattr_setsigdefault(&setup.attributes, &usual);
  posix_spawnattr_setpgroup(&setup.attributes, 0);
  int flags = POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF;
  if (apart) flags |= POSIX_SPAWN_SETPGROUP;
  posix_spawnattr_setflags(&setup.attributes, static_cast<short>(flags));
}

/// A child process whose standard output is read to its end.
class Child {
 public:
  Child(std::vector<std::string> command, std::vector<std::string> variables, bool meanwhile) {
    const NoFork no_fork;  // a child of it would keep the other end open
    std::array<int, 2> ends{-1, -1};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
      problem = fmt::format("a pipe cannot be made: {}", std::strerror(errno));
      return;
    }
    SpawnSetup setup;
    set_up(setup, ends[1], !meanwhile, meanwhile);
    const int failure =
        ::posix_spawnp(&pid_, command.front().c_str(), &setup.actions, &setup.attributes,
                       pointers(command).data(), pointers(variables).data());
    ::close(ends[1]);
    output_ = ends[0];
    if (failure == 0) return;
    pid_ = -1;
    const bool is_name = command.front().find('/') == std::string::npos;
    problem = fmt::format(
        "the program '{}', which tunes, cannot be started: {}", command.front(),
        failure == ENOENT && is_name
            ? "it is neither installed with this library nor on PATH; from a clone `pip install -v "
              "./runtime/python -C cmake.define.WYVERN_COMMAND=ON` installs it, and the policy "
              "\"cached\" needs none"
            : std::strerror(failure));
  }
  ~Child() {
    if (output_ >= 0) ::close(output_);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  /// The child's whole output; the child has ended then. When asked to stop it has some time to
  /// end, then it is killed.
  std::string read_to_end(const std::function<bool()>& stopping) {
    std::string text;
    bool asked = false, over = false;
    Clock::time_point deadline;
    // Output from just before its end is read after the end was seen.
    while (read_some(text) || !std::exchange(over, is_over())) {
      if (!asked && stopping()) {
        asked = true;
        deadline = Clock::now() + kGrace;
        signal(SIGINT);
      } else if (asked && Clock::now() >= deadline) {
        signal(SIGKILL);
      }
    }
    return text;
  }

  std::string problem;  ///< why there is no child; empty where there is one

 private:
  /// Reads available output, waiting a moment for it; returns whether more may follow at once.
  bool read_some(std::string& text) {
    pollfd ready{output_, POLLIN, 0};  // after its end the descriptor is negative: only the wait
    if (::poll(&ready, 1, kGlanceMs) <= 0) return false;
    std::array<char, 4096> buffer;
    const ssize_t got = ::read(output_, buffer.data(), buffer.size());
    if (got > 0) {
      text.append(buffer.data(), static_cast<std::size_t>(got));
    } else if (got == 0 || errno != EINTR) {
      ::close(output_);
      output_ = -1;
    }
    return output_ >= 0;
  }

  void signal(int number) {
    if (!is_over()) ::kill(pid_, number);
  }

  /// Whether it has ended, here or, where the application waits for any child, there.
  bool is_over() {
    if (pid_ < 0) return true;
    const ::pid_t ended = ::waitpid(pid_, nullptr, WNOHANG);
    if (ended == pid_ || (ended < 0 && errno == ECHILD)) pid_ = -1;
    return pid_ < 0;
  }

  ::pid_t pid_ = -1;
  int output_ = -1;
};

std::string judge(const std::string& text, const std::string& program) {
  const nlohmann::json document = parse_json(text);
  if (!document.is_object()) return fmt::format("'{}', which tunes, ended without a word", program);
  if (const auto error = document.find("error"); error != document.end())
    return error->is_object() ? error->value("message", "the tuner failed") : "the tuner failed";
  const auto stored = document.find("stored");
  if (stored != document.end() && *stored == true) return {};
  return "the winner could not be stored in the cache";
}

}  // namespace

TunerCommand::TunerCommand(const std::string& program, fs::path cache_folder)
    : program_(program.empty() ? program_beside_the_library() : program),
      cache_folder_(std::move(cache_folder)) {}

std::string TunerCommand::operator()(const TuneRequest& request) const {
  const std::vector<std::string> command{program_,
                                         "tune",
                                         request.problem.op,
                                         "--problem",
                                         problem_text(request.problem),
                                         "--device",
                                         request.device.info().name,
                                         "--budget",
                                         fmt::format("{:.3f}s", request.budget_s),
                                         "--parent",
                                         std::to_string(::getpid()),
                                         "--json"};
  Child child(command, environment(cache_folder_), request.meanwhile);
  if (!child.problem.empty()) return child.problem;
  const std::string text = child.read_to_end(request.stopping);
  return judge(text, program_);
}

}  // namespace wyvern
