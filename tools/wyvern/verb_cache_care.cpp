#include <wyvern/device.hpp>
#include <wyvern/problem.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "autotune/protocol.hpp"
#include "cache/cache.hpp"
#include "cache/care.hpp"
#include "runtime/devices/device_impl.hpp"
#include "runtime/plan.hpp"
#include "tools/wyvern/cache_rows.hpp"
#include "tools/wyvern/command.hpp"
#include "tools/wyvern/output.hpp"
#include "tools/wyvern/selection.hpp"

namespace wyvern::cli {
namespace {

int verify(bool json) {
  std::string path;
  const Verification result = with_cache([&](const Cache& cache) {
    path = cache.file().string();
    return verify_rows(cache);
  });
  if (json) {
    print_document({{"path", path},
                    {"artifacts", result.artifacts},
                    {"measurements", result.measurements},
                    {"winners", result.winners},
                    {"superseded", result.superseded},
                    {"damage", result.damage},
                    {"verified", result.damage.empty()}});
  } else {
    for (const std::string& sentence : result.damage) say("{}", sentence);
    say("{}, {}, {} and {}: {}", count_text(result.artifacts, "artifact"),
        count_text(result.measurements, "measurement"), count_text(result.winners, "winner"),
        count_text(result.superseded, "superseded winner"),
        result.damage.empty() ? "all as they were stored"
                              : "some are damaged; `wyvern cache doctor` says what to do");
  }
  return result.damage.empty() ? kDone : kCheckFailed;
}

int gc(const std::optional<std::string>& max_bytes, bool json) {
  const std::int64_t limit = parse_bytes(
      "--max-bytes", require(max_bytes, "--max-bytes", "a size such as 500000000, 500M or 2G"));
  std::string path;
  const Collection done = with_cache([&](Cache& cache) {
    path = cache.file().string();
    return collect(cache, limit);
  });
  const bool reached = done.bytes <= limit;
  if (json) {
    print_document({{"path", path},
                    {"max_bytes", limit},
                    {"deleted", done.deleted},
                    {"deleted_bytes", done.deleted_bytes},
                    {"bytes_before", done.bytes_before},
                    {"bytes", done.bytes},
                    {"reached", reached}});
    return kDone;
  }
  say("deleted {}; the file has {}, before {}", count_text(done.deleted, "artifact"),
      bytes_text(static_cast<double>(done.bytes)),
      bytes_text(static_cast<double>(done.bytes_before)));
  if (!reached)
    say("that is above {}: only winners and measurements are left, which stay",
        bytes_text(static_cast<double>(limit)));
  return kDone;
}

/// Why this build cannot use the winner's plan on this machine; empty: it can.
std::string winner_problem(const WinnerRow& row, const std::vector<DeviceInfo>& devices) {
  const auto plan = plan_from_json(row.plan);
  if (!plan) return "its plan names templates that this build does not have";
  const auto device = std::ranges::find(devices, row.device, &DeviceInfo::key);
  if (device == devices.end() || row.problem.empty()) return "";
  try {
    const Problem problem = problem_from(parsed(row.problem));
    validate(problem);
    return plan_problem(problem, *plan, Device::open(device->name).impl().target());
  } catch (const std::exception& error) {
    return fmt::format("its problem is not one of this build: {}", error.what());
  }
}

int doctor(bool json) {
  std::vector<DeviceInfo> devices = list_devices();
  std::erase_if(devices, [](const DeviceInfo& device) { return !device.problem.empty(); });
  std::map<std::string, std::string> drivers;  // by device key
  for (const DeviceInfo& device : devices) drivers[device.key] = device.driver;
  const auto findings = diagnose(Cache::default_directory(), drivers, [&](const WinnerRow& row) {
    return winner_problem(row, devices);
  });
  bool healthy = true;
  Json list = Json::array();
  for (const Finding& finding : findings) {
    healthy = healthy && finding.weight < Finding::Weight::warning;
    list.push_back({{"check", finding.check},
                    {"weight", to_string(finding.weight)},
                    {"message", finding.message},
                    {"fix", finding.fix}});
  }
  if (json) {
    print_document({{"directory", Cache::default_directory().string()},
                    {"findings", std::move(list)},
                    {"healthy", healthy}});
  } else {
    for (const Finding& finding : findings) {
      say("{:<8} {}: {}", to_string(finding.weight), finding.check, finding.message);
      if (!finding.fix.empty()) say("{:<8} what to do: {}", "", finding.fix);
    }
    say("{}", healthy ? "nothing is wrong" : "something is wrong");
  }
  return healthy ? kDone : kCheckFailed;
}

}  // namespace

void add_cache_care(Command& command, CLI::App& cache) {
  command.action(cache, "verify", "is every row as it was stored?", verify);
  const auto max_bytes = std::make_shared<std::optional<std::string>>();
  CLI::App& collected =
      command.action(cache, "gc", "delete compiled kernels, least recently used first",
                     [max_bytes](bool json) { return gc(*max_bytes, json); });
  collected.add_option("--max-bytes", *max_bytes,
                       "the largest size of the file, such as 500M; winners and measurements stay");
  command.action(cache, "doctor", "check the cache and say how to fix it", doctor);
}

}  // namespace wyvern::cli
