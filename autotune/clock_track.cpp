#include "autotune/clock_track.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

namespace wyvern {
namespace {

/// Readings take at most one part in this many of the time.
constexpr double kShare = 20;

}  // namespace

ClockTrack::ClockTrack(std::function<double()> read, std::function<double()> seconds)
    : read_(std::move(read)), seconds_(std::move(seconds)), last_(read_()), next_s_(seconds_()) {}

double ClockTrack::steady() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double ClockTrack::mhz() {
  const double start = seconds_();
  if (last_ <= 0 || start < next_s_) return last_;
  last_ = std::max(read_(), 0.0);
  const double end = seconds_();
  next_s_ = end + (kShare - 1) * (end - start);
  return last_;
}

}  // namespace wyvern
