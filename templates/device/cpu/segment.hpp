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

/// The first slot of a sequence's segments, of Length tokens each. In a packed batch it is found
/// without a table: floor(offset / Length) + n leaves room for every sequence's segments.
template <bool Packed, int Length>
inline int64 first_segment(int64 sequence, const Extents& e, const int32* seq_offsets) {
  if constexpr (Packed) return seq_offsets[sequence] / Length + sequence;
  const int64 segments = (e.T + Length - 1) / Length;
  return sequence * (segments < 1 ? 1 : segments);
}

/// The segment in `slot`, for segments of Length tokens.
template <bool Packed, int Length>
inline Segment find_segment(int64 slot, const Extents& e, const int32* seq_offsets) {
  Segment segment;
  int64 high = e.N;
  while (high - segment.sequence > 1) {
    const int64 middle = (segment.sequence + high) / 2;
    if (first_segment<Packed, Length>(middle, e, seq_offsets) <= slot)
      segment.sequence = middle;
    else
      high = middle;
  }
  const int64 n = segment.sequence;
  segment.index = slot - first_segment<Packed, Length>(n, e, seq_offsets);
  const int64 start = Packed ? seq_offsets[n] : n * e.T;
  const int64 length = (Packed ? seq_offsets[n + 1] : (n + 1) * e.T) - start;
  const int64 first = segment.index * Length;
  segment.used = segment.index == 0 || first < length;
  segment.last = first + Length >= length;
  segment.token = start + first;
  segment.tokens = length - first < Length ? length - first : Length;
  return segment;
}

}  // namespace wyvern::cpu
