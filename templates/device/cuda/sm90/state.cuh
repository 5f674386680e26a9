// A state S of K x V between global memory and the registers of a warpgroup.
#pragma once

#include "device/cuda/sm90/layout.hpp"
#include "device/cuda/sm90/product.cuh"
#include "device/cuda/tile.cuh"

namespace wyvern::cuda::sm90 {

/// Calls visit(offset, x) for each element of the transposed state that has columns `first` to
/// first + 63 of V, with its place in the caller's state.
template <int V, bool VFirst, int K, class Visit>
WYVERN_DEVICE void visit_state(Accumulator<K>& state, int first, Visit&& visit) {
  using State = Accumulator<K>;
  constexpr int kRowStep = VFirst ? 1 : V;
  constexpr int kColumnStep = VFirst ? K : 1;
  // Addresses that stay in registers from the first visit to the last would leave none to others.
  const int start = opaque((first + State::row(0)) * kColumnStep + State::col(0) * kRowStep);
#pragma unroll
  for (int i = 0; i < State::kCount; ++i)
    visit(start + (i / 4 * 8 + i % 2) * kRowStep + i / 2 % 2 * 8 * kColumnStep, state.x[i]);
}

/// The same for the state itself: rows `row` to row + 63 of K, columns from `column` of V.
template <int K, int V, bool VFirst, int N, class Visit>
WYVERN_DEVICE void visit_rows(Accumulator<N>& state, int row, int column, Visit&& visit) {
  using State = Accumulator<N>;
  constexpr int kRowStep = VFirst ? 1 : V;
  constexpr int kColumnStep = VFirst ? K : 1;
  const int start =
      opaque((row + State::row(0)) * kRowStep + (column + State::col(0)) * kColumnStep);
#pragma unroll
  for (int i = 0; i < State::kCount; ++i)
    visit(start + i / 2 % 2 * 8 * kRowStep + (i / 4 * 8 + i % 2) * kColumnStep, state.x[i]);
}

/// Four consecutive elements of an accumulator row, of a block of eight columns: lanes that differ
/// in their lowest bit exchange pairs, so that the even one has them of the block whose own pair is
/// `even`, the odd one of that whose own pair is `odd`.
WYVERN_DEVICE void gather_four(float (&four)[4], const float* even, const float* odd) {
  const bool is_odd = lane_index() % 2 != 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float own = is_odd ? odd[i] : even[i];
    const float other = shuffle_xor_in_order(is_odd ? even[i] : odd[i], 1);
    four[i] = is_odd ? other : own;
    four[2 + i] = is_odd ? own : other;
  }
}

/// Stores an accumulator times `factor`, element (row, column) at to[row RowStep + column
/// ColumnStep], one of which steps is 1. A warp's stores fill 16 elements side by side, with twice
/// as many bytes in a line as in the accumulator's own order. `to` is a multiple of 4 elements
/// from a 16-byte boundary. By all lanes of a warp.
template <int RowStep, int ColumnStep, int N, class Element>
WYVERN_DEVICE void store_accumulator(const Accumulator<N>& x, float factor, Element* to) {
  static_assert(RowStep == 1 || ColumnStep == 1);
  constexpr bool kByRows = ColumnStep == 1;
  const int odd = lane_index() % 2;
  // Of the two halves of 8 rows, or the two blocks of 8 columns, a lane stores its own.
  const int row = Accumulator<N>::row(0) + (kByRows ? 0 : odd * 8);
  const int column = lane_index() % 4 / 2 * 4 + (kByRows ? odd * 8 : 0);
  const int start = opaque(row * RowStep + column * ColumnStep);
#pragma unroll
  for (int j = 0; j < Accumulator<N>::kCount / 4; ++j) {
    const int even = kByRows ? j / 2 * 8 + j % 2 * 2 : j * 4;
    float four[4];
    gather_four(four, x.x + even, x.x + even + (kByRows ? 4 : 2));
    if constexpr (kByRows) {
      Vector<Element, 4> packed;
#pragma unroll
      for (int i = 0; i < 4; ++i) packed.at[i] = from_float<Element>(four[i] * factor);
      store_vector(to + start + j % 2 * 8 * RowStep + j / 2 * 16, packed);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        to[start + (j * 8 + i) * ColumnStep] = from_float<Element>(four[i] * factor);
    }
  }
}

/// Scales each channel of K of the transposed state; a channel's factor is at channel_place().
template <int K>
WYVERN_DEVICE void scale_columns(Accumulator<K>& state, const float* factors) {
  const float* const own = factors + lane_index() % 4 * channel_stride(K);
#pragma unroll
  for (int j = 0; j < Accumulator<K>::kCount; j += 8) {
    const auto x = load<4>(own + j / 2);
#pragma unroll
    for (int i = 0; i < 8; ++i) state.x[j + i] *= x.at[i / 4 * 2 + i % 2];
  }
}

}  // namespace wyvern::cuda::sm90
