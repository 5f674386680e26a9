// Fresh random inputs of an operator.
#pragma once

#include <cstdint>

#include "tools/wyvern/safetensors.hpp"
#include "tools/wyvern/selection.hpp"

namespace wyvern::cli {

/// All inputs of the selected problem, A_log and dt_bias of a gated operator included even where
/// its gate comes as it is; not the intermediates that disable_recompute keeps. The same seed gives
/// the same bytes on every machine: only integer and exactly rounded operations are used.
///
/// q and the unit rows of k; v and do about normal; beta in (0, 1), fit as logits too; g with
/// exp(g) between 0.5 and 0.999, each head (each key channel for kda) with its own reach; states
/// and dht smaller than v; state_index different slots in no order, with a padding entry among
/// three or more.
Tensors make_example(const Selection& selection, std::uint64_t seed);

}  // namespace wyvern::cli
