#include "tools/wyvern/progress.hpp"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "tools/wyvern/output.hpp"

namespace wyvern::cli {
namespace {

std::size_t terminal_width() {
  winsize size{};
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

}  // namespace

std::string duration_text(double seconds) {
  if (seconds < 10) return fmt::format("{:.1f} s", seconds);
  const auto whole = std::lround(seconds);
  return whole < 60 ? fmt::format("{} s", whole)
                    : fmt::format("{}:{:02} min", whole / 60, whole % 60);
}

Progress::Progress(std::string title)
    : title_(std::move(title)), terminal_(isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() { clear(); }

void Progress::clear() {
  if (drawn_) note("\r\033[K");
  drawn_ = false;
}

void Progress::update(std::size_t done, std::size_t total, std::string_view note,
                      double seconds_left) {
  const Clock::time_point now = Clock::now();
  const std::chrono::duration<double> elapsed = now - started_;
  const std::chrono::duration<double> since = now - printed_;
  // A line every five seconds in a log, a new picture ten times a second on a terminal.
  if (elapsed.count() < 0.5 || since.count() < (terminal_ ? 0.1 : 5.0)) return;
  printed_ = now;
  const double fraction =
      total == 0 ? 0 : std::min(1.0, static_cast<double>(done) / static_cast<double>(total));
  if (seconds_left < 0 && fraction > 0) seconds_left = elapsed.count() * (1 - fraction) / fraction;
  std::string text = fmt::format("{}/{}", done, total);
  // An estimate that has run out says nothing.
  if (constexpr double kShown = 0.05; seconds_left >= kShown)
    text += fmt::format(", {} left", duration_text(seconds_left));
  if (!note.empty()) text += fmt::format("  {}", note);
  if (terminal_) {
    draw_bar(fraction, text);
  } else {
    cli::note(fmt::format("{}: {}\n", title_, text));
  }
}

void Progress::draw_bar(double fraction, const std::string& text) {
  constexpr std::size_t kCells = 24;
  const auto full = static_cast<std::size_t>(fraction * kCells);
  std::string line = fmt::format("{} [{}{}] {}", title_, std::string(full, '#'),
                                 std::string(kCells - full, '.'), text);
  line.resize(std::min(line.size(), terminal_width() - 1));
  note(fmt::format("\r{}\033[K", line));
  drawn_ = true;
}

}  // namespace wyvern::cli
