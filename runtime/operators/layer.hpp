// The layer around an operator: tensors and stages that are no operator's own.
#pragma once

#include <wyvern/problem.hpp>

#include <vector>

#include "runtime/operators/tensors.hpp"
#include "runtime/plan.hpp"

namespace wyvern {

/// The tensors of the layer around every operator: the weights and windows of short_conv; the
/// weight and the gate of output_norm; the gradients of all of them; and what the norm takes.
TensorRules layer_tensors();

/// Adds to the stages of the problem's operator those of the layer around it that the problem asks
/// for: in front of every pass the convolution, whose rows take the place of q, k and v, and
/// behind the backward pass its gradients, from those of the convolved rows; behind the forward
/// pass the norm of o, which is then written as o_raw first, and in front of the backward pass its
/// gradient, which takes the place of `do`. The recurrent pass normalizes o itself. With
/// output_dtype o is quantized last of all, from what it is else, which is o_norm then.
void add_layer_stages(const Problem& problem, std::vector<StageUse>& uses);

}  // namespace wyvern
