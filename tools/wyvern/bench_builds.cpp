#include "tools/wyvern/bench_builds.hpp"

#include <wyvern/error.hpp>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "tools/wyvern/progress.hpp"

namespace wyvern::cli {
namespace {

constexpr int kRounds = 3;

/// This process's command line behind its name, without --compare and its value.
std::vector<std::string> own_arguments() {
  std::ifstream in("/proc/self/cmdline", std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  std::vector<std::string> all;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\0', at), text.size());
    all.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  std::vector<std::string> kept;
  for (std::size_t i = 1; i < all.size(); ++i) {
    if (all[i] == "--compare")
      ++i;
    else if (!all[i].starts_with("--compare=") && !all[i].starts_with("--json"))
      kept.push_back(all[i]);
  }
  kept.emplace_back("--json");
  return kept;
}

std::string quoted(const std::string& text) {
  std::string safe = "'";
  for (const char c : text) safe += c == '\'' ? std::string("'\\''") : std::string{c};
  return safe + "'";
}

/// The program's output, as JSON.
Json document_of(const std::string& program, const std::vector<std::string>& arguments) {
  std::string command = quoted(program);
  for (const std::string& argument : arguments) command += ' ' + quoted(argument);
  const auto close = [](std::FILE* pipe) { return ::pclose(pipe); };
  std::unique_ptr<std::FILE, decltype(close)> pipe(::popen((command + " 2>/dev/null").c_str(), "r"),
                                                   close);
  std::string text;
  if (pipe != nullptr) {
    std::array<char, 4096> buffer{};
    for (std::size_t n = 0; (n = std::fread(buffer.data(), 1, buffer.size(), pipe.get())) > 0;)
      text.append(buffer.data(), n);
  }
  Json document = Json::parse(text, nullptr, false);
  if (document.is_object() && document.contains("plans")) return document;
  const bool told = document.is_object() && document.contains("error");
  throw Error(ErrorKind::kBadInput,
              fmt::format("--compare is {}; its `bench` fails{}", program,
                          told ? ": " + document["error"].value("message", "") : ""));
}

/// The times of each plan, by its name.
using Times = std::map<std::string, std::vector<double>>;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

Json build_json(const std::string& program, const Json& last, const Times& times) {
  Json plans = Json::array();
  for (const Json& plan : last["plans"]) {
    const std::vector<double>& ms = times.at(plan["name"]);
    plans.push_back({{"name", plan["name"]},
                     {"plan", plan["plan"]},
                     {"ms", median(ms)},
                     {"rounds_ms", ms},
                     {"verified", plan["verified"]}});
  }
  return {{"program", program}, {"plans", std::move(plans)}};
}

}  // namespace

bool is_build(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error) && ::access(path.c_str(), X_OK) == 0;
}

Json compare_builds(const std::string& other) {
  std::error_code error;
  const std::array<std::string, 2> programs{
      std::filesystem::read_symlink("/proc/self/exe", error).string(), other};
  const std::vector<std::string> arguments = own_arguments();
  std::array<Times, 2> times;
  std::array<Json, 2> last;
  Progress progress("timing two builds");
  for (int round = 0; round < kRounds; ++round) {
    for (std::size_t i = 0; i < programs.size(); ++i) {
      // Who is first changes with the round.
      const std::size_t build = (i + static_cast<std::size_t>(round)) % programs.size();
      last[build] = document_of(programs[build], arguments);
      for (const Json& plan : last[build]["plans"])
        times[build][plan["name"]].push_back(plan["ms"].get<double>());
      progress.update(2 * static_cast<std::size_t>(round) + i + 1, 2 * kRounds, "");
    }
  }
  Json ratios = Json::object();
  for (const auto& [name, ms] : times[1])
    if (const auto own = times[0].find(name); own != times[0].end())
      ratios[name] = median(ms) / median(own->second);
  return {
      {"operator", last[0]["operator"]},
      {"device", last[0]["device"]},
      {"model", last[0]["model"]},
      {"problem", last[0]["problem"]},
      {"builds",
       {build_json(programs[0], last[0], times[0]), build_json(programs[1], last[1], times[1])}},
      {"ratios", std::move(ratios)}};
}

void print_builds(const Json& document) {
  Table table({"build", "plan", "ms", "correct"});
  for (const Json& build : document["builds"])
    for (const Json& plan : build["plans"])
      table.row({build["program"], plan["name"], fmt::format("{:.4f}", plan["ms"].get<double>()),
                 plan["verified"].get<bool>() ? "yes" : "NO"});
  put(table.text());
  for (const auto& [name, ratio] : document["ratios"].items())
    say("{}: the other build takes {:.3f} of this one's time", name, ratio.get<double>());
}

}  // namespace wyvern::cli
