// Chooses the candidates to measure next, from results alone.
#pragma once

#include <cstddef>
#include <vector>

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
/// The most promising candidate is the one with the cheapest plan, if it takes as long as the
/// configs of its group that have a time and differ from it in the fewest tunables do in the
/// geometric mean. Deterministic in its arguments.
class Search {
 public:
  /// `space` outlives it.
  Search(const SearchSpace& space, bool exhaustive);

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
  double expected_us(const Results& results, const Candidate& candidate) const;
  void order(const Results& results, const Standing& standing,
             std::vector<Candidate>& candidates) const;

  const SearchSpace& space_;
  bool exhaustive_;
  std::vector<Neighbourhood> neighbourhoods_;  ///< by group
};

}  // namespace wyvern
