// What a block of hopper.cu, resume.cu or segment.cu has in shared memory, and the warps that bring
// it: warp 0 brings tiles by tensor copies; warps 1 to 3, no more of them than there are buffers of
// chunks, take turns at bringing a chunk's scores, which are rounded to 16 bits on the way, and its
// decay.
#pragma once

#include "device/cuda/checkpoints.cuh"
#include "device/cuda/gate.cuh"
#include "device/cuda/mma.cuh"
#include "device/cuda/sm90/barrier.cuh"
#include "device/cuda/sm90/state.cuh"
#include "device/cuda/state_unit.cuh"
#include "device/cuda/token_rows.cuh"
#include "device/cuda/warp.cuh"
#include "forward/kda_fwd_h_o/layout.hpp"

using kda_fwd_h_o::kChunk;
using kda_fwd_h_o::kColumns;

constexpr int kStates = BV / kColumns;  ///< warpgroups with states
constexpr int kThreads = 128 * (1 + kStates);
constexpr int kStages = num_stages;
constexpr int kTilesV = V / BV;
constexpr kda_fwd_h_o::HopperLayout<Spec> kLayout{Spec{}, kQueries, kCheckpoints};
constexpr int kConverters = kLayout.converters;
constexpr int kElementBytes = static_cast<int>(sizeof(DTYPE));
constexpr int kValueBytes = kChunk * BV * kElementBytes;
constexpr int kRowBytes = kChunk * K * kElementBytes;  ///< of W, of qg, of kg
constexpr int kChunkBytes = (kQueries ? 3 : 2) * kRowBytes + kValueBytes;

/// A chunk's buffers and their parity, as the walk goes on.
using Position = sm90::Pipeline<kStages>::Position;
using RingPosition = sm90::Pipeline<kLayout.ring>::Position;
using KeyTile = sm90::SwizzledTile<DTYPE, kChunk, K>;

/// What a warpgroup does first that brings, or that has a state, with its registers. A shared state
/// takes all that a thread can have, and all threads of its block have as many.
WYVERN_DEVICE void begin_bringing() {
  if constexpr (!kLayout.shares_state) sm90::lower_registers<kStates == 1 ? 200 : 72>();
}
WYVERN_DEVICE void begin_walking() {
  if constexpr (!kLayout.shares_state) sm90::raise_registers<kStates == 1 ? 240 : 216>();
}

/// What all warps of a block know.
struct Block {
  unsigned char* shared;
  int64 token;  ///< the walk's first
  int tokens;
  int overlap = 0;  ///< chunks in front whose output is another block's
  int head, tile;
  int heads;                      ///< value heads
  bool without_values = false;    ///< u counts as 0; only where no queries are asked
  float unit = kValueUnit<Spec>;  ///< of the state, in which elements of u count times u_factor
  float u_factor = 1.0f;

  /// By all threads, before anything else is in shared memory: the unit of states that start from
  /// the K V elements at `state`; null: from zeros.
  template <class Element>
  WYVERN_DEVICE void choose_unit(const Element* state) {
    if constexpr (!STATE_UNIT) return;
    unit = find_unit<Spec, kThreads>(state, 1.0f, reinterpret_cast<float*>(shared));
    u_factor = kValueUnit<Spec> / unit;
  }

  WYVERN_DEVICE bool has_values() const { return kQueries || !without_values; }
  WYVERN_DEVICE int chunks() const { return ceil_div(tokens, kChunk); }
  WYVERN_DEVICE int rows_of(int chunk) const { return smaller(tokens - chunk * kChunk, kChunk); }

  template <sm90::SwizzledPlace Place>
  WYVERN_DEVICE sm90::SwizzledTile<DTYPE, Place.rows, Place.cols> tile_of(int buffer) const {
    return {shared + Place.offset + buffer * kLayout.slots};
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
  template <sm90::BarrierPlace Place>
  WYVERN_DEVICE sm90::Barrier* barrier(int i) const {
    return sm90::barriers_at<Place>(shared) + i;
  }
};

// ---- warp 0: tiles ------------------------------------------------------------------------------

/// By one thread. qg_map is not used where no queries are asked.
WYVERN_DEVICE void bring_chunks(const Block& b, const TensorMap& w_map, const TensorMap& qg_map,
                                const TensorMap& kg_map, const TensorMap& u_map) {
  const int chunks = b.chunks();
  const int value_bytes = b.has_values() ? kValueBytes : 0;
  Position at;
  RingPosition next;
  const auto bring = [&](const TensorMap& map, int token, int more_bytes) {
    sm90::barrier_wait(b.barrier<kLayout.emptied>(next.buffer), next.parity ^ 1U);
    sm90::Barrier* const loaded = b.barrier<kLayout.loaded>(next.buffer);
    sm90::barrier_arrive_expect(loaded, kRowBytes + more_bytes);
    sm90::tensor_load(b.ring(next.buffer).data, map, {0, token, 0, b.head}, loaded);
    next.advance();
    return loaded;
  };
#pragma unroll 1
  for (int c = 0; c < chunks; ++c, at.advance()) {
    sm90::barrier_wait(b.barrier<kLayout.free>(at.buffer), at.parity ^ 1U);
    sm90::Barrier* loaded = b.barrier<kLayout.loaded>(at.buffer);
    const int token = static_cast<int>(b.token) + c * kChunk;
    if constexpr (kLayout.shares_state) {
      loaded = bring(w_map, token, value_bytes);
    } else {
      sm90::barrier_arrive_expect(loaded, kChunkBytes - kValueBytes + value_bytes);
      sm90::tensor_load(b.tile_of<kLayout.w>(at.buffer).data, w_map, {0, token, 0, b.head}, loaded);
    }
    if (b.has_values())
      sm90::tensor_load(b.tile_of<kLayout.u>(at.buffer).data, u_map,
                        {0, token, b.tile * kStates, b.head}, loaded);
    if constexpr (kLayout.shares_state) {
      if constexpr (kQueries) bring(qg_map, token, 0);
      bring(kg_map, token, 0);
    } else {
      if constexpr (kQueries)
        sm90::tensor_load(b.tile_of<kLayout.qg>(at.buffer).data, qg_map, {0, token, 0, b.head},
                          loaded);
      sm90::tensor_load(b.tile_of<kLayout.kg>(at.buffer).data, kg_map, {0, token, 0, b.head},
                        loaded);
    }
  }
}

// ---- warps 1 to 3: scores and decays ------------------------------------------------------------

/// Of the pieces of eight scores that are on or left of the diagonal, those of each lane.
constexpr int kPieces = kChunk / 8 * (kChunk / 8 + 1) / 2 * 8 / 32;
/// How many of them are on their way at a time.
constexpr int kPiecesAtOnce = kStates == 1 ? kPieces : 3;
static_assert(kPieces % kPiecesAtOnce == 0);

/// Where a piece lies: eight rows have one each, the next eight two, and so on.
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
/// 0. By one warp, once the buffer is free, which `await` sees to.
template <class ScoreTile, class Await>
WYVERN_DEVICE void convert_scores(const ScoreTile& to, const float* Aqk, int stride, int rows,
                                  Await&& await) {
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
    await();
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

/// Where a checkpoint divides a chunk: decays `keys` of the rows in front of it up to there, as kg
/// may hold too little of them to go back from, and gives each channel's decay from there to the
/// chunk's end. k and Gk are the chunk's. By one warp.
template <class KeyTile>
WYVERN_DEVICE void divide_chunk(const Block& b, const KeyTile& keys,
                                const TokenRows<const DTYPE>& k, const float* Gk, int front,
                                int rows) {
  const int first = lane_index() * kChannels;
  const auto reached = load<kChannels>(Gk + int64{front - 1} * b.heads * K + first);
  const auto end = load<kChannels>(Gk + int64{rows - 1} * b.heads * K + first);
#pragma unroll
  for (int i = 0; i < kChannels; ++i)
    array_at<kLayout.rest>(b.shared)[sm90::channel_place(K, first + i)] =
        exp2_fast((end.at[i] - reached.at[i]) * kLog2E);
#pragma unroll 1
  for (int r = 0; r < front; ++r) {
    const auto row = load<kChannels>(k.row(r) + first);
    const auto sums = load<kChannels>(Gk + int64{r} * b.heads * K + first);
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

/// Every kConverters-th chunk from `converter` on, by one warp: a chunk's numbers are on their way
/// for longer than a state takes to walk through it. Aqk, Gk and k are those of the walk's first
/// token and head; `kept` counts tokens of the walk.
template <class Kept>
WYVERN_DEVICE void convert_chunks(const Block& b, int converter, const float* Aqk, const float* Gk,
                                  Kept kept, const TokenRows<const DTYPE>& k) {
  const int lane = lane_index();
  const int chunks = b.chunks();
  Position at;
#pragma unroll 1
  for (int i = 0; i < converter; ++i) at.advance();
#pragma unroll 1
  for (int c = converter; c < chunks; c += kConverters) {
    const int rows = b.rows_of(c);
    const int64 first = int64{c} * kChunk * b.heads;
    int front = 0;    // rows in front of a checkpoint
    int divided = 0;  // where it is inside the chunk
    if constexpr (Kept::kAny) {
      while (kept.next != 0 && kept.next <= static_cast<uint32>(c) * kChunk) kept.pass();
      front = kept.reached(static_cast<uint32>(c) * kChunk, rows);
      if (Kept::kInside && front < rows) divided = front;
    }
    const int last = divided != 0 ? divided - 1 : rows - 1;
    const auto sums = load<kChannels>(Gk + (first + int64{last} * b.heads) * K + lane * kChannels);
    const auto await = [&] {
      sm90::barrier_wait(b.barrier<kLayout.free>(at.buffer), at.parity ^ 1U);
    };
    if constexpr (kQueries)
      convert_scores(b.tile_of<kLayout.scores>(at.buffer), Aqk + first * BT, b.heads * BT, rows,
                     await);
    else
      await();
    float* const decay = b.decay(at.buffer);
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      const int channel = lane * kChannels + i;
      decay[kLayout.shares_state ? channel : sm90::channel_place(K, channel)] =
          exp2_fast(sums.at[i] * kLog2E);
    }
    if constexpr (Kept::kAny) {
      if (lane == 0) {
        b.checkpoint(at.buffer)[0] = front == rows ? kChunk : front;
        b.checkpoint(at.buffer)[1] = static_cast<int32>(kept.row);
      }
    }
    if constexpr (Kept::kInside) {
      if (divided != 0) {
        sm90::barrier_wait(b.barrier<kLayout.loaded>(at.buffer), at.parity);
        divide_chunk(b, b.tile_of<kLayout.kg>(at.buffer), k.at(int64{c} * kChunk, 0),
                     Gk + first * K, divided, rows);
      }
    }
    if (!kLayout.shares_state && rows < kChunk) {
      // What follows in the tensor is the next sequence's: whatever it holds must not come in.
      sm90::barrier_wait(b.barrier<kLayout.loaded>(at.buffer), at.parity);
      const auto keys = b.tile_of<kLayout.kg>(at.buffer);
      for (int i = lane; i < (kChunk - rows) * (K / 8); i += 32)
        *reinterpret_cast<Vector<uint32, 4>*>(keys.at(rows + i / (K / 8), i % (K / 8) * 8)) = {};
    }
    sm90::hand_over(b.barrier<kLayout.ready>(at.buffer));
#pragma unroll
    for (int i = 0; i < kConverters; ++i) at.advance();
  }
}

// ---- the block ----------------------------------------------------------------------------------

WYVERN_DEVICE void begin_block(const Block& b) {
  if constexpr (kQueries) {
    // Right of the diagonal scores stay 0.
    constexpr int kPiecesOfTile = kChunk * kChunk / 8;
    for (int i = thread_index(); i < kStages * kPiecesOfTile; i += kThreads)
      *reinterpret_cast<Vector<uint32, 4>*>(b.tile_of<kLayout.scores>(i / kPiecesOfTile).data +
                                            i % kPiecesOfTile * 16) = {};
    sm90::fence_proxy_async();  // of lengths of sequences too, where there were some
  }
  if (thread_index() == 0) {
    for (int i = 0; i < kLayout.loaded.count; ++i)
      sm90::barrier_init(b.barrier<kLayout.loaded>(i), 1);
    for (int i = 0; i < kLayout.ring; ++i) sm90::barrier_init(b.barrier<kLayout.emptied>(i), 128);
    for (int i = 0; i < kStages; ++i) {
      sm90::barrier_init(b.barrier<kLayout.ready>(i), 32);
      sm90::barrier_init(b.barrier<kLayout.free>(i), 128 * kStates);
    }
    sm90::fence_barrier_init();
  }
  sync_block();
}
