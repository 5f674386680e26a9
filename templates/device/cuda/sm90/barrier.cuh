// Waiting on mbarriers, and a ring of buffers that one side fills and the other empties.
#pragma once

#include "device/cuda/sm90/layout.hpp"
#include "device/cuda/sm90/ptx.cuh"

namespace wyvern::cuda::sm90 {

/// Waits for the latest phase of this parity.
WYVERN_DEVICE void barrier_wait(Barrier* barrier, uint32 parity) {
  while (!barrier_try_wait(barrier, parity)) {
  }
}

/// Arrives, after what this thread did to shared memory, for what follows by tensor copies and
/// products of warpgroups.
WYVERN_DEVICE void hand_over(Barrier* barrier) {
  fence_proxy_async();
  barrier_arrive(barrier);
}

/// The mbarriers that a layout which starts at `start` has in Place.
template <BarrierPlace Place>
WYVERN_DEVICE Barrier* barriers_at(unsigned char* start) {
  return reinterpret_cast<Barrier*>(start + Place.offset);
}

/// A pipeline of Buffers buffers between producers and consumers. Both sides visit the buffers in
/// order, each by a Position of its own.
template <int Buffers>
struct Pipeline {
  /// Shared memory that `barriers` points at.
  static constexpr int kBytes = 2 * Buffers * static_cast<int>(sizeof(Barrier));

  Barrier* barriers;  ///< Buffers that say full, Buffers that say empty

  struct Position {
    int buffer = 0;
    uint32 parity = 0;

    WYVERN_DEVICE void advance() {
      if (++buffer < Buffers) return;
      buffer = 0;
      parity ^= 1U;
    }
  };

  WYVERN_DEVICE Barrier* full(const Position& at) const { return barriers + at.buffer; }
  WYVERN_DEVICE Barrier* empty(const Position& at) const { return barriers + Buffers + at.buffer; }

  /// By one thread; a block barrier must follow. A buffer is full after `producers` arrivals (and
  /// the bytes announced with them), empty after `consumers` arrivals.
  WYVERN_DEVICE void init(uint32 producers, uint32 consumers) const {
    for (int i = 0; i < Buffers; ++i) {
      barrier_init(barriers + i, producers);
      barrier_init(barriers + Buffers + i, consumers);
    }
    fence_barrier_init();
  }

  /// Until the consumers are done with what was there before.
  WYVERN_DEVICE void wait_empty(const Position& at) const {
    barrier_wait(empty(at), at.parity ^ 1U);
  }
  WYVERN_DEVICE void wait_full(const Position& at) const { barrier_wait(full(at), at.parity); }
};

}  // namespace wyvern::cuda::sm90
