// What a block of delta_forward.hopper keeps in shared memory.
#pragma once

#include "device/cuda/sm90/inverse_layout.hpp"
#include "device/cuda/sm90/layout.hpp"

namespace wyvern::delta_forward {

constexpr int kRows = 64;        ///< of a chunk
constexpr int kColumns = 64;     ///< of V that a warpgroup has
constexpr int kBlockWords = 14;  ///< of a `Block`

/// `num_stages` buffers of a chunk's q, k and v and of factors of its rows; of the chunks that
/// are prepared, the scores of queries and the inverse; buffers of the output, or the rounded
/// state and what is to be added to it.
template <class S>
struct HopperLayout {
  /// Whether products take the state from shared memory, where it lies rounded: a warpgroup's
  /// registers have room for more of it then.
  bool shares_state;
  int walkers;      ///< warpgroups with a state of 64 columns of V
  int outputs;      ///< buffers of a walker's output
  int helpers;      ///< warpgroups that prepare chunks in turns
  bool pipelined;   ///< one helper makes I + A, and three warps of warpgroup 0 invert it
  int slots;        ///< chunks that are prepared and not done
  int score_slots;  ///< of which there are scores
  int tiles;        ///< bytes from one buffer of q, k, v to the next
  int factors;      ///< floats from one buffer of factors to the next
  cuda::sm90::SwizzledPlace k, q, v;  ///< the first buffer
  /// All of them, one after another. state: K x 64, update: V' decayed up to the chunk's end and
  /// then the output, for each walker.
  cuda::sm90::SwizzledPlace output, state, update, inverse, scores;
  cuda::sm90::InverseLayout inversion;  ///< the first helper's, or the first prepared chunk's
  int inversion_bytes;                  ///< from one to the next
  /// Factors of rows, the first buffer. G: the running sum of gates in base 2; key, query: of k_r
  /// and q_r; row: of k_r as it is written; beta; erase: of S k_r in u_r; update_factor: of V'_r in
  /// what the state takes up; output_factor: of S q_r in o_r; left: of k_s for rows from 16, 32 and
  /// 48 on, decayed up to there (16 + 32 + 48 of them).
  cuda::ArrayPlace G, key, query, row, beta, erase, update_factor, output_factor, left;
  cuda::ArrayPlace decay;  ///< of the whole chunk, one a buffer
  /// The largest update_factor of the first 32 rows and of the others, two a buffer.
  cuda::ArrayPlace largest;
  /// With checkpoints: rows of the chunk in front of one that divides it, kRows of one at its end,
  /// 0 of none; and its row of the tensor. Two a buffer.
  cuda::ArrayPlace checkpoint;
  cuda::ArrayPlace block;  ///< a copy of what all warps know, for those with few registers
  cuda::sm90::BarrierPlace loaded, scaled, free, lowered, joined, inverted, ready, taken, landed;
  int bytes;

  constexpr explicit HopperLayout(const S& s, bool checkpoints = false) {
    const int stages = static_cast<int>(s.num_stages);
    shares_state = s.K > 128;
    walkers = static_cast<int>(s.BV) / kColumns;
    helpers = shares_state || walkers > 1 ? 1 : 2;
    outputs = walkers > 1 ? 1 : 2;
    pipelined = walkers > 1;
    slots = 2;
    score_slots = s.K > 128 ? 1 : 2;
    cuda::LayoutBuilder at;
    k = cuda::sm90::swizzled_tile(at, kRows, s.K, s.DTYPE);
    q = cuda::sm90::swizzled_tile(at, kRows, s.K, s.DTYPE);
    v = cuda::sm90::swizzled_tile(at, kRows, s.BV, s.DTYPE);
    tiles = at.bytes;
    at.bytes *= stages;
    if (shares_state) {
      state = cuda::sm90::swizzled_tile(at, walkers * s.K, kColumns, s.DTYPE);
      update = cuda::sm90::swizzled_tile(at, walkers * kRows, kColumns, s.DTYPE);
    } else {
      output = cuda::sm90::swizzled_tile(at, walkers * outputs * kRows, kColumns, s.DTYPE);
    }
    inverse = cuda::sm90::swizzled_tile(at, slots * kRows, kRows, s.DTYPE);
    scores = cuda::sm90::swizzled_tile(at, score_slots * kRows, kRows, s.DTYPE);
    const int before = at.bytes;
    inversion = cuda::sm90::InverseLayout(at);
    inversion_bytes = at.bytes - before;
    at.bytes += ((pipelined ? slots : helpers) - 1) * inversion_bytes;
    const int first = at.bytes;
    for (cuda::ArrayPlace* place :
         {&G, &key, &query, &row, &beta, &erase, &update_factor, &output_factor})
      *place = at.array(kRows);
    left = at.array(16 + 32 + 48);
    factors = (at.bytes - first) / 4;
    at.bytes = first + stages * factors * 4;
    decay = at.array(stages);
    largest = at.array(2 * stages);
    if (checkpoints) checkpoint = at.array(2 * stages, DType::int32);
    block = at.array(kBlockWords, DType::int32);
    loaded = cuda::sm90::barriers(at, stages);
    scaled = cuda::sm90::barriers(at, stages);
    free = cuda::sm90::barriers(at, stages);
    lowered = cuda::sm90::barriers(at, slots);
    joined = cuda::sm90::barriers(at, slots);
    inverted = cuda::sm90::barriers(at, slots);
    ready = cuda::sm90::barriers(at, slots);
    taken = cuda::sm90::barriers(at, score_slots);
    landed = cuda::sm90::barriers(at, 1);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::delta_forward
