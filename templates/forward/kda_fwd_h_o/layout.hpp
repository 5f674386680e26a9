// Shared memory of a block of kda_fwd_h_o and of fwd_h_segment.hopper.
#pragma once

#include "device/cuda/sm90/layout.hpp"

namespace wyvern::kda_fwd_h_o {

constexpr int kChunk = 64;       ///< tokens
constexpr int kBlockWords = 20;  ///< of a `Block`
constexpr int kColumns = 64;     ///< of V that a consumer warpgroup has

/// `num_stages` pipeline stages of a chunk each: W, qg and kg, U, the scores of queries in 16 bits,
/// and the decay of each channel. The latest output of each consumer warp. Without queries neither
/// qg, scores nor output. Where the state is shared, tiles of W, qg and kg come in this order
/// through a ring of 2 `num_stages` buffers.
template <class S>
struct HopperLayout {
  /// Whether products read the rounded state from shared memory, so that a warpgroup's registers
  /// have room for more of it.
  bool shares_state;
  /// Warps that load scores and decays, in turns. Not more than stages: a warp that waits for a
  /// stage by the parity of its phase must have waited for the phase before.
  int prep_warps;
  int tiles;                                       ///< bytes of a stage of tiles
  int decays;                                      ///< floats of a stage of decays
  cuda::sm90::SwizzledPlace w, kg, u, qg, scores;  ///< the first stage
  int ring;                                        ///< buffers of it, or 0
  cuda::sm90::SwizzledPlace rows;                  ///< the ring's first
  /// K x 64, rounded; without queries also the rounding errors, K x 64.
  cuda::sm90::SwizzledPlace state;
  cuda::ArrayPlace decay;   ///< the first stage
  cuda::ArrayPlace output;  ///< 64 x 16 elements a warp
  /// Where the state is shared, 64 x 64: the output, or without queries V's rounding errors.
  cuda::sm90::SwizzledPlace spare;
  /// With checkpoints, two numbers a stage: the chunk's rows in front of a checkpoint (kChunk: at
  /// its end, 0: none) and the checkpoint's row of the tensor. rest: each channel's decay from a
  /// checkpoint inside a chunk to the chunk's end.
  cuda::ArrayPlace checkpoint, rest;
  cuda::ArrayPlace block;  ///< a copy of the `Block`, for warps with few registers
  /// Tiles loaded by TMA, one a stage, or a buffer of the ring; which is empty, one a buffer;
  /// scores and decays written, and consumers done with the stage, one a stage.
  cuda::sm90::BarrierPlace tiles_full, ring_empty, scores_full, empty;
  int bytes;

  constexpr HopperLayout(const S& s, bool queries, bool checkpoints = false) {
    const int stages = static_cast<int>(s.num_stages);
    shares_state = s.K > 128;
    prep_warps = stages < 3 ? stages : 3;
    ring = shares_state ? 2 * stages : 0;
    cuda::LayoutBuilder at;
    if (!shares_state) {
      w = cuda::sm90::swizzled_tile(at, kChunk, s.K, s.DTYPE);
      kg = cuda::sm90::swizzled_tile(at, kChunk, s.K, s.DTYPE);
      if (queries) qg = cuda::sm90::swizzled_tile(at, kChunk, s.K, s.DTYPE);
    }
    u = cuda::sm90::swizzled_tile(at, kChunk, s.BV, s.DTYPE);
    if (queries) scores = cuda::sm90::swizzled_tile(at, kChunk, kChunk, s.DTYPE);
    tiles = at.bytes;
    at.bytes *= stages;
    if (shares_state) {
      rows = cuda::sm90::swizzled_tile(at, kChunk, s.K, s.DTYPE);
      at.bytes += (ring - 1) * (at.bytes - rows.offset);
      state = cuda::sm90::swizzled_tile(at, (queries ? 1 : 2) * s.K, kColumns, s.DTYPE);
      spare = cuda::sm90::swizzled_tile(at, kChunk, kColumns, s.DTYPE);
    }
    output = at.array(queries && !shares_state ? kChunk * s.BV : 0, s.DTYPE);
    decay = at.array(cuda::sm90::channel_floats(s.K));
    decays = decay.count;
    at.bytes += (stages - 1) * decays * 4;
    if (checkpoints) {
      checkpoint = at.array(2 * stages, DType::int32);
      rest = at.array(cuda::sm90::channel_floats(s.K));
    }
    block = at.array(kBlockWords, DType::int32);
    tiles_full = cuda::sm90::barriers(at, shares_state ? ring : stages);
    ring_empty = cuda::sm90::barriers(at, ring);
    scores_full = cuda::sm90::barriers(at, stages);
    empty = cuda::sm90::barriers(at, stages);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::kda_fwd_h_o
