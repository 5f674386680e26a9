// A state S of K x V between global memory and the registers of a warpgroup.
#pragma once

#include "device/cuda/sm90/layout.hpp"
#include "device/cuda/sm90/product.cuh"

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

/// Scales each channel of K of the transposed state; a channel's factor lies at channel_place().
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
