// For tests: a worker that speaks the protocol and behaves as a config's tunables say. x is the
// cost in us; y the outcome: 0 ok, 1 a crash, 2 a hang, 3 garbage, 4 wrong, 5 a device lost, 6 an
// answer without samples, 7 a crash in comparisons only, 8 a kill as by a system short of memory, 9
// a lack of descriptors, 10 an end for want of memory, 11 a refusal, 12 a crash and 13 a crash in
// comparisons that come once and not again.
#include <nlohmann/json.hpp>

#include <unistd.h>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>

namespace {

using nlohmann::json;

int value_of(const std::string& config, const std::string& name) {
  const std::size_t at = config.find(name + "=");
  return at == std::string::npos ? 0 : std::atoi(config.c_str() + at + name.size() + 1);
}

void say(const json& reply) { std::cout << reply.dump() << '\n' << std::flush; }

json timed(const char* status, double us) {
  const json samples = us > 0 ? json{us, us, us} : json::array();
  const json clocks = us > 0 ? json{1700 + us, 1710 + us, 1705 + us} : json::array();
  return {{"status", status},     {"detail", ""},       {"samples_us", samples},
          {"clocks_mhz", clocks}, {"pace_us", 10 + us}, {"error", 0.001}};
}

/// The worker's file, which outlives it.
std::string log_file;

/// True the first time in any process.
bool first_time(const std::string& what) {
  std::ifstream log(log_file);
  for (std::string line; std::getline(log, line);)
    if (line == what) return false;
  std::ofstream(log_file, std::ios::app) << what << '\n' << std::flush;
  return true;
}

/// False when the process is to end.
bool measure(const std::string& config) {
  switch (value_of(config, "y")) {
    case 1:
      std::fputs("about to crash\n", stderr);
      std::signal(SIGSEGV, SIG_DFL);  // not a sanitizer's handler
      std::raise(SIGSEGV);
      break;
    case 2:
      for (;;) pause();
    case 3: std::cout << "Segfault imminent, or is it?" << '\n' << std::flush; return true;
    case 4:
      say({{"status", "wrong"},
           {"detail", "NaN"},
           {"samples_us", json::array()},
           {"error", nullptr}});
      return true;
    case 5: say(timed("crashed", 0)); return false;
    case 6: say({{"status", "ok"}}); return true;
    case 8: std::raise(SIGKILL); break;
    case 9:
      say({{"status", "unjudged"},
           {"detail", "Too many open files"},
           {"samples_us", json::array()},
           {"error", 0}});
      return true;
    case 10: std::fputs("std::bad_alloc\n", stderr); return false;
    case 11: say(timed("illegal", 0)); return true;
    case 12:
      if (first_time("crashed " + config)) std::raise(SIGSEGV);
      break;
    default: break;
  }
  say(timed("ok", 10.0 + value_of(config, "x")));
  return true;
}

/// Configs whose y is 7 abort here as in comparisons.
void race(const json& request) {
  json reply{{"plans", json::array()}};
  for (const json& plan : request["plans"]) {
    const std::string config = plan[request["step"].get<std::size_t>()]["config"];
    if (value_of(config, "y") == 7) std::abort();
    reply["plans"].push_back(timed("ok", 20.0 + value_of(config, "x")));
  }
  say(reply);
}

void compare(const json& plans) {
  json reply{{"plans", json::array()}};
  for (std::size_t i = 0; i < plans.size(); ++i) {
    say({{"at", i}});
    double sum = 0;
    for (const json& step : plans[i]) {
      const std::string config = step["config"];
      if (value_of(config, "y") == 7) std::abort();
      if (value_of(config, "y") == 13 && first_time("aborted " + config)) std::abort();
      sum += 10.0 + value_of(config, "x");
    }
    reply["plans"].push_back(timed("ok", sum));
  }
  say(reply);
}

}  // namespace

/// Usage: fake_worker LOG [refuse]: appends a line to LOG for every start and request.
int main(int argc, char** argv) {
  if (argc < 2) return 2;
  log_file = argv[1];
  std::ofstream log(log_file, std::ios::app);
  log << "start" << '\n' << std::flush;
  for (std::string line; std::getline(std::cin, line);) {
    const json request = json::parse(line);
    log << request.begin().key() << '\n' << std::flush;
    if (request.contains("open")) {
      if (argc > 2)
        say({{"error", "no such device"}, {"kind", "unavailable"}});
      else
        say({{"ready", true}});
    } else if (request.contains("measure")) {
      const json& m = request["measure"];
      log << "repeats " << m["repeats"] << '\n' << std::flush;
      if (!measure(m["plan"][m["step"].get<std::size_t>()]["config"])) return 3;
    } else if (request.contains("race")) {
      race(request["race"]);
    } else {
      compare(request["compare"]["plans"]);
    }
  }
  return 0;
}
