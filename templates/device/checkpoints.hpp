// Which states inside a sequence are kept, and in which rows. For kernels of every device.
#pragma once

#include "device/types.hpp"

namespace wyvern {

/// Those of a walk that writes none.
struct NoCheckpoints {
  static constexpr bool kAny = false, kInside = false;
};

/// The checkpoints that a walk through a sequence comes to. S is the kernel's Spec.
template <class S>
struct Checkpoints {
  static constexpr bool kAny = S::CHECKPOINTS, kInside = S::CHECKPOINT_OFFSETS;

  uint32 next = 0;  ///< tokens of the sequence in front of the next one; 0: there is none
  uint32 row = 0;   ///< of checkpoints, where that goes
  uint32 rows = 0;  ///< that checkpoints has

  /// Of `count` tokens from `token` of the sequence on, a chunk's, those in front of a checkpoint
  /// among them or at their end; 0 where there is none.
  int reached(uint32 token, int count) const {
    return next > token && next <= token + count ? static_cast<int>(next - token) : 0;
  }
  /// The same of one that is not at their end, a multiple of 16.
  int inside(uint32 token, int count) const {
    if constexpr (!kInside) return 0;
    const int rows = reached(token, count);
    return rows < count ? rows : 0;
  }
  /// Where the state of head `head` goes, in elements from the start of checkpoints.
  decltype(Extents::CP) element(int head, const Extents& e) const {
    return (decltype(Extents::CP){row} * e.HV + head) * S::K * S::V;
  }
  /// The same with tokens counted from a later one, in front of the next checkpoint.
  Checkpoints counted_from(uint32 token) const {
    return {.next = next == 0 ? 0 : next - token, .row = row, .rows = rows};
  }
  /// Goes on to the one behind.
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

/// Those of sequence n behind its first `passed` tokens, a multiple of 16. Of a packed batch,
/// sequences before n have `before` of them.
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
