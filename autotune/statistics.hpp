// Statistics of samples: medians, spreads, and ties within noise.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

namespace wyvern {

/// A summary of samples of one quantity, in microseconds.
struct Timing {
  double median = 0;
  double spread = 0;  ///< median absolute deviation from the median
  double noise = 0;   ///< half width of the interval that holds the true median in most runs
};

/// Zeros for no samples.
Timing summarize(std::span<const double> samples);

/// Whether the slower of two medians may well be no slower: the difference is within either's
/// noise, or below the one percent that repeats of a measurement differ by anyway. Medians five
/// percent apart are never tied: on a machine that noisy, the lower one is still the better bet.
bool tied(const Timing& a, const Timing& b);

/// The same for samples measured in turn, one's i-th next to the other's i-th: slowdowns of both
/// cancel. `fastest` is the one with the lower median.
bool tied_in_turn(std::span<const double> other, std::span<const double> fastest);

/// Whether samples taken in turn with `base`, one's i-th next to the other's i-th, are faster than
/// it by more than the one percent that is always a tie, and faster with 95% confidence: by the
/// order of their ratios, without assumptions on their distribution (Conover, Practical
/// Nonparametric Statistics, 3.2). Machines have hiccups of ten times a sample.
bool beats(std::span<const double> samples, std::span<const double> base);

/// Median of the ratios to `base` of samples taken in turn with it; 0 without any.
double ratio_in_turn(std::span<const double> samples, std::span<const double> base);

/// Measures windows of samples until the device's speed is steady during one, and returns that
/// window's index; after some unsteady ones, the index of the steadiest. `take` measures the next
/// window's samples; `pace` times work that is always the same, before and after.
std::size_t steady_window(const std::function<void()>& take, const std::function<Timing()>& pace);

/// Of sorted or unsorted values; 0 for none.
double median_of(std::vector<double> values);

/// The long-run change of a repeated measurement: the largest over the smallest median of eight
/// that follow each other, less 1; 0 for fewer than sixteen.
double long_run_change(std::span<const double> values);

/// Launches of a step in one sample, for all configs of a group alike: as many as make 50 us of
/// `us`, as a power of two, so that close medians give the same number.
int repeats_for(double us);

/// Whether a config with these first samples needs no more of them, with the group's best median at
/// `bar`; a bar of 0 rejects nothing. One sample may be a hiccup, so it rejects nothing; the
/// fastest of several must be at least one and a half times the bar.
bool clearly_slower(std::span<const double> samples, double bar);

}  // namespace wyvern
