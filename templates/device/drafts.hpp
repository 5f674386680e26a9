// The states of a sequence's tokens in the recurrent pass: the state that the first token starts
// from, where each token's state is written, and in a tree of drafts each token's parent. For
// kernels of every device. S is the kernel's Spec.
#pragma once

#include "device/state_slots.hpp"

namespace wyvern {

/// Stand for no element of a tensor of states, and no token of a sequence.
inline constexpr int kNoState = -1, kNoToken = -2;

/// With INDEX_COLUMNS: the slot that sequence n starts from, in column num_accepted[n] - 1 of its
/// row of state_index; kNoState without such a column, or where that holds no slot's index.
template <class Index>
decltype(Extents::S) accepted_slot(decltype(Extents::N) n, const Extents& e,
                                   const Index* state_index, const Index* num_accepted) {
  const decltype(Extents::M) accepted = num_accepted[n];
  if (accepted < 1 || accepted > e.M) return kNoState;
  const decltype(Extents::S) slot = state_index[n * e.M + accepted - 1];
  return is_slot(slot, e) ? slot : kNoState;
}

/// Whether sequence n has a row of intermediate_states.
template <class Index>
bool has_row(decltype(Extents::N) n, const Extents& e, const Index* intermediate_index) {
  return intermediate_index[n] >= 0 && intermediate_index[n] < e.R;
}

/// As find_states(), but with INDEX_COLUMNS: then a sequence starts from the slot in column
/// num_accepted[n] - 1 of its row of state_index, and `to` has no meaning. With PARENT a sequence
/// without a row of intermediate_states, where its tokens find their parents' states, is a null
/// one.
template <class S, class Index>
StateSlots find_starting_state(decltype(Extents::N) n, int head, const Extents& e,
                               decltype(Extents::S) stride, const Index* state_index,
                               const Index* output_state_index, const Index* num_accepted,
                               const Index* intermediate_index) {
  if constexpr (S::PARENT)
    if (!has_row(n, e, intermediate_index)) return {.null = true};
  if constexpr (S::INDEX_COLUMNS) {
    const decltype(Extents::S) slot = accepted_slot(n, e, state_index, num_accepted);
    if (slot == kNoState) return {.null = true};
    return {.from = slot * stride + decltype(Extents::S){head} * S::K * S::V,
            .from_scale = slot * e.HV + head};
  } else {
    return find_states<S>(n, head, e, stride, state_index, output_state_index);
  }
}

/// Where the pool has head `head` of the state after token t of sequence n; null if there is no
/// such column of state_index or it holds no slot's index.
template <class S, class Index>
StateSlots token_slot(decltype(Extents::N) n, decltype(Extents::T) t, int head, const Extents& e,
                      decltype(Extents::S) stride, const Index* state_index) {
  if (t >= e.M) return {.null = true};
  const decltype(Extents::S) slot = state_index[n * e.M + t];
  if (!is_slot(slot, e)) return {.null = true};
  return {.to = slot * stride + decltype(Extents::S){head} * S::K * S::V,
          .to_scale = slot * e.HV + head};
}

/// The same in intermediate_states, in elements from its start; kNoState without a row of it, and
/// for tokens past its D.
template <class S, class Index>
decltype(Extents::S) intermediate_state(decltype(Extents::N) n, decltype(Extents::T) t, int head,
                                        const Extents& e, const Index* intermediate_index) {
  if (!has_row(n, e, intermediate_index) || t >= e.D) return kNoState;
  const decltype(Extents::R) row = intermediate_index[n];
  return ((row * e.D + t) * e.HV + head) * S::K * S::V;
}

/// The token whose state token t of sequence n starts from, -1: the sequence's start. kNoToken
/// where parent[n,t] is neither -1 nor an earlier token that is in `live`, a bit for each: the
/// token is null, and so are its descendants.
template <class Index>
int parent_of(decltype(Extents::N) n, decltype(Extents::T) t, const Extents& e, const Index* parent,
              unsigned live) {
  if (t >= e.D) return kNoToken;
  const auto from = parent[n * e.D + t];
  if (from < -1 || from >= t) return kNoToken;
  if (from >= 0 && (live >> from & 1U) == 0) return kNoToken;
  return static_cast<int>(from);
}

}  // namespace wyvern
