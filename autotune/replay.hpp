// Repeats searches on a recording and reports how good their winners are, how often they agree, and
// how soon they are found.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "autotune/recording.hpp"

namespace wyvern {

struct ReplayOptions {
  double budget_s = 60;  ///< of each tuning, in the recording's time
  int seeds = 20;
  /// The largest relative error that all samples of one measurement share, besides each sample's
  /// own recorded scatter.
  double drift = 0.01;
  bool sweep = true;  ///< false: only the local search, for any budget
};

/// Figures of tunings that differ in their seed. Regrets are against the cheapest plan of the
/// recording, by sums of recorded medians.
struct ReplayReport {
  std::int64_t configs = 0;      ///< of the recording
  double exhaustive_s = 0;       ///< time to measure all of them
  double default_over_best = 0;  ///< time of the default plan to the best
  double regret_mean = 0, regret_p95 = 0, regret_max = 0;
  double same_winner = 0;            ///< share of tunings with the most frequent winner
  double within_percent = 0;         ///< share of those within 1% of it
  double seconds_to_5_percent = 0;   ///< mean, to a plan within 5% of the best
  double seconds = 0, measured = 0;  ///< means, of a whole search
  double exhaustive = 0;             ///< share of searches that measured all that may matter
};

ReplayReport replay(const Recording& recording, const ReplayOptions& options);

/// The recorded time of a plan: the sum of its steps' medians; nothing when the recording does not
/// have it, or not as ok.
std::optional<double> recorded_us(const Recording& recording, const Plan& plan);

/// The cheapest plan of the recording. Throws Error(kBadInput) where no plan is ok throughout.
Plan recorded_best(const Recording& recording);

}  // namespace wyvern
