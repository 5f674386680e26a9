// The float64 oracle and the error bounds of every output. Functions here are thread-safe.
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
/// their dtypes): the recurrence that Problem states, or its adjoint. The rows of short_conv are
/// rounded to the dtype of q before the recurrence takes them. The tensors that disable_recompute
/// keeps are neither written nor read; o_raw is. `host.state` is the pool as it
/// was before the launch; a float8 `state` is returned in units of state_scale, clamped to the
/// dtype's largest number but not rounded. With output_dtype `o` is in units of `o_scale`, and not
/// rounded either. Runs on up to `threads` threads (0: all cores), one
/// (sequence, value head) per task; their number does not change the result. Throws
/// Error(kBadInput) that names a missing input or one of a wrong size.
[[nodiscard]] Reference reference(const Problem& problem, const Arguments& host,
                                  unsigned threads = 0);

/// rms(x - reference) / rms(reference); infinity when x holds a NaN or Inf, rms(x) when the
/// reference is all zero. Each difference is reduced by half the least positive value of x's dtype,
/// so that zero is right for a reference too small for the dtype (the gradient of a gate at -200).
/// `x` is a contiguous host tensor with as many elements as `reference`.
[[nodiscard]] double relative_error(const TensorView& x, const std::vector<double>& reference);

/// The bound on the relative error of the output `name`, by the problem's dtypes and precision: o
/// (o_scale too) and states (summary too) 5e-3 for 16-bit inputs, 1e-5 for fp32 and 1e-3 for fp32
/// with precision tf32; dq, dk, dv, dinitial_state, dsummary and dinitial_conv_state 8e-3, 2e-5,
/// 2e-3; dg, dbeta, dA_log, ddt_bias, dnorm_weight, dnorm_gate, dconv_weight and dconv_bias 2e-2,
/// 5e-5, 4e-3. An output stored in 16 bits has the first bound of its group; a float8 `state` has
/// that bound plus the type's own rounding, 2^-3 / sqrt(12) for e4m3 and 2^-2 / sqrt(12) for e5m2,
/// and an `o` of output_dtype, which is in units of its scales, the latter alone; final_conv_state
/// has 0. Throws Error(kBadInput) for a name that is no output.
[[nodiscard]] double error_bound(const Problem& problem, std::string_view name);

}  // namespace wyvern WYVERN_API
