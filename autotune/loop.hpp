// The tuning loop: rounds of a search through a laboratory, within a budget.
#pragma once

#include <functional>

#include "autotune/laboratory.hpp"
#include "autotune/results.hpp"
#include "autotune/search.hpp"
#include "autotune/tuner.hpp"

namespace wyvern {

struct LoopLimits {
  std::function<double()> elapsed_s;  ///< seconds since the tuning began
  double deadline_s = 0;              ///< the search ends when elapsed_s() passes it
  bool force = false;                 ///< recall nothing
  bool sweep = true;                  ///< measure all remaining configs if the budget allows
  std::function<bool()> interrupted;  ///< may be empty
  std::function<void(const TuneProgress&)> progress;  ///< may be empty
};

struct LoopEnd {
  bool complete = false;  ///< the search had no candidate left
  bool interrupted = false;
  bool exhaustive = false;  ///< every config that may matter has a result
  /// Configs measured beyond the local search to make it exhaustive, and their seconds.
  std::size_t sweep_configs = 0;
  double sweep_s = 0;
};

/// Runs `search` until its end, the deadline or an interruption; stores every outcome in `results`
/// at once. Candidates already in `results` are not measured again.
LoopEnd run_search(const SearchSpace& space, const Search& search, Laboratory& laboratory,
                   const LoopLimits& limits, Results& results);

/// Counts of `results` by status; `compiled` is left at 0.
TuneCounts count(const SearchSpace& space, const Results& results);

}  // namespace wyvern
