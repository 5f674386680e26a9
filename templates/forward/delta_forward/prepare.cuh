// delta_forward's producers: warpgroup 0 loads tiles and computes the factors of rows, prep
// warpgroups compute the scores of queries and the inverse of I + A. `Scheduler`, a global alias
// set before the include, says which work a block has.
#pragma once

#include "device/cuda/checkpoints.cuh"
#include "device/cuda/sm90/decay.cuh"
#include "device/cuda/sm90/scalar_rows.cuh"
#include "device/cuda/sm90/scheduler.cuh"
#include "device/cuda/sm90/tma.cuh"
#include "device/cuda/warp.cuh"
#include "forward/delta_forward/hopper_layout.hpp"

using delta_forward::kColumns;
using delta_forward::kRows;

/// Whether there is an output; where not, queries are not loaded.
constexpr bool kQueries = Scheduler::kOutput;
/// Whether states inside the sequence are written, and inside chunks too.
constexpr bool kCheckpoints = Scheduler::kCheckpoints, kDivided = Scheduler::kDivided;
constexpr delta_forward::HopperLayout<Spec> kLayout{Spec{}, kCheckpoints};
constexpr int kStages = num_stages;
constexpr int kConsumers = kLayout.consumers;
constexpr int kPrepGroups = kLayout.prep_groups;
constexpr bool kPipelined = kLayout.pipelined;
constexpr int kSlots = kLayout.slots;
constexpr int kScoreSlots = kLayout.score_slots;
constexpr int kThreads = 128 * (1 + kPrepGroups + kConsumers);
/// Warps of warpgroup 0 that compute factors: the last two, or the one that loads tiles.
constexpr int kFactorWarps = kPipelined ? 1 : 2;
constexpr int kFirstFactorWarp = kPipelined ? 0 : 2;
constexpr int kPanels = BV / kColumns;
/// Of a tile of keys, or of queries, and of values.
constexpr int kKeyBytes = kRows * K * static_cast<int>(sizeof(DTYPE));
constexpr int kValueBytes = kRows * BV * static_cast<int>(sizeof(DTYPE));

using KeyTile = sm90::SwizzledTile<DTYPE, kRows, K>;
using SquareTile = sm90::SwizzledTile<DTYPE, kRows, kRows>;

/// The pipeline stage of a chunk's tiles and factors, and its phase.
using Position = sm90::Pipeline<kStages>::Position;

using ScalarGate = sm90::ScalarGate<Spec>;
using ScalarRows = sm90::ScalarRows<Spec>;

/// A block's work, and where its tiles, factors and barriers are in shared memory.
struct Block : sm90::Work {
  WYVERN_DEVICE KeyTile keys(int buffer) const {
    return {shared + kLayout.k.offset + buffer * kLayout.tiles};
  }
  WYVERN_DEVICE KeyTile queries(int buffer) const {
    return {shared + kLayout.q.offset + buffer * kLayout.tiles};
  }
  /// Columns of V from 64 `panel`.
  WYVERN_DEVICE SquareTile values(int buffer, int panel = 0) const {
    return {shared + kLayout.v.offset + buffer * kLayout.tiles + panel * SquareTile::kBytes};
  }
  WYVERN_DEVICE SquareTile output(int i) const {
    return {shared + kLayout.output.offset + i * SquareTile::kBytes};
  }
  WYVERN_DEVICE SquareTile inverse(int i) const {
    return {shared + kLayout.inverse.offset + i * SquareTile::kBytes};
  }
  WYVERN_DEVICE SquareTile scores(int i) const {
    return {shared + kLayout.scores.offset + i * SquareTile::kBytes};
  }
  template <ArrayPlace Place>
  WYVERN_DEVICE float* factors(int buffer) const {
    return array_at<Place>(shared) + buffer * kLayout.factors;
  }
  template <sm90::BarrierPlace Place>
  WYVERN_DEVICE sm90::Barrier* barrier(int i) const {
    return sm90::barriers_at<Place>(shared) + i;
  }
  WYVERN_DEVICE int rows(int chunk) const { return smaller(tokens - chunk * kRows, kRows); }
};

/// The block, reloaded from its copy in shared memory.
WYVERN_DEVICE Block recalled(const Block& b) { return sm90::saved_block<kLayout.block>(b); }

// ---- warp 0 of warpgroup 0: tiles ---------------------------------------------------------------

/// Loads a chunk's tiles when their pipeline stage is empty.
template <class Params>
WYVERN_DEVICE void load_tiles(const Block& b, int chunk, const Position& at, const Params& p) {
  sm90::barrier_wait(b.barrier<kLayout.tiles_empty>(at.buffer), at.parity ^ 1U);
  const int token = static_cast<int>(b.token) + chunk * kRows;
  const int rows = b.rows(chunk);
  const bool values = kQueries || !b.zero_v;
  sm90::load_rows<kRows>(
      rows, b.barrier<kLayout.tiles_full>(at.buffer), b.barrier<kLayout.tail_full>(0), 0,
      (kQueries ? 2 : 1) * kKeyBytes + (values ? kValueBytes : 0),
      [&](sm90::Barrier* barrier) {
        sm90::tensor_load(b.keys(at.buffer).data, p.k_map, {0, token, 0, b.key_head}, barrier);
        if constexpr (kQueries)
          sm90::tensor_load(b.queries(at.buffer).data, p.q_map, {0, token, 0, b.key_head}, barrier);
        if (values)
          sm90::tensor_load(b.values(at.buffer).data, p.v_map, {0, token, kPanels * b.tile, b.head},
                            barrier);
      },
      [&] {
        sm90::clear_rows(b.keys(at.buffer), rows);
        if constexpr (kQueries) sm90::clear_rows(b.queries(at.buffer), rows);
#pragma unroll
        for (int i = 0; i < kPanels; ++i) sm90::clear_rows(b.values(at.buffer, i), rows);
      });
}

// ---- factor warps -------------------------------------------------------------------------------

constexpr int kLaneRows = 2 / kFactorWarps;

/// The half of a chunk, 0 or 1, that row `i` of this lane is in.
WYVERN_DEVICE int half_of_row(int i) {
  return kFactorWarps == 1 ? i : static_cast<int>(warp_index()) - kFirstFactorWarp;
}

/// A lane's raw g and beta: g of a row in both halves of a chunk, for the running sum, and beta of
/// its own rows. Loaded one chunk ahead of their use.
struct RawRows {
  G_DTYPE g[2];
  BETA_DTYPE beta[kLaneRows];
};

WYVERN_DEVICE RawRows read_rows(const Block& b, int chunk, const ScalarRows& from) {
  RawRows raw = {};
  const int rows = b.rows(chunk);
  const G_DTYPE* const gates = from.g.row(b.token + chunk * kRows) + b.head;
  const BETA_DTYPE* const rates = from.beta.row(b.token + chunk * kRows) + b.head;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 32 * i + lane_index();
    if (SCALAR_GATE && row < rows) raw.g[i] = gates[row * from.g.stride];
  }
#pragma unroll
  for (int i = 0; i < kLaneRows; ++i) {
    const int row = 32 * half_of_row(i) + lane_index();
    if (row < rows) raw.beta[i] = rates[row * from.beta.stride];
  }
  return raw;
}

/// Whether the decay of a state is deferred over chunks: meanwhile the factors of products with the
/// state include the decay that it owes. fp16 has too little range for them.
constexpr bool kLazyDecay = SCALAR_GATE && kFactorWarps == 1 && sm90::kIsBf16<DTYPE>;
/// log2 of the decay that a state may owe after a chunk, and so of the largest factor: values of up
/// to 2^100 times it are finite.
constexpr float kMaxOwed = 24.0f;

/// Where the consumers find a chunk's checkpoint.
WYVERN_DEVICE int32* checkpoint_of(const Block& b, int buffer) {
  return reinterpret_cast<int32*>(array_at<kLayout.checkpoint>(b.shared)) + 2 * buffer;
}

/// The row of the checkpoint at a chunk's end; negative where there is none.
WYVERN_DEVICE int row_of_end(const Block& b, int buffer) {
  const int32* const checkpoint = checkpoint_of(b, buffer);
  return checkpoint[0] == kRows ? checkpoint[1] : -1;
}

/// Computes the factors of a chunk's rows from `next`, and loads the next chunk's raw rows there.
/// `owed` is log2 of the decay that the state owes before the chunk, and then after it. Where a
/// checkpoint divides the chunk, `decay` and the update of the rows in front of it go up to it.
/// `checkpoints` counts tokens from the block's first.
template <class Checkpoints>
WYVERN_DEVICE void make_factors(const Block& b, int chunk, const Position& at, RawRows& next,
                                float& owed, float scale, const ScalarGate& gate,
                                const ScalarRows& from, Checkpoints& checkpoints) {
  const RawRows raw = next;
  // Values enter in the state's unit, the output leaves it.
  const float unit = sm90::unit_of<Spec>(b);
  scale *= unit;
  if (chunk + 1 < b.chunks) next = read_rows(b, chunk + 1, from);
  const int rows = b.rows(chunk);
  float low = 0.0f;
  float high = 0.0f;
  if constexpr (SCALAR_GATE) {
    low = sm90::running_sum(lane_index() < rows ? gate(raw.g[0]) : 0.0f);
    high = sm90::running_sum(32 + lane_index() < rows ? gate(raw.g[1]) : 0.0f);
  }
  const float low_sum = shuffle(low, 31);
  const float last = (low_sum + shuffle(high, 31)) * kLog2E;
  const float before = owed;
  owed += last;
  int front = 0;
  if constexpr (Checkpoints::kAny)
    front = checkpoints.reached(static_cast<uint32>(chunk) * kRows, rows);
  // Nothing is owed after the last chunk or a checkpoint, nor where gates above 0 let the state
  // grow, nor after NaN.
  const bool owes =
      kLazyDecay && owed >= -kMaxOwed && owed <= 0.0f && chunk + 1 < b.chunks && front == 0;
  float decay = owes ? 1.0f : exp2_fast(owed);
  if (!owes) owed = 0.0f;
  const float reached_by[3] = {shuffle(low, 15) * kLog2E, low_sum * kLog2E,
                               (low_sum + shuffle(high, 15)) * kLog2E};
  int divided = 0;  // rows in front of a checkpoint inside the chunk
  float at_front = last;
  if constexpr (Checkpoints::kInside) {
    if (front < rows) divided = front;
    if (divided != 0) {
      at_front = reached_by[divided / 16 - 1];
      decay = exp2_fast(before + at_front);
    }
  }
  sm90::barrier_wait(b.barrier<kLayout.tiles_empty>(at.buffer), at.parity ^ 1U);
  if constexpr (Checkpoints::kAny) {
    if (half_of_row(0) == 0 && lane_index() == 0) {
      checkpoint_of(b, at.buffer)[0] = front == rows ? kRows : front;
      checkpoint_of(b, at.buffer)[1] = static_cast<int32>(checkpoints.row);
    }
    if (front != 0) checkpoints.pass();
  }
#pragma unroll
  for (int n = 0; n < kLaneRows; ++n) {
    const int half = half_of_row(n);
    const int row = 32 * half + lane_index();
    const float rate = row < rows ? activate_beta<BETA_SIGMOID, NEG_EIGVAL>(raw.beta[n]) : 0.0f;
    const float G = (half == 0 ? low : low_sum + high) * kLog2E;
    const float reached = exp2_fast(before + G);
    b.factors<kLayout.G>(at.buffer)[row] = G;
    b.factors<kLayout.row>(at.buffer)[row] = rate;
    if constexpr (kQueries) {
      b.factors<kLayout.query>(at.buffer)[row] = scale;
      b.factors<kLayout.output_factor>(at.buffer)[row] = scale * reached;
    }
    b.factors<kLayout.beta>(at.buffer)[row] = rate / unit;
    b.factors<kLayout.erase>(at.buffer)[row] = -rate * reached;
    const float end = row < divided ? at_front : last;
    b.factors<kLayout.update_factor>(at.buffer)[row] = exp2_fast((owes ? -before : end) - G);
#pragma unroll
    for (int i = 0; i < 3; ++i)
      if (row < 16 * (i + 1))
        b.factors<kLayout.left>(at.buffer)[sm90::anchored_columns(i + 1) + row] =
            exp2_fast(reached_by[i] - G);
    if (row == 0) array_at<kLayout.decay>(b.shared)[at.buffer] = decay;
  }
  sm90::barrier_arrive(b.barrier<kLayout.factors_full>(at.buffer));
}

// ---- prep warpgroups: scores and inverses -------------------------------------------------------

using Square = sm90::Accumulator<kRows>;

/// Rows of this warp on and below the diagonal, rounded.
WYVERN_DEVICE void store_lower(const sm90::LowerRows& x, const SquareTile& to, int warp) {
  sm90::store_lower(x, to, warp, kPipelined ? sm90::opaque(16 * warp) : 16 * warp);
}

using Decays = sm90::Decays<SCALAR_GATE, QK_L2NORM>;

WYVERN_DEVICE Decays decays_of(const Block& b, int buffer, int warp) {
  return Decays(b.factors<kLayout.G>(buffer), b.factors<kLayout.key>(buffer),
                b.factors<kLayout.left>(buffer), warp);
}

/// The norm scale of a key near 0 is up to 1000, and V' enters the state times it: fp16 may
/// overflow.
constexpr bool kMayOverflow = QK_L2NORM && !sm90::kIsBf16<DTYPE>;
/// In a chunk with a factor above kMaxFactor, V' and the state are multiplied by kRoom until V' is
/// added: V' of up to 2^13 fits in any case, and other rows' factors keep their digits.
constexpr float kMaxFactor = 8.0f;
constexpr float kRoom = 0x1p-8f;

/// 1 or kRoom, for all rows of a prepared chunk.
WYVERN_DEVICE float room_of(const Block& b, int buffer) {
  if constexpr (!kMayOverflow) return 1.0f;
  const auto largest = load<2>(array_at<kLayout.largest>(b.shared) + 2 * buffer);
  return maximum(largest.at[0], largest.at[1]) > kMaxFactor ? kRoom : 1.0f;
}

/// Multiplies the norm scales of rows into their factors, one thread per row of keys or queries.
/// The fence of hand_over(chunk_full) orders these reads of tiles before the next load to them:
/// consumers wait for chunk_full before they arrive at tiles_empty.
WYVERN_DEVICE void normalize(const Block& b, int buffer) {
  const int thread = thread_index() % 128;
  const int row = thread % kRows;
  if (thread < kRows) {
    const float scale = sm90::norm_scale<kPipelined ? 2 : 8>(b.keys(buffer), row);
    b.factors<kLayout.key>(buffer)[row] = scale;
    b.factors<kLayout.row>(buffer)[row] *= scale;
    b.factors<kLayout.erase>(buffer)[row] *= scale;
    b.factors<kLayout.update_factor>(buffer)[row] *= scale;
#pragma unroll
    for (int i = 0; i < 3; ++i)
      if (row < 16 * (i + 1))
        b.factors<kLayout.left>(buffer)[sm90::anchored_columns(i + 1) + row] *= scale;
    if constexpr (kMayOverflow) {
      const float largest = max_warp(b.factors<kLayout.update_factor>(buffer)[row]);
      if (lane_index() == 0)
        array_at<kLayout.largest>(b.shared)[2 * buffer + thread / 32] = largest;
    }
  } else if constexpr (kQueries) {
    const float scale = sm90::norm_scale<kPipelined ? 2 : 8>(b.queries(buffer), row);
    b.factors<kLayout.query>(buffer)[row] *= scale;
    b.factors<kLayout.output_factor>(buffer)[row] *= scale;
  }
}

/// Scores have one buffer and inverses two: scores are stored last, when the buffer is empty.
constexpr bool kScoresLast = kScoreSlots < kSlots;

/// Waits for the buffer of `chunk`'s scores.
WYVERN_DEVICE void wait_scores_empty(const Block& b, int chunk) {
  if (chunk >= kScoreSlots)
    sm90::barrier_wait(b.barrier<kLayout.scores_empty>(chunk % kScoreSlots),
                       (chunk / kScoreSlots + 1) % 2);
}

/// -A of a chunk, for the warps that invert I + A.
WYVERN_DEVICE Tile<fp16, kRows, kRows> A_tile(const Block& b, int chunk) {
  return tile_at<kLayout.inversion.inverse>(b.shared + chunk % kSlots * kLayout.inversion_bytes);
}

/// Starts x = rows K^T.
WYVERN_DEVICE void multiply_by_keys(const Block& b, const KeyTile& rows, int buffer, Square& x) {
  sm90::start_product<K>(x, sm90::rows_of(rows), sm90::rows_of(b.keys(buffer)));
}

WYVERN_DEVICE void wait_for_tiles(const Block& b, const Position& at) {
  // Loads may complete out of order: the wait for `empty` tells this phase of `full` from the one
  // before.
  sm90::barrier_wait(b.barrier<kLayout.tiles_empty>(at.buffer), at.parity ^ 1U);
  sm90::barrier_wait(b.barrier<kLayout.tiles_full>(at.buffer), at.parity);
}

/// A prep warpgroup that leaves the inverse to warps of warpgroup 0: -A and scores of every chunk.
WYVERN_DEVICE void prepare_A(const Block& b) {
  const int warp = sm90::uniform(warp_index()) % 4;
  Position at;
#pragma unroll 1
  for (int c = 0; c < b.chunks; ++c, at.advance()) {
    const int slot = c % kSlots;
    wait_for_tiles(b, at);
    Square x;
    multiply_by_keys(b, b.keys(at.buffer), at.buffer, x);
    sm90::barrier_wait(b.barrier<kLayout.factors_full>(at.buffer), at.parity);
    if constexpr (QK_L2NORM) {
      normalize(b, at.buffer);
      sm90::sync_named(kConsumers + 1, 128);
    }
    const float* const key = b.factors<kLayout.row>(at.buffer);
    const float of_key[2] = {key[Square::row(0)], key[Square::row(2)]};
    float of_query[2] = {};
    if constexpr (kQueries) {
      const float* const query = b.factors<kLayout.query>(at.buffer);
      of_query[0] = query[Square::row(0)];
      of_query[1] = query[Square::row(2)];
    }
    const Decays decays = decays_of(b, at.buffer, warp);
    sm90::end_products<0>(x);
    if (c >= kSlots) sm90::barrier_wait(b.barrier<kLayout.A_empty>(slot), (c / kSlots + 1) % 2);
    sm90::store_negated(sm90::lower_rows<true>(x, decays, warp, of_key), A_tile(b, c), warp);
    sm90::barrier_arrive(b.barrier<kLayout.A_full>(slot));
    if constexpr (kQueries) {
      multiply_by_keys(b, b.queries(at.buffer), at.buffer, x);
      wait_scores_empty(b, c);
      sm90::end_products<0>(x);
    }
    sm90::barrier_arrive(b.barrier<kLayout.tiles_empty>(at.buffer));
    if constexpr (kQueries)
      store_lower(sm90::lower_rows<false>(x, decays, warp, of_query), b.scores(slot), warp);
    sm90::hand_over(b.barrier<kLayout.chunk_full>(slot));
  }
}

/// Warps 1 to 3 of warpgroup 0 invert I + A: warps 2 and 3 one half of 32 rows each, then warp 1
/// the block below them.
WYVERN_DEVICE void invert_chunks(const Block& b) {
  const int warp = sm90::uniform(warp_index());
#pragma unroll 1
  for (int c = 0; c < b.chunks; ++c) {
    const int slot = c % kSlots;
    const uint32 parity = static_cast<uint32>(c / kSlots % 2);
    const auto begin = [&] { wait_scores_empty(b, c); };
    if (warp > 1) {
      sm90::barrier_wait(b.barrier<kLayout.A_full>(slot), parity);
      sm90::invert_32(A_tile(b, c), b.inverse(slot), sm90::opaque(32 * (warp - 2)), begin);
      sm90::barrier_arrive(b.barrier<kLayout.halves_full>(slot));
    } else {
      sm90::barrier_wait(b.barrier<kLayout.halves_full>(slot), parity);
      sm90::join_32(A_tile(b, c), b.inverse(slot), begin);
      sm90::barrier_arrive(b.barrier<kLayout.A_empty>(slot));
    }
    sm90::hand_over(b.barrier<kLayout.chunk_full>(slot));
  }
}

/// A prep warpgroup that inverts: every kPrepGroups-th chunk from chunk `prep` on.
WYVERN_DEVICE void prepare_chunks(const Block& b, int prep) {
  const int warp = sm90::uniform(warp_index()) % 4;
  auto inverse = sm90::UnitLowerInverse::at<kLayout.inversion>(
      b.shared + prep * kLayout.inversion_bytes, kConsumers + 3 + 3 * prep);
  Position at;
  if (prep == 1) at.advance();
#pragma unroll 1
  for (int c = prep; c < b.chunks; c += kPrepGroups) {
    wait_for_tiles(b, at);
    Square of_queries, of_keys;
    if constexpr (kQueries) multiply_by_keys(b, b.queries(at.buffer), at.buffer, of_queries);
    if constexpr (kScoresLast || !kQueries)
      multiply_by_keys(b, b.keys(at.buffer), at.buffer, of_keys);
    sm90::barrier_wait(b.barrier<kLayout.factors_full>(at.buffer), at.parity);
    if constexpr (QK_L2NORM) {
      normalize(b, at.buffer);
      sm90::sync_named(kConsumers + 1 + prep, 128);
    }
    const int r[2] = {Square::row(0), Square::row(2)};
    const float* const query = b.factors<kLayout.query>(at.buffer);
    const float* const key = b.factors<kLayout.row>(at.buffer);
    float of_query[2] = {};
    if constexpr (kQueries) {
      of_query[0] = query[r[0]];
      of_query[1] = query[r[1]];
    }
    const float of_key[2] = {key[r[0]], key[r[1]]};
    const Decays decays = decays_of(b, at.buffer, warp);
    sm90::LowerRows scores;
    if constexpr (kQueries) {
      sm90::end_products<0>(of_queries);
      if constexpr (kScoresLast) {
        sm90::pin(of_keys.x);
        scores = sm90::lower_rows<false>(of_queries, decays, warp, of_query);
      } else {
        wait_scores_empty(b, c);
        store_lower(sm90::lower_rows<false>(of_queries, decays, warp, of_query),
                    b.scores(c % kScoreSlots), warp);
        multiply_by_keys(b, b.keys(at.buffer), at.buffer, of_keys);
        sm90::end_products<0>(of_keys);
      }
    } else {
      sm90::end_products<0>(of_keys);
      if constexpr (!kScoresLast) wait_scores_empty(b, c);
    }
    const sm90::LowerRows A = sm90::lower_rows<true>(of_keys, decays, warp, of_key);
    sm90::barrier_arrive(b.barrier<kLayout.tiles_empty>(at.buffer));
    inverse.take(A.left, A.diagonal);
    inverse.invert(b.inverse(c % kSlots), warp);
    if constexpr (kScoresLast) {
      wait_scores_empty(b, c);
      if constexpr (kQueries) store_lower(scores, b.scores(c % kScoreSlots), warp);
    }
    sm90::hand_over(b.barrier<kLayout.chunk_full>(c % kSlots));
    inverse.release();
#pragma unroll
    for (int i = 0; i < kPrepGroups; ++i) at.advance();
  }
}
