// How a block of kda_scans.hopper walks through the chunks of a sequence, forward with a state S or
// backwards with its gradient dS', when kda_bwd_prepare has made all of a chunk that needs neither.
// Warp 0 loads tiles, warp 1 the decays of channels, and each consumer warpgroup has 64 columns of
// V of the state, transposed, in fp32 registers.
#pragma once

#include "backward/kda_scans/layout.hpp"
#include "device/cuda/chunk.cuh"
#include "device/cuda/mma.cuh"
#include "device/cuda/sm90/barrier.cuh"
#include "device/cuda/sm90/register_tile.cuh"
#include "device/cuda/sm90/state.cuh"
#include "device/cuda/sm90/tma.cuh"
#include "device/cuda/sm90/transposed_rows.cuh"

using kda_scans::kColumns;
using kda_scans::kRows;

constexpr kda_scans::HopperLayout<Spec> kLayout{Spec{}};
constexpr int kStages = num_stages;
constexpr int kConsumers = kLayout.consumers;
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kTilesV = V / BV;

/// Registers of a thread of warpgroup 0 and of a consumer. At launch all have as many.
constexpr int kFirstRegisters = 40;
constexpr int kStateRegisters = kConsumers == 1 ? 240 : 232;
static_assert(kFirstRegisters + kConsumers * kStateRegisters <=
              (1 + kConsumers) * (65536 / kThreads / 8 * 8));

using KeyTile = sm90::SwizzledTile<DTYPE, kRows, K>;
using ValueTile = sm90::SwizzledTile<DTYPE, kRows, BV>;
using SquareTile = sm90::SwizzledTile<DTYPE, kRows, kRows>;
using StateTile = sm90::SwizzledTile<DTYPE, kColumns, K>;
/// A chunk's pipeline stage and its parity, as the walk goes on.
using Position = sm90::Pipeline<kStages>::Position;

/// What all warps of a block know. A reverse walk starts at the last chunk.
template <bool Reverse>
struct Block {
  static constexpr bool kReverse = Reverse;
  unsigned char* shared;
  int64 token;  ///< of the first row
  int64 slot;   ///< of the first chunk
  int tokens, chunks;
  int head, tile;
  int heads;  ///< value heads

  template <sm90::SwizzledPlace Place>
  WYVERN_DEVICE sm90::SwizzledTile<DTYPE, Place.rows, Place.cols> tile_of(int stage) const {
    return {shared + Place.offset + stage * kLayout.stage};
  }
  WYVERN_DEVICE KeyTile entering(int stage) const { return tile_of<kLayout.entering>(stage); }
  WYVERN_DEVICE KeyTile leaving(int stage) const { return tile_of<kLayout.leaving>(stage); }
  WYVERN_DEVICE KeyTile queries(int stage) const { return tile_of<kLayout.queries>(stage); }
  WYVERN_DEVICE ValueTile values(int stage) const { return tile_of<kLayout.values>(stage); }
  WYVERN_DEVICE SquareTile values(int stage, int panel) const {
    return {values(stage).data + panel * SquareTile::kBytes};
  }
  WYVERN_DEVICE SquareTile inverse(int stage) const { return tile_of<kLayout.inverse>(stage); }
  WYVERN_DEVICE SquareTile scores(int stage) const { return tile_of<kLayout.scores>(stage); }
  WYVERN_DEVICE StateTile staged_state(int consumer) const {
    return {shared + kLayout.state.offset + consumer * StateTile::kBytes};
  }
  WYVERN_DEVICE float* decay(int stage) const {
    return array_at<kLayout.decay>(shared) + stage * kLayout.decays;
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

// ---- warps 0 and 1: tiles and decays ------------------------------------------------------------

struct ChunkMaps {
  const TensorMap &rows, &squares, &values;
};

/// By one warp. What follows a sequence's end among values is the next sequence's: whatever it
/// holds must not come in. Other tiles have zeros there.
template <class B>
WYVERN_DEVICE void load_chunks(const B& b, const ChunkMaps& maps) {
  constexpr int kSquareBytes = SquareTile::kBytes * (B::kReverse ? 2 : 1);
  constexpr int kBytes = KeyTile::kBytes * (B::kReverse ? 3 : 2) + ValueTile::kBytes + kSquareBytes;
  Position at;
#pragma unroll 1
  for (int turn = 0; turn < b.chunks; ++turn, at.advance()) {
    const int stage = at.buffer;
    const int rows = b.rows(turn);
    sm90::Barrier* const loaded = b.template barrier<kLayout.loaded>(stage);
    // A walk has one chunk that is not full.
    sm90::Barrier* const barrier = rows < kRows ? b.template barrier<kLayout.landed>(0) : loaded;
    sm90::barrier_wait(b.template barrier<kLayout.free>(stage), at.parity ^ 1U);
    if (lane_index() == 0) {
      const int row = b.place(turn) * 3 * kRows;
      const int square = b.place(turn) * 2 * kRows;
      sm90::barrier_arrive_expect(barrier, kBytes);
      sm90::tensor_load(b.leaving(stage).data, maps.rows, {0, row + kRows, 0, 0}, barrier);
      sm90::tensor_load(b.entering(stage).data, maps.rows, {0, row, 0, 0}, barrier);
      sm90::tensor_load(b.values(stage).data, maps.values,
                        {0, static_cast<int>(b.first_row(turn)), b.tile * (BV / 64), b.head},
                        barrier);
      sm90::tensor_load(b.inverse(stage).data, maps.squares, {0, square, 0, 0}, barrier);
      if constexpr (B::kReverse) {
        sm90::tensor_load(b.scores(stage).data, maps.squares, {0, square + kRows, 0, 0}, barrier);
        sm90::tensor_load(b.queries(stage).data, maps.rows, {0, row + 2 * kRows, 0, 0}, barrier);
      }
    }
    if (rows == kRows) continue;
    sm90::barrier_wait(barrier, 0);
    sm90::clear_rows(b.values(stage), rows);
    sm90::fence_proxy_async();
    sync_warp();
    if (lane_index() == 0) sm90::barrier_arrive(loaded);
  }
}

/// By one warp, each chunk's a chunk ahead. `decay` is a tensor [NT, HV, K].
template <class B>
WYVERN_DEVICE void load_decays(const B& b, const float* decay) {
  constexpr int kChannels = K / 32;  // of a lane
  const int first = lane_index() * kChannels;
  const auto read = [&](int turn) {
    return load<kChannels>(decay + int64{b.place(turn)} * K + first);
  };
  auto next = read(0);
  Position at;
#pragma unroll 1
  for (int turn = 0; turn < b.chunks; ++turn, at.advance()) {
    const auto now = next;
    if (turn + 1 < b.chunks) next = read(turn + 1);
    sm90::barrier_wait(b.template barrier<kLayout.free>(at.buffer), at.parity ^ 1U);
#pragma unroll
    for (int i = 0; i < kChannels; ++i)
      b.decay(at.buffer)[sm90::channel_place(K, first + i)] = now.at[i];
    sm90::barrier_arrive(b.template barrier<kLayout.ready>(at.buffer));
  }
}

// ---- consumers ----------------------------------------------------------------------------------

using Transposed = sm90::Accumulator<K>;
using Columns = sm90::Accumulator<kRows>;  ///< of V, one for each row of a chunk
using StateFragment = sm90::FragmentA<DTYPE, K>;
using RowFragment = sm90::FragmentA<DTYPE, kRows>;

/// x += what was rounded.
WYVERN_DEVICE void add(Columns& x, const RowFragment& rounded) {
#pragma unroll
  for (int i = 0; i < Columns::kCount; i += 2) {
    const uint32 pair = rounded.x[i / 8][i % 8 / 2];
    x.x[i] += sm90::low_half<DTYPE>(pair);
    x.x[i + 1] += sm90::high_half<DTYPE>(pair);
  }
}

/// What both walks do alike. The first `consumer` of a block has its first 64 columns.
template <class B>
struct Consumer {
  const B& b;
  int consumer;
  Transposed state;
  Columns x;

  WYVERN_DEVICE int panel() const { return b.tile * (BV / 64) + consumer; }

  /// Calls act(offset, x) for each element and its place in the caller's state.
  template <bool VFirst, class Act>
  WYVERN_DEVICE void visit(Act&& act) {
    sm90::visit_state<V, VFirst>(state, panel() * kColumns, act);
  }
  WYVERN_DEVICE void await(const Position& at) const {
    sm90::barrier_wait(b.template barrier<kLayout.ready>(at.buffer), at.parity);
    sm90::barrier_wait(b.template barrier<kLayout.loaded>(at.buffer), at.parity);
  }
  WYVERN_DEVICE void sync() const { sm90::sync_named(1 + consumer, 128); }
  WYVERN_DEVICE void decay(int stage) { sm90::scale_columns(state, b.decay(stage)); }

  /// Until what was staged before has been read.
  WYVERN_DEVICE void wait_staging() const {
    if (thread_index() % 128 == 0) sm90::bulk_wait_read<0>();
    sync();
  }
  /// Starts x = state keys^T, the state rounded, which leaves for memory meanwhile.
  WYVERN_DEVICE void start_rows(const StateFragment& packed, const KeyTile& keys, int turn,
                                const TensorMap& map) {
    sm90::start_product(x, packed, sm90::rows_of(keys));
    wait_staging();
    sm90::store_fragment(b.staged_state(consumer), packed);
    sm90::fence_proxy_async();
    sync();
    if (thread_index() % 128 != 0) return;
    sm90::tensor_store(map, {0, panel() * kColumns, 0, b.place(turn)},
                       b.staged_state(consumer).data);
    sm90::bulk_commit();
  }
  /// Where the rows are staged that leave after the state.
  WYVERN_DEVICE SquareTile staged_rows() const { return {b.staged_state(consumer).data}; }
  WYVERN_DEVICE void stage_rows(const RowFragment& rows) const {
    wait_staging();
    sm90::store_transposed(staged_rows(), rows);
    sm90::fence_proxy_async();
  }
  WYVERN_DEVICE void leave(int stage) const {
    sm90::hand_over(b.template barrier<kLayout.free>(stage));
  }
};

/// S, and Z = T (V - a K S).
struct Forward : Consumer<Block<false>> {
  /// Rows of Z: those behind a sequence's end are 0, for so are their keys and values.
  WYVERN_DEVICE void send_rows(int turn, const TensorMap& z_map) const {
    sync();
    if (thread_index() % 128 != 0) return;
    sm90::tensor_store(z_map, {0, b.place(turn) * kRows, panel(), 0}, staged_rows().data);
    sm90::bulk_commit();
  }

  WYVERN_DEVICE void walk(const TensorMap& state_map, const TensorMap& z_map) {
    Position at;
#pragma unroll 1
    for (int turn = 0; turn < b.chunks; ++turn, at.advance()) {
      const int stage = at.buffer;
      await(at);
      {
        StateFragment packed(state);
        start_rows(packed, b.entering(stage), turn, state_map);
        RowFragment values;
        sm90::load_transposed(values, b.values(stage, consumer));
        sm90::end_products<0>(x, packed);
        add(x, values);
      }
      RowFragment u(x);
      sm90::start_product(x, u, sm90::rows_of(b.inverse(stage)), true);
      decay(stage);
      sm90::end_products<0>(x, u);
      RowFragment rows(x);
      stage_rows(rows);
      sm90::start_product(state, rows, sm90::columns_of(b.leaving(stage)), true);
      send_rows(turn, z_map);
      sm90::end_products<0>(state, rows);
      leave(stage);
    }
  }
};

/// dS', and dV = T^T (P^T dO + d b (K dS')).
struct Reverse : Consumer<Block<true>> {
  /// Rounded dO^T P of the chunk in `at`, which needs no state.
  WYVERN_DEVICE RowFragment own_part(const Position& at) {
    await(at);
    RowFragment gradients;
    sm90::load_transposed(gradients, b.values(at.buffer, consumer));
    Columns y;
    sm90::start_product(y, gradients, sm90::columns_of(b.scores(at.buffer)));
    sm90::end_products<0>(y, gradients);
    return RowFragment(y);
  }

  WYVERN_DEVICE void walk(const TensorMap& state_map, const TensorMap& dv_map, DTYPE* dv) {
    Position at;
    RowFragment own = own_part(at);
#pragma unroll 1
    for (int turn = 0; turn < b.chunks; ++turn) {
      const int stage = at.buffer;
      {
        StateFragment packed(state);
        start_rows(packed, b.leaving(stage), turn, state_map);
        decay(stage);
        sm90::end_products<0>(x, packed);
        add(x, own);
      }
      RowFragment u(x);
      sm90::start_product(x, u, sm90::columns_of(b.inverse(stage)), true);
      RowFragment gradients;
      sm90::load_transposed(gradients, b.values(stage, consumer));
      sm90::end_products<0>(x, u);
      RowFragment rows(x);
      stage_rows(rows);
      sm90::begin_products(state);
      sm90::multiply(state, gradients, sm90::columns_of(b.queries(stage)), true);
      sm90::multiply(state, rows, sm90::columns_of(b.entering(stage)), true);
      sm90::wgmma_commit();
      sync();
      sm90::store_rows(dv_map, {dv, int64{b.heads} * V}, staged_rows(), b.first_row(turn),
                       b.rows(turn), panel(), b.head, V);
      at.advance();
      if (turn + 1 < b.chunks) own = own_part(at);
      sm90::end_products<0>(state, gradients, rows);
      leave(stage);
    }
  }
};

// ---- the block ----------------------------------------------------------------------------------

/// All of a block's work; consume(b, consumer) is that of a warpgroup with a state.
template <class B, class Consume>
WYVERN_DEVICE void run_block(const B& b, const ChunkMaps& maps, const float* decay,
                             Consume&& consume) {
  if (thread_index() == 0) {
    for (int i = 0; i < kStages; ++i) {
      sm90::barrier_init(b.template barrier<kLayout.loaded>(i), 1);
      sm90::barrier_init(b.template barrier<kLayout.ready>(i), 32);
      sm90::barrier_init(b.template barrier<kLayout.free>(i), 128 * kConsumers);
    }
    sm90::barrier_init(b.template barrier<kLayout.landed>(0), 1);
    sm90::fence_barrier_init();
  }
  sync_block();
  const int warp = sm90::uniform(warp_index());
  if (warp < 4) {
    sm90::lower_registers<kFirstRegisters>();
    if (b.chunks == 0) return;
    if (warp == 0) load_chunks(b, maps);
    if (warp == 1) load_decays(b, decay);
    return;
  }
  sm90::raise_registers<kStateRegisters>();
  consume(b, warp / 4 - 1);
  if (thread_index() % 128 == 0) sm90::bulk_wait_read<0>();
}
