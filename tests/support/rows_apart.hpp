// Launches of operators on tensors whose rows of tokens lie apart.
#pragma once

#include "tests/support/runner.hpp"

namespace wyvern::testing {

/// The names of what the operator's plan takes strided, in binding order.
std::vector<std::string> strided_tensors(const Operator& op);
/// What it should take strided, whatever the plan: the inputs with a row for each token, `do` too,
/// and o where one kernel makes it of them.
std::vector<std::string> rows_of_tokens(const Operator& op);

/// For run_operator: launches `op` on copies of its strided tensors with NaNs before, between and
/// after their rows, and brings back what was written. Records a test failure where one of these
/// NaNs, or an input, was changed.
Launcher launch_rows_apart(const Device& device, const Operator& op);

}  // namespace wyvern::testing
