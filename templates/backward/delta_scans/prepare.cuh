// delta_scans' producers: warpgroup 0 loads tiles and computes the factors of rows, prep warpgroups
// prepare chunks; only the reverse scan has queries. `Scheduler`, a global alias set before the
// include, says which work a block has.
#pragma once

#include "backward/delta_scans/layout.hpp"
#include "device/cuda/sm90/scalar_prepare.cuh"
#include "device/cuda/sm90/scan_scheduler.cuh"
#include "device/cuda/sm90/scheduler.cuh"
#include "device/cuda/sm90/tma.cuh"

using delta_scans::kColumns;
using delta_scans::kRows;

/// Whether a scan writes what it finds for each chunk, or its last state alone.
constexpr bool kOutput = Scheduler::kOutput;
constexpr delta_scans::HopperLayout<Spec> kLayout{Spec{}};
constexpr int kStages = num_stages;
constexpr int kValueStages = kLayout.value_stages;
constexpr int kConsumers = kLayout.consumers;
constexpr int kPrepGroups = kLayout.prep_groups;
constexpr bool kPipelined = kLayout.pipelined;
constexpr bool kSharesState = kLayout.shares_state;
constexpr int kSlots = kLayout.slots;
constexpr int kScoreSlots = kLayout.score_slots;
constexpr int kThreads = 128 * (1 + kPrepGroups + kConsumers);
constexpr int kPanels = BV / kColumns;
constexpr int kKeyBytes = kRows * K * static_cast<int>(sizeof(DTYPE));
constexpr int kValueBytes = kRows * BV * static_cast<int>(sizeof(DTYPE));

using KeyTile = sm90::SwizzledTile<DTYPE, kRows, K>;
using SquareTile = sm90::SwizzledTile<DTYPE, kRows, kRows>;
using StateTile = sm90::SwizzledTile<DTYPE, kColumns, K>;

/// The pipeline stage of a step's keys and factors, and its phase.
using Position = sm90::Pipeline<kStages>::Position;
using ScalarGate = sm90::ScalarGate<Spec>;
using ScalarRows = sm90::ScalarRows<Spec>;

/// A block's work, and where its tiles, factors and barriers are in shared memory.
template <bool Reverse>
struct Block : sm90::ScanSteps<kRows, Reverse> {
  // For ScalarPrepare.
  static constexpr auto kLayout = ::kLayout;
  static constexpr bool kQueries = Reverse, kScaledRows = Reverse || QK_L2NORM,
                        kScaledColumns = !Reverse || QK_L2NORM;
  /// Whether delta_gradient is left the norm scales of rows.
  static constexpr bool kKeepsScales = kOutput && Reverse && QK_L2NORM;

  /// With kKeepsScales, in blocks of the first columns of V: where scales of q and k of step 0 are
  /// in [NT, HV, 2, kRows]; else nullptr.
  float* row_scales;

  using sm90::ScanWork::shared;

  WYVERN_DEVICE KeyTile keys(int stage) const {
    return {shared + kLayout.k.offset + stage * kLayout.keys};
  }
  WYVERN_DEVICE KeyTile queries(int stage) const {
    return {shared + kLayout.q.offset + stage * kLayout.keys};
  }
  /// Columns of v, or of do, from 64 `panel`.
  WYVERN_DEVICE SquareTile values(int step, int panel = 0) const {
    return {shared + kLayout.v.offset +
            (step % kValueStages * kPanels + panel) * SquareTile::kBytes};
  }
  WYVERN_DEVICE StateTile staged_state(int consumer) const {
    return {shared + kLayout.state.offset + consumer * StateTile::kBytes};
  }
  WYVERN_DEVICE SquareTile inverse(int step) const {
    return {shared + kLayout.inverse.offset + step % kSlots * SquareTile::kBytes};
  }
  WYVERN_DEVICE SquareTile scores(int step) const {
    return {shared + kLayout.scores.offset + step % kScoreSlots * SquareTile::kBytes};
  }
  template <ArrayPlace Place>
  WYVERN_DEVICE float* factors(int stage) const {
    return array_at<Place>(shared) + stage * kLayout.factors;
  }
  template <sm90::BarrierPlace Place>
  WYVERN_DEVICE sm90::Barrier* barrier(int i) const {
    return sm90::barriers_at<Place>(shared) + i;
  }

  /// Multiplies the norm scale of a key into the factors of its row.
  WYVERN_DEVICE void scale_key(int stage, int row, float scale) const {
    factors<kLayout.key>(stage)[row] *= scale;
    factors<kLayout.row>(stage)[row] *= scale;
    factors<kLayout.enter>(stage)[row] *= scale;
    factors<kLayout.leave>(stage)[row] *= scale;
  }
  WYVERN_DEVICE void scale_query(int stage, int row, float scale) const {
    factors<kLayout.query>(stage)[row] *= scale;
    factors<kLayout.output>(stage)[row] *= scale;
    if constexpr (kKeepsScales) factors<kLayout.query_scale>(stage)[row] = scale;
  }

  /// The block, reloaded from its copy in shared memory.
  WYVERN_DEVICE Block recall() const { return sm90::saved_block<kLayout.block>(*this); }
};

// ---- warp 0 of warpgroup 0: tiles ---------------------------------------------------------------

/// Loads a chunk's k, and in reverse its q, when their pipeline stage is empty.
template <class B, class Params>
WYVERN_DEVICE void load_keys(const B& b, int step, const Position& at, const Params& p) {
  sm90::barrier_wait(b.template barrier<kLayout.tiles_empty>(at.buffer), at.parity ^ 1U);
  const int token = static_cast<int>(b.first_row(step));
  const int rows = b.rows(step);
  sm90::load_rows<kRows>(
      rows, b.template barrier<kLayout.tiles_full>(at.buffer),
      b.template barrier<kLayout.tail_full>(0), 0, (B::kReverse ? 2 : 1) * kKeyBytes,
      [&](sm90::Barrier* barrier) {
        sm90::tensor_load(b.keys(at.buffer).data, p.k_map, {0, token, 0, b.key_head}, barrier);
        if constexpr (B::kReverse)
          sm90::tensor_load(b.queries(at.buffer).data, p.q_map, {0, token, 0, b.key_head}, barrier);
      },
      [&] {
        sm90::clear_rows(b.keys(at.buffer), rows);
        if constexpr (B::kReverse) sm90::clear_rows(b.queries(at.buffer), rows);
      });
}

/// Loads a chunk's v, or in reverse its do.
template <class B, class Params>
WYVERN_DEVICE void load_values(const B& b, int step, const Params& p) {
  const int stage = step % kValueStages;
  sm90::barrier_wait(b.template barrier<kLayout.values_empty>(stage),
                     sm90::parity_of<kValueStages>(step) ^ 1U);
  if (!kOutput && b.zero_v) {
    sm90::barrier_arrive(b.template barrier<kLayout.values_full>(stage));
    return;
  }
  const int rows = b.rows(step);
  sm90::load_rows<kRows>(
      rows, b.template barrier<kLayout.values_full>(stage),
      b.template barrier<kLayout.tail_full>(0), 1, kValueBytes,
      [&](sm90::Barrier* barrier) {
        sm90::tensor_load(b.values(step).data, sm90::values_map<B::kReverse>(p),
                          {0, static_cast<int>(b.first_row(step)), kPanels * b.tile, b.head},
                          barrier);
      },
      [&] {
#pragma unroll
        for (int i = 0; i < kPanels; ++i) sm90::clear_rows(b.values(step, i), rows);
      });
}

// ---- factor warps -------------------------------------------------------------------------------

template <class B>
using Prepare = sm90::ScalarPrepare<Spec, B>;
using Square = sm90::Accumulator<kRows>;

/// Stores the norm scales of a step's rows, 0 behind the sequence's end. Its pipeline stage is
/// empty again and has its factors yet: a warp that no other waits for has time for it.
template <class B>
WYVERN_DEVICE void keep_scales(const B& b, int step, int stage) {
  if constexpr (B::kKeepsScales) {
    if (step < 0 || b.row_scales == nullptr) return;
    float* const to = b.row_scales - int64{step * b.heads} * (2 * kRows);
#pragma unroll
    for (int n = 0; n < Prepare<B>::kLaneRows; ++n) {
      const int row = 32 * Prepare<B>::half_of_row(n) + lane_index();
      const bool used = step > 0 || row < b.rows(0);
      to[row] = used ? b.template factors<kLayout.query_scale>(stage)[row] : 0.0f;
      // In reverse the factor of a key's column is its norm scale.
      to[kRows + row] = used ? b.template factors<kLayout.key>(stage)[row] : 0.0f;
    }
  }
}

/// Computes the factors of a chunk's rows from `next`, and loads the next chunk's raw rows there.
/// beta is on the columns of A, whose inverse is in fp16: a column of next to nothing is 0 there.
/// Z needs no more of it, but dV / beta does. So in reverse beta is on the rows.
template <class B>
WYVERN_DEVICE void make_factors(const B& b, int step, const Position& at,
                                typename Prepare<B>::RawRows& next, float scale,
                                const ScalarGate& gate, const ScalarRows& from) {
  const auto raw = next;
  if (step + 1 < b.chunks) next = Prepare<B>{b}.read_rows(step + 1, from);
  const int rows = b.rows(step);
  const sm90::DecaySums sums = Prepare<B>::sums_of(raw, rows, gate);
  sm90::barrier_wait(b.template barrier<kLayout.tiles_empty>(at.buffer), at.parity ^ 1U);
  keep_scales(b, step - kStages, at.buffer);
#pragma unroll
  for (int n = 0; n < Prepare<B>::kLaneRows; ++n) {
    const int half = Prepare<B>::half_of_row(n);
    const int row = 32 * half + lane_index();
    const float rate =
        row < rows ? beta_divisor(activate_beta<BETA_SIGMOID, NEG_EIGVAL>(raw.beta[n])) : 0.0f;
    const float G = half == 0 ? sums.row[0] : sums.row[1];
    const float reached = exp2_fast(G);
    b.template factors<kLayout.G>(at.buffer)[row] = G;
    const float of_column = B::kReverse ? 1.0f : rate, of_row = B::kReverse ? rate : 1.0f;
    b.template factors<kLayout.key>(at.buffer)[row] = of_column;
    b.template factors<kLayout.row>(at.buffer)[row] = of_row;
    b.template factors<kLayout.enter>(at.buffer)[row] = -reached * of_row;
    b.template factors<kLayout.leave>(at.buffer)[row] = of_column * exp2_fast(sums.last - G);
    if constexpr (B::kReverse) {
      b.template factors<kLayout.rate>(at.buffer)[row] = rate;
      b.template factors<kLayout.query>(at.buffer)[row] = scale;
      b.template factors<kLayout.output>(at.buffer)[row] = scale * reached;
    }
    Prepare<B>{b}.store_left(at.buffer, row, G, sums, of_column);
    if (row == 0) array_at<kLayout.decay>(b.shared)[at.buffer] = exp2_fast(sums.last);
  }
  sm90::barrier_arrive(b.template barrier<kLayout.factors_full>(at.buffer));
}
