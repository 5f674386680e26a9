#include "autotune/worker.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <new>
#include <optional>
#include <string>

#include "autotune/bench.hpp"
#include "autotune/blame.hpp"
#include "autotune/protocol.hpp"
#include "cache/cache.hpp"

namespace wyvern {
namespace {

using nlohmann::json;

constexpr int kBadRequest = 2;
constexpr int kDeviceLost = 3;

/// The two ends of the line to the tuner.
class Channel {
 public:
  Channel(int in, int out) : in_(in), out_(out) {}

  /// The next line, or nothing at the end of input.
  std::optional<std::string> read_line() {
    std::size_t newline = 0;
    while ((newline = pending_.find('\n')) == std::string::npos) {
      std::array<char, 4096> buffer;
      const ssize_t got = read(in_, buffer.data(), buffer.size());
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return {};
      pending_.append(buffer.data(), static_cast<std::size_t>(got));
    }
    std::string line = pending_.substr(0, newline);
    pending_.erase(0, newline + 1);
    return line;
  }

  void write_line(const json& value) {
    const std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace) + '\n';
    for (std::size_t sent = 0; sent < text.size();) {
      const ssize_t count = write(out_, text.data() + sent, text.size() - sent);
      if (count > 0)
        sent += static_cast<std::size_t>(count);
      else if (errno != EINTR)
        return;
    }
  }

 private:
  int in_, out_;
  std::string pending_;
};

class Worker {
 public:
  explicit Worker(Channel channel) : channel_(std::move(channel)) {}

  int serve() {
    while (const auto line = channel_.read_line()) {
      const std::optional<json> message = message_from(*line);
      if (!message) return kBadRequest;
      const json& request = *message;
      if (request.contains("open")) {
        if (!open(request["open"])) return 0;
      } else if (!bench_) {
        return kBadRequest;
      } else if (request.contains("measure")) {
        if (!measure(request["measure"])) return kDeviceLost;
      } else if (request.contains("race")) {
        race(request["race"]);
      } else if (request.contains("compare")) {
        compare(request["compare"]);
      } else {
        return kBadRequest;
      }
    }
    return 0;
  }

 private:
  bool open(const json& request) {
    try {
      const Problem problem = problem_from(request.at("problem"));
      validate(problem);
      const Device device = Device::open(request.at("device").get<std::string>());
      on_cpu_ = device.info().kind == to_string(DeviceKind::cpu);
      auto cache = std::make_shared<Cache>(request.at("cache").get<std::string>());
      bench_ = std::make_unique<Bench>(device, problem, std::move(cache),
                                       request.at("seed").get<std::uint64_t>(),
                                       request.value("cu_seqlens", std::vector<std::int64_t>()));
      channel_.write_line({{"ready", true}});
      return true;
    } catch (const Error& error) {
      const bool input = error.kind() == ErrorKind::kBadInput;
      channel_.write_line({{"error", error.what()}, {"kind", input ? "input" : "unavailable"}});
    }
    return false;
  }

  /// False when the device is lost and with it this process.
  bool measure(const json& request) {
    const std::int64_t compiled = bench_->compiled();
    Outcome outcome;
    bool lost = false;
    try {
      outcome =
          bench_->measure(plan_from(request.at("plan")), request.at("step").get<std::size_t>(),
                          request.at("bar_us").get<double>(), request.at("repeats").get<int>());
    } catch (const Error& error) {
      lost = true;
      outcome.status =
          blame(error, on_cpu_) == Status::unjudged ? Status::unjudged : Status::crashed;
      outcome.detail = error.what();
    } catch (const std::bad_alloc& error) {
      lost = true;
      outcome.status = Status::unjudged;
      outcome.detail = error.what();
    }
    doubt(outcome);
    json reply = to_json(outcome);
    reply["compiled"] = bench_->compiled() - compiled;
    channel_.write_line(reply);
    return !lost;
  }

  /// A config that failed while this process lacks a resource is unjudged.
  static void doubt(Outcome& outcome) {
    const bool fault = outcome.status == Status::illegal || outcome.status == Status::failed ||
                       outcome.status == Status::crashed;
    if (!fault) return;
    if (const std::string lack = shortage(); !lack.empty()) {
      outcome.status = Status::unjudged;
      outcome.detail += fmt::format(" (the worker is short of {})", lack);
    }
  }

  static std::vector<Plan> plans_of(const json& request) {
    std::vector<Plan> plans;
    for (const json& plan : request.at("plans")) plans.push_back(plan_from(plan));
    return plans;
  }

  void answer(std::vector<Outcome> outcomes, std::int64_t compiled_before) {
    json reply{{"plans", json::array()}, {"compiled", bench_->compiled() - compiled_before}};
    for (Outcome& outcome : outcomes) {
      doubt(outcome);
      reply["plans"].push_back(to_json(outcome));
    }
    channel_.write_line(reply);
  }

  void race(const json& request) {
    const std::int64_t compiled = bench_->compiled();
    answer(bench_->race(plans_of(request), request.at("step").get<std::size_t>(),
                        request.at("repeats").get<int>(), request.at("seconds").get<double>()),
           compiled);
  }

  /// A fault here ends the process with its message: the tuner knows which plan was running.
  void compare(const json& request) {
    const std::int64_t compiled = bench_->compiled();
    answer(bench_->compare(plans_of(request), request.at("seconds").get<double>(),
                           [&](std::size_t i) { channel_.write_line({{"at", i}}); }),
           compiled);
  }

  Channel channel_;
  std::unique_ptr<Bench> bench_;
  bool on_cpu_ = false;
};

/// Moves the protocol to another descriptor, so that nothing else prints to it.
int turn_over(int out_fd) {
  if (out_fd != STDOUT_FILENO) return out_fd;
  const int own = dup(out_fd);
  dup2(STDERR_FILENO, STDOUT_FILENO);
  return own;
}

}  // namespace

int worker_main(int in_fd, int out_fd) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  try {
    return Worker(Channel(in_fd, turn_over(out_fd))).serve();
  } catch (const std::exception& error) {
    std::fputs(fmt::format("{}\n", error.what()).c_str(), stderr);
    return kDeviceLost;
  }
}

}  // namespace wyvern
