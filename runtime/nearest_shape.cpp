#include "runtime/nearest_shape.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>
#include <string_view>

namespace wyvern {
namespace {

constexpr double kLeastGain = 0.02, kGainLostPerDoubling = 0.02, kFarthest = 3;

struct Shape {
  std::string kernels;  ///< the fields of the key that decide the kernels
  double chains = 0, length = 0, group = 0;
};

/// Takes "NAME=number" and the comma after it out of the text; 0 where it is not there.
double take(std::string& text, std::string_view name) {
  const std::size_t at = text.find(name);
  if (at == std::string::npos) return 0;
  std::int64_t value = 0;
  const char* const first = text.data() + at + name.size();
  const char* last = std::from_chars(first, text.data() + text.size(), value).ptr;
  if (last != text.data() + text.size() && *last == ',') ++last;
  text.erase(at, static_cast<std::size_t>(last - text.data()) - at);
  return static_cast<double>(value);
}

Shape shape_of(const ProblemKey& key) {
  Shape shape;
  shape.kernels = key.family;
  const double H = take(shape.kernels, "H="), HV = take(shape.kernels, "HV=");
  const auto sequences = static_cast<double>(std::max<std::int64_t>(key.sequences, 1));
  shape.chains = sequences * HV;
  shape.length = static_cast<double>(std::max<std::int64_t>(key.tokens, 1)) / sequences;
  shape.group = H > 0 ? HV / H : 0;
  return shape;
}

double doublings(double a, double b) { return std::fabs(std::log2(a / b)); }

}  // namespace

std::optional<double> shape_distance(const ProblemKey& a, const ProblemKey& b) {
  const Shape one = shape_of(a), other = shape_of(b);
  if (one.kernels != other.kernels || one.group <= 0 || other.group <= 0) return {};
  return doublings(one.chains, other.chains) + doublings(one.length, other.length) +
         0.5 * doublings(one.group, other.group);
}

bool carries_over(double ratio, double distance) {
  return ratio > 0 && distance <= kFarthest &&
         1 - ratio > kLeastGain + kGainLostPerDoubling * distance;
}

std::optional<WinnerRow> nearest_shape(const std::vector<WinnerRow>& winners,
                                       const DeviceInfo& device, const ProblemKey& key) {
  const WinnerRow* best = nullptr;
  double nearest = 0, least = 0;
  for (const WinnerRow& row : winners) {
    if (row.device != device.key || row.default_us <= 0) continue;
    const double ratio = row.ratio > 0 ? row.ratio : row.median_us / row.default_us;
    const auto distance = shape_distance({row.family, row.tokens, row.sequences}, key);
    if (!distance || !carries_over(ratio, *distance)) continue;
    // Distances within rounding of each other are ties.
    const bool nearer = best == nullptr || *distance < nearest - 1e-9;
    if (!nearer && (*distance > nearest + 1e-9 || ratio >= least)) continue;
    best = &row;
    nearest = *distance;
    least = ratio;
  }
  if (best == nullptr) return {};
  return *best;
}

}  // namespace wyvern
