// How a block of hopper.cu, resume.cu or segment.cu walks through chunks of 64 tokens with a state
// of Kimi Delta Attention, one block BV columns of V of one value head, when W, U, the decayed rows
// of q and k, and the scores of queries are there already. What includes this says whether queries
// are asked too (kQueries), or the state alone is wanted, and whether states inside the sequence
// are kept (kCheckpoints), inside chunks too (kDivided).
//
// Warp 0 brings tiles by tensor copies. Warps 1 to 3, of which a buffer of chunks keeps one busy,
// take turns at bringing a chunk's scores, which are rounded to 16 bits on the way, and its decay.
// The warpgroups after them have the state, as S^T, 64 columns of V each.
#pragma once

#include "device/cuda/checkpoints.cuh"
#include "device/cuda/gate.cuh"
#include "device/cuda/mma.cuh"
#include "device/cuda/sm90/barrier.cuh"
#include "device/cuda/sm90/state.cuh"
#include "device/cuda/token_rows.cuh"
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
constexpr int kChunkBytes = (kQueries ? 3 : 2) * kChunk * K * kElementBytes + kValueBytes;

/// Registers of a thread: of the warpgroup that brings, and of those with states.
constexpr int kBringRegisters = kStates == 1 ? 200 : 72;
constexpr int kStateRegisters = kStates == 1 ? 240 : 216;

/// A chunk's buffers and their parity, as the walk goes on.
using Position = sm90::Pipeline<kStages>::Position;

/// What all warps of a block know.
struct Block {
  unsigned char* shared;
  int64 token;  ///< the walk's first
  int tokens;
  int head, tile;
  int heads;                    ///< value heads
  bool without_values = false;  ///< u counts as 0; only where no queries are asked

  WYVERN_DEVICE bool has_values() const { return kQueries || !without_values; }
  WYVERN_DEVICE int chunks() const { return ceil_div(tokens, kChunk); }
  WYVERN_DEVICE int rows_of(int chunk) const { return smaller(tokens - chunk * kChunk, kChunk); }

  template <sm90::SwizzledPlace Place>
  WYVERN_DEVICE sm90::SwizzledTile<DTYPE, Place.rows, Place.cols> tile_of(int buffer) const {
    return {shared + Place.offset + buffer * kLayout.slots};
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
  Position at;
#pragma unroll 1
  for (int c = 0; c < chunks; ++c, at.advance()) {
    sm90::barrier_wait(b.barrier<kLayout.free>(at.buffer), at.parity ^ 1U);
    sm90::Barrier* const loaded = b.barrier<kLayout.loaded>(at.buffer);
    const int token = static_cast<int>(b.token) + c * kChunk;
    sm90::barrier_arrive_expect(loaded, b.has_values() ? kChunkBytes : kChunkBytes - kValueBytes);
    sm90::tensor_load(b.tile_of<kLayout.w>(at.buffer).data, w_map, {0, token, 0, b.head}, loaded);
    if (b.has_values())
      sm90::tensor_load(b.tile_of<kLayout.u>(at.buffer).data, u_map,
                        {0, token, b.tile * kStates, b.head}, loaded);
    if constexpr (kQueries)
      sm90::tensor_load(b.tile_of<kLayout.qg>(at.buffer).data, qg_map, {0, token, 0, b.head},
                        loaded);
    sm90::tensor_load(b.tile_of<kLayout.kg>(at.buffer).data, kg_map, {0, token, 0, b.head}, loaded);
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
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) square += shuffle_xor(square, mask);
      scale = reciprocal_sqrt(square + 1e-6f);
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
    for (int i = 0; i < kChannels; ++i)
      decay[sm90::channel_place(K, lane * kChannels + i)] = exp2_fast(sums.at[i] * kLog2E);
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
    if (rows < kChunk) {
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

// ---- the state ----------------------------------------------------------------------------------

using State = sm90::Accumulator<K>;
using Rows = sm90::Accumulator<kChunk>;  ///< of V's columns, one for each token of a chunk

/// The state of 64 columns of V as it walks through the chunks.
struct StateWalk {
  const Block& b;
  int column;  ///< the warpgroup's first, of the block's
  State state;
  Rows values;  ///< S^T W^T, then V'
  Rows output;

  WYVERN_DEVICE void await(const Position& at) const {
    sm90::barrier_wait(b.barrier<kLayout.ready>(at.buffer), at.parity);
    sm90::barrier_wait(b.barrier<kLayout.loaded>(at.buffer), at.parity);
  }

  /// Starts what a chunk's W reads of the state.
  WYVERN_DEVICE void predict(int buffer, const sm90::FragmentA<DTYPE, K>& packed) {
    sm90::start_product(values, packed, sm90::rows_of(b.tile_of<kLayout.w>(buffer)));
  }
  /// Starts what its queries read.
  WYVERN_DEVICE void ask(int buffer, const sm90::FragmentA<DTYPE, K>& packed) {
    sm90::start_product(output, packed, sm90::rows_of(b.tile_of<kLayout.qg>(buffer)));
  }

  /// From S^T W^T to V' = U - W S, 0 in the rows from `rows` on.
  WYVERN_DEVICE void find_values(int buffer, int rows) {
    const auto u = b.tile_of<kLayout.u>(buffer);
    const int lane = lane_index();
    const int col = column + warp_index() % 4 * 16 + lane / 8 % 2 * 8;
#pragma unroll
    for (int first = 0; first < kChunk; first += 16) {
      uint32 x[4] = {};
      if (b.has_values()) load_matrix_x4_transposed(x, u.at(first + lane / 16 * 8 + lane % 8, col));
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32 pair = x[i / 2];
        const DTYPE from{static_cast<uint16>(i % 2 == 0 ? pair & 0xFFFFU : pair >> 16U)};
        float& value = values.x[first / 2 + i];
        value = to_float(from) - value;
      }
    }
    if (rows == kChunk) return;
#pragma unroll
    for (int i = 0; i < Rows::kCount; ++i)
      if (Rows::col(i) >= rows) values.x[i] = 0.0f;
  }

  /// V', while the queries' products are under way; then they have ended.
  WYVERN_DEVICE void enter(int buffer, int rows, sm90::FragmentA<DTYPE, K>& packed) {
    sm90::end_products<1>(values);
    find_values(buffer, rows);
    sm90::end_products<0>(output, packed);
  }

  /// Where a checkpoint divides the chunk, the state takes up the rows in front of it, is kept, and
  /// decays to the chunk's end. Returns what it still has to take up.
  template <class Keep>
  WYVERN_DEVICE sm90::FragmentA<DTYPE, kChunk> take_front(
      int buffer, const sm90::FragmentA<DTYPE, kChunk>& update, const Keep& keep) {
    sm90::FragmentA<DTYPE, kChunk> behind = update;
    const int rows = sm90::uniform(b.checkpoint(buffer)[0]);
    if (rows == 0 || rows == kChunk) return behind;
    sm90::FragmentA<DTYPE, kChunk> front = update;
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool is_front = step * 16 < rows;
        front.x[step][i] = is_front ? update.x[step][i] : 0;
        behind.x[step][i] = is_front ? 0 : update.x[step][i];
      }
    sm90::start_product(state, front, sm90::columns_of(b.tile_of<kLayout.kg>(buffer)), true);
    sm90::end_products<0>(state, front);
    keep(b.checkpoint(buffer)[1]);
    sm90::scale_columns(state, array_at<kLayout.rest>(b.shared));
    return behind;
  }

  /// The state's update by a chunk's V', with the rest of its output behind it, which is under way
  /// then. keep(row) writes the state to a row of checkpoints.
  template <class Keep>
  WYVERN_DEVICE void leave(int buffer, const sm90::FragmentA<DTYPE, kChunk>& update,
                           const Keep& keep) {
    const auto keys = sm90::columns_of(b.tile_of<kLayout.kg>(buffer));
    const auto scores = sm90::rows_of(b.tile_of<kLayout.scores>(buffer));
    if constexpr (kDivided) {
      sm90::FragmentA<DTYPE, kChunk> behind = take_front(buffer, update, keep);
      sm90::start_product(state, behind, keys, true);
      sm90::start_product(output, update, scores, true);
      sm90::end_products<1>(state, behind);
    } else {
      sm90::start_product(state, update, keys, true);
      sm90::start_product(output, update, scores, true);
      sm90::end_products<1>(state);
    }
    if constexpr (kCheckpoints)
      if (b.checkpoint(buffer)[0] == kChunk) keep(b.checkpoint(buffer)[1]);
  }

  /// Writes a chunk's output: a warp its 16 columns, by way of shared memory of its own, a lane
  /// half a row of them at a time.
  WYVERN_DEVICE void store(float scale, int chunk, const TokenRows<DTYPE>& o) const {
    const int lane = lane_index();
    const int first = column + warp_index() % 4 * 16;
    DTYPE* const own = array_at<kLayout.output>(b.shared) + first * kChunk;
    const auto piece = [&](int row, int half) {
      return own + row * 16 + (half ^ (row / 4 % 2)) * 8;
    };
    sync_warp();
#pragma unroll
    for (int part = 0; part < kChunk / 16; ++part) {
      uint32 packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        packed[i] = pack_within_range<DTYPE>(output.x[part * 8 + 2 * i] * scale,
                                             output.x[part * 8 + 2 * i + 1] * scale);
      sm90::store_matrix_x4_transposed(piece(part * 16 + lane / 16 * 8 + lane % 8, lane / 8 % 2),
                                       packed);
    }
    sync_warp();
    const int rows = b.rows_of(chunk);
    DTYPE* const to =
        o.row(b.token + int64{chunk} * kChunk) + b.head * V + b.tile * BV + first + lane % 2 * 8;
#pragma unroll
    for (int part = 0; part < kChunk / 16; ++part) {
      const int row = part * 16 + lane / 2;
      if (row < rows) store_vector(to + row * o.stride, load<8>(piece(row, lane % 2)));
    }
  }
};

/// Writes the state to a row of `checkpoints`. S is the kernel's Spec.
template <class S, class Element>
WYVERN_DEVICE void write_checkpoint(StateWalk& walk, int row, Element* checkpoints,
                                    const Extents& e) {
  const auto element = Checkpoints<S>{.row = static_cast<uint32>(row)}.element(walk.b.head, e);
  sm90::visit_state<V, S::STATE_V_FIRST>(
      walk.state, walk.b.tile * BV + walk.column,
      [to = checkpoints + element](int offset, float& x) { to[offset] = from_float<Element>(x); });
}

/// Through all chunks, of which there is at least one. While a chunk's first products run, the
/// output of the chunk before is written. At the end of a round nothing is under way: ptxas would
/// have products that cross it wait for each other.
template <class Keep>
WYVERN_DEVICE void walk_state(StateWalk& walk, float scale, const TokenRows<DTYPE>& o,
                              const Keep& keep) {
  const Block& b = walk.b;
  const int chunks = b.chunks();
  Position at;
  walk.await(at);
  {
    sm90::FragmentA<DTYPE, K> packed(walk.state);
    sm90::scale_columns(walk.state, b.decay(at.buffer));
    walk.predict(at.buffer, packed);
    walk.ask(at.buffer, packed);
    walk.enter(at.buffer, b.rows_of(0), packed);
  }
#pragma unroll 1
  for (int c = 0; c < chunks; ++c) {
    const int buffer = at.buffer;
    sm90::FragmentA<DTYPE, kChunk> update(walk.values);
    walk.leave(buffer, update, keep);
    at.advance();
    if (c + 1 == chunks) {
      sm90::end_products<0>(walk.output, update);
      walk.store(scale, c, o);
      break;
    }
    sm90::FragmentA<DTYPE, K> packed(walk.state);
    walk.await(at);
    walk.predict(at.buffer, packed);
    sm90::end_products<1>(walk.output, update);
    sm90::hand_over(b.barrier<kLayout.free>(buffer));
    walk.store(scale, c, o);
    walk.ask(at.buffer, packed);
    sm90::scale_columns(walk.state, b.decay(at.buffer));
    walk.enter(at.buffer, b.rows_of(c + 1), packed);
  }
}

/// A left operand in registers that is the sum of Parts 16-bit numbers.
template <int Depth, int Parts>
struct Summands {
  sm90::FragmentA<DTYPE, Depth> first;

  WYVERN_DEVICE explicit Summands(const sm90::Accumulator<Depth>& from) : first(from) {}
  template <int N, class Right>
  WYVERN_DEVICE void multiply(sm90::Accumulator<N>& d, const Right& right, bool accumulate) const {
    sm90::multiply(d, first, right, accumulate);
  }
  WYVERN_DEVICE void hold() { first.hold(); }
};
template <int Depth>
struct Summands<Depth, 2> : Summands<Depth, 1> {
  sm90::FragmentA<DTYPE, Depth> rest;

  WYVERN_DEVICE explicit Summands(const sm90::Accumulator<Depth>& from)
      : Summands<Depth, 1>(from), rest(from, this->first) {}
  template <int N, class Right>
  WYVERN_DEVICE void multiply(sm90::Accumulator<N>& d, const Right& right, bool accumulate) const {
    Summands<Depth, 1>::multiply(d, right, accumulate);
    sm90::multiply(d, rest, right, true);
  }
  WYVERN_DEVICE void hold() {
    Summands<Depth, 1>::hold();
    rest.hold();
  }
};

/// The same for the state alone, which enters products as a sum of Parts 16-bit numbers, as V'
/// does: where chunks take away most of what there is and add nothing, what is rounded off would
/// outlast the rest.
template <int Parts>
WYVERN_DEVICE void walk_state_alone(StateWalk& walk) {
  const Block& b = walk.b;
  const int chunks = b.chunks();
  Position at;
#pragma unroll 1
  for (int c = 0; c < chunks; ++c, at.advance()) {
    const int buffer = at.buffer;
    {
      Summands<K, Parts> packed(walk.state);
      walk.await(at);
      sm90::begin_products(walk.values);
      packed.multiply(walk.values, sm90::rows_of(b.tile_of<kLayout.w>(buffer)), false);
      sm90::wgmma_commit();
      sm90::end_products<0>(walk.values, packed);
    }
    sm90::scale_columns(walk.state, b.decay(buffer));
    walk.find_values(buffer, b.rows_of(c));
    Summands<kChunk, Parts> update(walk.values);
    sm90::begin_products(walk.state);
    update.multiply(walk.state, sm90::columns_of(b.tile_of<kLayout.kg>(buffer)), true);
    sm90::wgmma_commit();
    sm90::end_products<0>(walk.state, update);
    sm90::hand_over(b.barrier<kLayout.free>(buffer));
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
    for (int i = 0; i < kStages; ++i) {
      sm90::barrier_init(b.barrier<kLayout.loaded>(i), 1);
      sm90::barrier_init(b.barrier<kLayout.ready>(i), 32);
      sm90::barrier_init(b.barrier<kLayout.free>(i), 128 * kStates);
    }
    sm90::fence_barrier_init();
  }
  sync_block();
}
