// The states at the borders of segments, in order: S <- M S + R. One block has BV columns of the
// state of one sequence and value head.
#pragma once

#include "device/cpu/product.hpp"
#include "device/cpu/segment.hpp"

namespace wyvern::cpu {

constexpr int64 kKeyRow = row_stride(K), kValueRow = row_stride(BV);

/// Walks the segments of sequence n, forwards or backwards: writes the state at each one's near
/// border and takes it through the segment. `state` holds that at the start; it and `next` are
/// tiles of K x BV, `m` one of K x K, `ones` a vector of K.
template <bool Backwards>
static void combine_segments(const float* segment_M, const float* segment_R,
                             const int32* seq_offsets, float* segment_state, const Extents& e,
                             int64 n, int64 hv, int first_column, float* state, float* next,
                             float* m, float* ones) {
  constexpr int kLength = SEG * BT;
  const int columns = V - first_column < BV ? V - first_column : BV;
  const int64 tokens = VARLEN ? seq_offsets[n + 1] - seq_offsets[n] : e.T;
  const int64 count = (tokens + kLength - 1) / kLength;
  const int64 segments = count < 1 ? 1 : count;
  const int64 first = first_segment<VARLEN, kLength>(n, e, seq_offsets);
  for (int r = 0; r < K; r += kLanes) store(ones + r, splat(1.0F));
  for (int64 step = 0; step < segments; ++step) {
    const int64 at = (first + (Backwards ? segments - 1 - step : step)) * HV + hv;
    const int64 state_at = at * K * V + first_column;
    store_tile(state, kValueRow, K, columns, segment_state + state_at, V);
    if (step == segments - 1) break;
    load_tile(segment_M + at * K * K, K, K, K, m, kKeyRow);
    load_tile(segment_R + state_at, V, K, columns, next, kValueRow);
    multiply_add(K, columns, K, m, kKeyRow, state, kValueRow, next, kValueRow, ones);
    float* const done = state;
    state = next;
    next = done;
  }
}

}  // namespace wyvern::cpu
