// A block of kda_gradient: its items, where its tiles, factors and barriers are in shared memory,
// and the position of a warp in each pipeline.
#pragma once

#include "backward/kda_gradient/layout.hpp"
#include "device/cuda/gate.cuh"
#include "device/cuda/sm90/barrier.cuh"
#include "device/cuda/sm90/chunk_items.cuh"
#include "device/cuda/sm90/decay.cuh"
#include "device/cuda/sm90/register_tile.cuh"
#include "device/cuda/sm90/slice.cuh"
#include "device/cuda/sm90/slice_store.cuh"

using kda_gradient::kAnchors;
using kda_gradient::kChannels;
using kda_gradient::kFactorStages;
using kda_gradient::kKeyStages;
using kda_gradient::kRowFloats;
using kda_gradient::kRows;

constexpr kda_gradient::HopperLayout<Spec> kLayout{Spec{}};
constexpr int kSlices = K / kChannels;  ///< at most two
constexpr int kGateStages = kLayout.gate_stages;
constexpr int kThreads = 512;
constexpr bool kNorms = QK_L2NORM;

/// With eight gates of at least -5, factors around the middle of 16 rows are at most 2^58. Other
/// gates may need anchors for four rows: they count as at least -24, since exp(-24) is nothing in
/// bf16; two of them are 2^70.
constexpr bool kMayBeSteep = !(GATE_IN_KERNEL && LOWER_BOUND);
constexpr float kSteep = 100.0f;  ///< log2
constexpr float kLeastGate = -24.0f;

using Square = sm90::Accumulator<kRows>;
using SquareTile = sm90::SwizzledTile<DTYPE, kRows, kRows>;
using ValueTile = sm90::SwizzledTile<DTYPE, kRows, V>;
using StateTile = sm90::SwizzledTile<DTYPE, V, kChannels>;
using GateTile = sm90::GateTile<G_DTYPE, kRows>;
using Item = sm90::ChunkItem;
using Items = sm90::ChunkItems<kRows, VARLEN>;
using sm90::RowPair;

/// How many items and slices a warp has done, from which follows where it is in each pipeline.
struct Turn {
  uint32 items = 0, slices = 0;

  template <int Stages>
  WYVERN_DEVICE static typename sm90::Pipeline<Stages>::Position at(uint32 count) {
    return {static_cast<int>(count % Stages), count / Stages % 2};
  }
  WYVERN_DEVICE auto item() const { return at<1>(items); }
  WYVERN_DEVICE auto factors() const { return at<kFactorStages>(items); }
  WYVERN_DEVICE auto slice() const { return at<1>(slices); }
  WYVERN_DEVICE auto keys() const { return at<kKeyStages>(slices); }
  WYVERN_DEVICE auto gates() const { return at<kGateStages>(slices); }
};

struct Block {
  unsigned char* shared;

  template <sm90::SwizzledPlace Place>
  WYVERN_DEVICE auto tile(int offset = 0) const {
    return sm90::swizzled_at<Place>(shared + offset);
  }
  WYVERN_DEVICE ValueTile dO() const { return tile<kLayout.dO>(); }
  WYVERN_DEVICE ValueTile z() const { return tile<kLayout.z>(); }
  WYVERN_DEVICE ValueTile dv() const { return tile<kLayout.dv>(); }
  WYVERN_DEVICE StateTile state() const { return tile<kLayout.state>(); }
  WYVERN_DEVICE StateTile dstate() const { return tile<kLayout.dstate>(); }
  WYVERN_DEVICE SquareTile q(int stage) const { return tile<kLayout.q>(stage * kLayout.keys); }
  WYVERN_DEVICE SquareTile k(int stage) const { return tile<kLayout.k>(stage * kLayout.keys); }
  WYVERN_DEVICE GateTile gates(int stage) const {
    return {shared + kLayout.gates.offset +
            stage * kRows * kChannels * static_cast<int>(sizeof(G_DTYPE))};
  }
  WYVERN_DEVICE SquareTile k_to() const { return tile<kLayout.k_to>(); }
  WYVERN_DEVICE SquareTile k_from() const { return tile<kLayout.k_from>(); }
  WYVERN_DEVICE SquareTile q_from() const { return tile<kLayout.q_from>(); }
  WYVERN_DEVICE SquareTile erase() const { return tile<kLayout.erase>(); }
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
  /// Two channels of a row of `decay` or of dG.
  template <ArrayPlace Place>
  WYVERN_DEVICE float* pair(int row, int channel) const {
    return array_at<Place>(shared) + row * kRowFloats + channel;
  }
  /// Two channels of the anchor of rows 4 i to 4 i + 3.
  WYVERN_DEVICE Float2 anchor(int i, int channel) const {
    return load<2>(array<kLayout.anchors>() + i * kChannels + channel);
  }
  /// Whether each four rows have an anchor of their own, or each sixteen.
  WYVERN_DEVICE bool is_steep() const {
    if constexpr (!kMayBeSteep) return false;
    const auto most = load<4>(array<kLayout.steepness>());
    return maximum(maximum(most.at[0], most.at[1]), maximum(most.at[2], most.at[3])) > kSteep;
  }

  template <sm90::BarrierPlace Place>
  WYVERN_DEVICE sm90::Pipeline<Place.count / 2> pipeline() const {
    return {sm90::barriers_at<Place>(shared)};
  }
  WYVERN_DEVICE auto rows() const { return pipeline<kLayout.rows>(); }      ///< dO, Z, dV
  WYVERN_DEVICE auto states() const { return pipeline<kLayout.states>(); }  ///< a slice
  WYVERN_DEVICE auto slices() const { return pipeline<kLayout.slices>(); }  ///< of q and k
  WYVERN_DEVICE auto given() const { return pipeline<kLayout.given>(); }    ///< a slice of gates
  WYVERN_DEVICE auto scales() const { return pipeline<kLayout.scales>(); }  ///< factors of rows
  WYVERN_DEVICE auto operands() const { return pipeline<kLayout.operands>(); }
  WYVERN_DEVICE auto scores() const { return pipeline<kLayout.scores>(); }  ///< F and o
  WYVERN_DEVICE auto dots() const { return pipeline<kLayout.dots>(); }      ///< the queries' dG
  WYVERN_DEVICE sm90::Barrier* summed() const { return sm90::barriers_at<kLayout.summed>(shared); }
  /// Full barrier of the rows of a chunk with fewer than 64.
  WYVERN_DEVICE sm90::Barrier* tail_full() const {
    return sm90::barriers_at<kLayout.tail_full>(shared);
  }
  /// The tile of the erase gate is free again.
  WYVERN_DEVICE sm90::Barrier* stored() const { return sm90::barriers_at<kLayout.stored>(shared); }

  /// By one thread; a block barrier must follow.
  WYVERN_DEVICE void init_barriers() const {
    rows().init(32, ERASE_WRITE ? 384 : 256);
    states().init(1, 384);
    slices().init(1, 256);
    given().init(1, 256);
    scales().init(128, 384);
    operands().init(128, 384);
    scores().init(128, 128);
    dots().init(128, 128);
    sm90::barrier_init(summed(), 128);
    sm90::barrier_init(tail_full(), 1);
    sm90::barrier_init(stored(), 128);
    sm90::fence_barrier_init();
  }
};

/// One slice stays a loop: merged with the loop over items it would spill.
WYVERN_DEVICE int slice_count() { return sm90::opaque(kSlices); }

using GateForm = sm90::GateForm<GATE_IN_KERNEL, HAS_A_LOG, LOWER_BOUND>;

/// dt_bias of this lane's two channels of a slice.
WYVERN_DEVICE Float2 bias_of(const float* dt_bias, int head, int slice) {
  if constexpr (!HAS_DT_BIAS) return {};
  return load<2>(dt_bias + head * K + slice * kChannels + lane_index() * 2);
}

/// Sums of Count numbers over lanes that differ in the bits from Bit down to Low, always in the
/// same order: each lane is left with two of them, x[0] and x[1]. Returns which the first is.
template <int Bit, int Low, int Count>
WYVERN_DEVICE int sum_lanes(float (&x)[Count]) {
  constexpr int kHalf = Count / 2;
  const bool upper = (lane_index() & Bit) != 0;
  float sums[kHalf];
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float kept = upper ? x[i + kHalf] : x[i];
    const float given = upper ? x[i] : x[i + kHalf];
    sums[i] = kept + shuffle_xor(given, Bit);
  }
  int first = upper ? kHalf : 0;
  if constexpr (Bit > Low) first += sum_lanes<Bit / 2, Low>(sums);
  x[0] = sums[0];
  x[1] = sums[1];
  return first;
}
