#include "tools/benchmark/hopper/bench.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

namespace wyvern::hopper {
namespace {

constexpr int kLaunches = 9;

double quantile(const std::vector<double>& sorted, double part) {
  return sorted[static_cast<std::size_t>(
      std::lround(part * static_cast<double>(sorted.size() - 1)))];
}

Program clock_program() {
  return {"clock", R"CUDA(
extern "C" __global__ void compute(float* out, int iterations, u64* clocks, u64* nanoseconds) {
  float x = threadIdx.x;
  const u64 ns = nanoseconds_now(), start = clocks_now();
  for (int i = 0; i < iterations; ++i) x = x * 0.999f + 0.5f;
  clocks[blockIdx.x] = clocks_now() - start;
  nanoseconds[blockIdx.x] = nanoseconds_now() - ns;
  out[blockIdx.x * blockDim.x + threadIdx.x] = x;
}
)CUDA"};
}

}  // namespace

const std::vector<Subject>& subjects() {
  static const std::vector<Subject> list{
      {"special", special_function_programs, run_special_functions},
      {"copies", copy_programs, run_copies},
      {"synchronization", synchronization_programs, run_synchronization},
      {"tensor_cores", tensor_core_programs, run_tensor_cores},
      {"inverse", inverse_programs, run_inverse},
      {"gram", gram_programs, run_gram},
      {"launches", launch_programs, run_launches},
  };
  return list;
}

Sample sample_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const double median = quantile(values, 0.5);
  const double apart = quantile(values, 0.75) - quantile(values, 0.25);
  return {median, median == 0 ? 0 : 100 * apart / median};
}

Sample measure_clocks(const Memory& clocks, unsigned blocks, const std::function<void()>& run) {
  std::vector<double> medians;
  for (int i = 0; i <= kLaunches; ++i) {
    run();
    const auto counts = download<std::uint64_t>(clocks, blocks);
    const std::vector<double> values(counts.begin(), counts.end());
    if (i > 0) medians.push_back(sample_of(values).median);  // the first warms up
  }
  return sample_of(medians);
}

Sample measure_ms(const std::function<void()>& run) {
  const Stopwatch watch;
  std::vector<double> times;
  for (int i = 0; i <= kLaunches; ++i) {
    watch.start();
    run();
    const double ms = watch.stop_ms();
    if (i > 0) times.push_back(ms);
  }
  return sample_of(times);
}

std::vector<Program> clock_programs() { return {clock_program()}; }

double measure_sm_clock_ghz() {
  const unsigned blocks = open_gpu().multiprocessors;
  constexpr unsigned kThreads = 512;
  const Kernel compute = kernel(clock_program(), "compute");
  const Memory out(blocks * kThreads * sizeof(float));
  const Memory clocks(blocks * sizeof(std::uint64_t));
  const Memory nanoseconds(blocks * sizeof(std::uint64_t));
  launch(compute, {blocks, kThreads}, out.address(), 5'000'000, clocks.address(),
         nanoseconds.address());
  const auto counted = download<std::uint64_t>(clocks, blocks);
  const auto passed = download<std::uint64_t>(nanoseconds, blocks);
  std::vector<double> rates;
  for (unsigned i = 0; i < blocks; ++i)
    rates.push_back(static_cast<double>(counted[i]) / static_cast<double>(passed[i]));
  return sample_of(rates).median;
}

float Random::uniform(float low, float high) {
  state_ = state_ * 6364136223846793005ULL + 1442695040888963407ULL;
  const auto bits = static_cast<std::uint32_t>(state_ >> 40);  // 24 bits: exact in a float
  return low + (high - low) * static_cast<float>(bits) / 16777216.0F;
}

std::uint32_t hash(std::uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352dU;
  x ^= x >> 15;
  x *= 0x846ca68bU;
  return x ^ (x >> 16);
}

std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float from_bf16(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

void set_check(Row& row, double error, double bound) {
  row.ok = std::isfinite(error) && error <= bound;
  row.check = fmt::format("{:.1e} of {:.0e}", error, bound);
}

}  // namespace wyvern::hopper
