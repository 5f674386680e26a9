// Shared memory of a block of delta_forward.
#pragma once

#include "device/cuda/sm90/inverse_layout.hpp"
#include "device/cuda/sm90/layout.hpp"

namespace wyvern::delta_forward {

constexpr int kRows = 64;        ///< of a chunk
constexpr int kColumns = 64;     ///< of V that a warpgroup has
constexpr int kBlockWords = 16;  ///< of a `Block`

/// `num_stages` pipeline stages of a chunk's q, k and v and of the factors of its rows; the scores
/// and inverses of prepared chunks; buffers of the output, or the rounded state and its update.
template <class S>
struct HopperLayout {
  /// Whether products read the rounded state from shared memory, so that a warpgroup's registers
  /// have room for more of it.
  bool shares_state;
  int consumers;    ///< warpgroups with a state of 64 columns of V
  int outputs;      ///< buffers of a consumer warpgroup's output
  int prep_groups;  ///< warpgroups that prepare chunks, in turns
  bool pipelined;   ///< one prep warpgroup computes A, three warps of warpgroup 0 invert I + A
  int slots;        ///< buffers of prepared chunks
  int score_slots;  ///< buffers of their scores
  int tiles;        ///< bytes of a stage of q, k, v
  int factors;      ///< floats of a stage of factors
  cuda::sm90::SwizzledPlace k, q, v;  ///< the first stage
  /// All buffers, one after another. For each consumer warpgroup state is K x 64, update is V'
  /// decayed to the chunk's end, then the output.
  cuda::sm90::SwizzledPlace output, state, update, inverse, scores;
  cuda::sm90::SwizzledPlace kept;       ///< of each consumer a state that is kept, K x 64
  cuda::sm90::InverseLayout inversion;  ///< of the first prep warpgroup, or chunk
  int inversion_bytes;                  ///< from one to the next
  /// Factors of rows, the first stage. G: the running sum of gates in base 2; key, query: of k_r
  /// and q_r; row: of k_r as it is written; beta: of v_r, and erase of S k_r, in u_r;
  /// update_factor: of V'_r in the state's update; output_factor: of S q_r in o_r; left: of k_s for
  /// rows from 16, 32 and 48 on, decayed up to there (16 + 32 + 48 numbers). Where V' is kept, beta
  /// is of Z_r in V'_r, and the other factors are those of Z.
  cuda::ArrayPlace G, key, query, row, beta, erase, update_factor, output_factor, left;
  cuda::ArrayPlace decay;  ///< of the whole chunk, one a stage
  /// The largest update_factor of the first 32 rows and of the others, two a stage.
  cuda::ArrayPlace largest;
  /// Two numbers a stage: the chunk's rows in front of a checkpoint (kRows: at its end, 0: none)
  /// and the checkpoint's row of the tensor.
  cuda::ArrayPlace checkpoint;
  /// With the norm of o: sums of squares of rows by warp, for two chunks, and each consumer's
  /// scales.
  cuda::ArrayPlace squares, rstd;
  cuda::ArrayPlace block;  ///< a copy of the `Block`, for warps with few registers
  /// Full and empty barriers. Tiles and factors: one a stage, and one of the last chunk's rows; A
  /// (pipelined) and its half inverses, and the prepared chunk: one a slot; scores: one a buffer.
  cuda::sm90::BarrierPlace tiles_full, factors_full, tiles_empty, A_full, halves_full, A_empty,
      chunk_full, scores_empty, tail_full;
  cuda::sm90::BarrierPlace gate_full;  ///< with the norm of o, one a consumer
  int bytes;

  constexpr explicit HopperLayout(const S& s, bool checkpoints = false, bool normalizes = false,
                                  bool keeps = false) {
    const int stages = static_cast<int>(s.num_stages);
    shares_state = s.K > 128;
    consumers = static_cast<int>(s.BV) / kColumns;
    prep_groups = shares_state || consumers > 1 ? 1 : 2;
    outputs = consumers > 1 ? 1 : 2;
    pipelined = consumers > 1;
    slots = 2;
    score_slots = s.K > 128 ? 1 : 2;
    cuda::LayoutBuilder at;
    k = cuda::sm90::swizzled_tile(at, kRows, s.K, s.DTYPE);
    q = cuda::sm90::swizzled_tile(at, kRows, s.K, s.DTYPE);
    v = cuda::sm90::swizzled_tile(at, kRows, s.BV, s.DTYPE);
    tiles = at.bytes;
    at.bytes *= stages;
    if (shares_state) {
      state = cuda::sm90::swizzled_tile(at, consumers * s.K, kColumns, s.DTYPE);
      update = cuda::sm90::swizzled_tile(at, consumers * kRows, kColumns, s.DTYPE);
    } else {
      output = cuda::sm90::swizzled_tile(at, consumers * outputs * kRows, kColumns, s.DTYPE);
    }
    if (keeps) kept = cuda::sm90::swizzled_tile(at, consumers * s.K, kColumns, s.DTYPE);
    inverse = cuda::sm90::swizzled_tile(at, slots * kRows, kRows, s.DTYPE);
    scores = cuda::sm90::swizzled_tile(at, score_slots * kRows, kRows, s.DTYPE);
    const int before = at.bytes;
    inversion = cuda::sm90::InverseLayout(at);
    inversion_bytes = at.bytes - before;
    at.bytes += ((pipelined ? slots : prep_groups) - 1) * inversion_bytes;
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
    if (normalizes) {
      squares = at.array(2 * 4 * consumers * kRows);
      rstd = at.array(consumers * kRows);
    }
    block = at.array(kBlockWords, DType::int32);
    tiles_full = cuda::sm90::barriers(at, stages);
    factors_full = cuda::sm90::barriers(at, stages);
    tiles_empty = cuda::sm90::barriers(at, stages);
    A_full = cuda::sm90::barriers(at, slots);
    halves_full = cuda::sm90::barriers(at, slots);
    A_empty = cuda::sm90::barriers(at, slots);
    chunk_full = cuda::sm90::barriers(at, slots);
    scores_empty = cuda::sm90::barriers(at, score_slots);
    tail_full = cuda::sm90::barriers(at, 1);
    if (normalizes) gate_full = cuda::sm90::barriers(at, consumers);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::delta_forward
