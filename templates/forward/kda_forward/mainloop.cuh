// The kernels of kda_forward by role. `Scheduler`, a global alias set before the include, says
// which work a block has.
//
// load: a producer warp loads slices of 16 tokens, prep warps prepare them in turns. mma: consumer
// warpgroups, each with a state of 64 columns.
#pragma once

#include "device/cuda/sm90/kernel.cuh"
#include "device/cuda/sm90/state_io.cuh"
#include "forward/kda_forward/overlap.cuh"
#include "forward/kda_forward/transposed_state.cuh"

template <class P>
struct KdaForward {
  using Params = P;
  using Scheduler = ::Scheduler;  // for StateIo
  using Io = sm90::StateIo<Scheduler>;
  static constexpr int kRows = kChunk, kThreads = ::kThreads, kTilesV = V / BV;
  static constexpr bool kCheckpoints = ::kCheckpoints, kGathersStates = true;
  static constexpr sm90::Splits kSplits = sm90::Splits::each;
  static constexpr bool kManyPrepWarps = kLoadWarpgroups > 2, kTwoConsumers = kConsumers > 1;
  static constexpr sm90::Roles kRoles{.load = kLoadWarpgroups,
                                      .mma = kConsumers,
                                      .load_registers = kManyPrepWarps   ? 112
                                                        : !kTwoConsumers ? 136
                                                        : K == 64        ? 120
                                                                         : 104,
                                      .mma_registers = kManyPrepWarps   ? 176
                                                       : !kTwoConsumers ? 232
                                                       : K == 64        ? 136
                                                                        : 152};
  static_assert(kRoles.threads() == kThreads);

  const P& p;
  Block work{};
  GateForm gate;
  Scheduler scheduler;

  WYVERN_DEVICE explicit KdaForward(const P& params) : p(params) {}

  // ---- for the scheduler ------------------------------------------------------------------------

  WYVERN_DEVICE bool find() {
    work.shared = sm90::swizzled_memory();
    return scheduler.find(*this);
  }
  /// From shared memory with many prep warps alone, where the search of an overlap spilled; beside
  /// two consumer warpgroups prep warps would spill instead.
  WYVERN_DEVICE Block recall() const {
    if constexpr (kManyPrepWarps) return sm90::saved_block<kLayout.block>(work);
    return work;
  }

  WYVERN_DEVICE void load_head() {
    gate = GateForm(p.e, HAS_A_LOG ? p.A_log[work.head] : 0.0f);
    float* const bias = array_at<kLayout.bias>(work.shared);
    for (int i = thread_index(); i < K; i += kThreads)
      bias[i] = HAS_DT_BIAS ? gate.bias(p.dt_bias[work.head * K + i]) : 0.0f;
    sync_block();
  }
  WYVERN_DEVICE int overlap(const Sequence& sequence, int tokens) const {
    // A longer overlap would not be worth its search.
    constexpr int kMost = 4096;
    const int overlap = tokens_to_decay(work, sequence.token + tokens, smaller(tokens, kMost),
                                        work.factors<kLayout.decay>(0), gate, {p.g, p.g_stride},
                                        {p.beta, p.beta_stride}, {p.k, p.k_stride});
    return overlap == 0 ? tokens : overlap;
  }
  WYVERN_DEVICE float* segment_M() const { return p.share_M; }
  WYVERN_DEVICE float* segment_R() const { return p.share_R; }

  // ---- shared memory ----------------------------------------------------------------------------

  WYVERN_DEVICE void init_barriers() const {
    if constexpr (kManyPrepWarps) sm90::save_block<kLayout.block>(work);
    sm90::init_barriers<kLayout.tiles_full>(work.shared, 1);
    sm90::init_barriers<kLayout.slice_full>(work.shared, 32);
    sm90::init_barriers<kLayout.empty>(work.shared, 128 * kConsumers);
  }
  WYVERN_DEVICE void clear_shared() const {}

  // ---- roles ------------------------------------------------------------------------------------

  WYVERN_DEVICE void load(int warp) const {
    const Block b = recall();
    if (warp > 0) {
      prepare_slices(b, warp - 1, p.e.scale, gate, {p.beta, p.beta_stride});
    } else {
      const auto checkpoints = sm90::find_checkpoints_of<Spec>(*this);
      if (lane_index() == 0) load_slices(b, p, checkpoints);
    }
  }

  WYVERN_DEVICE bool idle(int) const { return false; }

  WYVERN_DEVICE auto output() const {
    if constexpr (kNormalizes)
      return NormOutput<Spec>{
          {p.o, p.o_stride}, {p.norm_gate, p.norm_gate_stride}, p.norm_weight, p.e.norm_eps};
    else
      return PlainOutput{{p.o, p.o_stride}};
  }

  WYVERN_DEVICE void mma(int consumer) const {
    const Block b = recall();
    TransposedState state{b, consumer * kColumns, {}, {}, {}, {}, {}};
    Io::load(*this, state);
    if constexpr (kQueries) {
      if (b.tokens > 0)
        mainloop(state, output(),
                 [&](int row) { sm90::write_checkpoint<Spec>(*this, state, row, 1.0f); });
    } else {
      mainloop(state);
    }
    Io::store(*this, state);
  }
};
