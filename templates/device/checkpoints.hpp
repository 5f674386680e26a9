// Which states inside a sequence are written to checkpoints, and to which rows. For kernels of
// every device.
#pragma once

#include "device/types.hpp"

namespace wyvern {

/// For scans without checkpoints.
struct NoCheckpoints {
  static constexpr bool kAny = false, kInside = false;
};

/// The next checkpoint of a scan through a sequence. S is the kernel's Spec.
template <class S>
struct Checkpoints {
  static constexpr bool kAny = S::CHECKPOINTS, kInside = S::CHECKPOINT_OFFSETS;

  uint32 next = 0;  ///< tokens of the sequence before it; 0: there is none
  uint32 row = 0;   ///< its row of checkpoints
  uint32 rows = 0;  ///< rows of checkpoints

  /// How many of a chunk's `count` tokens, which start at `token` of the sequence, are before a
  /// checkpoint in the chunk or at its end; 0 if there is none.
  int reached(uint32 token, int count) const {
    return next > token && next <= token + count ? static_cast<int>(next - token) : 0;
  }
  /// The same for a checkpoint before the chunk's end, a multiple of 16; else 0.
  int inside(uint32 token, int count) const {
    if constexpr (!kInside) return 0;
    const int rows = reached(token, count);
    return rows < count ? rows : 0;
  }
  /// The place of the state of head `head`, in elements from the start of checkpoints.
  decltype(Extents::CP) element(int head, const Extents& e) const {
    return (decltype(Extents::CP){row} * e.HV + head) * S::K * S::V;
  }
  /// The same with tokens counted from `token`, which is before the next checkpoint.
  Checkpoints counted_from(uint32 token) const {
    return {.next = next == 0 ? 0 : next - token, .row = row, .rows = rows};
  }
  /// Goes on to the following checkpoint.
  void pass() {
    next = S::CHECKPOINT_OFFSETS || ++row >= rows ? 0 : next + uint32{S::CHECKPOINT_EVERY};
  }
};

/// How many checkpoints sequences first, first + step, ... below n have, at every CHECKPOINT_EVERY
/// tokens.
template <class S>
uint32 count_checkpoints(int n, const Extents& e, const int32* seq_offsets, int first, int step) {
  uint32 count = 0;
  if constexpr (S::CHECKPOINT_EVERY != 0 && S::VARLEN)
    for (int m = first; m < n; m += step)
      count += static_cast<uint32>(seq_offsets[m + 1] - seq_offsets[m]) / S::CHECKPOINT_EVERY;
  return count;
}

/// The first checkpoint of sequence n after its first `passed` tokens, a multiple of 16. In a
/// packed batch the sequences before n have `before` checkpoints.
template <class S, class Index>
Checkpoints<S> checkpoints_behind(uint32 passed, int n, uint32 before, const Extents& e,
                                  const Index* checkpoint_offsets) {
  Checkpoints<S> found{.rows = static_cast<uint32>(e.CP)};
  if constexpr (S::CHECKPOINT_OFFSETS) {
    const auto offset = checkpoint_offsets[n];
    if (offset > 0 && offset <= e.T && offset % 16 == 0 && offset > passed)
      found.next = static_cast<uint32>(offset);
    found.row = static_cast<uint32>(n);
  } else if constexpr (S::CHECKPOINT_EVERY != 0) {
    constexpr uint32 kEvery{S::CHECKPOINT_EVERY};
    if constexpr (!S::VARLEN) before = static_cast<uint32>(n) * (static_cast<uint32>(e.T) / kEvery);
    found.row = before + passed / kEvery;
    if (found.row < found.rows) found.next = (passed / kEvery + 1) * kEvery;
  }
  return found;
}

}  // namespace wyvern
