// Loads and stores of states, by scheduler: initial state, pool slot, segment state, final state,
// checkpoints. S is the kernel's Spec. A State has visit<Width, VFirst>(act) and
// store<VFirst>(factor, to). A Kernel also has recall(), its work, reloaded from shared memory
// where registers are few, and kGathersStates: whether a final state is written by store(), four
// elements at a time, and not by visit(); which of them spills less differs by kernel.
#pragma once

#include "device/cuda/checkpoints.cuh"
#include "device/cuda/sm90/scheduler.cuh"

namespace wyvern::cuda::sm90 {

/// The state slots of the block's sequence and head.
template <class S, class Kernel>
WYVERN_DEVICE StateSlots slots_of(const Kernel& k, const Work& work) {
  return find_states<S>(work.sequence, work.head, k.p.e, k.p.state_stride, k.p.state_index,
                        k.p.output_state_index);
}

/// Writes the state after the sequence's last token.
template <class S, class Kernel, class State>
WYVERN_DEVICE void store_final(const Kernel& k, const Work& work, State& state) {
  const float unit = unit_of<S>(work);
  const auto write = [&]<class T>(T* to) {
    if constexpr (Kernel::kGathersStates)
      state.template store<S::STATE_V_FIRST>(unit, to);
    else
      state.template visit<S::V, S::STATE_V_FIRST>(
          [to, unit](int offset, float& x) { to[offset] = from_float<T>(x * unit); });
  };
  if constexpr (S::INPLACE_STATE)
    write(k.p.state + slots_of<S>(k, work).to);
  else if constexpr (S::FINAL_STATE)
    write(k.p.final_state + slots_of<S>(k, work).to);
}

template <class Scheduler>
struct StateIo;

template <class S>
struct StateIo<WholeSequence<S>> {
  /// Whether the last split waits until the others have read the slot that it writes.
  template <class Kernel>
  static constexpr bool kWaits = S::INPLACE_STATE && Kernel::kSplits != Splits::none;

  template <class Kernel, class State>
  WYVERN_DEVICE static void load(const Kernel& k, State& state) {
    if constexpr (S::INPLACE_STATE || S::INITIAL_STATE) {
      const bool starts =
          k.work.from_start && starts_from_slot<S>(k.recall().sequence, k.p.has_initial_state);
      // An optimization barrier: with K = 256 and an fp32 pool the branch took registers from the
      // mainloop, which spilled 3 KB, and ptxas serialized its products.
      constexpr bool kOpaque = S::HAS_INITIAL_STATE && S::K > 128;
      if (kOpaque ? opaque(starts) != 0 : starts)
        state.template visit<S::V, S::STATE_V_FIRST>(
            [from = (S::INPLACE_STATE ? k.p.state : k.p.initial_state) +
                    slots_of<S>(k, k.recall()).from,
             factor = 1.0f / unit_of<S>(k.work)](int offset, float& x) {
              x = opaque(to_float(from[offset]) * factor);
            });
    }
    if constexpr (kWaits<Kernel>) {
      const auto work = k.recall();
      if (!work.to_end) tell_slot_read(k.p.slots_read + work.sequence * k.p.e.HV + work.head);
    }
  }

  template <class Kernel, class State>
  WYVERN_DEVICE static void store(const Kernel& k, State& state) {
    if constexpr (S::INPLACE_STATE || S::FINAL_STATE) {
      const auto work = k.recall();
      if (!work.to_end) return;
      const Extents& e = k.p.e;
      if (kWaits<Kernel> && !work.halves)
        await_counter(k.p.slots_read + work.sequence * e.HV + work.head,
                      (block_count() / (Kernel::kTilesV * e.HV * static_cast<int>(e.N)) - 1) *
                          Kernel::kTilesV * Kernel::kRoles.mma * 4);
      store_final<S>(k, k.recall(), state);
    }
  }
};

template <class S>
struct StateIo<SegmentMap<S>> {
  template <class Kernel, class State>
  WYVERN_DEVICE static void load(const Kernel& k, State& state) {
    if (k.work.zero_v)
      state.template visit<S::K, false>(
          [](int offset, float& x) { x = offset / S::K == offset % S::K ? 1.0f : 0.0f; });
  }

  template <class Kernel, class State>
  WYVERN_DEVICE static void store(const Kernel& k, State& state) {
    const int64 slot = k.scheduler.slot;
    if (k.work.zero_v)
      state.template visit<S::K, false>(
          [to = k.segment_M() + slot * S::K * S::K](int offset, float& x) {
            to[offset] = element_of_M(x);
          });
    else
      state.template visit<S::V, false>(
          [to = k.segment_R() + slot * S::K * S::V](int offset, float& x) {
            to[offset] = x * kValueUnit<S>;
          });
  }
};

template <class S>
struct StateIo<SegmentResume<S>> {
  template <class Kernel, class State>
  WYVERN_DEVICE static void load(const Kernel& k, State& state) {
    const int64 slot = block_index() / Kernel::kTilesV;  // of the segment and value head
    // Never so: in a branch of its own the load takes no registers from the mainloop.
    if (Kernel::kGathersStates && k.scheduler.before < 0) return;
    state.template visit<S::V, false>(
        [from = k.p.segment_state + slot * S::K * S::V, factor = 1.0f / unit_of<S>(k.work)](
            int offset, float& x) { x = from[offset] * factor; });
  }

  template <class Kernel, class State>
  WYVERN_DEVICE static void store(const Kernel& k, State& state) {
    if constexpr (S::INPLACE_STATE || S::FINAL_STATE) {
      const auto work = k.recall();
      if (work.to_end) store_final<S>(k, work, state);
    }
  }
};

/// The checkpoints in the block's tokens, counted from its first. By all lanes of a warp.
template <class S, class Kernel>
WYVERN_DEVICE auto find_checkpoints_of(const Kernel& k) {
  if constexpr (!Kernel::kCheckpoints) {
    return NoCheckpoints{};
  } else {
    const uint32 passed = k.scheduler.passed(k.work);
    uint32 own = passed;
    if constexpr (Kernel::Scheduler::kOverlaps)
      own += static_cast<uint32>(k.work.overlap) * Kernel::kRows;
    return find_checkpoints<S>(own, k.work.sequence, k.p.e, k.p.seq_offsets, k.p.checkpoint_offsets)
        .counted_from(passed);
  }
}

/// Writes a warpgroup's state times `factor` to a row of `checkpoints`.
template <class S, class Kernel, class State>
WYVERN_DEVICE void write_checkpoint(const Kernel& k, State& state, int row, float factor) {
  const auto work = k.recall();
  const auto element = Checkpoints<S>{.row = static_cast<uint32>(row)}.element(work.head, k.p.e);
  state.template store<S::STATE_V_FIRST>(factor * unit_of<S>(work), k.p.checkpoints + element);
}

}  // namespace wyvern::cuda::sm90
