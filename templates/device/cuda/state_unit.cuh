// The unit of a pass's states (device/state_unit.hpp), found by a block.
#pragma once

#include "device/cuda/tile.cuh"
#include "device/cuda/warp.cuh"
#include "device/state_unit.hpp"

namespace wyvern::cuda {

/// The unit, at least `least`, of states that start from the K V elements at `state`, times
/// `scale`; null: from zeros. By all Threads threads of a block, which get the same; `scratch` has
/// a number for each warp.
template <class S, int Threads, class Element>
WYVERN_DEVICE float find_unit(const Element* state, float scale, float* scratch,
                              float least = kValueUnit<S>) {
  if (state == nullptr) return least;
  constexpr int kElements = S::K * S::V, kVector = kElements % 4 == 0 ? 4 : 1;
  float largest = 0.0f;
#pragma unroll 8
  for (int i = thread_index() * kVector; i < kElements; i += Threads * kVector) {
    const auto x = load<kVector>(state + i);
#pragma unroll
    for (int j = 0; j < kVector; ++j) largest = maximum(largest, absolute(to_float(x.at[j])));
  }
  largest = max_warp(largest);
  sync_block();
  if (lane_index() == 0) scratch[warp_index()] = largest;
  sync_block();
  for (int i = 0; i < Threads / 32; ++i) largest = maximum(largest, scratch[i]);
  sync_block();
  return unit_of_states(largest * scale, least);
}

}  // namespace wyvern::cuda
