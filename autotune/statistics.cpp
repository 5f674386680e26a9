#include "autotune/statistics.hpp"

#include <algorithm>
#include <cmath>

namespace wyvern {
namespace {

double median_of(std::vector<double> values) {
  if (values.empty()) return 0;
  const std::size_t middle = values.size() / 2;
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(middle);
  std::nth_element(values.begin(), at, values.end());
  if (values.size() % 2 == 1) return *at;
  return (*at + *std::max_element(values.begin(), at)) / 2;
}

}  // namespace

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
  constexpr double kIndistinct = 0.01;
  const double difference = std::fabs(a.median - b.median);
  return difference <= std::max(a.noise, b.noise) ||
         difference <= kIndistinct * std::min(a.median, b.median);
}

bool clearly_slower(std::span<const double> samples, double bar) {
  if (bar <= 0 || samples.empty()) return false;
  if (samples.size() == 1) return samples.front() > 2.0 * bar;
  return *std::min_element(samples.begin(), samples.end()) > 1.5 * bar;
}

}  // namespace wyvern
