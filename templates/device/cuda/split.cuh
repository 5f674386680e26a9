// Splits of a sequence: which chunks a block has where several blocks share the sequence.
#pragma once

#include "device/cuda/chunk.cuh"
#include "device/cuda/warp.cuh"

namespace wyvern::cuda {

/// A block's part of a sequence, in chunks.
struct SequenceSplit {
  int64 token;         ///< the first
  int tokens, chunks;  ///< with the overlap
  int overlap;         ///< first chunks, recomputed without output until older state has decayed
  bool from_start;     ///< of the sequence
  bool to_end;
};

/// Counts that this warp has read its state. Of the splits of a sequence whose state is updated in
/// place the last one writes the slot that others start from: it waits until each of their consumer
/// warps has called this. `counter` is 0 when the kernel starts.
WYVERN_DEVICE void tell_slot_read(int32* counter) {
  fence_device();
  sync_warp();
  if (lane_index() == 0) add_to_counter(counter, 1);
}

/// The `turn`-th longest sequence of a packed batch: if long ones started last, the others would
/// wait for them. `turn` itself if there are more sequences than Threads. By all Threads threads;
/// `room` is shared memory for Threads + 1 numbers.
template <int Threads>
WYVERN_DEVICE int longest_first(int turn, int sequences, const int32* seq_offsets, int* room) {
  if (sequences < 2 || sequences > Threads) return turn;
  const int n = thread_index();
  const int tokens = n < sequences ? seq_offsets[n + 1] - seq_offsets[n] : 0;
  room[n] = tokens;
  sync_block();
  int before = 0;
#pragma unroll 4
  for (int i = 0; i < sequences; ++i)
    if (room[i] > tokens || (room[i] == tokens && i < n)) ++before;
  if (n < sequences && before == turn) room[Threads] = n;
  sync_block();
  const int chosen = room[Threads];
  sync_block();
  return chosen;
}

/// log2 of a bound on how much longer a state can be after a token than before it: the spectral
/// norm of exp(g) (I - beta k k^T) is at most exp(g) max(1, |1 - beta |k|^2|).
WYVERN_DEVICE float stretch(float g, float beta, float squared_length) {
  const float kept = 1.0f - beta * squared_length;
  const float grown = maximum(kept, -kept) - 1.0f;
  return (g + (grown > 0.0f ? log_one_plus(grown) : 0.0f)) * kLog2E;
}

/// |k|^2 of a row of K elements.
template <int K, class T>
WYVERN_DEVICE float squared_length(const T* row) {
  float square = 0.0f;
#pragma unroll 4
  for (int i = 0; i < K; i += 8) {
    const auto x = load<8>(row + i);
#pragma unroll
    for (int j = 0; j < 8; ++j)
      square = fused_multiply_add(to_float(x.at[j]), to_float(x.at[j]), square);
  }
  return square;
}

/// The number of chunks of Rows tokens before chunk `first` of a sequence in which any state decays
/// below 2^-30 of its length; `first`, if more than 4096 tokens are needed for that. stretch(t)
/// gives a lane's part of log2 of a bound on how much longer a state can be after the Tokens tokens
/// that end with token t of the sequence than before them. By all Threads threads; `sums` is shared
/// memory for one float a warp.
template <int Rows, int Threads, int Tokens, class Stretch>
WYVERN_DEVICE int count_overlap(int first, float* sums, Stretch&& stretch) {
  constexpr float kEnough = -30.0f;
  constexpr int kWarps = Threads / 32;
  constexpr int kChunks = kWarps * Tokens / Rows;  // in a round
  static_assert(kChunks > 0 && kChunks * Rows == kWarps * Tokens && kWarps % kChunks == 0);
  constexpr int kMostChunks = 4096 / Rows;
  constexpr int kFirstLook = 256 / Rows;
  float bound = 0.0f;
#pragma unroll 1
  for (int chunks = 0; chunks < kMostChunks;) {
    float x = stretch((first - chunks) * Rows - 1 - warp_index() * Tokens);
    x = sum_warp(x);
    sync_block();
    if (lane_index() == 0) sums[warp_index()] = x;
    sync_block();
#pragma unroll 1
    for (int c = 0; c < kChunks; ++c) {
      if (++chunks >= first) return first;
#pragma unroll
      for (int i = 0; i < kWarps / kChunks; ++i) bound += sums[c * (kWarps / kChunks) + i];
      if (bound < kEnough) return chunks;
      const float chunks_now = static_cast<float>(chunks);
      if (chunks >= kFirstLook && bound > kEnough / kMostChunks * chunks_now) return first;
    }
  }
  return first;
}

/// Split number `split` of `splits` of a sequence; count_overlap(first) returns the chunks before
/// chunk `first` after which older state has decayed.
template <int Rows, class CountOverlap>
WYVERN_DEVICE SequenceSplit split_sequence(const Sequence& sequence, int split, int splits,
                                           CountOverlap&& count_overlap) {
  const int64 all = ceil_div(sequence.tokens, Rows);
  const int first = static_cast<int>(all * split / splits);
  const int last = static_cast<int>(all * (split + 1) / splits);
  SequenceSplit part;
  part.to_end = split + 1 == splits;
  part.overlap = first > 0 && first < last ? count_overlap(first) : 0;
  const int start = first - part.overlap;
  part.from_start = start == 0;
  part.token = sequence.token + int64{start} * Rows;
  part.tokens = smaller(sequence.tokens, last * Rows) - start * Rows;
  part.chunks = last - start;
  return part;
}

/// The same, but if the last split's overlap reaches the sequence's start, it has all chunks and
/// the others none: they would take as long.
template <int Rows, class CountOverlap>
WYVERN_DEVICE SequenceSplit split_all_or_none(const Sequence& sequence, int split, int splits,
                                              CountOverlap&& count_overlap) {
  const int64 all = ceil_div(sequence.tokens, Rows);
  const int begin = static_cast<int>(all * (splits - 1) / splits);
  const int overlap = begin > 0 ? count_overlap(begin) : 0;
  if (overlap < begin)
    return split_sequence<Rows>(sequence, split, splits, [&](int first) {
      return first == begin ? overlap : count_overlap(first);
    });
  if (split + 1 < splits) return {};
  return split_sequence<Rows>(sequence, 0, 1, count_overlap);
}

}  // namespace wyvern::cuda
