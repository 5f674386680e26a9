#include "autotune/statistics.hpp"

#include <algorithm>
#include <cmath>

namespace wyvern {
namespace {

/// Relative differences below the first are always a tie, those above the second never.
constexpr double kIndistinct = 0.01;
constexpr double kDistinct = 0.05;

/// A speed that changes by less during a window is steady.
constexpr double kSteady = 0.01;
constexpr std::size_t kMostWindows = 3;

/// A sample shorter than this is lost in the resolution of events and the cost of a graph launch.
constexpr double kLeastSampleUs = 50;
constexpr int kMostRepeats = 32;

/// Ratios of neighbours.
std::vector<double> ratios_of(std::span<const double> samples, std::span<const double> base) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < std::min(samples.size(), base.size()); ++i)
    if (base[i] > 0) ratios.push_back(samples[i] / base[i]);
  return ratios;
}

/// The 95% confidence interval of the median of the values' distribution.
struct Bounds {
  double low = 0, high = 0;
};
Bounds bounds_of_median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const auto count = static_cast<double>(values.size());
  const double outside = std::max(std::floor((count - 1.96 * std::sqrt(count)) / 2), 0.0);
  const auto rank = static_cast<std::size_t>(outside);
  return {values[rank], values[values.size() - 1 - rank]};
}

}  // namespace

double median_of(std::vector<double> values) {
  if (values.empty()) return 0;
  const std::size_t middle = values.size() / 2;
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(middle);
  std::nth_element(values.begin(), at, values.end());
  if (values.size() % 2 == 1) return *at;
  return (*at + *std::max_element(values.begin(), at)) / 2;
}

Timing summarize(std::span<const double> samples) {
  Timing timing;
  if (samples.empty()) return timing;
  std::vector<double> values(samples.begin(), samples.end());
  timing.median = median_of(values);
  for (double& value : values) value = std::fabs(value - timing.median);
  timing.spread = median_of(values);
  // 1.4826 MAD estimates a normal's sigma, 1.2533 sigma / sqrt(n) is the deviation of its median.
  timing.noise =
      2 * 1.4826 * 1.2533 * timing.spread / std::sqrt(static_cast<double>(samples.size()));
  return timing;
}

bool tied(const Timing& a, const Timing& b) {
  const double least = std::min(a.median, b.median);
  const double noise = std::max(a.noise, b.noise);
  return std::fabs(a.median - b.median) <=
         std::clamp(noise, kIndistinct * least, kDistinct * least);
}

bool tied_in_turn(std::span<const double> other, std::span<const double> fastest) {
  const std::vector<double> ratios = ratios_of(other, fastest);
  if (ratios.empty()) return false;
  const double excess = median_of(ratios) - 1;
  return excess <= kIndistinct || (excess <= kDistinct && bounds_of_median(ratios).low <= 1);
}

bool beats(std::span<const double> samples, std::span<const double> base) {
  const std::vector<double> ratios = ratios_of(samples, base);
  return !ratios.empty() && median_of(ratios) < 1 - kIndistinct &&
         bounds_of_median(ratios).high < 1;
}

double ratio_in_turn(std::span<const double> samples, std::span<const double> base) {
  return median_of(ratios_of(samples, base));
}

std::size_t steady_window(const std::function<void()>& take, const std::function<Timing()>& pace) {
  std::size_t best = 0;
  double least = 0;
  Timing before = pace();
  for (std::size_t window = 0; window < kMostWindows; ++window) {
    take();
    const Timing after = pace();
    const double slower = std::max(before.median, after.median);
    const double faster = std::min(before.median, after.median);
    const double change = faster > 0 ? slower / faster - 1 : 0;
    const double noise = faster > 0 ? std::max(before.noise, after.noise) / faster : 0;
    if (window == 0 || change < least) {
      best = window;
      least = change;
    }
    if (change <= std::max(kSteady, noise)) break;
    before = after;
  }
  return best;
}

double long_run_change(std::span<const double> values) {
  constexpr std::size_t kRun = 8;
  double least = 0, most = 0;
  if (values.size() < 2 * kRun) return 0;
  for (std::size_t at = 0; at + kRun <= values.size(); at += kRun) {
    const auto run = values.subspan(at, kRun);
    const double median = median_of({run.begin(), run.end()});
    least = at == 0 ? median : std::min(least, median);
    most = std::max(most, median);
  }
  return least > 0 ? most / least - 1 : 0;
}

int repeats_for(double us) {
  int repeats = 1;
  while (repeats < kMostRepeats && repeats * us < kLeastSampleUs) repeats *= 2;
  return repeats;
}

bool clearly_slower(std::span<const double> samples, double bar) {
  if (bar <= 0 || samples.size() < 2) return false;
  return *std::min_element(samples.begin(), samples.end()) > 1.5 * bar;
}

}  // namespace wyvern
