// Shared memory and warps of a block of recurrent.hopper and recurrent_conv.hopper.
#pragma once

#include "device/cuda/sm90/layout.hpp"

namespace wyvern::recurrent {

constexpr int kStateWarps = 8;  ///< that hold a state

/// Warps that prepare rows; of rows that they also convolve each takes half as long again.
constexpr int row_warps(bool convolves) { return convolves ? 5 : 3; }
/// That move states, and windows.
constexpr int moving_warps(bool convolves) { return convolves ? 3 : 2; }
constexpr int block_warps(bool convolves) {
  return moving_warps(convolves) + row_warps(convolves) + kStateWarps;
}
constexpr int row_buffers(bool convolves) { return 2 * row_warps(convolves); }

/// A row of k and its factors, in floats: normalized k, scaled q, a decay for each key with
/// VECTOR_GATE, erase k with ERASE_WRITE, v, and the decay of all keys, beta, k . q. With
/// OUTPUT_NORM the factors of o's elements, and the state warps' sums of squares of o.
template <class S>
struct RowLayout {
  int k = 0, q, decay, erasing, v, numbers, output_gate, squares, count;
  constexpr explicit RowLayout(const S& s) {
    const int K = static_cast<int>(s.K);
    q = K;
    decay = 2 * K;
    erasing = decay + (s.VECTOR_GATE ? K : 0);
    v = erasing + (s.ERASE_WRITE ? K : 0);
    numbers = v + static_cast<int>(s.V);
    output_gate = numbers + 4;
    squares = output_gate + (s.OUTPUT_NORM ? static_cast<int>(s.V) : 0);
    count = squares + (s.OUTPUT_NORM ? kStateWarps : 0);
  }
};

template <class S>
struct HopperLayout {
  cuda::ArrayPlace states;  ///< one after the other, each as in memory
  cuda::ArrayPlace rows;    ///< row_buffers() of RowLayout
  cuda::sm90::BarrierPlace state_barriers, stepped, row_barriers;
  int bytes;

  constexpr explicit HopperLayout(const S& s, bool convolves = false) {
    const auto count = static_cast<long long>(s.num_stages);
    const int buffers = row_buffers(convolves);
    cuda::LayoutBuilder at;
    states = at.array(count * s.K * s.V, s.STATE_DTYPE);
    rows = at.array(buffers * RowLayout<S>(s).count);
    state_barriers = cuda::sm90::barriers(at, 2 * count);
    stepped = cuda::sm90::barriers(at, count);
    row_barriers = cuda::sm90::barriers(at, 2 * buffers);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::recurrent
