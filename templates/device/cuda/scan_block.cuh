// What scans over the chunks of a sequence or a segment share, forwards (scan.cuh) and in reverse
// (reverse_scan.cuh).
#pragma once

#include "device/cuda/chunk.cuh"
#include "device/cuda/scan_layout.hpp"
#include "device/cuda/state.cuh"
#include "device/cuda/state_unit.cuh"

namespace wyvern::cuda {

/// The tokens of a scan: of one sequence, from a chunk's first on.
struct ScanRange {
  int64 token;
  int tokens;
  int head;  // value head
};

/// A block of a scan: BV columns of the state of one value head, or of its gradient. Each warp has
/// a part of them in registers. S is the kernel's Spec.
template <class S>
struct ScanBlock {
  using T = Element<S::DTYPE>;
  static constexpr int kThreads = S::num_warps * 32;
  static constexpr int kStrips = S::BV / 16 / S::num_warps;  // of sixteen columns, each warp
  static constexpr int kPaddedK = padded(S::K);
  static constexpr int kTilesV = ceil_div(S::V, S::BV);
  static constexpr bool kScaledKeys = S::QK_L2NORM && !S::VECTOR_GATE;

  /// A warp's columns of the state, transposed.
  using State = StateStrip<kPaddedK>[kStrips];
  /// The same columns of V' or dU of one chunk, transposed.
  using Values = Accumulator[kStrips][S::BT / 8];

  /// The head of these rows that a value head reads.
  WYVERN_DEVICE static int key_head(int head, const Extents& e) {
    return S::VECTOR_GATE ? head : e.key_head(head);
  }

  /// The warp's first column, of the block's.
  WYVERN_DEVICE static int warp_column() { return warp_index() * kStrips * 16; }

  /// Converts a state, or its gradient, to the unit of the scan, at least `least`, which depends on
  /// the whole state of the head: the K V elements at `entering`, times `scale`; null: zeros. All
  /// threads get the unit. Writes it for each chunk to `units`, of the scan's first one, where that
  /// is not null. `scratch` has a number for each warp.
  template <class Element>
  WYVERN_DEVICE static float enter_unit(float* scratch, State& state, const Element* entering,
                                        float scale, const ScanRange& range, const Extents& e,
                                        float* units, float least) {
    if constexpr (!S::STATE_UNIT) return 1.0f;
    const float unit = find_unit<S, kThreads>(entering, scale, scratch, least);
#pragma unroll
    for (int i = 0; i < kStrips; ++i)
      state[i].scale_channels([&](int) { return Float2{{1.0f / unit, 1.0f / unit}}; });
    if (units == nullptr) return unit;
    for (int i = thread_index(); i * S::BT < range.tokens; i += kThreads)
      units[int64{i} * e.HV + range.head] = unit;
    return unit;
  }

  /// Columns of V from `first` on, where that is not known to be enough for a strip.
  WYVERN_DEVICE static int columns_from(int first) {
    return S::V % S::BV == 0 ? S::BV : S::V - first;
  }

  /// Calls visit(k, v, element) for every element of the state that the lane holds and the tensor
  /// has (`width` columns), v counted over the tensor. The block's columns start at `tile`.
  template <class Visit>
  WYVERN_DEVICE static void for_each_element(State& state, int tile, int width, Visit&& visit) {
#pragma unroll
    for (int i = 0; i < kStrips; ++i)
      state[i].for_each([&](int row, int col, float& x) {
        const int v = tile + (warp_index() * kStrips + i) * 16 + col;
        if (row < S::K && v < width) visit(row, v, x);
      });
  }
};

/// The state's columns that a block has, counted from `first`: of values, or with none at all.
struct StateColumns {
  int first;
  bool values = true;
};

/// A scan by Scan, a ForwardScan or ReverseScan, that writes for each chunk the state that enters
/// it, or the gradient of the one that leaves it, from chunk slot `slot` on, and rows of values, V'
/// or dU. `shared`, `begin` and `update` are those of Scan::scan_chunks.
template <class Scan, class Begin, class... Update>
WYVERN_DEVICE void scan_and_store(unsigned char* shared, typename Scan::State& state,
                                  const typename Scan::Inputs& in, const ScanRange& range,
                                  int64 slot, int tile_v, typename Scan::T* states,
                                  typename Scan::T* rows_of_values, Begin&& begin,
                                  Update&&... update) {
  constexpr int K = Scan::K, V = Scan::V;
  const int first_v = tile_v + Scan::warp_column();
  Scan::scan_chunks(
      shared, state, in, range, StateColumns{tile_v}, begin,
      [&](int chunk, const typename Scan::State& at_border) {
        store_state<K, V>(states + ((slot + chunk) * in.e.HV + range.head) * K * V + first_v,
                          at_border, Scan::columns_from(first_v));
      },
      [&](int chunk, int rows, const typename Scan::Values& values) {
        const int64 row = (range.token + int64{chunk} * Scan::BT) * in.e.HV + range.head;
        store_rows<V>(rows_of_values + row * V + first_v, in.e.HV * V, values, rows,
                      Scan::columns_from(first_v));
      },
      update...);
}

}  // namespace wyvern::cuda
