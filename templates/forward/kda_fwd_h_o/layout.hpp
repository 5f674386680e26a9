// What a block of kda_fwd_h_o and of fwd_h_segment.hopper keeps in shared memory.
#pragma once

#include "device/cuda/sm90/layout.hpp"

namespace wyvern::kda_fwd_h_o {

constexpr int kChunk = 64;    ///< tokens
constexpr int kColumns = 64;  ///< of V that a warpgroup has

/// Of `num_stages` chunks, each: W, qg and kg, U, the scores of queries in 16 bits, and the decay
/// of each channel. The latest output of each warp of the state. Without queries neither qg, scores
/// nor output. Where the state is shared, tiles of W, qg and kg come in this order through a ring
/// of 2 `num_stages` buffers.
template <class S>
struct HopperLayout {
  /// Whether products take the state from shared memory, where it lies rounded: a warpgroup's
  /// registers have room for more of it then.
  bool shares_state;
  /// Warps that bring what tensor copies cannot, in turns. Not more than chunks: a warp that waits
  /// for a buffer, by the parity of its phase, must have waited for the phase before.
  int converters;
  int slots;                                       ///< bytes from one chunk's tiles to the next's
  int decays;                                      ///< floats from one chunk's decays to the next's
  cuda::sm90::SwizzledPlace w, kg, u, qg, scores;  ///< the first chunk's
  int ring;                                        ///< buffers of it, or 0
  cuda::sm90::SwizzledPlace rows;                  ///< the ring's first
  /// K x 64, rounded; without queries also what rounding left, K x 64.
  cuda::sm90::SwizzledPlace state;
  cuda::ArrayPlace decay;   ///< the first chunk's
  cuda::ArrayPlace output;  ///< 64 x 16 elements a warp
  /// Where the state is shared, 64 x 64: the output, or without queries what rounding left of V'.
  cuda::sm90::SwizzledPlace spare;
  /// With checkpoints: rows of the chunk in front of one that divides it, kChunk of one at its end,
  /// 0 of none; and its row of the tensor. Two a chunk. rest: each channel's decay from the one
  /// that divides a chunk to that chunk's end.
  cuda::ArrayPlace checkpoint, rest;
  cuda::sm90::BarrierPlace loaded;   ///< W, U, qg, kg of a chunk; or a tile of the ring
  cuda::sm90::BarrierPlace emptied;  ///< a tile of the ring
  cuda::sm90::BarrierPlace ready;    ///< what converters bring
  cuda::sm90::BarrierPlace free;     ///< all of a chunk that does not come through the ring
  int bytes;

  constexpr HopperLayout(const S& s, bool queries, bool checkpoints = false) {
    const int stages = static_cast<int>(s.num_stages);
    shares_state = s.K > 128;
    converters = stages < 3 ? stages : 3;
    ring = shares_state ? 2 * stages : 0;
    cuda::LayoutBuilder at;
    if (!shares_state) {
      w = cuda::sm90::swizzled_tile(at, kChunk, s.K, s.DTYPE);
      kg = cuda::sm90::swizzled_tile(at, kChunk, s.K, s.DTYPE);
      if (queries) qg = cuda::sm90::swizzled_tile(at, kChunk, s.K, s.DTYPE);
    }
    u = cuda::sm90::swizzled_tile(at, kChunk, s.BV, s.DTYPE);
    if (queries) scores = cuda::sm90::swizzled_tile(at, kChunk, kChunk, s.DTYPE);
    slots = at.bytes;
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
    loaded = cuda::sm90::barriers(at, shares_state ? ring : stages);
    emptied = cuda::sm90::barriers(at, ring);
    ready = cuda::sm90::barriers(at, stages);
    free = cuda::sm90::barriers(at, stages);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::kda_fwd_h_o
