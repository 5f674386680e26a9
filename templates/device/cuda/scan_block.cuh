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
/// a part of them in registers, or shares them with the next warp: both then have half of the keys,
/// and of a chunk's rows. S is the kernel's Spec.
template <class S>
struct ScanBlock {
  using T = Element<S::DTYPE>;
  static constexpr int kThreads = S::num_warps * 32;
  static constexpr int kParts = key_parts(S{});
  static_assert(kParts <= 2);
  static constexpr int kStrips = S::BV / 16 * kParts / S::num_warps;  // of sixteen columns, a warp
  static constexpr int kPaddedK = padded(S::K);
  static constexpr int kKeys = kPaddedK / kParts;  // of a warp
  static constexpr int kRows = S::BT / kParts;     // of a chunk, whose values a warp computes
  static constexpr int kTilesV = ceil_div(S::V, S::BV);
  static constexpr bool kScaledKeys = S::QK_L2NORM && !S::VECTOR_GATE;

  /// A warp's columns of the state, transposed.
  using State = StateStrip<kKeys>[kStrips];
  /// The same columns of V' or dU of its rows of one chunk, transposed.
  using Values = Accumulator[kStrips][kRows / 8];

  /// The head of these rows that a value head reads.
  WYVERN_DEVICE static int key_head(int head, const Extents& e) {
    return S::VECTOR_GATE ? head : e.key_head(head);
  }

  /// The warp's first column, of the block's; its first key; its first row of a chunk.
  WYVERN_DEVICE static int warp_column() { return warp_index() / kParts * kStrips * 16; }
  WYVERN_DEVICE static int warp_key() { return warp_index() % kParts * kKeys; }
  WYVERN_DEVICE static int warp_row() { return warp_index() % kParts * kRows; }

  /// A tile of a chunk's keys, queries or W from the warp's keys on; Rows of its rows from `row`
  /// on.
  template <int Rows>
  WYVERN_DEVICE static Tile<T, Rows, kPaddedK> warp_keys(const Tile<T, S::BT, kPaddedK>& tile,
                                                         int row = 0) {
    return {tile.at(row, warp_key())};
  }

  /// Waits for the warp with which this one shares columns, if any.
  WYVERN_DEVICE static void sync_pair() {
    if constexpr (kParts > 1) sync_named(1 + warp_index() / 2, 64);
  }

  /// Of each warp the sums of rows that it hands its neighbour.
  WYVERN_DEVICE static float* handed_sum(float* sums, int warp, int strip, int n) {
    return sums + (((warp * kStrips + strip) * (kRows / 8) + n) * 32 + lane_index()) * 4;
  }

  /// values += S^T x^T for the warp's rows of x, over the warp's keys; and for its neighbour's
  /// rows, to `sums`. The state enters as the sum of Numbers numbers of T.
  template <int Numbers>
  WYVERN_DEVICE static void start_rows(Values& values, const State& state,
                                       const Tile<T, S::BT, kPaddedK>& x, float* sums) {
    if constexpr (kParts == 1) {
      multiply_rows<S::precision, Numbers>(values, state, x);
    } else {
      static_assert(Numbers == 1);
      Values others;
      const auto own = warp_keys<kRows>(x, warp_row()),
                 other = warp_keys<kRows>(x, kRows - warp_row());
#pragma unroll
      for (int step = 0; step < kKeys / 16; ++step) {
        FragmentA<T> a[kStrips];
#pragma unroll
        for (int i = 0; i < kStrips; ++i) a[i] = fragment_a<T>(state[i].accumulator, step);
#pragma unroll
        for (int n = 0; n < kRows / 8; n += 2) {
          const auto b_other = load_b_transposed(other, step * 16, n * 8);
          const auto b_own = load_b_transposed(own, step * 16, n * 8);
#pragma unroll
          for (int i = 0; i < kStrips; ++i) {
            multiply<S::precision>(others[i][n], others[i][n + 1], a[i], b_other);
            multiply<S::precision>(values[i][n], values[i][n + 1], a[i], b_own);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kStrips; ++i)
#pragma unroll
        for (int n = 0; n < kRows / 8; ++n) {
          const float* const sum = others[i][n].x;
          store_vector<true>(handed_sum(sums, warp_index(), i, n),
                             Vector<float, 4>{{sum[0], sum[1], sum[2], sum[3]}});
        }
    }
  }

  /// After start_rows() and sync_pair(): values += what the neighbour found for them.
  WYVERN_DEVICE static void finish_rows(Values& values, float* sums) {
    if constexpr (kParts > 1)
#pragma unroll
      for (int i = 0; i < kStrips; ++i)
#pragma unroll
        for (int n = 0; n < kRows / 8; ++n) {
          const auto sum = load<4>(handed_sum(sums, warp_index() ^ 1, i, n));
#pragma unroll
          for (int j = 0; j < 4; ++j) values[i][n].x[j] += sum.at[j];
        }
  }

  /// Sixteen rows of sixteen columns of a tile, which the warp alone has read, as the place of the
  /// A fragment of what was made of them: for the warp with which it shares the columns.
  template <class Tile>
  WYVERN_DEVICE static auto* fragment_place(const Tile& tile, int row, int col) {
    return reinterpret_cast<Vector<uint32, 4>*>(
        tile.at(row + lane_index() % 16, col + lane_index() / 16 * 8));
  }
  template <class Tile>
  WYVERN_DEVICE static void hand_fragment(const Tile& tile, int row, int col,
                                          const FragmentA<T>& a) {
    sync_warp();  // all lanes have read the tile
    *fragment_place(tile, row, col) = {{a.r[0], a.r[1], a.r[2], a.r[3]}};
  }
  template <class Tile>
  WYVERN_DEVICE static FragmentA<T> handed_fragment(const Tile& tile, int row, int col) {
    const Vector<uint32, 4> words = *fragment_place(tile, row, col);
    return {{words.at[0], words.at[1], words.at[2], words.at[3]}};
  }

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
      state[i].for_each([&](int key, int col, float& x) {
        const int row = warp_key() + key;
        const int v = tile + warp_column() + i * 16 + col;
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
