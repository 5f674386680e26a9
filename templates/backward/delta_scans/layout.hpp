// What a block of delta_scans.hopper keeps in shared memory.
#pragma once

#include "device/cuda/sm90/inverse_layout.hpp"
#include "device/cuda/sm90/layout.hpp"

namespace wyvern::delta_scans {

constexpr int kRows = 64;        ///< of a chunk
constexpr int kColumns = 64;     ///< of V that a consumer warpgroup has
constexpr int kBlockWords = 14;  ///< of a `Block`
constexpr int kSlots = 2;        ///< chunks that are prepared and not consumed

/// Both walks have the same places; the forward one leaves those of queries and scores alone.
template <class S>
struct HopperLayout {
  /// Whether products take the rounded state from where it is staged: registers have no room for
  /// it.
  bool shares_state;
  int consumers;     ///< warpgroups with a state of 64 columns of V
  int helpers;       ///< prep warpgroups
  bool pipelined;    ///< one of them makes I + A, and three warps of warpgroup 0 invert it
  int value_stages;  ///< pipeline stages of v (or do); k, q and factors have num_stages
  int keys;          ///< bytes from one pipeline stage of k and q to the next
  int factors;       ///< floats from one stage of factors to the next
  cuda::sm90::SwizzledPlace k, q;  ///< of the first stage
  cuda::sm90::SwizzledPlace v;     ///< all stages, one after another
  /// Staging of what a consumer writes for a chunk: its state, then its rows of Z or dV.
  cuda::sm90::SwizzledPlace state;
  int score_slots;                            ///< chunks of which there are scores
  cuda::sm90::SwizzledPlace inverse, scores;  ///< of each slot: T - I, and P
  cuda::sm90::InverseLayout inversion;        ///< of the first helper, or the first slot
  int inversion_bytes;                        ///< from one to the next
  /// Factors of a chunk's rows, of the first stage. G: running sum of gates in base 2. key: of k_s
  /// as a column of A and P, beta included. left: the same decayed up to rows 15, 31 and 47 (16 +
  /// 32 + 48 of them). row: of k_r as a row of A; query: of q_r as a row of P. enter: -a_r; leave:
  /// d_r b_r; output: scale a_r.
  cuda::ArrayPlace G, key, row, query, enter, leave, output, left;
  cuda::ArrayPlace decay;  ///< of the whole chunk, one a stage
  cuda::ArrayPlace block;  ///< a copy of what all warps know, for those with few registers
  cuda::sm90::BarrierPlace loaded, scaled, free;  ///< of k, q and factors
  cuda::sm90::BarrierPlace values_loaded, values_free;
  cuda::sm90::BarrierPlace lowered, joined, inverted, ready;
  cuda::sm90::BarrierPlace taken, scored;  ///< the inverse, the scores of a slot have been read
  cuda::sm90::BarrierPlace landed;
  int bytes;

  constexpr explicit HopperLayout(const S& s) {
    const int stages = static_cast<int>(s.num_stages);
    shares_state = s.K > 128;
    consumers = static_cast<int>(s.BV) / kColumns;
    pipelined = consumers > 1 || shares_state;
    score_slots = shares_state ? 1 : kSlots;
    helpers = pipelined ? 1 : 2;
    cuda::LayoutBuilder at;
    k = cuda::sm90::swizzled_tile(at, kRows, s.K, s.DTYPE);
    q = cuda::sm90::swizzled_tile(at, kRows, s.K, s.DTYPE);
    keys = at.bytes;
    at.bytes *= stages;
    value_stages = 2;
    v = cuda::sm90::swizzled_tile(at, value_stages * kRows, s.BV, s.DTYPE);
    state = cuda::sm90::swizzled_tile(at, consumers * kColumns, s.K, s.DTYPE);
    inverse = cuda::sm90::swizzled_tile(at, kSlots * kRows, kRows, s.DTYPE);
    scores = cuda::sm90::swizzled_tile(at, score_slots * kRows, kRows, s.DTYPE);
    const int before = at.bytes;
    inversion = cuda::sm90::InverseLayout(at);
    inversion_bytes = at.bytes - before;
    at.bytes += inversion_bytes;  // a second slot, or the second helper's
    const int first = at.bytes;
    for (cuda::ArrayPlace* place : {&G, &key, &row, &query, &enter, &leave, &output})
      *place = at.array(kRows);
    left = at.array(16 + 32 + 48);
    factors = (at.bytes - first) / 4;
    at.bytes = first + stages * factors * 4;
    decay = at.array(stages);
    block = at.array(kBlockWords, DType::int32);
    loaded = cuda::sm90::barriers(at, stages);
    scaled = cuda::sm90::barriers(at, stages);
    free = cuda::sm90::barriers(at, stages);
    values_loaded = cuda::sm90::barriers(at, value_stages);
    values_free = cuda::sm90::barriers(at, value_stages);
    for (cuda::sm90::BarrierPlace* place : {&lowered, &joined, &inverted, &ready, &taken, &scored})
      *place = cuda::sm90::barriers(at, kSlots);
    landed = cuda::sm90::barriers(at, 1);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::delta_scans
