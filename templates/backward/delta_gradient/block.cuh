// A block of delta_gradient: its items, where its tiles, factors and barriers are in shared memory,
// and the position of a warp in each pipeline. `kKept`, a global constant set before the include,
// says whether states and values are those that the forward pass has kept: states have K first, and
// V' = b Z in rows of tokens is in the place of Z, so that no factor of a column includes b.
#pragma once

#include "backward/delta_gradient/layout.hpp"
#include "device/cuda/sm90/barrier.cuh"
#include "device/cuda/sm90/chunk_items.cuh"
#include "device/cuda/sm90/decay.cuh"
#include "device/cuda/sm90/register_tile.cuh"
#include "device/cuda/sm90/slice_store.cuh"

using delta_gradient::kChannels;
using delta_gradient::kRows;
using delta_gradient::kStages;

constexpr delta_gradient::HopperLayout<Spec> kLayout{Spec{}};
constexpr int kSlices = K / kChannels;
constexpr int kBand = kLayout.band;
constexpr int kBands = V / kBand;       ///< of a value head
constexpr int kTurns = GROUP * kBands;  ///< bands of an item: of each of its value heads in turn
constexpr int kPartRows = kLayout.part_rows;
constexpr int kParts = kBand / kPartRows;  ///< of a slice of states
constexpr int kRowStages = kLayout.row_stages;
constexpr int kPartStages = kLayout.part_stages;
constexpr int kThreads = 384;
constexpr bool kNorms = QK_L2NORM;

using Square = sm90::Accumulator<kRows>;
using SquareTile = sm90::SwizzledTile<DTYPE, kRows, kRows>;
using KeyTile = sm90::SwizzledTile<DTYPE, kRows, K>;
using ValueTile = sm90::SwizzledTile<DTYPE, kRows, kBand>;
using DStateTile = sm90::SwizzledTile<DTYPE, kPartRows, kChannels>;
/// With K first the rows are channels.
using StateTile =
    sm90::SwizzledTile<DTYPE, kKept ? kChannels : kPartRows, kKept ? kPartRows : kChannels>;
using sm90::RowPair;

/// How many items and bands a warp has done: from them follows its position in each pipeline.
struct Turn {
  uint32 bands = 0, items = 0;

  template <int Stages>
  using Position = typename sm90::Pipeline<Stages>::Position;
  template <int Stages>
  WYVERN_DEVICE static Position<Stages> at(uint32 count) {
    return {static_cast<int>(count % Stages), count / Stages % 2};
  }
  WYVERN_DEVICE Position<kRowStages> rows() const { return at<kRowStages>(bands); }
  WYVERN_DEVICE Position<kStages> factors() const { return at<kStages>(bands); }
  WYVERN_DEVICE Position<kPartStages> part(int slice, int part) const {
    return at<kPartStages>((bands * kSlices + static_cast<uint32>(slice)) * kParts +
                           static_cast<uint32>(part));
  }
  /// In pipelines of one stage, of each band and of each item.
  WYVERN_DEVICE Position<1> only() const { return at<1>(bands); }
  WYVERN_DEVICE Position<1> item() const { return at<1>(items); }
};

using Item = sm90::ChunkItem;
using Items = sm90::ChunkItems<kRows, VARLEN>;

struct Block {
  unsigned char* shared;

  template <sm90::SwizzledPlace Place>
  WYVERN_DEVICE auto tile(int offset = 0) const {
    return sm90::swizzled_at<Place>(shared + offset);
  }
  WYVERN_DEVICE KeyTile q() const { return tile<kLayout.q>(); }
  WYVERN_DEVICE KeyTile k() const { return tile<kLayout.k>(); }
  /// Channels from 64 `slice`.
  WYVERN_DEVICE SquareTile q(int slice) const { return {q().data + slice * KeyTile::kPanelBytes}; }
  WYVERN_DEVICE SquareTile k(int slice) const { return {k().data + slice * KeyTile::kPanelBytes}; }
  WYVERN_DEVICE ValueTile dO(int stage) const { return tile<kLayout.dO>(stage * kLayout.tiles); }
  WYVERN_DEVICE ValueTile z(int stage) const { return tile<kLayout.z>(stage * kLayout.tiles); }
  WYVERN_DEVICE ValueTile dv(int stage) const { return tile<kLayout.dv>(stage * kLayout.tiles); }
  WYVERN_DEVICE StateTile state(int stage) const {
    return {shared + kLayout.state.offset + stage * kLayout.parts};
  }
  WYVERN_DEVICE DStateTile dstate(int stage) const {
    return tile<kLayout.dstate>(stage * kLayout.parts);
  }
  WYVERN_DEVICE SquareTile F() const { return tile<kLayout.F>(); }
  WYVERN_DEVICE SquareTile M() const { return tile<kLayout.M>(); }

  template <ArrayPlace Place>
  WYVERN_DEVICE float* array() const {
    return array_at<Place>(shared);
  }
  template <ArrayPlace Place>
  WYVERN_DEVICE float* factors(int stage) const {
    return array_at<Place>(shared) + stage * kLayout.factors;
  }

  template <sm90::BarrierPlace Place>
  WYVERN_DEVICE sm90::Pipeline<Place.count / 2> pipeline() const {
    return {sm90::barriers_at<Place>(shared)};
  }
  WYVERN_DEVICE auto keys() const { return pipeline<kLayout.keys>(); }      ///< q and k
  WYVERN_DEVICE auto rows() const { return pipeline<kLayout.rows>(); }      ///< dO, Z, dV
  WYVERN_DEVICE auto states() const { return pipeline<kLayout.states>(); }  ///< slices
  WYVERN_DEVICE auto scales() const { return pipeline<kLayout.scales>(); }  ///< factors of rows
  WYVERN_DEVICE auto scores() const { return pipeline<kLayout.scores>(); }  ///< F and o
  WYVERN_DEVICE auto sums() const { return pipeline<kLayout.sums>(); }      ///< sums of rows
  /// The item that q and k are of.
  WYVERN_DEVICE Item& item() const {
    static_assert(sizeof(Item) <= 4 * kLayout.item.count);
    return *reinterpret_cast<Item*>(array_at<kLayout.item>(shared));
  }
  /// Full barrier of the tiles of a chunk with fewer rows.
  WYVERN_DEVICE sm90::Barrier* tail_full() const {
    return sm90::barriers_at<kLayout.tail_full>(shared);
  }

  /// By one thread; a block barrier must follow.
  WYVERN_DEVICE void init_barriers() const {
    constexpr int kConsumers = 256;
    keys().init(32, kConsumers);
    rows().init(32, kConsumers);
    states().init(1, kConsumers + (SCALAR_GATE ? 96 : 0));
    scales().init(32, 32);
    scores().init(128, 128);
    sums().init(kConsumers, 32);
    sm90::init_barriers<kLayout.tail_full>(shared, 1);
  }
};
