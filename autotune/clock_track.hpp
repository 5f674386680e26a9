// A device's clock at each sample.
#pragma once

#include <functional>

namespace wyvern {

/// Reading a clock from the driver may take longer than a sample. So it is read again only when
/// twenty times the last reading's duration has passed since; until then the last reading counts.
/// Used from one thread.
class ClockTrack {
 public:
  /// `read`: MHz, 0 if the device does not report it; called once here, since the first call may
  /// load a library. `seconds`: a steady clock, replaced in tests.
  explicit ClockTrack(std::function<double()> read, std::function<double()> seconds = steady);
  /// MHz; 0 from the first time on that the device did not report it.
  double mhz();

 private:
  static double steady();

  std::function<double()> read_, seconds_;
  double last_ = 0;
  double next_s_ = 0;  ///< not asked before
};

}  // namespace wyvern
