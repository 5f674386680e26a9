// The kernels of delta_forward by role. `Scheduler`, a global alias set before the include, says
// which work a block has.
//
// load: a producer warp loads tiles, factor warps compute the factors of rows. prepare: decayed
// scores of queries and the inverse of I + A, by two prep warpgroups in turns; a single one leaves
// the inverse to warps of warpgroup 0. mma: consumer warpgroups, each with a state of 64 columns.
#pragma once

#include "device/cuda/sm90/kernel.cuh"
#include "device/cuda/sm90/state_io.cuh"
#include "forward/delta_forward/kept.cuh"
#include "forward/delta_forward/shared_state.cuh"
#include "forward/delta_forward/transposed_state.cuh"

template <class P>
struct DeltaForward {
  using Params = P;
  using Scheduler = ::Scheduler;  // for StateIo
  using Io = sm90::StateIo<Scheduler>;
  static constexpr int kRows = ::kRows, kThreads = ::kThreads, kTilesV = V / BV;
  static constexpr bool kCheckpoints = ::kCheckpoints, kGathersStates = false;
  /// Without a gate state does not decay. A norm is over columns of both consumers.
  static constexpr sm90::Splits kSplits = !SCALAR_GATE ? sm90::Splits::none
                                          : kConsumers == 2 && !kNormalizes
                                              ? sm90::Splits::or_halves
                                              : sm90::Splits::each;
  static constexpr sm90::Roles kRoles{.prepare = kPrepGroups,
                                      .mma = kConsumers,
                                      .load_registers = !kPipelined ? 64
                                                        : kQueries  ? 48
                                                                    : 56,
                                      .prepare_registers = K > 128    ? 168
                                                           : kQueries ? (kPipelined ? 80 : 112)
                                                                      : 120,
                                      .mma_registers = K > 128      ? 248
                                                       : kPipelined ? (kQueries ? 192 : 168)
                                                                    : (kQueries ? 224 : 208)};

  const P& p;
  Block work{};
  ScalarGate gate;
  Scheduler scheduler;

  WYVERN_DEVICE explicit DeltaForward(const P& params) : p(params) {}

  // ---- for the scheduler ------------------------------------------------------------------------

  WYVERN_DEVICE bool find() {
    work.shared = sm90::swizzled_memory();
    return scheduler.find(*this);
  }
  WYVERN_DEVICE Block recall() const { return recalled(work); }

  WYVERN_DEVICE void load_head() { gate = ScalarGate::of_head(p.e, p.A_log, p.dt_bias, work.head); }
  WYVERN_DEVICE ScalarRows scalar_rows() const {
    return {{p.g, p.g_stride}, {p.beta, p.beta_stride}};
  }
  WYVERN_DEVICE int overlap(const Sequence& sequence, int tokens) const {
    const ScalarRows rows = scalar_rows();
    const auto stretch = [&](int last) {
      const int t = last - lane_index();
      return t < 0 || t >= tokens
                 ? 0.0f
                 : sm90::stretch_of<Spec>(sequence.token + t, work.head, gate, rows,
                                          {p.k + work.key_head * K, p.k_stride});
    };
    const int chunks = ceil_div(tokens, kRows);
    const int count =
        count_overlap<kRows, kThreads, 32>(chunks, work.factors<kLayout.G>(0), stretch);
    return tokens - (chunks - count) * kRows;
  }
  WYVERN_DEVICE float* segment_M() const { return p.share_M; }
  WYVERN_DEVICE float* segment_R() const { return p.share_R; }

  // ---- shared memory ----------------------------------------------------------------------------

  WYVERN_DEVICE void init_barriers() const {
    sm90::save_block<kLayout.block>(work);
    const int consumers = work.halves ? 1 : kConsumers;
    sm90::init_barriers<kLayout.tiles_full>(work.shared, 32);
    sm90::init_barriers<kLayout.factors_full>(work.shared, 32 * Prepare::kFactorWarps);
    sm90::init_barriers<kLayout.tiles_empty>(work.shared, 128 * (1 + consumers));
    sm90::init_barriers<kLayout.chunk_full>(work.shared, kPipelined ? 128 + 96 : 128);
    sm90::init_barriers<kLayout.A_full>(work.shared, 128);
    sm90::init_barriers<kLayout.halves_full>(work.shared, 64);
    sm90::init_barriers<kLayout.A_empty>(work.shared, 32);
    sm90::init_barriers<kLayout.scores_empty>(work.shared, 128 * consumers);
    sm90::init_barriers<kLayout.tail_full>(work.shared, 1);
    if constexpr (kNormalizes) sm90::init_barriers<kLayout.gate_full>(work.shared, 1);
  }
  WYVERN_DEVICE void clear_shared() const { Prepare{work}.clear_squares(kThreads); }

  // ---- roles ------------------------------------------------------------------------------------

  WYVERN_DEVICE void load(int warp) const {
    const Block& b = work;
    const ScalarRows rows = scalar_rows();
    if (b.chunks == 0) return;
    const Prepare prepare{b};
    const bool computes = Prepare::computes_factors(warp);
    if (warp == 0 || computes) {
      Position at;
      Prepare::RawRows next = {};
      float owed = 0.0f;  // log2 of the decay that the state owes
      if (computes) next = prepare.read_rows(0, rows);
      using Checkpoints = decltype(sm90::find_checkpoints_of<Spec>(*this));
      auto checkpoints = computes ? sm90::find_checkpoints_of<Spec>(*this) : Checkpoints{};
#pragma unroll 1
      for (int c = 0; c < b.chunks; ++c, at.advance()) {
        const Block block = kPipelined ? recalled(b) : b;
        if (warp == 0) load_tiles(block, c, at, p);
        if (computes) make_factors(block, c, at, next, owed, p.e.scale, gate, rows, checkpoints);
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

  WYVERN_DEVICE bool idle(int consumer) const { return work.halves && consumer > 0; }

  WYVERN_DEVICE void mma(int consumer) const {
    if constexpr (kLayout.shares_state)
      mma_with<SharedState>(scheduler.first_consumer + consumer);
    else
      mma_with<TransposedState>(scheduler.first_consumer + consumer);
  }
  WYVERN_DEVICE auto output() const {
    if constexpr (kNormalizes)
      return NormOutput<Spec>{
          {}, p.o_map, {p.o, p.o_stride}, p.norm_gate_map, p.norm_weight, p.e.norm_eps};
    else if constexpr (kKeeps)
      return KeptOutput{plain_output(),     p.h_map,
                        p.v_new_map,        {p.v_new, int64{p.e.HV} * V},
                        first_place(*this), static_cast<int>(p.e.HV)};
    else
      return plain_output();
  }
  WYVERN_DEVICE PlainOutput plain_output() const { return {{}, p.o_map, {p.o, p.o_stride}}; }
  template <class State>
  WYVERN_DEVICE void mma_with(int consumer) const {
    if constexpr (VARLEN && kKeeps)
      if (work.to_end) clear_unused_states(work, consumer, p.h, p.chunk_offsets, p.e);
    State state{work, consumer, {}, {}, {}};
    Io::load(*this, state);
    if constexpr (kQueries) {
      if (work.chunks > 0)
        mainloop(state, output(), [&](auto& at, int row, float factor) {
          sm90::write_checkpoint<Spec>(*this, at, row, factor);
        });
    } else {
      mainloop(state);
    }
    Io::store(*this, state);
    if (kQueries && thread_index() % 128 == 0) sm90::bulk_wait_read<0>();
  }
};
