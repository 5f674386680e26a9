// A block from its first instruction to its last: the one place for warp roles, barrier
// initialization and register budgets.
#pragma once

#include "device/cuda/sm90/barrier.cuh"

namespace wyvern::cuda::sm90 {

/// The roles of a block's warpgroups, in this order: load (producers), prepare (chunks), mma
/// (consumers, which hold accumulators), and each role's register budget per thread (setmaxnreg).
/// 0: the registers of the launch.
struct Roles {
  int load = 1, prepare = 0, mma;  ///< warpgroups
  int load_registers = 0, prepare_registers = 0, mma_registers = 0;

  constexpr int threads() const { return 128 * (load + prepare + mma); }
  constexpr bool fit() const {
    const int launch = 65536 / threads() / 8 * 8;
    const int all = load * (load_registers != 0 ? load_registers : launch) +
                    prepare * (prepare_registers != 0 ? prepare_registers : launch) +
                    mma * (mma_registers != 0 ? mma_registers : launch);
    return load_registers <= launch && prepare_registers <= launch &&
           all <= launch * (load + prepare + mma);
  }
};

/// Runs a block. Kernel holds the parameters and what all roles know, and has
///   find()            by all threads: finds the block's work; false if there is none
///   init_barriers()   by thread 0
///   clear_shared()    by all threads
///   load(warp), prepare(warpgroup), mma(warpgroup)    the roles
///   idle(warpgroup)   whether an mma warpgroup has no work
/// The order of the roles' code matters: with producers last ptxas kept fewer values in uniform
/// registers, and delta_forward spilled more with K = 256.
/// `found`: what a kernel of several such Kernels knows already.
template <class Kernel, class... Found>
WYVERN_DEVICE void run(const typename Kernel::Params& p, const Found&... found) {
  constexpr Roles kRoles = Kernel::kRoles;
  static_assert(kRoles.fit());
  Kernel kernel(p, found...);
  if (!kernel.find()) return;
  if (thread_index() == 0) {
    kernel.init_barriers();
    fence_barrier_init();
  }
  kernel.clear_shared();
  fence_proxy_async();
  sync_block();
  const int warp = uniform(warp_index());
  const int warpgroup = warp / 4;
  if (warpgroup < kRoles.load) {
    if constexpr (kRoles.load_registers != 0) lower_registers<kRoles.load_registers>();
    kernel.load(warp);
  } else if (warpgroup < kRoles.load + kRoles.prepare) {
    if constexpr (kRoles.prepare_registers != 0) lower_registers<kRoles.prepare_registers>();
    if constexpr (kRoles.prepare > 0) kernel.prepare(warpgroup - kRoles.load);
  } else {
    constexpr int kFirst = kRoles.load + kRoles.prepare;
    if (kernel.idle(warpgroup - kFirst)) return;
    if constexpr (kRoles.mma_registers != 0) raise_registers<kRoles.mma_registers>();
    kernel.mma(warpgroup - kFirst);
  }
}

/// Runs a block of a kernel of scans in both directions: Scans finds the block's work and
/// `reverse`, its direction, and Scans::Scan<Reverse>, a Kernel, has the roles. Without Forward all
/// are reverse.
template <class Scans, bool Forward = true>
WYVERN_DEVICE void run_scans(const typename Scans::Params& p) {
  Scans scans(p);
  if (!scans.find()) return;
  if (!Forward || scans.reverse)
    run<typename Scans::template Scan<true>>(p, scans);
  else if constexpr (Forward)
    run<typename Scans::template Scan<false>>(p, scans);
}

}  // namespace wyvern::cuda::sm90
