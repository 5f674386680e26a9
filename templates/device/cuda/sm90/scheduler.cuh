// Schedulers: which sequence, head, columns of V and chunks a block has. S is the kernel's Spec. A
// Kernel has the constants kRows (of a chunk), kTilesV (blocks over V), kThreads, kRoles, kSplits,
// its `work`, its parameters `p`, and load_head(), which loads the head's gate parameters.
#pragma once

#include "device/cuda/chunk.cuh"
#include "device/cuda/segment.cuh"
#include "device/cuda/sm90/ptx.cuh"
#include "device/cuda/split.cuh"
#include "device/cuda/state_unit.cuh"
#include "device/state_slots.hpp"

namespace wyvern::cuda::sm90 {

/// How blocks split a sequence. A split that is not the first starts with an overlap: chunks
/// recomputed, without output, until older state has decayed.
enum class Splits {
  none,
  each,         ///< every split with its overlap
  or_halves,    ///< the same, or the first two blocks have half of the columns each, others nothing
  all_or_none,  ///< the last split has all chunks if its overlap reaches the sequence's start
};

/// A block's work, known to all its warps.
struct Work : SequenceSplit {
  unsigned char* shared;
  int sequence, head, key_head, tile;
  bool halves;  ///< of BV columns: one consumer warpgroup works, the others are another block's
  bool zero_v;  ///< v is 0
  float unit;   ///< of the state, with STATE_UNIT
};

/// A copy of a block's work in shared memory: fields that are reloaded from there use no registers
/// between their uses. By one thread.
template <ArrayPlace Place, class Block>
WYVERN_DEVICE void save_block(const Block& b) {
  static_assert(sizeof(Block) <= 4 * Place.count);
  *reinterpret_cast<Block*>(array_at<Place>(b.shared)) = b;
}
template <ArrayPlace Place, class Block>
WYVERN_DEVICE Block saved_block(const Block& b) {
  Block copy = *reinterpret_cast<const Block*>(array_at<Place>(b.shared) + opaque(0));
  copy.shared = b.shared;
  return copy;
}

/// The unit of the block's state.
template <class S>
WYVERN_DEVICE float unit_of(const Work& work) {
  return S::STATE_UNIT ? work.unit : 1.0f;
}

/// Clears a null sequence's output in the block's columns.
template <class S, class Kernel>
WYVERN_DEVICE void clear_columns(const Kernel& k, int64 token, int tokens) {
  using Row = TokenRows<Element<S::DTYPE>>;
  clear_output<Kernel::kThreads>(
      Row{k.p.o, k.p.o_stride}.at(token, k.work.head * S::V + k.work.tile * S::BV), tokens, S::BV);
}

/// A block per sequence, or per split of it. Kernel::overlap(sequence, tokens): how many of a
/// sequence's first `tokens` tokens are needed in front of the others.
template <class S>
struct WholeSequence {
  static constexpr bool kOutput = true, kOverlaps = true;
  static constexpr bool kCheckpoints = S::CHECKPOINTS, kDivided = S::CHECKPOINT_OFFSETS;

  int64 sequence_token;
  int first_consumer;

  template <class Kernel>
  WYVERN_DEVICE bool find(Kernel& k) {
    auto& b = k.work;
    const auto& p = k.p;
    const Extents& e = p.e;
    b.tile = block_index() % Kernel::kTilesV;
    b.head = block_index() / Kernel::kTilesV % e.HV;
    b.key_head = e.key_head(b.head);
    const int sequences = static_cast<int>(e.N);
    b.sequence = block_index() / (Kernel::kTilesV * e.HV) % sequences;
    if constexpr (S::VARLEN)
      b.sequence = longest_first<Kernel::kThreads>(b.sequence, sequences, p.seq_offsets,
                                                   reinterpret_cast<int*>(b.shared));
    const Sequence sequence =
        locate_sequence<S::VARLEN, Kernel::kRows>(b.sequence, e, p.seq_offsets, p.chunk_offsets);
    sequence_token = sequence.token;
    const int chains = Kernel::kTilesV * e.HV * sequences;
    if (is_null_sequence<S>(b.sequence, e, p.state_index, p.output_state_index)) {
      if (block_index() < chains) clear_columns<S>(k, sequence.token, sequence.tokens);
      return false;
    }
    k.load_head();
    constexpr bool kMaySplit = Kernel::kSplits != Splits::none;
    const int splits = kMaySplit ? block_count() / chains : 1;
    // The last splits start first, since their overlaps may reach the sequence's start. In place
    // the last split waits for the others, so it starts after them.
    const int turn = block_index() / chains;
    const int split = S::INPLACE_STATE ? turn : splits - 1 - turn;
    const auto overlap_before = [&](int chunk) {
      return ceil_div(k.overlap(sequence, chunk * Kernel::kRows), Kernel::kRows);
    };
    first_consumer = 0;
    if constexpr (Kernel::kSplits == Splits::all_or_none) {
      static_cast<SequenceSplit&>(b) =
          split_all_or_none<Kernel::kRows>(sequence, split, splits, overlap_before);
    } else {
      const int all = ceil_div(sequence.tokens, Kernel::kRows);
      const int last = static_cast<int>(int64{all} * (splits - 1) / splits);
      int overlap = 0;  // of the last split, by which all blocks of the sequence decide
      b.halves = false;
      if constexpr (Kernel::kSplits == Splits::or_halves) {
        if (last > 0) overlap = overlap_before(last);
        // A chunk of 64 columns takes about 0.75 of the time of one of 128.
        b.halves = splits > 1 && 4 * (all - last + overlap) > 3 * all;
      }
      if (b.halves) {
        first_consumer = split;
        static_cast<SequenceSplit&>(b) = {};
        if (split < Kernel::kRoles.mma)
          static_cast<SequenceSplit&>(b) =
              split_sequence<Kernel::kRows>(sequence, 0, 1, overlap_before);
      } else {
        static_cast<SequenceSplit&>(b) =
            split_sequence<Kernel::kRows>(sequence, split, splits, [&](int first) {
              const bool known = Kernel::kSplits == Splits::or_halves && first == last;
              return known ? overlap : kMaySplit ? overlap_before(first) : 0;
            });
      }
    }
    if (b.chunks == 0 && !b.to_end) {
      if constexpr (S::INPLACE_STATE && kMaySplit)
        if (warp_index() < 4 * Kernel::kRoles.mma)
          tell_slot_read(p.slots_read + b.sequence * e.HV + b.head);
      return false;
    }
    if constexpr (S::STATE_UNIT) {
      const auto* const states = S::INPLACE_STATE ? p.state : p.initial_state;
      const bool starts = (S::INPLACE_STATE || S::INITIAL_STATE) && b.from_start &&
                          starts_from_slot<S>(b.sequence, p.has_initial_state);
      const StateSlots slots = find_states<S>(b.sequence, b.head, e, p.state_stride, p.state_index,
                                              p.output_state_index);
      b.unit = find_unit<S, Kernel::kThreads>(starts ? states + slots.from : nullptr, 1.0f,
                                              reinterpret_cast<float*>(b.shared));
    }
    return true;
  }

  /// Tokens of the sequence before the block's first.
  WYVERN_DEVICE uint32 passed(const Work& b) const {
    return static_cast<uint32>(b.token - sequence_token);
  }
};

/// A block per segment that another follows, with SUMMARY per segment, and BV columns of M or R,
/// its map of states S -> M S + R, in Kernel's segment_M() and segment_R(). Only the overlap()
/// tokens before the segment's end count: if not all do, M is 0.
template <class S>
struct SegmentMap {
  static constexpr bool kOutput = false, kOverlaps = false;
  static constexpr bool kCheckpoints = false, kDivided = false;
  static constexpr int first_consumer = 0;

  int slot;  ///< of the segment and value head

  template <class Kernel>
  WYVERN_DEVICE bool find(Kernel& k) {
    constexpr int kTilesK = S::K / S::BV, kTiles = kTilesK + Kernel::kTilesV;
    auto& b = k.work;
    const auto& p = k.p;
    const Extents& e = p.e;
    const int tile = block_index() % kTiles;
    const int place = block_index() / kTiles;  // of the segment and value head
    const Segment segment =
        locate_segment<S::VARLEN, S::BT, !S::SUMMARY>(place / e.HV, e, p.seq_offsets);
    if (!segment.used || (segment.last && !S::SUMMARY)) return false;
    b.head = place % e.HV;
    b.key_head = e.key_head(b.head);
    slot = segment.slot * e.HV + b.head;
    b.zero_v = tile < kTilesK;
    b.tile = b.zero_v ? tile : tile - kTilesK;
    b.token = segment.token;
    const int tokens = S::SUMMARY ? segment.tokens : segment_tokens<S::BT>(e);
    b.tokens = tokens;
    if constexpr (S::SUMMARY) {
      if (tokens == 0) {
        if (b.zero_v)
          write_no_change<S::K, S::BV, S::K, Kernel::kThreads>(
              k.segment_M() + int64{slot} * S::K * S::K, b.tile * S::BV, true);
        else
          write_no_change<S::K, S::BV, S::V, Kernel::kThreads>(
              k.segment_R() + int64{slot} * S::K * S::V, b.tile * S::BV, false);
        return false;
      }
    }
    k.load_head();
    if constexpr (Kernel::kSplits != Splits::none) {
      const int overlap = k.overlap({.token = b.token, .tokens = tokens, .slot = 0}, tokens);
      if (overlap < tokens) {
        if (b.zero_v) {
          write_no_M<S::K, S::BV, Kernel::kThreads>(k.segment_M() + int64{slot} * S::K * S::K,
                                                    b.tile * S::BV);
          return false;
        }
        b.token += tokens - overlap;
        b.tokens = overlap;
      }
    }
    b.chunks = ceil_div(b.tokens, Kernel::kRows);
    b.unit = b.zero_v ? 1.0f : kValueUnit<S>;
    return true;
  }
};

/// A block per segment, from the state before it.
template <class S>
struct SegmentResume {
  static constexpr bool kOutput = true, kOverlaps = false;
  static constexpr bool kCheckpoints = S::CHECKPOINTS, kDivided = S::CHECKPOINT_OFFSETS;
  static constexpr int first_consumer = 0;

  int before;  ///< tokens of the sequence in front of the segment

  template <class Kernel>
  WYVERN_DEVICE bool find(Kernel& k) {
    auto& b = k.work;
    const auto& p = k.p;
    const Extents& e = p.e;
    const Segment segment =
        locate_segment<S::VARLEN, S::BT>(block_index() / Kernel::kTilesV / e.HV, e, p.seq_offsets);
    if (!segment.used) return false;
    b.tile = block_index() % Kernel::kTilesV;
    b.head = block_index() / Kernel::kTilesV % e.HV;
    b.key_head = e.key_head(b.head);
    if (is_null_sequence<S>(segment.sequence, e, p.state_index, p.output_state_index)) {
      clear_columns<S>(k, segment.token, segment.tokens);
      return false;
    }
    b.sequence = segment.sequence;
    b.token = segment.token;
    b.tokens = segment.tokens;
    b.chunks = ceil_div(segment.tokens, Kernel::kRows);
    // There is no overlap. As a constant 0 costs registers.
    b.overlap = opaque(0);
    b.to_end = segment.last;
    before = segment.index * segment_tokens<S::BT>(e);
    k.load_head();
    if constexpr (S::STATE_UNIT)
      b.unit = find_unit<S, Kernel::kThreads>(
          p.segment_state + int64{block_index() / Kernel::kTilesV} * S::K * S::V, 1.0f,
          reinterpret_cast<float*>(b.shared));
    return true;
  }

  WYVERN_DEVICE uint32 passed(const Work&) const { return static_cast<uint32>(before); }
};

}  // namespace wyvern::cuda::sm90
