// The states at the borders of segments, in order: S <- M S + R. One block has BV columns of the
// state of one sequence and value head.
#pragma once

#include "device/cpu/chunk.hpp"
#include "device/cpu/product.hpp"
#include "device/cpu/scan_layout.hpp"
#include "device/cpu/segment.hpp"

namespace wyvern::cpu {

template <class S>
struct SegmentStates {
  static constexpr int BV = S::BV, K = S::K, V = S::V;

  /// Scratch of run().
  struct Work {
    Tile<BV> state, next;
    Tile<K> M;
    float* ones;  ///< K of them
  };
  template <SegmentStatesLayout<S> Place>
  static Work work_at(void* memory) {
    return {.state = tile_at<Place.state>(memory),
            .next = tile_at<Place.next>(memory),
            .M = tile_at<Place.M>(memory),
            .ones = vector_at<Place.ones>(memory)};
  }

  /// Applies the maps of sequence n's segments to `work.state`, forwards or backwards, without All
  /// but the last step's, and returns the state then. at_border(slot, state) sees the state
  /// before each, at that slot of segments and value heads. The state has `columns` columns of R
  /// from first_column on; where segment_R is null R is 0.
  template <bool Backwards, bool All, class AtBorder>
  static Tile<BV> walk(Work work, const float* segment_M, const float* segment_R,
                       const int32* seq_offsets, const Extents& e, int64 n, int64 hv,
                       int first_column, int columns, AtBorder&& at_border) {
    const int64 tokens = S::VARLEN ? seq_offsets[n + 1] - seq_offsets[n] : e.T;
    const int64 length = segment_tokens<S::BT>(e);
    const int64 count = (tokens + length - 1) / length;
    const int64 segments = count < 1 ? 1 : count;
    const int64 first = first_segment<S::VARLEN, S::BT>(n, e, seq_offsets);
    fill_column(work.ones, 1.0F, K);
    for (int64 step = 0; step < segments; ++step) {
      const int64 at = (first + (Backwards ? segments - 1 - step : step)) * e.HV + hv;
      at_border(at, work.state);
      if (!All && step == segments - 1) break;
      load_tile(segment_M + at * K * K, K, K, K, work.M);
      if (segment_R != nullptr)
        load_tile(segment_R + at * K * V + first_column, V, K, columns, work.next);
      else
        clear_rows(work.next, 0, K, columns);
      multiply_add(K, columns, K, work.M, work.state, work.next, work.ones);
      const Tile<BV> done = work.state;
      work.state = work.next;
      work.next = done;
    }
    return work.state;
  }

  /// Goes through the segments of sequence n, forwards or backwards, from `work.state`: writes the
  /// state before each segment and applies the segment's map to it.
  template <bool Backwards>
  static void run(Work work, const float* segment_M, const float* segment_R,
                  const int32* seq_offsets, float* segment_state, const Extents& e, int64 n,
                  int64 hv, int first_column) {
    const int columns = V - first_column < BV ? V - first_column : BV;
    walk<Backwards, false>(work, segment_M, segment_R, seq_offsets, e, n, hv, first_column, columns,
                           [&](int64 at, Tile<BV> state) {
                             store_tile(state, K, columns,
                                        segment_state + at * K * V + first_column, V);
                           });
  }
};

}  // namespace wyvern::cpu
