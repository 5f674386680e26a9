// Predicts the times of configs that were not measured yet, so that the promising ones run first.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "autotune/results.hpp"
#include "autotune/space.hpp"

namespace wyvern {

/// A config's features, numbers on which its time depends smoothly: tunables as logarithms, blocks,
/// waves of them and how full the last one is, threads, shared bytes; registers and spills where it
/// was compiled. Of one template always the same numbers in the same order; NaN: unknown.
std::vector<double> features(const Config& config, const Launch& launch, int multiprocessors,
                             const std::optional<Resources>& resources);

/// A config measured for another problem, from a stored row.
struct Observation {
  std::string template_id;
  std::string
      contest;  ///< times of one contest may be compared: one problem, chunk size, constants
  std::vector<double> features;
  double us = 0;
};

/// Gaussian-process regression (Rasmussen and Williams, 2006, algorithm 2.1) of the logarithm of
/// time over features, one for each template, over measured and `stored` observations. It puts
/// candidates in order and never rules one out. Immutable.
class CostModel {
 public:
  CostModel(const SearchSpace& space, const Results& results, std::span<const Observation> stored);
  ~CostModel();
  CostModel(const CostModel&) = delete;
  CostModel& operator=(const CostModel&) = delete;

  /// Expected time of a candidate in us; 0 where none of its group has one.
  double predict(const Candidate& candidate) const;

 private:
  class Regression;
  const SearchSpace& space_;
  const Results& results_;
  std::map<std::string, std::unique_ptr<const Regression>, std::less<>>
      regressions_;             ///< by template
  std::vector<double> levels_;  ///< by group: mean logarithm of its times; NaN: it has none
};

}  // namespace wyvern
