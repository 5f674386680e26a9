// The windows of a short convolution in the recurrent pass, which verifies drafts. For kernels of
// every device; S is the kernel's Spec.
#pragma once

#include "device/conv_windows.hpp"
#include "device/drafts.hpp"

namespace wyvern {

/// As find_windows(), but with INDEX_COLUMNS, for a sequence of `tokens` tokens: then the window in
/// front of its first row is columns num_accepted[n] - 1 on of the slot in column 0 of its row of
/// state_index, and `last` is that slot, null also without tokens. A sequence whose column 0 has no
/// slot's index starts from zeros. With PARENT a sequence without a row of intermediate_conv_states
/// is a null one.
template <class S, class T, class Index>
ConvWindows<T> find_step_windows(int64 n, int64 tokens, int64 channels, const Extents& e,
                                 const ConvStates<T, Index>& of, const Index* num_accepted,
                                 const Index* intermediate_index) {
  if constexpr (S::PARENT)
    if (!has_row(n, e, intermediate_index)) return {.null = true};
  if constexpr (!S::INDEX_COLUMNS) {
    return find_windows<S>(n, channels, e, of);
  } else {
    if (accepted_slot(n, e, of.state_index, num_accepted) == kNoState) return {.null = true};
    const int64 slot = of.state_index[n * e.M];
    if (!is_slot(slot, e)) return {};
    ConvWindows<T> windows;
    T* const columns = of.conv_state + slot * of.stride;
    if (starts_from_slot<S>(n, of.has_initial_state))
      windows.first = columns + window_place<S>(0, num_accepted[n] - 1, channels);
    if (tokens > 0) windows.last = columns;
    return windows;
  }
}

/// With INDEX_COLUMNS: how many of a sequence's tokens have a column, behind the CONV_WIDTH - 2
/// columns in front of its first.
inline int64 columns_of_tokens(int64 tokens, const Extents& e) {
  return tokens < e.M ? tokens : e.M;
}

/// The windows of intermediate_conv_states.
template <class S>
using DraftWindows = WindowLayout<S::CONV_INPLACE && S::CONV_TOKENS_FIRST, S::CONV_WIDTH - 1>;

/// The windows behind a sequence's tokens, D of them, in intermediate_conv_states.
template <class T>
struct WindowsBehind {
  T* first = nullptr;  ///< null: none is written
  int64 size = 0;      ///< elements of one

  T* at(int64 token) const { return first + token * size; }
};

/// Of sequence n, which is a null one or not.
template <class S, class T, class Index>
WindowsBehind<T> find_windows_behind(int64 n, bool null, int64 channels, const Extents& e,
                                     const Index* intermediate_index, T* intermediate_conv_states) {
  const int64 size = channels * (S::CONV_WIDTH - 1);
  if constexpr (S::INTERMEDIATE_STATES)
    if (!null && has_row(n, e, intermediate_index))
      return {intermediate_conv_states + intermediate_index[n] * e.D * size, size};
  return {};
}

}  // namespace wyvern
