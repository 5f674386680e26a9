// The kernels of kda_fwd_h_o by role. `Scheduler`, a global alias set before the include, says
// which work a block has.
//
// load: a producer warp loads chunks by TMA, prep warps load scores and decays in turns. mma:
// consumer warpgroups, each with a state of 64 columns: transposed, or with K = 256 also rounded in
// shared memory.
#pragma once

#include "device/cuda/sm90/kernel.cuh"
#include "device/cuda/sm90/state_io.cuh"
#include "forward/kda_fwd_h_o/overlap.cuh"
#include "forward/kda_fwd_h_o/shared_state.cuh"
#include "forward/kda_fwd_h_o/transposed_state.cuh"

/// The summands of the identity's state in products: fp16 has digits enough for one.
constexpr int kPartsOfM = sm90::kIsBf16<DTYPE> ? 2 : 1;

template <class P>
struct KdaFwdHO {
  using Params = P;
  using Scheduler = ::Scheduler;  // for StateIo
  using Io = sm90::StateIo<Scheduler>;
  static constexpr int kRows = kChunk, kThreads = ::kThreads, kTilesV = V / BV;
  static constexpr bool kCheckpoints = ::kCheckpoints, kGathersStates = true;
  /// A segment's map is over all of its chunks.
  static constexpr sm90::Splits kSplits = kQueries ? sm90::Splits::all_or_none : sm90::Splits::none;
  /// With a shared state the budget is all registers that a thread can have.
  static constexpr bool kShared = kLayout.shares_state;
  static constexpr sm90::Roles kRoles{.load = 1,
                                      .mma = kConsumers,
                                      .load_registers = kShared           ? 0
                                                        : kConsumers == 1 ? 200
                                                                          : 72,
                                      .mma_registers = kShared           ? 0
                                                       : kConsumers == 1 ? 240
                                                                         : 216};
  static_assert(kRoles.threads() == kThreads);

  const P& p;
  Block work{};
  Scheduler scheduler;

  WYVERN_DEVICE explicit KdaFwdHO(const P& params) : p(params) {}

  // ---- for the scheduler ------------------------------------------------------------------------

  WYVERN_DEVICE bool find() {
    work.shared = sm90::swizzled_memory();
    if (!scheduler.find(*this)) return false;
    if constexpr (STATE_UNIT && kQueries) work.u_factor = kValueUnit<Spec> / work.unit;
    return true;
  }
  WYVERN_DEVICE Block recall() const { return sm90::saved_block<kLayout.block>(work); }

  WYVERN_DEVICE void load_head() const {}
  WYVERN_DEVICE int overlap(const Sequence& sequence, int tokens) const {
    const int heads = p.e.HV;
    const auto growth = [&](int chunk, float most) {
      const int64 row = (sequence.token + int64{chunk} * kChunk) * heads + work.head;
      return growth_of_chunk(p.w + row * K, p.kg + row * K,
                             p.Gk + (row + int64{kChunk - 1} * heads) * K, int64{heads} * K, most,
                             work.decay(0));
    };
    return kChunk * chunks_to_decay(tokens / kChunk, growth);
  }
  WYVERN_DEVICE float* segment_M() const { return p.segment_M; }
  WYVERN_DEVICE float* segment_R() const { return p.segment_R; }

  // ---- shared memory ----------------------------------------------------------------------------

  WYVERN_DEVICE void init_barriers() const {
    sm90::save_block<kLayout.block>(work);
    sm90::init_barriers<kLayout.tiles_full>(work.shared, 1);
    sm90::init_barriers<kLayout.ring_empty>(work.shared, 128);
    sm90::init_barriers<kLayout.scores_full>(work.shared, 32);
    sm90::init_barriers<kLayout.empty>(work.shared, 128 * kConsumers);
  }
  /// Right of the diagonal scores stay 0.
  WYVERN_DEVICE void clear_shared() const {
    if constexpr (kQueries) {
      constexpr int kPieces = kScoreBytes / 16;
      for (int i = thread_index(); i < kStages * kPieces; i += kThreads)
        *reinterpret_cast<Vector<uint32, 4>*>(work.tile_of<kLayout.scores>(i / kPieces).data +
                                              i % kPieces * 16) = {};
    }
  }

  // ---- roles ------------------------------------------------------------------------------------

  WYVERN_DEVICE void load(int warp) const {
    const Block b = recall();
    if (warp > 0 && warp <= kPrepWarps)
      prepare_chunks(b, warp - 1, p, sm90::find_checkpoints_of<Spec>(*this));
    else if (thread_index() == 0)
      load_chunks(b, p);
  }

  WYVERN_DEVICE bool idle(int) const { return false; }

  WYVERN_DEVICE void mma(int consumer) const {
    if constexpr (kShared)
      mma_with<SharedState>(consumer * kColumns);
    else
      mma_with<TransposedState>(consumer * kColumns);
  }
  template <class State>
  WYVERN_DEVICE void mma_with(int column) const {
    const Block b = recall();
    State state{b, column, {}, {}, {}};
    if constexpr (kQueries) {
      Io::load(*this, state);
      if (b.chunks > 0)
        mainloop(state, p.e.scale * sm90::unit_of<Spec>(b), {p.o, p.o_stride},
                 [&](int row) { sm90::write_checkpoint<Spec>(*this, state, row, 1.0f); });
      Io::store(*this, state);
    } else if (b.zero_v) {
      Io::load(*this, state);
      mainloop<kPartsOfM>(state);
      Io::store(*this, state);
    } else {
      mainloop<1>(state);
      Io::store(*this, state);
    }
  }
};
