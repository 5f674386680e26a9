// Where the states of a sequence are. For kernels of every device.
#pragma once

#include "device/types.hpp"

namespace wyvern {

/// The states of one head of a sequence, in elements from the start of their tensors.
struct StateSlots {
  decltype(Extents::S) from = 0;  ///< in the pool, or in initial_state
  decltype(Extents::S) to = 0;    ///< in the pool, or in final_state
  bool null = false;              ///< an index is not a slot's: nothing may be read or written
  // The same in state_scale, in the pool alone.
  decltype(Extents::S) from_scale = 0, to_scale = 0;
};

inline bool is_slot(decltype(Extents::S) index, const Extents& e) {
  return index >= e.first_slot && index < e.S;
}

/// Whether sequence n is a null one: it computes nothing, and its rows of o are 0. S is the
/// kernel's Spec; an index tensor that the problem lacks is null and is not read.
template <class S, class Index>
bool is_null_sequence(decltype(Extents::N) n, const Extents& e, const Index* state_index,
                      const Index* output_state_index) {
  if constexpr (S::STATE_INDEX)
    if (!is_slot(state_index[n], e)) return true;
  if constexpr (S::OUTPUT_STATE_INDEX)
    if (!is_slot(output_state_index[n], e)) return true;
  return false;
}

/// The states of head `head` of sequence n. Slots of the pool have a stride of `stride` elements;
/// other tensors of states are contiguous.
template <class S, class Index>
StateSlots find_states(decltype(Extents::N) n, int head, const Extents& e,
                       decltype(Extents::S) stride, const Index* state_index,
                       const Index* output_state_index) {
  constexpr decltype(Extents::S) kOne = S::K, kState = kOne * S::V;
  if (is_null_sequence<S>(n, e, state_index, output_state_index)) return {.null = true};
  decltype(Extents::S) from = n, to = n;
  if constexpr (S::STATE_INDEX) from = state_index[n];
  if constexpr (S::INPLACE_STATE) to = from;
  if constexpr (S::OUTPUT_STATE_INDEX) to = output_state_index[n];
  const decltype(Extents::S) slot = S::INPLACE_STATE ? stride : e.HV * kState;
  return {.from = from * slot + head * kState,
          .to = to * slot + head * kState,
          .from_scale = from * e.HV + head,
          .to_scale = to * e.HV + head};
}

/// The factor of elements of a state of the pool.
template <class S>
float scale_at(const float* state_scale, decltype(Extents::S) place) {
  if constexpr (S::STATE_SCALE) return state_scale[place];
  return 1.0F;
}

/// Whether sequence n starts from its slot's state, not from zeros.
template <class S>
bool starts_from_slot(decltype(Extents::N) n, const boolean* has_initial_state) {
  if constexpr (S::HAS_INITIAL_STATE) return has_initial_state[n] != 0;
  return true;
}

}  // namespace wyvern
