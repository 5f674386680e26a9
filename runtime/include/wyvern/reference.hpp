// The float64 oracle and the error bounds every result is held to (specification, sections 2 and 5).
#pragma once

#include <wyvern/export.hpp>
#include <wyvern/problem.hpp>
#include <wyvern/runtime.hpp>

#include <string_view>
#include <vector>

namespace wyvern WYVERN_API {

/// Outputs of the oracle, row-major in the shapes of Arguments::o and ::final_state.
struct Reference {
  std::vector<double> o;
  std::vector<double> final_state;  ///< empty unless problem.output_final_state
};

/// Runs the recurrence token by token in float64 on host tensors (already rounded to their dtypes).
/// One (sequence, value head) per task on up to `threads` threads (0: all cores).
Reference reference_forward(const Problem& problem, const Arguments& host, unsigned threads = 0);

/// rms(x - reference) / rms(reference); infinity when x holds a NaN or Inf, rms(x) when the reference is
/// all zero. `x` is a contiguous host tensor of as many elements.
double relative_error(const TensorView& x, const std::vector<double>& reference);

/// The bound of the specification for "o", "final_state", for this problem's dtype and floor.
double error_bound(const Problem& problem, std::string_view quantity);

}  // namespace wyvern
