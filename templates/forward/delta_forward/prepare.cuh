// delta_forward's producers: warpgroup 0 loads tiles and computes the factors of rows, prep
// warpgroups prepare chunks. `Scheduler`, a global alias set before the include, says which work a
// block has.
#pragma once

#include "device/cuda/checkpoints.cuh"
#include "device/cuda/norm_rows.cuh"
#include "device/cuda/sm90/scalar_prepare.cuh"
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
/// Whether the output is normalized and gated: of templates that cover output_norm.
constexpr bool kNormalizes = kHasNorm<Spec>;
/// Whether the states that enter chunks and V' are kept: of templates with that constant.
template <class S>
constexpr bool kHasStates = requires { S::KEEP_STATES; };
constexpr bool kKeeps = kHasStates<Spec>;
constexpr delta_forward::HopperLayout<Spec> kLayout{Spec{}, kCheckpoints, kNormalizes, kKeeps};
constexpr int kStages = num_stages;
constexpr int kConsumers = kLayout.consumers;
constexpr int kPrepGroups = kLayout.prep_groups;
constexpr bool kPipelined = kLayout.pipelined;
constexpr int kSlots = kLayout.slots;
constexpr int kScoreSlots = kLayout.score_slots;
constexpr int kThreads = 128 * (1 + kPrepGroups + kConsumers);
constexpr int kPanels = BV / kColumns;
/// Of a tile of keys, or of queries, and of values.
constexpr int kKeyBytes = kRows * K * static_cast<int>(sizeof(DTYPE));
constexpr int kValueBytes = kRows * BV * static_cast<int>(sizeof(DTYPE));

using KeyTile = sm90::SwizzledTile<DTYPE, kRows, K>;
using SquareTile = sm90::SwizzledTile<DTYPE, kRows, kRows>;
using KeptTile = sm90::SwizzledTile<DTYPE, K, kColumns>;

/// The pipeline stage of a chunk's tiles and factors, and its phase.
using Position = sm90::Pipeline<kStages>::Position;

using ScalarGate = sm90::ScalarGate<Spec>;
using ScalarRows = sm90::ScalarRows<Spec>;

/// The norm scale of a key near 0 is up to 1000, and V' enters the state times it: fp16 may
/// overflow.
constexpr bool kMayOverflow = QK_L2NORM && !sm90::kIsBf16<DTYPE>;
/// scale_key() finds a warp's largest factor, and where A is pipelined not all lanes call it.
static_assert(!kMayOverflow || !kPipelined);
/// In a chunk with a factor above kMaxFactor, V' and the state are multiplied by kRoom until V' is
/// added: V' of up to 2^13 fits in any case, and other rows' factors keep their digits.
constexpr float kMaxFactor = 8.0f;
constexpr float kRoom = 0x1p-8f;

/// A block's work, and where its tiles, factors and barriers are in shared memory.
struct Block : sm90::Work {
  // For ScalarPrepare.
  static constexpr auto kLayout = ::kLayout;
  static constexpr bool kQueries = ::kQueries, kScaledRows = QK_L2NORM || !kKeeps,
                        kScaledColumns = QK_L2NORM || kKeeps;

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
  WYVERN_DEVICE KeptTile kept(int consumer) const {
    return {shared + kLayout.kept.offset + consumer * KeptTile::kBytes};
  }
  WYVERN_DEVICE SquareTile inverse(int chunk) const {
    return {shared + kLayout.inverse.offset + chunk % kSlots * SquareTile::kBytes};
  }
  WYVERN_DEVICE SquareTile scores(int chunk) const {
    return {shared + kLayout.scores.offset + chunk % kScoreSlots * SquareTile::kBytes};
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
  WYVERN_DEVICE int64 first_row(int chunk) const { return token + chunk * kRows; }

  /// Multiplies the norm scale of a key into the factors of its row; by whole warps.
  WYVERN_DEVICE void scale_key(int buffer, int row, float scale) const {
    float& key = factors<kLayout.key>(buffer)[row];
    key = kKeeps ? key * scale : scale;
    factors<kLayout.row>(buffer)[row] *= scale;
    factors<kLayout.erase>(buffer)[row] *= scale;
    factors<kLayout.update_factor>(buffer)[row] *= scale;
    if constexpr (kMayOverflow) {
      const float largest = max_warp(factors<kLayout.update_factor>(buffer)[row]);
      if (lane_index() == 0) array_at<kLayout.largest>(shared)[2 * buffer + row / 32] = largest;
    }
  }
  WYVERN_DEVICE void scale_query(int buffer, int row, float scale) const {
    factors<kLayout.query>(buffer)[row] *= scale;
    factors<kLayout.output_factor>(buffer)[row] *= scale;
  }
};

using Prepare = sm90::ScalarPrepare<Spec, Block>;
using Square = Prepare::Square;

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

/// 1 or kRoom, for all rows of a prepared chunk.
WYVERN_DEVICE float room_of(const Block& b, int buffer) {
  if constexpr (!kMayOverflow) return 1.0f;
  const auto largest = load<2>(array_at<kLayout.largest>(b.shared) + 2 * buffer);
  return maximum(largest.at[0], largest.at[1]) > kMaxFactor ? kRoom : 1.0f;
}

/// Whether the decay of a state is deferred over chunks: meanwhile the factors of products with the
/// state include the decay that it owes. fp16 has too little range for them; kept states owe none.
constexpr bool kLazyDecay = SCALAR_GATE && kPipelined && sm90::kIsBf16<DTYPE> && !kKeeps;
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

WYVERN_DEVICE float rate_of(BETA_DTYPE raw) {
  const float beta = activate_beta<BETA_SIGMOID, NEG_EIGVAL>(raw);
  return kKeeps ? beta_divisor(beta) : beta;
}

/// Computes the factors of a chunk's rows from `next`, and loads the next chunk's raw rows there.
/// `owed` is log2 of the decay that the state owes before the chunk, and then after it. Where a
/// checkpoint divides the chunk, `decay` and the update of the rows in front of it go up to it.
/// `checkpoints` counts tokens from the block's first. Where V' is kept beta is on the columns of A
/// and of the scores, and V' = beta Z: of rows of A whose beta is next to nothing the inverse, in
/// fp16, keeps nothing, and a backward pass divides V' by beta.
template <class Checkpoints>
WYVERN_DEVICE void make_factors(const Block& b, int chunk, const Position& at,
                                Prepare::RawRows& next, float& owed, float scale,
                                const ScalarGate& gate, const ScalarRows& from,
                                Checkpoints& checkpoints) {
  const Prepare::RawRows raw = next;
  // Values enter in the state's unit, the output leaves it.
  const float unit = sm90::unit_of<Spec>(b);
  scale *= unit;
  if (chunk + 1 < b.chunks) next = Prepare{b}.read_rows(chunk + 1, from);
  const int rows = b.rows(chunk);
  const sm90::DecaySums sums = Prepare::sums_of(raw, rows, gate);
  const float before = owed;
  owed += sums.last;
  int front = 0;
  if constexpr (Checkpoints::kAny)
    front = checkpoints.reached(static_cast<uint32>(chunk) * kRows, rows);
  // Nothing is owed after the last chunk or a checkpoint, nor where gates above 0 let the state
  // grow, nor after NaN.
  const bool owes =
      kLazyDecay && owed >= -kMaxOwed && owed <= 0.0f && chunk + 1 < b.chunks && front == 0;
  float decay = owes ? 1.0f : exp2_fast(owed);
  if (!owes) owed = 0.0f;
  int divided = 0;  // rows in front of a checkpoint inside the chunk
  float at_front = sums.last;
  if constexpr (Checkpoints::kInside) {
    if (front < rows) divided = front;
    if (divided != 0) {
      at_front = sums.anchor[divided / 16 - 1];
      decay = exp2_fast(before + at_front);
    }
  }
  sm90::barrier_wait(b.barrier<kLayout.tiles_empty>(at.buffer), at.parity ^ 1U);
  if constexpr (Checkpoints::kAny) {
    if (Prepare::half_of_row(0) == 0 && lane_index() == 0) {
      checkpoint_of(b, at.buffer)[0] = front == rows ? kRows : front;
      checkpoint_of(b, at.buffer)[1] = static_cast<int32>(checkpoints.row);
    }
    if (front != 0) checkpoints.pass();
  }
#pragma unroll
  for (int n = 0; n < Prepare::kLaneRows; ++n) {
    const int half = Prepare::half_of_row(n);
    const int row = 32 * half + lane_index();
    const float rate = row < rows ? rate_of(raw.beta[n]) : 0.0f;
    const float G = half == 0 ? sums.row[0] : sums.row[1];
    const float reached = exp2_fast(before + G);
    b.factors<kLayout.G>(at.buffer)[row] = G;
    const float of_column = kKeeps ? rate : 1.0f, of_row = kKeeps ? 1.0f : rate;
    b.factors<kLayout.row>(at.buffer)[row] = of_row;
    if constexpr (kKeeps) b.factors<kLayout.key>(at.buffer)[row] = of_column;
    if constexpr (kQueries) {
      b.factors<kLayout.query>(at.buffer)[row] = scale;
      b.factors<kLayout.output_factor>(at.buffer)[row] = scale * reached;
    }
    b.factors<kLayout.beta>(at.buffer)[row] = kKeeps ? rate : rate / unit;
    b.factors<kLayout.erase>(at.buffer)[row] = -of_row * reached;
    const float end = row < divided ? at_front : sums.last;
    b.factors<kLayout.update_factor>(at.buffer)[row] =
        of_column * exp2_fast((owes ? -before : end) - G);
    Prepare{b}.store_left(at.buffer, row, G, sums, of_column);
    if (row == 0) array_at<kLayout.decay>(b.shared)[at.buffer] = decay;
  }
  sm90::barrier_arrive(b.barrier<kLayout.factors_full>(at.buffer));
}
