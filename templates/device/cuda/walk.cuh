// What walks through the chunks of a sequence or a segment share, forwards (scan.cuh) and backwards
// (reverse_scan.cuh). A block has BV columns of the state of one value head, or of its gradient;
// each warp keeps its columns in registers.
#pragma once

#include "device/cuda/chunk.cuh"
#include "device/cuda/state.cuh"

namespace wyvern::cuda {

constexpr int kThreads = num_warps * 32;
constexpr int kStrips = BV / 16 / num_warps;
constexpr int kPaddedK = round_up(K, 16);
constexpr int kTilesV = ceil_div(V, BV);
constexpr int kKeyHeads = VECTOR_GATE ? HV : H;  // qg and kg have the value heads
constexpr bool kScaledKeys = QK_L2NORM && !VECTOR_GATE;

/// Columns of V from `first` on, where that is not known to be enough for a strip.
WYVERN_DEVICE int columns_from(int first) { return V % BV == 0 ? BV : V - first; }

using State = StateStrip<kPaddedK>;

/// A run of one sequence's tokens, which starts at a chunk.
struct Walk {
  int64 token;
  int tokens;
  int head;  // value head
};

/// The state's columns that a block has, counted from `first`: of values, or with none at all.
struct Columns {
  int first;
  bool values = true;
};

/// Calls visit(k, v, element) for every element of the state that the lane holds and the tensor has
/// (`width` columns), v counted over the tensor.
template <class Visit>
WYVERN_DEVICE void for_each_element(State (&state)[kStrips], int tile, int width, Visit&& visit) {
#pragma unroll
  for (int i = 0; i < kStrips; ++i)
    state[i].for_each([&](int row, int col, float& x) {
      const int v = tile + (warp_index() * kStrips + i) * 16 + col;
      if (row < K && v < width) visit(row, v, x);
    });
}

/// A walk by the scan's own scan_chunks that writes what it finds at whole chunks: the state that
/// enters each, or the gradient of the one that leaves it, from chunk slot `slot` on, and rows of
/// values, V' or dU.
template <class Inputs, class Begin>
WYVERN_DEVICE void scan_and_store(State (&state)[kStrips], const Inputs& in, const Walk& walk,
                                  int64 slot, int tile_v, DTYPE* states, DTYPE* rows_of_values,
                                  Begin&& begin) {
  const int first_v = tile_v + warp_index() * kStrips * 16;
  scan_chunks(
      state, in, walk, Columns{tile_v}, begin,
      [&](int chunk, const State(&at_border)[kStrips]) {
        store_state<K, V>(states + ((slot + chunk) * HV + walk.head) * K * V + first_v, at_border,
                          columns_from(first_v));
      },
      [&](int chunk, int rows, const Accumulator(&values)[kStrips][BT / 8]) {
        const int64 row = (walk.token + int64{chunk} * BT) * HV + walk.head;
        store_rows<V>(rows_of_values + row * V + first_v, int64{HV} * V, values, rows,
                      columns_from(first_v));
      });
}

}  // namespace wyvern::cuda
