// How a block of hopper.cu, resume.cu or segment.cu walks through chunks of 64 tokens with a state
// of Kimi Delta Attention, one block BV columns of V of one value head, when W, U, the decayed rows
// of q and k, and the scores of queries are there already. What includes this says whether queries
// are asked too (kQueries), or the state alone is wanted, and whether states inside the sequence
// are kept (kCheckpoints), inside chunks too (kDivided).
//
// The first warpgroup brings what there is (block.cuh); those after it have the state, 64 columns
// of V each: transposed, or with K = 256 also rounded in shared memory.
#pragma once

#include "forward/kda_fwd_h_o/shared_state.cuh"
#include "forward/kda_fwd_h_o/transposed_state.cuh"

template <bool Shared>
struct StateOf {
  using Type = TransposedState;
};
template <>
struct StateOf<true> {
  using Type = SharedState;
};
using StateWalk = StateOf<kLayout.shares_state>::Type;

/// Writes the state to a row of `checkpoints`. S is the kernel's Spec.
template <class S, class Element>
WYVERN_DEVICE void write_checkpoint(const StateWalk& walk, int row, Element* checkpoints,
                                    const Extents& e) {
  const auto element = Checkpoints<S>{.row = static_cast<uint32>(row)}.element(walk.b.head, e);
  walk.write<S::STATE_V_FIRST>(checkpoints + element);
}
