#include <wyvern/error.hpp>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "cache/cache.hpp"
#include "tools/wyvern/command.hpp"
#include "tools/wyvern/file.hpp"
#include "tools/wyvern/output.hpp"
#include "tools/wyvern/report.hpp"
#include "tools/wyvern/report_assets.hpp"
#include "tools/wyvern/selection.hpp"

namespace wyvern::cli {
namespace {

struct Flags {
  std::optional<std::string> output;
  std::string format = "html";
};

std::string text_of(const Json& document) {
  return document.dump(1, ' ', false, Json::error_handler_t::replace) + '\n';
}

int execute(const Flags& flags, bool json) {
  const std::string path = require(flags.output, "-o", "the file to write, such as report.html");
  const bool page = flags.format == "html";
  if (!page && flags.format != "benchmark" && flags.format != "trace")
    throw Error(ErrorKind::kBadInput,
                fmt::format("--format is '{}'; it must be html, benchmark or trace", flags.format));
  const Cache cache;
  const Json data = report_data(cache);
  const std::string text = page                          ? report_page(data)
                           : flags.format == "benchmark" ? text_of(benchmark_json(data))
                                                         : text_of(chrome_trace(data));
  write_file(path, std::array<std::string_view, 1>{text});
  const bool charts = page && !kReportCharts.empty();
  if (json)
    print_document({{"output", path},
                    {"format", flags.format},
                    {"bytes", text.size()},
                    {"problems", data["problems"].size()},
                    {"measurements", data["counts"]["measurements"]},
                    {"charts", charts}});
  else
    say("{}: {}, {}{}", path, count_text(std::ssize(data["problems"]), "problem"),
        bytes_text(static_cast<double>(text.size())),
        page && !charts ? "; without charts, since Chart.js was missing at the build" : "");
  return kDone;
}

}  // namespace

void add_report(Command& command) {
  const auto flags = std::make_shared<Flags>();
  CLI::App& verb =
      command.verb("report", "a page about all tunings: times, stages, tunables, failures",
                   [flags](bool json) { return execute(*flags, json); });
  verb.add_option("-o,--output", flags->output, "the file to write");
  verb.add_option("--format", flags->format,
                  "html (default), benchmark (Google Benchmark's JSON) or trace (Chrome's)");
}

}  // namespace wyvern::cli
