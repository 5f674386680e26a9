// Turns a plan into kernels with geometry and pointers, without compiling or loading them.
#pragma once

#include <memory>

#include "runtime/operator_impl.hpp"
#include "runtime/plan.hpp"

namespace wyvern {

/// Binds an operator's plan: checks it and computes each step's constants, geometry, the tensor of
/// each argument, and workspace offsets (buffers whose lifetimes do not overlap share bytes).
/// Leaves kernels null. Throws Error(kBadInput) for a plan that is not legal. `is_default`: see
/// check_plan().
std::shared_ptr<OperatorImpl> bind_operator(const Device& device, const Problem& problem,
                                            const Plan& plan, bool is_default = false);

/// Binds one template; the caller provides all its tensors.
std::shared_ptr<OperatorImpl> bind_stage(const Device& device, const Problem& problem,
                                         const PlanStep& step);

/// Binds a fold; the caller provides its tensors, in the order of FoldArguments. It has two steps:
/// a launch enqueues the first, or backwards the second. Throws Error(kBadInput) for options out of
/// range.
std::shared_ptr<OperatorImpl> bind_fold(const Device& device, const FoldOptions& options);

}  // namespace wyvern
