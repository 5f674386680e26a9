// The layer around an operator: tensors and stages that are no operator's own.
#pragma once

#include <wyvern/problem.hpp>

#include <vector>

#include "runtime/operators/tensors.hpp"
#include "runtime/plan.hpp"

namespace wyvern {

/// The tensors of the layer around every operator: the weights and windows of short_conv; the
/// weight and the gate of output_norm, their gradients, and what it normalizes.
TensorRules layer_tensors();

/// Adds to the stages of the problem's operator those of the layer around it that the problem asks
/// for: in front of the forward pass the convolution, whose rows take the place of q, k and v;
/// behind it the norm of o, which is then written as o_raw first, and in front of the backward pass
/// its gradient, which takes the place of `do`. The recurrent pass normalizes o itself.
void add_layer_stages(const Problem& problem, std::vector<StageUse>& uses);

}  // namespace wyvern
