// Which candidates to try next. Knows figures only, no device, no clock.
#pragma once

#include <cstddef>
#include <vector>

#include "autotune/results.hpp"
#include "autotune/space.hpp"

namespace wyvern {

/// Proposes candidates in rounds. The first round is every group's default. Then, round after
/// round, the configs that differ from a group's best in one tunable, until no best changes any
/// more; groups that cannot matter are left alone: those whose best plan costs twice the best
/// known, and those whose own time is a two-hundredth of it. When exhaustive, the second round is
/// everything. A group without an ok config tries all of its own. Most promising first: groups by
/// the cost of the best plan through them, then by their own time. Deterministic in the results.
class Search {
 public:
  Search(const SearchSpace& space, bool exhaustive) : space_(space), exhaustive_(exhaustive) {}

  /// Candidates without a result; empty at the end of the search.
  std::vector<Candidate> next_round(const Results& results) const;

 private:
  std::vector<std::size_t> groups_by_promise(const Results& results) const;
  std::vector<Candidate> neighbours(const Results& results, std::size_t group) const;

  const SearchSpace& space_;
  bool exhaustive_;
};

}  // namespace wyvern
