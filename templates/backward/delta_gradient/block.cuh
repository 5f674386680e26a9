// A block of delta_gradient.hopper: what it looks after, what lies in its shared memory, and how
// its warps hand that on.
#pragma once

#include "backward/delta_gradient/layout.hpp"
#include "device/cuda/sm90/barrier.cuh"
#include "device/cuda/sm90/decay.cuh"
#include "device/cuda/sm90/register_tile.cuh"

using delta_gradient::kChannels;
using delta_gradient::kRows;
using delta_gradient::kStages;

constexpr delta_gradient::HopperLayout<Spec> kLayout{Spec{}};
constexpr int kGroup = HV / H;  ///< value heads of a key head
constexpr int kSlices = K / kChannels;
constexpr int kPartRows = kLayout.part_rows;
constexpr int kParts = V / kPartRows;  ///< of a slice of states
constexpr int kRowStages = kLayout.row_stages;
constexpr int kPartStages = kLayout.part_stages;
constexpr int kThreads = 384;
constexpr bool kNorms = QK_L2NORM;

using Square = sm90::Accumulator<kRows>;
using SquareTile = sm90::SwizzledTile<DTYPE, kRows, kRows>;
using KeyTile = sm90::SwizzledTile<DTYPE, kRows, K>;
using ValueTile = sm90::SwizzledTile<DTYPE, kRows, V>;
using StateTile = sm90::SwizzledTile<DTYPE, kPartRows, kChannels>;
using sm90::RowPair;

/// How many items and value heads a warp has done, from which follows where it is in each pipeline.
struct Turn {
  uint32 heads = 0, items = 0;

  template <int Stages>
  using Position = typename sm90::Pipeline<Stages>::Position;
  template <int Stages>
  WYVERN_DEVICE static Position<Stages> at(uint32 count) {
    return {static_cast<int>(count % Stages), count / Stages % 2};
  }
  WYVERN_DEVICE Position<kRowStages> rows() const { return at<kRowStages>(heads); }
  WYVERN_DEVICE Position<kStages> factors() const { return at<kStages>(heads); }
  WYVERN_DEVICE Position<kPartStages> part(int slice, int part) const {
    return at<kPartStages>((heads * kSlices + static_cast<uint32>(slice)) * kParts +
                           static_cast<uint32>(part));
  }
  /// Where a pipeline of one stage has something for each value head, for each item.
  WYVERN_DEVICE Position<1> only() const { return at<1>(heads); }
  WYVERN_DEVICE Position<1> item() const { return at<1>(items); }
};

/// A chunk and a key head.
struct Item {
  int token, rows;  ///< the chunk's
  int slot, head;

  WYVERN_DEVICE bool is_full() const { return rows == kRows; }
};

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
    return tile<kLayout.state>(stage * kLayout.parts);
  }
  WYVERN_DEVICE StateTile dstate(int stage) const {
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
    return *reinterpret_cast<Item*>(array_at<kLayout.item>(shared));
  }
  WYVERN_DEVICE sm90::Barrier* landed() const { return sm90::barriers_at<kLayout.landed>(shared); }

  /// By one thread; a block barrier must follow.
  WYVERN_DEVICE void init_barriers() const {
    constexpr int kConsumers = 256;
    keys().init(1, kConsumers + (kNorms ? 64 : 0));
    rows().init(1, kConsumers);
    states().init(1, kConsumers + (SCALAR_GATE ? 96 : 0));
    scales().init(32, 32);
    scores().init(128, 128);
    sums().init(kConsumers, 32);
    sm90::barrier_init(landed(), 1);
    sm90::fence_barrier_init();
  }
};

/// A block's items in order. Neighbouring blocks have neighbouring heads of the same tokens.
class Items {
 public:
  WYVERN_DEVICE Items(const Extents& e, const int32* seq_offsets, const int32* chunk_index)
      : e_(e), seq_offsets_(seq_offsets), chunk_index_(chunk_index) {}

  /// Goes on to the next item, by a whole warp; false where there is none. An unused slot of a
  /// packed batch has no rows.
  WYVERN_DEVICE bool next(Item& item) {
    const int all = static_cast<int>(e_.NT) * H;
    const int at = block_index() + count_ * block_count();
    if (at >= all) return false;
    item.slot = at / H;
    item.head = at % H;
    if constexpr (VARLEN) {
      // Tables are read for 32 items at once, a lane each.
      if (count_ % 32 == 0) {
        const int ahead = at + lane_index() * block_count();
        if (ahead < all) read(ahead / H);
      }
      item.token = from_lane(token_, count_ % 32);
      item.rows = from_lane(rows_, count_ % 32);
    } else {
      read(item.slot);
      item.token = token_;
      item.rows = rows_;
    }
    ++count_;
    return true;
  }
  /// The same, to the next that has rows.
  WYVERN_DEVICE bool next_used(Item& item) {
    while (next(item))
      if (!VARLEN || item.rows > 0) return true;
    return false;
  }

 private:
  WYVERN_DEVICE void read(int slot) {
    const Chunk chunk = locate_chunk<VARLEN, kRows>(slot, e_, seq_offsets_, chunk_index_);
    token_ = static_cast<int>(chunk.token);
    rows_ = chunk.rows;
  }
  WYVERN_DEVICE static int from_lane(int x, int lane) {
    const float moved = shuffle(bits_float(static_cast<uint32>(x)), lane);
    return sm90::uniform(static_cast<int>(float_bits(moved)));
  }

  const Extents& e_;
  const int32* seq_offsets_;
  const int32* chunk_index_;
  int count_ = 0;
  int token_ = 0, rows_ = 0;  ///< of this lane's item
};
