// The consumer warpgroups of the backward pass's scans: 64 columns of V of a state, or of its
// gradient, in registers, what leaves them for each chunk, and initial and final states by
// scheduler. S is the kernel's Spec. Block is the kernel's ScanSteps; it also has
// staged_state(consumer), a tile, and recall(), itself, reloaded where registers are few.
#pragma once

#include "device/cuda/sm90/register_tile.cuh"
#include "device/cuda/sm90/scan_scheduler.cuh"
#include "device/cuda/sm90/state.cuh"
#include "device/cuda/sm90/tma.cuh"
#include "device/cuda/sm90/transposed_rows.cuh"

namespace wyvern::cuda::sm90 {

/// Columns of V of a block's consumer, from 64 `consumer`: the state transposed, and x, a chunk's
/// rows transposed.
template <class S, class Block>
struct ScanState {
  static constexpr bool kReverse = Block::kReverse;
  static constexpr int kColumns = 64, kPanels = S::BV / kColumns;
  using Type = Element<S::DTYPE>;
  using StateFragment = FragmentA<Type, S::K>;
  using RowFragment = FragmentA<Type, kColumns>;

  const Block& b;
  int consumer;
  Accumulator<S::K> state;
  Accumulator<kColumns> x;

  /// Calls act(offset, x) for each element and its offset in a state of K x Width, or of Width x K.
  template <int Width, bool VFirst, class Act>
  WYVERN_DEVICE void visit(Act&& act) {
    visit_state<Width, VFirst>(state, b.recall().tile * S::BV + consumer * kColumns, act);
  }

  WYVERN_DEVICE void sync() const { sync_named(1 + consumer, 128); }

  /// Waits until the last TMA store has read the staging tile.
  WYVERN_DEVICE void wait_staging() const {
    if (thread_index() % 128 == 0) bulk_wait_read<0>();
    sync();
  }
  /// Stores the staged state of a chunk.
  template <class Params>
  WYVERN_DEVICE void send_state(int step, const Params& p) const {
    if (thread_index() % 128 != 0) return;
    const Block block = b.recall();
    tensor_store(states_map<kReverse>(p),
                 {0, (kPanels * block.tile + consumer) * kColumns, 0, block.place(step)},
                 b.staged_state(consumer).data);
    bulk_commit();
  }

  /// Starts x = state keys^T of the rounded state; meanwhile stores it, if there is an output.
  template <bool Output, class Tile, class Params>
  WYVERN_DEVICE void multiply_state(const StateFragment& packed, const Tile& keys, int step,
                                    const Params& p) {
    start_product(x, packed, rows_of(keys));
    if constexpr (Output) {
      wait_staging();
      store_fragment(b.staged_state(consumer), packed);
      fence_proxy_async();
      sync();
      send_state(step, p);
    }
  }

  /// Where a chunk's rows are staged, after the state has left.
  WYVERN_DEVICE SwizzledTile<Type, kColumns, kColumns> staged_rows() const {
    return {b.staged_state(consumer).data};
  }
  /// From an accumulator, or rounded already.
  template <class Rows>
  WYVERN_DEVICE void stage_rows(const Rows& rows) const {
    wait_staging();
    store_transposed(staged_rows(), RowFragment(rows));
    fence_proxy_async();
  }
  /// Stores the staged rows: Z by TMA, since past a sequence's end its keys and values are 0; dV
  /// row by row where the sequence ends in the chunk.
  template <class Params>
  WYVERN_DEVICE void send_rows(int step, const Params& p) const {
    sync();
    if constexpr (kReverse) {
      const Block block = b.recall();
      store_rows(p.dv_map, {p.dv, int64{block.heads} * S::V}, staged_rows(), block.first_row(step),
                 block.rows(step), kPanels * block.tile + consumer, block.head, S::V);
    } else {
      if (thread_index() % 128 != 0) return;
      const Block block = b.recall();
      tensor_store(p.z_map, {0, block.place(step) * kColumns, kPanels * block.tile + consumer, 0},
                   staged_rows().data);
      bulk_commit();
    }
  }
};

// ---- initial and final states -------------------------------------------------------------------

template <class Scheduler>
struct ScanStateIo;

/// The block's sequence and head in a tensor of states.
template <class S, class Scan>
WYVERN_DEVICE int64 state_place(const Scan& k) {
  const auto work = k.work.recall();
  return (int64{work.sequence} * work.heads + work.head) * S::K * S::V;
}

/// The gradient of the state that leaves the block's sequence.
template <class S, class Scan, class State>
WYVERN_DEVICE void load_dht(const Scan& k, State& state) {
  if constexpr (S::FINAL_STATE)
    state.template visit<S::V, S::STATE_V_FIRST>(
        [from = k.p.dht + state_place<S>(k)](int offset, float& x) { x = from[offset]; });
}

template <class S>
struct ScanStateIo<WholeScans<S>> {
  template <class Scan, class State>
  WYVERN_DEVICE static void load(const Scan& k, State& state) {
    if constexpr (Scan::kReverse) load_dht<S>(k, state);
    if constexpr (!Scan::kReverse && S::INITIAL_STATE)
      state.template visit<S::V, S::STATE_V_FIRST>(
          [from = k.p.initial_state + state_place<S>(k)](int offset, float& x) {
            x = opaque(to_float(from[offset]));
          });
  }

  template <class Scan, class State>
  WYVERN_DEVICE static void store(const Scan& k, State& state) {
    if constexpr (Scan::kReverse && S::INITIAL_STATE)
      state.template visit<S::V, S::STATE_V_FIRST>(
          [to = k.p.dinitial_state + state_place<S>(k)](int offset, float& x) { to[offset] = x; });
  }
};

template <class S>
struct ScanStateIo<WholeReverseScans<S>> : ScanStateIo<WholeScans<S>> {};

template <class S>
struct ScanStateIo<SummaryScans<S>> {
  template <class Scan, class State>
  WYVERN_DEVICE static void load(const Scan& k, State& state) {
    load_dht<S>(k, state);
  }

  template <class Scan, class State>
  WYVERN_DEVICE static void store(const Scan& k, State& state) {
    state.template visit<S::V, false>(
        [to = k.p.dsummary + state_place<S>(k)](int offset, float& x) { to[offset] = x; });
  }
};

template <class S>
struct ScanStateIo<ResumeScans<S>> {
  template <class Scan, class State>
  WYVERN_DEVICE static void load(const Scan& k, State& state) {
    const float* states;
    if constexpr (Scan::kReverse)
      states = k.p.segment_dstate;
    else
      states = k.p.segment_state;
    const int64 place = ResumeScans<S>::template place<Scan>();
    state.template visit<S::V, false>(
        [from = states + place * S::K * S::V](int offset, float& x) { x = from[offset]; });
  }

  template <class Scan, class State>
  WYVERN_DEVICE static void store(const Scan& k, State& state) {
    if constexpr (Scan::kReverse && S::INITIAL_STATE)
      if (k.work.recall().first) ScanStateIo<WholeScans<S>>::store(k, state);
  }
};

template <class S>
struct ScanStateIo<ReverseResumeScans<S>> : ScanStateIo<ResumeScans<S>> {};

template <class S>
struct ScanStateIo<SegmentMaps<S>> {
  template <class Scan, class State>
  WYVERN_DEVICE static void load(const Scan& k, State& state) {
    if constexpr (!Scan::kReverse)
      if (k.work.recall().zero_v)
        state.template visit<S::K, false>(
            [](int offset, float& x) { x = offset / S::K == offset % S::K ? 1.0f : 0.0f; });
  }

  template <class Scan, class State>
  WYVERN_DEVICE static void store(const Scan& k, State& state) {
    const auto work = k.work.recall();
    if constexpr (Scan::kReverse) {
      state.template visit<S::V, false>(
          [to = k.p.share_dR + work.slot * S::K * S::V](int offset, float& x) { to[offset] = x; });
    } else if (work.zero_v) {
      if constexpr (!S::SUMMARY)
        if (!work.last) store_M<false>(state, k.p.share_M + work.slot * S::K * S::K);
      if (S::SUMMARY || !k.work.recall().first)
        store_M<true>(state, k.p.share_dM + k.work.recall().slot * S::K * S::K);
    } else {
      state.template visit<S::V, false>(
          [to = k.p.share_R + work.slot * S::K * S::V](int offset, float& x) { to[offset] = x; });
    }
  }

 private:
  /// M, or as dM its transpose.
  template <bool Transposed, class State>
  WYVERN_DEVICE static void store_M(State& state, float* to) {
    state.template visit<S::K, Transposed>(
        [to](int offset, float& x) { to[offset] = element_of_M(x); });
  }
};

}  // namespace wyvern::cuda::sm90
