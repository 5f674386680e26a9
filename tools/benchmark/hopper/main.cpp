// Microbenchmarks of a Hopper GPU: one table, and a JSON document on request.
//
//   build/bin/hopper_bench [--json FILE] [--only SUBJECT]... [--compile [--cubins FOLDER]]
#include <wyvern/error.hpp>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cstdio>
#include <ctime>
#include <exception>
#include <fstream>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "tools/benchmark/hopper/bench.hpp"

namespace {

using namespace wyvern::hopper;

struct Options {
  std::string json;
  std::set<std::string> only;
  bool compile = false;
  std::string cubins;
};

struct BadUsage : std::runtime_error {
  using std::runtime_error::runtime_error;
};

Options parse(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string_view name = arguments[i];
    const auto value = [&]() -> std::string {
      if (i + 1 == count) throw BadUsage(fmt::format("{} needs a value", name));
      return arguments[++i];
    };
    if (name == "--json")
      options.json = value();
    else if (name == "--only")
      options.only.insert(value());
    else if (name == "--compile")
      options.compile = true;
    else if (name == "--cubins")
      options.cubins = value();
    else
      throw BadUsage(
          fmt::format("{} is no option of hopper_bench; it has --json FILE, "
                      "--only SUBJECT, --compile and --cubins FOLDER",
                      name));
  }
  std::string known;
  std::set<std::string> names;
  for (const Subject& subject : subjects()) {
    names.insert(subject.name);
    known += (known.empty() ? "" : ", ") + subject.name;
  }
  for (const std::string& name : options.only)
    if (!names.contains(name))
      throw BadUsage(fmt::format("{} is no subject; there are {}", name, known));
  return options;
}

bool wanted(const Options& options, const Subject& subject) {
  return options.only.empty() || options.only.contains(subject.name);
}

/// 0 where every program compiles.
int compile_all(const Options& options) {
  int bad = 0;
  std::vector<Program> programs = clock_programs();
  for (const Subject& subject : subjects()) {
    if (!wanted(options, subject)) continue;
    for (Program& program : subject.programs()) programs.push_back(std::move(program));
  }
  for (const Program& program : programs) {
    try {
      const std::string cubin = compile(program);
      fmt::print("{:<40} {:>8} bytes of code\n", program.label, cubin.size());
      if (!options.cubins.empty())
        std::ofstream(options.cubins + "/" + program.label + ".cubin", std::ios::binary) << cubin;
    } catch (const wyvern::Error& error) {
      if (error.kind() != wyvern::ErrorKind::kCompile) throw;
      fmt::print("{}\n", error.what());
      ++bad;
    }
  }
  fmt::print("{} programs for sm_90a by {}, {} of them refused\n", programs.size(), nvrtc_version(),
             bad);
  return bad == 0 ? 0 : 1;
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::string text(16, '\0');
  text.resize(std::strftime(text.data(), text.size(), "%Y-%m-%d", std::gmtime(&now)));
  return text;
}

int measure(const Options& options) {
  const GpuFacts& gpu = open_gpu();
  const double before = measure_sm_clock_ghz();
  fmt::print("{}, {} multiprocessors, CUDA {} driver, {}, {}; SM clock {:.3f} GHz\n\n", gpu.name,
             gpu.multiprocessors, gpu.driver, nvrtc_version(), today(), before);
  fmt::print("| subject | what | measured | unit | ± % | expected | check |\n");
  fmt::print("| --- | --- | ---: | --- | ---: | --- | --- |\n");
  nlohmann::json rows = nlohmann::json::array();
  bool ok = true;
  const Report report = [&](const Row& row) {
    ok = ok && row.ok;
    fmt::print("| {} | {} | {:.4g} | {} | {:.1f} | {} | {}{} |\n", row.subject, row.name, row.value,
               row.unit, row.spread_percent, row.expected, row.check, row.ok ? "" : " FAILED");
    std::fflush(stdout);
    rows.push_back({{"subject", row.subject},
                    {"name", row.name},
                    {"value", row.value},
                    {"unit", row.unit},
                    {"spread_percent", row.spread_percent},
                    {"expected", row.expected},
                    {"check", row.check},
                    {"ok", row.ok}});
  };
  for (const Subject& subject : subjects())
    if (wanted(options, subject)) subject.run(report);
  const double after = measure_sm_clock_ghz();
  fmt::print("\nSM clock afterwards {:.3f} GHz; {}\n", after,
             ok ? "all results agree with the host's" : "a result does NOT agree with the host's");
  if (!options.json.empty())
    std::ofstream(options.json)
        << nlohmann::json{{"device", gpu.name},   {"multiprocessors", gpu.multiprocessors},
                          {"driver", gpu.driver}, {"nvrtc", nvrtc_version()},
                          {"date", today()},      {"clock_ghz", {before, after}},
                          {"rows", rows},         {"ok", ok}}
               .dump(2)
        << '\n';
  return ok ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
  try {
    const Options options = parse(count, arguments);
    return options.compile ? compile_all(options) : measure(options);
  } catch (const BadUsage& error) {
    fmt::print(stderr, "hopper_bench: {}\n", error.what());
    return 2;
  } catch (const wyvern::Error& error) {
    fmt::print(stderr, "hopper_bench: {}\n", error.what());
    return error.kind() == wyvern::ErrorKind::kUnavailable ? 3 : 1;
  } catch (const std::exception& error) {
    fmt::print(stderr, "hopper_bench: {}\n", error.what());
    return 1;
  }
}
