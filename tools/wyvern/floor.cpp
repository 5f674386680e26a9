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
  for (int run = 0; run < 4; ++run)
    best = std::min(best, seconds_of([&] {
             on_threads(threads, [&](int i) {
               const auto t = static_cast<std::size_t>(i);
               std::memcpy(to[t].get(), from[t].get(), kBytes);
             });
           }));
  return 2.0 * static_cast<double>(kBytes) * threads / best;
}

using Vector = float __attribute__((vector_size(64)));
constexpr int kChains = 10;  // covers the latency of two FMA units
constexpr long kSteps = 2'000'000;

/// Independent multiply-adds in registers, compiled for each width of vector unit.
#if defined(__x86_64__)
__attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#endif
float multiply_add(float seed) {
  std::array<Vector, kChains> sums{};
  const Vector a = Vector{} + seed;
  const Vector b = Vector{} + (1.0F - seed);
  for (long step = 0; step < kSteps; ++step)
    for (Vector& sum : sums) sum = sum * a + b;
  float total = 0;
  for (const Vector& sum : sums)
    for (int lane = 0; lane < 16; ++lane) total += sum[lane];
  return total;
}

/// fp32 operations a second.
double fma_rate(int threads) {
  std::vector<float> sink(static_cast<std::size_t>(threads));
  double best = 1e9;
  for (int run = 0; run < 3; ++run)
    best = std::min(best, seconds_of([&] {
             on_threads(threads, [&](int i) {
               sink[static_cast<std::size_t>(i)] = multiply_add(0.5F + 0.01F * static_cast<float>(i % 8));
             });
           }));
  volatile float kept = sink[0];
  static_cast<void>(kept);
  return 2.0 * 16 * kChains * kSteps * threads / best;
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
  const double dense =
      h200 ? 780e12 : operations_per_clock(info.arch) * info.units * clock_hz;
  const double factor = dtype_factor(problem);
  const double scalar = 256.0 * info.units * clock_hz;  // 128 fp32 FMA units a multiprocessor
  return {h200 ? 4.25e12 : info.peak_bytes_per_s, factor == 0 ? scalar : dense / factor,
          h200 ? "measured on an H200" : "the driver's figures and the architecture's rates"};
}

}  // namespace

Work forward_work(const Problem& p) {
  constexpr double kChunk = 64;
  const double tokens = static_cast<double>(p.B) * static_cast<double>(p.T);
  const auto H = static_cast<double>(p.H);
  const auto HV = static_cast<double>(p.HV);
  const auto K = static_cast<double>(p.K);
  const auto V = static_cast<double>(p.V);
  const auto size = [](DType type) { return static_cast<double>(size_of(type)); };
  const double state = static_cast<double>(p.N) * HV * K * V;
  Work work;
  work.bytes = tokens * (2 * H * K * size(p.dtype) + 2 * HV * V * size(p.dtype) +
                         HV * (size(p.beta_dtype) + size(p.g_dtype)));
  if (p.initial_state) work.bytes += state * size(p.state_dtype);
  if (p.output_final_state) work.bytes += state * size(DType::fp32);
  work.flops = tokens * HV *
               (6 * K * V + 4 * kChunk * V + 4 * kChunk * K * H / HV + 2 * kChunk * kChunk);
  return work;
}

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
