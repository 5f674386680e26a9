// From a plan to kernels with geometry and pointers: everything but compiling and loading.
#pragma once

#include <memory>

#include "runtime/operator_impl.hpp"
#include "runtime/plan.hpp"

namespace wyvern {

/// Binds an operator's plan: constants, legality, geometry, which tensor every argument is, and
/// workspace offsets (buffers whose lives do not overlap share bytes). Kernels are left null.
/// Throws Error(kBadInput) for a plan that does not fit. `is_default`: as check_plan() has it.
std::shared_ptr<OperatorImpl> bind_operator(const Device& device, const Problem& problem,
                                            const Plan& plan, bool is_default = false);

/// Binds one template whose tensors all come from the caller.
std::shared_ptr<OperatorImpl> bind_stage(const Device& device, const Problem& problem,
                                         const PlanStep& step);

}  // namespace wyvern
