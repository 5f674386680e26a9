// Which candidates to try next. Knows figures only, no device, no clock.
#pragma once

#include <cstddef>
#include <vector>

#include "autotune/model.hpp"
#include "autotune/neighbourhood.hpp"
#include "autotune/results.hpp"
#include "autotune/space.hpp"

namespace wyvern {

/// Proposes candidates in rounds: what to measure next, the most promising first; after each few
/// results the next round says it anew.
///
/// The first round is every group's default. Then come the neighbours (Neighbourhood) of each
/// group's best config, until no best has one without a result; groups that cannot matter are left
/// alone: those whose best plan costs twice the best known, and those whose own time is a
/// two-hundredth of it. A group without an ok config tries all of its own. Last, where the budget
/// has room for all of it, comes every config of the groups that matter, and with room for these
/// too, of the others but the two-hundredths. When exhaustive, the second round is everything.
///
/// Most promising is what by the model makes the cheapest plan. Deterministic in its arguments.
class Search {
 public:
  /// `space` outlives it; `stored` is what the model knows of other problems.
  Search(const SearchSpace& space, bool exhaustive, std::vector<Observation> stored = {});

  /// Candidates without a result; empty at the end of the search. `room`: how many more the budget
  /// can pay for.
  std::vector<Candidate> next_round(const Results& results, std::size_t room = 0) const;

  /// Whether every config that may matter has a result: all but those of negligible groups.
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
