// The states at the borders of segments, in order: S <- M S + R, all in fp32. Where M is 0, S is R
// for any S: those states are copied all at once.
#pragma once

#include "device/cuda/mma.cuh"
#include "device/cuda/scan_layout.hpp"
#include "device/cuda/segment.cuh"

namespace wyvern::cuda {

/// One block BV columns of the state of one sequence and value head; in summarize() TilesM more
/// have columns of the sequence's M. S is the kernel's Spec.
///
/// A step is short and depends on the one before, so its operands are loaded a turn ahead: a warp
/// has sixteen rows of M in registers, as operands of products, and loads the next turn's to those
/// that are about to be multiplied, or just were. Only the state passes between warps, through
/// shared memory, with one barrier a step.
template <class S, int TilesM = 0>
struct SegmentCombine {
  static constexpr int K = S::K, V = S::V, BV = S::BV;
  static constexpr int kWarps = S::num_warps;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kPaddedK = padded(K);
  static constexpr int kTilesV = ceil_div(V, BV);
  static constexpr int kTiles = kTilesV + TilesM;
  static constexpr int kSteps = kPaddedK / 16;  // of a product's depth, and sixteens of rows
  static constexpr int kTurns = ceil_div(kSteps, kWarps);
  /// Steps that are multiplied before the rows of the next turn take the place of theirs, where
  /// registers do not have both turns' rows.
  static constexpr int kBatch = 4;
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
    const float* R;  ///< with TilesM null where the block has columns of M: R is 0 there
    int first;       ///< row
    bool any;        ///< whether there are such rows

    /// Four columns of a row of M. Where there is no such turn, of any row: a load under a
    /// condition would keep the rows before and after it in registers.
    WYVERN_DEVICE void fetch(Four& x, int row, int col) const {
      if constexpr (K % 16 == 0) {
        x = load<4>(M + row * K + col);
      } else if (any) {
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
          if (any && (TilesM == 0 || R != nullptr) && (K % 16 == 0 || first + row < K) &&
              (V % BV == 0 || v < V))
            columns.x[j].x[i] = R[row * V + v];
        }
      return columns;
    }
  };

  /// Step `step` of sum += 16 rows of M times the state's rows there; `own` is this lane's of the
  /// first.
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

  /// Sixteen rows of the next state, from `first`, to where the next step reads them.
  WYVERN_DEVICE static void share(const Columns& sum, const State& next, int first) {
#pragma unroll
    for (int j = 0; j < BV / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        next.at(first / 4 + lane_index() / 16 + i / 2 * 2,
                j * 8 + accumulator_col(i))[lane_index() / 4 % 4] = operand(sum.x[j].x[i]);
  }

  /// And to where who asked reads them: rows of Stride elements, of which `width` are these.
  template <int Stride>
  WYVERN_DEVICE static void store(const Columns& sum, float* to, int first, int tile_v, int width) {
#pragma unroll
    for (int j = 0; j < BV / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const int k = first + accumulator_row(i);
        const int v = tile_v + j * 8 + accumulator_col(i);
        if (K % 16 != 0 && k >= K) continue;
        if constexpr (V % 2 == 0 && Stride % 2 == 0) {
          if (v < width)
            store_vector(to + int64{k} * Stride + v, Float2{{sum.x[j].x[i], sum.x[j].x[i + 1]}});
        } else {
          if (v < width) to[int64{k} * Stride + v] = sum.x[j].x[i];
          if (v + 1 < width) to[int64{k} * Stride + v + 1] = sum.x[j].x[i + 1];
        }
      }
  }

  /// Which of 32 steps from `first`, of `steps`, have a segment whose M is 0: a bit each. slot_of
  /// gives a step's place among segments and value heads.
  template <class SlotOf>
  WYVERN_DEVICE static uint32 forgetting(const float* segment_M, int first, int steps,
                                         SlotOf&& slot_of) {
    const int step = first + lane_index();
    uint32 mask = 0;
    if (step < steps && float_bits(segment_M[slot_of(step) * K * K]) == kForgetsAll)
      mask = 1U << lane_index();
#pragma unroll
    for (int other = 16; other > 0; other /= 2) mask |= shuffle_xor(mask, other);
    return mask;
  }

  /// Of up to 32 steps from `first`, those in `mask`: the block's columns of R become those of the
  /// state after the step.
  template <class SlotOf>
  WYVERN_DEVICE static void copy_R(const float* segment_R, float* segment_state, int first,
                                   uint32 mask, int tile_v, SlotOf&& slot_of) {
    constexpr int kWidth = V % BV == 0 ? 4 : 1;
    constexpr int kOfRow = BV / kWidth, kOfState = K * kOfRow;
    constexpr int kOfThread = ceil_div(kOfState, kThreads);
    constexpr int kLoads = kSteps <= 8 ? 16 : 8;            // of a thread in flight
    constexpr int kStates = larger(kLoads / kOfThread, 1);  // that they are of
    const auto each = [&](int step, auto&& act) {
      if ((mask >> step & 1U) == 0) return;
#pragma unroll
      for (int n = 0; n < kOfThread; ++n) {
        const int i = thread_index() + n * kThreads;
        const int v = tile_v + i % kOfRow * kWidth;
        if ((kOfState % kThreads == 0 || i < kOfState) && (V % BV == 0 || v < V))
          act(n, i / kOfRow * V + v);
      }
    };
#pragma unroll 1
    for (int step = 0; step < 32 && mask >> step != 0; step += kStates) {
      Vector<float, kWidth> pieces[kStates][kOfThread] = {};
#pragma unroll
      for (int j = 0; j < kStates; ++j) {
        if (step + j >= 32) break;
        const float* const from = segment_R + slot_of(first + step + j) * K * V;
        each(step + j, [&](int n, int offset) { pieces[j][n] = load<kWidth>(from + offset); });
      }
#pragma unroll
      for (int j = 0; j < kStates; ++j) {
        if (step + j >= 32) break;
        float* const to = segment_state + slot_of(first + step + j + 1) * K * V;
        each(step + j, [&](int n, int offset) { store_vector(to + offset, pieces[j][n]); });
      }
    }
  }

  /// The segments of the block's sequence and head. Step i is segment i, or Backwards the i-th from
  /// the last. But with All the last segment's effect is of no use.
  template <bool Backwards, bool All = false>
  struct Segments {
    int64 first;
    int count, steps;
    int heads, head;

    WYVERN_DEVICE Segments(int sequence, const Extents& e, const int32* seq_offsets)
        : heads(static_cast<int>(e.HV)), head(block_index() / kTiles) {
      const int tokens =
          S::VARLEN ? seq_offsets[sequence + 1] - seq_offsets[sequence] : static_cast<int>(e.T);
      count = larger(ceil_div(tokens, segment_tokens<S::BT>(e)), 1);
      steps = count - (All ? 0 : 1);
      first = first_segment<S::VARLEN, S::BT>(sequence, e, seq_offsets);
    }
    WYVERN_DEVICE int64 operator()(int step) const {
      return (first + (Backwards ? count - 1 - step : step)) * heads + head;
    }
  };

  /// A turn's products, and the loads of the next one's rows. Where a warp synchronizes, or the
  /// compiler would put loads off until they are needed.
  WYVERN_DEVICE static void multiply_turn(Columns& sum, Rows& rows, const Turn& ahead,
                                          const float* own) {
    if constexpr (kSteps <= 8) {
      const Rows present = rows;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) ahead.fetch(rows, i);
      sync_warp();
#pragma unroll
      for (int i = 0; i < kSteps; ++i) multiply_step(sum, present.high[i], present.low[i], own, i);
    } else {
#pragma unroll
      for (int from = 0; from < kSteps; from += kBatch) {
        const int to = smaller(from + kBatch, kSteps);
#pragma unroll
        for (int i = from; i < to; ++i) multiply_step(sum, rows.high[i], rows.low[i], own, i);
#pragma unroll
        for (int i = from; i < to; ++i) ahead.fetch(rows, i);
        sync_warp();
      }
    }
  }

  /// Before a step whose predecessor forgot all: the state is that one's R.
  WYVERN_DEVICE static void fill(const State& state, const float* R, int tile_v) {
    for (int i = thread_index(); i < kPaddedK * BV; i += kThreads) {
      const int k = i / BV;
      const int v = tile_v + i % BV;
      state.at(k / kRows, i % BV)[k % kRows] = operand(k < K && v < V ? R[k * V + v] : 0.0f);
    }
  }

  /// Applies the steps from `step` on that next_kept() gives to the state that start(state) sets:
  /// columns of V from tile_v on, or with segment_R null of M. leave(step, rows, first) gets
  /// sixteen rows from `first` on of the state after a step. Where steps are left out the next one
  /// starts from R of the step before it.
  template <class SlotOf, class NextKept, class Start, class Leave>
  WYVERN_DEVICE static void walk(unsigned char* shared, const float* segment_M,
                                 const float* segment_R, const SlotOf& slot_of, int tile_v,
                                 int step, NextKept&& next_kept, Start&& start, Leave&& leave) {
    const int steps = slot_of.steps;
    const auto turn_of = [&](int step, int turn) {
      const int row = (turn * kWarps + warp_index()) * 16;
      const bool any = step < steps && row < kPaddedK;
      // Rows that were written, where there is no such turn.
      const int64 place = slot_of(smaller(step, steps - 1)) * K + (any ? row : 0);
      const bool has_R = TilesM == 0 || segment_R != nullptr;
      return Turn{segment_M + place * K, has_R ? segment_R + place * V : nullptr, row, any};
    };
    Turn ahead = turn_of(step, 0);
    Rows rows{};
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      if (steps > 0) ahead.fetch(rows, i);
    Columns sum = ahead.fetch_R(tile_v);

    const auto state_of = [&](int buffer) {
      return State{array_at<kLayout.states>(shared) + buffer * kLayout.floats};
    };
    int buffer = 0;
    start(state_of(0));
    sync_block();
#pragma unroll 1
    while (step < steps) {
      const int next = next_kept(step + 1);
      const float* const own = state_of(buffer).at(lane_index() % 4, lane_index() / 4);
#pragma unroll 1
      for (int turn = 0; turn < kTurns; ++turn) {
        const Turn now = ahead;
        ahead = turn + 1 < kTurns ? turn_of(step, turn + 1) : turn_of(next, 0);
        const Columns next_R = ahead.fetch_R(tile_v);
        multiply_turn(sum, rows, ahead, own);
        if (now.any) {
          if (next == step + 1) share(sum, state_of(1 - buffer), now.first);
          leave(step, sum, now.first);
        }
        sum = next_R;
      }
      buffer = 1 - buffer;
      if (next > step + 1 && next < steps)
        fill(state_of(buffer), segment_R + slot_of(next - 1) * K * V, tile_v);
      step = next;
      sync_block();
    }
  }

  /// Writes the state at a sequence's start, all columns. A pack may have many sequences of one
  /// segment, and a block for each of their columns would take longer to start than to copy.
  template <class Begin>
  WYVERN_DEVICE static void copy_start(float* to, Begin&& begin) {
    constexpr int kLoads = 16;  // of a thread in flight
#pragma unroll 1
    for (int from = thread_index(); from < K * V; from += kLoads * kThreads) {
      float x[kLoads] = {};
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        const int i = from + j * kThreads;
        if (i < K * V) x[j] = begin(i / V, i % V);
      }
#pragma unroll
      for (int j = 0; j < kLoads; ++j)
        if (from + j * kThreads < K * V) to[from + j * kThreads] = x[j];
    }
  }

  /// Scans the segments of the block's sequence, forwards or backwards: writes the state at each
  /// one's near border and applies the segment to it. `begin(sequence, head, k, v)` is the state at
  /// the start.
  template <bool Backwards, class Begin>
  WYVERN_DEVICE static void scan(unsigned char* shared, const float* segment_M,
                                 const float* segment_R, const int32* seq_offsets,
                                 float* segment_state, const Extents& e, Begin&& begin) {
    const int tile_v = block_index() % kTilesV * BV;
    const int sequence = block_row();
    const Segments<Backwards> slot_of(sequence, e, seq_offsets);
    const int steps = slot_of.steps;
    if (steps == 0) {
      if (tile_v == 0)
        copy_start(segment_state + slot_of(0) * K * V,
                   [&](int k, int v) { return begin(sequence, slot_of.head, k, v); });
      return;
    }
    // The first step from one on whose M is not 0; `steps` if there is none.
    uint32 forgotten = forgetting(segment_M, 0, steps, slot_of);
    int window = 0;  // of `forgotten`
    const auto next_kept = [&](int step) {
      for (; step < steps; ++step) {
        if (step - window >= 32) {
          window = step;
          forgotten = forgetting(segment_M, window, steps, slot_of);
        }
        if ((forgotten >> (step - window) & 1U) == 0) break;
      }
      return step;
    };

    const int step = next_kept(0);
    const auto start = [&](const State& state) {
      for (int i = thread_index(); i < kPaddedK * BV; i += kThreads) {
        const int k = i / BV;
        const int v = tile_v + i % BV;
        const bool inside = k < K && v < V;
        const float x = inside ? begin(sequence, slot_of.head, k, v) : 0.0f;
        if (step == 0) state.at(k / kRows, i % BV)[k % kRows] = operand(x);
        if (inside) segment_state[(slot_of(0) * K + k) * V + v] = x;
      }
      if (step > 0 && step < steps) fill(state, segment_R + slot_of(step - 1) * K * V, tile_v);
      for (int first_step = 0; first_step < steps; first_step += 32)
        copy_R(segment_R, segment_state, first_step,
               first_step == window ? forgotten : forgetting(segment_M, first_step, steps, slot_of),
               tile_v, slot_of);
    };
    walk(shared, segment_M, segment_R, slot_of, tile_v, step, next_kept, start,
         [&](int step, const Columns& rows, int first) {
           store<V>(rows, segment_state + slot_of(step + 1) * K * V, first, tile_v, V);
         });
  }

  /// Applies all segments of the block's sequence, forwards or backwards, to its columns of the
  /// state that begin(sequence, head, k, v) gives or of the identity, which the segments' M alone
  /// act on, and writes what leaves to `summary` [N, HV, K, Stride]: V of the state, then K of M.
  template <bool Backwards, int Stride, class Begin>
  WYVERN_DEVICE static void summarize(unsigned char* shared, const float* segment_M,
                                      const float* segment_R, const int32* seq_offsets,
                                      float* summary, const Extents& e, Begin&& begin) {
    const int sequence = block_row();
    const Segments<Backwards, true> slot_of(sequence, e, seq_offsets);
    const int steps = slot_of.steps;
    const int tile = block_index() % kTiles;
    const bool of_M = tile >= kTilesV;
    const int first_column = (of_M ? tile - kTilesV : tile) * BV;
    const int width = of_M ? K : V;
    float* const to =
        summary + (int64{sequence} * e.HV + slot_of.head) * K * Stride + (of_M ? V : 0);
    // What was before the last segment whose M is 0 does not count.
    int step = 0;
    for (int from = 0; from < steps; from += 32) {
      uint32 forgotten = forgetting(segment_M, from, steps, slot_of);
      if (forgotten != 0) step = from;
      for (; forgotten != 0; forgotten >>= 1) ++step;
    }
    const float* const before = step > 0 ? segment_R + slot_of(step - 1) * K * V : nullptr;
    const auto start_of = [&](int k, int column) {
      if (of_M) return step == 0 && k == column ? 1.0f : 0.0f;
      return step == 0 ? begin(sequence, slot_of.head, k, column) : before[k * V + column];
    };
    const auto start = [&](const State& state) {
      for (int i = thread_index(); i < kPaddedK * BV; i += kThreads) {
        const int k = i / BV;
        const int column = first_column + i % BV;
        const bool inside = k < K && column < width;
        const float x = inside ? start_of(k, column) : 0.0f;
        state.at(k / kRows, i % BV)[k % kRows] = operand(x);
        if (inside && step == steps) to[int64{k} * Stride + column] = x;
      }
    };
    walk(
        shared, segment_M, of_M ? nullptr : segment_R, slot_of, first_column, step,
        [](int next) { return next; }, start,
        [&](int step, const Columns& rows, int first) {
          if (step == steps - 1) store<Stride>(rows, to, first, first_column, width);
        });
  }
};

}  // namespace wyvern::cuda
