#include "runtime/devices/cpu/rates.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/base/parallel.hpp"
#include "runtime/base/printable.hpp"

namespace wyvern {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_of(const std::function<void()>& work) {
  const Clock::time_point start = Clock::now();
  work();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Runs work(thread) on every thread at once.
void on_threads(int threads, const std::function<void(int)>& work) {
  in_parallel(static_cast<std::size_t>(threads), static_cast<unsigned>(threads),
              [&](std::size_t i) { work(static_cast<int>(i)); });
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

/// Updates data in place, as often as `passes`.
template <int Lanes>
[[gnu::always_inline]] inline void update(float* data, std::size_t count, std::size_t passes) {
  using Vector [[gnu::vector_size(Lanes * sizeof(float))]] = float;
  for (std::size_t pass = 0; pass < passes; ++pass) {
    for (std::size_t i = 0; i < count; i += Lanes) {
      Vector lanes;
      std::memcpy(&lanes, data + i, sizeof(lanes));
      lanes = lanes + 1.0F;
      std::memcpy(data + i, &lanes, sizeof(lanes));
    }
    asm volatile("" : : "r"(data) : "memory");  // each pass writes
  }
}

#if defined(__x86_64__)
[[gnu::target("avx512f")]] void update_512(float* data, std::size_t count, std::size_t passes) {
  update<16>(data, count, passes);
}
[[gnu::target("avx2")]] void update_256(float* data, std::size_t count, std::size_t passes) {
  update<8>(data, count, passes);
}
#endif

void widest_update(float* data, std::size_t count, std::size_t passes) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return update_512(data, count, passes);
  if (__builtin_cpu_supports("avx2")) return update_256(data, count, passes);
#endif
  update<4>(data, count, passes);
}

/// Bytes read and written a second by repeated updates of the same data, for each size: its bytes
/// on all threads, and the rate.
std::vector<std::pair<double, double>> cached_rates(int threads) {
  constexpr std::size_t kLeast = std::size_t{16} << 10,
                        kMost = std::size_t{64} << 20;  // per thread
  std::vector<std::vector<float>> data(static_cast<std::size_t>(threads));
  on_threads(threads,
             [&](int i) { data[static_cast<std::size_t>(i)].resize(kMost / sizeof(float)); });
  std::vector<std::pair<double, double>> rates;
  for (std::size_t bytes = kLeast; bytes <= kMost; bytes *= 4) {
    double best = 1e9;
    for (int run = 0; run < 5; ++run)
      best = std::min(best, seconds_of([&] {
                        on_threads(threads, [&](int i) {
                          widest_update(data[static_cast<std::size_t>(i)].data(),
                                        bytes / sizeof(float), kMost / bytes);
                        });
                      }));
    rates.emplace_back(static_cast<double>(bytes) * threads,
                       2.0 * static_cast<double>(kMost) * threads / best);
  }
  return rates;
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

}  // namespace

Rates measure_cpu_rates(int threads) {
  return {.bytes_per_s = copy_rate(threads),
          .matrix_flops_per_s = 0,
          .scalar_flops_per_s = fma_rate(threads),
          .cached = cached_rates(threads),
          .basis = fmt::format("memory, cache and fp32 FMA rates of {}, measured in this run",
                               count_text(threads, "thread"))};
}

}  // namespace wyvern
