// Segments of long sequences, which scans work on at once.
#pragma once

#include "device/cuda/tile.cuh"

namespace wyvern::cuda {

/// One segment slot. Every sequence has at least one segment, an empty sequence an empty one.
struct Segment {
  int slot = 0;
  int sequence = 0;
  int index = 0;  ///< of its sequence's segments
  int64 token = 0;
  int tokens = 0;
  bool used = false;
  bool last = false;
};

/// Tokens of a segment of chunks of BT, but for a sequence's last one.
template <int BT>
WYVERN_DEVICE int segment_tokens(const Extents& e) {
  return e.SEG * BT;
}

/// The first slot of a sequence's segments. In a packed batch it is found without a table:
/// floor(offset / tokens of a segment) + n leaves room for every sequence's segments. Counting only
/// segments that are Followed by another, it is n less, and there are e.NS - e.N at most.
template <bool Packed, int BT, bool Followed = false>
WYVERN_DEVICE int64 first_segment(int sequence, const Extents& e, const int32* seq_offsets) {
  const int tokens = segment_tokens<BT>(e);
  if constexpr (Packed) return seq_offsets[sequence] / tokens + (Followed ? 0 : sequence);
  return int64{sequence} *
         (larger(ceil_div(static_cast<int>(e.T), tokens), 1) - (Followed ? 1 : 0));
}

/// The segment in slot `place`; counting only those that are Followed by another, it may be a last
/// one where a packed batch has fewer.
template <bool Packed, int BT, bool Followed = false>
WYVERN_DEVICE Segment locate_segment(int place, const Extents& e, const int32* seq_offsets) {
  const int tokens = segment_tokens<BT>(e);
  Segment segment;
  int length = static_cast<int>(e.T);
  int64 token = 0;
  if constexpr (Packed) {
    int high = static_cast<int>(e.N);
    while (high - segment.sequence > 1) {
      const int middle = (segment.sequence + high) / 2;
      if (first_segment<Packed, BT, Followed>(middle, e, seq_offsets) <= place)
        segment.sequence = middle;
      else
        high = middle;
    }
    token = seq_offsets[segment.sequence];
    length = seq_offsets[segment.sequence + 1] - static_cast<int>(token);
  } else {
    segment.sequence = place / (larger(ceil_div(length, tokens), 1) - (Followed ? 1 : 0));
    token = segment.sequence * e.T;
  }
  segment.slot = place + (Followed ? segment.sequence : 0);
  segment.index = static_cast<int>(
      place - first_segment<Packed, BT, Followed>(segment.sequence, e, seq_offsets));
  const int first = segment.index * tokens;
  segment.used = segment.index == 0 || first < length;
  segment.last = first + tokens >= length;
  segment.token = token + first;
  segment.tokens = smaller(length - first, tokens);
  return segment;
}

/// What an M begins with that is 0 otherwise: the least positive number. No other M does, and where
/// one does, the combine need not read it.
constexpr uint32 kForgetsAll = 1;

/// An element of an M that may not be 0, as it is written.
WYVERN_DEVICE float element_of_M(float x) { return float_bits(x) == kForgetsAll ? 0.0f : x; }

/// Writes BV columns from `first` of an M that is 0, by all Threads threads.
template <int K, int BV, int Threads>
WYVERN_DEVICE void write_no_M(float* M, int first) {
  constexpr int kPieces = BV / 4;
  for (int i = thread_index(); i < K * kPieces; i += Threads) {
    Vector<float, 4> x{};
    if (i == 0 && first == 0) x.at[0] = bits_float(kForgetsAll);
    *reinterpret_cast<Vector<float, 4>*>(M + i / kPieces * K + first + i % kPieces * 4) = x;
  }
}

/// Writes BV columns from `first` of the map of a segment without tokens, S -> S: of M, the
/// identity, or of R [K, Width], 0. By all Threads threads.
template <int K, int BV, int Width, int Threads>
WYVERN_DEVICE void write_no_change(float* map, int first, bool of_M) {
  for (int i = thread_index(); i < K * BV; i += Threads) {
    const int row = i / BV;
    const int col = first + i % BV;
    map[row * Width + col] = of_M && row == col ? 1.0f : 0.0f;
  }
}

}  // namespace wyvern::cuda
