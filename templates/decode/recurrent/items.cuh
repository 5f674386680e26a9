// The scheduler of persistent blocks, one a multiprocessor, over the states of a launch. S is the
// kernel's Spec.
#pragma once

#include "device/cuda/decode.cuh"
#include "device/cuda/sm90/warp.cuh"
#include "device/cuda/warp.cuh"
#include "device/drafts.hpp"

namespace wyvern::cuda::decode {

/// Whether a kernel with the Spec S covers short_conv_step.
template <class S>
constexpr bool kConvolves = requires { S::CONV_WIDTH; };

inline constexpr int64 kNoWindow = -1;

/// The windows of a sequence's convolution, in elements from the starts of their tensors.
struct WindowPlaces {
  int64 first = kNoWindow;  ///< in front of its first row; kNoWindow: zeros
  int64 last = kNoWindow;   ///< from which it goes on; kNoWindow: not written
};

/// A sequence and a value head, with their state.
struct StateItem {
  int64 n;
  int head;
  StateSlots slots;
  bool starts;       ///< from what the slot holds
  int64 begin, end;  ///< tokens
  WindowPlaces windows;
};

struct NoWindows {
  static constexpr bool kAny = false;
};

/// A block's items in order; neighbouring blocks have neighbouring heads. What memory says of 32
/// items is read at once, a lane each, for one latency in place of 32. `Find(n, head)` gives slots,
/// `Windows::places(n, e)` windows, if it has any. kGroup value heads of a sequence go to one
/// block, one after the other.
template <class S, int kGroup, class Find, class Windows, class Seqlens>
class StateItems {
 public:
  WYVERN_DEVICE StateItems(const Extents& e, Find find, const Windows& windows,
                           const Seqlens* cu_seqlens, const boolean* has_initial_state)
      : e_(e),
        find_(find),
        windows_(windows),
        cu_seqlens_(cu_seqlens),
        has_initial_state_(has_initial_state) {}

  /// The next item, by a whole warp; false where there is none.
  WYVERN_DEVICE bool next(StateItem& item) {
    if (group_of(count_) >= groups()) return false;
    const int turn = static_cast<int>(count_ % 32);
    if (turn == 0) read(count_ + lane_index());
    ++count_;
    item.n = sm90::from_lane(own_.n, turn);
    item.head = sm90::from_lane(own_.head, turn);
    item.slots = {.from = sm90::from_lane(own_.slots.from, turn),
                  .to = sm90::from_lane(own_.slots.to, turn),
                  .null = sm90::from_lane(static_cast<int>(own_.slots.null), turn) != 0};
    if constexpr (S::STATE_SCALE) {
      item.slots.from_scale = sm90::from_lane(own_.slots.from_scale, turn);
      item.slots.to_scale = sm90::from_lane(own_.slots.to_scale, turn);
    }
    item.starts = sm90::from_lane(static_cast<int>(own_.starts), turn) != 0;
    item.begin = S::VARLEN ? sm90::from_lane(own_.begin, turn) : item.n * e_.T;
    item.end = S::VARLEN ? sm90::from_lane(own_.end, turn) : item.begin + e_.T;
    if constexpr (Windows::kAny)
      item.windows = {.first = sm90::from_lane(own_.windows.first, turn),
                      .last = sm90::from_lane(own_.windows.last, turn)};
    return true;
  }

 private:
  WYVERN_DEVICE int64 groups() const { return e_.N * e_.HV / kGroup; }
  /// Of the block's `count`-th item.
  WYVERN_DEVICE static int64 group_of(int64 count) {
    return block_index() + count / kGroup * block_count();
  }
  WYVERN_DEVICE void read(int64 count) {
    const int64 first = group_of(count) * kGroup;
    if (group_of(count) >= groups()) return;
    const int64 n = own_.n = first / e_.HV;
    own_.head = static_cast<int>(first % e_.HV + count % kGroup);
    own_.slots = find_(n, own_.head);
    if constexpr (Windows::kAny) own_.windows = windows_.places(n, e_);
    own_.starts = !own_.slots.null && starts_from_slot<S>(n, has_initial_state_);
    if constexpr (S::VARLEN) {
      own_.begin = sequence_start<true>(cu_seqlens_, n, e_);
      own_.end = sequence_start<true>(cu_seqlens_, n + 1, e_);
    }
  }

  const Extents& e_;
  const Find find_;
  const Windows windows_;
  const Seqlens* const cu_seqlens_;
  const boolean* const has_initial_state_;
  int64 count_ = 0;
  StateItem own_{};  ///< this lane's
};

}  // namespace wyvern::cuda::decode
