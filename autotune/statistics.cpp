#include "autotune/statistics.hpp"

#include <algorithm>
#include <cmath>

namespace wyvern {
namespace {

/// Relative differences below the first are always a tie, those above the second never.
constexpr double kIndistinct = 0.01;
constexpr double kDistinct = 0.05;

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
  const double least = std::min(a.median, b.median);
  const double noise = std::max(a.noise, b.noise);
  return std::fabs(a.median - b.median) <=
         std::clamp(noise, kIndistinct * least, kDistinct * least);
}

bool tied_in_turn(std::span<const double> other, std::span<const double> fastest) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < std::min(other.size(), fastest.size()); ++i)
    if (fastest[i] > 0) ratios.push_back(other[i] / fastest[i]);
  const Timing ratio = summarize(ratios);
  return !ratios.empty() && ratio.median - 1 <= std::clamp(ratio.noise, kIndistinct, kDistinct);
}

bool clearly_slower(std::span<const double> samples, double bar) {
  if (bar <= 0 || samples.empty()) return false;
  if (samples.size() == 1) return samples.front() > 2.0 * bar;
  return *std::min_element(samples.begin(), samples.end()) > 1.5 * bar;
}

}  // namespace wyvern
