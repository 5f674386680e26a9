// Progress of long work on stderr: a bar with the time left on a terminal, plain lines elsewhere.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <string_view>

namespace wyvern::cli {

/// "1:05" or "0.8 s".
std::string duration_text(double seconds);

/// Not thread-safe. Nothing is printed about work that ends within half a second.
class Progress {
 public:
  explicit Progress(std::string title);
  ~Progress();  ///< takes the bar away
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Takes the bar away until the next update, for a line of its own.
  void clear();

  /// `done` of `total` pieces are ready; `note` names the current piece. `seconds_left` below 0:
  /// estimated from the time so far.
  void update(std::size_t done, std::size_t total, std::string_view note, double seconds_left = -1);

 private:
  using Clock = std::chrono::steady_clock;
  void draw_bar(double fraction, const std::string& text);

  std::string title_;
  bool terminal_;
  bool drawn_ = false;
  Clock::time_point started_ = Clock::now();
  Clock::time_point printed_ = started_;
};

}  // namespace wyvern::cli
