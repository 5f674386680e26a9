// Fresh random inputs of an operator.
#pragma once

#include <cstdint>

#include "tools/wyvern/safetensors.hpp"
#include "tools/wyvern/selection.hpp"

namespace wyvern::cli {

/// All inputs of the selected problem, A_log and dt_bias included. The same seed gives the same
/// bytes on every machine: only integer and exactly rounded operations are used.
///
/// q and the unit rows of k [B,T,H,K]; v [B,T,HV,V], about normal; beta [B,T,HV] in (0, 1), fit as
/// logits too; g [B,T,HV] fp32 with exp(g) between 0.5 and 0.999, each head with its own reach;
/// initial_state [N,HV,K,V] fp32 (V before K with state_v_first); A_log and dt_bias [HV] fp32;
/// cu_seqlens int64 for a packed batch.
Tensors make_example(const Selection& selection, std::uint64_t seed);

}  // namespace wyvern::cli
