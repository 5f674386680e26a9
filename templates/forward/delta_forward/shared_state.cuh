// The state as S, K x 64 columns of V, in the registers of a consumer warpgroup, and rounded in
// shared memory, where products read it.
#pragma once

#include "device/cuda/sm90/state.cuh"
#include "forward/delta_forward/output.cuh"

/// Accumulators of 64 rows of K of a state.
constexpr int kParts = K / 64;

using StateTile = sm90::SwizzledTile<DTYPE, K, kColumns>;

/// This lane's row of four 8 x 8 matrices, of this warp's rows from `first` and the columns from
/// 16 j: the 16 rows of the first eight columns, then of the next eight.
template <class TileType>
WYVERN_DEVICE DTYPE* matrices_of_rows(const TileType& tile, int first, int j) {
  // Recompute addresses to save registers.
  const int lane = sm90::opaque(lane_index());
  return tile.at(first + warp_index() % 4 * 16 + lane % 16, 16 * j + lane / 16 * 8);
}

/// Writes 64 rows from `first` of a tile, rounded.
template <class TileType>
WYVERN_DEVICE void write_rounded(const Square& x, const TileType& tile, int first = 0) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32 packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) packed[i] = pack<DTYPE>(x.x[8 * j + 2 * i], x.x[8 * j + 2 * i + 1]);
    sm90::store_matrix_x4(matrices_of_rows(tile, first, j), packed);
  }
}

/// A factor for each of this thread's two rows of a chunk.
struct TwoRows {
  float x[2];

  WYVERN_DEVICE explicit TwoRows(const float* from)
      : x{from[Square::row(0)], from[Square::row(2)]} {}
  /// For element i of a `Square`.
  WYVERN_DEVICE float of(int i) const { return x[i / 2 % 2]; }
};

/// The state, and a chunk's V' and its output from the state.
struct SharedState {
  const Block& b;
  int consumer;  ///< which 64 of the block's columns of V
  Square state[kParts];
  Square x, y;

  WYVERN_DEVICE StateTile rounded() const {
    return {b.shared + kLayout.state.offset + consumer * StateTile::kBytes};
  }
  WYVERN_DEVICE SquareTile update() const {
    return {b.shared + kLayout.update.offset + consumer * SquareTile::kBytes};
  }
  WYVERN_DEVICE int column() const { return b.tile * BV + consumer * kColumns; }

  /// Calls act(offset, x) for each element and its place in a state of Width columns.
  template <int Width, bool VFirst, class Act>
  WYVERN_DEVICE void visit(Act&& act) {
#pragma unroll
    for (int p = 0; p < kParts; ++p)
      sm90::visit_rows<K, Width, VFirst>(state[p], 64 * p, column(), act);
  }

  /// Stores the state times a factor to one of V columns.
  template <bool VFirst, class Element>
  WYVERN_DEVICE void store(float factor, Element* to) const {
    constexpr int kRowStep = VFirst ? 1 : V, kColumnStep = VFirst ? K : 1;
#pragma unroll
    for (int p = 0; p < kParts; ++p)
      sm90::store_accumulator<kRowStep, kColumnStep>(
          state[p], factor, to + 64 * p * kRowStep + column() * kColumnStep);
  }

  /// Among this warpgroup.
  WYVERN_DEVICE void sync() const { sync_named(1 + consumer, 128); }

  /// Makes this warpgroup's writes to shared memory visible to its products.
  WYVERN_DEVICE void publish() const {
    sm90::fence_proxy_async();
    sync();
  }

  /// Writes the rounded state, which no product may be reading.
  WYVERN_DEVICE void round_state() const {
#pragma unroll
    for (int p = 0; p < kParts; ++p) write_rounded(state[p], rounded(), 64 * p);
    publish();
  }

  /// Starts x = k S for the chunk in `at`.
  WYVERN_DEVICE void start(const Position& at) {
    sm90::start_product<K>(x, sm90::rows_of(b.keys(at.buffer)), sm90::columns_of(rounded()));
  }

  /// With x in flight and y free: computes x = V' and y = q S, and decays the state.
  WYVERN_DEVICE void compute_values(const Position& at, int chunk) {
    if constexpr (kQueries) {
      sm90::start_product<K>(y, sm90::rows_of(b.queries(at.buffer)), sm90::columns_of(rounded()));
    }
    sm90::Barrier* const prepared = b.barrier<kLayout.chunk_full>(chunk % kSlots);
    const uint32 parity = static_cast<uint32>(chunk / kSlots % 2);
    // With norms prep warpgroups complete the factors.
    if constexpr (QK_L2NORM)
      sm90::barrier_wait(prepared, parity);
    else
      sm90::barrier_wait(b.barrier<kLayout.factors_full>(at.buffer), at.parity);
    const SquareTile values = b.values(at.buffer, consumer);
    const TwoRows beta(b.factors<kLayout.beta>(at.buffer));
    const TwoRows erase(b.factors<kLayout.erase>(at.buffer));
    const float decay = array_at<kLayout.decay>(b.shared)[at.buffer];
    uint32 v[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) load_matrix_x4(v[j], matrices_of_rows(values, 0, j));
    if (!kQueries && b.zero_v) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (uint32& pair : v[j]) pair = 0;
    }
    sm90::end_products<kQueries ? 1 : 0>(x);
#pragma unroll
    for (int i = 0; i < Square::kCount; ++i) {
      const uint32 pair = v[i / 8][i / 2 % 4];
      const DTYPE value{static_cast<uint16>(i % 2 == 0 ? pair & 0xFFFFU : pair >> 16U)};
      x.x[i] = fused_multiply_add(erase.of(i), x.x[i], beta.of(i) * to_float(value));
    }
    // u, in v's place: each warp in its own rows.
    write_rounded(x, values);
    // The TMA store of the last output, in the place of the update, has read it.
    if (kQueries && thread_index() % 128 == 0) sm90::bulk_wait_read<0>();
    publish();
    if constexpr (!QK_L2NORM) sm90::barrier_wait(prepared, parity);
    sm90::start_product<kRows>(x, sm90::rows_of(b.inverse(chunk)), sm90::columns_of(values), true);
    const float factor = decay * room_of(b, at.buffer);
    if (SCALAR_GATE || (kMayOverflow && factor != 1.0f)) multiply_state(factor);
    sm90::end_products<0>(x);
    if constexpr (kQueries) sm90::pin(y.x);
  }

  WYVERN_DEVICE void multiply_state(float factor) {
#pragma unroll
    for (int p = 0; p < kParts; ++p)
#pragma unroll
      for (int i = 0; i < Square::kCount; ++i) state[p].x[i] *= factor;
  }

  /// Writes V' times its factors in the update to shared memory, of rows [begin, end) of the chunk.
  WYVERN_DEVICE void scale_values(const Position& at, int begin = 0, int end = kRows) const {
    const TwoRows rate(b.factors<kLayout.update_factor>(at.buffer));
    const float room = room_of(b, at.buffer);
    Square scaled;
#pragma unroll
    for (int i = 0; i < Square::kCount; ++i) {
      const int row = Square::row(i);
      scaled.x[i] = !kDivided || (begin <= row && row < end) ? x.x[i] * (room * rate.of(i)) : 0.0f;
    }
    write_rounded(scaled, update());
  }

  /// Starts the state's update by a chunk's V'.
  WYVERN_DEVICE void start_update(const Position& at) {
#pragma unroll
    for (int p = 0; p < kParts; ++p) sm90::begin_products(state[p]);
#pragma unroll
    for (int p = 0; p < kParts; ++p)
      sm90::multiply<kRows>(state[p], sm90::columns_of(b.keys(at.buffer), 64 * p),
                            sm90::columns_of(update()), true);
    sm90::wgmma_commit();
  }

  /// Waits for the state's update, with `Younger` groups of products after it, and writes the
  /// rounded state.
  template <int Younger>
  WYVERN_DEVICE void end_update(const Position& at) {
    sm90::end_products<Younger>(state[0]);
#pragma unroll
    for (int p = 1; p < kParts; ++p) sm90::pin(state[p].x);
    if (kMayOverflow && room_of(b, at.buffer) != 1.0f) multiply_state(1.0f / kRoom);
    round_state();
  }

  /// Where a checkpoint divides the chunk: updates the state by the rows in front of it, writes the
  /// checkpoint, decays the state to the chunk's end and returns those rows; else 0.
  template <class WriteCheckpoint>
  WYVERN_DEVICE int update_front(const Position& at, const WriteCheckpoint& write_checkpoint) {
    const int rows = sm90::uniform(checkpoint_of(b, at.buffer)[0]);
    if (rows == 0 || rows == kRows) return 0;
    scale_values(at, 0, rows);
    publish();
    start_update(at);
    sm90::end_products<0>(state[0]);
#pragma unroll
    for (int p = 1; p < kParts; ++p) sm90::pin(state[p].x);
    write_checkpoint(*this, checkpoint_of(b, at.buffer)[1], 1.0f / room_of(b, at.buffer));
    const float* const G = b.factors<kLayout.G>(at.buffer);
    multiply_state(exp2_fast(G[kRows - 1] - G[rows - 1]));
    // Until all warps are done with the rows in front.
    sync();
    return rows;
  }

  /// Updates the state by a chunk's V', writes it rounded, and starts the rest of the chunk's
  /// output. write_checkpoint(*this, row, factor) writes the state times a factor to a row of
  /// `checkpoints`.
  template <class WriteCheckpoint>
  WYVERN_DEVICE void update_and_output(const Position& at, int chunk,
                                       const WriteCheckpoint& write_checkpoint) {
    int front = 0;
    if constexpr (kDivided) front = update_front(at, write_checkpoint);
    const TwoRows factor(b.factors<kLayout.output_factor>(at.buffer));
    const SquareTile values = b.values(at.buffer, consumer);
    scale_values(at, front);
    // Until all warps are done with u.
    sync();
    write_rounded(x, values);
    publish();
    start_update(at);
#pragma unroll
    for (int i = 0; i < Square::kCount; ++i) y.x[i] *= factor.of(i);
    sm90::start_product<kRows>(y, sm90::rows_of(b.scores(chunk)), sm90::columns_of(values), true);
    end_update<1>(at);
    if constexpr (kCheckpoints)
      if (const int row = row_of_end(b, at.buffer); row >= 0) write_checkpoint(*this, row, 1.0f);
  }

  /// Stores a chunk's output when its products are done. Not by sm90::store_rows, with which a
  /// thread spills up to two numbers more.
  WYVERN_DEVICE void store(int chunk, const PlainOutput& output) const {
    const int thread = thread_index() % 128;
    const SquareTile tile = update();
    write_rounded(y, tile);
    publish();
    const int64 token = b.token + chunk * kRows;
    const int rows = b.rows(chunk);
    if (rows == kRows) {
      if (thread == 0) {
        sm90::tensor_store(output.map, {0, static_cast<int>(token), column() / kColumns, b.head},
                           tile.data);
        sm90::bulk_commit();
      }
      return;
    }
#pragma unroll 1
    for (int i = thread; i < rows * 8; i += 128)
      store_vector(output.rows.row(token + i / 8) + int64{b.head} * V + column() + i % 8 * 8,
                   load<8>(tile.at(i / 8, i % 8 * 8)));
  }
};

/// The consumer's mainloop.
template <class WriteCheckpoint>
WYVERN_DEVICE void mainloop(SharedState& state, const PlainOutput& output,
                            const WriteCheckpoint& write_checkpoint) {
  const Block& b = state.b;
  Position at;
  sm90::barrier_wait(b.barrier<kLayout.tiles_full>(at.buffer), at.parity);
  state.round_state();
  state.start(at);
  state.compute_values(at, 0);
#pragma unroll 1
  for (int c = 0; c < b.chunks; ++c) {
    state.update_and_output(at, c, write_checkpoint);
    sm90::Barrier* const empty = b.barrier<kLayout.tiles_empty>(at.buffer);
    at.advance();
    if (c + 1 == b.chunks) {
      sm90::end_products<0>(state.y);
      state.store(c, output);
      break;
    }
    sm90::barrier_wait(b.barrier<kLayout.tiles_full>(at.buffer), at.parity);
    state.start(at);
    sm90::end_products<1>(state.y);
    sm90::barrier_arrive(empty);
    sm90::barrier_arrive(b.barrier<kLayout.scores_empty>(c % kScoreSlots));
    if (c >= b.overlap) state.store(c, output);
    state.compute_values(at, c + 1);
  }
}

/// The mainloop of the state alone.
WYVERN_DEVICE void mainloop(SharedState& state) {
  const Block& b = state.b;
  Position at;
  state.round_state();
#pragma unroll 1
  for (int c = 0; c < b.chunks; ++c, at.advance()) {
    sm90::barrier_wait(b.barrier<kLayout.tiles_full>(at.buffer), at.parity);
    state.start(at);
    state.compute_values(at, c);
    sm90::barrier_arrive(b.barrier<kLayout.scores_empty>(c % kScoreSlots));
    state.scale_values(at);
    state.publish();
    state.start_update(at);
    state.end_update<0>(at);
    sm90::barrier_arrive(b.barrier<kLayout.tiles_empty>(at.buffer));
  }
}
