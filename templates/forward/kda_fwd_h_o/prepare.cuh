// kda_fwd_h_o's load warpgroup: warp 0, the producer, loads tiles by TMA; prep warps load a chunk's
// scores, rounded to 16 bits on the way, and its decays, in turns. `Scheduler`, a global alias set
// before the include, says which work a block has.
#pragma once

#include "device/cuda/checkpoints.cuh"
#include "device/cuda/gate.cuh"
#include "device/cuda/mma.cuh"
#include "device/cuda/sm90/barrier.cuh"
#include "device/cuda/sm90/scheduler.cuh"
#include "device/cuda/sm90/state.cuh"
#include "device/cuda/token_rows.cuh"
#include "device/cuda/warp.cuh"
#include "forward/kda_fwd_h_o/layout.hpp"

using kda_fwd_h_o::kChunk;
using kda_fwd_h_o::kColumns;

/// Whether there is an output; where not, queries are not loaded.
constexpr bool kQueries = Scheduler::kOutput;
/// Whether states inside the sequence are written, and inside chunks too.
constexpr bool kCheckpoints = Scheduler::kCheckpoints, kDivided = Scheduler::kDivided;
constexpr kda_fwd_h_o::HopperLayout<Spec> kLayout{Spec{}, kQueries, kCheckpoints};
constexpr int kStages = num_stages;
constexpr int kConsumers = BV / kColumns;  ///< warpgroups
constexpr int kPrepWarps = kLayout.prep_warps;
constexpr int kThreads = 128 * (1 + kConsumers);

using KeyTile = sm90::SwizzledTile<DTYPE, kChunk, K>;
/// Bytes of a chunk's W, qg or kg, of its U, and of its scores.
constexpr int kKeyBytes = KeyTile::kBytes;
constexpr int kValueBytes = kChunk * BV * static_cast<int>(sizeof(DTYPE));
constexpr int kScoreBytes = kChunk * kChunk * static_cast<int>(sizeof(DTYPE));
/// Bytes of a chunk's TMA loads, but for its scores. With the state in shared memory tiles of keys
/// are loaded one by one, each into a buffer of the ring.
constexpr int kChunkBytes = (kQueries ? 3 : 2) * kKeyBytes + kValueBytes;
static_assert((kLayout.shares_state ? kValueBytes : kChunkBytes) + (kQueries ? kScoreBytes : 0) ==
              kLayout.tiles);

/// The pipeline stage of a chunk, and its phase; a tile's buffer of the ring, and its phase.
using Position = sm90::Pipeline<kStages>::Position;
using RingPosition = sm90::Pipeline<kLayout.ring>::Position;

/// A block's work, and where its tiles, decays and barriers are in shared memory.
struct Block : sm90::Work {
  float u_factor = 1.0f;  ///< of elements of U in the unit of the state

  WYVERN_DEVICE bool has_values() const { return kQueries || !zero_v; }
  WYVERN_DEVICE int rows_of(int chunk) const { return smaller(tokens - chunk * kChunk, kChunk); }

  template <sm90::SwizzledPlace Place>
  WYVERN_DEVICE sm90::SwizzledTile<DTYPE, Place.rows, Place.cols> tile_of(int buffer) const {
    return {shared + Place.offset + buffer * kLayout.tiles};
  }
  WYVERN_DEVICE KeyTile ring(int buffer) const {
    return {shared + kLayout.rows.offset + buffer * KeyTile::kBytes};
  }
  /// Rows in front of the chunk's checkpoint, and its row of the tensor.
  WYVERN_DEVICE int32* checkpoint(int buffer) const {
    return reinterpret_cast<int32*>(array_at<kLayout.checkpoint>(shared)) + 2 * buffer;
  }
  WYVERN_DEVICE float* decay(int buffer) const {
    return array_at<kLayout.decay>(shared) + buffer * kLayout.decays;
  }

  WYVERN_DEVICE sm90::Barrier* tiles_full(int buffer) const {
    return sm90::barriers_at<kLayout.tiles_full>(shared) + buffer;
  }
  WYVERN_DEVICE sm90::Barrier* ring_empty(int buffer) const {
    return sm90::barriers_at<kLayout.ring_empty>(shared) + buffer;
  }
  WYVERN_DEVICE sm90::Barrier* scores_full(const Position& at) const {
    return sm90::barriers_at<kLayout.scores_full>(shared) + at.buffer;
  }
  WYVERN_DEVICE sm90::Barrier* empty(int buffer) const {
    return sm90::barriers_at<kLayout.empty>(shared) + buffer;
  }
  /// Of a chunk, or of a tile of the ring.
  template <class At>
  WYVERN_DEVICE void wait_tiles(const At& at) const {
    sm90::barrier_wait(tiles_full(at.buffer), at.parity);
  }
  WYVERN_DEVICE void wait_scores(const Position& at) const {
    sm90::barrier_wait(scores_full(at), at.parity);
  }
  WYVERN_DEVICE void wait_empty(const Position& at) const {
    sm90::barrier_wait(empty(at.buffer), at.parity ^ 1U);
  }
};

// ---- warp 0: tiles ------------------------------------------------------------------------------

/// Loads all chunks, by one thread.
template <class Params>
WYVERN_DEVICE void load_chunks(const Block& b, const Params& p) {
  const int value_bytes = b.has_values() ? kValueBytes : 0;
  Position at;
  RingPosition next;
  const auto load_tile = [&](const TensorMap& map, int token, int more_bytes) {
    sm90::barrier_wait(b.ring_empty(next.buffer), next.parity ^ 1U);
    sm90::Barrier* const full = b.tiles_full(next.buffer);
    sm90::barrier_arrive_expect(full, kKeyBytes + more_bytes);
    sm90::tensor_load(b.ring(next.buffer).data, map, {0, token, 0, b.head}, full);
    next.advance();
    return full;
  };
#pragma unroll 1
  for (int c = 0; c < b.chunks; ++c, at.advance()) {
    b.wait_empty(at);
    sm90::Barrier* full = b.tiles_full(at.buffer);
    const int token = static_cast<int>(b.token) + c * kChunk;
    if constexpr (kLayout.shares_state) {
      full = load_tile(p.w_map, token, value_bytes);
    } else {
      sm90::barrier_arrive_expect(full, kChunkBytes - kValueBytes + value_bytes);
      sm90::tensor_load(b.tile_of<kLayout.w>(at.buffer).data, p.w_map, {0, token, 0, b.head}, full);
    }
    if (b.has_values())
      sm90::tensor_load(b.tile_of<kLayout.u>(at.buffer).data, p.u_map,
                        {0, token, b.tile * kConsumers, b.head}, full);
    if constexpr (kLayout.shares_state) {
      if constexpr (kQueries) load_tile(p.qg_map, token, 0);
      load_tile(p.kg_map, token, 0);
    } else {
      if constexpr (kQueries)
        sm90::tensor_load(b.tile_of<kLayout.qg>(at.buffer).data, p.qg_map, {0, token, 0, b.head},
                          full);
      sm90::tensor_load(b.tile_of<kLayout.kg>(at.buffer).data, p.kg_map, {0, token, 0, b.head},
                        full);
    }
  }
}

// ---- prep warps: scores and decays --------------------------------------------------------------

/// Of the pieces of eight scores that are on or left of the diagonal, those of each lane.
constexpr int kPieces = kChunk / 8 * (kChunk / 8 + 1) / 2 * 8 / 32;
/// How many of them are loaded at a time.
constexpr int kPiecesAtOnce = kConsumers == 1 ? kPieces : 3;
static_assert(kPieces % kPiecesAtOnce == 0);

/// A piece's place: eight rows have one each, the next eight two, and so on.
struct ScorePlace {
  int row, col;

  WYVERN_DEVICE explicit ScorePlace(int piece) {
    int eight = 0;
#pragma unroll
    for (int i = 1; i < kChunk / 8; ++i)
      if (piece >= 4 * i * (i + 1)) eight = i;
    const int in_eight = piece - 4 * eight * (eight + 1);
    row = 8 * eight + in_eight / (eight + 1);
    col = in_eight % (eight + 1) * 8;
  }
};

/// Writes a chunk's scores in 16 bits, from rows `stride` elements apart; rows past the end become
/// 0. By one warp; wait_empty() waits for the buffer.
template <class ScoreTile, class WaitEmpty>
WYVERN_DEVICE void round_scores(const ScoreTile& to, const float* Aqk, int stride, int rows,
                                WaitEmpty&& wait_empty) {
#pragma unroll 1
  for (int first = 0; first < kPieces; first += kPiecesAtOnce) {
    Vector<float, 4> pieces[kPiecesAtOnce][2] = {};
#pragma unroll
    for (int i = 0; i < kPiecesAtOnce; ++i) {
      const ScorePlace at((first + i) * 32 + lane_index());
      if (at.row >= rows) continue;
      const float* const from = Aqk + int64{at.row} * stride + at.col;
      pieces[i][0] = load<4>(from);
      pieces[i][1] = load<4>(from + 4);
    }
    wait_empty();
#pragma unroll
    for (int i = 0; i < kPiecesAtOnce; ++i) {
      const ScorePlace at((first + i) * 32 + lane_index());
      Vector<uint32, 4> packed;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        packed.at[j] = pack_within_range<DTYPE>(pieces[i][j / 2].at[j % 2 * 2],
                                                pieces[i][j / 2].at[j % 2 * 2 + 1]);
      *reinterpret_cast<Vector<uint32, 4>*>(to.at(at.row, at.col)) = packed;
    }
  }
}

constexpr int kChannels = K / 32;  ///< of a lane

/// Where a checkpoint divides a chunk after `front` rows: decays their `keys` up to it, since kg
/// may underflow there, and writes each channel's decay from there to the chunk's end. k and Gk are
/// the chunk's, rows of Gk `stride` elements apart. By one warp.
template <class KgTile>
WYVERN_DEVICE void divide_chunk(const Block& b, const KgTile& keys, const TokenRows<const DTYPE>& k,
                                const float* Gk, int64 stride, int front, int rows) {
  const int first = lane_index() * kChannels;
  const auto reached = load<kChannels>(Gk + (front - 1) * stride + first);
  const auto end = load<kChannels>(Gk + (rows - 1) * stride + first);
#pragma unroll
  for (int i = 0; i < kChannels; ++i)
    array_at<kLayout.rest>(b.shared)[sm90::channel_place(K, first + i)] =
        exp2_fast((end.at[i] - reached.at[i]) * kLog2E);
#pragma unroll 1
  for (int r = 0; r < front; ++r) {
    const auto row = load<kChannels>(k.row(r) + first);
    const auto sums = load<kChannels>(Gk + r * stride + first);
    float x[kChannels];
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      x[i] = to_float(row.at[i]);
      square = fused_multiply_add(x[i], x[i], square);
      x[i] *= exp2_fast((reached.at[i] - sums.at[i]) * kLog2E);
    }
    float scale = 1.0f;
    if constexpr (QK_L2NORM) {
      scale = reciprocal_sqrt(sum_warp(square) + 1e-6f);
    }
#pragma unroll
    for (int i = 0; i < kChannels; i += 2)
      *reinterpret_cast<uint32*>(keys.at(r, first + i)) =
          pack_within_range<DTYPE>(x[i] * scale, x[i + 1] * scale);
  }
}

/// Every kPrepWarps-th chunk from `first` on, by one warp: loading a chunk takes longer than a
/// consumer's work for it. `checkpoints` counts tokens from the block's first.
template <class Params, class Checkpoints>
WYVERN_DEVICE void prepare_chunks(const Block& b, int first, const Params& p,
                                  Checkpoints checkpoints) {
  const int lane = lane_index();
  const int heads = p.e.HV;
  const float* const Gk = p.Gk + (b.token * heads + b.head) * K;
  Position at;
#pragma unroll 1
  for (int i = 0; i < first; ++i) at.advance();
#pragma unroll 1
  for (int c = first; c < b.chunks; c += kPrepWarps) {
    const int rows = b.rows_of(c);
    const int64 start = int64{c} * kChunk * heads;
    int front = 0;    // rows in front of a checkpoint
    int divided = 0;  // those of one inside the chunk
    if constexpr (Checkpoints::kAny) {
      while (checkpoints.next != 0 && checkpoints.next <= static_cast<uint32>(c) * kChunk)
        checkpoints.pass();
      front = checkpoints.reached(static_cast<uint32>(c) * kChunk, rows);
      if (Checkpoints::kInside && front < rows) divided = front;
    }
    const int last = divided != 0 ? divided - 1 : rows - 1;
    const auto sums = load<kChannels>(Gk + (start + int64{last} * heads) * K + lane * kChannels);
    const auto wait_empty = [&] { b.wait_empty(at); };
    if constexpr (kQueries)
      round_scores(b.tile_of<kLayout.scores>(at.buffer),
                   p.Aqk + (b.token * heads + b.head) * BT + start * BT, heads * BT, rows,
                   wait_empty);
    else
      wait_empty();
    float* const decay = b.decay(at.buffer);
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      const int channel = lane * kChannels + i;
      decay[kLayout.shares_state ? channel : sm90::channel_place(K, channel)] =
          exp2_fast(sums.at[i] * kLog2E);
    }
    if constexpr (Checkpoints::kAny) {
      if (lane == 0) {
        b.checkpoint(at.buffer)[0] = front == rows ? kChunk : front;
        b.checkpoint(at.buffer)[1] = static_cast<int32>(checkpoints.row);
      }
    }
    if constexpr (Checkpoints::kInside) {
      if (divided != 0) {
        b.wait_tiles(at);
        const auto keys =
            TokenRows<const DTYPE>{p.k, p.k_stride}.at(b.token + c * kChunk, b.key_head * K);
        divide_chunk(b, b.tile_of<kLayout.kg>(at.buffer), keys, Gk + start * K, int64{heads} * K,
                     divided, rows);
      }
    }
    if constexpr (!kLayout.shares_state) {
      if (rows < kChunk) {
        // The next rows belong to the next sequence.
        b.wait_tiles(at);
        sm90::clear_rows(b.tile_of<kLayout.kg>(at.buffer), rows);
      }
    }
    sm90::hand_over(b.scores_full(at));
#pragma unroll
    for (int i = 0; i < kPrepWarps; ++i) at.advance();
  }
}
