// Observations for the model from stored rows of other problems.
#pragma once

#include <wyvern/problem.hpp>

#include <string_view>
#include <vector>

#include "autotune/model.hpp"
#include "cache/cache.hpp"

namespace wyvern {

/// The ok rows of the device for problems other than `own` and templates of the space, the newest
/// first, with their kernels' resources from the artifacts. Rows whose artifact is gone are left
/// out.
std::vector<Observation> observations(const Cache& cache, std::string_view device,
                                      const ProblemKey& own, const SearchSpace& space);

}  // namespace wyvern
