// Schedulers of the backward pass's scans, forward for states and in reverse for their gradients.
// The blocks of reverse scans, the longer ones, come first. S is the kernel's Spec. The kernel's
// Scans has the constants kRows (of a chunk), kTilesV (blocks over V) and kThreads, its `work` and
// `reverse`, its parameters `p`, and load_head(), which loads the head's gate parameters.
#pragma once

#include "device/cuda/chunk.cuh"
#include "device/cuda/segment.cuh"
#include "device/cuda/sm90/ptx.cuh"

namespace wyvern::cuda::sm90 {

/// A block's work, known to all its warps: BV columns of V of a sequence, or of a segment of one,
/// and value head.
struct ScanWork {
  unsigned char* shared;
  int64 token;  ///< the first
  int64 slot;   ///< of the first chunk; with SegmentMaps of the segment and value head
  int tokens, chunks;
  int sequence, head, key_head, tile;
  int heads;         ///< value heads
  bool first, last;  ///< of the sequence's segments
  bool zero_v;       ///< v is 0
};

/// The same by steps, a chunk each. A reverse scan starts at the last chunk.
template <int Rows, bool Reverse>
struct ScanSteps : ScanWork {
  static constexpr bool kReverse = Reverse;

  WYVERN_DEVICE int chunk(int step) const { return Reverse ? chunks - 1 - step : step; }
  WYVERN_DEVICE int rows(int step) const { return smaller(tokens - chunk(step) * Rows, Rows); }
  WYVERN_DEVICE int64 first_row(int step) const { return token + int64{chunk(step)} * Rows; }
  /// Of the chunk and head in a tensor [NT, HV, ...].
  WYVERN_DEVICE int place(int step) const {
    return static_cast<int>((slot + chunk(step)) * heads + head);
  }
};

/// The tensor map of v, or in reverse of do.
template <bool Reverse, class Params>
WYVERN_DEVICE const TensorMap& values_map(const Params& p) {
  if constexpr (Reverse)
    return p.do_map;
  else
    return p.v_map;
}
/// Of the states that enter chunks, or in reverse of the gradients of states that leave them.
template <bool Reverse, class Params>
WYVERN_DEVICE const TensorMap& states_map(const Params& p) {
  if constexpr (Reverse)
    return p.dstate_map;
  else
    return p.state_map;
}

/// The block's direction, and its number among the blocks of that direction.
template <class Scans>
WYVERN_DEVICE int find_direction(Scans& k) {
  const int scans = block_count() / 2;
  k.reverse = block_index() < scans;
  return k.reverse ? block_index() : block_index() - scans;
}

/// The heads of the block's work.
WYVERN_DEVICE void find_heads(ScanWork& work, int head, const Extents& e) {
  work.head = head;
  work.key_head = e.key_head(head);
  work.heads = e.HV;
}

/// A block per direction, sequence, value head and BV columns of V.
template <class S>
struct WholeScans {
  static constexpr bool kOutput = true;

  template <class Scans>
  WYVERN_DEVICE static bool find(Scans& k) {
    const int scan = find_direction(k);
    locate(k, scan);
    return k.reverse || k.work.chunks > 0;
  }

  /// The work of a direction's scan of this number.
  template <class Scans>
  WYVERN_DEVICE static void locate(Scans& k, int scan) {
    auto& b = k.work;
    const auto& p = k.p;
    const Extents& e = p.e;
    b.sequence = scan / Scans::kTilesV / e.HV;
    const Sequence sequence =
        locate_sequence<S::VARLEN, Scans::kRows>(b.sequence, e, p.seq_offsets, p.chunk_offsets);
    b.token = sequence.token;
    b.slot = sequence.slot;
    b.tokens = sequence.tokens;
    b.chunks = ceil_div(sequence.tokens, Scans::kRows);
    b.tile = scan % Scans::kTilesV;
    find_heads(b, scan / Scans::kTilesV % e.HV, e);
    k.load_head();
  }
};

/// A block per sequence, value head and BV columns of V of the reverse scan alone.
template <class S>
struct WholeReverseScans {
  static constexpr bool kOutput = true;

  template <class Scans>
  WYVERN_DEVICE static bool find(Scans& k) {
    k.reverse = true;
    WholeScans<S>::locate(k, block_index());
    return true;
  }
};

/// The same where it writes the gradient of the state that enters the sequence and nothing of
/// chunks.
template <class S>
struct SummaryScans {
  static constexpr bool kOutput = false;

  template <class Scans>
  WYVERN_DEVICE static bool find(Scans& k) {
    return WholeReverseScans<S>::find(k);
  }
};

/// A block per direction, segment, value head and BV columns of V, from the states and gradients at
/// the segments' ends.
template <class S>
struct ResumeScans {
  static constexpr bool kOutput = true;

  template <class Scans>
  WYVERN_DEVICE static bool find(Scans& k) {
    return locate(k, find_direction(k));
  }

  /// The work of a direction's scan of this number; false if there is none.
  template <class Scans>
  WYVERN_DEVICE static bool locate(Scans& k, int scan) {
    auto& b = k.work;
    const auto& p = k.p;
    const Extents& e = p.e;
    const Segment segment =
        locate_segment<S::VARLEN, S::BT>(scan / Scans::kTilesV / e.HV, e, p.seq_offsets);
    if (!segment.used) return false;
    const Sequence sequence = locate_sequence<S::VARLEN, Scans::kRows>(
        segment.sequence, e, p.seq_offsets, p.chunk_offsets);
    b.token = segment.token;
    b.slot = sequence.slot + segment.index * k.p.e.SEG;
    b.tokens = segment.tokens;
    b.chunks = ceil_div(segment.tokens, Scans::kRows);
    b.sequence = segment.sequence;
    b.first = segment.index == 0;
    b.tile = scan % Scans::kTilesV;
    find_heads(b, scan / Scans::kTilesV % e.HV, e);
    k.load_head();
    return k.reverse || b.chunks > 0;
  }

  /// The block's segment and value head.
  template <class Scan>
  WYVERN_DEVICE static int64 place() {
    const int scans = block_count() / 2;
    const int scan = Scan::kReverse ? block_index() : block_index() - scans;
    return scan / Scan::kTilesV;
  }
};

/// The reverse scans of these alone.
template <class S>
struct ReverseResumeScans {
  static constexpr bool kOutput = true;

  template <class Scans>
  WYVERN_DEVICE static bool find(Scans& k) {
    k.reverse = true;
    return ResumeScans<S>::locate(k, block_index());
  }
};

/// A block per segment, value head and BV columns of M, R or dR, of a segment's maps of states,
/// S -> M S + R, and of their gradients, dS -> dM dS + dR. R and dR come from scans of zeros, M
/// from a forward scan of the identity with v = 0, and dM = M^T. Scans::overlap(segment): how many
/// of the segment's last chunks, or first ones in reverse, count; if not all do, M is 0. With
/// SUMMARY there are dM and dR alone, and those of first segments too.
template <class S>
struct SegmentMaps {
  static constexpr bool kOutput = false;

  template <class Scans>
  WYVERN_DEVICE static bool find(Scans& k) {
    constexpr int kTilesV = Scans::kTilesV;
    constexpr int kFirstM = S::SUMMARY ? kTilesV : 2 * kTilesV;
    constexpr int kTiles = kFirstM + S::K / S::BV;
    auto& b = k.work;
    const Extents& e = k.p.e;
    const int tile = block_index() % kTiles;
    const int slot = block_index() / kTiles;
    const Segment segment = locate_segment<S::VARLEN, S::BT>(slot / e.HV, e, k.p.seq_offsets);
    b.first = segment.index == 0;
    b.last = segment.last;
    if (!segment.used || (b.first && b.last && !S::SUMMARY)) return false;
    k.reverse = tile < kTilesV;
    b.zero_v = tile >= kFirstM;
    if (!S::SUMMARY && !b.zero_v && (k.reverse ? b.first : b.last)) return false;
    b.slot = slot;
    find_heads(b, slot % e.HV, e);
    b.tile = b.zero_v ? tile - kFirstM : tile % kTilesV;
    float* const dM = k.p.share_dM + int64{slot} * S::K * S::K;
    if constexpr (S::SUMMARY) {
      if (segment.tokens == 0) {
        if (b.zero_v)
          write_no_change<S::K, S::BV, S::K, Scans::kThreads>(dM, b.tile * S::BV, true);
        else
          write_no_change<S::K, S::BV, S::V, Scans::kThreads>(
              k.p.share_dR + int64{slot} * S::K * S::V, b.tile * S::BV, false);
        return false;
      }
    }
    k.load_head();
    const int chunks = ceil_div(segment.tokens, Scans::kRows);
    b.chunks = k.overlap(segment, chunks);
    if (b.zero_v && b.chunks < chunks) {
      if constexpr (!S::SUMMARY) {
        float* const M = k.p.share_M + int64{slot} * S::K * S::K;
        if (!b.last) write_no_M<S::K, S::BV, Scans::kThreads>(M, b.tile * S::BV);
      }
      if (S::SUMMARY || !b.first) write_no_M<S::K, S::BV, Scans::kThreads>(dM, b.tile * S::BV);
      return false;
    }
    const int skipped = k.reverse ? 0 : (chunks - b.chunks) * Scans::kRows;
    b.token = segment.token + skipped;
    b.tokens = smaller(segment.tokens - skipped, b.chunks * Scans::kRows);
    return true;
  }
};

}  // namespace wyvern::cuda::sm90
