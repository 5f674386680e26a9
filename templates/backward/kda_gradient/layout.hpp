// What a block of kda_gradient.hopper keeps in shared memory.
#pragma once

#include "device/cuda/sm90/layout.hpp"

namespace wyvern::kda_gradient {

constexpr int kRows = 64;      ///< of a chunk
constexpr int kChannels = 64;  ///< of K in a slice
constexpr int kKeyStages = 2;  ///< of slices of q and k
constexpr int kFactorStages = 2;
constexpr int kAnchors = 16;    ///< rows of the table of anchors: one for each four rows of a chunk
constexpr int kRowFloats = 72;  ///< from a row of 64 floats to the next, against bank conflicts

template <class S>
struct HopperLayout {
  int gate_stages;
  cuda::sm90::SwizzledPlace dO, z, dv;
  cuda::sm90::SwizzledPlace state, dstate;  ///< a slice of S^T and of dS'^T
  cuda::sm90::SwizzledPlace q, k;  ///< the first stage of a slice, `keys` bytes to the next
  int keys;
  cuda::sm90::SwizzledPlace gates;  ///< of the first stage, in units of 16 bits
  /// A slice of k and q decayed to and from the anchors of rows, the operands of both sweeps.
  cuda::sm90::SwizzledPlace k_to, k_from, q_from;
  /// With ERASE_WRITE a slice of the erase gate, and then of its gradient; else where k is.
  cuda::sm90::SwizzledPlace erase;
  cuda::sm90::SwizzledPlace F, M;     ///< M's place is also where dk waits for its store
  cuda::sm90::SwizzledPlace staging;  ///< where dq does; with ERASE_WRITE where F was
  cuda::ArrayPlace decay;             ///< log2, from a row's anchor to the row
  cuda::ArrayPlace dG;
  cuda::ArrayPlace anchors;            ///< log2, from the chunk's start; of four rows each
  cuda::ArrayPlace whole;              ///< log2, from the chunk's start to its end
  cuda::ArrayPlace blocks, steepness;  ///< sums of gates of 16 rows; the largest of a warp's
  /// Factors of a chunk's rows, the first stage; `factors` floats from one to the next.
  cuda::ArrayPlace beta, query_scale, key_scale;
  int factors;
  cuda::ArrayPlace own;                           ///< o, from the queries' warpgroup to the keys'
  cuda::ArrayPlace values;                        ///< the diagonal of dV Z^T, two stages
  cuda::ArrayPlace ends;                          ///< sums of k I over a warp's rows, two stages
  cuda::ArrayPlace through, sums, biases, rates;  ///< parts of sums, of each warp that ends gates
  cuda::sm90::BarrierPlace rows, states, slices, given, scales, operands, scores, dots;
  cuda::sm90::BarrierPlace summed, tail_full, stored;
  int bytes;

  constexpr explicit HopperLayout(const S& s) {
    cuda::LayoutBuilder at;
    const auto tile = [&](long long height, long long width) {
      return cuda::sm90::swizzled_tile(at, height, width, s.DTYPE);
    };
    const auto gate_size = static_cast<long long>(size_of(s.G_DTYPE));
    gate_stages = gate_size == 2 ? 2 : 1;
    dO = tile(kRows, s.V);
    z = tile(kRows, s.V);
    dv = tile(kRows, s.V);
    state = tile(s.V, kChannels);
    dstate = tile(s.V, kChannels);
    const int first = at.bytes;
    q = tile(kRows, kChannels);
    k = tile(kRows, kChannels);
    keys = at.bytes - first;
    at.bytes = first + kKeyStages * keys;
    gates = tile(kRows, kChannels * gate_size / 2);
    at.bytes += (gate_stages - 1) * kRows * kChannels * static_cast<int>(gate_size);
    k_to = tile(kRows, kChannels);
    k_from = tile(kRows, kChannels);
    q_from = tile(kRows, kChannels);
    F = tile(kRows, kRows);
    M = tile(kRows, kRows);
    erase = s.ERASE_WRITE ? tile(kRows, kChannels) : k;
    staging = s.ERASE_WRITE ? F : tile(kRows, kChannels);
    decay = at.array(kRows * kRowFloats);
    dG = at.array(kRows * kRowFloats);
    anchors = at.array(kAnchors * kChannels);
    whole = at.array(kChannels);
    for (cuda::ArrayPlace* place : {&blocks, &through, &sums, &biases})
      *place = at.array(4 * kChannels);
    steepness = at.array(4);
    rates = at.array(4);
    const int before = at.bytes;
    for (cuda::ArrayPlace* place : {&beta, &query_scale, &key_scale}) *place = at.array(kRows);
    factors = (at.bytes - before) / 4;
    at.bytes = before + kFactorStages * factors * 4;
    own = at.array(kRows);
    values = at.array(2 * kRows);
    ends = at.array(2 * 4 * kChannels);
    slices = cuda::sm90::barriers(at, 2 * kKeyStages);
    given = cuda::sm90::barriers(at, 2 * gate_stages);
    scales = cuda::sm90::barriers(at, 2 * kFactorStages);
    for (cuda::sm90::BarrierPlace* place : {&rows, &states, &operands, &scores, &dots})
      *place = cuda::sm90::barriers(at, 2);
    summed = cuda::sm90::barriers(at, 1);
    tail_full = cuda::sm90::barriers(at, 1);
    stored = cuda::sm90::barriers(at, 1);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::kda_gradient
