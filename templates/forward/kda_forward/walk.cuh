// How a block of hopper.cu, segment.cu or resume.cu walks through tokens with a state of Kimi Delta
// Attention, one block BV columns of V of one value head. The state stays in registers: of q, k, v,
// beta and g nothing but they themselves is read. What includes this says whether queries are asked
// too (kQueries), or the state alone is wanted, and whether states inside the sequence are kept
// (kCheckpoints): at multiples of 16 tokens, where slices end.
//
// The walk goes by slices of 16 tokens, within which no gate that is bounded takes exp(-G) out of
// range. Warp 0 brings tiles. Those after it, kHelpers, prepare slices in turns, from rows in
// fragments of mma: decayed rows, the scores of queries, and the inverse of I + A. The warpgroups
// after them have the state, as S^T, 64 columns of V each.
#pragma once

#include "device/cuda/checkpoints.cuh"
#include "device/cuda/gate.cuh"
#include "device/cuda/mma.cuh"
#include "device/cuda/sm90/barrier.cuh"
#include "device/cuda/sm90/slice.cuh"
#include "device/cuda/sm90/state.cuh"
#include "device/cuda/split.cuh"
#include "device/cuda/token_rows.cuh"
#include "forward/kda_forward/hopper_layout.hpp"

using kda_forward::kChunk;
using kda_forward::kColumns;
using kda_forward::kRows;

constexpr int kStates = BV / kColumns;  ///< warpgroups with states
constexpr int kFrontWarps = kda_forward::front_warps(BV, num_stages);
constexpr int kHelpers = kFrontWarps - 1;  ///< that prepare slices
constexpr int kThreads = 32 * kFrontWarps + 128 * kStates;
constexpr int kStages = num_stages;
constexpr int kTilesV = V / BV;
constexpr kda_forward::HopperLayout<Spec> kLayout{Spec{}, kCheckpoints};
constexpr int kPanelBytes = kRows * 128;
constexpr int kValueBytes = kRows * BV * static_cast<int>(sizeof(DTYPE));
constexpr int kSliceBytes = kRows * (kQueries ? 2 : 1) * K * static_cast<int>(sizeof(DTYPE)) +
                            kRows * K * static_cast<int>(sizeof(G_DTYPE)) + kValueBytes;

/// Whether exp(-G) may leave fp32's range inside a slice: 16 gates of -5 do not.
constexpr bool kMayBeSteep = !(GATE_IN_KERNEL && LOWER_BOUND);
constexpr float kLeastDecay = 0x1p-116f;

/// Registers of a thread: of those that bring and prepare, and of those with states.
constexpr bool kManyHelpers = kFrontWarps > 8;
constexpr int kHelperRegisters = kManyHelpers ? 112 : kStates == 1 ? 136 : K == 64 ? 120 : 104;
constexpr int kStateRegisters = kManyHelpers ? 176 : kStates == 1 ? 232 : K == 64 ? 136 : 152;

/// Type of what is multiplied, whatever DTYPE is: factors of decays have the range of fp32.
using Operand = bf16;
using RowTile = sm90::SwizzledTile<Operand, 2 * kRows, K>;
using UpdateTile = sm90::SwizzledTile<Operand, kRows, K>;
using ValueTile = sm90::SwizzledTile<DTYPE, kRows, BV>;
using SquareTile = sm90::SwizzledTile<Operand, kRows, kColumns>;

/// An element of a tile that has rows as they were given.
WYVERN_DEVICE float raw(const Operand* element) { return to_float(DTYPE{element->bits}); }

using GateTile = sm90::GateTile<G_DTYPE, kRows>;
using GateForm = sm90::GateForm<GATE_IN_KERNEL, HAS_A_LOG, LOWER_BOUND>;
using SliceRows = sm90::SliceRows<Operand>;
using sm90::kEightRows;
using sm90::kGroup;
using sm90::row_of;

/// A slice's buffers and their parity, as the walk goes on.
using Position = sm90::Pipeline<kStages>::Position;

/// What all warps of a block know.
struct Block : SequenceSplit {
  unsigned char* shared;
  int sequence, head, key_head, tile;
  bool without_values = false;  ///< v counts as 0; only where no queries are asked

  WYVERN_DEVICE bool has_values() const { return kQueries || !without_values; }

  WYVERN_DEVICE int slices() const { return ceil_div(tokens, kRows); }
  WYVERN_DEVICE int rows_of(int slice) const { return smaller(tokens - slice * kRows, kRows); }

  /// Rows of k, from 0, and of q, from kRows.
  WYVERN_DEVICE RowTile rows(int buffer) const {
    return {shared + kLayout.rows.offset + buffer * kLayout.slots};
  }
  WYVERN_DEVICE GateTile gates(int buffer) const {
    return {shared + kLayout.gates.offset + buffer * kLayout.slots};
  }
  /// k exp(G_C - G), where the gates were.
  WYVERN_DEVICE UpdateTile updates(int buffer) const {
    return {shared + kLayout.gates.offset + buffer * kLayout.slots};
  }
  WYVERN_DEVICE ValueTile values(int buffer) const {
    return {shared + kLayout.v.offset + buffer * kLayout.slots};
  }
  WYVERN_DEVICE SquareTile square(int buffer) const {
    return {shared + kLayout.square.offset + buffer * kLayout.slots};
  }
  /// 1 above the row of the checkpoint at the slice's end, or 0.
  WYVERN_DEVICE int32* checkpoint(int buffer) const {
    return reinterpret_cast<int32*>(array_at<kLayout.checkpoint>(shared)) + buffer;
  }
  template <ArrayPlace Place>
  WYVERN_DEVICE float* factors(int buffer) const {
    return array_at<Place>(shared) + buffer * kLayout.factors;
  }
  template <sm90::BarrierPlace Place>
  WYVERN_DEVICE sm90::Barrier* barrier(int i) const {
    return sm90::barriers_at<Place>(shared) + i;
  }
};

// ---- warp 0: tiles ------------------------------------------------------------------------------

/// By one thread. `kept` counts tokens of the walk.
template <class Kept>
WYVERN_DEVICE void bring_slices(const Block& b, const TensorMap& q_map, const TensorMap& k_map,
                                const TensorMap& v_map, const TensorMap& g_map, Kept kept) {
  const int slices = b.slices();
  Position at;
#pragma unroll 1
  for (int s = 0; s < slices; ++s, at.advance()) {
    sm90::barrier_wait(b.barrier<kLayout.free>(at.buffer), at.parity ^ 1U);
    sm90::Barrier* const loaded = b.barrier<kLayout.loaded>(at.buffer);
    const int token = static_cast<int>(b.token) + s * kRows;
    if constexpr (Kept::kAny) {
      const bool reached = kept.reached(static_cast<uint32>(s) * kRows, b.rows_of(s)) != 0;
      *b.checkpoint(at.buffer) = reached ? static_cast<int32>(kept.row) + 1 : 0;
      if (reached) kept.pass();
    }
    sm90::barrier_arrive_expect(loaded, b.has_values() ? kSliceBytes : kSliceBytes - kValueBytes);
#pragma unroll
    for (int panel = 0; panel < K / 64; ++panel) {
      unsigned char* const to = b.rows(at.buffer).data + panel * 2 * kPanelBytes;
      sm90::tensor_load(to, k_map, {0, token, panel, b.key_head}, loaded);
      if constexpr (kQueries)
        sm90::tensor_load(to + kPanelBytes, q_map, {0, token, panel, b.key_head}, loaded);
    }
    sm90::tensor_load(b.gates(at.buffer).data, g_map, {0, token, 0, b.head}, loaded);
    if (b.has_values())
      sm90::tensor_load(b.values(at.buffer).data, v_map, {0, token, b.tile * kStates, b.head},
                        loaded);
  }
}

// ---- warps after it: slices ---------------------------------------------------------------------

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

/// The same sums by exponentials of differences, none of them above 1, for gates so strong that
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
              fused_multiply_add(raw(rows.at(kRows + r, column)), x, queries.x[n].x[i]);
      }
  }
  sync_warp();
}

/// What a helper's warp makes of one slice.
struct Preparation {
  const Block& b;
  const int buffer, rows;
  Scores keys, queries;
  // Of this lane's channels and two rows: sums of q q and of q k. The second are the scores of
  // tokens with themselves, where decayed rows would only bring their roundings in.
  float query_squares[2] = {}, own[2] = {};

  /// One group of channels: decayed rows, and what they add to the scores.
  WYVERN_DEVICE void take(int group, const GateForm& form) {
    const int lane = lane_index();
    const RowTile tile = b.rows(buffer);
    float G[2][8];
    sm90::sum_gates(G, b.gates(buffer), 0, group, rows, form, array_at<kLayout.bias>(b.shared));
    const int row = row_of(lane / 4);
    const int column = group * kGroup + lane % 4 * 8;
    Operand* const key_rows = tile.at(row, column);
    Operand* const query_rows = key_rows + kRows / 8 * kEightRows;
    const SliceRows k(key_rows);
    const SliceRows q(kQueries ? query_rows : key_rows);
    float reached[8];  // of one of the rows; of the later one first, which the slice's last is
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

  /// A group's decays of the slice, by the lanes that have its last row.
  WYVERN_DEVICE void store_decay(int group, const float (&whole)[8]) const {
    const int i = group * (kGroup / 8) + lane_index() % 4;
    float* const decay = b.factors<kLayout.decay>(buffer) + 2 * i;
#pragma unroll
    for (int c = 0; c < 4; ++c)
      *reinterpret_cast<Float2*>(decay +
                                 c * sm90::channel_stride(K)) = {{whole[2 * c], whole[2 * c + 1]}};
  }

  /// Factors of rows. Squares of k are on the diagonal of its scores.
  WYVERN_DEVICE void scale_rows(float scale) {
    const int lane = lane_index();
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
    if (lane < kRows)
      b.factors<kLayout.erase>(buffer)[lane] = -b.factors<kLayout.beta>(buffer)[lane] * key[lane];
  }

  /// (I + A)^-1 - I by substitution, a lane a column, and the scores of queries beside it.
  WYVERN_DEVICE void finish() {
    const int lane = lane_index();
    const SquareTile square = b.square(buffer);
    auto* const scratch = reinterpret_cast<float*>(square.data);
    sync_warp();
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        scratch[Scores::row(i) * kRows + Scores::col(n, i)] = keys.x[n].x[i];
    sync_warp();
    const float* const erase = b.factors<kLayout.erase>(buffer);
    const float* const key = b.factors<kLayout.key>(buffer);
    const int column = lane % kRows;
    float inverse[kRows];
    float scaled[kRows];  // by the factors of keys
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float sum = 0.0f;
#pragma unroll
      for (int s = 0; s < r; s += 4) {
        const auto row = load<4>(scratch + r * kRows + s);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (s + i < r) sum = fused_multiply_add(row.at[i], scaled[s + i], sum);
      }
      const float x = erase[r] * sum;
      inverse[r] = x;
      scaled[r] = (r == column ? 1.0f : x) * key[r];
    }
    sync_warp();
    if (lane < kRows) {
#pragma unroll
      for (int r = 0; r < kRows; ++r)
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
        *square.at(r, kRows + s) = from_float<Operand>(s > r ? 0.0f : score);
      }
  }
};

WYVERN_DEVICE void prepare_slices(const Block& b, int helper, float scale, const GateForm& form,
                                  const TokenRows<const BETA_DTYPE>& beta) {
  const int slices = b.slices();
  Position at;
#pragma unroll 1
  for (int i = 0; i < helper; ++i) at.advance();
#pragma unroll 1
  for (int s = helper; s < slices; s += kHelpers) {
    const int rows = b.rows_of(s);
    float rate = 0.0f;
    if (lane_index() < rows)
      rate = activate_beta<BETA_SIGMOID, NEG_EIGVAL>(
          beta.row(b.token + s * kRows + lane_index())[b.head]);
    // Copies need not land in order: that the buffer's last slice is gone tells its phase from this
    // one's.
    sm90::barrier_wait(b.barrier<kLayout.free>(at.buffer), at.parity ^ 1U);
    sm90::barrier_wait(b.barrier<kLayout.loaded>(at.buffer), at.parity);
    if (rows < kRows) {
      // What follows in the tensor is the next sequence's: whatever it holds must not come in.
      sm90::clear_rows(b.rows(at.buffer), rows, kRows);
      if constexpr (kQueries) sm90::clear_rows(b.rows(at.buffer), kRows + rows, 2 * kRows);
      sm90::clear_rows(b.values(at.buffer), rows, kRows);
      sync_warp();
    }
    if (lane_index() < kRows) b.factors<kLayout.beta>(at.buffer)[lane_index()] = rate;
    Preparation slice{b, at.buffer, rows, {}, {}};
#pragma unroll 1
    for (int group = 0; group < K / kGroup; ++group) slice.take(group, form);
    slice.scale_rows(scale);
    slice.finish();
    sm90::hand_over(b.barrier<kLayout.ready>(at.buffer));
#pragma unroll
    for (int i = 0; i < kHelpers; ++i) at.advance();
  }
}

// ---- the state ----------------------------------------------------------------------------------

using State = sm90::Accumulator<K>;
using Columns = sm90::Accumulator<kRows>;  ///< of V, one for each row of a slice

/// Factors of a slice's rows, for this thread's columns of `Columns`.
struct RowFactors {
  Float2 x[2];

  WYVERN_DEVICE explicit RowFactors(const float* from)
      : x{load<2>(from + Columns::col(0)), load<2>(from + Columns::col(4))} {}
  /// For element i of `Columns`.
  WYVERN_DEVICE float of(int i) const { return x[i / 4].at[i % 2]; }
};

/// The state of 64 columns of V as it walks through the slices.
struct StateWalk {
  const Block& b;
  int column;  ///< the warpgroup's first, of the block's
  State state;
  sm90::Accumulator<(kQueries ? 2 : 1) * kRows> read;  ///< S^T k and S^T q of the slice's rows
  Columns values;                                      ///< V'
  Columns output;   ///< of the slice's own values, then all of it
  Columns carried;  ///< S^T q: the output from earlier slices

  /// Starts what a slice reads of the state.
  WYVERN_DEVICE void start(int buffer, sm90::FragmentA<Operand, K>& packed) {
    sm90::start_product(read, packed, sm90::rows_of(b.rows(buffer)));
  }

  WYVERN_DEVICE void decay(int buffer) {
    sm90::scale_columns(state, b.factors<kLayout.decay>(buffer));
  }

  /// From the slice's residual to its V', when what is under way has ended.
  WYVERN_DEVICE void enter(int buffer, sm90::FragmentA<Operand, K>& packed) {
    const RowFactors beta(b.factors<kLayout.beta>(buffer));
    const RowFactors erase(b.factors<kLayout.erase>(buffer));
    uint32 v[4] = {};
    const int lane = lane_index();
    if (b.has_values())
      load_matrix_x4_transposed(
          v, b.values(buffer).at(lane / 16 * 8 + lane % 8,
                                 column + warp_index() % 4 * 16 + lane / 8 % 2 * 8));
    sm90::end_products<0>(read, packed);
#pragma unroll
    for (int i = 0; i < Columns::kCount; ++i) {
      const uint32 pair = v[i / 2];
      const DTYPE x{static_cast<uint16>(i % 2 == 0 ? pair & 0xFFFFU : pair >> 16U)};
      values.x[i] = fused_multiply_add(erase.of(i), read.x[i], beta.of(i) * to_float(x));
      if constexpr (kQueries) carried.x[i] = read.x[Columns::kCount + i];
    }
    sm90::FragmentA<Operand, kRows> u(values);
    sm90::start_product(values, u, sm90::rows_of(b.square(buffer)), true);
    sm90::end_products<0>(values, u);
  }

  /// The state's update by a slice's V', with the rest of its output behind it, which is under way
  /// then.
  WYVERN_DEVICE void leave(int buffer, sm90::FragmentA<Operand, kRows>& update) {
    sm90::start_product(state, update, sm90::columns_of(b.updates(buffer)), true);
    if constexpr (!kQueries) {
      sm90::end_products<0>(state, update);
      return;
    }
    sm90::start_product(output, update, sm90::rows_of(b.square(buffer), 0, kRows));
    sm90::end_products<1>(state);
  }

  /// V' with the factors of keys.
  WYVERN_DEVICE Columns scaled_values(int buffer) const {
    if constexpr (!QK_L2NORM) return values;
    const RowFactors key(b.factors<kLayout.key>(buffer));
    Columns x;
#pragma unroll
    for (int i = 0; i < Columns::kCount; ++i) x.x[i] = values.x[i] * key.of(i);
    return x;
  }

  /// The output, when what is under way for it has ended.
  WYVERN_DEVICE void add_carried() {
#pragma unroll
    for (int i = 0; i < Columns::kCount; ++i) output.x[i] += carried.x[i];
  }

  /// Writes a slice's output: a warp its 16 columns, by way of shared memory of its own, a lane
  /// half a row of them.
  WYVERN_DEVICE void store(const RowFactors& query, int slice, const TokenRows<DTYPE>& o) const {
    const int lane = lane_index();
    const int first = column + warp_index() % 4 * 16;
    DTYPE* const own = array_at<kLayout.output>(b.shared) + first * kRows;
    const auto piece = [&](int row, int half) {
      return own + row * 16 + (half ^ (row / 4 % 2)) * 8;
    };
    uint32 packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      packed[i] =
          pack<DTYPE>(output.x[2 * i] * query.of(2 * i), output.x[2 * i + 1] * query.of(2 * i + 1));
    sync_warp();
    sm90::store_matrix_x4_transposed(piece(lane / 16 * 8 + lane % 8, lane / 8 % 2), packed);
    sync_warp();
    const int row = slice * kRows + lane / 2;
    if (row >= b.tokens) return;
    store_vector(o.row(b.token + row) + b.head * V + b.tile * BV + first + lane % 2 * 8,
                 load<8>(piece(lane / 2, lane % 2)));
  }

  /// Writes the state to one of V columns.
  template <bool VFirst, class Element>
  WYVERN_DEVICE void write(Element* to) const {
    constexpr int kRowStep = VFirst ? K : 1, kColumnStep = VFirst ? 1 : V;
    sm90::store_accumulator<kRowStep, kColumnStep>(state, 1.0f,
                                                   to + (b.tile * BV + column) * kRowStep);
  }
};

/// The first slice's V' by the state that the walk starts from, which decays over the slice then.
WYVERN_DEVICE void begin_walk(StateWalk& walk, const Position& at) {
  sm90::barrier_wait(walk.b.barrier<kLayout.ready>(at.buffer), at.parity);
  sm90::FragmentA<Operand, K> packed(walk.state);
  walk.start(at.buffer, packed);
  walk.enter(at.buffer, packed);
  walk.decay(at.buffer);
}

/// Writes the state to a row of `checkpoints`. S is the kernel's Spec.
template <class S, class Element>
WYVERN_DEVICE void write_checkpoint(const StateWalk& walk, int row, Element* checkpoints,
                                    const Extents& e) {
  const auto element = Checkpoints<S>{.row = static_cast<uint32>(row)}.element(walk.b.head, e);
  walk.write<S::STATE_V_FIRST>(checkpoints + element);
}

/// keep(row) writes the state to a row of checkpoints.
template <class Keep>
WYVERN_DEVICE void walk_state(StateWalk& walk, const TokenRows<DTYPE>& o, const Keep& keep) {
  const Block& b = walk.b;
  const int slices = b.slices();
  const int overlap = b.overlap * (kChunk / kRows);
  Position at;
  begin_walk(walk, at);
#pragma unroll 1
  for (int s = 0; s < slices; ++s) {
    const int buffer = at.buffer;
    const RowFactors query(b.factors<kLayout.query>(buffer));
    sm90::FragmentA<Operand, kRows> update(walk.scaled_values(buffer));
    walk.leave(buffer, update);
    if constexpr (kCheckpoints)
      if (const int row = *b.checkpoint(buffer); row != 0) keep(row - 1);
    at.advance();
    if (s + 1 == slices) {
      sm90::end_products<0>(walk.output, update);
      walk.add_carried();
      walk.store(query, s, o);
      break;
    }
    sm90::FragmentA<Operand, K> packed(walk.state);
    sm90::barrier_wait(b.barrier<kLayout.ready>(at.buffer), at.parity);
    walk.start(at.buffer, packed);
    sm90::end_products<1>(walk.output, update);
    sm90::hand_over(b.barrier<kLayout.free>(buffer));
    walk.add_carried();
    if (s >= overlap) walk.store(query, s, o);
    walk.decay(at.buffer);
    walk.enter(at.buffer, packed);
  }
}

/// The same for the state alone.
WYVERN_DEVICE void walk_state_alone(StateWalk& walk) {
  const Block& b = walk.b;
  const int slices = b.slices();
  Position at;
  begin_walk(walk, at);
#pragma unroll 1
  for (int s = 0; s < slices; ++s) {
    const int buffer = at.buffer;
    sm90::FragmentA<Operand, kRows> update(walk.scaled_values(buffer));
    walk.leave(buffer, update);
    sm90::hand_over(b.barrier<kLayout.free>(buffer));
    at.advance();
    if (s + 1 == slices) break;
    sm90::FragmentA<Operand, K> packed(walk.state);
    sm90::barrier_wait(b.barrier<kLayout.ready>(at.buffer), at.parity);
    walk.start(at.buffer, packed);
    walk.decay(at.buffer);
    walk.enter(at.buffer, packed);
  }
}

// ---- the block ----------------------------------------------------------------------------------

/// dt_bias of the block's head, as the gate takes it. By all threads.
WYVERN_DEVICE void bring_bias(const Block& b, const GateForm& form, const float* dt_bias) {
  float* const bias = array_at<kLayout.bias>(b.shared);
  for (int i = thread_index(); i < K; i += kThreads)
    bias[i] = HAS_DT_BIAS ? form.bias(dt_bias[b.head * K + i]) : 0.0f;
  sync_block();
}

WYVERN_DEVICE void begin_block(const Block& b) {
  if (thread_index() == 0) {
    for (int i = 0; i < kStages; ++i) {
      sm90::barrier_init(b.barrier<kLayout.loaded>(i), 1);
      sm90::barrier_init(b.barrier<kLayout.ready>(i), 32);
      sm90::barrier_init(b.barrier<kLayout.free>(i), 128 * kStates);
    }
    sm90::fence_barrier_init();
  }
  sm90::fence_proxy_async();  // tensor copies come where lengths of sequences were
  sync_block();
}
