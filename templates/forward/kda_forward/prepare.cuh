// kda_forward's load warpgroups: warp 0, the producer, loads slices of 16 tokens, the others, prep
// warps, prepare them in turns: decayed rows, scores of queries and the inverse of I + A. Within a
// slice exp(-G) stays in range with any bounded gate. `Scheduler`, a global alias set before the
// include, says which work a block has.
#pragma once

#include "device/cuda/checkpoints.cuh"
#include "device/cuda/gate.cuh"
#include "device/cuda/mma.cuh"
#include "device/cuda/norm_rows.cuh"
#include "device/cuda/sm90/barrier.cuh"
#include "device/cuda/sm90/scheduler.cuh"
#include "device/cuda/sm90/slice.cuh"
#include "device/cuda/sm90/state.cuh"
#include "device/cuda/token_rows.cuh"
#include "forward/kda_forward/hopper_layout.hpp"

using kda_forward::kChunk;
using kda_forward::kColumns;
using kda_forward::kSlice;

/// Whether there is an output; where not, queries are not loaded.
constexpr bool kQueries = Scheduler::kOutput;
/// Whether states inside the sequence are written: at multiples of 16 tokens, where slices end.
constexpr bool kCheckpoints = Scheduler::kCheckpoints;
/// Whether the output is normalized and gated: of templates that cover output_norm.
constexpr bool kNormalizes = kHasNorm<Spec>;
constexpr kda_forward::HopperLayout<Spec> kLayout{Spec{}, kCheckpoints, kNormalizes};
constexpr int kStages = num_stages;
constexpr int kConsumers = BV / kColumns;  ///< warpgroups
constexpr int kLoadWarpgroups = kda_forward::load_warpgroups(BV, num_stages);
constexpr int kPrepWarps = 4 * kLoadWarpgroups - 1;
constexpr int kThreads = kda_forward::threads(BV, num_stages);

/// Whether prep warps recompute addresses from slice to slice. With 104 registers, over segments,
/// the compiler kept one too many.
constexpr bool kRecomputes = kConsumers > 1 && kQueries && !Scheduler::kOverlaps;

/// Whether exp(-G) may leave fp32's range inside a slice: 16 gates of -5 do not.
constexpr bool kMayBeSteep = !(GATE_IN_KERNEL && LOWER_BOUND);
constexpr float kLeastDecay = 0x1p-116f;

/// The type of products for any DTYPE: factors of decays have the range of fp32.
using Operand = bf16;
using RowTile = sm90::SwizzledTile<Operand, 2 * kSlice, K>;
using UpdateTile = sm90::SwizzledTile<Operand, kSlice, K>;
using ValueTile = sm90::SwizzledTile<DTYPE, kSlice, BV>;
using SquareTile = sm90::SwizzledTile<Operand, kSlice, kColumns>;

/// An element of a tile of raw rows.
WYVERN_DEVICE float raw(const Operand* element) { return to_float(DTYPE{element->bits}); }

using GateTile = sm90::GateTile<G_DTYPE, kSlice>;
using GateForm = sm90::GateForm<GATE_IN_KERNEL, HAS_A_LOG, LOWER_BOUND>;
using BetaRows = TokenRows<const BETA_DTYPE>;
using SliceRows = sm90::SliceRows<Operand>;
using sm90::kEightRows;
using sm90::kGroup;
using sm90::row_of;

/// A slice's tiles, loaded by TMA. A panel has 64 columns of a slice of k, or of q.
constexpr int kPanelBytes = kSlice * 128;
constexpr int kGateBytes = kSlice * K * static_cast<int>(sizeof(G_DTYPE));
constexpr int kSliceBytes = (kQueries ? 2 : 1) * K / 64 * kPanelBytes + kGateBytes;
static_assert(RowTile::kBytes + kGateBytes + ValueTile::kBytes + SquareTile::kBytes ==
              kLayout.tiles);

/// The pipeline stage of a slice, and its phase.
using Position = sm90::Pipeline<kStages>::Position;

/// A block's work, and where its tiles, factors and barriers are in shared memory.
struct Block : sm90::Work {
  WYVERN_DEVICE bool has_values() const { return kQueries || !zero_v; }
  WYVERN_DEVICE int slices() const { return ceil_div(tokens, kSlice); }
  WYVERN_DEVICE int rows_of(int slice) const { return smaller(tokens - slice * kSlice, kSlice); }

  /// Rows of k, from 0, and of q, from kSlice.
  WYVERN_DEVICE RowTile rows(int buffer) const {
    return {shared + kLayout.rows.offset + buffer * kLayout.tiles};
  }
  WYVERN_DEVICE GateTile gates(int buffer) const {
    return {shared + kLayout.gates.offset + buffer * kLayout.tiles};
  }
  /// k exp(G_C - G), over the gates.
  WYVERN_DEVICE UpdateTile updates(int buffer) const {
    return {shared + kLayout.gates.offset + buffer * kLayout.tiles};
  }
  WYVERN_DEVICE ValueTile values(int buffer) const {
    return {shared + kLayout.v.offset + buffer * kLayout.tiles};
  }
  WYVERN_DEVICE SquareTile square(int buffer) const {
    return {shared + kLayout.square.offset + buffer * kLayout.tiles};
  }
  /// 1 above the row of the checkpoint at the slice's end, or 0.
  WYVERN_DEVICE int32* checkpoint(int buffer) const {
    return reinterpret_cast<int32*>(array_at<kLayout.checkpoint>(shared)) + buffer;
  }
  template <ArrayPlace Place>
  WYVERN_DEVICE float* factors(int buffer) const {
    return array_at<Place>(shared) + buffer * kLayout.factors;
  }

  WYVERN_DEVICE sm90::Barrier* tiles_full(const Position& at) const {
    return sm90::barriers_at<kLayout.tiles_full>(shared) + at.buffer;
  }
  WYVERN_DEVICE sm90::Barrier* empty(int buffer) const {
    return sm90::barriers_at<kLayout.empty>(shared) + buffer;
  }
  WYVERN_DEVICE void wait_empty(const Position& at) const {
    sm90::barrier_wait(empty(at.buffer), at.parity ^ 1U);
  }
  WYVERN_DEVICE sm90::Barrier* slice_full(const Position& at) const {
    return sm90::barriers_at<kLayout.slice_full>(shared) + at.buffer;
  }
  WYVERN_DEVICE void wait_slice(const Position& at) const {
    sm90::barrier_wait(slice_full(at), at.parity);
  }
};

// ---- warp 0: tiles ------------------------------------------------------------------------------

/// Loads all slices, by one thread. `checkpoints` counts tokens from the block's first.
template <class Params, class Checkpoints>
WYVERN_DEVICE void load_slices(const Block& b, const Params& p, Checkpoints checkpoints) {
  const int slices = b.slices();
  Position at;
#pragma unroll 1
  for (int s = 0; s < slices; ++s, at.advance()) {
    b.wait_empty(at);
    sm90::Barrier* const full = b.tiles_full(at);
    const int token = static_cast<int>(b.token) + s * kSlice;
    if constexpr (Checkpoints::kAny) {
      const bool reached = checkpoints.reached(static_cast<uint32>(s) * kSlice, b.rows_of(s)) != 0;
      *b.checkpoint(at.buffer) = reached ? static_cast<int32>(checkpoints.row) + 1 : 0;
      if (reached) checkpoints.pass();
    }
    sm90::barrier_arrive_expect(full, kSliceBytes + (b.has_values() ? ValueTile::kBytes : 0));
#pragma unroll
    for (int panel = 0; panel < K / 64; ++panel) {
      unsigned char* const to = b.rows(at.buffer).data + panel * 2 * kPanelBytes;
      sm90::tensor_load(to, p.k_map, {0, token, panel, b.key_head}, full);
      if constexpr (kQueries)
        sm90::tensor_load(to + kPanelBytes, p.q_map, {0, token, panel, b.key_head}, full);
    }
    sm90::tensor_load(b.gates(at.buffer).data, p.g_map, {0, token, 0, b.head}, full);
    if (b.has_values())
      sm90::tensor_load(b.values(at.buffer).data, p.v_map, {0, token, b.tile * kConsumers, b.head},
                        full);
  }
}

// ---- prep warps ---------------------------------------------------------------------------------

/// A product of a slice's rows with its rows: element x[n].x[i] is row row_of(lane / 4) + i / 2 * 8
/// and column row_of(lane % 4 * 2 + i % 2) + n * 8.
struct Scores {
  cuda::Accumulator x[2];

  WYVERN_DEVICE static int row(int i) { return row_of(lane_index() / 4) + i / 2 * 8; }
  WYVERN_DEVICE static int col(int n, int i) {
    return row_of(lane_index() % 4 * 2 + i % 2) + n * 8;
  }

  /// Adds the sum over one group's channels: `right` in the layout of `left`.
  WYVERN_DEVICE void add(const uint32 (&left)[2][4], const uint32 (&right)[2][4]) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const uint32 a[4] = {left[0][2 * step], left[1][2 * step], left[0][2 * step + 1],
                           left[1][2 * step + 1]};
#pragma unroll
      for (int n = 0; n < 2; ++n)
        mma_m16n8k16<Operand>(x[n].x, a, right[n][2 * step], right[n][2 * step + 1]);
    }
  }
};

/// The same sums by exponentials of differences, none of them above 1, for decay so fast that
/// exp(-G) is out of range. `scratch` has room for a group's G. By one warp.
WYVERN_DEVICE void add_steep(Scores& keys, Scores& queries, const RowTile& rows,
                             const float (&G)[2][8], int group, float* scratch) {
  const int lane = lane_index();
  sync_warp();
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j)
      scratch[(row_of(lane / 4) + 8 * i) * kGroup + lane % 4 * 8 + j] = G[i][j];
  sync_warp();
#pragma unroll 1
  for (int channel = 0; channel < kGroup; ++channel) {
    const int column = group * kGroup + channel;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = Scores::row(i);
        const int s = Scores::col(n, i);
        const float difference = scratch[r * kGroup + channel] - scratch[s * kGroup + channel];
        const float x = s > r ? 0.0f : raw(rows.at(s, column)) * exp2_fast(difference);
        keys.x[n].x[i] = fused_multiply_add(raw(rows.at(r, column)), x, keys.x[n].x[i]);
        if constexpr (kQueries)
          queries.x[n].x[i] =
              fused_multiply_add(raw(rows.at(kSlice + r, column)), x, queries.x[n].x[i]);
      }
  }
  sync_warp();
}

/// A slice that a prep warp prepares.
struct Preparation {
  const Block& b;
  const int buffer, rows;
  Scores keys, queries;
  // Of this lane's channels and two rows: sums of q q and of q k. The second are the scores of
  // tokens with themselves, which products of decayed rows would only round.
  float query_squares[2] = {}, own[2] = {};

  /// Decays the rows of one group of channels and adds its products to the scores.
  WYVERN_DEVICE void add_group(int group, const GateForm& form) {
    const int lane = lane_index();
    const RowTile tile = b.rows(buffer);
    float G[2][8];
    sm90::sum_gates(G, b.gates(buffer), 0, group, rows, form, array_at<kLayout.bias>(b.shared));
    const int row = row_of(lane / 4);
    const int column = group * kGroup + lane % 4 * 8;
    Operand* const key_rows = tile.at(row, column);
    Operand* const query_rows = key_rows + kSlice / 8 * kEightRows;
    const SliceRows k(key_rows);
    const SliceRows q(kQueries ? query_rows : key_rows);
    float reached[8];  // decay up to one of the rows, the later one first: the slice's last is one
    float whole[8];    // the slice's decay
    float least = 1.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      reached[j] = exp2_fast(G[1][j]);
      whole[j] = shuffle(reached[j], 28 + lane % 4);
      least = -maximum(-least, -whole[j]);
    }
    if (lane >= 28) store_decay(group, whole);
    bool steep = false;
    if constexpr (kMayBeSteep) {
      least = -maximum(-least, -shuffle_xor(least, 1));
      least = -maximum(-least, -shuffle_xor(least, 2));
      steep = least < kLeastDecay;
      if (steep) {
        add_steep(keys, queries, tile, G, group, reinterpret_cast<float*>(b.square(buffer).data));
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) whole[j] = shuffle(G[1][j], 28 + lane % 4);
    }
    uint32 left[2][4];
    uint32 right[2][4];
    uint32 query[2][4];
    sync_warp();  // all lanes have read the group's gates
#pragma unroll
    for (int i = 1; i >= 0; --i) {
      uint32 update[4];
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        float back[2];
        float ahead[2];
#pragma unroll
        for (int d = 0; d < 2; ++d) {
          if (i == 0) reached[j + d] = exp2_fast(G[0][j + d]);
          back[d] = steep ? 0.0f : exp2_fast(-G[i][j + d]);
          ahead[d] = kMayBeSteep ? exp2_fast(whole[j + d] - G[i][j + d]) : whole[j + d] * back[d];
        }
        const float x[2] = {k.of(i, j), k.of(i, j + 1)};
        const float y[2] = {q.of(i, j), q.of(i, j + 1)};
        left[i][j / 2] = pack<Operand>(x[0] * reached[j], x[1] * reached[j + 1]);
        right[i][j / 2] = pack<Operand>(x[0] * back[0], x[1] * back[1]);
        query[i][j / 2] = pack<Operand>(y[0] * reached[j], y[1] * reached[j + 1]);
        update[j / 2] = pack<Operand>(x[0] * ahead[0], x[1] * ahead[1]);
        own[i] = fused_multiply_add(x[0], y[0], fused_multiply_add(x[1], y[1], own[i]));
        if constexpr (QK_L2NORM)
          query_squares[i] =
              fused_multiply_add(y[0], y[0], fused_multiply_add(y[1], y[1], query_squares[i]));
      }
      SliceRows::store(key_rows, i, left[i]);
      if constexpr (kQueries) SliceRows::store(query_rows, i, query[i]);
      SliceRows::store(b.updates(buffer).at(row, column), i, update);
    }
    keys.add(left, right);
    if constexpr (kQueries) queries.add(query, right);
  }

  /// Stores a group's decays over the slice, by the lanes that have its last row.
  WYVERN_DEVICE void store_decay(int group, const float (&whole)[8]) const {
    const int i = group * (kGroup / 8) + lane_index() % 4;
    float* const decay = b.factors<kLayout.decay>(buffer) + 2 * i;
#pragma unroll
    for (int c = 0; c < 4; ++c)
      *reinterpret_cast<Float2*>(decay +
                                 c * sm90::channel_stride(K)) = {{whole[2 * c], whole[2 * c + 1]}};
  }

  /// Stores the factors of rows. Squares of k are on the diagonal of its scores.
  WYVERN_DEVICE void scale_rows(float scale) {
    const int lane = kRecomputes ? sm90::opaque(lane_index()) : lane_index();
    float* const key = b.factors<kLayout.key>(buffer);
    float* const query = b.factors<kLayout.query>(buffer);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = row_of(lane / 4) + 8 * i;
      float of_key = 1.0f;
      float of_query = scale;
      own[i] += shuffle_xor(own[i], 1);
      own[i] += shuffle_xor(own[i], 2);
      if constexpr (QK_L2NORM) {
        const float* const square = keys.x[i].x + 2 * i;
        of_key = reciprocal_sqrt((lane / 4 % 2 == 0 ? square[0] : square[1]) + 1e-6f);
        query_squares[i] += shuffle_xor(query_squares[i], 1);
        query_squares[i] += shuffle_xor(query_squares[i], 2);
        of_query *= reciprocal_sqrt(query_squares[i] + 1e-6f);
      }
      if (lane % 4 == lane / 8) {
        key[row] = of_key;
        if constexpr (kQueries) query[row] = of_query;
      }
    }
    sync_warp();
    if (lane < kSlice)
      b.factors<kLayout.erase>(buffer)[lane] = -b.factors<kLayout.beta>(buffer)[lane] * key[lane];
  }

  /// Computes (I + A)^-1 - I by substitution, a lane a column; stores it and the scores of queries.
  WYVERN_DEVICE void invert_and_store() {
    const int lane = kRecomputes ? sm90::opaque(lane_index()) : lane_index();
    const SquareTile square = b.square(buffer);
    auto* const scratch = reinterpret_cast<float*>(square.data);
    sync_warp();
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        scratch[Scores::row(i) * kSlice + Scores::col(n, i)] = keys.x[n].x[i];
    sync_warp();
    const float* const erase = b.factors<kLayout.erase>(buffer);
    const float* const key = b.factors<kLayout.key>(buffer);
    const int column = lane % kSlice;
    float inverse[kSlice];
    float scaled[kSlice];  // by the factors of keys
#pragma unroll
    for (int r = 0; r < kSlice; ++r) {
      float sum = 0.0f;
#pragma unroll
      for (int s = 0; s < r; s += 4) {
        const auto row = load<4>(scratch + r * kSlice + s);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (s + i < r) sum = fused_multiply_add(row.at[i], scaled[s + i], sum);
      }
      const float x = erase[r] * sum;
      inverse[r] = x;
      scaled[r] = (r == column ? 1.0f : x) * key[r];
    }
    sync_warp();
    if (lane < kSlice) {
#pragma unroll
      for (int r = 0; r < kSlice; ++r)
        *square.at(r, lane) = from_float<Operand>(r == lane ? 0.0f : inverse[r]);
    }
    if constexpr (!kQueries) return;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = Scores::row(i);
        const int s = Scores::col(n, i);
        const float score = s == r ? own[i / 2] : queries.x[n].x[i];
        *square.at(r, kSlice + s) = from_float<Operand>(s > r ? 0.0f : score);
      }
  }
};

/// Every kPrepWarps-th slice from `first` on, by one warp.
WYVERN_DEVICE void prepare_slices(const Block& b, int first, float scale, const GateForm& form,
                                  const BetaRows& beta) {
  const int slices = b.slices();
  Position at;
#pragma unroll 1
  for (int i = 0; i < first; ++i) at.advance();
#pragma unroll 1
  for (int s = first; s < slices; s += kPrepWarps) {
    const int rows = b.rows_of(s);
    float rate = 0.0f;
    if (lane_index() < rows)
      rate = activate_beta<BETA_SIGMOID, NEG_EIGVAL>(
          beta.row(b.token + s * kSlice + lane_index())[b.head]);
    // Loads may complete out of order: the wait for `empty` tells this phase of `full` from the one
    // before.
    b.wait_empty(at);
    sm90::barrier_wait(b.tiles_full(at), at.parity);
    if (rows < kSlice) {
      // The next rows belong to the next sequence.
      sm90::clear_rows(b.rows(at.buffer), rows, kSlice);
      if constexpr (kQueries) sm90::clear_rows(b.rows(at.buffer), kSlice + rows, 2 * kSlice);
      sm90::clear_rows(b.values(at.buffer), rows, kSlice);
      sync_warp();
    }
    if (lane_index() < kSlice) b.factors<kLayout.beta>(at.buffer)[lane_index()] = rate;
    Preparation slice{b, at.buffer, rows, {}, {}};
#pragma unroll 1
    for (int group = 0; group < K / kGroup; ++group) slice.add_group(group, form);
    slice.scale_rows(scale);
    slice.invert_and_store();
    sm90::hand_over(b.slice_full(at));
#pragma unroll
    for (int i = 0; i < kPrepWarps; ++i) at.advance();
  }
}
