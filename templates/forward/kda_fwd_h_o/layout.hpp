// What a block of kda_fwd_h_o and of fwd_h_segment.hopper keeps in shared memory.
#pragma once

#include "device/cuda/sm90/layout.hpp"

namespace wyvern::kda_fwd_h_o {

constexpr int kChunk = 64;    ///< tokens
constexpr int kColumns = 64;  ///< of V that a warpgroup has

/// Of `num_stages` chunks, each: W, qg and kg, U, the scores of queries in 16 bits, and the decay
/// of each channel. The latest output of each warp of the state. Without queries neither qg, scores
/// nor output.
template <class S>
struct HopperLayout {
  /// Warps that bring what tensor copies cannot, in turns. Not more than chunks: a warp that waits
  /// for a buffer, by the parity of its phase, must have waited for the phase before.
  int converters;
  int slots;                                       ///< bytes from one chunk's tiles to the next's
  int decays;                                      ///< floats from one chunk's decays to the next's
  cuda::sm90::SwizzledPlace w, kg, u, qg, scores;  ///< the first chunk's
  cuda::ArrayPlace decay;                          ///< the first chunk's
  cuda::ArrayPlace output;                         ///< 64 x 16 elements a warp
  /// With checkpoints: rows of the chunk in front of one that divides it, kChunk of one at its end,
  /// 0 of none; and its row of the tensor. Two a chunk. rest: each channel's decay from the one
  /// that divides a chunk to that chunk's end.
  cuda::ArrayPlace checkpoint, rest;
  cuda::sm90::BarrierPlace loaded, ready, free;
  int bytes;

  constexpr HopperLayout(const S& s, bool queries, bool checkpoints = false) {
    const int stages = static_cast<int>(s.num_stages);
    converters = stages < 3 ? stages : 3;
    cuda::LayoutBuilder at;
    w = cuda::sm90::swizzled_tile(at, kChunk, s.K, s.DTYPE);
    kg = cuda::sm90::swizzled_tile(at, kChunk, s.K, s.DTYPE);
    u = cuda::sm90::swizzled_tile(at, kChunk, s.BV, s.DTYPE);
    if (queries) {
      qg = cuda::sm90::swizzled_tile(at, kChunk, s.K, s.DTYPE);
      scores = cuda::sm90::swizzled_tile(at, kChunk, kChunk, s.DTYPE);
    }
    slots = at.bytes;
    at.bytes *= stages;
    decay = at.array(cuda::sm90::channel_floats(s.K));
    decays = decay.count;
    at.bytes += (stages - 1) * decays * 4;
    output = at.array(queries ? kChunk * s.BV : 0, s.DTYPE);
    if (checkpoints) {
      checkpoint = at.array(2 * stages, DType::int32);
      rest = at.array(cuda::sm90::channel_floats(s.K));
    }
    loaded = cuda::sm90::barriers(at, stages);
    ready = cuda::sm90::barriers(at, stages);
    free = cuda::sm90::barriers(at, stages);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::kda_fwd_h_o
