// Random inputs of the gated delta rule for any Problem.
#pragma once

#include <wyvern/problem.hpp>
#include <wyvern/runtime.hpp>

#include "tests/support/host_tensor.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace wyvern::testing {

/// The inputs of one problem on the host; an absent tensor has no elements and a null view.
struct OperatorData {
  Problem problem;
  std::vector<std::int64_t> cu_seqlens;  ///< empty unless packed
  HostTensor q, k, v, beta, g, initial_state, seqlens, A_log, dt_bias;

  /// Views of the inputs; outputs are left absent. The views live as long as this object.
  Arguments arguments() const;
};

/// Turns `problem` into a packed batch of these lengths.
Problem packed(Problem problem, const std::vector<std::int64_t>& lengths);

/// Inputs in the range of trained models: k rows of length 1 (unless use_qk_l2norm makes them so),
/// beta in (0, 1), gates as `gate` says (through the raw gate input with use_gate_in_kernel). For a
/// packed problem `lengths` are its sequences; their sum is T and their count N.
OperatorData make_data(const Problem& problem, Gate gate, std::uint64_t seed,
                       const std::vector<std::int64_t>& lengths = {});

/// One line that says what a failing problem was.
std::string describe(const Problem& problem);

}  // namespace wyvern::testing
