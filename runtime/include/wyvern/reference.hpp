// The float64 oracle and the error bounds every result is held to (specification, sections 2 and 5).
#pragma once

#include <wyvern/export.hpp>
#include <wyvern/problem.hpp>
#include <wyvern/runtime.hpp>

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace wyvern WYVERN_API {

/// Outputs of the oracle by their names in the specification ("o", "dq", ...), row-major in the
/// shapes of Arguments. What the problem's options leave out is absent.
using Reference = std::map<std::string, std::vector<double>, std::less<>>;

/// Carries out the problem's pass token by token in float64 on host tensors (already rounded to their
/// dtypes): the recurrence, or its adjoint. What disable_recompute keeps is neither made nor
/// read. `host.state` is the pool as it was before the launch. One (sequence, value head) per task
/// on up to `threads` threads (0: all cores), whose number makes no difference to the result.
/// Throws Error(kBadInput) that names a missing input or one of a wrong size.
Reference reference(const Problem& problem, const Arguments& host, unsigned threads = 0);

/// rms(x - reference) / rms(reference); infinity when x holds a NaN or Inf, rms(x) when the reference is
/// all zero. Half the least positive value of x's dtype is taken off the difference, so that a
/// reference too small for the dtype (the gradient of a gate at -200) is rightly stored as zero. `x`
/// is a contiguous host tensor of as many elements.
double relative_error(const TensorView& x, const std::vector<double>& reference);

/// The specification's bound on the relative error of the output `name`, by the problem's dtypes and
/// floor. Throws Error(kBadInput) for a name that Reference never holds.
double error_bound(const Problem& problem, std::string_view name);

}  // namespace wyvern
