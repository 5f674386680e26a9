#include "tools/wyvern/floor.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace wyvern::cli {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_of(const std::function<void()>& work) {
  const Clock::time_point start = Clock::now();
  work();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Runs work(thread) on every thread at once.
void on_threads(int threads, const std::function<void(int)>& work) {
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(work, i);
  work(0);
  for (std::thread& thread : others) thread.join();
}

/// Bytes read and written a second by copies far larger than a cache.
double copy_rate(int threads) {
  constexpr std::size_t kBytes = std::size_t{64} << 20;  // per thread
  std::vector<std::unique_ptr<char[]>> from, to;
  for (int i = 0; i < threads; ++i) {
    from.push_back(std::make_unique<char[]>(kBytes));
    to.push_back(std::make_unique<char[]>(kBytes));
  }
  double best = 1e9;
  for (int run = 0; run < 10; ++run)
    best = std::min(best, seconds_of([&] {
                      on_threads(threads, [&](int i) {
                        const auto t = static_cast<std::size_t>(i);
                        std::memcpy(to[t].get(), from[t].get(), kBytes);
                      });
                    }));
  return 2.0 * static_cast<double>(kBytes) * threads / best;
}

constexpr int kChains = 10;  // cover the latency of two FMA units and fit 16 registers
constexpr long kSteps = 500'000;

/// Independent multiply-adds in registers of `Lanes` floats; returns how many operations that were.
template <int Lanes>
[[gnu::always_inline]] inline double multiply_add(float seed) {
  using Vector [[gnu::vector_size(Lanes * sizeof(float))]] = float;
  Vector sums[kChains] = {};
  for (Vector& sum : sums) asm volatile("" : "+m"(sum));  // equal chains would be made one
  const Vector a = Vector{} + seed;
  const Vector b = Vector{} + (1.0F - seed);
  for (long step = 0; step < kSteps; ++step)
    for (Vector& sum : sums) sum = sum * a + b;
  for (Vector& sum : sums) asm volatile("" : : "m"(sum));  // the results count as used
  return 2.0 * Lanes * kChains * kSteps;
}

#if defined(__x86_64__)
[[gnu::target("avx512f")]] double multiply_add_512(float seed) { return multiply_add<16>(seed); }
[[gnu::target("avx2,fma")]] double multiply_add_256(float seed) { return multiply_add<8>(seed); }
#endif

/// With the widest vectors of this processor.
double widest_multiply_add(float seed) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return multiply_add_512(seed);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return multiply_add_256(seed);
#endif
  return multiply_add<4>(seed);
}

/// fp32 operations a second.
double fma_rate(int threads) {
  double best = 0;
  for (int run = 0; run < 100; ++run) {
    std::vector<double> operations(static_cast<std::size_t>(threads));
    const double seconds = seconds_of([&] {
      on_threads(threads, [&](int i) {
        operations[static_cast<std::size_t>(i)] =
            widest_multiply_add(0.5F + 0.01F * static_cast<float>(i % 8));
      });
    });
    best = std::max(best, operations.front() * threads / seconds);
  }
  return best;
}

/// Dense bf16 operations a clock of one multiprocessor.
double operations_per_clock(std::string_view arch) {
  constexpr std::array<std::pair<std::string_view, double>, 5> kRates{
      {{"sm_100", 8192}, {"sm_103", 8192}, {"sm_90", 4096}, {"sm_80", 2048}, {"", 1024}}};
  for (const auto& [prefix, rate] : kRates)
    if (arch.starts_with(prefix)) return rate;
  return 1024;
}

/// How much slower than bf16 the products of the problem's dtype and floor are on tensor cores.
double dtype_factor(const Problem& problem) {
  if (problem.dtype != DType::fp32) return 1;
  switch (precision_floor(problem)) {
    case Precision::tf32: return 2;
    case Precision::tf32x3: return 6;  // three passes
    case Precision::ieee: return 0;    // no tensor cores
  }
  return 1;
}

Peak cuda_peak(const DeviceInfo& info, const Problem& problem) {
  const bool h200 = info.model.find("H200") != std::string::npos;
  const double clock_hz = info.clock_ghz * 1e9;
  const double dense = h200 ? 780e12 : operations_per_clock(info.arch) * info.units * clock_hz;
  const double factor = dtype_factor(problem);
  const double scalar = 256.0 * info.units * clock_hz;  // 128 fp32 FMA units a multiprocessor
  return {h200 ? 4.25e12 : info.peak_bytes_per_s, factor == 0 ? scalar : dense / factor,
          h200 ? "measured on an H200" : "the driver's figures and the architecture's rates"};
}

}  // namespace

Peak device_peak(const Device& device, const Problem& problem) {
  const DeviceInfo& info = device.info();
  if (info.cuda) return cuda_peak(info, problem);
  return {copy_rate(info.units), fma_rate(info.units),
          fmt::format("copy and fp32 FMA rates of {} threads, measured in this run", info.units)};
}

double floor_time(const Work& work, const Peak& peak) {
  const double memory = peak.bytes_per_s > 0 ? work.bytes / peak.bytes_per_s : 0;
  const double compute = peak.flops_per_s > 0 ? work.flops / peak.flops_per_s : 0;
  return std::max(memory, compute);
}

}  // namespace wyvern::cli
