// What walks through the chunks of a sequence or a segment share, forwards (scan.cuh) and backwards
// (reverse_scan.cuh). A block has BV columns of the state of one value head, or of its gradient;
// each warp keeps its columns in registers.
#pragma once

#include "common/cuda/chunk.cuh"
#include "common/cuda/state.cuh"

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
