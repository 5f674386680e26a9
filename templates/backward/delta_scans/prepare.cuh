// What the blocks of delta_scans do before the states: tiles and factors of rows (warpgroup 0), the
// inverse of I + A and, in the reverse walk, the scores P (the prep warpgroups). Who includes it
// says in kWrites whether walks write what they find for each chunk, or their last states alone.
#pragma once

#include "backward/delta_scans/layout.hpp"
#include "device/cuda/sm90/decay.cuh"
#include "device/cuda/sm90/scalar_rows.cuh"
#include "device/cuda/sm90/tma.cuh"

using delta_scans::kColumns;
using delta_scans::kRows;
using delta_scans::kSlots;

constexpr delta_scans::HopperLayout<Spec> kLayout{Spec{}};
constexpr int kStages = num_stages;
constexpr int kValueStages = kLayout.value_stages;
constexpr int kConsumers = kLayout.consumers;
constexpr int kHelpers = kLayout.helpers;
constexpr bool kPipelined = kLayout.pipelined;
constexpr bool kSharesState = kLayout.shares_state;
constexpr int kScoreSlots = kLayout.score_slots;
constexpr int kThreads = 128 * (1 + kHelpers + kConsumers);
/// Warps of warpgroup 0 that make factors of rows: the last two, or the producer warp itself.
constexpr int kScalers = kPipelined ? 1 : 2;
constexpr int kFirstScaler = kPipelined ? 0 : 2;
constexpr int kPanels = BV / kColumns;
constexpr int kKeyBytes = kRows * K * static_cast<int>(sizeof(DTYPE));
constexpr int kValueBytes = kRows * BV * static_cast<int>(sizeof(DTYPE));

using KeyTile = sm90::SwizzledTile<DTYPE, kRows, K>;
using SquareTile = sm90::SwizzledTile<DTYPE, kRows, kRows>;
using StateTile = sm90::SwizzledTile<DTYPE, kColumns, K>;

/// A chunk's pipeline stage of keys and its parity, as the walk goes on.
using Position = sm90::Pipeline<kStages>::Position;
/// The parity of a turn in a ring of Stages, which it has stage turn % Stages of.
template <int Stages>
WYVERN_DEVICE uint32 parity_of(int turn) {
  return static_cast<uint32>(turn / Stages % 2);
}

using ScalarGate = sm90::ScalarGate<Spec>;
using ScalarRows = sm90::ScalarRows<Spec>;

/// What all warps of a block know of a sequence, or of a segment of one. A reverse walk starts at
/// the last chunk.
template <bool Reverse>
struct Block {
  static constexpr bool kReverse = Reverse;
  unsigned char* shared;
  int64 token;  ///< of the first row
  int64 slot;   ///< of the first chunk; where nothing is written, of the segment and value head
  int tokens, chunks;
  int sequence, head, key_head, tile;
  int heads;            ///< value heads
  bool first, last;     ///< of the sequence's segments
  bool without_values;  ///< v is 0, where nothing is written

  WYVERN_DEVICE KeyTile keys(int stage) const {
    return {shared + kLayout.k.offset + stage * kLayout.keys};
  }
  WYVERN_DEVICE KeyTile queries(int stage) const {
    return {shared + kLayout.q.offset + stage * kLayout.keys};
  }
  /// Columns of v, or of do, from 64 `panel`.
  WYVERN_DEVICE SquareTile values(int turn, int panel = 0) const {
    return {shared + kLayout.v.offset +
            (turn % kValueStages * kPanels + panel) * SquareTile::kBytes};
  }
  WYVERN_DEVICE StateTile staged_state(int consumer) const {
    return {shared + kLayout.state.offset + consumer * StateTile::kBytes};
  }
  WYVERN_DEVICE SquareTile inverse(int turn) const {
    return {shared + kLayout.inverse.offset + turn % kSlots * SquareTile::kBytes};
  }
  WYVERN_DEVICE SquareTile scores(int turn) const {
    return {shared + kLayout.scores.offset + turn % kScoreSlots * SquareTile::kBytes};
  }
  template <ArrayPlace Place>
  WYVERN_DEVICE float* factors(int stage) const {
    return array_at<Place>(shared) + stage * kLayout.factors;
  }
  template <sm90::BarrierPlace Place>
  WYVERN_DEVICE sm90::Barrier* barrier(int i) const {
    return sm90::barriers_at<Place>(shared) + i;
  }
  /// Which of the chunks comes `turn`-th.
  WYVERN_DEVICE int chunk(int turn) const { return Reverse ? chunks - 1 - turn : turn; }
  WYVERN_DEVICE int rows(int turn) const { return smaller(tokens - chunk(turn) * kRows, kRows); }
  WYVERN_DEVICE int64 first_row(int turn) const { return token + int64{chunk(turn)} * kRows; }
  /// Of the chunk and head in a tensor [NT, HV, ...].
  WYVERN_DEVICE int place(int turn) const {
    return static_cast<int>((slot + chunk(turn)) * heads + head);
  }
};
static_assert(sizeof(Block<true>) <= 4 * delta_scans::kBlockWords);

/// The block from its copy in shared memory, so that between uses it takes no registers.
template <class B>
WYVERN_DEVICE B recalled(const B& b) {
  B copy = *reinterpret_cast<const B*>(array_at<kLayout.block>(b.shared) + sm90::opaque(0));
  copy.shared = b.shared;
  return copy;
}

// ---- producer warp: tiles -----------------------------------------------------------------------

/// A chunk's k, and q in the reverse walk.
template <class B>
WYVERN_DEVICE void load_keys(const B& b, int turn, const Position& at, const TensorMap& q_map,
                             const TensorMap& k_map) {
  sm90::barrier_wait(b.template barrier<kLayout.free>(at.buffer), at.parity ^ 1U);
  const int token = static_cast<int>(b.first_row(turn));
  const int rows = b.rows(turn);
  sm90::load_rows<kRows>(
      rows, b.template barrier<kLayout.loaded>(at.buffer), b.template barrier<kLayout.landed>(0), 0,
      (B::kReverse ? 2 : 1) * kKeyBytes,
      [&](sm90::Barrier* barrier) {
        sm90::tensor_load(b.keys(at.buffer).data, k_map, {0, token, 0, b.key_head}, barrier);
        if constexpr (B::kReverse)
          sm90::tensor_load(b.queries(at.buffer).data, q_map, {0, token, 0, b.key_head}, barrier);
      },
      [&] {
        sm90::clear_rows(b.keys(at.buffer), rows);
        if constexpr (B::kReverse) sm90::clear_rows(b.queries(at.buffer), rows);
      });
}

/// A chunk's v, or do.
template <class B>
WYVERN_DEVICE void load_values(const B& b, int turn, const TensorMap& v_map) {
  const int stage = turn % kValueStages;
  sm90::barrier_wait(b.template barrier<kLayout.values_free>(stage),
                     parity_of<kValueStages>(turn) ^ 1U);
  if (!kWrites && b.without_values) {
    sm90::barrier_arrive(b.template barrier<kLayout.values_loaded>(stage));
    return;
  }
  const int rows = b.rows(turn);
  sm90::load_rows<kRows>(
      rows, b.template barrier<kLayout.values_loaded>(stage), b.template barrier<kLayout.landed>(0),
      1, kValueBytes,
      [&](sm90::Barrier* barrier) {
        sm90::tensor_load(b.values(turn).data, v_map,
                          {0, static_cast<int>(b.first_row(turn)), kPanels * b.tile, b.head},
                          barrier);
      },
      [&] {
#pragma unroll
        for (int i = 0; i < kPanels; ++i) sm90::clear_rows(b.values(turn, i), rows);
      });
}

// ---- factor warps -------------------------------------------------------------------------------

constexpr int kLaneRows = 2 / kScalers;

/// Whether this lane looks after row `i` of its own in the first or in the second half of a chunk.
WYVERN_DEVICE int half_of_row(int i) {
  return kScalers == 1 ? i : static_cast<int>(warp_index()) - kFirstScaler;
}

/// g and beta as given, of the rows that a lane looks after: g of both halves of a chunk, for their
/// sum, and beta of its own. Read a chunk ahead; what they mean is computed when they are there.
struct RawRows {
  G_DTYPE g[2];
  BETA_DTYPE beta[kLaneRows];
};

template <class B>
WYVERN_DEVICE RawRows read_rows(const B& b, int turn, const ScalarRows& from) {
  RawRows raw = {};
  const int rows = b.rows(turn);
  const G_DTYPE* const gates = from.g.row(b.first_row(turn)) + b.head;
  const BETA_DTYPE* const rates = from.beta.row(b.first_row(turn)) + b.head;
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

/// Makes the factors of a chunk's rows, and reads what those of the next are made of.
template <class B>
WYVERN_DEVICE void scale_rows(const B& b, int turn, const Position& at, RawRows& next, float scale,
                              const ScalarGate& gate, const ScalarRows& from) {
  const RawRows raw = next;
  if (turn + 1 < b.chunks) next = read_rows(b, turn + 1, from);
  const int rows = b.rows(turn);
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
  sm90::barrier_wait(b.template barrier<kLayout.free>(at.buffer), at.parity ^ 1U);
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
  sm90::barrier_arrive(b.template barrier<kLayout.scaled>(at.buffer));
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

/// Multiplies the scales of rows into their factors: a thread a row of keys or of queries. These
/// reads of tiles come before the next copy to them by the fence of hand_over(ready): consumers
/// wait for `ready` before they say that the stage is free.
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

/// Until the inverse of the last chunk whose slot `turn` takes has been read.
template <class B>
WYVERN_DEVICE void wait_taken(const B& b, int turn) {
  if (turn >= kSlots)
    sm90::barrier_wait(b.template barrier<kLayout.taken>(turn % kSlots),
                       parity_of<kSlots>(turn) ^ 1U);
}
/// The same for scores.
template <class B>
WYVERN_DEVICE void wait_scored(const B& b, int turn) {
  if (turn >= kScoreSlots)
    sm90::barrier_wait(b.template barrier<kLayout.scored>(turn % kScoreSlots),
                       parity_of<kScoreSlots>(turn) ^ 1U);
}

/// -A of a chunk on its way to the warps that invert it.
template <class B>
WYVERN_DEVICE Tile<fp16, kRows, kRows> lower_tile(const B& b, int turn) {
  return tile_at<kLayout.inversion.inverse>(b.shared + turn % kSlots * kLayout.inversion_bytes);
}

/// Starts one matrix of a chunk's rows by rows, with those of keys.
template <class B>
WYVERN_DEVICE void multiply_by_keys(const B& b, const KeyTile& rows, int stage, Square& x) {
  sm90::start_product<K>(x, sm90::rows_of(rows), sm90::rows_of(b.keys(stage)));
}

template <class B>
WYVERN_DEVICE void wait_for_tiles(const B& b, const Position& at) {
  // Copies need not land in order: that the stage's last chunk is gone tells its phase from this
  // one's.
  sm90::barrier_wait(b.template barrier<kLayout.free>(at.buffer), at.parity ^ 1U);
  sm90::barrier_wait(b.template barrier<kLayout.loaded>(at.buffer), at.parity);
}

/// Waits for the factors of a chunk, with the scales of norms in them.
template <class B>
WYVERN_DEVICE void wait_for_factors(const B& b, const Position& at, int name) {
  sm90::barrier_wait(b.template barrier<kLayout.scaled>(at.buffer), at.parity);
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

/// The prep warpgroup where others invert: -A, and P, of every chunk.
template <class B>
WYVERN_DEVICE void lower_chunks(const B& b) {
  const int warp = sm90::uniform(warp_index()) % 4;
  Position at;
#pragma unroll 1
  for (int turn = 0; turn < b.chunks; ++turn, at.advance()) {
    const int slot = turn % kSlots;
    wait_for_tiles(b, at);
    Square x;
    multiply_by_keys(b, b.keys(at.buffer), at.buffer, x);
    wait_for_factors(b, at, kConsumers + 1);
    float of_key[2], of_query[2] = {};
    read_factor(of_key, b.template factors<kLayout.row>(at.buffer));
    if constexpr (B::kReverse) read_factor(of_query, b.template factors<kLayout.query>(at.buffer));
    const Decays decays = decays_of(b, at.buffer, warp);
    sm90::end_products<0>(x);
    if (turn >= kSlots)
      sm90::barrier_wait(b.template barrier<kLayout.inverted>(slot), parity_of<kSlots>(turn) ^ 1U);
    sm90::store_negated(sm90::lower_rows<true>(x, decays, warp, of_key), lower_tile(b, turn), warp);
    sm90::barrier_arrive(b.template barrier<kLayout.lowered>(slot));
    if constexpr (B::kReverse) {
      multiply_by_keys(b, b.queries(at.buffer), at.buffer, x);
      wait_scored(b, turn);
      sm90::end_products<0>(x);
    }
    sm90::barrier_arrive(b.template barrier<kLayout.free>(at.buffer));
    if constexpr (B::kReverse)
      store_lower(sm90::lower_rows<false>(x, decays, warp, of_query), b.scores(turn), warp);
    sm90::hand_over(b.template barrier<kLayout.ready>(slot));
  }
}

/// Warps 1 to 3 of warpgroup 0 where a prep warpgroup hands A over: the last two begin an inverse,
/// and the first ends it.
template <class B>
WYVERN_DEVICE void invert_chunks(const B& b) {
  const int warp = sm90::uniform(warp_index());
#pragma unroll 1
  for (int turn = 0; turn < b.chunks; ++turn) {
    const int slot = turn % kSlots;
    const uint32 parity = parity_of<kSlots>(turn);
    const auto begin = [&] { wait_taken(b, turn); };
    if (warp > 1) {
      sm90::barrier_wait(b.template barrier<kLayout.lowered>(slot), parity);
      sm90::invert_32(lower_tile(b, turn), b.inverse(turn), sm90::opaque(32 * (warp - 2)), begin);
      sm90::barrier_arrive(b.template barrier<kLayout.joined>(slot));
    } else {
      sm90::barrier_wait(b.template barrier<kLayout.joined>(slot), parity);
      sm90::join_32(lower_tile(b, turn), b.inverse(turn), begin);
      sm90::barrier_arrive(b.template barrier<kLayout.inverted>(slot));
    }
    sm90::hand_over(b.template barrier<kLayout.ready>(slot));
  }
}

/// A prep warpgroup that inverts: every chunk whose turn it is, from chunk `helper` on.
template <class B>
WYVERN_DEVICE void prepare_chunks(const B& b, int helper) {
  const int warp = sm90::uniform(warp_index()) % 4;
  auto inverse = sm90::UnitLowerInverse::at<kLayout.inversion>(
      b.shared + helper * kLayout.inversion_bytes, kConsumers + 3 + 3 * helper);
  Position at;
  if (helper == 1) at.advance();
#pragma unroll 1
  for (int turn = helper; turn < b.chunks; turn += kHelpers) {
    const int slot = turn % kSlots;
    wait_for_tiles(b, at);
    Square x;
    multiply_by_keys(b, B::kReverse ? b.queries(at.buffer) : b.keys(at.buffer), at.buffer, x);
    wait_for_factors(b, at, kConsumers + 1 + helper);
    float of_key[2], of_query[2] = {};
    read_factor(of_key, b.template factors<kLayout.row>(at.buffer));
    if constexpr (B::kReverse) read_factor(of_query, b.template factors<kLayout.query>(at.buffer));
    const Decays decays = decays_of(b, at.buffer, warp);
    sm90::end_products<0>(x);
    wait_taken(b, turn);
    if constexpr (B::kReverse) {
      wait_scored(b, turn);
      store_lower(sm90::lower_rows<false>(x, decays, warp, of_query), b.scores(turn), warp);
      multiply_by_keys(b, b.keys(at.buffer), at.buffer, x);
      sm90::end_products<0>(x);
    }
    const sm90::LowerRows A = sm90::lower_rows<true>(x, decays, warp, of_key);
    sm90::barrier_arrive(b.template barrier<kLayout.free>(at.buffer));
    inverse.take(A.left, A.diagonal);
    inverse.invert(b.inverse(turn), warp);
    sm90::hand_over(b.template barrier<kLayout.ready>(slot));
    inverse.release();
#pragma unroll
    for (int i = 0; i < kHelpers; ++i) at.advance();
  }
}
