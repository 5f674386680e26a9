// The float64 oracle and the error bounds that every result is held to. Functions here are
// thread-safe.
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

/// Outputs of the oracle by their names in runtime/SPECIFICATION.md ("o", "dq", ...), row-major in
/// the shapes of Arguments. Outputs that the problem's options leave out are absent.
using Reference = std::map<std::string, std::vector<double>, std::less<>>;

/// Carries out the problem's pass token by token in float64 on host tensors (already rounded to
/// their dtypes): the recurrence that Problem states, or its adjoint. The tensors that
/// disable_recompute keeps are neither written nor read. `host.state` is the pool as it was before
/// the launch; of float8 states `state` is in units of state_scale, not rounded but cut off at the
/// dtype's largest number. One (sequence, value head) per task on up to `threads` threads (0: all
/// cores), whose number makes no difference to the result. Throws Error(kBadInput) that names a
/// missing input or one of a wrong size.
[[nodiscard]] Reference reference(const Problem& problem, const Arguments& host,
                                  unsigned threads = 0);

/// rms(x - reference) / rms(reference); infinity when x holds a NaN or Inf, rms(x) when the
/// reference is all zero. Half the least positive value of x's dtype is taken off the difference,
/// so that a reference too small for the dtype (the gradient of a gate at -200) is rightly stored
/// as zero. `x` is a contiguous host tensor of as many elements.
[[nodiscard]] double relative_error(const TensorView& x, const std::vector<double>& reference);

/// The bound on the relative error of the output `name`, by the problem's dtypes and floor: o and
/// states 5e-3 for 16-bit inputs, 1e-5 for fp32 and 1e-3 for fp32 with the floor tf32; dq, dk, dv
/// and dinitial_state 8e-3, 2e-5, 2e-3; dg, dbeta, dA_log and ddt_bias 2e-2, 5e-5, 4e-3. An output
/// stored in 16 bits has the first bound of its group; `state` in float8 has it and the type's own
/// rounding, 2^-3 / sqrt(12) of e4m3 and 2^-2 / sqrt(12) of e5m2. Throws Error(kBadInput) for a
/// name that Reference never holds.
[[nodiscard]] double error_bound(const Problem& problem, std::string_view name);

}  // namespace wyvern WYVERN_API
