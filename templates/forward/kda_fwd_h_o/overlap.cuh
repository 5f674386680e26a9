// The overlap of splits, by bounds on what chunks leave of a state.
#pragma once

#include "forward/kda_fwd_h_o/prepare.cuh"

/// x, which is the same in all lanes. The compiler must know, or the mainloop would spill.
WYVERN_DEVICE float same_in_warp(float x) {
  return bits_float(static_cast<uint32>(sm90::uniform(static_cast<int>(float_bits(x)))));
}

/// How many times as long a state can be after a chunk as before it: the chunk maps S to M S + R,
/// M = diag(exp(G_C)) - kg^T W, whose spectral norm is at most the largest of exp(G_C) plus the sum
/// of |kg_t| |W_t| over the chunk's rows. w and kg are its rows, `stride` elements apart, Gk the
/// last one's. Where exp(G_C) alone reaches `most`, returns that. By all threads; `sums` is shared
/// memory for one float a warp.
WYVERN_DEVICE float growth_of_chunk(const DTYPE* w, const DTYPE* kg, const float* Gk, int64 stride,
                                    float most, float* sums) {
  constexpr int kLanes = K / 8;  // of a row
  constexpr int kRowsAtOnce = kThreads / kLanes;
  constexpr int kRounds = ceil_div(kChunk, kRowsAtOnce);
  constexpr float kUnderflow = 0x1p-120f;  // above the error of squares below fp32's range
  constexpr int kOfLane = K / 32;
  const int lane = lane_index();
  const auto gates = load<kOfLane>(Gk + lane * kOfLane);
  float longest = gates.at[0];
#pragma unroll
  for (int j = 1; j < kOfLane; ++j) longest = maximum(longest, gates.at[j]);
  float growth = same_in_warp(exp2_fast(max_warp(longest) * kLog2E));
  if (growth >= most) return growth;
  const int first = thread_index() / kLanes;
  float squares[2][kRounds] = {};
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int row = first + i * kRowsAtOnce;
    if (row >= kChunk) continue;
    const int64 at = row * stride + lane % kLanes * 8;
    const auto of_w = load<8>(w + at);
    const auto of_keys = load<8>(kg + at);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x = to_float(of_w.at[j]);
      const float y = to_float(of_keys.at[j]);
      squares[0][i] = fused_multiply_add(x, x, squares[0][i]);
      squares[1][i] = fused_multiply_add(y, y, squares[1][i]);
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
      squares[0][i] += shuffle_xor(squares[0][i], mask);
      squares[1][i] += shuffle_xor(squares[1][i], mask);
    }
    const float square = fused_multiply_add(squares[0][i], squares[1][i], kUnderflow);
    sum = fused_multiply_add(square, reciprocal_sqrt(square), sum);
  }
#pragma unroll
  for (int mask = 16; mask >= kLanes; mask /= 2) sum += shuffle_xor(sum, mask);
  sync_block();
  if (lane == 0) sums[warp_index()] = sum;
  sync_block();
  for (int i = 0; i < kThreads / 32; ++i) growth += sums[i];
  return same_in_warp(growth);
}

/// The number of chunks before chunk `first` of a sequence in which any state decays below 2^-30 of
/// its length; `first`, if that is not proved or would take more than eight. growth(c, most) is the
/// bound of chunk c, or any part of it that is `most` or more.
template <class Growth>
WYVERN_DEVICE int chunks_to_decay(int first, Growth&& growth) {
  constexpr float kEnough = 0x1p-31f;  // roundings of states and of V' included
  float bound = 1.0f;
  float needed = 1.0f;
#pragma unroll 1
  for (int chunks = 1; chunks < first; ++chunks) {
    needed *= 0x1p-4f;
    bound *= growth(first - chunks, needed / bound);
    if (bound < kEnough) return chunks;
    if (!(bound < needed)) return first;  // NaN too
  }
  return first;
}
