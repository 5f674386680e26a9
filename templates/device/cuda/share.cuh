// Which part of a sequence a block walks through, where several share one.
#pragma once

#include "device/cuda/chunk.cuh"
#include "device/cuda/warp.cuh"

namespace wyvern::cuda {

/// A block's walk through a sequence, in chunks.
struct SharedWalk {
  int64 token;         ///< the first
  int tokens, chunks;  ///< of the walk
  int warm;            ///< chunks in front whose output is another block's
  bool from_start;     ///< of the sequence
  bool to_end;
};

/// Where several blocks share a sequence whose state is updated in place, one writes the slot that
/// others start from: it waits until each of their warps with a state has said by this that it
/// needs its slot no more. `counter` is 0 when the kernel starts.
WYVERN_DEVICE void tell_slot_read(int32* counter) {
  fence_device();
  sync_warp();
  if (lane_index() == 0) add_to_counter(counter, 1);
}

/// The sequence of a packed batch that comes `turn`-th where longer ones come before shorter ones:
/// the blocks of the last sequences are those that others wait for. `turn` itself where there are
/// more sequences than Threads, of which each keeps few blocks busy. By all Threads threads; `room`
/// is shared memory for Threads + 1 numbers.
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

/// How many chunks of Rows tokens before chunk `first` of a sequence take any state that enters
/// them to less than 2^-30 of its length; `first`, where that is not so after few thousand tokens,
/// or does not look as if it would be. stretch(t) gives a lane's part of log2 of a bound on how
/// much longer a state can be after the Tokens tokens that end with token t of the sequence than
/// before them. By all Threads threads; `sums` is shared memory for one float a warp.
template <int Rows, int Threads, int Tokens, class Stretch>
WYVERN_DEVICE int warm_up(int first, float* sums, Stretch&& stretch) {
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

/// Share number `share` of `shares` of a sequence; warm_up(first) says how many chunks before its
/// own a block must walk through, for what was before them not to count.
template <int Rows, class WarmUp>
WYVERN_DEVICE SharedWalk share_out(const Sequence& sequence, int share, int shares,
                                   WarmUp&& warm_up) {
  const int64 all = ceil_div(sequence.tokens, Rows);
  const int first = static_cast<int>(all * share / shares);
  const int last = static_cast<int>(all * (share + 1) / shares);
  SharedWalk walk;
  walk.to_end = share + 1 == shares;
  walk.warm = first > 0 && first < last ? warm_up(first) : 0;
  const int start = first - walk.warm;
  walk.from_start = start == 0;
  walk.token = sequence.token + int64{start} * Rows;
  walk.tokens = smaller(sequence.tokens, last * Rows) - start * Rows;
  walk.chunks = last - start;
  return walk;
}

/// The same, but where the last share would have to begin with the sequence, it alone is that of
/// all chunks and the others have none: they would take as long and only be in its way.
template <int Rows, class WarmUp>
WYVERN_DEVICE SharedWalk share_out_all_or_none(const Sequence& sequence, int share, int shares,
                                               WarmUp&& warm_up) {
  const int64 all = ceil_div(sequence.tokens, Rows);
  const int begin = static_cast<int>(all * (shares - 1) / shares);
  const int warm = begin > 0 ? warm_up(begin) : 0;
  if (warm < begin)
    return share_out<Rows>(sequence, share, shares,
                           [&](int first) { return first == begin ? warm : warm_up(first); });
  if (share + 1 < shares) return {};
  return share_out<Rows>(sequence, 0, 1, warm_up);
}

}  // namespace wyvern::cuda
