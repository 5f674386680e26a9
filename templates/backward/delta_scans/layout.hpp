// Shared memory of a block of delta_scans.
#pragma once

#include "device/cuda/sm90/inverse_layout.hpp"
#include "device/cuda/sm90/layout.hpp"

namespace wyvern::delta_scans {

constexpr int kRows = 64;        ///< of a chunk
constexpr int kColumns = 64;     ///< of V that a consumer warpgroup has
constexpr int kBlockWords = 16;  ///< of a `Block`

/// Both scans have the same places; the forward one leaves those of queries and scores alone.
template <class S>
struct HopperLayout {
  /// Whether products take the rounded state from where it is staged: registers have no room for
  /// it.
  bool shares_state;
  int consumers;     ///< warpgroups with a state of 64 columns of V
  int prep_groups;   ///< warpgroups that prepare chunks, in turns
  bool pipelined;    ///< one prep warpgroup computes A, three warps of warpgroup 0 invert I + A
  int value_stages;  ///< pipeline stages of v (or do); k, q and factors have num_stages
  int keys;          ///< bytes from one pipeline stage of k and q to the next
  int factors;       ///< floats from one stage of factors to the next
  cuda::sm90::SwizzledPlace k, q;  ///< of the first stage
  cuda::sm90::SwizzledPlace v;     ///< all stages, one after another
  /// Staging of what a consumer writes for a chunk: its state, then its rows of Z or dV.
  cuda::sm90::SwizzledPlace state;
  int slots;                                  ///< chunks that are prepared and not consumed
  int score_slots;                            ///< chunks of which there are scores
  cuda::sm90::SwizzledPlace inverse, scores;  ///< of each slot: T - I, and P
  cuda::sm90::InverseLayout inversion;        ///< of the first prep warpgroup, or slot
  int inversion_bytes;                        ///< from one to the next
  /// Factors of a chunk's rows, of the first stage. G: running sum of gates in base 2. key: of k_s
  /// as a column of A and P. left: the same decayed up to rows 15, 31 and 47 (16 + 32 + 48 of
  /// them). row: of k_r as a row of A; query: of q_r as a row of P. enter: -a_r; leave: d_r;
  /// output: scale a_r. The forward scan has beta in key and leave, the reverse one in row, enter
  /// and rate.
  cuda::ArrayPlace G, key, row, query, enter, leave, output, rate, left;
  cuda::ArrayPlace query_scale;  ///< of rows of q by their norms
  cuda::ArrayPlace decay;        ///< of the whole chunk, one a stage
  cuda::ArrayPlace block;        ///< a copy of the `Block`, for warps with few registers
  /// Full and empty barriers. k and q, their factors, v or do, and the last chunk's rows: one a
  /// stage; A (pipelined) and its half inverses, the prepared chunk, its inverse and scores: one a
  /// slot.
  cuda::sm90::BarrierPlace tiles_full, factors_full, tiles_empty, values_full, values_empty, A_full,
      halves_full, A_empty, chunk_full, inverse_empty, scores_empty, tail_full;
  int bytes;

  constexpr explicit HopperLayout(const S& s) {
    const int stages = static_cast<int>(s.num_stages);
    shares_state = s.K > 128;
    consumers = static_cast<int>(s.BV) / kColumns;
    pipelined = consumers > 1 || shares_state;
    slots = 2;
    score_slots = shares_state ? 1 : slots;
    prep_groups = pipelined ? 1 : 2;
    cuda::LayoutBuilder at;
    k = cuda::sm90::swizzled_tile(at, kRows, s.K, s.DTYPE);
    q = cuda::sm90::swizzled_tile(at, kRows, s.K, s.DTYPE);
    keys = at.bytes;
    at.bytes *= stages;
    value_stages = 2;
    v = cuda::sm90::swizzled_tile(at, value_stages * kRows, s.BV, s.DTYPE);
    state = cuda::sm90::swizzled_tile(at, consumers * kColumns, s.K, s.DTYPE);
    inverse = cuda::sm90::swizzled_tile(at, slots * kRows, kRows, s.DTYPE);
    scores = cuda::sm90::swizzled_tile(at, score_slots * kRows, kRows, s.DTYPE);
    const int before = at.bytes;
    inversion = cuda::sm90::InverseLayout(at);
    inversion_bytes = at.bytes - before;
    at.bytes += inversion_bytes;  // a second slot, or the second prep warpgroup's
    const int first = at.bytes;
    for (cuda::ArrayPlace* place :
         {&G, &key, &row, &query, &enter, &leave, &output, &rate, &query_scale})
      *place = at.array(kRows);
    left = at.array(16 + 32 + 48);
    factors = (at.bytes - first) / 4;
    at.bytes = first + stages * factors * 4;
    decay = at.array(stages);
    block = at.array(kBlockWords, DType::int32);
    tiles_full = cuda::sm90::barriers(at, stages);
    factors_full = cuda::sm90::barriers(at, stages);
    tiles_empty = cuda::sm90::barriers(at, stages);
    values_full = cuda::sm90::barriers(at, value_stages);
    values_empty = cuda::sm90::barriers(at, value_stages);
    for (cuda::sm90::BarrierPlace* place :
         {&A_full, &halves_full, &A_empty, &chunk_full, &inverse_empty, &scores_empty})
      *place = cuda::sm90::barriers(at, slots);
    tail_full = cuda::sm90::barriers(at, 1);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::delta_scans
