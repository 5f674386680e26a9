// What tools/benchmark/overhead asks of processes of their own. Each prints a line of JSON.
//
//   overhead_worker first-call DEVICE forward|backward|both CACHE
//   overhead_worker write CACHE FIRST COUNT
//   overhead_worker count CACHE FIRST COUNT
#include <wyvern/runtime.hpp>

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cache/cache.hpp"
#include "tools/benchmark/small_launch.hpp"

namespace {

using namespace wyvern;
using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

/// Prepares and runs once, then once more what is prepared. The device's context and the memory are
/// there before the clock starts.
int first_call(const std::string& name, const std::string& passes, const std::string& cache) {
  const Device device = Device::open(name);
  std::vector<Problem> problems;
  if (passes != "backward") problems.push_back(benchmarks::small_problem());
  if (passes != "forward") problems.push_back(benchmarks::small_problem(Pass::backward));
  constexpr std::size_t kWorkspace = std::size_t{128} << 20;  // more than one chunk needs
  std::vector<std::unique_ptr<benchmarks::Launch>> launches;
  for (const Problem& problem : problems)
    launches.push_back(std::make_unique<benchmarks::Launch>(device, problem, kWorkspace));

  const Clock::time_point start = Clock::now();
  Runtime runtime({.cache = std::make_shared<Cache>(cache), .plans = nullptr, .compile_jobs = 0});
  // As Python does where gradients are to follow.
  std::thread ahead;
  if (problems.size() == 2)
    ahead = std::thread([&] { runtime.compile_ahead(device, problems[1]); });
  std::vector<Operator> prepared;
  for (std::size_t i = 0; i < problems.size(); ++i) {
    prepared.push_back(runtime.prepare(device, problems[i]));
    launches[i]->run(prepared.back());
  }
  device.synchronize();
  const double first = ms_since(start);
  if (ahead.joinable()) ahead.join();

  const Clock::time_point again = Clock::now();
  std::set<std::pair<std::string, std::string>> kernels;  // each once: q and k share some
  for (std::size_t i = 0; i < problems.size(); ++i) {
    launches[i]->run(prepared[i]);
    for (const PlanStep& step : prepared[i].plan())
      kernels.emplace(step.template_id, step.config.to_string());
  }
  device.synchronize();
  fmt::print("{{\"ms\": {:.3f}, \"again_ms\": {:.3f}, \"compiled\": {}, \"kernels\": {}}}\n", first,
             ms_since(again), runtime.compiled(), kernels.size());
  return 0;
}

ArtifactRow artifact(std::uint64_t number) {
  ArtifactRow row;
  row.key = fmt::format("{:064x}", number);
  row.template_id = "none.benchmark";
  row.target = "none";
  row.config = "BT=64";
  row.metadata = "{}";
  row.code = std::string(2000, static_cast<char>('a' + number % 26));
  return row;
}

MeasurementRow measurement(std::uint64_t number) {
  MeasurementRow row;
  row.device = "benchmark";
  row.problem = fmt::format("problem {}", number);
  row.template_id = "none.benchmark";
  row.config = "BT=64";
  row.status = "ok";
  row.samples_us = {static_cast<double>(number), 1, 2, 3};
  row.median_us = 2;
  return row;
}

/// An artifact and a measurement for each number.
int write(const std::string& folder, std::uint64_t first, std::uint64_t count) {
  Cache cache(folder);
  std::uint64_t refused = 0;
  for (std::uint64_t i = first; i < first + count; ++i) {
    if (!cache.store_artifact(artifact(i))) ++refused;
    if (!cache.store_measurement(measurement(i))) ++refused;
  }
  fmt::print("{{\"rows\": {}, \"refused\": {}}}\n", 2 * count, refused);
  return 0;
}

/// How many of the rows that write() stores are there as they were stored.
int count(const std::string& folder, std::uint64_t first, std::uint64_t count) {
  const Cache cache(folder);
  std::uint64_t found = 0;
  for (std::uint64_t i = first; i < first + count; ++i) {
    const auto code = cache.find_artifact(artifact(i).key);
    if (code && code->code == artifact(i).code) ++found;
    const auto rows = cache.measurements("benchmark", measurement(i).problem);
    if (rows.size() == 1 && rows[0].samples_us == measurement(i).samples_us) ++found;
  }
  fmt::print("{{\"rows\": {}, \"found\": {}}}\n", 2 * count, found);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.size() == 4) {
    const std::string& role = arguments[0];
    if (role == "first-call") return first_call(arguments[1], arguments[2], arguments[3]);
    const std::uint64_t first = std::stoull(arguments[2]);
    const std::uint64_t rows = std::stoull(arguments[3]);
    if (role == "write") return write(arguments[1], first, rows);
    if (role == "count") return count(arguments[1], first, rows);
  }
  fmt::print(stderr,
             "usage: overhead_worker first-call DEVICE PASS CACHE | "
             "write|count CACHE FIRST COUNT\n");
  return 2;
}
