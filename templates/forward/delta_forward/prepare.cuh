// What the blocks of delta_forward.hopper do before the state: tiles and factors of rows
// (warpgroup 0), scores of queries and inverses of I + A (the helpers). Who includes it says in
// kQueries whether queries are asked too; where not, no tile of them is brought; and in
// kCheckpoints whether states inside the sequence are kept, in kDivided whether inside chunks too.
#pragma once

#include "device/cuda/checkpoints.cuh"
#include "device/cuda/gate.cuh"
#include "device/cuda/share.cuh"
#include "device/cuda/sm90/barrier.cuh"
#include "device/cuda/sm90/decay.cuh"
#include "device/cuda/token_rows.cuh"
#include "forward/delta_forward/hopper_layout.hpp"

using delta_forward::kColumns;
using delta_forward::kRows;

constexpr delta_forward::HopperLayout<Spec> kLayout{Spec{}, kCheckpoints};
constexpr int kStages = num_stages;
constexpr int kWalkers = kLayout.walkers;
constexpr int kHelpers = kLayout.helpers;
constexpr bool kPipelined = kLayout.pipelined;
constexpr int kSlots = kLayout.slots;
constexpr int kScoreSlots = kLayout.score_slots;
constexpr int kThreads = 128 * (1 + kHelpers + kWalkers);
/// Warps of warpgroup 0 that make factors of rows: the last two, or that which brings tiles.
constexpr int kScalers = kPipelined ? 1 : 2;
constexpr int kFirstScaler = kPipelined ? 0 : 2;
constexpr int kPanels = BV / kColumns;
/// Of a tile of keys, or of queries, and of values.
constexpr int kKeyBytes = kRows * K * static_cast<int>(sizeof(DTYPE));
constexpr int kValueBytes = kRows * BV * static_cast<int>(sizeof(DTYPE));

using KeyTile = sm90::SwizzledTile<DTYPE, kRows, K>;
using SquareTile = sm90::SwizzledTile<DTYPE, kRows, kRows>;

/// A chunk's buffer and its parity, as the walk goes on.
using Position = sm90::Pipeline<kStages>::Position;

/// What all warps of a block know.
struct Block : SharedWalk {
  unsigned char* shared;
  int sequence, head, key_head, tile;
  bool halves;          ///< one warpgroup has a state, another block that of the other 64 columns
  bool without_values;  ///< v is 0

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
static_assert(sizeof(Block) <= 4 * delta_forward::kBlockWords);

/// The block from its copy in shared memory, so that between uses it takes no registers.
WYVERN_DEVICE Block recalled(const Block& b) {
  const auto* const at =
      reinterpret_cast<const Block*>(array_at<kLayout.block>(b.shared) + sm90::opaque(0));
  Block copy = *at;
  copy.shared = b.shared;
  return copy;
}

// ---- warp 0 of warpgroup 0: tiles ---------------------------------------------------------------

/// A chunk's tiles, once nobody needs what lies there.
WYVERN_DEVICE void bring_tiles(const Block& b, int chunk, const Position& at,
                               const TensorMap& q_map, const TensorMap& k_map,
                               const TensorMap& v_map) {
  sm90::barrier_wait(b.barrier<kLayout.free>(at.buffer), at.parity ^ 1U);
  const int token = static_cast<int>(b.token) + chunk * kRows;
  const int rows = b.rows(chunk);
  sm90::Barrier* const loaded = b.barrier<kLayout.loaded>(at.buffer);
  sm90::Barrier* const barrier = rows < kRows ? b.barrier<kLayout.landed>(0) : loaded;
  if (lane_index() > 0 && rows == kRows) sm90::barrier_arrive(loaded);
  if (lane_index() == 0) {
    const bool values = kQueries || !b.without_values;
    sm90::barrier_arrive_expect(barrier,
                                (kQueries ? 2 : 1) * kKeyBytes + (values ? kValueBytes : 0));
    sm90::tensor_load(b.keys(at.buffer).data, k_map, {0, token, 0, b.key_head}, barrier);
    if constexpr (kQueries)
      sm90::tensor_load(b.queries(at.buffer).data, q_map, {0, token, 0, b.key_head}, barrier);
    if (values)
      sm90::tensor_load(b.values(at.buffer).data, v_map, {0, token, kPanels * b.tile, b.head},
                        barrier);
  }
  if (rows == kRows) return;
  // What follows in the tensor is the next sequence's: whatever it holds must not come in.
  sm90::barrier_wait(barrier, 0);
  sm90::clear_rows(b.keys(at.buffer), rows);
  if constexpr (kQueries) sm90::clear_rows(b.queries(at.buffer), rows);
#pragma unroll
  for (int i = 0; i < kPanels; ++i) sm90::clear_rows(b.values(at.buffer, i), rows);
  sm90::hand_over(loaded);
}

// ---- where a block's walk begins ----------------------------------------------------------------

/// The log decay of a row.
struct GateForm {
  float floor, bias, A_log;

  WYVERN_DEVICE float operator()(G_DTYPE raw) const {
    const float x = to_float(raw);
    return maximum(GATE_IN_KERNEL ? log_decay(x + bias, A_log) : x, floor);
  }
};

/// stretch() of token `t` of a head; k is of its key head.
WYVERN_DEVICE float stretch_of(int64 t, int head, const GateForm& form,
                               const TokenRows<const G_DTYPE>& g,
                               const TokenRows<const BETA_DTYPE>& beta,
                               const TokenRows<const DTYPE>& k) {
  const float rate = activate_beta<BETA_SIGMOID, NEG_EIGVAL>(beta.row(t)[head]);
  // A normalized row is no longer, and the bound grows with it.
  const float square = QK_L2NORM ? 1.0f : squared_length<K>(k.row(t));
  return stretch(form(g.row(t)[head]), rate, square);
}

// ---- factors of rows ----------------------------------------------------------------------------

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

WYVERN_DEVICE RawRows read_rows(const Block& b, int chunk, const TokenRows<const G_DTYPE>& g,
                                const TokenRows<const BETA_DTYPE>& beta) {
  RawRows raw = {};
  const int rows = b.rows(chunk);
  const G_DTYPE* const gates = g.row(b.token + chunk * kRows) + b.head;
  const BETA_DTYPE* const rates = beta.row(b.token + chunk * kRows) + b.head;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 32 * i + lane_index();
    if (SCALAR_GATE && row < rows) raw.g[i] = gates[row * g.stride];
  }
#pragma unroll
  for (int i = 0; i < kLaneRows; ++i) {
    const int row = 32 * half_of_row(i) + lane_index();
    if (row < rows) raw.beta[i] = rates[row * beta.stride];
  }
  return raw;
}

/// Whether a state decays only now and then. Till then the factors of what is read of it and added
/// to it make up for the decay that it owes, for which fp16 has not the range.
constexpr bool kLazyDecay = SCALAR_GATE && kScalers == 1 && sm90::kIsBf16<DTYPE>;
/// log2 of the decay that a state may owe after a chunk, and so of the largest factor: values of up
/// to 2^100 still fit beside it.
constexpr float kMostOwed = 24.0f;

/// Where the consumers find a chunk's checkpoint.
WYVERN_DEVICE int32* checkpoint_of(const Block& b, int buffer) {
  return reinterpret_cast<int32*>(array_at<kLayout.checkpoint>(b.shared)) + 2 * buffer;
}

/// The row of the checkpoint at a chunk's end; negative where there is none.
WYVERN_DEVICE int row_of_end(const Block& b, int buffer) {
  const int32* const checkpoint = checkpoint_of(b, buffer);
  return checkpoint[0] == kRows ? checkpoint[1] : -1;
}

/// Makes the factors of a chunk's rows, and reads what those of the next are made of. `owed` is
/// log2 of the decay that the state before the chunk owes, and then of what it owes after it. Where
/// a checkpoint divides the chunk, the state decays and takes up rows in front of it up to there
/// alone. `kept` counts tokens of the walk.
template <class Kept>
WYVERN_DEVICE void scale_rows(const Block& b, int chunk, const Position& at, RawRows& next,
                              float& owed, float scale, const GateForm& form,
                              const TokenRows<const G_DTYPE>& g,
                              const TokenRows<const BETA_DTYPE>& beta, Kept& kept) {
  const RawRows raw = next;
  if (chunk + 1 < b.chunks) next = read_rows(b, chunk + 1, g, beta);
  const int rows = b.rows(chunk);
  float low = 0.0f;
  float high = 0.0f;
  if constexpr (SCALAR_GATE) {
    low = sm90::running_sum(lane_index() < rows ? form(raw.g[0]) : 0.0f);
    high = sm90::running_sum(32 + lane_index() < rows ? form(raw.g[1]) : 0.0f);
  }
  const float low_sum = shuffle(low, 31);
  const float last = (low_sum + shuffle(high, 31)) * kLog2E;
  const float before = owed;
  owed += last;
  int front = 0;
  if constexpr (Kept::kAny) front = kept.reached(static_cast<uint32>(chunk) * kRows, rows);
  // Nothing is owed after the last chunk or a checkpoint, nor where gates above 0 let the state
  // grow, nor after NaN.
  const bool owes =
      kLazyDecay && owed >= -kMostOwed && owed <= 0.0f && chunk + 1 < b.chunks && front == 0;
  float decay = owes ? 1.0f : exp2_fast(owed);
  if (!owes) owed = 0.0f;
  const float reached_by[3] = {shuffle(low, 15) * kLog2E, low_sum * kLog2E,
                               (low_sum + shuffle(high, 15)) * kLog2E};
  int divided = 0;  // rows in front of a checkpoint inside the chunk
  float at_front = last;
  if constexpr (Kept::kInside) {
    if (front < rows) divided = front;
    if (divided != 0) {
      at_front = reached_by[divided / 16 - 1];
      decay = exp2_fast(before + at_front);
    }
  }
  sm90::barrier_wait(b.barrier<kLayout.free>(at.buffer), at.parity ^ 1U);
  if constexpr (Kept::kAny) {
    if (half_of_row(0) == 0 && lane_index() == 0) {
      checkpoint_of(b, at.buffer)[0] = front == rows ? kRows : front;
      checkpoint_of(b, at.buffer)[1] = static_cast<int32>(kept.row);
    }
    if (front != 0) kept.pass();
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
    b.factors<kLayout.beta>(at.buffer)[row] = rate;
    b.factors<kLayout.erase>(at.buffer)[row] = -rate * reached;
    const float end = row < divided ? at_front : last;
    b.factors<kLayout.update_factor>(at.buffer)[row] = exp2_fast((owes ? -before : end) - G);
#pragma unroll
    for (int i = 0; i < 3; ++i)
      if (row < 16 * (i + 1))
        b.factors<kLayout.left>(at.buffer)[8 * i * (i + 1) + row] = exp2_fast(reached_by[i] - G);
    if (row == 0) array_at<kLayout.decay>(b.shared)[at.buffer] = decay;
  }
  sm90::barrier_arrive(b.barrier<kLayout.scaled>(at.buffer));
}

// ---- helpers: scores and inverses ---------------------------------------------------------------

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

/// A row of keys near 0 counts times up to 1000, for which fp16 may not have the range: V' enters
/// the state times the key's scale.
constexpr bool kMayOverflow = QK_L2NORM && !sm90::kIsBf16<DTYPE>;
/// Where a factor is above the first, V' and the state are taken times the second until V' has
/// entered it, so that V' of up to 2^13 fit in any case, and other rows' factors keep their digits.
constexpr float kMostFactor = 8.0f;
constexpr float kRoom = 0x1p-8f;

/// 1 or kRoom, for all rows of a chunk that is prepared.
WYVERN_DEVICE float room_of(const Block& b, int buffer) {
  if constexpr (!kMayOverflow) return 1.0f;
  const auto largest = load<2>(array_at<kLayout.largest>(b.shared) + 2 * buffer);
  return maximum(largest.at[0], largest.at[1]) > kMostFactor ? kRoom : 1.0f;
}

/// Multiplies the scales of rows into their factors: a thread a row of keys or of queries. These
/// reads of tiles come before the next copy to them by the fence of hand_over(ready): walkers wait
/// for `ready` before they say that the buffer is free.
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
      if (row < 16 * (i + 1)) b.factors<kLayout.left>(buffer)[8 * i * (i + 1) + row] *= scale;
    if constexpr (kMayOverflow) {
      float largest = b.factors<kLayout.update_factor>(buffer)[row];
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2)
        largest = maximum(largest, shuffle_xor(largest, mask));
      if (lane_index() == 0)
        array_at<kLayout.largest>(b.shared)[2 * buffer + thread / 32] = largest;
    }
  } else if constexpr (kQueries) {
    const float scale = sm90::norm_scale<kPipelined ? 2 : 8>(b.queries(buffer), row);
    b.factors<kLayout.query>(buffer)[row] *= scale;
    b.factors<kLayout.output_factor>(buffer)[row] *= scale;
  }
}

/// One buffer of scores only: they are stored when the chunk before is done with its own, after the
/// inverse, which has two.
constexpr bool kScoresLast = kScoreSlots < kSlots;

/// Until the last chunk whose scores lay where those of `chunk` go is done with them.
WYVERN_DEVICE void wait_taken(const Block& b, int chunk) {
  if (chunk >= kScoreSlots)
    sm90::barrier_wait(b.barrier<kLayout.taken>(chunk % kScoreSlots),
                       (chunk / kScoreSlots + 1) % 2);
}

/// -A of a chunk on its way to the warps that invert it.
WYVERN_DEVICE Tile<fp16, kRows, kRows> lower_tile(const Block& b, int chunk) {
  return tile_at<kLayout.inversion.inverse>(b.shared + chunk % kSlots * kLayout.inversion_bytes);
}

/// Of one matrix of a chunk's rows by rows, with those of keys.
WYVERN_DEVICE void multiply_by_keys(const Block& b, const KeyTile& rows, int buffer, Square& x) {
  sm90::start_product<K>(x, sm90::rows_of(rows), sm90::rows_of(b.keys(buffer)));
}

WYVERN_DEVICE void wait_for_tiles(const Block& b, const Position& at) {
  // Copies need not land in order: that the buffer's last chunk is gone tells its phase from this
  // one's.
  sm90::barrier_wait(b.barrier<kLayout.free>(at.buffer), at.parity ^ 1U);
  sm90::barrier_wait(b.barrier<kLayout.loaded>(at.buffer), at.parity);
}

/// The helper where others invert: -A and the scores of every chunk.
WYVERN_DEVICE void lower_chunks(const Block& b) {
  const int warp = sm90::uniform(warp_index()) % 4;
  Position at;
#pragma unroll 1
  for (int c = 0; c < b.chunks; ++c, at.advance()) {
    const int slot = c % kSlots;
    wait_for_tiles(b, at);
    Square x;
    multiply_by_keys(b, b.keys(at.buffer), at.buffer, x);
    sm90::barrier_wait(b.barrier<kLayout.scaled>(at.buffer), at.parity);
    if constexpr (QK_L2NORM) {
      normalize(b, at.buffer);
      sm90::sync_named(kWalkers + 1, 128);
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
    if (c >= kSlots) sm90::barrier_wait(b.barrier<kLayout.inverted>(slot), (c / kSlots + 1) % 2);
    sm90::store_negated(sm90::lower_rows<true>(x, decays, warp, of_key), lower_tile(b, c), warp);
    sm90::barrier_arrive(b.barrier<kLayout.lowered>(slot));
    if constexpr (kQueries) {
      multiply_by_keys(b, b.queries(at.buffer), at.buffer, x);
      wait_taken(b, c);
      sm90::end_products<0>(x);
    }
    sm90::barrier_arrive(b.barrier<kLayout.free>(at.buffer));
    if constexpr (kQueries)
      store_lower(sm90::lower_rows<false>(x, decays, warp, of_query), b.scores(slot), warp);
    sm90::hand_over(b.barrier<kLayout.ready>(slot));
  }
}

/// Warps 1 to 3 of warpgroup 0 where a helper hands A over: the last two begin an inverse, and the
/// first ends it.
WYVERN_DEVICE void invert_chunks(const Block& b) {
  const int warp = sm90::uniform(warp_index());
#pragma unroll 1
  for (int c = 0; c < b.chunks; ++c) {
    const int slot = c % kSlots;
    const uint32 parity = static_cast<uint32>(c / kSlots % 2);
    const auto begin = [&] { wait_taken(b, c); };
    if (warp > 1) {
      sm90::barrier_wait(b.barrier<kLayout.lowered>(slot), parity);
      sm90::invert_32(lower_tile(b, c), b.inverse(slot), sm90::opaque(32 * (warp - 2)), begin);
      sm90::barrier_arrive(b.barrier<kLayout.joined>(slot));
    } else {
      sm90::barrier_wait(b.barrier<kLayout.joined>(slot), parity);
      sm90::join_32(lower_tile(b, c), b.inverse(slot), begin);
      sm90::barrier_arrive(b.barrier<kLayout.inverted>(slot));
    }
    sm90::hand_over(b.barrier<kLayout.ready>(slot));
  }
}

/// A helper that inverts: every chunk whose turn it is, from chunk `helper` on.
WYVERN_DEVICE void prepare_chunks(const Block& b, int helper) {
  const int warp = sm90::uniform(warp_index()) % 4;
  auto inverse = sm90::UnitLowerInverse::at<kLayout.inversion>(
      b.shared + helper * kLayout.inversion_bytes, kWalkers + 3 + 3 * helper);
  Position at;
  if (helper == 1) at.advance();
#pragma unroll 1
  for (int c = helper; c < b.chunks; c += kHelpers) {
    wait_for_tiles(b, at);
    Square of_queries, of_keys;
    if constexpr (kQueries) multiply_by_keys(b, b.queries(at.buffer), at.buffer, of_queries);
    if constexpr (kScoresLast || !kQueries)
      multiply_by_keys(b, b.keys(at.buffer), at.buffer, of_keys);
    sm90::barrier_wait(b.barrier<kLayout.scaled>(at.buffer), at.parity);
    if constexpr (QK_L2NORM) {
      normalize(b, at.buffer);
      sm90::sync_named(kWalkers + 1 + helper, 128);
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
        wait_taken(b, c);
        store_lower(sm90::lower_rows<false>(of_queries, decays, warp, of_query),
                    b.scores(c % kScoreSlots), warp);
        multiply_by_keys(b, b.keys(at.buffer), at.buffer, of_keys);
        sm90::end_products<0>(of_keys);
      }
    } else {
      sm90::end_products<0>(of_keys);
      if constexpr (!kScoresLast) wait_taken(b, c);
    }
    const sm90::LowerRows A = sm90::lower_rows<true>(of_keys, decays, warp, of_key);
    sm90::barrier_arrive(b.barrier<kLayout.free>(at.buffer));
    inverse.take(A.left, A.diagonal);
    inverse.invert(b.inverse(c % kSlots), warp);
    if constexpr (kScoresLast) {
      wait_taken(b, c);
      if constexpr (kQueries) store_lower(scores, b.scores(c % kScoreSlots), warp);
    }
    sm90::hand_over(b.barrier<kLayout.ready>(c % kSlots));
    inverse.release();
#pragma unroll
    for (int i = 0; i < kHelpers; ++i) at.advance();
  }
}
