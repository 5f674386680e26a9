// delta_scans' producers: warpgroup 0 loads tiles and computes the factors of rows, prep warpgroups
// compute the inverse of I + A and, in reverse, the scores of queries. `Scheduler`, a global alias
// set before the include, says which work a block has.
#pragma once

#include "backward/delta_scans/layout.hpp"
#include "device/cuda/sm90/decay.cuh"
#include "device/cuda/sm90/scalar_rows.cuh"
#include "device/cuda/sm90/scan_scheduler.cuh"
#include "device/cuda/sm90/scheduler.cuh"
#include "device/cuda/sm90/tma.cuh"

using delta_scans::kColumns;
using delta_scans::kRows;
using delta_scans::kSlots;

/// Whether a scan writes what it finds for each chunk, or its last state alone.
constexpr bool kOutput = Scheduler::kOutput;
constexpr delta_scans::HopperLayout<Spec> kLayout{Spec{}};
constexpr int kStages = num_stages;
constexpr int kValueStages = kLayout.value_stages;
constexpr int kConsumers = kLayout.consumers;
constexpr int kPrepGroups = kLayout.prep_groups;
constexpr bool kPipelined = kLayout.pipelined;
constexpr bool kSharesState = kLayout.shares_state;
constexpr int kScoreSlots = kLayout.score_slots;
constexpr int kThreads = 128 * (1 + kPrepGroups + kConsumers);
/// Warps of warpgroup 0 that compute factors: the last two, or the one that loads tiles.
constexpr int kFactorWarps = kPipelined ? 1 : 2;
constexpr int kFirstFactorWarp = kPipelined ? 0 : 2;
constexpr int kPanels = BV / kColumns;
constexpr int kKeyBytes = kRows * K * static_cast<int>(sizeof(DTYPE));
constexpr int kValueBytes = kRows * BV * static_cast<int>(sizeof(DTYPE));

using KeyTile = sm90::SwizzledTile<DTYPE, kRows, K>;
using SquareTile = sm90::SwizzledTile<DTYPE, kRows, kRows>;
using StateTile = sm90::SwizzledTile<DTYPE, kColumns, K>;

/// The pipeline stage of a step's keys and factors, and its phase.
using Position = sm90::Pipeline<kStages>::Position;
/// The phase of a step in a ring of Stages, where it has stage step % Stages.
template <int Stages>
WYVERN_DEVICE uint32 parity_of(int step) {
  return static_cast<uint32>(step / Stages % 2);
}

using ScalarGate = sm90::ScalarGate<Spec>;
using ScalarRows = sm90::ScalarRows<Spec>;

/// A block's work, and where its tiles, factors and barriers are in shared memory.
template <bool Reverse>
struct Block : sm90::ScanSteps<kRows, Reverse> {
  using sm90::ScanWork::shared;

  WYVERN_DEVICE KeyTile keys(int stage) const {
    return {shared + kLayout.k.offset + stage * kLayout.keys};
  }
  WYVERN_DEVICE KeyTile queries(int stage) const {
    return {shared + kLayout.q.offset + stage * kLayout.keys};
  }
  /// Columns of v, or of do, from 64 `panel`.
  WYVERN_DEVICE SquareTile values(int step, int panel = 0) const {
    return {shared + kLayout.v.offset +
            (step % kValueStages * kPanels + panel) * SquareTile::kBytes};
  }
  WYVERN_DEVICE StateTile staged_state(int consumer) const {
    return {shared + kLayout.state.offset + consumer * StateTile::kBytes};
  }
  WYVERN_DEVICE SquareTile inverse(int step) const {
    return {shared + kLayout.inverse.offset + step % kSlots * SquareTile::kBytes};
  }
  WYVERN_DEVICE SquareTile scores(int step) const {
    return {shared + kLayout.scores.offset + step % kScoreSlots * SquareTile::kBytes};
  }
  template <ArrayPlace Place>
  WYVERN_DEVICE float* factors(int stage) const {
    return array_at<Place>(shared) + stage * kLayout.factors;
  }
  template <sm90::BarrierPlace Place>
  WYVERN_DEVICE sm90::Barrier* barrier(int i) const {
    return sm90::barriers_at<Place>(shared) + i;
  }
  /// The block, reloaded from its copy in shared memory.
  WYVERN_DEVICE Block recall() const { return sm90::saved_block<kLayout.block>(*this); }
};

// ---- warp 0 of warpgroup 0: tiles ---------------------------------------------------------------

/// Loads a chunk's k, and in reverse its q, when their pipeline stage is empty.
template <class B, class Params>
WYVERN_DEVICE void load_keys(const B& b, int step, const Position& at, const Params& p) {
  sm90::barrier_wait(b.template barrier<kLayout.tiles_empty>(at.buffer), at.parity ^ 1U);
  const int token = static_cast<int>(b.first_row(step));
  const int rows = b.rows(step);
  sm90::load_rows<kRows>(
      rows, b.template barrier<kLayout.tiles_full>(at.buffer),
      b.template barrier<kLayout.tail_full>(0), 0, (B::kReverse ? 2 : 1) * kKeyBytes,
      [&](sm90::Barrier* barrier) {
        sm90::tensor_load(b.keys(at.buffer).data, p.k_map, {0, token, 0, b.key_head}, barrier);
        if constexpr (B::kReverse)
          sm90::tensor_load(b.queries(at.buffer).data, p.q_map, {0, token, 0, b.key_head}, barrier);
      },
      [&] {
        sm90::clear_rows(b.keys(at.buffer), rows);
        if constexpr (B::kReverse) sm90::clear_rows(b.queries(at.buffer), rows);
      });
}

/// Loads a chunk's v, or in reverse its do.
template <class B, class Params>
WYVERN_DEVICE void load_values(const B& b, int step, const Params& p) {
  const int stage = step % kValueStages;
  sm90::barrier_wait(b.template barrier<kLayout.values_empty>(stage),
                     parity_of<kValueStages>(step) ^ 1U);
  if (!kOutput && b.zero_v) {
    sm90::barrier_arrive(b.template barrier<kLayout.values_full>(stage));
    return;
  }
  const int rows = b.rows(step);
  sm90::load_rows<kRows>(
      rows, b.template barrier<kLayout.values_full>(stage),
      b.template barrier<kLayout.tail_full>(0), 1, kValueBytes,
      [&](sm90::Barrier* barrier) {
        sm90::tensor_load(b.values(step).data, sm90::values_map<B::kReverse>(p),
                          {0, static_cast<int>(b.first_row(step)), kPanels * b.tile, b.head},
                          barrier);
      },
      [&] {
#pragma unroll
        for (int i = 0; i < kPanels; ++i) sm90::clear_rows(b.values(step, i), rows);
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

template <class B>
WYVERN_DEVICE RawRows read_rows(const B& b, int step, const ScalarRows& from) {
  RawRows raw = {};
  const int rows = b.rows(step);
  const G_DTYPE* const gates = from.g.row(b.first_row(step)) + b.head;
  const BETA_DTYPE* const rates = from.beta.row(b.first_row(step)) + b.head;
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

/// Computes the factors of a chunk's rows from `next`, and loads the next chunk's raw rows there.
template <class B>
WYVERN_DEVICE void make_factors(const B& b, int step, const Position& at, RawRows& next,
                                float scale, const ScalarGate& gate, const ScalarRows& from) {
  const RawRows raw = next;
  if (step + 1 < b.chunks) next = read_rows(b, step + 1, from);
  const int rows = b.rows(step);
  float low = 0.0f;
  float high = 0.0f;
  if constexpr (SCALAR_GATE) {
    low = sm90::running_sum(lane_index() < rows ? gate(raw.g[0]) : 0.0f);
    high = sm90::running_sum(32 + lane_index() < rows ? gate(raw.g[1]) : 0.0f);
  }
  const float low_sum = shuffle(low, 31);
  const float last = (low_sum + shuffle(high, 31)) * kLog2E;
  const float reached_by[3] = {shuffle(low, 15) * kLog2E, low_sum * kLog2E,
                               (low_sum + shuffle(high, 15)) * kLog2E};
  sm90::barrier_wait(b.template barrier<kLayout.tiles_empty>(at.buffer), at.parity ^ 1U);
#pragma unroll
  for (int n = 0; n < kLaneRows; ++n) {
    const int half = half_of_row(n);
    const int row = 32 * half + lane_index();
    const float rate =
        row < rows ? beta_divisor(activate_beta<BETA_SIGMOID, NEG_EIGVAL>(raw.beta[n])) : 0.0f;
    const float G = (half == 0 ? low : low_sum + high) * kLog2E;
    const float reached = exp2_fast(G);
    b.template factors<kLayout.G>(at.buffer)[row] = G;
    b.template factors<kLayout.key>(at.buffer)[row] = rate;
    b.template factors<kLayout.row>(at.buffer)[row] = 1.0f;
    b.template factors<kLayout.enter>(at.buffer)[row] = -reached;
    b.template factors<kLayout.leave>(at.buffer)[row] = rate * exp2_fast(last - G);
    if constexpr (B::kReverse) {
      b.template factors<kLayout.query>(at.buffer)[row] = scale;
      b.template factors<kLayout.output>(at.buffer)[row] = scale * reached;
    }
#pragma unroll
    for (int i = 0; i < 3; ++i)
      if (row < 16 * (i + 1))
        b.template factors<kLayout.left>(at.buffer)[sm90::anchored_columns(i + 1) + row] =
            rate * exp2_fast(reached_by[i] - G);
    if (row == 0) array_at<kLayout.decay>(b.shared)[at.buffer] = exp2_fast(last);
  }
  sm90::barrier_arrive(b.template barrier<kLayout.factors_full>(at.buffer));
}

// ---- prep warpgroups: scores and inverses -------------------------------------------------------

using Square = sm90::Accumulator<kRows>;

/// Rows of this warp on and below the diagonal, rounded.
WYVERN_DEVICE void store_lower(const sm90::LowerRows& x, const SquareTile& to, int warp) {
  sm90::store_lower(x, to, warp, kPipelined ? sm90::opaque(16 * warp) : 16 * warp);
}

using Decays = sm90::Decays<SCALAR_GATE>;

template <class B>
WYVERN_DEVICE Decays decays_of(const B& b, int stage, int warp) {
  return Decays(b.template factors<kLayout.G>(stage), b.template factors<kLayout.key>(stage),
                b.template factors<kLayout.left>(stage), warp);
}

/// Multiplies the norm scales of rows into their factors, one thread per row of keys or queries.
/// The fence of hand_over(chunk_full) orders these reads of tiles before the next load to them:
/// consumers wait for chunk_full before they arrive at tiles_empty.
template <class B>
WYVERN_DEVICE void normalize(const B& b, int stage) {
  const int thread = thread_index() % 128;
  const int row = thread % kRows;
  if (thread < kRows) {
    const float scale = sm90::norm_scale<kPipelined ? 2 : 8>(b.keys(stage), row);
    b.template factors<kLayout.key>(stage)[row] *= scale;
    b.template factors<kLayout.row>(stage)[row] = scale;
    b.template factors<kLayout.enter>(stage)[row] *= scale;
    b.template factors<kLayout.leave>(stage)[row] *= scale;
#pragma unroll
    for (int i = 0; i < 3; ++i)
      if (row < 16 * (i + 1))
        b.template factors<kLayout.left>(stage)[sm90::anchored_columns(i + 1) + row] *= scale;
  } else if constexpr (B::kReverse) {
    const float scale = sm90::norm_scale<kPipelined ? 2 : 8>(b.queries(stage), row);
    b.template factors<kLayout.query>(stage)[row] *= scale;
    b.template factors<kLayout.output>(stage)[row] *= scale;
  }
}

/// Waits until the consumers have read the inverse that was in the step's slot.
template <class B>
WYVERN_DEVICE void wait_inverse_empty(const B& b, int step) {
  if (step >= kSlots)
    sm90::barrier_wait(b.template barrier<kLayout.inverse_empty>(step % kSlots),
                       parity_of<kSlots>(step) ^ 1U);
}
/// The same for the scores.
template <class B>
WYVERN_DEVICE void wait_scores_empty(const B& b, int step) {
  if (step >= kScoreSlots)
    sm90::barrier_wait(b.template barrier<kLayout.scores_empty>(step % kScoreSlots),
                       parity_of<kScoreSlots>(step) ^ 1U);
}

/// -A of a chunk, for the warps that invert I + A.
template <class B>
WYVERN_DEVICE Tile<fp16, kRows, kRows> A_tile(const B& b, int step) {
  return tile_at<kLayout.inversion.inverse>(b.shared + step % kSlots * kLayout.inversion_bytes);
}

/// Starts x = rows K^T.
template <class B>
WYVERN_DEVICE void multiply_by_keys(const B& b, const KeyTile& rows, int stage, Square& x) {
  sm90::start_product<K>(x, sm90::rows_of(rows), sm90::rows_of(b.keys(stage)));
}

template <class B>
WYVERN_DEVICE void wait_for_tiles(const B& b, const Position& at) {
  // Loads may complete out of order: the wait for `empty` tells this phase of `full` from the one
  // before.
  sm90::barrier_wait(b.template barrier<kLayout.tiles_empty>(at.buffer), at.parity ^ 1U);
  sm90::barrier_wait(b.template barrier<kLayout.tiles_full>(at.buffer), at.parity);
}

/// Waits for the factors of a chunk and multiplies the norm scales into them.
template <class B>
WYVERN_DEVICE void wait_for_factors(const B& b, const Position& at, int name) {
  sm90::barrier_wait(b.template barrier<kLayout.factors_full>(at.buffer), at.parity);
  if constexpr (QK_L2NORM) {
    normalize(b, at.buffer);
    sm90::sync_named(name, 128);
  }
}

/// This thread's two rows of a factor.
WYVERN_DEVICE void read_factor(float (&to)[2], const float* from) {
  to[0] = from[Square::row(0)];
  to[1] = from[Square::row(2)];
}

/// A prep warpgroup that leaves the inverse to warps of warpgroup 0: -A, and in reverse the scores,
/// of every chunk.
template <class B>
WYVERN_DEVICE void prepare_A(const B& b) {
  const int warp = sm90::uniform(warp_index()) % 4;
  Position at;
#pragma unroll 1
  for (int step = 0; step < b.chunks; ++step, at.advance()) {
    const int slot = step % kSlots;
    wait_for_tiles(b, at);
    Square x;
    multiply_by_keys(b, b.keys(at.buffer), at.buffer, x);
    wait_for_factors(b, at, kConsumers + 1);
    float of_key[2], of_query[2] = {};
    read_factor(of_key, b.template factors<kLayout.row>(at.buffer));
    if constexpr (B::kReverse) read_factor(of_query, b.template factors<kLayout.query>(at.buffer));
    const Decays decays = decays_of(b, at.buffer, warp);
    sm90::end_products<0>(x);
    if (step >= kSlots)
      sm90::barrier_wait(b.template barrier<kLayout.A_empty>(slot), parity_of<kSlots>(step) ^ 1U);
    sm90::store_negated(sm90::lower_rows<true>(x, decays, warp, of_key), A_tile(b, step), warp);
    sm90::barrier_arrive(b.template barrier<kLayout.A_full>(slot));
    if constexpr (B::kReverse) {
      multiply_by_keys(b, b.queries(at.buffer), at.buffer, x);
      wait_scores_empty(b, step);
      sm90::end_products<0>(x);
    }
    sm90::barrier_arrive(b.template barrier<kLayout.tiles_empty>(at.buffer));
    if constexpr (B::kReverse)
      store_lower(sm90::lower_rows<false>(x, decays, warp, of_query), b.scores(step), warp);
    sm90::hand_over(b.template barrier<kLayout.chunk_full>(slot));
  }
}

/// Warps 1 to 3 of warpgroup 0 invert I + A: warps 2 and 3 one half of 32 rows each, then warp 1
/// the block below them.
template <class B>
WYVERN_DEVICE void invert_chunks(const B& b) {
  const int warp = sm90::uniform(warp_index());
#pragma unroll 1
  for (int step = 0; step < b.chunks; ++step) {
    const int slot = step % kSlots;
    const uint32 parity = parity_of<kSlots>(step);
    const auto begin = [&] { wait_inverse_empty(b, step); };
    if (warp > 1) {
      sm90::barrier_wait(b.template barrier<kLayout.A_full>(slot), parity);
      sm90::invert_32(A_tile(b, step), b.inverse(step), sm90::opaque(32 * (warp - 2)), begin);
      sm90::barrier_arrive(b.template barrier<kLayout.halves_full>(slot));
    } else {
      sm90::barrier_wait(b.template barrier<kLayout.halves_full>(slot), parity);
      sm90::join_32(A_tile(b, step), b.inverse(step), begin);
      sm90::barrier_arrive(b.template barrier<kLayout.A_empty>(slot));
    }
    sm90::hand_over(b.template barrier<kLayout.chunk_full>(slot));
  }
}

/// A prep warpgroup that inverts: every chunk whose step it is, from chunk `prep` on.
template <class B>
WYVERN_DEVICE void prepare_chunks(const B& b, int prep) {
  const int warp = sm90::uniform(warp_index()) % 4;
  auto inverse = sm90::UnitLowerInverse::at<kLayout.inversion>(
      b.shared + prep * kLayout.inversion_bytes, kConsumers + 3 + 3 * prep);
  Position at;
  if (prep == 1) at.advance();
#pragma unroll 1
  for (int step = prep; step < b.chunks; step += kPrepGroups) {
    const int slot = step % kSlots;
    wait_for_tiles(b, at);
    Square x;
    multiply_by_keys(b, B::kReverse ? b.queries(at.buffer) : b.keys(at.buffer), at.buffer, x);
    wait_for_factors(b, at, kConsumers + 1 + prep);
    float of_key[2], of_query[2] = {};
    read_factor(of_key, b.template factors<kLayout.row>(at.buffer));
    if constexpr (B::kReverse) read_factor(of_query, b.template factors<kLayout.query>(at.buffer));
    const Decays decays = decays_of(b, at.buffer, warp);
    sm90::end_products<0>(x);
    wait_inverse_empty(b, step);
    if constexpr (B::kReverse) {
      wait_scores_empty(b, step);
      store_lower(sm90::lower_rows<false>(x, decays, warp, of_query), b.scores(step), warp);
      multiply_by_keys(b, b.keys(at.buffer), at.buffer, x);
      sm90::end_products<0>(x);
    }
    const sm90::LowerRows A = sm90::lower_rows<true>(x, decays, warp, of_key);
    sm90::barrier_arrive(b.template barrier<kLayout.tiles_empty>(at.buffer));
    inverse.take(A.left, A.diagonal);
    inverse.invert(b.inverse(step), warp);
    sm90::hand_over(b.template barrier<kLayout.chunk_full>(slot));
    inverse.release();
#pragma unroll
    for (int i = 0; i < kPrepGroups; ++i) at.advance();
  }
}
