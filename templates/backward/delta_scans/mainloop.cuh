// The kernels of delta_scans by role. `Scheduler`, a global alias set before the include, says
// which work a block has.
//
// load: a producer warp loads tiles, factor warps compute the factors of rows. prepare: in reverse
// the scores of queries, and the inverse of I + A, by two prep warpgroups in turns; a single one
// leaves the inverse to warps of warpgroup 0. mma: consumer warpgroups, each with a state, or its
// gradient, of 64 columns.
#pragma once

#include "backward/delta_scans/prepare.cuh"
#include "backward/delta_scans/state.cuh"
#include "device/cuda/sm90/kernel.cuh"

template <class P, bool Reverse>
struct DeltaScan;

/// A block's state in either direction.
template <class P>
struct DeltaScans {
  using Params = P;
  template <bool Reverse>
  using Scan = DeltaScan<P, Reverse>;
  static constexpr int kRows = ::kRows, kThreads = ::kThreads, kTilesV = V / BV;

  const P& p;
  sm90::ScanWork work{};
  ScalarGate gate{};  // as it stays where a block has no chunks
  bool reverse = false;

  WYVERN_DEVICE explicit DeltaScans(const P& params) : p(params) {}

  WYVERN_DEVICE bool find() {
    work.shared = sm90::swizzled_memory();
    return Scheduler::find(*this);
  }
  WYVERN_DEVICE void load_head() { gate = ScalarGate::of_head(p.e, p.A_log, p.dt_bias, work.head); }
  WYVERN_DEVICE ScalarRows scalar_rows() const {
    return {{p.g, p.g_stride}, {p.beta, p.beta_stride}};
  }
  /// Without a gate state does not decay.
  WYVERN_DEVICE int overlap(const Segment& segment, int chunks) {
    if constexpr (!SCALAR_GATE) return chunks;
    const ScalarRows rows = scalar_rows();
    const auto stretch = [&](int last) {
      const int t = reverse ? chunks * kRows - 1 - last + lane_index() : last - lane_index();
      if (t < 0 || t >= segment.tokens) return 0.0f;
      return sm90::stretch_of<Spec>(segment.token + t, work.head, gate, rows,
                                    {p.k + work.key_head * K, p.k_stride});
    };
    float* const sums = array_at<kLayout.G>(work.shared);
    // An optimization barrier: addresses computed here would stay in registers.
    work.shared += sm90::opaque(0);
    return count_overlap<kRows, kThreads, 32>(chunks, sums, stretch);
  }
};

/// A block's scan.
template <class P, bool Reverse>
struct DeltaScan {
  using Params = P;
  using Io = sm90::ScanStateIo<Scheduler>;
  using Prepare = sm90::ScalarPrepare<Spec, Block<Reverse>>;
  static constexpr bool kReverse = Reverse;
  static constexpr int kTilesV = V / BV;
  static constexpr sm90::Roles kRoles{.prepare = kPrepGroups,
                                      .mma = kConsumers,
                                      .load_registers = !kPipelined                ? 64
                                                        : kOutput && !kSharesState ? 48
                                                                                   : 56,
                                      .prepare_registers = kSharesState  ? 168
                                                           : !kPipelined ? 112
                                                           : kOutput     ? 80
                                                                         : 88,
                                      .mma_registers = kSharesState  ? 248
                                                       : !kPipelined ? 224
                                                       : kOutput     ? 192
                                                                     : 184};
  static_assert(kRoles.threads() == kThreads);

  const P& p;
  Block<Reverse> work;
  ScalarGate gate;
  ScalarRows rows;

  WYVERN_DEVICE DeltaScan(const P& params, const DeltaScans<P>& found)
      : p(params), work{{found.work}, nullptr}, gate(found.gate), rows(found.scalar_rows()) {
    if constexpr (Block<Reverse>::kKeepsScales)
      if (work.tile == 0) work.row_scales = p.row_scales + int64{work.place(0)} * 2 * kRows;
  }

  WYVERN_DEVICE static bool find() { return true; }

  // ---- shared memory ----------------------------------------------------------------------------

  WYVERN_DEVICE void init_barriers() const {
    sm90::save_block<kLayout.block>(work);
    sm90::init_barriers<kLayout.tiles_full>(work.shared, 32);
    sm90::init_barriers<kLayout.factors_full>(work.shared, 32 * Prepare::kFactorWarps);
    sm90::init_barriers<kLayout.tiles_empty>(work.shared, 128 * (1 + kConsumers));
    sm90::init_barriers<kLayout.values_full>(work.shared, 32);
    sm90::init_barriers<kLayout.values_empty>(work.shared, 128 * kConsumers);
    sm90::init_barriers<kLayout.chunk_full>(work.shared, kPipelined ? 128 + 96 : 128);
    sm90::init_barriers<kLayout.A_full>(work.shared, 128);
    sm90::init_barriers<kLayout.halves_full>(work.shared, 64);
    sm90::init_barriers<kLayout.A_empty>(work.shared, 32);
    sm90::init_barriers<kLayout.inverse_empty>(work.shared, 128 * kConsumers);
    sm90::init_barriers<kLayout.scores_empty>(work.shared, 128 * kConsumers);
    sm90::init_barriers<kLayout.tail_full>(work.shared, 1);
  }
  WYVERN_DEVICE void clear_shared() const { Prepare{work}.clear_squares(kThreads); }

  // ---- roles ------------------------------------------------------------------------------------

  WYVERN_DEVICE void load(int warp) const {
    const auto& b = work;
    if (b.chunks == 0) return;
    const Prepare prepare{b};
    const bool computes = Prepare::computes_factors(warp);
    if (warp == 0 || computes) {
      Position at;
      typename Prepare::RawRows next = {};
      if (computes) next = prepare.read_rows(0, rows);
#pragma unroll 1
      for (int step = 0; step < b.chunks; ++step, at.advance()) {
        const auto block = kPipelined ? b.recall() : b;
        if (warp == 0) load_keys(block, step, at, p);
        if (computes) make_factors(block, step, at, next, p.e.scale, gate, rows);
        if (warp == 0) load_values(block, step, p);
      }
      if constexpr (Block<Reverse>::kKeepsScales) {
#pragma unroll 1
        for (int step = b.chunks - kStages; computes && step < b.chunks; ++step, at.advance()) {
          const auto block = b.recall();
          sm90::barrier_wait(block.template barrier<kLayout.tiles_empty>(at.buffer),
                             at.parity ^ 1U);
          keep_scales(block, step, at.buffer);
        }
      }
    } else if constexpr (kPipelined) {
      prepare.invert_chunks();
    }
  }

  WYVERN_DEVICE void prepare(int prep) const {
    if constexpr (kPipelined)
      Prepare{work}.prepare_A();
    else
      Prepare{work}.prepare_chunks(prep);
  }

  WYVERN_DEVICE bool idle(int) const { return false; }

  WYVERN_DEVICE void mma(int consumer) const {
    ChunkStates<Reverse> state{{work, consumer, {}, {}}};
    Io::load(*this, state);
    if (!kOutput || !Reverse || work.chunks > 0) state.mainloop(p);
    Io::store(*this, state);
    if (thread_index() % 128 == 0) sm90::bulk_wait_read<0>();
  }
};
