// What a block of kda_prepare.hopper keeps in shared memory.
#pragma once

#include "device/cuda/sm90/inverse_layout.hpp"
#include "device/cuda/sm90/layout.hpp"

namespace wyvern::kda_prepare {

constexpr int kChunk = 64;  ///< tokens
constexpr int kSlices = 4;  ///< of 16 tokens
constexpr int kTable = 7;   ///< numbers of a channel and slice

/// Tiles that are not needed after a block barrier share memory with tiles of later phases.
template <class S>
struct HopperLayout {
  /// q and k become their rows decayed from a slice's start; the first slice of k, which no slice
  /// precedes, its rows decayed to the middle of the chunk.
  cuda::sm90::SwizzledPlace q, k;
  /// With ERASE_WRITE, until rows are decayed; else where k is.
  cuda::sm90::SwizzledPlace erase;
  cuda::sm90::SwizzledPlace v;       ///< only forward; with ERASE_WRITE write v, where `erase` was
  cuda::sm90::SwizzledPlace scores;  ///< only backward, where `erase` was
  cuda::sm90::SwizzledPlace gates;   ///< in units of 16 bits: G_DTYPE may have 32
  /// Where gates were: keys decayed to a slice's end; in the last slice, which no slice follows,
  /// from the middle of the chunk.
  cuda::sm90::SwizzledPlace right;
  cuda::sm90::SwizzledPlace
      erasing;  ///< k exp(G), or erase k exp(G); backward only sums of steep gates
  cuda::sm90::SwizzledPlace late;  ///< the last slice of q, decayed from the middle of the chunk
  /// (I + A)^-1 - I, forward columns by beta, backward where `erasing` was.
  cuda::sm90::SwizzledPlace inverse;
  cuda::ArrayPlace shares;  ///< partial sums of scores inside slices: 256 of A and of P a warp
  cuda::ArrayPlace totals, middles;  ///< sums of gates over each slice, and over its first half
  cuda::ArrayPlace table;            ///< kTable numbers for each of 32 channels a warp
  cuda::sm90::InverseLayout solve;   ///< where those were
  cuda::ArrayPlace squares;          ///< of rows of q, then of k: a warp's part of channels
  cuda::ArrayPlace beta, bias;
  /// Only backward: beta as a factor of A, and what columns of the inverse lack of beta.
  cuda::ArrayPlace solved, rest;
  cuda::sm90::BarrierPlace loaded;  ///< q, k and gates; v
  int bytes;

  /// v has so many columns; 0: for the backward pass.
  constexpr HopperLayout(const S& s, long long values) {
    const long long gate_size = static_cast<long long>(size_of(s.G_DTYPE));
    cuda::LayoutBuilder at;
    q = cuda::sm90::swizzled_tile(at, kChunk, s.K, s.DTYPE);
    k = cuda::sm90::swizzled_tile(at, kChunk, s.K, s.DTYPE);
    cuda::LayoutBuilder after = at;
    erase = s.ERASE_WRITE ? cuda::sm90::swizzled_tile(after, kChunk, s.K, s.DTYPE) : k;
    if (values == 0)
      scores = cuda::sm90::swizzled_tile(at, kChunk, kChunk, s.DTYPE);
    else
      v = cuda::sm90::swizzled_tile(at, kChunk, values, s.DTYPE);
    at.cover(after);
    after = at;
    gates = cuda::sm90::swizzled_tile(at, kChunk, s.K * gate_size / 2, s.DTYPE);
    right = cuda::sm90::swizzled_tile(after, kChunk, s.K, s.DTYPE);
    cuda::LayoutBuilder inverted = after;
    erasing = cuda::sm90::swizzled_tile(after, kChunk, s.K, s.DTYPE);
    at.cover(after);
    inverse = cuda::sm90::swizzled_tile(values == 0 ? inverted : at, kChunk, kChunk, s.DTYPE);
    late = cuda::sm90::swizzled_tile(at, 16, s.K, s.DTYPE);
    after = at;
    totals = at.array(kSlices * s.K);
    middles = at.array(kSlices * s.K);
    table = at.array(s.num_warps * kTable * 32);
    solve = cuda::sm90::InverseLayout(after);
    at.cover(after);
    shares = at.array(kSlices * 2 * 256 * (s.num_warps / kSlices - 1));
    squares = at.array(s.num_warps / kSlices * 2 * kChunk);
    beta = at.array(kChunk);
    bias = at.array(s.K);
    if (values == 0) {
      solved = at.array(kChunk);
      rest = at.array(kChunk);
    }
    loaded = cuda::sm90::barriers(at, 2);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::kda_prepare
