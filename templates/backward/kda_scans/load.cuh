// kda_scans' producers: one warp loads the tiles of prepared chunks, another one the decays of
// channels.
#pragma once

#include "backward/kda_scans/layout.hpp"
#include "device/cuda/sm90/barrier.cuh"
#include "device/cuda/sm90/scan_scheduler.cuh"
#include "device/cuda/sm90/tile.cuh"
#include "device/cuda/sm90/tma.cuh"

using kda_scans::kColumns;
using kda_scans::kRows;

constexpr bool kOutput = Scheduler::kOutput;
constexpr kda_scans::HopperLayout<Spec> kLayout{Spec{}, kOutput};
constexpr int kStages = num_stages;
constexpr int kConsumers = kLayout.consumers;
constexpr int kThreads = 128 * (1 + kConsumers);

using KeyTile = sm90::SwizzledTile<DTYPE, kRows, K>;
using ValueTile = sm90::SwizzledTile<DTYPE, kRows, BV>;
using SquareTile = sm90::SwizzledTile<DTYPE, kRows, kRows>;
using StateTile = sm90::SwizzledTile<DTYPE, kColumns, K>;
/// The pipeline stage of a step's chunk, and its phase.
using Position = sm90::Pipeline<kStages>::Position;

/// A block's work, and where its tiles, decays and barriers are in shared memory.
template <bool Reverse>
struct Block : sm90::ScanSteps<kRows, Reverse> {
  using sm90::ScanWork::shared;

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
  /// The block: registers have room for it.
  WYVERN_DEVICE const Block& recall() const { return *this; }
};

/// Starts the loads of a step's tiles, by one thread.
template <class B, class Params>
WYVERN_DEVICE void load_tiles(const B& b, int step, int stage, const Params& p,
                              sm90::Barrier* barrier) {
  const int row = b.place(step) * 3 * kRows;
  const int square = b.place(step) * 2 * kRows;
  sm90::tensor_load(b.leaving(stage).data, p.rows_map, {0, row + kRows, 0, 0}, barrier);
  sm90::tensor_load(b.entering(stage).data, p.rows_map, {0, row, 0, 0}, barrier);
  sm90::tensor_load(b.values(stage).data, sm90::values_map<B::kReverse>(p),
                    {0, static_cast<int>(b.first_row(step)), b.tile * (BV / 64), b.head}, barrier);
  sm90::tensor_load(b.inverse(stage).data, p.squares_map, {0, square, 0, 0}, barrier);
  if constexpr (B::kReverse) {
    sm90::tensor_load(b.scores(stage).data, p.squares_map, {0, square + kRows, 0, 0}, barrier);
    sm90::tensor_load(b.queries(stage).data, p.rows_map, {0, row + 2 * kRows, 0, 0}, barrier);
  }
}

/// Loads the tiles of all chunks, by one warp. Past a sequence's end the rows of v or do are the
/// next sequence's and are cleared; other tiles have zeros there.
template <class B, class Params>
WYVERN_DEVICE void load_chunks(const B& b, const Params& p) {
  constexpr int kSquareBytes = SquareTile::kBytes * (B::kReverse ? 2 : 1);
  constexpr int kBytes = KeyTile::kBytes * (B::kReverse ? 3 : 2) + ValueTile::kBytes + kSquareBytes;
  Position at;
#pragma unroll 1
  for (int step = 0; step < b.chunks; ++step, at.advance()) {
    const int stage = at.buffer;
    const int rows = b.rows(step);
    sm90::barrier_wait(b.template barrier<kLayout.empty>(stage), at.parity ^ 1U);
    // Only a sequence's last chunk may have fewer rows.
    sm90::load_rows<kRows>(
        rows, b.template barrier<kLayout.tiles_full>(stage),
        b.template barrier<kLayout.tail_full>(0), 0, kBytes,
        [&](sm90::Barrier* barrier) { load_tiles(b, step, stage, p, barrier); },
        [&] { sm90::clear_rows(b.values(stage), rows); });
  }
}

/// Loads the decays of all chunks, each a chunk ahead, by one warp. `decay` is a tensor [NT, HV,
/// K].
template <class B>
WYVERN_DEVICE void load_decays(const B& b, const float* decay) {
  constexpr int kChannels = K / 32;  // of a lane
  const int first = lane_index() * kChannels;
  const auto read = [&](int step) {
    return load<kChannels>(decay + int64{b.place(step)} * K + first);
  };
  auto next = read(0);
  Position at;
#pragma unroll 1
  for (int step = 0; step < b.chunks; ++step, at.advance()) {
    const auto now = next;
    if (step + 1 < b.chunks) next = read(step + 1);
    sm90::barrier_wait(b.template barrier<kLayout.empty>(at.buffer), at.parity ^ 1U);
#pragma unroll
    for (int i = 0; i < kChannels; ++i)
      b.decay(at.buffer)[sm90::channel_place(K, first + i)] = now.at[i];
    sm90::barrier_arrive(b.template barrier<kLayout.decay_full>(at.buffer));
  }
}
