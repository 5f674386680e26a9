// Segments of long sequences, which are scanned in parallel.
#pragma once

#include "device/cpu/types.hpp"

namespace wyvern::cpu {

/// One segment slot. Every sequence has at least one segment, an empty sequence an empty one.
struct Segment {
  int64 sequence = 0;
  int64 index = 0;  ///< of its sequence's segments
  int64 token = 0;
  int64 tokens = 0;
  bool used = false;
  bool last = false;
};

/// Tokens of a segment of chunks of BT, but for a sequence's last one.
template <int BT>
inline int64 segment_tokens(const Extents& e) {
  return e.SEG * BT;
}

/// The first slot of a sequence's segments. In a packed batch it is found without a table:
/// floor(offset / tokens of a segment) + n leaves room for every sequence's segments.
template <bool Packed, int BT>
inline int64 first_segment(int64 sequence, const Extents& e, const int32* seq_offsets) {
  const int64 tokens = segment_tokens<BT>(e);
  if constexpr (Packed) return seq_offsets[sequence] / tokens + sequence;
  const int64 segments = (e.T + tokens - 1) / tokens;
  return sequence * (segments < 1 ? 1 : segments);
}

/// The segment in `slot`.
template <bool Packed, int BT>
inline Segment find_segment(int64 slot, const Extents& e, const int32* seq_offsets) {
  const int64 tokens = segment_tokens<BT>(e);
  Segment segment;
  int64 high = e.N;
  while (high - segment.sequence > 1) {
    const int64 middle = (segment.sequence + high) / 2;
    if (first_segment<Packed, BT>(middle, e, seq_offsets) <= slot)
      segment.sequence = middle;
    else
      high = middle;
  }
  const int64 n = segment.sequence;
  segment.index = slot - first_segment<Packed, BT>(n, e, seq_offsets);
  const int64 start = Packed ? seq_offsets[n] : n * e.T;
  const int64 length = (Packed ? seq_offsets[n + 1] : (n + 1) * e.T) - start;
  const int64 first = segment.index * tokens;
  segment.used = segment.index == 0 || first < length;
  segment.last = first + tokens >= length;
  segment.token = start + first;
  segment.tokens = length - first < tokens ? length - first : tokens;
  return segment;
}

}  // namespace wyvern::cpu
