// A child process that answers JSON lines, and the ways in which it may fail to.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace wyvern {

struct Reply {
  enum class Kind : std::uint8_t {
    answer,       ///< `value` is the answer
    ended,        ///< it ended instead; `detail` says how
    timeout,      ///< it did not answer in time; it has been killed
    garbage,      ///< its answer was not JSON; it has been killed
    interrupted,  ///< the caller stopped waiting; it has been killed
  };
  Kind kind = Kind::ended;
  nlohmann::json value;
  std::string detail;
  int signal = 0;  ///< the signal that ended it, if any
};

/// Spawned, not forked: a fork would copy the locks of compiling threads and the state of drivers.
/// In a process group of its own, so that ^C reaches the parent only. Used from one thread.
class WorkerProcess {
 public:
  explicit WorkerProcess(std::vector<std::string> command) : command_(std::move(command)) {}
  ~WorkerProcess() { kill(); }
  WorkerProcess(const WorkerProcess&) = delete;
  WorkerProcess& operator=(const WorkerProcess&) = delete;

  bool running() const { return pid_ > 0; }
  /// Throws Error(kUnavailable) when the program cannot be started.
  void start();
  /// Writes the request if it is not null and waits for one line.
  Reply ask(const nlohmann::json& request, double timeout_s,
            const std::function<bool()>& interrupted);
  void kill();

 private:
  Reply end(Reply::Kind kind, std::string detail);
  std::string how_it_ended(int status) const;
  bool send(const std::string& text);

  std::vector<std::string> command_;
  pid_t pid_ = -1;
  int socket_ = -1;
  int errors_ = -1;  ///< the child's standard error, to quote its last line
  std::string pending_;
};

}  // namespace wyvern
