// The scheduler of persistent blocks, one a multiprocessor, over the states of a launch. S is the
// kernel's Spec.
#pragma once

#include "device/cuda/decode.cuh"
#include "device/cuda/sm90/warp.cuh"
#include "device/cuda/warp.cuh"
#include "device/drafts.hpp"

namespace wyvern::cuda::decode {

/// A sequence and a value head, with their state.
struct StateItem {
  int64 n;
  int head;
  StateSlots slots;
  bool starts;       ///< from what the slot holds
  int64 begin, end;  ///< tokens
};

/// A block's items in order; neighbouring blocks have neighbouring heads. What memory says of 32
/// items is read at once, a lane each, for one latency in place of 32. `Find(n, head)` gives slots.
template <class S, class Find, class Seqlens>
class StateItems {
 public:
  WYVERN_DEVICE StateItems(const Extents& e, Find find, const Seqlens* cu_seqlens,
                           const boolean* has_initial_state)
      : e_(e), find_(find), cu_seqlens_(cu_seqlens), has_initial_state_(has_initial_state) {}

  /// The next item, by a whole warp; false where there is none.
  WYVERN_DEVICE bool next(StateItem& item) {
    const int64 at = block_index() + count_ * block_count();
    if (at >= all()) return false;
    const int turn = static_cast<int>(count_++ % 32);
    if (turn == 0) read(at + static_cast<int64>(lane_index()) * block_count());
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
    return true;
  }

 private:
  WYVERN_DEVICE int64 all() const { return e_.N * e_.HV; }
  WYVERN_DEVICE void read(int64 at) {
    if (at >= all()) return;
    const int64 n = own_.n = at / e_.HV;
    own_.head = static_cast<int>(at % e_.HV);
    own_.slots = find_(n, own_.head);
    own_.starts = !own_.slots.null && starts_from_slot<S>(n, has_initial_state_);
    if constexpr (S::VARLEN) {
      own_.begin = sequence_start<true>(cu_seqlens_, n, e_);
      own_.end = sequence_start<true>(cu_seqlens_, n + 1, e_);
    }
  }

  const Extents& e_;
  const Find find_;
  const Seqlens* const cu_seqlens_;
  const boolean* const has_initial_state_;
  int64 count_ = 0;
  StateItem own_{};  ///< this lane's
};

}  // namespace wyvern::cuda::decode
