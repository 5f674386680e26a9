// The states at the borders of segments, in order: S <- M S + R, all in fp32.
#pragma once

#include "device/cuda/mma.cuh"
#include "device/cuda/scan_layout.hpp"
#include "device/cuda/segment.cuh"

namespace wyvern::cuda {

/// One block BV columns of the state of one sequence and value head. S is the kernel's Spec.
///
/// A step is short and depends on the one before, so that what it reads of memory is on its way a
/// turn ahead: a warp has sixteen rows of M in registers, as the products take them, and what
/// is about to be multiplied makes room for the next turn's. Only the state goes from warp to
/// warp, through shared memory, with one barrier a step.
template <class S>
struct SegmentCombine {
  static constexpr int HV = S::HV, K = S::K, V = S::V, BV = S::BV;
  static constexpr int kWarps = S::num_warps;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kPaddedK = padded(K);
  static constexpr int kTilesV = ceil_div(V, BV);
  static constexpr int kSteps = kPaddedK / 16;  // of a product's depth, and sixteens of rows
  static constexpr int kTurns = ceil_div(kSteps, kWarps);
  /// Steps whose rows are taken out of the way at once of those to come: as registers allow.
  static constexpr int kBatch = kSteps <= 8 ? 8 : 2;
  static constexpr CombineLayout<S> kLayout{S{}};
  static constexpr int kRows = CombineLayout<S>::kRows;
  static constexpr int kStride = CombineLayout<S>::stride(BV);

  using Four = Vector<float, 4>;

  static constexpr bool kRounded = S::precision == Precision::tf32;

  /// An element of the state as products read it: rounded by who writes it, once for all warps.
  WYVERN_DEVICE static float operand(float x) { return kRounded ? to_tf32(x) : x; }

  /// A state's columns in shared memory.
  struct State {
    float* data;

    /// Four rows from 4 `fours` on.
    WYVERN_DEVICE float* at(int fours, int v) const { return data + fours * kStride + v * kRows; }
  };

  /// Of sixteen rows of M those that this lane has, lane / 4 and eight below: in each sixteen
  /// columns the four from lane % 4 * 4 on, two for each of two products.
  struct Rows {
    Four high[kSteps], low[kSteps];
  };
  /// Of the same rows of R, or of a state: columns of V as in accumulators, from left to right.
  struct Columns {
    Accumulator x[BV / 8];
  };

  /// Where the rows of a turn are, from the sixteen's first on.
  struct Turn {
    const float* M;
    const float* R;
    int first;  ///< row
    bool any;   ///< whether there are such rows

    /// Four columns of a row of M; what they were where there is no such turn.
    WYVERN_DEVICE void fetch(Four& x, int row, int col) const {
      if (!any) return;
      if constexpr (K % 16 == 0) {
        x = load<4>(M + row * K + col);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          x.at[i] = first + row < K && col + i < K ? M[row * K + col + i] : 0.0f;
      }
    }
    WYVERN_DEVICE void fetch(Rows& rows, int step) const {
      const int col = step * 16 + lane_index() % 4 * 4;
      fetch(rows.high[step], lane_index() / 4, col);
      fetch(rows.low[step], lane_index() / 4 + 8, col);
    }
    WYVERN_DEVICE Columns fetch_R(int tile_v) const {
      Columns columns;
#pragma unroll
      for (int j = 0; j < BV / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = accumulator_row(i);
          const int v = tile_v + j * 8 + accumulator_col(i);
          if (any && (K % 16 == 0 || first + row < K) && (V % BV == 0 || v < V))
            columns.x[j].x[i] = R[row * V + v];
        }
      return columns;
    }
  };

  /// sum += 16 rows of M, of which step `step` is given, times the state's rows there; `own` is
  /// this lane's of the first.
  WYVERN_DEVICE static void multiply_step(Columns& sum, const Four& high, const Four& low,
                                          const float* own, int step) {
    Four b[BV / 8];
#pragma unroll
    for (int j = 0; j < BV / 8; ++j) b[j] = load<4>(own + step * 4 * kStride + j * 8 * kRows);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const Split<S::precision> rows({high.at[i], low.at[i], high.at[i + 1], low.at[i + 1]});
#pragma unroll
      for (int j = 0; j < BV / 8; ++j) {
        if constexpr (kRounded)
          mma_m16n8k8_tf32(sum.x[j].x, rows.head, b[j].at[i], b[j].at[i + 1]);
        else
          multiply_split<S::precision>(
              sum.x[j].x, rows, Split<S::precision>({b[j].at[i], b[j].at[i + 1], 0.0f, 0.0f}), 0);
      }
    }
  }

  /// Sixteen rows of the next state, from `first`, to where the next step and who asked read them.
  WYVERN_DEVICE static void store(const Columns& sum, const State& next, float* to, int first,
                                  int tile_v) {
#pragma unroll
    for (int j = 0; j < BV / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        next.at(first / 4 + lane_index() / 16 + i / 2 * 2,
                j * 8 + accumulator_col(i))[lane_index() / 4 % 4] = operand(sum.x[j].x[i]);
#pragma unroll
    for (int j = 0; j < BV / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const int k = first + accumulator_row(i);
        const int v = tile_v + j * 8 + accumulator_col(i);
        if (K % 16 != 0 && k >= K) continue;
        if constexpr (V % 2 == 0) {
          if (v < V)
            store_vector(to + int64{k} * V + v, Float2{{sum.x[j].x[i], sum.x[j].x[i + 1]}});
        } else {
          if (v < V) to[int64{k} * V + v] = sum.x[j].x[i];
          if (v + 1 < V) to[int64{k} * V + v + 1] = sum.x[j].x[i + 1];
        }
      }
  }

  /// Walks the segments of the block's sequence, forwards or backwards: writes the state at each
  /// one's near border and takes it through the segment. `begin(sequence, head, k, v)` is the state
  /// at the start.
  template <bool Backwards, class Begin>
  WYVERN_DEVICE static void walk(unsigned char* shared, const float* segment_M,
                                 const float* segment_R, const int32* seq_offsets,
                                 float* segment_state, const Extents& e, Begin&& begin) {
    constexpr int kLength = S::SEG * S::BT;
    const int tile_v = block_index() % kTilesV * BV;
    const int head = block_index() / kTilesV % HV;
    const int sequence = block_index() / kTilesV / HV;
    const int tokens =
        S::VARLEN ? seq_offsets[sequence + 1] - seq_offsets[sequence] : static_cast<int>(e.T);
    const int segments = larger(ceil_div(tokens, kLength), 1);
    const int64 first = first_segment<S::VARLEN, kLength>(sequence, e, seq_offsets);
    const auto slot_of = [&](int step) {
      return (first + (Backwards ? segments - 1 - step : step)) * HV + head;
    };
    const auto turn_of = [&](int step, int turn) {
      const int row = (turn * kWarps + warp_index()) * 16;
      const int64 place = slot_of(step) * K + row;
      return Turn{segment_M + place * K, segment_R + place * V, row,
                  step < segments - 1 && row < kPaddedK};
    };

    Turn ahead = turn_of(0, 0);
    Rows rows{};
#pragma unroll
    for (int i = 0; i < kSteps; ++i) ahead.fetch(rows, i);
    Columns sum = ahead.fetch_R(tile_v);

    const auto state_of = [&](int step) {
      return State{array_at<kLayout.states>(shared) + step % 2 * kLayout.floats};
    };
    const State start = state_of(0);
    for (int i = thread_index(); i < kPaddedK * BV; i += kThreads) {
      const int k = i / BV;
      const int v = tile_v + i % BV;
      const bool inside = k < K && v < V;
      const float x = inside ? begin(sequence, head, k, v) : 0.0f;
      start.at(k / kRows, i % BV)[k % kRows] = operand(x);
      if (inside) segment_state[(slot_of(0) * K + k) * V + v] = x;
    }
    sync_block();
#pragma unroll 1
    for (int step = 0; step < segments - 1; ++step) {
      const float* const own = state_of(step).at(lane_index() % 4, lane_index() / 4);
#pragma unroll 1
      for (int turn = 0; turn < kTurns; ++turn) {
        const Turn now = ahead;
        ahead = turn + 1 < kTurns ? turn_of(step, turn + 1) : turn_of(step + 1, 0);
        const Columns next_R = ahead.fetch_R(tile_v);
#pragma unroll
        for (int from = 0; from < kSteps; from += kBatch) {
          const int to = smaller(from + kBatch, kSteps);
          Rows batch;
#pragma unroll
          for (int i = from; i < to; ++i) {
            batch.high[i] = rows.high[i];
            batch.low[i] = rows.low[i];
            ahead.fetch(rows, i);
          }
          sync_warp();  // or the compiler puts loads off until they are needed
#pragma unroll
          for (int i = from; i < to; ++i) multiply_step(sum, batch.high[i], batch.low[i], own, i);
        }
        if (now.any)
          store(sum, state_of(step + 1), segment_state + slot_of(step + 1) * K * V, now.first,
                tile_v);
        sum = next_R;
      }
      sync_block();
    }
  }
};

}  // namespace wyvern::cuda
