// Which candidates to try next. Knows figures only, no device, no clock.
#pragma once

#include <cstddef>
#include <vector>

#include "autotune/model.hpp"
#include "autotune/neighbourhood.hpp"
#include "autotune/results.hpp"
#include "autotune/space.hpp"

namespace wyvern {

/// Proposes candidates to measure in rounds, the most promising first; a new round follows every
/// few results.
///
/// The first round is every group's default. Then come the neighbours (Neighbourhood) of each
/// group's best config, until no best has one without a result; groups that cannot matter are
/// skipped: hopeless ones, whose best plan costs twice the best known, and negligible ones, whose
/// own time is a two-hundredth of it. A group without an ok config tries all of its own. Last,
/// where the budget has room for all of it, comes every config of the groups that matter, and,
/// where the budget has room, of the hopeless groups too. When exhaustive, the second round is
/// everything.
///
/// The most promising candidate is the one with the cheapest plan by the model. Deterministic in
/// its arguments.
class Search {
 public:
  /// `space` outlives it; `stored`: the model's observations of other problems.
  Search(const SearchSpace& space, bool exhaustive, std::vector<Observation> stored = {});

  /// Candidates without a result; empty at the end of the search. `room`: how many more the budget
  /// can pay for.
  std::vector<Candidate> next_round(const Results& results, std::size_t room = 0) const;

  /// Whether every config has a result, except those of negligible groups.
  bool exhausted(const Results& results) const;

 private:
  struct Standing;
  std::vector<Candidate> unmeasured(const Results& results, const Standing& standing,
                                    bool hopeless) const;
  std::vector<Candidate> nearby(const Results& results, const Standing& standing) const;
  void order(const Results& results, const Standing& standing,
             std::vector<Candidate>& candidates) const;

  const SearchSpace& space_;
  bool exhaustive_;
  std::vector<Observation> stored_;
  std::vector<Neighbourhood> neighbourhoods_;  ///< by group
};

}  // namespace wyvern
