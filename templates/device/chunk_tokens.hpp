// Which rows of a chunk are the STEPS steps of one token. A gate acts only before the first of
// them, so products of two rows of one token are no part of the gate's gradient: they would cancel
// in its sums, and are left out, since gradients may be far smaller. For kernels of every device; S
// is the kernel's Spec.
#pragma once

#include "device/extents.hpp"

namespace wyvern {

/// Steps of a token with a scalar gate; else 1.
template <class S>
constexpr int gated_steps(const S& s) {
  return s.SCALAR_GATE && s.STEPS > 1 ? static_cast<int>(s.STEPS) : 1;
}

/// How many earlier rows of its own token a row of a chunk may have.
template <class S>
constexpr int earlier_steps(const S& s) {
  return static_cast<int>(gated_steps(s) < s.BT ? gated_steps(s) : s.BT) - 1;
}

template <class S>
struct ChunkTokens {
  static constexpr int kSteps = gated_steps(S{}), kEarlier = earlier_steps(S{});

  int before;  ///< rows of the first row's token in the previous chunk
  int rows;    ///< of the chunk

  /// A chunk of `count` rows from `row` of the batch on; every sequence starts with a whole token.
  ChunkTokens(decltype(Extents::T) row, int count)
      : before(kSteps == 1 ? 0 : static_cast<int>(row % kSteps)), rows(count) {}

  /// The chunk's first row of row r's token.
  int first(int r) const {
    if constexpr (kSteps == 1) return r;
    const int step = (before + r) % kSteps;
    return step < r ? r - step : 0;
  }
  /// Whether row s belongs to an earlier token than row r.
  bool is_earlier(int s, int r) const {
    if constexpr (kSteps == 1) return s < r;
    return (before + s) / kSteps < (before + r) / kSteps;
  }
  /// Whether row r belongs to the chunk's last token. Its update of the state does not decay before
  /// the chunk's end.
  bool is_last(int r) const { return !is_earlier(r, rows - 1); }
};

}  // namespace wyvern
