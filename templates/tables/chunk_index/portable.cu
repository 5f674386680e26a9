// Tables of a packed batch, in one block: running maxima make the offsets non-decreasing, running
// sums of chunk counts place each sequence's chunk slots.
#include "device/cuda/tile.cuh"
#include "tables/chunk_index/layout.hpp"

constexpr int kThreads = wyvern::chunk_index::kThreads;
constexpr wyvern::chunk_index::SharedLayout kLayout;

struct Max {
  WYVERN_DEVICE static int combine(int a, int b) { return larger(a, b); }
};
struct Sum {
  WYVERN_DEVICE static int combine(int a, int b) { return a + b; }
};

/// The combination of all threads' x up to and including this one's, and `carry`, which becomes the
/// combination of all. Zero is neutral for both operations, as no x is negative.
template <class Op>
WYVERN_DEVICE int scan_block(int x, int& carry) {
  int* const totals = array_at<kLayout.totals>(shared_memory());
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int below = shuffle_up(x, distance);
    if (lane_index() >= distance) x = Op::combine(x, below);
  }
  sync_block();  // the last call's totals have been read
  if (lane_index() == 31) totals[warp_index()] = x;
  sync_block();
  int before = carry;
  for (int i = 0; i < 32; ++i) {
    if (i == warp_index()) x = Op::combine(x, before);
    before = Op::combine(before, totals[i]);
  }
  carry = before;
  return x;
}

/// The last sequence that starts at or before `slot` in offsets[0..count], offsets[0] = 0.
WYVERN_DEVICE int find_sequence(const int32* offsets, int count, int slot) {
  int low = 0;
  int high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (offsets[middle] <= slot)
      low = middle;
    else
      high = middle;
  }
  return low;
}

WYVERN_KERNEL(kThreads, 0) {
  const int sequences = static_cast<int>(e.N);
  int carry = 0;
  for (int first = 0; first <= sequences; first += kThreads) {
    const int i = first + thread_index();
    int64 offset = i <= sequences ? static_cast<int64>(cu_seqlens[i]) : 0;
    offset = offset < 0 ? 0 : offset > e.T ? e.T : offset;
    const int clamped = scan_block<Max>(static_cast<int>(offset), carry);
    if (i <= sequences) seq_offsets[i] = clamped;
  }
  sync_block();
  carry = 0;
  for (int first = 0; first < sequences; first += kThreads) {
    const int i = first + thread_index();
    const int chunks = i < sequences ? ceil_div(seq_offsets[i + 1] - seq_offsets[i], BT) : 0;
    const int end = scan_block<Sum>(chunks, carry);
    if (i < sequences) chunk_offsets[i + 1] = end;
  }
  if (thread_index() == 0) chunk_offsets[0] = 0;
  sync_block();
  const int slots = static_cast<int>(e.NT);
  for (int slot = thread_index(); slot < slots; slot += kThreads) {
    const bool used = slot < carry;
    const int sequence = used ? find_sequence(chunk_offsets, sequences, slot) : -1;
    chunk_index[2 * slot] = sequence;
    chunk_index[2 * slot + 1] = used ? slot - chunk_offsets[sequence] : -1;
  }
}
