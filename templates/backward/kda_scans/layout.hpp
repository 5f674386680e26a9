// Shared memory of a block of kda_scans.
#pragma once

#include "device/cuda/sm90/layout.hpp"

namespace wyvern::kda_scans {

constexpr int kRows = 64;     ///< of a chunk
constexpr int kColumns = 64;  ///< of V that a consumer warpgroup has

/// Both scans have the same places; the forward one leaves those of queries and scores alone.
template <class S>
struct HopperLayout {
  int consumers;  ///< warpgroups with a state of 64 columns of V
  int stage;      ///< bytes from one pipeline stage of tiles to the next
  int decays;     ///< floats from one stage of decays to the next
  /// A chunk's tiles, of the first stage; `values` are v, or do.
  cuda::sm90::SwizzledPlace entering, leaving, queries, values, inverse, scores;
  /// Staging of what a consumer writes for a chunk, if it does: its state, then its rows of Z or
  /// dV.
  cuda::sm90::SwizzledPlace state;
  cuda::ArrayPlace decay;  ///< of the first stage
  /// Full and empty barriers, one a stage, and one of the tiles of a chunk with fewer rows.
  cuda::sm90::BarrierPlace tiles_full, decay_full, empty, tail_full;
  int bytes;

  constexpr HopperLayout(const S& s, bool output) {
    const int stages = static_cast<int>(s.num_stages);
    consumers = static_cast<int>(s.BV) / kColumns;
    cuda::LayoutBuilder at;
    entering = cuda::sm90::swizzled_tile(at, kRows, s.K, s.DTYPE);
    leaving = cuda::sm90::swizzled_tile(at, kRows, s.K, s.DTYPE);
    queries = cuda::sm90::swizzled_tile(at, kRows, s.K, s.DTYPE);
    values = cuda::sm90::swizzled_tile(at, kRows, s.BV, s.DTYPE);
    inverse = cuda::sm90::swizzled_tile(at, kRows, kRows, s.DTYPE);
    scores = cuda::sm90::swizzled_tile(at, kRows, kRows, s.DTYPE);
    stage = at.bytes;
    at.bytes *= stages;
    if (output) state = cuda::sm90::swizzled_tile(at, consumers * kColumns, s.K, s.DTYPE);
    decay = at.array(cuda::sm90::channel_floats(s.K));
    decays = decay.count;
    at.bytes += (stages - 1) * decays * 4;
    tiles_full = cuda::sm90::barriers(at, stages);
    decay_full = cuda::sm90::barriers(at, stages);
    empty = cuda::sm90::barriers(at, stages);
    tail_full = cuda::sm90::barriers(at, 1);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::kda_scans
