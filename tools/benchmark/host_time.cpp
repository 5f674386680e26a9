// What a caller waits for besides the kernels: the first call with nothing cached, the first call
// of a process with a warm cache, and the host's share of every later call. On the best device and
// the CPU.
//
//   build/bin/host_time [--benchmark_filter=REGEX]
#include <wyvern/runtime.hpp>

#include <benchmark/benchmark.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>

#include "cache/cache.hpp"
#include "compiler/compiler.hpp"
#include "runtime/devices/device_impl.hpp"
#include "tools/benchmark/small_launch.hpp"

namespace {

using namespace wyvern;
using benchmarks::Launch;
using benchmarks::small_problem;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// A folder that goes with its owner.
class ScratchFolder {
 public:
  ScratchFolder()
      : path_(std::filesystem::temp_directory_path() /
              ("wyvern-host-time-" + std::to_string(getpid()) + "-" + std::to_string(next_++))) {}
  ~ScratchFolder() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  static inline int next_ = 0;
  std::filesystem::path path_;
};

Runtime runtime_over(const std::filesystem::path& folder) {
  return Runtime({.cache = std::make_shared<Cache>(folder), .plans = nullptr, .compile_jobs = 0});
}

/// Prepares and runs once; the memory is there before the clock starts.
double first_call_seconds(const Device& device, const std::filesystem::path& cache) {
  const Problem problem = small_problem();
  constexpr std::size_t kWorkspace = std::size_t{64} << 20;  // more than one chunk needs
  const Launch launch(device, problem, kWorkspace);
  const Clock::time_point start = Clock::now();
  Runtime runtime = runtime_over(cache);
  const Operator op = runtime.prepare(device, problem);
  launch.run(op);
  device.synchronize();
  return seconds_since(start);
}

void first_call_cold(benchmark::State& state, const Device& device) {
  for (auto _ : state) {
    const ScratchFolder cache;
    state.SetIterationTime(first_call_seconds(device, cache.path()));
  }
}

void first_call_warm(benchmark::State& state, const Device& device) {
  const ScratchFolder cache;
  first_call_seconds(device, cache.path());
  for (auto _ : state) state.SetIterationTime(first_call_seconds(device, cache.path()));
}

/// What a later prepare() of a problem costs whose kernels are loaded.
void prepare_loaded(benchmark::State& state, const Device& device) {
  const ScratchFolder cache;
  const Problem problem = small_problem();
  Runtime runtime = runtime_over(cache.path());
  const Operator first = runtime.prepare(device, problem);
  for (auto _ : state) benchmark::DoNotOptimize(runtime.prepare(device, problem));
}

/// On the CPU a launch runs the kernels, so this is the whole call there.
void launch_host_time(benchmark::State& state, const Device& device) {
  constexpr int kBatch = 32;  // few enough that a GPU's launch queue never fills
  const ScratchFolder cache;
  const Problem problem = small_problem();
  Runtime runtime = runtime_over(cache.path());
  const Operator op = runtime.prepare(device, problem);
  const Launch launch(device, problem, op.workspace_bytes());
  launch.run(op);
  device.synchronize();
  for (auto _ : state) {
    const Clock::time_point start = Clock::now();
    for (int i = 0; i < kBatch; ++i) launch.run(op);
    state.SetIterationTime(seconds_since(start) / kBatch);
    device.synchronize();
  }
}

void add(const Device& device) {
  const std::string& name = device.info().name;
  benchmark::RegisterBenchmark((name + "/first_call_cold").c_str(), first_call_cold, device)
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond)
      ->Iterations(3);
  benchmark::RegisterBenchmark((name + "/first_call_warm").c_str(), first_call_warm, device)
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond)
      ->Iterations(10);
  benchmark::RegisterBenchmark((name + "/prepare_loaded").c_str(), prepare_loaded, device)
      ->Unit(benchmark::kMicrosecond)
      ->Iterations(200000);
  benchmark::RegisterBenchmark((name + "/launch").c_str(), launch_host_time, device)
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond)
      ->Iterations(device.impl().host_memory() ? 2 : 200);
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  const Device best = Device::best();
  add(best);
  const Device host = Device::open("cpu");
  if (best.info().name != host.info().name) {
    const std::string problem = compiler_problem(host.impl().target().device);
    if (problem.empty())
      add(host);
    else
      std::fprintf(stderr, "the CPU is left out: %s\n", problem.c_str());
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
