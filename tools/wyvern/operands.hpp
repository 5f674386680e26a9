// From tensors of a file to a problem.
#pragma once

#include <string>

#include "tools/wyvern/safetensors.hpp"
#include "tools/wyvern/selection.hpp"

namespace wyvern::cli {

/// Takes shapes and dtypes from the tensors, then applies the options. q and v set the dimensions;
/// the other tensors that the operator, the pass and the options need must be present and fit. The
/// tensors that are optional decide options of their own: initial_state, cu_seqlens, dt_bias, A_log
/// (only with a lower bound), dht of the backward pass, state_index of the recurrent pass, and with
/// --inplace-state state_index, output_state_index and has_initial_state of the forward pass too.
/// checkpoint_offsets of the forward pass too; `checkpoints` is made of zeros where it is missing.
/// In the recurrent pass a state_index [N,M] decides index_columns, and intermediate_index and
/// parent do; intermediate_states is made of zeros where it is missing. With --inplace-state an
/// initial_state is renamed to state where there is none. Tensors that the problem has no use for
/// are left alone. Throws Error(kBadInput) that names the tensor, its shape or dtype and the legal
/// one.
Selection infer(const std::string& op, Tensors& tensors, const OptionFlags& options);

}  // namespace wyvern::cli
