// delta_gradient's producer warp: it loads the tiles of chunks.
#pragma once

#include "backward/delta_gradient/block.cuh"
#include "device/cuda/sm90/tma.cuh"

struct LoadMaps {
  const TensorMap &q, &k, &dO, &z, &dv, &states, &dstates;
};

/// Part `i` of a band's states, slice by slice; `column` is the band's first of V.
WYVERN_DEVICE void load_part(const Block& b, const Turn& turn, int state, int column, int i,
                             const LoadMaps& maps) {
  const auto at = turn.part(0, i);
  b.states().wait_empty(at);
  if (lane_index() > 0) return;
  const int row = column + i % kParts * kPartRows;
  sm90::Barrier* const full = b.states().full(at);
  sm90::barrier_arrive_expect(full, StateTile::kBytes + DStateTile::kBytes);
  if constexpr (kKept)
    sm90::tensor_load(b.state(at.buffer).data, maps.states,
                      {0, i / kParts * kChannels, row / 64, state}, full);
  else
    sm90::tensor_load(b.state(at.buffer).data, maps.states, {0, row, i / kParts, state}, full);
  sm90::tensor_load(b.dstate(at.buffer).data, maps.dstates, {0, row, i / kParts, state}, full);
}

/// The tiles of an item's band `n`; with the first those of the key head too. These are loaded
/// after as many parts of states as there is room for: they wait for the whole item before. `tails`
/// counts loads of chunks with fewer rows.
WYVERN_DEVICE void load_band(const Block& b, const Turn& turn, const Item& item, int n,
                             uint32& tails, const LoadMaps& maps) {
  const int head = item.head * GROUP + n / kBands;
  const int state = item.place * GROUP + n / kBands;
  const int column = n % kBands * kBand;
  const int stage = turn.rows().buffer;
  b.rows().wait_empty(turn.rows());
  sm90::load_rows<kRows>(
      item.rows, b.rows().full(turn.rows()), b.tail_full(), tails % 2, 3 * ValueTile::kBytes,
      [&](sm90::Barrier* barrier) {
        sm90::tensor_load(b.dO(stage).data, maps.dO, {0, item.token, column / 64, head}, barrier);
        if constexpr (kKept)
          sm90::tensor_load(b.z(stage).data, maps.z, {0, item.token, column / 64, head}, barrier);
        else
          sm90::tensor_load(b.z(stage).data, maps.z, {0, 0, column / 64, state}, barrier);
        sm90::tensor_load(b.dv(stage).data, maps.dv, {0, item.token, column / 64, head}, barrier);
      },
      [&] {
        sm90::clear_rows(b.dO(stage), item.rows);
        if constexpr (kKept) sm90::clear_rows(b.z(stage), item.rows);
        sm90::clear_rows(b.dv(stage), item.rows);
      });
  if (item.rows < kRows) ++tails;
  int part = 0;
  for (; part < smaller(kSlices * kParts, kPartStages); ++part)
    load_part(b, turn, state, column, part, maps);
  if (n == 0) {
    b.keys().wait_empty(turn.item());
    if (lane_index() == 0) b.item() = item;
    sm90::load_rows<kRows>(
        item.rows, b.keys().full(turn.item()), b.tail_full(), tails % 2, 2 * KeyTile::kBytes,
        [&](sm90::Barrier* barrier) {
          sm90::tensor_load(b.q().data, maps.q, {0, item.token, 0, item.head}, barrier);
          sm90::tensor_load(b.k().data, maps.k, {0, item.token, 0, item.head}, barrier);
        },
        [&] {
          sm90::clear_rows(b.q(), item.rows);
          sm90::clear_rows(b.k(), item.rows);
        });
    if (item.rows < kRows) ++tails;
  }
#pragma unroll 1
  for (; part < kSlices * kParts; ++part) load_part(b, turn, state, column, part, maps);
}

WYVERN_DEVICE void load_items(const Block& b, Items items, const LoadMaps& maps) {
  Turn turn;
  Item item;
  uint32 tails = 0;
#pragma unroll 1
  for (; items.next_used(item); ++turn.items)
#pragma unroll 1
    for (int n = 0; n < kTurns; ++n, ++turn.bands) load_band(b, turn, item, n, tails, maps);
}
