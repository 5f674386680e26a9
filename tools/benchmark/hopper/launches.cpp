// What a launch costs: the pause between two kernels of which the second needs the first, and empty
// kernels, in a stream and in a graph, with and without programmatic dependent launch.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "tools/benchmark/hopper/bench.hpp"

namespace wyvern::hopper {
namespace {

Program program() {
  return {"launches", R"CUDA(
/// Each block takes what another block of the launch before left, adds one, stays for a while and
/// leaves it; and notes when it began (after what came before it was done) and when it ended.
template <bool PROGRAMMATIC>
DEVICE void link(u32* values, u64* times, int index, int stay) {
  if constexpr (PROGRAMMATIC) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
  }
  const u64 begin = nanoseconds_now();
  const u32 blocks = gridDim.x;
  __shared__ u32 taken;
  if (threadIdx.x == 0) {
    volatile u32* from = values + (index + 1) % 2 * blocks;
    taken = from[(blockIdx.x + 1) % blocks];
  }
  while (nanoseconds_now() - begin < stay) {}
  __syncthreads();
  if (threadIdx.x == 0) {
    values[index % 2 * blocks + blockIdx.x] = taken + 1;
    times[(u64(index) * blocks + blockIdx.x) * 2] = begin;
    times[(u64(index) * blocks + blockIdx.x) * 2 + 1] = nanoseconds_now();
  }
}
extern "C" __global__ void plain(u32* values, u64* times, int index, int stay) {
  link<false>(values, times, index, stay);
}
extern "C" __global__ void programmatic(u32* values, u64* times, int index, int stay) {
  link<true>(values, times, index, stay);
}
extern "C" __global__ void empty(u32* count) {}
extern "C" __global__ void empty_programmatic(u32* count) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
)CUDA"};
}

constexpr int kLinks = 101;
constexpr int kStayNs = 5000;

struct Size {
  const char* name;
  unsigned threads;
  unsigned shared_bytes;
};

/// Nanoseconds from the last end of one launch to the first beginning of the next.
std::vector<double> pauses(const std::vector<std::uint64_t>& times, unsigned blocks) {
  std::vector<double> found;
  for (int link = 10; link < kLinks; ++link) {
    std::uint64_t ended = 0;
    std::uint64_t begun = ~std::uint64_t{0};
    for (unsigned b = 0; b < blocks; ++b) {
      ended = std::max(ended, times[(std::size_t(link - 1) * blocks + b) * 2 + 1]);
      begun = std::min(begun, times[(std::size_t(link) * blocks + b) * 2]);
    }
    found.push_back(static_cast<double>(static_cast<std::int64_t>(begun - ended)));
  }
  return found;
}

void run_pauses(const Report& report, const Size& size, bool graph, bool programmatic) {
  const unsigned blocks = open_gpu().multiprocessors;
  const Kernel link = kernel(program(), programmatic ? "programmatic" : "plain", size.shared_bytes);
  std::vector<std::uint32_t> start(2 * std::size_t{blocks});
  for (unsigned b = 0; b < blocks; ++b) start[blocks + b] = b * 1000;
  const Memory times(std::size_t{kLinks} * blocks * 2 * sizeof(std::uint64_t));
  const auto values = upload(start);
  const auto launch_all = [&] {
    for (int i = 0; i < kLinks; ++i)
      launch(link, {blocks, size.threads, size.shared_bytes, programmatic && i > 0},
             values->address(), times.address(), i, kStayNs);
  };
  if (graph) {
    Recording recording;
    launch_all();
    recording.finish();
    recording.replay();  // the first replay uploads the graph
    synchronize();
    values->write(start.data(), start.size() * sizeof(std::uint32_t));
    recording.replay();
    synchronize();
  } else {
    launch_all();
    synchronize();
  }
  const auto left = download<std::uint32_t>(*values, 2 * std::size_t{blocks});
  const std::vector<double> found =
      pauses(download<std::uint64_t>(times, std::size_t{kLinks} * blocks * 2), blocks);
  double sum = 0;
  for (const double pause : found) sum += pause;
  Row row{"launches",
          fmt::format("pause between dependent kernels, {}, {}{}", size.name,
                      graph ? "graph" : "stream", programmatic ? ", programmatic" : ""),
          sum / static_cast<double>(found.size()) / 1000,
          "us",
          sample_of(found).spread_percent,
          programmatic ? "0.5 to 1" : "1 to 2",
          ""};
  for (unsigned b = 0; b < blocks; ++b)
    row.ok = row.ok && left[(kLinks - 1) % 2 * blocks + b] == (b + kLinks) % blocks * 1000 + kLinks;
  row.check = row.ok ? "values handed over" : "values handed over differ";
  report(row);
}

void run_empty(const Report& report, unsigned blocks, unsigned threads, bool graph,
               bool programmatic) {
  constexpr int kCount = 1000;
  const Kernel empty = kernel(program(), programmatic ? "empty_programmatic" : "empty");
  const auto launch_all = [&] {
    for (int i = 0; i < kCount; ++i)
      launch(empty, {blocks, threads, 0, programmatic && i > 0}, DevicePointer{0});
  };
  Row row{"launches",
          fmt::format("empty kernel of {} x {}, {}{}", blocks, threads, graph ? "graph" : "stream",
                      programmatic ? ", programmatic" : ""),
          0,
          "us a kernel",
          0,
          graph ? "1 to 1.5" : "2 to 3",
          ""};
  Sample sample;
  if (graph) {
    Recording recording;
    launch_all();
    recording.finish();
    sample = measure_ms([&recording] { recording.replay(); });
  } else {
    sample = measure_ms(launch_all);
  }
  row.value = sample.median * 1000 / kCount;
  row.spread_percent = sample.spread_percent;
  report(row);
}

void run_host(const Report& report) {
  constexpr int kCount = 200;  // fewer than the stream's queue holds
  const Kernel empty = kernel(program(), "empty");
  std::vector<double> times;
  for (int round = 0; round < 10; ++round) {
    synchronize();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kCount; ++i) launch(empty, {1, 32}, DevicePointer{0});
    const std::chrono::duration<double, std::micro> passed =
        std::chrono::steady_clock::now() - start;
    times.push_back(passed.count() / kCount);
  }
  synchronize();
  const Sample sample = sample_of(times);
  report({"launches", "host time of a launch", sample.median, "us", sample.spread_percent, "1 to 2",
          ""});
}

}  // namespace

std::vector<Program> launch_programs() { return {program()}; }

void run_launches(const Report& report) {
  const unsigned blocks = open_gpu().multiprocessors;
  for (const Size& size :
       {Size{"128 threads", 128, 0}, Size{"512 threads and 200 KB", 512, 200 * 1024}})
    for (const bool graph : {false, true})
      for (const bool programmatic : {false, true}) run_pauses(report, size, graph, programmatic);
  for (const bool graph : {false, true})
    for (const bool programmatic : {false, true}) {
      run_empty(report, 1, 32, graph, programmatic);
      run_empty(report, blocks, 512, graph, programmatic);
    }
  run_host(report);
}

}  // namespace wyvern::hopper
