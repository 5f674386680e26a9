// The kernel of kda_scans by role. `Scheduler`, a global alias set before the include, says which
// work a block has.
//
// load: a producer warp loads the tiles of prepared chunks, another one the decays of channels.
// mma: consumer warpgroups, each with a state, or its gradient, of 64 columns.
#pragma once

#include "backward/kda_scans/load.cuh"
#include "backward/kda_scans/state.cuh"
#include "device/cuda/sm90/kernel.cuh"

template <class P, bool Reverse>
struct KdaScan;

/// A block's state in either direction.
template <class P>
struct KdaScans {
  using Params = P;
  template <bool Reverse>
  using Scan = KdaScan<P, Reverse>;
  static constexpr int kRows = ::kRows, kThreads = ::kThreads, kTilesV = V / BV;

  const P& p;
  sm90::ScanWork work{};
  bool reverse = false;

  WYVERN_DEVICE explicit KdaScans(const P& params) : p(params) {}

  WYVERN_DEVICE bool find() {
    work.shared = sm90::swizzled_memory();
    return Scheduler::find(*this);
  }
  WYVERN_DEVICE void load_head() const {}
};

/// A block's scan.
template <class P, bool Reverse>
struct KdaScan {
  using Params = P;
  using Io = sm90::ScanStateIo<Scheduler>;
  static constexpr bool kReverse = Reverse;
  static constexpr sm90::Roles kRoles{
      .mma = kConsumers, .load_registers = 40, .mma_registers = kConsumers == 1 ? 240 : 232};
  static_assert(kRoles.threads() == kThreads);

  const P& p;
  Block<Reverse> work;

  WYVERN_DEVICE KdaScan(const P& params, const KdaScans<P>& found)
      : p(params), work{{found.work}} {}

  WYVERN_DEVICE static bool find() { return true; }

  WYVERN_DEVICE void init_barriers() const {
    sm90::init_barriers<kLayout.tiles_full>(work.shared, 32);
    sm90::init_barriers<kLayout.decay_full>(work.shared, 32);
    sm90::init_barriers<kLayout.empty>(work.shared, 128 * kConsumers);
    sm90::init_barriers<kLayout.tail_full>(work.shared, 1);
  }
  WYVERN_DEVICE void clear_shared() const {}

  WYVERN_DEVICE void load(int warp) const {
    if (work.chunks == 0) return;
    if (warp == 0) load_chunks(work, p);
    if (warp == 1) load_decays(work, p.decay);
  }

  WYVERN_DEVICE bool idle(int) const { return false; }

  WYVERN_DEVICE void mma(int consumer) const {
    ChunkStates<Reverse> state{{work, consumer, {}, {}}};
    Io::load(*this, state);
    if (!Reverse || work.chunks > 0) state.mainloop(p);
    Io::store(*this, state);
    if (thread_index() % 128 == 0) sm90::bulk_wait_read<0>();
  }
};
